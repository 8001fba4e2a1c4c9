"""Near-duplicate removal by normalized Levenshtein similarity, in rank order and within a budget."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numkong
import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

# The budget in steps of about 1.7 ns: a thousand texts of 200 to 2,000 characters take up to half of it.
BUDGET = 1_000_000_000
# Up to so many steps, comparing all pairs is faster than filtering them first.
FEW_STEPS = 1_500_000
# Texts are read in small blocks, so that the first results come early.
BLOCK, BLOCK_CHARACTERS = 32, 400_000
# A sketch has a bit for each trigram of a text, and further bits for repeated trigrams.
RUN = 3
SKETCH_BITS, SKETCH_BYTES = 1 << 16, 1 << 13
SPREAD, SPREAD_AGAIN, SHIFT = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(16)
# The cost of a character of a sketch, of a pair of sketches, and of a call for a distance.
READ_STEPS, SKETCH_STEPS, CALL_STEPS = 32, 120, 700
# Unrelated texts differ in about three of four characters: a prefix this many times the bound shows that.
BEGINNING = 1.6
# So many comparisons between two looks at the clock.
SLICE = 256

Agree = Callable[[int, int], bool]
Numbers = NDArray[np.int64]
Sketches = NDArray[np.uint8]


class Distinct:
    """The indexes of what is kept, in order and as they are found: a text is left out if one kept before it is the
    same, or has a normalized Levenshtein similarity, 1 - distance / length of the longer, strictly above `threshold`,
    and `agree`, called with both indexes, is true. The work is bounded, whatever the texts: once the `budget` of
    steps is spent, or `until` has come (monotonic), a text is left out only if it is the same as one before it, and
    `complete` is False from there on. It may run in any thread."""

    def __init__(
        self,
        texts: Sequence[str],
        threshold: float,
        *,
        agree: Agree = lambda _index, _other: True,
        budget: int = BUDGET,
        until: float = math.inf,
    ) -> None:
        self._texts = texts
        self._kept_texts = _KeptTexts(texts, threshold, agree, budget, until)

    def __iter__(self) -> Iterator[int]:
        start = 0
        while start < len(self._texts):
            end, characters = start, 0
            while end < min(len(self._texts), start + BLOCK) and (end == start or characters < BLOCK_CHARACTERS):
                characters += len(self._texts[end])
                end += 1
            yield from self._kept_texts.read(range(start, end))
            start = end

    @property
    def complete(self) -> bool:
        return not self._kept_texts.spent

    @property
    def left_out(self) -> Mapping[int, int]:
        """The index of each text that was left out so far, with the index of the kept text that it repeats."""
        repeated = self._kept_texts.repeated
        # The same as a text that was itself left out later.
        return {index: repeated.get(other, other) for index, other in repeated.items()}


def furthest(lengths: Numbers, threshold: float) -> Numbers:
    """The largest distance at which two texts, the longer of this length, are too similar; -1 is none. Tried with the
    expression of the definition itself, so that rounding decides here as it does there."""
    longer = np.maximum(lengths, 1)
    distance = np.clip(np.floor((1 - threshold) * longer) + 1, -1, longer)
    for _ in range(3):
        distance = np.where((distance >= 0) & ~(1 - distance / longer > threshold), distance - 1, distance)
    return np.asarray(distance, dtype=np.int64)


class _KeptTexts:
    """The texts kept so far, and what is left of the budget."""

    def __init__(self, texts: Sequence[str], threshold: float, agree: Agree, budget: int, until: float) -> None:
        self._texts = texts
        self._agree = agree
        self._lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self._furthest = furthest(self._lengths, threshold)
        self._seen: dict[str, int] = {}
        self._kept: list[int] = []
        self.repeated: dict[int, int] = {}
        # Rows of the kept texts, then of the current block.
        self._sketches: Sketches = np.empty((len(texts), SKETCH_BYTES), dtype=np.uint8)
        self._ones = np.zeros(len(texts), dtype=np.int64)
        # At 1 only equal texts are duplicates.
        self._left = budget if threshold < 1 else 0
        self._until = until
        self.spent = False
        self._few = self._all_steps() <= min(FEW_STEPS, self._left)

    def _all_steps(self) -> int:
        """The cost of comparing all pairs."""
        if not len(self._lengths):
            return 0
        longest = int(self._lengths.max())
        return len(self._lengths) ** 2 * longest * _words(longest, int(self._furthest.max()))

    def read(self, block: range) -> Iterator[int]:
        new: list[int] = []
        for index in block:
            # A text equal to one left out is a duplicate of the same kept text.
            first = self._seen.setdefault(self._texts[index], index)
            if first == index:
                new.append(index)
            else:
                self.repeated[index] = first
        if not self._left:
            yield from new
            return
        before = len(self._kept)
        others = np.array(self._kept + new, dtype=np.int64)
        bound = np.maximum(self._furthest[new][:, None], self._furthest[others])
        if self._few:
            yield from self._all_pairs(new, others, bound)
            return
        lost = self._lost(new, others)
        near = (abs(self._lengths[new][:, None] - self._lengths[others]) <= bound) & (lost <= RUN * bound)
        there = np.arange(len(others)) < before
        for row, index in enumerate(new):
            some = np.flatnonzero(near[row] & there)
            # Most duplicates share most trigrams with one kept text: try that one first.
            close = 2 * lost[row, some] <= RUN * bound[row, some]
            tried = (some[close], some[~close])
            repeats = (self._repeats(index, others[each], bound[row, each]) for each in tried if len(each))
            if (other := next((one for one in repeats if one is not None), None)) is not None:
                self.repeated[index] = other
                continue
            there[before + row] = True
            self._sketches[len(self._kept)] = self._sketches[before + row]
            self._ones[len(self._kept)] = self._ones[before + row]
            self._kept.append(index)
            yield index

    def _all_pairs(self, new: Sequence[int], others: Numbers, bound: Numbers) -> Iterator[int]:
        if not new:
            return
        texts = [self._texts[index] for index in others.tolist()]
        before = len(self._kept)
        cutoff = int(bound.max())
        repeats = cdist(texts[before:], texts, scorer=Levenshtein.distance, score_cutoff=cutoff) <= bound
        there = np.arange(len(others)) < before
        for row, index in enumerate(new):
            other = self._agreeing(index, others[repeats[row] & there])
            if other is not None:
                self.repeated[index] = other
                continue
            there[before + row] = True
            self._kept.append(index)
            yield index

    def _agreeing(self, index: int, others: Numbers) -> int | None:
        """The first of the others that it repeats, given that they are similar enough."""
        return next((other for other in others.tolist() if self._agree(index, other)), None)

    def _lost(self, new: Sequence[int], others: Numbers) -> NDArray[np.float64]:
        """For each pair, the larger number of trigrams of one that the other's sketch lacks. One edit removes at most
        three trigrams."""
        before = len(self._kept)
        steps = READ_STEPS * int(self._lengths[new].sum()) + SKETCH_STEPS * len(new) * len(others)
        if not new or not self._spend(steps):
            return np.full((len(new), len(others)), np.inf)
        drawn = self._sketches[: len(others)]
        drawn[before:] = sketches([self._texts[index] for index in new])
        ones = self._ones[: len(others)]
        ones[before:] = np.bitwise_count(drawn[before:].view(np.uint64)).sum(axis=1)
        apart = np.asarray(numkong.cdist(drawn[before:], drawn, "hamming", dtype="uint1"))
        return np.asarray((apart + abs(ones[before:][:, None] - ones)) / 2)

    def _repeats(self, index: int, others: Numbers, bound: Numbers) -> int | None:
        """The first of the others that it repeats: compares prefixes first, as cutting equally long ends never
        increases a distance, then whole texts."""
        length = int(self._lengths[index])
        left_off = length - int(BEGINNING * bound.max()) - RUN
        # A prefix of most of the text is not worth a second comparison.
        if left_off > length // 4:
            within = self._within(index, others, bound, left_off)
            others, bound = others[within], bound[within]
        slices = (slice(at, at + SLICE) for at in range(0, len(others), SLICE))
        found = (
            self._agreeing(index, others[some][self._within(index, others[some], bound[some], 0)]) for some in slices
        )
        return next((one for one in found if one is not None), None)

    def _within(self, index: int, others: Numbers, bound: Numbers, left_off: int) -> NDArray[np.bool_]:
        """Which of the others are within their bound, without the last `left_off` characters."""
        cutoff = int(bound.max())
        one = self._texts[index][: len(self._texts[index]) - left_off]
        steps = CALL_STEPS * len(others) + _words(len(one), cutoff) * int((self._lengths[others] - left_off).sum())
        if not self._spend(steps):
            return np.zeros(len(others), dtype=np.bool_)
        ends = (self._lengths[others] - left_off).tolist()
        cut = [self._texts[other][:end] for other, end in zip(others.tolist(), ends, strict=True)]
        return np.asarray(cdist([one], cut, scorer=Levenshtein.distance, score_cutoff=cutoff)[0] <= bound)

    def _spend(self, steps: int) -> bool:
        """Spend steps of the budget; False, from then on, if not enough is left."""
        self._left = self._left - steps if steps <= self._left and time.monotonic() < self._until else 0
        self.spent = self._left == 0
        return not self.spent


def _words(length: int, cutoff: int) -> int:
    """Machine words per character that the bit-parallel distance takes."""
    return min(length, 2 * cutoff + 1) // 64 + 2


def sketches(texts: Sequence[str]) -> Sketches:
    """One row per text. Hash collisions only make texts look more similar."""
    lengths = [len(text) for text in texts]
    signs = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    runs = np.zeros(len(signs), dtype=np.uint32)
    runs[: len(signs) - 2] = ((signs[:-2] * SPREAD + signs[1:-1]) * SPREAD + signs[2:]) * SPREAD
    within = np.ones(len(signs), dtype=np.bool_)
    first = np.zeros(len(signs), dtype=np.bool_)
    start = 0
    for length in lengths:
        end = start + length
        whole = max(start, end - RUN + 1)
        runs[start:whole].sort()
        first[start:end][:1] = True
        within[whole:end] = False
        start = end
    first[1:] |= runs[1:] != runs[:-1]
    at = np.arange(len(runs), dtype=np.uint32)
    nth = at - np.maximum.accumulate(np.where(first, at, np.uint32(0)))
    bits = ((runs + nth * SPREAD) ^ ((runs + nth) >> SHIFT)) * SPREAD_AGAIN >> SHIFT
    rows = np.repeat(np.arange(0, len(texts) * SKETCH_BITS, SKETCH_BITS), lengths)
    plain = np.zeros(len(texts) * SKETCH_BITS, dtype=np.bool_)
    plain[(rows + bits)[within]] = True
    return np.packbits(plain).reshape(len(texts), SKETCH_BYTES)
