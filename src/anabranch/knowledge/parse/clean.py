"""Which characters a text may hold, and how a line of metadata is written."""

import re
from contextlib import suppress
from datetime import date, datetime

LINE_LIMIT = 300
DAY_LIMIT = 64

_LINE_END = re.compile("\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_UNWANTED = re.compile("[\x00-\x08\x0e-\x1f\x7f\ufeff\ufffe\uffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAY = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?!\d)|(?:D:)?(\d{4})(\d\d)(\d\d)(?:\d{4,}|(?!\d))")
_SPELLINGS = ("%a, %d %b %Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y")


def clean(text: str) -> str:
    """Lines end with \\n; no byte order marks, no halves of characters, no controls but \\n and \\t."""
    text = _LINE_END.sub("\n", text)
    text = _UNWANTED.sub("", text)
    return _SURROGATE.sub("\ufffd", text)


def line(text: str | None, limit: int = LINE_LIMIT) -> str | None:
    """A single line of at most `limit` characters, or nothing."""
    if not text:
        return None
    words = " ".join(clean(text[: limit * 8]).split())
    return words if len(words) <= limit else words[: limit - 1].rstrip() + "…"


def day(text: str | None) -> str | None:
    """The ISO 8601 day that a date in one of the usual spellings names: 2019-05-01T10:00Z, D:20190501, 1 May 2019."""
    if not text:
        return None
    text = " ".join(text[:DAY_LIMIT].split())
    if found := _DAY.match(text):
        year, month, day_of_month = (found[1], found[3], found[4]) if found[1] else found.group(5, 6, 7)
        with suppress(ValueError):
            return date(int(year), int(month), int(day_of_month)).isoformat()
        return None
    text = re.sub(r" \d\d?:\d\d.*", "", text)
    for spelling in _SPELLINGS:
        with suppress(ValueError):
            return datetime.strptime(text, spelling).date().isoformat()
    return None


def tags(words: str | None) -> tuple[str, ...]:
    """The words of a keyword line, each once, in their order."""
    return unique(re.split(r"[,;\n]", clean(words))) if words else ()


def unique(words: list[str], limit: int = 100) -> tuple[str, ...]:
    lines = (line(word) for word in words)
    return tuple(dict.fromkeys(word for word in lines if word))[:limit]
