"""An immutable segment of the index: vectors, binary codes, postings."""

import mmap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numkong
import numpy as np
from numpy.typing import NDArray

from anabranch.knowledge.durable_files import sync_file
from anabranch.knowledge.index.manifest import SegmentDamaged, checksum, lost

Mask = NDArray[np.bool_]
Bits = NDArray[np.uint64]
Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]
Scores = NDArray[np.float32]
Hits = tuple[Rows, Scores]

# Below this number of rows a scan of the 8-bit codes is as fast as binary vectors.
MIN_BINARY_ROWS = 20_000
NEAREST = 10
RECALL = 0.995
BINARY_SAMPLE = 64
# The first pass compares this many 64-bit words of each row.
FIRST_PASS_WORDS = 3
# Twice what the sample needed is kept; beyond an eighth of the segment a scan is as fast.
BINARY_SPARE = 2
MAX_KEPT_SHARE = 8


class BinaryVectors(NamedTuple):
    """`bits` has one row per 64 numbers; a bit says whether a number is above its `mean`. The first and the second pass
    keep `first_pass` and `second_pass` rows."""

    bits: Bits
    mean: Vectors
    first_pass: int
    second_pass: int

    @classmethod
    def of(cls, vectors: Vectors) -> "BinaryVectors | None":
        count, dimensions = vectors.shape
        if count < MIN_BINARY_ROWS or dimensions % 64:
            return None
        mean = np.asarray(vectors.mean(axis=0), np.float32)
        bits = np.ascontiguousarray(_signs(vectors, mean).T)
        first_ranks: list[int] = []
        second_ranks: list[int] = []
        for query in _samples(vectors):
            [query_bits] = _signs(query[None], mean)
            nearest = np.argpartition(-(vectors @ query), NEAREST)[:NEAREST]
            first_ranks += _ranks(_distances(bits[:FIRST_PASS_WORDS], query_bits), nearest)
            second_ranks += _ranks(_distances(bits, query_bits), nearest)
        first_pass, second_pass = (
            BINARY_SPARE * int(np.quantile(ranks, RECALL, method="higher")) for ranks in (first_ranks, second_ranks)
        )
        return cls(bits, mean, first_pass, second_pass) if second_pass <= count // MAX_KEPT_SHARE else None

    def candidates(self, query: Vectors, least: int, mask: Mask | None) -> Rows:
        """The rows most similar to the query, at least `least` and at least as many as the recall needs."""
        [query_bits] = _signs(query[None], self.mean)
        wanted = max(least, self.second_pass)
        if max(self.first_pass, wanted) > self.bits.shape[1] // 4:
            return _permitted(_smallest(_distances(self.bits, query_bits), wanted, mask), mask)
        near = _distances(self.bits[:FIRST_PASS_WORDS], query_bits)
        rows = _permitted(_smallest(near, max(self.first_pass, wanted), mask), mask)
        return rows[_smallest(_distances(self.bits[:, rows], query_bits), wanted, None)]


def _distances(bits: Bits, query_bits: Bits) -> NDArray[np.uint16]:
    """The Hamming distance of each row."""
    total: NDArray[np.uint16] | None = None
    for begin in range(0, len(bits), 3):  # three counts of at most 64 fit into a byte
        part = np.bitwise_count(bits[begin] ^ query_bits[begin])
        for at in range(begin + 1, min(begin + 3, len(bits))):
            part += np.bitwise_count(bits[at] ^ query_bits[at])
        total = part if len(bits) <= 3 else part.astype(np.uint16) if total is None else total + part
    assert total is not None
    return total


def _smallest(values: NDArray[np.uint16], wanted: int, mask: Mask | None) -> Rows:
    """A superset of the rows with the `wanted` smallest values. The threshold is estimated on a sample and raised until
    it is high enough: sorting all rows would cost more than everything else."""
    if wanted >= len(values):
        return np.arange(len(values))
    share = 1.0 if mask is None else max(1e-6, float(np.count_nonzero(mask[::16])) * 16 / len(mask))
    threshold = int(np.searchsorted(np.cumsum(np.bincount(values[::16])) * 16 * share, wanted))
    while True:
        rows = np.flatnonzero(values <= threshold)
        if len(_permitted(rows, mask)) >= wanted or len(rows) == len(values):
            return rows
        threshold += 1


