"""Detects the file type by content first, and by name only if the content is ambiguous."""

import io
import re
import zipfile
from pathlib import PurePosixPath
from typing import Literal

from anabranch.knowledge.parsed import Unprocessable

Binary = Literal["pdf", "docx"]
Textual = Literal["html", "markdown", "csv", "json", "jsonl", "text"]

_SUFFIXES: dict[str, Textual] = {
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".mdx": "markdown",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".log": "text",
    ".rst": "text",
}
_MEDIA_TYPES: dict[str, Textual] = {
    "text/html": "html",
    "application/xhtml+xml": "html",
    "text/markdown": "markdown",
    "text/x-markdown": "markdown",
    "text/csv": "csv",
    "text/tab-separated-values": "csv",
    "application/json": "json",
    "application/x-ndjson": "jsonl",
    "application/jsonl": "jsonl",
    "text/plain": "text",
}
_NEVER_TEXT_NAMES = (
    ".pdf .docx .docm .dotx .doc .xls .xlsx .ppt .pptx .odt .ods .odp .epub .zip .gz .7z .rar .tar .png .jpg .jpeg "
    ".gif .tif .tiff .bmp .webp .heic .mp3 .mp4 .mov .avi .wav .exe .dll .so .sqlite .db .parquet"
)
_NEVER_TEXT = frozenset(_NEVER_TEXT_NAMES.split())
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


def binary_kind(data: bytes, suffix: str) -> Binary | None:
    """PDF or DOCX; None if it may be text. Other formats are refused by name."""
    head = data[:1024]
    if head.lstrip(b"\xef\xbb\xbf \t\r\n\x00").startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in head):
        return "pdf"
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zipped(data, suffix)
    if data.startswith(_OLE):
        _refuse_ole(data, suffix)
    for magic, what, remedy in _WRITTEN:
        if data.startswith(magic):
            raise _refusal(what, remedy, suffix)
    for offset, magic, what, remedy in _MAGIC:
        # A text may begin with "ID3": a magic number of ASCII letters counts only if the rest is not text either.
        if data.startswith(magic, offset) and not (magic.isascii() and b"\0" not in data[:4096]):
            raise _refusal(what, remedy, suffix)
    return None


def textual_kind(text: str, suffix: str, media_type: str | None) -> Textual | None:
    """The text format by content, suffix or media type; None if all are unknown."""
    if _is_html(text):
        return "html"
    if suffix in _NEVER_TEXT:
        raise Unprocessable(
            f"The file is named {suffix}, but is not {_article(suffix)} {suffix[1:].upper()}; "
            "it looks like plain text. If it is, give it a suffix that fits, such as .txt, .md, .csv or .json."
        )
    plain_type = (media_type or "").partition(";")[0].strip().lower()
    return _SUFFIXES.get(suffix) or _MEDIA_TYPES.get(plain_type)


def _is_html(text: str) -> bool:
    head = text[:8192].lstrip()
    while head.startswith(("<!--", "<?")):
        head = head.partition("-->" if head.startswith("<!--") else ">")[2].lstrip()
    return _HTML.match(head) is not None


def _article(suffix: str) -> str:
    return "an" if suffix[1] in "aehilmnorsx" else "a"


def _zipped(data: bytes, suffix: str) -> Binary:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, IndexError):
        raise Unprocessable(
            "The file begins like a ZIP archive (as DOCX files do) but is damaged. Save or copy it again."
        ) from None
    if any(name.startswith("word/document") and name.endswith(".xml") for name in names):
        return "docx"
    for prefix, what, remedy in _ZIPPED:
        if any(name.startswith(prefix) for name in names):
            raise _refusal(what, remedy, suffix)
    raise _refusal("a ZIP archive", _UNPACK, suffix)


def _refuse_ole(data: bytes, suffix: str) -> None:
    if "EncryptedPackage".encode("utf-16-le") in data:
        raise Unprocessable("The document is encrypted with a password. Save it without one and ingest it again.")
    for stream, what, remedy in _OLE_STREAMS:
        if stream.encode("utf-16-le") in data:
            raise _refusal(what, remedy, suffix)
    raise _refusal("an old Microsoft Office file", _TO_PDF, suffix)


def _refusal(what: str, remedy: str, suffix: str) -> Unprocessable:
    if suffix in (".pdf", ".docx"):
        named = f"is named {suffix}, but is not a {suffix[1:].upper()}; it looks like {what}"
        return Unprocessable(f"The file {named}. {remedy}.")
    return Unprocessable(f"The file looks like {what}, which is not supported. {remedy}.")
