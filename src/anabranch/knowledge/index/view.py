"""What one search covers: the chunks that its caller may find, in segments."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.knowledge.index.segment import Hits, Mask, Scored, Segment, top
from anabranch.text.words import terms


class Elsewhere(NamedTuple):
    """What an index on other machines has counted among the chunks that a caller may find: how many there are, how many
    words they have, and how many have each term."""

    rows: int
    words: int
    counts: Mapping[int, int]


class View(NamedTuple):
    """Each segment with the mask of its permitted rows (None permits all); `rows` and `average` are how many rows those
    are and how many words one has. `seen` hashes what the caller may find. `partial`: a part of the index is damaged or
    cannot be reached, and its chunks are not covered. With `elsewhere`, the first segment has the best chunks of an
    index on other machines, and the other segments have what that index has not."""

    parts: tuple[tuple[Segment, Mask | None], ...]
    rows: int
    average: float
    seen: str = ""
    partial: bool = False
    elsewhere: Elsewhere | None = None

    @classmethod
    def of(
        cls,
        parts: tuple[tuple[Segment, Mask | None], ...],
        *,
        seen: str,
        partial: bool,
        elsewhere: Elsewhere | None = None,
    ) -> "View":
        counted = parts if elsewhere is None else parts[1:]
        rows = sum(len(segment) if chosen is None else int(chosen.sum()) for segment, chosen in counted)
        words = sum(segment.count_words(chosen) for segment, chosen in counted)
        if elsewhere is not None:
            rows, words = rows + elsewhere.rows, words + elsewhere.words
        return cls(parts, rows, words / rows if words else 1.0, seen, partial, elsewhere)

    def nearest(self, query: NDArray[np.float32], limit: int) -> Hits:
        """The chunks nearest to a vector: keys and scores."""
        return merged([(part, part.nearest(query, limit, mask)) for part, mask in self.parts], limit)

    def lexical(self, text: str) -> "Lexical":
        """The BM25 scores of every permitted chunk."""
        weights = self.weights(text)
        scored = tuple((part, part.matching(weights, self.average, mask)) for part, mask in self.parts)
        return Lexical(scored, weights)

    def vectors(self, keys: NDArray[np.int64], dimensions: int) -> NDArray[np.float32]:
        """The vectors of chunks, by key, in the order of the keys."""
        found = np.empty((len(keys), dimensions), np.float32)
        for part, _ in self.parts:
            at, rows = places(part, keys)
            if len(at):  # an empty segment has no dimensions
                found[at] = part.vectors[rows]
        return found

    def weights(self, text: str) -> list[tuple[int, float]]:
        """The text's terms with their inverse document frequency, counted over permitted chunks only, so that scores
        disclose nothing about the others."""
        wanted = dict.fromkeys(terms(text))
        if self.elsewhere is None:
            counted = {term: sum(part.row_count(term, mask) for part, mask in self.parts) for term in wanted}
        else:  # of a long text, the index is asked for its first terms
            counted = {
                term: known + sum(part.row_count(term, mask) for part, mask in self.parts[1:])
                for term in wanted
                if (known := self.elsewhere.counts.get(term)) is not None
            }
        return [(term, math.log(1 + (self.rows - count + 0.5) / (count + 0.5))) for term, count in counted.items()]


class Lexical(NamedTuple):
    """The BM25 scores of a text in each segment."""

    parts: tuple[tuple[Segment, Scored], ...]
    weights: list[tuple[int, float]]

    def shares(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The share of the text's terms that each chunk contains, weighted by rarity, from 0 to 1."""
        found = np.zeros(len(keys), np.float32)
        for part, _ in self.parts:
            at, rows = places(part, keys)
            for term, weight in self.weights if len(at) else ():
                found[at[part.contains(term, rows)]] += weight
        return found / np.float32(sum(weight for _, weight in self.weights) or 1.0)

    def best(self, limit: int) -> Hits:
        """The chunks with the highest scores: keys and scores."""
        return merged([(part, scored.best(limit)) for part, scored in self.parts], limit)

    def at(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The scores of given chunks; 0 where no term matches."""
        found = np.zeros(len(keys), np.float32)
        for part, scored in self.parts:
            at, rows = places(part, keys)
            found[at] = scored.scores[rows]
        return found


def places(segment: Segment, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions of the keys that a segment contains, and their rows."""
    rows = segment.keys.searchsorted(keys)
    rows[rows == len(segment)] = 0
    at = np.flatnonzero(segment.keys[rows] == keys) if len(segment) else np.empty(0, np.int64)
    return at, rows[at]


def merged(found: Sequence[tuple[Segment, Hits]], limit: int) -> Hits:
    """The best chunks of all segments: keys and scores."""
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    keys = np.concatenate([segment.keys[rows] for segment, (rows, _) in found])
    return top(keys, np.concatenate([scores for _, (_, scores) in found]), limit)