def _permitted(rows: Rows, mask: Mask | None) -> Rows:
    return rows if mask is None else rows[mask[rows]]


def _ranks(distances: NDArray[np.uint16], nearest: Rows) -> list[int]:
    """For each of the true nearest rows, how many rows are at most as distant."""
    counts: list[int] = np.cumsum(np.bincount(distances))[distances[nearest]].tolist()
    return counts


def _signs(vectors: Vectors, mean: Vectors) -> Bits:
    return np.packbits(vectors > mean, axis=1).view(np.uint64)


def _samples(vectors: Vectors) -> Vectors:
    """Sample queries that are harder than real ones: vectors of the segment with noise."""
    random = np.random.default_rng(0)
    near = vectors[random.choice(len(vectors), BINARY_SAMPLE, replace=False)]
    near = near + random.standard_normal(near.shape).astype(np.float32) * np.float32(1.2 / near.shape[1] ** 0.5)
    return np.asarray(near / np.linalg.norm(near, axis=1, keepdims=True), np.float32)


K1 = 1.2
B = 0.75


class Postings(NamedTuple):
    """Term `terms[i]` occurs in `rows[starts[i]:starts[i + 1]]`, ascending, with the `counts` at the same positions.
    `lengths` counts the terms of each row."""

    terms: NDArray[np.uint64]
    starts: Rows
    rows: NDArray[np.uint32]
    counts: NDArray[np.uint16]
    lengths: NDArray[np.uint32]

    @classmethod
    def build(cls, texts: Sequence[Sequence[int]]) -> "Postings":
        """The postings of texts given as terms; row i is text i."""
        lengths = np.fromiter((len(text) for text in texts), np.uint32, len(texts))
        terms = np.fromiter((term for text in texts for term in text), np.uint64, int(lengths.sum()))
        rows = np.repeat(np.arange(len(texts), dtype=np.uint32), lengths)
        order = np.lexsort((rows, terms))
        terms, rows = terms[order], rows[order]
        new = np.append(True, (terms[1:] != terms[:-1]) | (rows[1:] != rows[:-1]))[: len(terms)]
        first = np.flatnonzero(new)
        counts = np.minimum(np.diff(np.append(first, len(terms))), 65_535).astype(np.uint16)
        return cls._by_term(terms[first], rows[first], counts, lengths)

    @classmethod
    def merge(cls, parts: Sequence["Postings"], kept: Sequence[Mask]) -> "Postings":
        """Several postings merged into one; rows outside the masks are dropped and the others renumbered."""
        terms, rows, counts, lengths = [], [], [], []
        offset = 0
        for part, keep in zip(parts, kept, strict=True):
            renumbered = (np.cumsum(keep, dtype=np.int64) - 1 + offset).astype(np.uint32)
            chosen = keep[part.rows]
            terms.append(np.repeat(part.terms, np.diff(part.starts))[chosen])
            rows.append(renumbered[part.rows[chosen]])
            counts.append(part.counts[chosen])
            lengths.append(part.lengths[keep])
            offset += int(keep.sum())
        all_terms = np.concatenate(terms)
        # Each part is sorted and its rows follow those of the part before, so a stable sort by term is enough.
        order = np.argsort(all_terms, kind="stable")
        all_rows, all_counts = np.concatenate(rows)[order], np.concatenate(counts)[order]
        return cls._by_term(all_terms[order], all_rows, all_counts, np.concatenate(lengths))

    @classmethod
    def _by_term(
        cls,
        terms: NDArray[np.uint64],
        rows: NDArray[np.uint32],
        counts: NDArray[np.uint16],
        lengths: NDArray[np.uint32],
    ) -> "Postings":
        begins = np.flatnonzero(np.append(True, terms[1:] != terms[:-1])[: len(terms)])
        return cls(terms[begins], np.append(begins, len(terms)), rows, counts, lengths)

    def span(self, term: int) -> tuple[int, int]:
        at = int(self.terms.searchsorted(np.uint64(term)))
        if at == len(self.terms) or self.terms[at] != term:
            return 0, 0
        return int(self.starts[at]), int(self.starts[at + 1])

    def norms(self, average: float) -> Scores:
        """The BM25 length normalisation of each row."""
        return self.lengths * np.float32(K1 * B / average) + np.float32(K1 * (1 - B))

    def score(self, spans: Sequence[tuple[int, int, float]], norms: Scores, mask: Mask | None) -> "Scored":
        """BM25 scores of every row with one of the terms; `spans` has the span and weight of each term."""
        scores = np.zeros(len(self.lengths), np.float32)
        touched: list[NDArray[np.uint32]] = []
        for begin, end, weight in spans:
            if begin == end:
                continue
            rows, counts = self.rows[begin:end], self.counts[begin:end]
            if mask is not None:
                allowed = mask[rows]
                rows, counts = rows[allowed], counts[allowed]
            often = counts.astype(np.float32)
            scores[rows] += np.float32(weight * (K1 + 1)) * (often / (often + norms[rows]))
            touched.append(rows)
        return Scored(scores, touched)


