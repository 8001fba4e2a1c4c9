"""Detects the type and the encoding of a file and calls its parser."""

import codecs
import io
import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import PurePosixPath

from anabranch.knowledge.model import Block, Parsed, Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits, check_blocks, check_size, check_text, clean, line
from anabranch.knowledge.parse.csv_tables import read_csv
from anabranch.knowledge.parse.docx import read_docx
from anabranch.knowledge.parse.html import read_html
from anabranch.knowledge.parse.json_records import looks_like_json, read_json, read_jsonl
from anabranch.knowledge.parse.markdown import read_markdown
from anabranch.knowledge.parse.pdf import read_pdf

TextReader = Callable[[str, ParseLimits], Parsed]
BinaryReader = Callable[[bytes, ParseLimits], Parsed]

_BLANK_LINE = re.compile(r"\n\s*\n|\Z")


def read_plain_text(text: str, limits: ParseLimits) -> Parsed:
    """Plain text: paragraphs are separated by blank lines."""
    check_text(len(text), limits)
    blocks = []
    at = 0
    for gap in _BLANK_LINE.finditer(text):
        words = text[at : gap.start()]
        start, end = at + len(words) - len(words.lstrip()), at + len(words.rstrip())
        if start < end:
            blocks.append(Block(start=start, end=end))
            check_blocks(len(blocks))
        at = gap.end()
    return Parsed(text=text, blocks=tuple(blocks))


_SUFFIXES: Mapping[str, TextReader] = {
    ".html": read_html,
    ".htm": read_html,
    ".xhtml": read_html,
    ".md": read_markdown,
    ".markdown": read_markdown,
    ".mdx": read_markdown,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".tab": partial(read_csv, delimiter="\t"),
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".txt": read_plain_text,
    ".text": read_plain_text,
    ".log": read_plain_text,
    ".rst": read_plain_text,
}
_MEDIA_TYPES: Mapping[str, TextReader] = {
    "text/html": read_html,
    "application/xhtml+xml": read_html,
    "text/markdown": read_markdown,
    "text/x-markdown": read_markdown,
    "text/csv": read_csv,
    "text/tab-separated-values": read_csv,
    "application/json": read_json,
    "application/x-ndjson": read_jsonl,
    "application/jsonl": read_jsonl,
    "text/plain": read_plain_text,
}
_NEVER_TEXT = re.compile(
    r"\.(?:pdf|docx|docm|dotx|doc|xls|xlsx|ppt|pptx|odt|ods|odp|epub|zip|gz|7z|rar|tar|png|jpg|jpeg|gif|tif|tiff|bmp|webp|"
    r"heic|mp3|mp4|mov|avi|wav|exe|dll|so|sqlite|db|parquet)"
)
_OCR = "Turn it into a PDF with text (for instance with ocrmypdf)"
_UNPACK = "Unpack it and ingest the files in it"
_TO_PDF = "Save it as PDF or DOCX"
_TO_CSV = "Save each sheet as CSV"
_TRANSCRIBE = "Ingest its transcript as text"
_EXPORT = "Export it as CSV or JSONL"
_NO_DOCUMENT = "Ingest a document"

