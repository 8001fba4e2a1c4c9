"""Segments: immutable vectors and postings of some chunks, in memory or mapped from a folder."""

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numkong
import numpy as np
from numpy.typing import NDArray

from anabranch.knowledge.durable_files import sync_file
from anabranch.knowledge.index import postings
from anabranch.knowledge.index.binary_vectors import BinaryVectors
from anabranch.knowledge.index.postings import Mask, Postings, Scored, top

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
        return cls(np.asarray(keys, np.int64), vectors, postings.build(texts))

    @classmethod
    def merge(cls, parts: Sequence["Segment"], kept: Sequence[Mask]) -> "Segment":
        """Adjacent segments merged into one, with only the rows in the masks."""
        chosen = list(zip(parts, kept, strict=True))
        keys = np.concatenate([part.keys[keep] for part, keep in chosen])
        vectors = np.concatenate([part.vectors[keep] for part, keep in chosen])
        return cls(keys, vectors, postings.merge([part.words for part in parts], kept))

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
            kept = self._norms = (average, postings.norms(self.words, average))
        return postings.score(self.words, [(*self.span(term), weight) for term, weight in weights], kept[1], mask)

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
