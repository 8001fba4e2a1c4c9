"""Cuts a document into chunks of a bounded number of tokens."""

import asyncio
import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from typing import NamedTuple, assert_never

from anabranch.domain.contracts import Embedder, RunInThread
from anabranch.domain.model import Embedding
from anabranch.knowledge.model import Block, BlockKind, Chunking, Parsed, Piece
from anabranch.text.sentences import Span, items, lines, sentences, trim

SEGMENT = 65_536
LONG_TOKEN = 100
LONG_TOKEN_STEP = 8
MAX_CLUSTER = 32
# White space that is longer than this is in no chunk.
LONG_SPACE = 1_000
# Words end before white space, and in scripts without spaces after every character.
_WORD_END = re.compile(r"[\s\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_NOT_SPACE = re.compile(r"\S")


class Window(NamedTuple):
    """A measured span: text[start:end] has exactly this many tokens."""

    start: int
    end: int
    tokens: int


class TokenLengths:
    """The text is tokenized once; `count` uses that, which is exact if both ends are between words. `exact` tokenizes
    the span itself; every chunk is measured with it."""

    def __init__(self, text: str, start: int, end: int, embedder: Embedder, size: int) -> None:
        self.text = text
        self._embedder = embedder
        self._size = size
        self._starts = array("I")
        before = start
        while start < end:
            line = text.find("\n", start + SEGMENT, end)
            stop = line if line != -1 else end
            for low, high in embedder.tokens(text[start:stop]):
                if (space := start + low - before) > LONG_SPACE:
                    # As many tokens as a chunk may have: no chunk goes on behind it.
                    self._starts.extend(range(before, start + low, max(1, space // size)))
                before = start + high
                if high - low <= LONG_TOKEN:
                    self._starts.append(start + low)
                else:
                    # A tokenizer may map a word of any length to one unknown token; the chunk size must hold
                    # nevertheless.
                    self._starts.extend(range(start + low, start + high, LONG_TOKEN_STEP))
            start = stop

    def count(self, start: int, end: int) -> int:
        return bisect_left(self._starts, end) - bisect_left(self._starts, start)

    def exact(self, start: int, end: int) -> int:
        return len(self._embedder.tokens(self.text[start:end]))

    def fit(self, start: int, fresh: int, end: int, budget: int) -> Window:
        """The longest window from `start` towards `end` of at most `budget` tokens. Text before `fresh` is overlap, and
        is dropped if nothing else fits; a word is cut only if it does not fit alone."""
        allowed = budget
        while allowed > 0:
            stop = self._cut(start, fresh, end, allowed)
            tokens = self.exact(start, stop)
            if tokens <= self._size:
                return Window(start, stop, tokens)
            allowed -= tokens - self._size
        if start < fresh:
            return self.fit(fresh, fresh, end, budget)
        # The parts of a word can have more tokens than the whole.
        stop = self._cut(start, start, end, 1)
        while True:
            tokens = self.exact(start, stop)
            if tokens <= self._size or stop - start == 1:
                return Window(start, stop, tokens)
            middle = start + (stop - start) // 2
            stop = self._visible(start, _between_clusters(self.text, start, middle))

    def after(self, window: Window, end: int, overlap: int) -> tuple[int, int]:
        """Where the next window begins, and where its new text begins. The overlap leaves room for the first new
        word."""
        visible = _NOT_SPACE.search(self.text, window.end, end)
        if visible is None:
            return end, end
        fresh = visible.start()
        budget = min(overlap, self._size - self.count(fresh, self._word_end(fresh, end)))
        if budget <= 0:
            return fresh, fresh
        first = max(bisect_left(self._starts, fresh) - budget, 0)
        start = max(self._starts[first], window.start + 1)
        while start < fresh and (self.text[start].isspace() or not _is_word_break(self.text, start)):
            start += 1
        return min(start, fresh), fresh

    def _word_end(self, position: int, end: int) -> int:
        """The end of the word that begins here, as far as it fits."""
        over = bisect_left(self._starts, position) + self._size
        end = min(end, self._starts[over]) if over < len(self._starts) else end
        found = _WORD_END.search(self.text, position + 1, end)
        return found.start() if found else end

    def _cut(self, start: int, floor: int, end: int, budget: int) -> int:
        """The end of at most `budget` tokens from `start`, after `floor`; between words if possible."""
        over = bisect_left(self._starts, start) + budget
        limit = max(self._starts[over], floor + 1) if over < len(self._starts) else end
        if limit >= end:
            return end
        text, positions = self.text, range(limit, floor, -1)
        return self._visible(
            floor,
            next((at for at in positions if _is_word_break(text, at)), None)
            or next((at for at in positions[:-1] if not text[at - 1].isalnum() and text[at].isalnum()), None)
            or _between_clusters(text, floor, limit),
        )

    def _visible(self, floor: int, position: int) -> int:
        """The position before the white space that precedes this one."""
        return floor + 1 + len(self.text[floor + 1 : position].rstrip())


def _is_word_break(text: str, position: int) -> bool:
    return text[position - 1].isspace() or _WORD_END.match(text, position) is not None


def _between_clusters(text: str, floor: int, position: int) -> int:
    """The nearest position up to this one that does not split a grapheme cluster; itself if all near ones do."""
    near = range(position, max(floor, position - MAX_CLUSTER), -1)
    return next((at for at in near if not _is_joined(text, at)), position)


def _is_joined(text: str, position: int) -> bool:
    before, after = text[position - 1], text[position]
    if after.isascii():
        return before == "\r" and after == "\n"
    return (
        unicodedata.category(after) in ("Mn", "Mc", "Me")
        or "\u200d" in (before, after)
        or "\U0001f3fb" <= after <= "\U0001f3ff"
        or ("\U0001f1e6" <= before <= "\U0001f1ff" and "\U0001f1e6" <= after <= "\U0001f1ff")
        or ("\ud800" <= before <= "\udbff" and "\udc00" <= after <= "\udfff")
        or ("\u1160" <= after <= "\u11ff" and "\u1100" <= before <= "\u11ff")
    )


MIN_TOKENS = 100


def least(sizes: Chunking) -> int:
    """The minimum size of a chunk in tokens."""
    return min(MIN_TOKENS, sizes.size // 2)


class ChunkUnit(NamedTuple):
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
    """Packs whole units into windows, as many as fit. What leads to the next unit, a heading or a sentence with a colon
    at its end, is never the last unit of a window; a unit that does not fit alone is split evenly. `turns` are the
    indices of the units that begin a topic, and the end: a window ends before one once it has the minimum size, and
    earlier if too little would be left before the next."""

    def __init__(
        self, ruler: TokenLengths, units: Sequence[ChunkUnit], sizes: Chunking, turns: Sequence[int] = ()
    ) -> None:
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
            stop = self._before_leads(at.unit, stop)
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

    def _before_leads(self, index: int, stop: int) -> int:
        """An earlier stop, if the last units lead to the next one and not all of them do."""
        if stop == len(self._units):
            return stop
        return next((at for at in range(stop, index, -1) if not self._leads(self._units[at - 1])), stop)

    def _leads(self, unit: ChunkUnit) -> bool:
        return unit.kind == "heading" or self._ruler.text[unit.end - 1] == ":"

    def _leaves_headings(self, index: int, stop: int) -> bool:
        """Whether a window that ends before `stop` has only headings, and their text follows."""
        follows = stop < len(self._units) and self._units[stop].kind != "heading"
        return follows and all(unit.kind == "heading" for unit in self._units[index:stop])

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
        while (
            first - 1 > at.first
            and self._ruler.count(self._units[first - 1].start, end) <= self._overlap
            and self._ruler.count(self._units[first - 1].start, following) <= self._size
        ):
            first -= 1
        return PackPosition(first, self._units[first].start, stop, self._units[stop].start)


REACH = 3


def topics(sentences: Sequence[Embedding], threshold: float) -> list[int]:
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
    turns = (likeness < threshold) & (likeness < edged[:-2]) & (likeness <= edged[2:])
    return (np.flatnonzero(turns) + 1).tolist()


Section = list[ChunkUnit]


def effective(chunking: Chunking, embedder: Embedder) -> Chunking:
    """The chunking limited to the embedder: a chunk fits its window, and at most half of it is overlap."""
    size = max(1, min(chunking.size, embedder.window))
    return Chunking(strategy=chunking.strategy, size=size, overlap=max(0, min(chunking.overlap, size // 2)))


async def chunk(
    parsed: Parsed, chunking: Chunking, embedder: Embedder, run: RunInThread = asyncio.to_thread
) -> tuple[Piece, ...]:
    """The pieces in order of their start, each within the effective size. Together they cover all text."""
    text = parsed.text
    blocks = [block for block in parsed.blocks if trim(text, block.start, block.end) is not None]
    if not blocks:
        return ()
    sizes = effective(chunking, embedder)
    span = trim(text, blocks[0].start, blocks[-1].end)
    assert span is not None
    ruler = await run(TokenLengths, text, *span, embedder, sizes.size)
    match sizes.strategy:
        case "fixed":
            windows = await run(_fixed, ruler, span, sizes)
        case "sentence":
            windows = await run(_sentence, ruler, blocks, sizes)
        case "semantic":
            windows = await _semantic(ruler, blocks, sizes, embedder, run)
        case _:
            assert_never(sizes.strategy)
    return await run(_pieces, windows, blocks)


def _fixed(ruler: TokenLengths, span: Span, sizes: Chunking) -> list[Window]:
    start = fresh = span[0]
    windows = []
    while fresh < span[1]:
        windows.append(ruler.fit(start, fresh, span[1], sizes.size))
        start, fresh = ruler.after(windows[-1], span[1], sizes.overlap)
    return windows


def _sentence(ruler: TokenLengths, blocks: Sequence[Block], sizes: Chunking) -> list[Window]:
    return [window for section in _sections(ruler, blocks, sizes) for window in Packer(ruler, section, sizes)]


async def _semantic(
    ruler: TokenLengths, blocks: Sequence[Block], sizes: Chunking, embedder: Embedder, run: RunInThread
) -> list[Window]:
    sections = await run(_sections, ruler, blocks, sizes)
    prose = [_prose(ruler, section, sizes) for section in sections]
    spans = [section[index] for section, indices in zip(sections, prose, strict=True) for index in indices]
    read = await embedder.embed([ruler.text[unit.start : unit.end] for unit in spans]) if spans else ()
    threshold = embedder.calibration.topic_threshold
    return await run(_windows_by_topic, ruler, sections, prose, read, sizes, threshold)


def _windows_by_topic(
    ruler: TokenLengths,
    sections: Sequence[Section],
    prose: Sequence[Sequence[int]],
    read: Sequence[Embedding],
    sizes: Chunking,
    threshold: float,
) -> list[Window]:
    windows: list[Window] = []
    unread = iter(read)
    for section, indices in zip(sections, prose, strict=True):
        turns = [indices[begin] for begin in topics(list(islice(unread, len(indices))), threshold)]
        windows.extend(Packer(ruler, section, sizes, (*turns, len(section))))
    return windows


def _prose(ruler: TokenLengths, section: Section, sizes: Chunking) -> list[int]:
    """The indices of the units that are compared for topics; none in a section too small for two chunks."""
    if ruler.count(section[0].start, section[-1].end) < 2 * least(sizes):
        return []
    return [index for index, unit in enumerate(section) if unit.kind in ("paragraph", "list")]


def _sections(ruler: TokenLengths, blocks: Sequence[Block], sizes: Chunking) -> list[Section]:
    """Sections, which chunks never cross, however small they are: a heading belongs to the text below it only. A
    section without text of its own is joined with the next one (the last, with the one before)."""
    sections: list[Section] = []
    for before, block in zip((None, *blocks), blocks, strict=False):
        if before is None or block.kind == "heading" or block.headers != before.headers:
            sections.append([])
        sections[-1].extend(_units(ruler, (block.start, block.end), block.kind, _SPLITTERS[block.kind], sizes.size))
    return _with_text(sections)


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
        led[-1].append(ChunkUnit(last.start, headings[-1].end, last.kind))
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
) -> Iterator[ChunkUnit]:
    """A block split by the first splitter; parts that are too long are split by the next."""
    split, *finer = splitters
    for part in split(ruler.text, *span):
        if finer and ruler.count(*part) > size:
            yield from _units(ruler, part, kind, finer, size)
        else:
            yield ChunkUnit(*part, kind)


def _pieces(windows: Iterable[Window], blocks: Sequence[Block]) -> tuple[Piece, ...]:
    starts = [block.start for block in blocks]
    pieces = []
    for start, end, tokens in windows:
        within = blocks[bisect_right(starts, start) - 1 : bisect_left(starts, end)]
        pieces.append(
            Piece(
                start=start,
                end=end,
                tokens=tokens,
                kind=_kind(within, start, end),
                headers=_headers(within),
                page=within[0].page,
                later_pages=tuple(
                    (block.start, block.page)
                    for before, block in pairwise(within)
                    if block.page is not None and block.page != before.page
                ),
            )
        )
    return tuple(pieces)


def _headers(blocks: Sequence[Block]) -> tuple[str, ...]:
    """The headings above all of these blocks: of two sections, what both are under. Headings themselves do not count,
    unless there is nothing else."""
    paths = [block.headers for block in blocks if block.kind != "heading"] or [block.headers for block in blocks]
    lowest, highest = min(paths), max(paths)
    # What the first and the last in alphabetical order share, all share.
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(lowest, highest, strict=False))
    return tuple(heading for heading, _ in shared)


def _kind(blocks: Sequence[Block], start: int, end: int) -> BlockKind:
    """The kind with the largest share of the span; headings do not count."""
    share: Counter[BlockKind] = Counter()
    for block in blocks:
        if block.kind != "heading":
            share[block.kind] += min(end, block.end) - max(start, block.start)
    return max(share, key=lambda kind: share[kind]) if share else "heading"
