"""Binary vectors: a large segment's vectors with one bit per number, to find candidates quickly.

Two passes: all rows by their first 192 bits, then the best by all bits. How many rows each pass must keep is measured
against an exact search when they are built. For vectors without structure that is too many: then there are no binary
vectors, and every row is scanned, which is slow but exact.
"""

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Bits = NDArray[np.uint64]
Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]

WORTH_IT = 20_000
NEAREST = 10
RECALL = 0.995
SAMPLE = 64
GLANCE = 3
# Twice what the sample needed is kept; beyond an eighth of the segment a scan is as fast.
SPARE = 2
MOST = 8


class BinaryVectors:
    """`bits` has one row per 64 numbers; `middle` is the mean that a number is compared with; `glance` and `reach` are
    how many rows the first and the second pass keep."""

    def __init__(self, bits: Bits, middle: Vectors, glance: int, reach: int) -> None:
        self.bits = bits
        self.middle = middle
        self.glance = glance
        self.reach = reach

    @classmethod
    def of(cls, vectors: Vectors) -> "BinaryVectors | None":
        count, dimensions = vectors.shape
        if count < WORTH_IT or dimensions % 64:
            return None
        middle = np.asarray(vectors.mean(axis=0), np.float32)
        bits = np.ascontiguousarray(_signs(vectors, middle).T)
        glances: list[int] = []
        reaches: list[int] = []
        for query in _samples(vectors):
            [asked] = _signs(query[None], middle)
            nearest = np.argpartition(-(vectors @ query), NEAREST)[:NEAREST]
            glances += _ranks(_distances(bits[:GLANCE], asked), nearest)
            reaches += _ranks(_distances(bits, asked), nearest)
        glance, reach = (SPARE * int(np.quantile(ranks, RECALL, method="higher")) for ranks in (glances, reaches))
        return cls(bits, middle, glance, reach) if reach <= count // MOST else None

    def candidates(self, query: Vectors, least: int, mask: Mask | None) -> Rows:
        """The rows most similar to the query, at least `least` and at least as many as the recall needs."""
        [asked] = _signs(query[None], self.middle)
        count = self.bits.shape[1]
        wanted = max(least, self.reach)
        if max(self.glance, wanted) > count // 4:
            return _permitted(_smallest(_distances(self.bits, asked), wanted, mask), mask)
        rows = _permitted(_smallest(_distances(self.bits[:GLANCE], asked), max(self.glance, wanted), mask), mask)
        return rows[_smallest(_distances(self.bits[:, rows], asked), wanted, None)]


def _distances(bits: Bits, asked: NDArray[np.uint64]) -> NDArray[np.uint16]:
    """The Hamming distance of each row."""
    total: NDArray[np.uint16] | None = None
    for begin in range(0, len(bits), 3):  # three counts of at most 64 fit into a byte
        part = np.bitwise_count(bits[begin] ^ asked[begin])
        for at in range(begin + 1, min(begin + 3, len(bits))):
            part += np.bitwise_count(bits[at] ^ asked[at])
        total = part if len(bits) <= 3 else part.astype(np.uint16) if total is None else total + part
    assert total is not None
    return total


def _smallest(values: NDArray[np.uint16], wanted: int, mask: Mask | None) -> Rows:
    """A superset of the rows with the `wanted` smallest values. The threshold is estimated on a sample and raised until
    it is high enough: sorting all rows would cost more than everything else."""
    if wanted >= len(values):
        return np.arange(len(values))
    share = 1.0 if mask is None else max(1e-6, float(np.count_nonzero(mask[::16])) * 16 / len(mask))
    counts = np.cumsum(np.bincount(values[::16])) * 16 * share
    bar = int(np.searchsorted(counts, wanted))
    while True:
        rows = np.flatnonzero(values <= bar)
        found = len(rows) if mask is None else int(np.count_nonzero(mask[rows]))
        if found >= wanted or len(rows) == len(values):
            return rows
        bar += 1


def _permitted(rows: Rows, mask: Mask | None) -> Rows:
    return rows if mask is None else rows[mask[rows]]


def _ranks(apart: NDArray[np.uint16], nearest: Rows) -> list[int]:
    """For each of the true nearest rows, how many rows are at most as distant."""
    upto = np.cumsum(np.bincount(apart))
    return [int(upto[distance]) for distance in apart[nearest]]


def _signs(vectors: Vectors, middle: Vectors) -> Bits:
    return np.packbits(vectors > middle, axis=1).view(np.uint64)


def _samples(vectors: Vectors) -> Vectors:
    """Sample queries that are harder than real ones: vectors of the segment with noise."""
    chance = np.random.default_rng(0)
    near = vectors[chance.choice(len(vectors), SAMPLE, replace=False)]
    near = near + chance.standard_normal(near.shape).astype(np.float32) * np.float32(1.2 / near.shape[1] ** 0.5)
    return np.asarray(near / np.linalg.norm(near, axis=1, keepdims=True), np.float32)
