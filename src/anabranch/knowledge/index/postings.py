"""Postings: the rows and counts of each term, as flat arrays that can be mapped, masked and merged.

BM25 scores are computed at query time: a filter is only a mask, statistics are those of the whole collection, and the
same code serves a mapped segment of a million rows and one of ten rows in memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

K1 = 1.2
B = 0.75

Mask = NDArray[np.bool_]


class Postings(NamedTuple):
    """Term `terms[i]` occurs in `rows[starts[i]:starts[i + 1]]`, ascending, with the `counts` at the same positions."""

    terms: NDArray[np.uint64]
    starts: NDArray[np.int64]
    rows: NDArray[np.uint32]
    counts: NDArray[np.uint16]
    lengths: NDArray[np.uint32]

    def span(self, term: int) -> tuple[int, int]:
        at = int(self.terms.searchsorted(np.uint64(term)))
        if at == len(self.terms) or self.terms[at] != term:
            return 0, 0
        return int(self.starts[at]), int(self.starts[at + 1])


def build(texts: Sequence[Sequence[int]]) -> Postings:
    """The postings of texts given as terms; row i is text i."""
    lengths = np.fromiter((len(text) for text in texts), np.uint32, len(texts))
    terms = np.fromiter((term for text in texts for term in text), np.uint64, int(lengths.sum()))
    rows = np.repeat(np.arange(len(texts), dtype=np.uint32), lengths)
    order = np.lexsort((rows, terms))
    return _grouped(terms[order], rows[order], None, lengths)


def merge(parts: Sequence[Postings], kept: Sequence[Mask]) -> Postings:
    """Several postings merged into one; rows outside the masks are dropped and the others renumbered."""
    terms, rows, counts, lengths = [], [], [], []
    offset = 0
    for part, keep in zip(parts, kept, strict=True):
        moved = (np.cumsum(keep, dtype=np.int64) - 1 + offset).astype(np.uint32)
        chosen = keep[part.rows]
        terms.append(np.repeat(part.terms, np.diff(part.starts))[chosen])
        rows.append(moved[part.rows[chosen]])
        counts.append(part.counts[chosen])
        lengths.append(part.lengths[keep])
        offset += int(keep.sum())
    all_terms, all_rows = np.concatenate(terms), np.concatenate(rows)
    # Each part is sorted and its rows follow those of the part before, so a stable sort by term is enough.
    order = np.argsort(all_terms, kind="stable")
    return _grouped(all_terms[order], all_rows[order], np.concatenate(counts)[order], np.concatenate(lengths))


def _grouped(
    terms: NDArray[np.uint64],
    rows: NDArray[np.uint32],
    counts: NDArray[np.uint16] | None,
    lengths: NDArray[np.uint32],
) -> Postings:
    if counts is None:
        new = np.empty(len(terms), bool)
        new[:1] = True
        new[1:] = (terms[1:] != terms[:-1]) | (rows[1:] != rows[:-1])
        first = np.flatnonzero(new)
        counts = np.minimum(np.diff(np.append(first, len(terms))), 65_535).astype(np.uint16)
        terms, rows = terms[first], rows[first]
    begins = np.flatnonzero(np.append(True, terms[1:] != terms[:-1])) if len(terms) else np.empty(0, np.int64)
    return Postings(terms[begins], np.append(begins, len(terms)).astype(np.int64), rows, counts, lengths)


def norms(postings: Postings, average: float) -> NDArray[np.float32]:
    """The BM25 length normalisation of each row."""
    return postings.lengths * np.float32(K1 * B / average) + np.float32(K1 * (1 - B))


def score(
    postings: Postings, spans: Sequence[tuple[int, int, float]], norm: NDArray[np.float32], mask: Mask | None
) -> "Scored":
    """BM25 scores of every row with one of the terms; `spans` has the span and weight of each term."""
    scores = np.zeros(len(postings.lengths), np.float32)
    touched: list[NDArray[np.uint32]] = []
    for begin, end, weight in spans:
        if begin == end:
            continue
        rows, counts = postings.rows[begin:end], postings.counts[begin:end]
        if mask is not None:
            allowed = mask[rows]
            rows, counts = rows[allowed], counts[allowed]
        often = counts.astype(np.float32)
        scores[rows] += np.float32(weight * (K1 + 1)) * (often / (often + norm[rows]))
        touched.append(rows)
    return Scored(scores, touched)


class Scored(NamedTuple):
    """Scores by row; `touched` are the rows of each term."""

    scores: NDArray[np.float32]
    touched: list[NDArray[np.uint32]]

    def best(self, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The best rows and their scores, best first; ties in row order."""
        if not self.touched:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        if sum(map(len, self.touched)) < len(self.scores) // 16:  # cheaper than a scan of all scores
            found = np.concatenate(self.touched).astype(np.int64)
            found = np.unique(_largest(found, self.scores[found], limit * len(self.touched)))
        else:
            found = np.flatnonzero(self.scores)
        return top(found, self.scores[found], limit)


def top(
    rows: NDArray[np.int64], scores: NDArray[np.float32], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if len(rows) > limit:
        chosen = np.argpartition(-scores, limit - 1)[:limit]
        rows, scores = rows[chosen], scores[chosen]
    order = np.lexsort((rows, -scores))
    return rows[order], scores[order]


def _largest(rows: NDArray[np.int64], scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    return rows if len(rows) <= limit else rows[np.argpartition(-scores, limit - 1)[:limit]]
