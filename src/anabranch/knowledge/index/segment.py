"""An immutable segment of the index: vectors, binary codes, postings."""

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numkong
import numpy as np
from numpy.typing import NDArray

from anabranch.knowledge.durable_files import sync_file

Mask = NDArray[np.bool_]
Bits = NDArray[np.uint64]
Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]

WORTH_IT = 20_000
NEAREST = 10
RECALL = 0.995
BINARY_SAMPLE = 64
GLANCE = 3
# Twice what the sample needed is kept; beyond an eighth of the segment a scan is as fast.
BINARY_SPARE = 2
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
        glance, reach = (
            BINARY_SPARE * int(np.quantile(ranks, RECALL, method="higher")) for ranks in (glances, reaches)
        )
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
    near = vectors[chance.choice(len(vectors), BINARY_SAMPLE, replace=False)]
    near = near + chance.standard_normal(near.shape).astype(np.float32) * np.float32(1.2 / near.shape[1] ** 0.5)
    return np.asarray(near / np.linalg.norm(near, axis=1, keepdims=True), np.float32)


K1 = 1.2
B = 0.75


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
            found = np.unique(_largest_of(found, self.scores[found], limit * len(self.touched)))
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


def _largest_of(rows: NDArray[np.int64], scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    return rows if len(rows) <= limit else rows[np.argpartition(-scores, limit - 1)[:limit]]


# Candidates of the 8-bit scan that are rescored exactly, beyond those requested.
SPARE = 50
SAMPLE = 2_000
SPANS = 4_096
POPULATE = 512 * 1024 * 1024
# Above this share of permitted rows, scanning the segment is cheaper than gathering them; above this number, so are the
# binary vectors.
GATHER = 0.2
GATHERED = 20_000
REACH = "reach"
FILES: Mapping[str, type[np.generic]] = {
    "keys": np.int64,
    "terms": np.uint64,
    "starts": np.int64,
    "rows": np.uint32,
    "counts": np.uint16,
    "lengths": np.uint32,
    "codes": np.int8,
    "vectors": np.float32,
}

Hits = tuple[NDArray[np.int64], NDArray[np.float32]]


class Segment:
    """Row i is chunk `keys[i]`, ascending. `codes` are the vectors in 8 bits: a scan over them finds candidates, which
    are rescored with the vectors, so the result is that of an exact search."""

    def __init__(
        self,
        keys: NDArray[np.int64],
        vectors: NDArray[np.float32],
        words: Postings,
        *,
        codes: NDArray[np.int8] | None = None,
        sketch: BinaryVectors | None = None,
        max_gathered: int = GATHERED,
    ) -> None:
        self.keys = keys
        self.vectors = vectors
        self.codes = _coded(vectors) if codes is None else codes
        self.words = words
        self.sketch = sketch
        self._max_gathered = max_gathered
        self._spans: dict[int, tuple[int, int]] = {}
        self._norms: tuple[float, NDArray[np.float32]] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def build(cls, keys: Sequence[int], vectors: NDArray[np.float32], texts: Sequence[Sequence[int]]) -> "Segment":
        return cls(np.asarray(keys, np.int64), vectors, build(texts))

    @classmethod
    def merge(cls, parts: Sequence["Segment"], kept: Sequence[Mask]) -> "Segment":
        """Adjacent segments merged into one, with only the rows in the masks."""
        chosen = list(zip(parts, kept, strict=True))
        keys = np.concatenate([part.keys[keep] for part, keep in chosen])
        vectors = np.concatenate([part.vectors[keep] for part, keep in chosen])
        return cls(keys, vectors, merge([part.words for part in parts], kept))

    def span(self, term: int) -> tuple[int, int]:
        """The span of a term in the postings; cached, because a question needs it several times."""
        found = self._spans.get(term)
        if found is None:
            if len(self._spans) >= SPANS:
                self._spans.clear()
            found = self._spans[term] = self.words.span(term)
        return found

    def row_count(self, term: int, mask: Mask | None) -> int:
        """The number of rows that contain a term."""
        begin, end = self.span(term)
        return end - begin if mask is None else int(np.count_nonzero(mask[self.words.rows[begin:end]]))

    def contains(self, term: int, rows: NDArray[np.int64]) -> Mask:
        """A mask of the given rows that contain a term."""
        begin, end = self.span(term)
        if begin == end:
            return np.zeros(len(rows), bool)
        holding = self.words.rows[begin:end]
        at = np.minimum(holding.searchsorted(rows), len(holding) - 1)
        return np.asarray(holding[at] == rows, bool)

    def count_words(self, mask: Mask | None) -> int:
        lengths = self.words.lengths
        return int((lengths if mask is None else lengths[mask]).sum(dtype=np.int64))

    def matching(self, weights: Sequence[tuple[int, float]], average: float, mask: Mask | None) -> Scored:
        """BM25 scores of every row, for an average row length."""
        kept = self._norms
        if kept is None or kept[0] != average:
            kept = self._norms = (average, norms(self.words, average))
        return score(self.words, [(*self.span(term), weight) for term, weight in weights], kept[1], mask)

    def nearest(self, query: NDArray[np.float32], limit: int, mask: Mask | None) -> Hits:
        """The rows with the largest inner products, best first."""
        allowed = len(self) if mask is None else int(mask.sum())
        if allowed == 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        found = self._scan(query, limit + SPARE, mask, allowed)
        return top(found, products(query[None], self.vectors[found])[0], limit)

    def _scan(self, query: NDArray[np.float32], limit: int, mask: Mask | None, allowed: int) -> NDArray[np.int64]:
        """The best rows by their 8-bit codes, among the permitted rows if they are few, the candidates of the binary
        vectors, or all rows."""
        code = _coded(query[None])
        few = allowed <= GATHER * len(self) and (self.sketch is None or allowed <= self._max_gathered)
        if mask is not None and few:
            rows = np.flatnonzero(mask)
        elif self.sketch is not None:
            rows = self.sketch.candidates(query, limit, mask)
        elif mask is None:
            return _largest(products(code, self.codes)[0], limit)
        else:
            rows = np.flatnonzero(mask)
            return rows[_largest(products(code, self.codes)[0][rows], limit)]
        return rows[_largest(products(code, self.codes[rows])[0], limit)]

    def write(self, folder: Path) -> None:
        """Write the arrays into a new folder; they are on disk when this returns."""
        folder.mkdir(parents=True)
        for name, array in self._arrays().items():
            path = folder / f"{name}.bin"
            np.ascontiguousarray(array).tofile(path)
            sync_file(path)
        if self.sketch is not None:
            (folder / REACH).write_text(f"{self.sketch.glance} {self.sketch.reach}", encoding="ascii")
            sync_file(folder / REACH)
        sync_file(folder)

    @classmethod
    def map(cls, folder: Path, dimensions: int, *, max_gathered: int = GATHERED) -> "Segment":
        """A segment whose arrays are memory-mapped from its folder."""
        array = {name: _mapped(folder / f"{name}.bin", kind) for name, kind in FILES.items()}
        words = Postings(array["terms"], array["starts"], array["rows"], array["counts"], array["lengths"])
        return cls(
            array["keys"],
            array["vectors"].reshape(-1, dimensions),
            words,
            codes=array["codes"].reshape(-1, dimensions),
            sketch=_mapped_sketch(folder, dimensions),
            max_gathered=max_gathered,
        )

    def _arrays(self) -> Mapping[str, NDArray[np.generic]]:
        arrays = {"keys": self.keys, "vectors": self.vectors, "codes": self.codes, **self.words._asdict()}
        if self.sketch is not None:
            arrays |= {"bits": self.sketch.bits, "middle": self.sketch.middle}
        return arrays


def _mapped_sketch(folder: Path, dimensions: int) -> BinaryVectors | None:
    if not (folder / REACH).is_file():
        return None
    bits = _mapped(folder / "bits.bin", np.uint64).reshape(dimensions // 64, -1)
    glance, reach = map(int, (folder / REACH).read_text(encoding="ascii").split())
    return BinaryVectors(bits, _mapped(folder / "middle.bin", np.float32), glance, reach)


def _coded(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """Vectors in 8 bits, with one scale, which keeps the order of inner products."""
    largest = float(np.abs(vectors).max(initial=0.0)) or 1.0
    return np.round(vectors * np.float32(127 / largest)).astype(np.int8)


def products(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float32]:
    """The inner products of two sets of vectors, on this thread: numpy would use all cores for little work."""
    if not len(one) or not len(other):
        return np.empty((len(one), len(other)), np.float32)
    return np.asarray(numkong.cdist(one, other, "dot", out_dtype="float32"))


def _largest(scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    if len(scores) <= limit:
        return np.arange(len(scores))
    rows = _promising(scores, limit)
    return rows[np.argpartition(scores[rows], len(rows) - limit)[-limit:]]


def _promising(scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    """A superset of the largest rows, from a threshold estimated on a sample: partitioning all rows would cost as much
    as the scan."""
    sample = scores[:: len(scores) // SAMPLE + 1]
    over = 3 * limit * len(sample) // len(scores) + 8
    if over < len(sample):
        rows = np.flatnonzero(scores >= np.partition(sample, -over)[-over])
        if len(rows) >= limit:
            return rows
    return np.arange(len(scores))


def _mapped(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    size = path.stat().st_size
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, kind)
    # Load all pages at once unless the file is large: otherwise the first questions wait for page faults.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if size <= POPULATE else 0)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ), kind)
