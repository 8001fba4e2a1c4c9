"""Chunking: a text is split into pieces that fit the embedder: fixed windows, whole sentences, or topics."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, assert_never

from anabranch.domain.contracts import Embedder
from anabranch.domain.model import Embedding
from anabranch.knowledge.parsed import Block, BlockKind, Chunking, Parsed, Piece
from anabranch.knowledge.token_lengths import TokenLengths, Window
from anabranch.text.sentences import Span, items, lines, sentences, trim

MIN_TOKENS = 100


def least(sizes: Chunking) -> int:
    """The minimum size of a chunk in tokens."""
    return min(MIN_TOKENS, sizes.size // 2)


class Unit(NamedTuple):
    """A span that is not split if it fits: a sentence, a list item, a table, a line of a table that is too long."""

    start: int
    end: int
    kind: BlockKind


class PackPosition(NamedTuple):
    """The state of packing: the next window begins at `start`, in the unit of index `first`; text that is in no window
    yet begins at `fresh`, in the unit of index `unit`."""

    first: int
    start: int
    unit: int
    fresh: int


class Packer:
    """Packs whole units into windows, as many as fit. A heading is never the last unit of a window; a unit that does
    not fit alone is split evenly. `turns` are the indices of the units that begin a topic, and the end: a window ends
    before one once it has the minimum size, and earlier if too little would be left before the next."""

    def __init__(self, ruler: TokenLengths, units: Sequence[Unit], sizes: Chunking, turns: Sequence[int] = ()) -> None:
        self._ruler = ruler
        self._units = units
        self._size = sizes.size
        self._overlap = sizes.overlap
        self._least = least(sizes)
        self._turns = turns
        self._begins = frozenset(turns)

    def __iter__(self) -> Iterator[Window]:
        at = self._at(0)
        while at.unit < len(self._units):
            stop, tokens = self._reach(at)
            if stop == at.unit and at.first < at.unit:
                at = self._at(at.unit)
            elif stop == at.unit or self._leaves_headings(at.unit, stop):
                window, at = self._cut(at, stop)
                yield window
            else:
                yield Window(at.start, self._units[stop - 1].end, tokens)
                at = self._behind(at, stop)

    def _at(self, index: int) -> PackPosition:
        start = self._units[index].start if index < len(self._units) else self._units[-1].end
        return PackPosition(index, start, index, start)

    def _reach(self, at: PackPosition) -> tuple[int, int]:
        """The index of the unit that a window from here ends before, and the window's tokens."""
        stop = at.unit
        while stop < len(self._units) and self._ruler.count(at.start, self._units[stop].end) <= self._size:
            if stop in self._begins and self._is_turn(at, stop):
                break
            stop += 1
        else:
            stop = self._leaving_enough(at, stop)
        while stop > at.unit:
            stop = self._before_headings(at.unit, stop)
            tokens = self._ruler.exact(at.start, self._units[stop - 1].end)
            if tokens <= self._size:
                return stop, tokens
            stop -= 1
        return stop, 0

    def _is_turn(self, at: PackPosition, stop: int) -> bool:
        """Whether the text before the unit and the rest from it on both have the minimum size."""
        return (
            stop > at.unit
            and self._ruler.count(at.fresh, self._units[stop - 1].end) >= self._least
            and self._ruler.count(self._units[stop].start, self._units[-1].end) >= self._least
        )

    def _leaving_enough(self, at: PackPosition, stop: int) -> int:
        """An earlier stop, if the rest of the topic would be smaller than the minimum."""
        if not self._turns or stop == len(self._units):
            return stop
        end = self._units[self._turns[bisect_right(self._turns, stop)] - 1].end
        earlier = stop
        while earlier > at.unit + 1 and self._ruler.count(self._units[earlier].start, end) < self._least:
            earlier -= 1
        return earlier if self._ruler.count(at.fresh, self._units[earlier - 1].end) >= self._least else stop

    def _before_headings(self, index: int, stop: int) -> int:
        if stop == len(self._units):
            return stop
        earlier = stop
        while earlier > index and self._units[earlier - 1].kind == "heading":
            earlier -= 1
        return earlier if earlier > index else stop

    def _leaves_headings(self, index: int, stop: int) -> bool:
        """Whether a window that ends before `stop` has only headings, and their text follows."""
        if stop == len(self._units) or self._units[stop].kind == "heading":
            return False
        return all(unit.kind == "heading" for unit in self._units[index:stop])

    def _cut(self, at: PackPosition, index: int) -> tuple[Window, PackPosition]:
        end = self._units[index].end
        tokens = self._ruler.count(at.start, end)
        parts = max(1, -(-(tokens - self._overlap) // (self._size - self._overlap)))
        even = -(-(tokens + (parts - 1) * self._overlap) // parts)
        window = self._ruler.fit(at.start, at.fresh, end, min(even, self._size))
        start, fresh = self._ruler.after(window, end, self._overlap)
        return window, self._at(index + 1) if fresh == end else PackPosition(index, start, index, fresh)

    def _behind(self, at: PackPosition, stop: int) -> PackPosition:
        """After a window, the last whole units before `stop` are repeated, unless a topic or nothing begins
        there."""
        if stop == len(self._units) or stop in self._begins:
            return self._at(stop)
        first = stop
        end, following = self._units[stop - 1].end, self._units[stop].end
        while first - 1 > at.first:
            start = self._units[first - 1].start
            if self._ruler.count(start, end) > self._overlap or self._ruler.count(start, following) > self._size:
                break
            first -= 1
        return PackPosition(first, self._units[first].start, stop, self._units[stop].start)


# Calibrated for all-MiniLM-L6-v2: docs/chunking.md has the figures.
THRESHOLD = 0.35
REACH = 3


def topics(sentences: Sequence[Embedding]) -> list[int]:
    """The indices of sentences that begin a topic: the mean vectors of the three sentences before and from there on are
    less similar than the threshold, and less than one sentence earlier or later."""
    import numpy as np  # noqa: PLC0415  heavy, and only this strategy needs it

    count = len(sentences)
    if count < 2:
        return []
    vectors = np.frombuffer(b"".join(sentence.vector for sentence in sentences), np.float32).reshape(count, -1)
    padded = np.pad(vectors, ((REACH, REACH), (0, 0)))
    sums = padded[: count + REACH].copy()
    for shift in range(1, REACH):
        sums += padded[shift : shift + count + REACH]
    before, after = sums[1:count], sums[1 + REACH : count + REACH]
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    likeness = (before * after).sum(axis=1) / np.maximum(lengths, 1e-9)
    edged = np.concatenate([[np.inf], likeness, [np.inf]])
    turns = (likeness < THRESHOLD) & (likeness < edged[:-2]) & (likeness <= edged[2:])
    return [int(gap) for gap in np.flatnonzero(turns) + 1]


Section = list[Unit]


def effective(chunking: Chunking, embedder: Embedder) -> Chunking:
    """The chunking limited to the embedder: a chunk fits its window, and at most half of it is overlap."""
    size = max(1, min(chunking.size, embedder.window))
    return Chunking(strategy=chunking.strategy, size=size, overlap=max(0, min(chunking.overlap, size // 2)))


async def chunk(parsed: Parsed, chunking: Chunking, embedder: Embedder) -> tuple[Piece, ...]:
    """The pieces in order of their start, each within the effective size. Together they cover all text."""
    text = parsed.text
    blocks = [block for block in parsed.blocks if trim(text, block.start, block.end) is not None]
    if not blocks:
        return ()
    sizes = effective(chunking, embedder)
    span = trim(text, blocks[0].start, blocks[-1].end)
    assert span is not None
    ruler = await asyncio.to_thread(TokenLengths, text, *span, embedder, sizes.size)
    match sizes.strategy:
        case "fixed":
            windows = await asyncio.to_thread(_fixed, ruler, span, sizes)
        case "sentence":
            windows = await asyncio.to_thread(_sentence, ruler, blocks, sizes)
        case "semantic":
            windows = await _semantic(ruler, blocks, sizes, embedder)
        case _:
            assert_never(sizes.strategy)
    return await asyncio.to_thread(_pieces, windows, blocks)


def _fixed(ruler: TokenLengths, span: Span, sizes: Chunking) -> list[Window]:
    start = fresh = span[0]
    windows = []
    while fresh < span[1]:
        windows.append(ruler.fit(start, fresh, span[1], sizes.size))
        start, fresh = ruler.after(windows[-1], span[1], sizes.overlap)
    return windows


def _sentence(ruler: TokenLengths, blocks: Sequence[Block], sizes: Chunking) -> list[Window]:
    return [window for section in _sections(ruler, blocks, sizes) for window in Packer(ruler, section, sizes)]


async def _semantic(ruler: TokenLengths, blocks: Sequence[Block], sizes: Chunking, embedder: Embedder) -> list[Window]:
    sections = await asyncio.to_thread(_sections, ruler, blocks, sizes)
    prose = [_prose(ruler, section, sizes) for section in sections]
    spans = [section[index] for section, indices in zip(sections, prose, strict=True) for index in indices]
    read = await embedder.embed([ruler.text[unit.start : unit.end] for unit in spans]) if spans else ()
    return await asyncio.to_thread(_windows_by_topic, ruler, sections, prose, read, sizes)


def _windows_by_topic(
    ruler: TokenLengths,
    sections: Sequence[Section],
    prose: Sequence[Sequence[int]],
    read: Sequence[Embedding],
    sizes: Chunking,
) -> list[Window]:
    windows: list[Window] = []
    at = 0
    for section, indices in zip(sections, prose, strict=True):
        turns = [indices[begin] for begin in topics(read[at : at + len(indices)])]
        windows.extend(Packer(ruler, section, sizes, (*turns, len(section))))
        at += len(indices)
    return windows


def _prose(ruler: TokenLengths, section: Section, sizes: Chunking) -> list[int]:
    """The indices of the units that are compared for topics; none in a section too small for two chunks."""
    if ruler.count(section[0].start, section[-1].end) < 2 * least(sizes):
        return []
    return [index for index, unit in enumerate(section) if unit.kind in ("paragraph", "list")]


def _sections(ruler: TokenLengths, blocks: Sequence[Block], sizes: Chunking) -> list[Section]:
    """Sections, which chunks never cross. A section without text of its own is joined with the next one (the last, with
    the one before), and adjacent sections below the minimum are joined until they reach it."""
    sections: list[Section] = []
    before: Block | None = None
    for block in blocks:
        if before is None or block.kind == "heading" or block.headers != before.headers:
            sections.append([])
        sections[-1].extend(_units(ruler, (block.start, block.end), block.kind, _SPLITTERS[block.kind], sizes.size))
        before = block
    gathered: list[Section] = []
    enough = least(sizes)
    for section in _with_text(sections):
        small = ruler.count(section[0].start, section[-1].end) < enough
        if small and gathered and ruler.count(gathered[-1][0].start, gathered[-1][-1].end) < enough:
            gathered[-1].extend(section)
        else:
            gathered.append(section)
    return gathered


def _with_text(sections: Iterable[Section]) -> list[Section]:
    led: list[Section] = []
    headings: Section = []
    for section in sections:
        headings.extend(section)
        if section[-1].kind != "heading":
            led.append(headings)
            headings = []
    if headings and led:
        last = led[-1].pop()
        led[-1].append(Unit(last.start, headings[-1].end, last.kind))
    elif headings:
        led.append(headings)
    return led


def _whole(text: str, start: int, end: int) -> Iterator[Span]:
    if (span := trim(text, start, end)) is not None:
        yield span


_Splitter = Callable[[str, int, int], Iterator[Span]]
_SPLITTERS: Mapping[BlockKind, Sequence[_Splitter]] = {
    "paragraph": (sentences, lines),
    "list": (items, sentences, lines),
    "table": (_whole, lines),
    "code": (_whole, lines),
    "heading": (_whole,),
}


def _units(
    ruler: TokenLengths, span: Span, kind: BlockKind, splitters: Sequence[_Splitter], size: int
) -> Iterator[Unit]:
    """A block split by the first splitter; parts that are too long are split by the next."""
    split, *finer = splitters
    for part in split(ruler.text, *span):
        if finer and ruler.count(*part) > size:
            yield from _units(ruler, part, kind, finer, size)
        else:
            yield Unit(*part, kind)


def _pieces(windows: Iterable[Window], blocks: Sequence[Block]) -> tuple[Piece, ...]:
    starts = [block.start for block in blocks]
    pieces = []
    for start, end, tokens in windows:
        first = bisect_right(starts, start) - 1
        within = blocks[first : bisect_left(starts, end)]
        pieces.append(
            Piece(
                start=start,
                end=end,
                tokens=tokens,
                kind=_kind(within, start, end),
                headers=next((block for block in within if block.kind != "heading"), within[0]).headers,
                page=within[0].page,
            )
        )
    return tuple(pieces)


def _kind(blocks: Sequence[Block], start: int, end: int) -> BlockKind:
    """The kind with the largest share of the span; headings do not count."""
    share: dict[BlockKind, int] = {}
    for block in blocks:
        if block.kind != "heading":
            size = min(end, block.end) - max(start, block.start)
            share[block.kind] = share.get(block.kind, 0) + size
    return max(share, key=lambda kind: share[kind]) if share else "heading"
