"""Decoding: by byte order mark, as UTF-8, by declared charset, else by detection."""

import codecs
import re

from anabranch.knowledge.parse.builder import clean
from anabranch.knowledge.parsed import Unprocessable

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED = re.compile(rb"""<(?:meta\b|\?xml\b)[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?\s*([a-zA-Z0-9_:-]{2,40})""")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([a-zA-Z0-9_:-]{2,40})", re.IGNORECASE)
# Most common first: for short texts several are equally likely.
_LIKELY = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949", "mac_roman"),
)
_SAMPLE = 64 * 1024
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\x0b\x0c\r\x1a\x1b"))
_NOT_TEXT = "The file is not text, nor of a kind that can be read. Save it as PDF, DOCX, HTML, Markdown or UTF-8 text."


def decode(data: bytes, media_type: str | None = None) -> str:
    """The cleaned text of the bytes, without byte order mark."""
    return clean(_decode(data, media_type))


def _decode(data: bytes, media_type: str | None) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace")
    if b"\0" in data:
        return _wide(data)
    if _share(data, _CONTROLS) > 0.05:
        raise Unprocessable(_NOT_TEXT)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    declared = _declared(data, media_type)
    return data.decode(declared, "replace") if declared else _guessed(data)


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


def _declared(data: bytes, media_type: str | None) -> str | None:
    head = data[:2048]
    found = _CHARSET.search(media_type or "")
    named = found[1] if found else None
    if named is None and (declared := _DECLARED.search(head.lower())):
        named = declared[1].decode("ascii")
    if named is None:
        return None
    try:
        # A wrong declaration is ignored; codecs that are not text encodings (hex) are refused.
        b"text".decode(named)
        data.decode(named)
    except (LookupError, UnicodeError, ValueError):
        return None
    return named


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


def _share(data: bytes, of: bytes) -> float:
    head = data[:_SAMPLE]
    return (len(head) - len(head.translate(None, of))) / len(head) if head else 0.0