_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", _OCR),
    (0, b"\xff\xd8\xff", "a JPEG image", _OCR),
    (0, b"GIF87a", "a GIF image", _OCR),
    (0, b"GIF89a", "a GIF image", _OCR),
    (0, b"II*\x00", "a TIFF image", _OCR),
    (0, b"MM\x00*", "a TIFF image", _OCR),
    (8, b"WEBP", "a WebP image", _OCR),
    (4, b"ftypheic", "a HEIC image", _OCR),
    (4, b"ftyp", "a video or audio file", _TRANSCRIBE),
    (8, b"WAVE", "a WAV recording", _TRANSCRIBE),
    (8, b"AVI ", "an AVI video", _TRANSCRIBE),
    (0, b"ID3", "an MP3 recording", _TRANSCRIBE),
    (0, b"OggS", "an Ogg recording", _TRANSCRIBE),
    (0, b"fLaC", "a FLAC recording", _TRANSCRIBE),
    (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM video", _TRANSCRIBE),
    (0, b"\x1f\x8b", "a gzip archive", _UNPACK),
    (0, b"BZh", "a bzip2 archive", _UNPACK),
    (0, b"\xfd7zXZ\x00", "an xz archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"\x7fELF", "a program", _NO_DOCUMENT),
    (0, b"\xca\xfe\xba\xbe", "a program", _NO_DOCUMENT),
    (0, b"\xcf\xfa\xed\xfe", "a program", _NO_DOCUMENT),
    (0, b"SQLite format 3\x00", "an SQLite database", _EXPORT),
    (0, b"PAR1", "a Parquet table", _EXPORT),
)
_WRITTEN = ((b"{\\rtf", "an RTF document", _TO_PDF), (b"%!PS", "a PostScript file", "Save it as PDF"))
_ZIPPED: tuple[tuple[str, str, str], ...] = (
    ("xl/", "an Excel workbook", _TO_CSV),
    ("ppt/", "a PowerPoint presentation", "Save it as PDF"),
    ("META-INF/container.xml", "an EPUB book", "Save it as PDF, HTML or DOCX"),
    ("META-INF/manifest.xml", "an OpenDocument file", _TO_PDF),
)
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_OLE_STREAMS: tuple[tuple[str, str, str], ...] = (
    ("WordDocument", "a Word document of the old .doc format", "Save it as DOCX"),
    ("Workbook", "an Excel workbook of the old .xls format", _TO_CSV),
    ("PowerPoint Document", "a PowerPoint presentation of the old .ppt format", "Save it as PDF"),
    ("__properties_version1.0", "an Outlook message", "Save it as text or HTML"),
)
_HTML = re.compile(r"<(?:!doctype\s+html|html|head|body)[\s>]", re.IGNORECASE)


def suffix_of(filename: str | None) -> str:
    """The lower-case suffix, the only part of a file name that is used."""
    name = (filename or "").replace("\\", "/").replace("\x00", "")[-255:]
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if re.fullmatch(r"\.[a-z0-9_+-]{1,16}", suffix) else ""


def binary_reader(data: bytes, suffix: str) -> BinaryReader | None:
    """The reader of PDF or DOCX; None if it may be text. Other formats are refused by name."""
    head = data[:1024]
    if head.lstrip(b"\xef\xbb\xbf \t\r\n\x00").startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in head):
        return read_pdf
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _archive_reader(data, suffix)
    if data.startswith(_OLE):
        raise _ole_refusal(data, suffix)
    for magic, what, remedy in _WRITTEN:
        if data.startswith(magic):
            raise _refusal(what, remedy, suffix)
    for offset, magic, what, remedy in _MAGIC:
        # A text may begin with "ID3": a magic number of ASCII letters counts only if the rest is not text either.
        if data.startswith(magic, offset) and not (magic.isascii() and b"\0" not in data[:4096]):
            raise _refusal(what, remedy, suffix)
    return None


def text_reader(text: str, suffix: str, media_type: str | None) -> TextReader | None:
    """The reader of the text format by content, suffix or media type; None if all are unknown."""
    if _is_html(text):
        return read_html
    if _NEVER_TEXT.fullmatch(suffix):
        article = "an" if suffix[1] in "aehilmnorsx" else "a"
        raise Unprocessable(
            f"The file is named {suffix}, but is not {article} {suffix[1:].upper()}; "
            "it looks like plain text. If it is, give it a suffix that fits, such as .txt, .md, .csv or .json."
        )
    return _SUFFIXES.get(suffix) or _MEDIA_TYPES.get((media_type or "").partition(";")[0].strip().lower())


def _is_html(text: str) -> bool:
    head = text[:8192].lstrip()
    while head.startswith(("<!--", "<?")):
        head = head.partition("-->" if head.startswith("<!--") else ">")[2].lstrip()
    return _HTML.match(head) is not None


def _archive_reader(data: bytes, suffix: str) -> BinaryReader:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, IndexError):
        raise Unprocessable(
            "The file begins like a ZIP archive (as DOCX files do) but is damaged. Save or copy it again."
        ) from None
    if any(name.startswith("word/document") and name.endswith(".xml") for name in names):
        return read_docx
    kinds = ((what, remedy) for prefix, what, remedy in _ZIPPED if any(name.startswith(prefix) for name in names))
    raise _refusal(*next(kinds, ("a ZIP archive", _UNPACK)), suffix)


