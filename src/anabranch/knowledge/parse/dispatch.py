"""Detects the format of a file and calls its reader."""

import re
from collections.abc import Callable, Mapping

from anabranch.knowledge.parse.builder import ParseLimits, check_blocks, check_size, check_text, line
from anabranch.knowledge.parse.csv_tables import read_csv
from anabranch.knowledge.parse.docx import read_docx
from anabranch.knowledge.parse.encoding import decode
from anabranch.knowledge.parse.file_types import Binary, Textual, binary_kind, suffix_of, textual_kind
from anabranch.knowledge.parse.html import read_html
from anabranch.knowledge.parse.json_records import looks_like_json, read_json, read_jsonl
from anabranch.knowledge.parse.markdown import read_markdown
from anabranch.knowledge.parse.pdf import read_pdf
from anabranch.knowledge.parsed import Block, Parsed, Unprocessable

_BLANK = re.compile(r"\n\s*\n|\Z")


def read_plain_text(text: str, limits: ParseLimits) -> Parsed:
    """Plain text: paragraphs are separated by blank lines."""
    check_text(len(text), limits)
    blocks = []
    at = 0
    for gap in _BLANK.finditer(text):
        words = text[at : gap.start()]
        start, end = at + len(words) - len(words.lstrip()), at + len(words.rstrip())
        if start < end:
            blocks.append(Block(start=start, end=end))
            check_blocks(len(blocks))
        at = gap.end()
    return Parsed(text=text, blocks=tuple(blocks))


_BINARY_READERS: Mapping[Binary, Callable[[bytes, ParseLimits], Parsed]] = {"pdf": read_pdf, "docx": read_docx}
_TEXT_READERS: Mapping[Textual, Callable[[str, ParseLimits], Parsed]] = {
    "html": read_html,
    "markdown": read_markdown,
    "csv": read_csv,
    "json": read_json,
    "jsonl": read_jsonl,
    "text": read_plain_text,
}


def parse(data: bytes, filename: str | None, limits: ParseLimits, media_type: str | None = None) -> Parsed:
    """The text and structure of a file; Unprocessable says why it cannot be read and what to do."""
    if not data:
        raise Unprocessable("The file is empty.")
    check_size(data, limits)
    parsed = _read(data, suffix_of(filename), line(media_type), limits)
    if not parsed.blocks:
        raise Unprocessable("The file holds no text.")
    return parsed


def _read(data: bytes, suffix: str, media_type: str | None, limits: ParseLimits) -> Parsed:
    binary = binary_kind(data, suffix)
    if binary is not None:
        return _BINARY_READERS[binary](data, limits)
    text = decode(data, media_type)
    if not text.strip():
        raise Unprocessable("The file holds no text.")
    kind = textual_kind(text, suffix, media_type)
    if kind == "csv" and suffix in (".tsv", ".tab"):
        return read_csv(text, limits, "\t")
    if kind is not None:
        return _TEXT_READERS[kind](text, limits)
    if looks_like_json(text):
        try:
            return read_json(text, limits)
        except Unprocessable:
            pass
    return read_plain_text(text, limits)
