"""The index reader: searches the segments of the current generation and the chunks added since, in one snapshot."""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import Filters
from anabranch.knowledge.index import postings
from anabranch.knowledge.index.catalog import Catalog, Mask
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.index.postings import top
from anabranch.knowledge.index.segment import Hits, Segment
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import documents as records
from anabranch.knowledge.records.database import Connection, Row
from anabranch.text.words import terms

PARTS = 8
# Cached until something changes: the same callers ask again and again.
VIEWS = 32


class Moved(Exception):
    """The index or another reader is ahead of the snapshot; the caller must take a new snapshot."""


class ReadSegment(NamedTuple):
    """A segment and the document key of each of its rows."""

    segment: Segment
    documents: NDArray[np.int32]


class View(NamedTuple):
    """What one search covers: each segment with the mask of its permitted rows (None permits all). `seen` hashes the
    permitted documents."""

    parts: tuple[tuple[Segment, Mask | None], ...]
    rows: int
    average: float
    seen: str = ""

    def nearest(self, query: NDArray[np.float32], limit: int) -> Hits:
        """The chunks nearest to a vector: keys and scores."""
        return _together([_keyed(part, part.nearest(query, limit, mask)) for part, mask in self.parts], limit)

    def lexical(self, text: str) -> "Lexical":
        """The BM25 scores of every permitted chunk."""
        weights = self.weights(text)
        total = sum(weight for _, weight in weights)
        scored = tuple((part, part.matching(weights, self.average, mask)) for part, mask in self.parts)
        return Lexical(scored, weights, total)

    def vectors(self, keys: NDArray[np.int64], dimensions: int) -> NDArray[np.float32]:
        """The vectors of chunks, by key, in the order of the keys."""
        found = np.empty((len(keys), dimensions), np.float32)
        for part, _ in self.parts:
            at, rows = _places(part, keys)
            found[at] = part.vectors[rows]
        return found

    def weights(self, text: str) -> list[tuple[int, float]]:
        """The text's terms with their inverse document frequency, counted over permitted chunks only, so that scores
        disclose nothing about the others."""
        found: list[tuple[int, float]] = []
        for term in dict.fromkeys(terms(text)):
            frequency = sum(part.row_count(term, mask) for part, mask in self.parts)
            found.append((term, math.log(1 + (self.rows - frequency + 0.5) / (frequency + 0.5))))
        return found