def _ole_refusal(data: bytes, suffix: str) -> Unprocessable:
    if "EncryptedPackage".encode("utf-16-le") in data:
        return Unprocessable("The document is encrypted with a password. Save it without one and ingest it again.")
    kinds = ((what, remedy) for stream, what, remedy in _OLE_STREAMS if stream.encode("utf-16-le") in data)
    return _refusal(*next(kinds, ("an old Microsoft Office file", _TO_PDF)), suffix)


def _refusal(what: str, remedy: str, suffix: str) -> Unprocessable:
    if suffix in (".pdf", ".docx"):
        named = f"is named {suffix}, but is not a {suffix[1:].upper()}; it looks like {what}"
        return Unprocessable(f"The file {named}. {remedy}.")
    return Unprocessable(f"The file looks like {what}, which is not supported. {remedy}.")


_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED = re.compile(r"""<(?:meta\b|\?xml\b)[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?\s*([a-zA-Z0-9_:-]{2,40})""")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([a-zA-Z0-9_:-]{2,40})", re.IGNORECASE)
# Most common first: for short texts several are equally likely.
_LIKELY = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949", "mac_roman"),
)
_SAMPLE = 64 * 1024
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\x0b\x0c\r\x1a\x1b"))
_NOT_TEXT = "The file is not text, nor of a kind that can be read. Save it as PDF, DOCX, HTML, Markdown or UTF-8 text."


def _decode(data: bytes, media_type: str | None) -> str:
    """The text of the bytes, without byte order mark."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    if b"\0" in data:
        return _wide(data)
    head = data[:_SAMPLE]
    if len(head) - len(head.translate(None, _CONTROLS)) > 0.05 * len(head):
        raise Unprocessable(_NOT_TEXT)
    with suppress(UnicodeDecodeError):
        return data.decode("utf-8")
    return _decoded_as_declared(data, media_type) or _guessed(data)


def _wide(data: bytes) -> str:
    """UTF-16 without byte order mark: in Western text every second byte is zero."""
    even, odd = data[0:_SAMPLE:2].count(0), data[1:_SAMPLE:2].count(0)
    half = len(data[:_SAMPLE]) / 2
    encoding = "utf-16-le" if odd > 0.4 * half > even * 8 else "utf-16-be" if even > 0.4 * half > odd * 8 else None
    if encoding is None:
        if data.count(0) <= 1 + len(data) // 1000:  # a stray NUL in a text
            return _decode(data.replace(b"\0", b""), None)
        raise Unprocessable(_NOT_TEXT)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        raise Unprocessable(_NOT_TEXT) from None
    if "\0" in text:
        raise Unprocessable(_NOT_TEXT)
    return text


def _decoded_as_declared(data: bytes, media_type: str | None) -> str | None:
    """The text in the encoding that the media type or the file declares; None if it declares none or a wrong one."""
    declared = _CHARSET.search(media_type or "") or _DECLARED.search(data[:2048].decode("latin-1").lower())
    if declared is not None:
        with suppress(LookupError, UnicodeError, ValueError):
            return data.decode(declared[1])
    return None


def _guessed(data: bytes) -> str:
    from charset_normalizer import from_bytes  # noqa: PLC0415

    telling = b"\n".join(part for part in data.split(b"\n") if not part.isascii())[:_SAMPLE]
    order = {encoding: place for place, encoding in enumerate(_LIKELY)}
    found = list(from_bytes(telling, cp_isolation=list(_LIKELY), enable_fallback=False))
    if not found:
        raise Unprocessable("The file's character encoding cannot be detected. Save it as UTF-8 and ingest it again.")
    best = min(
        found, key=lambda match: (round(match.chaos, 2), -round(match.coherence, 2), order.get(match.encoding, 99))
    )
    return data.decode(best.encoding, "replace")


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
    read_binary = binary_reader(data, suffix)
    if read_binary is not None:
        return read_binary(data, limits)
    text = clean(_decode(data, media_type))
    if not text.strip():
        raise Unprocessable("The file holds no text.")
    read_text = text_reader(text, suffix, media_type)
    if read_text is not None:
        return read_text(text, limits)
    if looks_like_json(text):
        with suppress(Unprocessable):
            return read_json(text, limits)
    return read_plain_text(text, limits)
