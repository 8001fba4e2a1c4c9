"""Pack: units of a text into windows that fit."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.knowledge.ruler import Ruler, Window
from anabranch.knowledge.text import BlockKind, Chunking

MIN_TOKENS = 100


def least(sizes: Chunking) -> int:
    """What is enough for a chunk."""
    return min(MIN_TOKENS, sizes.size // 2)


class Unit(NamedTuple):
    """What is kept whole if it fits: a sentence, a list item, a table, a line of a table that is too long."""

    start: int
    end: int
    kind: BlockKind


class Cursor(NamedTuple):
    """Where packing stands: the next window begins at `start`, in the unit of index `first`; what no window has yet
    begins at `fresh`, in the unit of index `unit`."""

    first: int
    start: int
    unit: int
    fresh: int


class Packing:
    """Whole units into windows, as many as fit. A heading is never the last of them; a unit that does not fit alone
    is cut into even parts. `turns` are the units that begin a topic, and the end: a window ends before one once it is
    long enough, and earlier than it must if too little would be left before the next."""

    def __init__(self, ruler: Ruler, units: Sequence[Unit], sizes: Chunking, turns: Sequence[int] = ()) -> None:
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

    def _at(self, index: int) -> Cursor:
        start = self._units[index].start if index < len(self._units) else self._units[-1].end
        return Cursor(index, start, index, start)

    def _reach(self, at: Cursor) -> tuple[int, int]:
        """The unit that a window from here ends before, and the window's tokens."""
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

    def _is_turn(self, at: Cursor, stop: int) -> bool:
        """Whether both what goes before the unit and what is left from it on are enough for a chunk."""
        return (
            stop > at.unit
            and self._ruler.count(at.fresh, self._units[stop - 1].end) >= self._least
            and self._ruler.count(self._units[stop].start, self._units[-1].end) >= self._least
        )

    def _leaving_enough(self, at: Cursor, stop: int) -> int:
        """An earlier stop, if what is left of the topic would else be too little for a chunk."""
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
        """Whether a window that ends before `stop` has headings only, while text for them follows."""
        if stop == len(self._units) or self._units[stop].kind == "heading":
            return False
        return all(unit.kind == "heading" for unit in self._units[index:stop])

    def _cut(self, at: Cursor, index: int) -> tuple[Window, Cursor]:
        end = self._units[index].end
        tokens = self._ruler.count(at.start, end)
        parts = max(1, -(-(tokens - self._overlap) // (self._size - self._overlap)))
        even = -(-(tokens + (parts - 1) * self._overlap) // parts)
        window = self._ruler.fit(at.start, at.fresh, end, min(even, self._size))
        start, fresh = self._ruler.after(window, end, self._overlap)
        return window, self._at(index + 1) if fresh == end else Cursor(index, start, index, fresh)

    def _behind(self, at: Cursor, stop: int) -> Cursor:
        """The last whole units before `stop` are repeated, unless a topic or nothing at all begins there."""
        if stop == len(self._units) or stop in self._begins:
            return self._at(stop)
        first = stop
        end, following = self._units[stop - 1].end, self._units[stop].end
        while first - 1 > at.first:
            start = self._units[first - 1].start
            if self._ruler.count(start, end) > self._overlap or self._ruler.count(start, following) > self._size:
                break
            first -= 1
        return Cursor(first, self._units[first].start, stop, self._units[stop].start)