class Scored(NamedTuple):
    """Scores by row; `touched` are the rows of each term."""

    scores: Scores
    touched: list[NDArray[np.uint32]]

    def best(self, limit: int) -> Hits:
        """The best rows and their scores, best first; ties in row order."""
        if not self.touched:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        if sum(map(len, self.touched)) < len(self.scores) // 16:  # cheaper than a scan of all scores
            rows = np.concatenate(self.touched).astype(np.int64)
            found = np.unique(_partitioned(rows, self.scores[rows], limit * len(self.touched))[0])
        else:
            found = np.flatnonzero(self.scores)
        return top(found, self.scores[found], limit)


def top(rows: Rows, scores: Scores, limit: int) -> Hits:
    """The best rows and their scores, best first."""
    rows, scores = _partitioned(rows, scores, limit)
    order = np.lexsort((rows, -scores))
    return rows[order], scores[order]


def _partitioned(rows: Rows, scores: Scores, limit: int) -> Hits:
    """The best rows and their scores, in no order."""
    if len(rows) <= limit:
        return rows, scores
    chosen = np.argpartition(-scores, limit - 1)[:limit]
    return rows[chosen], scores[chosen]


# Candidates of the 8-bit scan that are rescored exactly, beyond those requested.
SPARE = 50
SAMPLE = 2_000
MAX_CACHED_SPANS = 4_096
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


