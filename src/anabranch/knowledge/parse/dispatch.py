"""A file's way to the reader of its kind."""

from typing import assert_never

from anabranch.knowledge.parse.clean import line
from anabranch.knowledge.parse.csv_tables import read_csv
from anabranch.knowledge.parse.docx import read_docx
from anabranch.knowledge.parse.encoding import decode
from anabranch.knowledge.parse.file_types import binary_kind, suffix_of, textual_kind
from anabranch.knowledge.parse.html import read_html
from anabranch.knowledge.parse.json_records import looks_like_json, read_json, read_jsonl
from anabranch.knowledge.parse.limits import ParseLimits, check_size
from anabranch.knowledge.parse.markdown import read_markdown
from anabranch.knowledge.parse.pdf import read_pdf
from anabranch.knowledge.parse.plain_text import read_prose
from anabranch.knowledge.parsed import Parsed, Unprocessable


def parse(data: bytes, filename: str | None, limits: ParseLimits, media_type: str | None = None) -> Parsed:
    """What a file says, or Unprocessable with what a person can do about it."""
    if not data:
        raise Unprocessable("The file is empty.")
    check_size(data, limits)
    suffix = suffix_of(filename)
    parsed = _read(data, suffix, line(media_type), limits)
    if not parsed.blocks:
        raise Unprocessable("The file holds no text.")
    return parsed


def _read(data: bytes, suffix: str, media_type: str | None, limits: ParseLimits) -> Parsed:
    kind = binary_kind(data, suffix)
    match kind:
        case "pdf":
            return read_pdf(data, limits)
        case "docx":
            return read_docx(data, limits)
        case None:
            return _read_text(decode(data, media_type), suffix, media_type, limits)
        case _:
            assert_never(kind)


def _read_text(text: str, suffix: str, media_type: str | None, limits: ParseLimits) -> Parsed:
    if not text.strip():
        raise Unprocessable("The file holds no text.")
    kind = textual_kind(text, suffix, media_type)
    match kind:
        case "html":
            return read_html(text, limits)
        case "markdown":
            return read_markdown(text, limits)
        case "csv":
            return read_csv(text, limits, "\t" if suffix in (".tsv", ".tab") else None)
        case "json":
            return read_json(text, limits)
        case "jsonl":
            return read_jsonl(text, limits)
        case "text":
            return read_prose(text, limits)
        case None:
            return _read_unnamed(text, limits)
        case _:
            assert_never(kind)


def _read_unnamed(text: str, limits: ParseLimits) -> Parsed:
    if looks_like_json(text):
        try:
            return read_json(text, limits)
        except Unprocessable:
            pass
    return read_prose(text, limits)
