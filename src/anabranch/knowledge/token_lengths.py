"""Lengths of text spans in the embedder's tokens, and where a span may be cut."""

import re
import unicodedata
from array import array
from bisect import bisect_left
from typing import NamedTuple

from anabranch.domain.contracts import Embedder

SEGMENT = 65_536
LONG_TOKEN = 100
LONG_TOKEN_STEP = 8
MAX_CLUSTER = 32
_SPACE = re.compile(r"\s")
# Scripts without spaces, which may be cut between any two characters.
_UNSPACED = re.compile(r"[\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


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
        while start < end:
            line = text.find("\n", start + SEGMENT, end)
            stop = line if line != -1 else end
            self._read(start, stop)
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
            stop = self._visible(start, _between_clusters(self.text, start, middle) or middle)

    def after(self, window: Window, end: int, overlap: int) -> tuple[int, int]:
        """Where the next window begins, and where its new text begins. The overlap leaves room for the first new
        word."""
        fresh = self.skip(window.end, end)
        if fresh == end:
            return end, end
        budget = min(overlap, self._size - self.count(fresh, self._word_end(fresh, end)))
        if budget <= 0:
            return fresh, fresh
        first = max(bisect_left(self._starts, fresh) - budget, 0)
        start = max(self._starts[first], window.start + 1)
        while start < fresh and (self.text[start].isspace() or not _is_word_break(self.text, start)):
            start += 1
        return min(start, fresh), fresh

    def skip(self, position: int, end: int) -> int:
        """The next position that is not white space."""
        while position < end and self.text[position].isspace():
            position += 1
        return position

    def _word_end(self, position: int, end: int) -> int:
        """The end of the word that begins here, as far as it fits."""
        over = bisect_left(self._starts, position) + self._size
        end = min(end, self._starts[over]) if over < len(self._starts) else end
        unspaced = _UNSPACED.search(self.text, position + 1, end)
        end = unspaced.start() if unspaced else end
        space = _SPACE.search(self.text, position, end)
        return space.start() if space else end

    def _read(self, start: int, end: int) -> None:
        for low, high in self._embedder.tokens(self.text[start:end]):
            if high - low <= LONG_TOKEN:
                self._starts.append(start + low)
            else:
                # A tokenizer may map a word of any length to one unknown token; the chunk size must hold nevertheless.
                self._starts.extend(range(start + low, start + high, LONG_TOKEN_STEP))

    def _cut(self, start: int, floor: int, end: int, budget: int) -> int:
        """The end of at most `budget` tokens from `start`, after `floor`; between words if possible."""
        over = bisect_left(self._starts, start) + budget
        if over >= len(self._starts) or self._starts[over] >= end:
            return end
        limit = max(self._starts[over], floor + 1)
        if limit >= end:
            return end
        for position in range(limit, floor, -1):
            if _is_word_break(self.text, position):
                return self._visible(floor, position)
        for position in range(limit, floor + 1, -1):
            if not self.text[position - 1].isalnum() and self.text[position].isalnum():
                return self._visible(floor, position)
        return self._visible(floor, _between_clusters(self.text, floor, limit) or limit)

    def _visible(self, floor: int, position: int) -> int:
        """The position before the white space that precedes this one."""
        while position > floor + 1 and self.text[position - 1].isspace():
            position -= 1
        return position


def _is_word_break(text: str, position: int) -> bool:
    before, after = text[position - 1], text[position]
    return before.isspace() or after.isspace() or _UNSPACED.match(after) is not None


def _between_clusters(text: str, floor: int, position: int) -> int | None:
    """The nearest position up to this one that does not split a grapheme cluster."""
    for nearest in range(position, max(floor, position - MAX_CLUSTER), -1):
        if not _is_joined(text, nearest):
            return nearest
    return None


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
