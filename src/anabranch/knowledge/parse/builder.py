"""A text in the making: blocks are added, the path of headings and the limits are kept."""

from anabranch.knowledge.parse.clean import clean, line
from anabranch.knowledge.parse.limits import ParseLimits
from anabranch.knowledge.parsed import Block, BlockKind, Parsed, Unprocessable

MAX_BLOCKS = 1_000_000
GAP = "\n\n"


class Headings:
    """The path of headings at a place. A heading ends every one of its level or below."""

    def __init__(self) -> None:
        self._open: list[tuple[int, str]] = []
        self.path: tuple[str, ...] = ()
        self.title: str | None = None

    def enter(self, level: int, text: str) -> None:
        words = line(text)
        if words is None:
            return
        self._open = [*((above, name) for above, name in self._open if above < level), (level, words)]
        self.path = tuple(name for _, name in self._open)
        if level <= 1 and self.title is None:
            self.title = words


class TextBuilder:
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
        gap: str = GAP,
    ) -> None:
        text = clean(text).rstrip()
        text = text.lstrip("\n") if kind == "code" else text.lstrip()
        if not text:
            return
        start = self._length + len(gap) if self._parts else 0
        end = start + len(text)
        check_text(end, self._limits)
        check_blocks(len(self._blocks) + 1)
        self._parts.append(text if not self._parts else gap + text)
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
        raise Unprocessable(f"The file falls into more than {MAX_BLOCKS:,} separate parts. Split it.")