class Lexical(NamedTuple):
    """The BM25 scores of a text in each segment."""

    parts: tuple[tuple[Segment, postings.Scored], ...]
    weights: list[tuple[int, float]]
    total: float

    def shares(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The share of the text's terms that each chunk contains, weighted by rarity, from 0 to 1."""
        found = np.zeros(len(keys), np.float32)
        for part, _ in self.parts:
            at, rows = _places(part, keys)
            for term, weight in self.weights if len(at) else ():
                found[at[part.contains(term, rows)]] += weight
        return found / np.float32(self.total or 1.0)

    def best(self, limit: int) -> Hits:
        """The chunks with the highest scores: keys and scores."""
        return _together([_keyed(part, scored.best(limit)) for part, scored in self.parts], limit)

    def at(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The scores of given chunks; 0 where no term matches."""
        found = np.zeros(len(keys), np.float32)
        for part, scored in self.parts:
            at, rows = _places(part, keys)
            found[at] = scored.scores[rows]
        return found


class IndexReader:
    """Shared by all threads of a process. `view` and `look` refresh it under a lock."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._segments: tuple[ReadSegment, ...] = ()
        self._delta: tuple[ReadSegment, ...] = ()
        self._views: dict[tuple[int, int, bytes], View] = {}
        self.manifest = IndexManifest()
        self.catalog = Catalog()

    def view(self, db: Connection, filters: Filters, caller: Caller) -> View:
        """A view of what the caller may find in the connection's snapshot. Raises Moved if the snapshot is too old."""
        with self._lock:
            self._refresh(db)
            wanted = (self.catalog.seq, self.manifest.number, msgspec.json.encode((filters, caller)))
            if wanted not in self._views:
                if len(self._views) >= VIEWS:
                    self._views.clear()
                self._views[wanted] = self._viewed(self.catalog.mask(db, filters, caller))
            return self._views[wanted]

    def _viewed(self, mask: Mask) -> View:
        parts = tuple((part.segment, _narrowed(mask, part.documents)) for part in (*self._segments, *self._delta))
        seen = self.catalog.fingerprint(mask)
        rows = sum(len(segment) if chosen is None else int(chosen.sum()) for segment, chosen in parts)
        words = sum(segment.count_words(chosen) for segment, chosen in parts)
        return View(parts, rows, words / rows if words else 1.0, seen)

    def look(self, db: Connection) -> Catalog:
        """The catalog as of the connection's snapshot."""
        with self._lock:
            self._refresh(db)
            return self.catalog

    def _refresh(self, db: Connection) -> None:
        fresh = self.catalog.refresh(db)
        snapshot = fresh.snapshot
        if self.catalog.seq > snapshot:
            raise Moved
        stamp = self._generations.stamp()
        if stamp != self._stamp:
            manifest = self._generations.current()
            if manifest.seq > snapshot:
                raise Moved
            try:
                self._adopt(manifest)
            except FileNotFoundError:
                if self._generations.stamp() == stamp:
                    raise
                raise Moved from None  # a newer generation has replaced the segment
            self._stamp = stamp
        added = records.after_chunk(db, self.manifest.last_chunk) if fresh.everything else fresh.added
        self._delta = () if fresh.everything else self._delta
        if added:
            self._extend(db, added)

    def _adopt(self, manifest: IndexManifest) -> None:
        have = dict(zip(self.manifest.segments, self._segments, strict=True))
        self._segments = tuple(
            have.get(name) or self._part(Segment.map(self._generations.path(name), manifest.dimensions))
            for name in manifest.segments
        )
        beyond = [(part, part.segment.keys > manifest.last_chunk) for part in self._delta]
        self._delta = tuple(
            part if keep.all() else self._part(Segment.merge([part.segment], [keep]))
            for part, keep in beyond
            if keep.any()
        )
        self.manifest = manifest

    def _extend(self, db: Connection, documents: Sequence[int]) -> None:
        """Add new documents to the delta."""
        segment = load(db, documents, self.manifest.last_chunk)
        if len(segment):
            self._delta = (*self._delta, self._part(segment))
        if len(self._delta) > PARTS:
            parts = [part.segment for part in self._delta]
            self._delta = (self._part(Segment.merge(parts, [np.ones(len(part), bool) for part in parts])),)

    def _part(self, segment: Segment) -> ReadSegment:
        return ReadSegment(segment, self.catalog.documents_of(segment.keys))


def load(db: Connection, documents: Sequence[int], after: int = 0) -> Segment:
    """A segment in memory of the chunks of some documents, as far as they come after a chunk."""
    rows = records.indexable_chunks(db, documents, after)
    vectors = np.frombuffer(b"".join(row["vector"] for row in rows), np.float32)
    vectors = vectors.reshape(len(rows), -1) if len(rows) else np.empty((0, 0), np.float32)
    return Segment.build([row["key"] for row in rows], vectors, [_words(row) for row in rows])


def _words(row: Row) -> list[int]:
    """The terms of a chunk: its text, its document's title, and the headings above it."""
    above = [row["title"], *msgspec.json.decode(row["headers"])]
    return terms(" \n".join([*(line for line in above if line not in row["text"]), row["text"]]))


def _narrowed(mask: Mask, documents: NDArray[np.int32]) -> Mask | None:
    chosen = mask[documents] if len(mask) else np.zeros(len(documents), bool)
    return None if chosen.all() else chosen


def _places(segment: Segment, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions of the keys that a segment contains, and their rows."""
    rows = segment.keys.searchsorted(keys)
    rows[rows == len(segment)] = 0
    at = np.flatnonzero(segment.keys[rows] == keys) if len(segment) else np.empty(0, np.int64)
    return at, rows[at]


def _keyed(segment: Segment, hits: Hits) -> Hits:
    rows, scores = hits
    return segment.keys[rows], scores


def _together(found: Sequence[Hits], limit: int) -> Hits:
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    return top(np.concatenate([keys for keys, _ in found]), np.concatenate([scores for _, scores in found]), limit)
