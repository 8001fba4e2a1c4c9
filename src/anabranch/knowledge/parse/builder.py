"""Builds the text of a document: limits, cleaning of characters, blocks and the path of headings."""

import re
from contextlib import suppress
from datetime import date, datetime

from anabranch.domain.model import Value
from anabranch.knowledge.model import Block, BlockKind, Parsed, Unprocessable

MAX_BLOCKS = 1_000_000
MIB = 1024 * 1024
LINE_LIMIT = 300
DAY_LIMIT = 64

_LINE_END = re.compile("\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_UNWANTED = re.compile("[\x00-\x08\x0e-\x1f\x7f\ufeff\ufffe\uffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAY = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?!\d)|(?:D:)?(\d{4})(\d\d)(\d\d)(?:\d{4,}|(?!\d))")
_SPELLINGS = ("%a, %d %b %Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y")


class ParseLimits(Value):
    """Limits for one file. `max_expanded` is the unpacked size of an archive such as a DOCX, `max_memory` the memory of
    its parser; both in bytes, as `max_bytes` is. `max_text` counts characters."""

    max_bytes: int = 50 * MIB
    max_pages: int = 2_000
    max_text: int = 20_000_000
    max_expanded: int = 200 * MIB
    timeout_s: float = 120.0
    max_memory: int = 2048 * MIB


def mebibytes(count: int) -> str:
    return f"{count / MIB:,.0f} MiB" if count >= MIB else f"{count:,} bytes"


def check_size(data: bytes, limits: ParseLimits) -> None:
    if len(data) > limits.max_bytes:
        raise Unprocessable(
            f"The file has {mebibytes(len(data))}, more than the limit of {mebibytes(limits.max_bytes)}. Split it."
        )


class Headings:
    """The path of open headings. A heading closes all of its level or below."""

    def __init__(self) -> None:
        self._open: list[tuple[int, str]] = []
        self.path: tuple[str, ...] = ()
        self.title: str | None = None

    def enter(self, level: int, text: str) -> None:
        if words := line(text):
            self._open = [*((above, name) for above, name in self._open if above < level), (level, words)]
            self.path = tuple(name for _, name in self._open)
            if level <= 1 and self.title is None:
                self.title = words


class TextBuilder:
    """Collects blocks into a Parsed text and enforces the limits."""

    def __init__(self, limits: ParseLimits) -> None:
        self._limits = limits
        self._parts: list[str] = []
        self._blocks: list[Block] = []
        self._length = 0
        self.headings = Headings()

    def add(
        self,
        text: str,
        kind: BlockKind = "paragraph",
        *,
        page: int | None = None,
        headers: tuple[str, ...] | None = None,
        gap: str = "\n\n",
    ) -> None:
        text = clean(text).rstrip()
        text = text.lstrip("\n") if kind == "code" else text.lstrip()
        if not text:
            return
        start = self._length + len(gap) if self._parts else 0
        end = start + len(text)
        check_text(end, self._limits)
        check_blocks(len(self._blocks) + 1)
        self._parts.append(gap + text if self._parts else text)
        path = self.headings.path if headers is None else headers
        self._blocks.append(Block(start=start, end=end, kind=kind, headers=path, page=page))
        self._length = end

    def heading(self, text: str, level: int, *, page: int | None = None) -> None:
        words = " ".join(text.split())
        self.headings.enter(level, words)
        self.add(words, "heading", page=page)

    def parsed(
        self,
        *,
        title: str | None = None,
        author: str | None = None,
        created_date: str | None = None,
        tags: tuple[str, ...] = (),
        pages: int | None = None,
    ) -> Parsed:
        return Parsed(
            text="".join(self._parts),
            blocks=tuple(self._blocks),
            title=title or self.headings.title,
            author=author,
            created_date=created_date,
            tags=tags,
            pages=pages,
        )


def check_text(characters: int, limits: ParseLimits) -> None:
    if characters > limits.max_text:
        raise Unprocessable(
            f"The file holds more than {limits.max_text:,} characters of text, the limit for one document. Split it."
        )


def check_blocks(count: int) -> None:
    if count > MAX_BLOCKS:
        raise Unprocessable(f"The file has more than {MAX_BLOCKS:,} separate blocks. Split it.")


def clean(text: str) -> str:
    """Text with \\n line ends, without byte order marks, lone surrogates, and control characters but \\n and \\t."""
    return _SURROGATE.sub("\ufffd", _UNWANTED.sub("", _LINE_END.sub("\n", text)))


def line(text: str | None, limit: int = LINE_LIMIT) -> str | None:
    """The text as one line of at most `limit` characters; None if it is empty."""
    if not text:
        return None
    words = " ".join(clean(text[: limit * 8]).split())
    return words if len(words) <= limit else words[: limit - 1].rstrip() + "…"


def day(text: str | None) -> str | None:
    """The ISO 8601 day of a date in one of the usual formats: 2019-05-01T10:00Z, D:20190501, 1 May 2019."""
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
    """The distinct keywords of a line, in order."""
    return unique(re.split(r"[,;\n]", clean(words))) if words else ()


def unique(words: list[str], limit: int = 100) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(line, words))))[:limit]
