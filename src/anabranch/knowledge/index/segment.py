"""Segments: some chunks' vectors and postings, never changed once written; in memory or mapped from a folder."""

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

# Candidates that the 8-bit scan hands to the exact vectors, beyond those that were asked for.
SPARE = 50
SAMPLE = 2_000
SPANS = 4_096
POPULATE = 512 * 1024 * 1024
# Above this share of a segment, scanning all of it is cheaper than gathering what is permitted; above this many, so is
# looking at the sketch.
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
    """Row i is chunk `keys[i]`, ascending. `codes` are the vectors in 8 bits: a scan over them finds the candidates,
    the vectors themselves give the scores, so the result is that of an exact search."""

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
        """One in place of several neighbours, without the rows that are not kept."""
        chosen = list(zip(parts, kept, strict=True))
        keys = np.concatenate([part.keys[keep] for part, keep in chosen])
        vectors = np.concatenate([part.vectors[keep] for part, keep in chosen])
        return cls(keys, vectors, postings.merge([part.words for part in parts], kept))

    def span(self, term: int) -> tuple[int, int]:
        """Where a term's rows are; a question asks for it several times."""
        found = self._spans.get(term)
        if found is None:
            if len(self._spans) >= SPANS:
                self._spans.clear()
            found = self._spans[term] = self.words.span(term)
        return found

    def often(self, term: int, mask: Mask | None) -> int:
        """In how many rows a term stands."""
        begin, end = self.span(term)
        return end - begin if mask is None else int(np.count_nonzero(mask[self.words.rows[begin:end]]))

    def having(self, term: int, rows: NDArray[np.int64]) -> Mask:
        """Which of some rows have a term."""
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
        """BM25 of every row, for rows of an average length."""
        kept = self._norms
        if kept is None or kept[0] != average:
            kept = self._norms = (average, postings.norms(self.words, average))
        return postings.score(self.words, [(*self.span(term), weight) for term, weight in weights], kept[1], mask)

    def nearest(self, query: NDArray[np.float32], limit: int, mask: Mask | None) -> Hits:
        """The rows with the largest inner product, best first."""
        allowed = len(self) if mask is None else int(mask.sum())
        if allowed == 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        found = self._scan(query, limit + SPARE, mask, allowed)
        return top(found, products(query[None], self.vectors[found])[0], limit)

    def _scan(self, query: NDArray[np.float32], limit: int, mask: Mask | None, allowed: int) -> NDArray[np.int64]:
        """By the 8-bit codes of whatever may be near: the few that are permitted, those that the sketch has chosen, or
        all of them."""
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
        """Into a folder of its own, on disk when this returns."""
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
    """In 8 bits, with one scale for all: the order of inner products stays."""
    largest = float(np.abs(vectors).max(initial=0.0)) or 1.0
    return np.round(vectors * np.float32(127 / largest)).astype(np.int8)


def products(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float32]:
    """The inner products of two sets of vectors, on this thread: numpy would wake all cores for so little."""
    if not len(one) or not len(other):
        return np.empty((len(one), len(other)), np.float32)
    return np.asarray(numkong.cdist(one, other, "dot", out_dtype="float32"))


def _largest(scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    if len(scores) <= limit:
        return np.arange(len(scores))
    rows = _promising(scores, limit)
    return rows[np.argpartition(scores[rows], len(rows) - limit)[-limit:]]


def _promising(scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    """Rows among which the largest are, few if a sample has shown where the bar lies: partitioning all of them would
    cost as much as the scan."""
    sample = scores[:: len(scores) // SAMPLE + 1]
    over = 3 * limit * len(sample) // len(scores) + 8
    if over < len(sample):
        rows = np.flatnonzero(scores >= np.partition(sample, -over)[-over])
        if len(rows) >= limit:
            return rows
    return np.arange(len(scores))


def _mapped(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    size = path.stat().st_size
    if size == 0:  # nothing to map
        return np.empty(0, kind)
    # All pages at once, unless that would be a lot: page by page, the first questions would pay for it.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if size <= POPULATE else 0)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ), kind)
