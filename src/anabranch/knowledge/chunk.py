"""Chunk: a document's text into the pieces that are searched."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import assert_never

from anabranch.domain.contracts import Embedder
from anabranch.domain.model import Embedding
from anabranch.knowledge.pack import Packing, Unit, least
from anabranch.knowledge.ruler import Ruler, Window
from anabranch.knowledge.sentences import Span, items, lines, sentences, trim
from anabranch.knowledge.text import Block, BlockKind, Chunking, Parsed, Piece
from anabranch.knowledge.topics import topics

Section = list[Unit]


def effective(chunking: Chunking, embedder: Embedder) -> Chunking:
    """The sizes that will be kept to: a chunk fits the embedder's window, and at most half of it is repeated."""
    size = max(1, min(chunking.size, embedder.window))
    return Chunking(strategy=chunking.strategy, size=size, overlap=max(0, min(chunking.overlap, size // 2)))


async def chunk(parsed: Parsed, chunking: Chunking, embedder: Embedder) -> tuple[Piece, ...]:
    """The pieces in order of their start, each within the effective size. Together they hold all that is visible."""
    text = parsed.text
    blocks = [block for block in parsed.blocks if trim(text, block.start, block.end) is not None]
    if not blocks:
        return ()
    sizes = effective(chunking, embedder)
    span = trim(text, blocks[0].start, blocks[-1].end)
    assert span is not None
    ruler = await asyncio.to_thread(Ruler, text, *span, embedder, sizes.size)
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


def _fixed(ruler: Ruler, span: Span, sizes: Chunking) -> list[Window]:
    start = fresh = span[0]
    windows = []
    while fresh < span[1]:
        windows.append(ruler.fit(start, fresh, span[1], sizes.size))
        start, fresh = ruler.after(windows[-1], span[1], sizes.overlap)
    return windows


def _sentence(ruler: Ruler, blocks: Sequence[Block], sizes: Chunking) -> list[Window]:
    return [window for section in _sections(ruler, blocks, sizes) for window in Packing(ruler, section, sizes)]


async def _semantic(ruler: Ruler, blocks: Sequence[Block], sizes: Chunking, embedder: Embedder) -> list[Window]:
    sections = await asyncio.to_thread(_sections, ruler, blocks, sizes)
    prose = [_prose(ruler, section, sizes) for section in sections]
    spans = [section[index] for section, indices in zip(sections, prose, strict=True) for index in indices]
    read = await embedder.embed([ruler.text[unit.start : unit.end] for unit in spans]) if spans else ()
    return await asyncio.to_thread(_turning, ruler, sections, prose, read, sizes)


def _turning(
    ruler: Ruler,
    sections: Sequence[Section],
    prose: Sequence[Sequence[int]],
    read: Sequence[Embedding],
    sizes: Chunking,
) -> list[Window]:
    windows: list[Window] = []
    at = 0
    for section, indices in zip(sections, prose, strict=True):
        turns = [indices[begin] for begin in topics(read[at : at + len(indices)])]
        windows.extend(Packing(ruler, section, sizes, (*turns, len(section))))
        at += len(indices)
    return windows


def _prose(ruler: Ruler, section: Section, sizes: Chunking) -> list[int]:
    """The units that tell where a topic begins; none in a section that has no room for two."""
    if ruler.count(section[0].start, section[-1].end) < 2 * least(sizes):
        return []
    return [index for index, unit in enumerate(section) if unit.kind in ("paragraph", "list")]


def _sections(ruler: Ruler, blocks: Sequence[Block], sizes: Chunking) -> list[Section]:
    """What no chunk reaches beyond. A section without text of its own goes with the one behind it (the last, with the
    one before), and neighbours below the minimum go together until they reach it."""
    sections: list[Section] = []
    before: Block | None = None
    for block in blocks:
        if before is None or block.kind == "heading" or block.headers != before.headers:
            sections.append([])
        sections[-1].extend(_units(ruler, (block.start, block.end), block.kind, _WAYS[block.kind], sizes.size))
        before = block
    gathered: list[Section] = []
    enough = least(sizes)
    for section in _led(sections):
        small = ruler.count(section[0].start, section[-1].end) < enough
        if small and gathered and ruler.count(gathered[-1][0].start, gathered[-1][-1].end) < enough:
            gathered[-1].extend(section)
        else:
            gathered.append(section)
    return gathered


def _led(sections: Iterable[Section]) -> list[Section]:
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


_Way = Callable[[str, int, int], Iterator[Span]]
_WAYS: Mapping[BlockKind, Sequence[_Way]] = {
    "paragraph": (sentences, lines),
    "list": (items, sentences, lines),
    "table": (_whole, lines),
    "code": (_whole, lines),
    "heading": (_whole,),
}


def _units(ruler: Ruler, span: Span, kind: BlockKind, ways: Sequence[_Way], size: int) -> Iterator[Unit]:
    """The parts of a block in the first of the ways; what is too long, in the next."""
    way, *finer = ways
    for part in way(ruler.text, *span):
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
    """The kind of the largest part; headings belong to what they head."""
    share: dict[BlockKind, int] = {}
    for block in blocks:
        if block.kind != "heading":
            size = min(end, block.end) - max(start, block.start)
            share[block.kind] = share.get(block.kind, 0) + size
    return max(share, key=lambda kind: share[kind]) if share else "heading"