class Segment:
    """Row i is chunk `keys[i]`, ascending. `codes` are the vectors in 8 bits: a scan over them finds candidates, which
    are rescored with the vectors, so the result is that of an exact search."""

    def __init__(
        self,
        keys: Rows,
        vectors: Vectors,
        words: Postings,
        *,
        codes: NDArray[np.int8] | None = None,
        binary: BinaryVectors | None = None,
        max_gathered: int = GATHERED,
    ) -> None:
        self.keys = keys
        self.vectors = vectors
        self.codes = _coded(vectors) if codes is None else codes
        self.words = words
        self.binary = binary
        self._max_gathered = max_gathered
        # A question needs the span of each term several times.
        self._span = lru_cache(MAX_CACHED_SPANS)(words.span)
        self._norms = lru_cache(1)(words.norms)

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def build(cls, keys: Sequence[int], vectors: Vectors, texts: Sequence[Sequence[int]]) -> "Segment":
        return cls(np.asarray(keys, np.int64), vectors, Postings.build(texts))

    @classmethod
    def merge(cls, parts: Sequence["Segment"], kept: Sequence[Mask]) -> "Segment":
        """Adjacent segments merged into one, with only the rows in the masks."""
        chosen = list(zip(parts, kept, strict=True))
        keys = np.concatenate([part.keys[keep] for part, keep in chosen])
        vectors = np.concatenate([part.vectors[keep] for part, keep in chosen])
        return cls(keys, vectors, Postings.merge([part.words for part in parts], kept))

    def row_count(self, term: int, mask: Mask | None) -> int:
        """The number of rows that contain a term."""
        begin, end = self._span(term)
        return end - begin if mask is None else int(np.count_nonzero(mask[self.words.rows[begin:end]]))

    def contains(self, term: int, rows: Rows) -> Mask:
        """A mask of the given rows that contain a term."""
        begin, end = self._span(term)
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
        spans = [(*self._span(term), weight) for term, weight in weights]
        return self.words.score(spans, self._norms(average), mask)

    def nearest(self, query: Vectors, limit: int, mask: Mask | None) -> Hits:
        """The rows with the largest inner products, best first."""
        allowed = len(self) if mask is None else int(mask.sum())
        if allowed == 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        found = self._scan(query, limit + SPARE, mask, allowed)
        return top(found, products(query[None], self.vectors[found])[0], limit)

    def _scan(self, query: Vectors, limit: int, mask: Mask | None, allowed: int) -> Rows:
        """The best rows by their 8-bit codes, among the permitted rows if they are few, the candidates of the binary
        vectors, or all rows."""
        code = _coded(query[None])
        few = allowed <= GATHER * len(self) and (self.binary is None or allowed <= self._max_gathered)
        if mask is not None and few:
            rows = np.flatnonzero(mask)
        elif self.binary is not None:
            rows = self.binary.candidates(query, limit, mask)
        else:
            scores = products(code, self.codes)[0]
            if mask is None:
                return _largest(scores, limit)
            rows = np.flatnonzero(mask)
            return rows[_largest(scores[rows], limit)]
        return rows[_largest(products(code, self.codes[rows])[0], limit)]

    def write(self, folder: Path) -> str:
        """Write the arrays into a new folder, and return their checksum; they are on disk when this returns."""
        arrays = {"keys": self.keys, "vectors": self.vectors, "codes": self.codes, **self.words._asdict()}
        files: dict[str, bytes | memoryview] = {}
        if self.binary is not None:
            arrays |= {"bits": self.binary.bits, "middle": self.binary.mean}
            files[REACH] = f"{self.binary.first_pass} {self.binary.second_pass}".encode()
        for name, array in arrays.items():
            # A memoryview of nothing cannot be cast.
            files[f"{name}.bin"] = np.ascontiguousarray(array).data.cast("B") if array.size else b""
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for path in (*folder.iterdir(), folder):
            sync_file(path)
        return checksum((name, len(files[name]), [files[name]]) for name in sorted(files))

    @classmethod
    def map(cls, folder: Path, dimensions: int, *, max_gathered: int = GATHERED) -> "Segment":
        """A segment whose arrays are memory-mapped from its folder; SegmentDamaged if they do not have the form."""
        try:
            array = {name: _mapped(folder / f"{name}.bin", kind) for name, kind in FILES.items()}
            return cls(
                array["keys"],
                array["vectors"].reshape(-1, dimensions),
                Postings(*(array[name] for name in Postings._fields)),
                codes=array["codes"].reshape(-1, dimensions),
                binary=_mapped_binary(folder, dimensions),
                max_gathered=max_gathered,
            )
        except OSError as error:
            raise lost(error, folder) from None
        except (ValueError, TypeError):
            raise SegmentDamaged(folder.name) from None


def _mapped_binary(folder: Path, dimensions: int) -> BinaryVectors | None:
    if not (folder / REACH).is_file():
        return None
    bits = _mapped(folder / "bits.bin", np.uint64).reshape(dimensions // 64, -1)
    kept = map(int, (folder / REACH).read_text(encoding="ascii").split())
    return BinaryVectors(bits, _mapped(folder / "middle.bin", np.float32), *kept)


def _coded(vectors: Vectors) -> NDArray[np.int8]:
    """Vectors in 8 bits, with one scale, which keeps the order of inner products."""
    largest = float(np.abs(vectors).max(initial=0.0)) or 1.0
    return np.round(vectors * np.float32(127 / largest)).astype(np.int8)


def products(one: NDArray[Any], other: NDArray[Any]) -> Scores:
    """The inner products of two sets of vectors, on this thread: numpy would use all cores for little work."""
    if not len(one) or not len(other):
        return np.empty((len(one), len(other)), np.float32)
    return np.asarray(numkong.cdist(one, other, "dot", out_dtype="float32"))


def _largest(scores: Scores, limit: int) -> Rows:
    """The rows with the largest scores. A threshold from a sample leaves few rows to partition; partitioning all rows
    would cost as much as the scan."""
    if len(scores) <= limit:
        return np.arange(len(scores))
    sample = scores[:: len(scores) // SAMPLE + 1]
    over = 3 * limit * len(sample) // len(scores) + 8
    rows = np.flatnonzero(scores >= np.partition(sample, -over)[-over]) if over < len(sample) else np.empty(0, np.int64)
    if len(rows) < limit:
        rows = np.arange(len(scores))
    return rows[np.argpartition(scores[rows], len(rows) - limit)[-limit:]]


def _mapped(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    size = path.stat().st_size
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, kind)
    # Load all pages at once unless the file is large: otherwise the first questions wait for page faults.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if size <= POPULATE else 0)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ), kind)
