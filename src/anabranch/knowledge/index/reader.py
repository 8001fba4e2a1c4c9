"""Reads the index: the catalog of what a caller may see, and search over all segments."""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import Filters
from anabranch.knowledge.index import segment
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.index.segment import Hits, Segment, top
from anabranch.knowledge.model import Caller, Collection, Permissions
from anabranch.knowledge.records import collections, documents
from anabranch.knowledge.records import documents as records
from anabranch.knowledge.records.database import Connection, Row
from anabranch.knowledge.records.documents import attribute, permissions_of
from anabranch.text.words import terms

Mask = NDArray[np.bool_]

KEPT_FILTERS = 64


class Refresh(msgspec.Struct, frozen=True):
    """The documents that a refresh added, or `everything`; `snapshot` is the connection's newest change."""

    snapshot: int
    added: list[int] = []
    everything: bool = False


class Catalog:
    """Arrays indexed by document key, and the document of each chunk key. They only grow."""

    def __init__(self) -> None:
        self.seq = -1
        self.collections: dict[int, Collection] = {}
        self._table = np.zeros(0, _ROW)
        self._chunks = np.zeros(0, np.int32)
        self._classes: dict[tuple[str, Permissions], int] = {}
        self._attributes: OrderedDict[tuple[str, str], Mask] = OrderedDict()

    def refresh(self, db: Connection) -> Refresh:
        """Apply all changes up to the connection's snapshot."""
        oldest, head = documents.change_range(db)
        if head <= self.seq:
            return Refresh(head)
        self._attributes.clear()
        self.collections = {collection.key: collection for collection in collections.listed(db)}
        if self.seq < 0 or oldest > self.seq + 1:
            self._table = np.zeros(0, _ROW)
            self._store(documents.rows(db))
            self.seq = head
            return Refresh(head, everything=True)
        touched = documents.changed_since(db, self.seq)
        rows = list(documents.rows(db, touched))
        new = [row["key"] for row in rows if row["key"] >= len(self._table) or not self._table["alive"][row["key"]]]
        living = {row["key"] for row in rows}
        for key in touched:
            if key not in living and key < len(self._table):
                self._table["alive"][key] = False
        self._store(rows)
        self.seq = head
        return Refresh(head, new)

    def _store(self, rows: Iterable[Row]) -> None:
        for row in rows:
            key, first, count = row["key"], row["first_chunk"], row["chunk_count"]
            self._table = _grown(self._table, key)
            self._table[key] = (
                True,
                row["collection"],
                self._class_of(row),
                row["day"],
                count,
                row["tokens"],
                row["size"],
                row["updated_at"],
            )
            if count:
                self._chunks = _grown(self._chunks, first + count - 1)
                self._chunks[first : first + count] = key

    def _class_of(self, row: Row) -> int:
        """Documents with equal owner and permissions share a class, so a caller is checked once per class."""
        return self._classes.setdefault((row["owner"], permissions_of(row)), len(self._classes))

    def documents_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int32]:
        """The document key of each chunk; 0, which is never alive, for chunks the catalog does not know."""
        self._chunks = _grown(self._chunks, int(chunks[-1]) if len(chunks) else 0)
        return self._chunks[chunks]

    def permitted(self, caller: Caller) -> Mask:
        """A mask of the documents that exist and that the caller may see."""
        allowed = np.fromiter(
            (permissions.permits(caller, owner) for owner, permissions in self._classes), bool, len(self._classes)
        )
        alive = self._table["alive"].copy()
        return alive if allowed.all() else alive & allowed[self._table["permissions"]]

    def mask(self, db: Connection, filters: Filters, caller: Caller) -> Mask:
        """A mask of the documents that the caller may see and that match the filters."""
        mask = self.permitted(caller)
        if filters.collections is not None:
            mask &= np.isin(self._table["collection"], self.named(filters.collections, caller, mask))
        if filters.start is not None:
            mask &= self._table["day"] >= date.fromisoformat(filters.start).toordinal()
        if filters.end is not None:
            mask &= self._table["day"] <= date.fromisoformat(filters.end).toordinal()
        for name, value in filters.metadata.items():
            mask &= self._with_attribute(db, name, attribute(value))
        for tag in filters.tags:
            mask &= self._with_attribute(db, "tags", attribute(tag))
        return mask

    def named(self, names: tuple[str, ...], caller: Caller, permitted: Mask) -> list[int]:
        """The keys of visible collections with these ids or names; of two with one name, the caller's own."""
        found: list[int] = []
        seen = [one for one in self.visible(caller, permitted) if one.id in names or one.name in names]
        for name in names:
            matching = [one for one in seen if name in (one.id, one.name)]
            own = [one for one in matching if one.id == name or one.owner == caller.owner]
            found += [one.key for one in own or matching]
        return found

    def visible(self, caller: Caller, permitted: Mask | None = None) -> list[Collection]:
        """The collections that a caller can see: their own, those with permissive defaults, and those that hold a
        document they may see."""
        permitted = self.permitted(caller) if permitted is None else permitted
        holding = set(np.unique(self._table["collection"][permitted]).tolist())
        return [
            one
            for one in self.collections.values()
            if one.key in holding or one.settings.default_permissions.permits(caller, one.owner)
        ]

    def fingerprint(self, mask: Mask) -> str:
        """A hash of these documents in their current version: equal in every process and for every caller with the
        same mask."""
        keys = np.flatnonzero(mask)
        digest = hashlib.blake2b(keys.tobytes(), digest_size=16)
        digest.update(self._table["updated_at"][keys].tobytes())
        holding = np.unique(self._table["collection"][keys]).tolist()
        names = [(key, one.id, one.name) for key in holding if (one := self.collections.get(key)) is not None]
        digest.update(msgspec.json.encode(names))
        return digest.hexdigest()

    def totals(self, key: int, permitted: Mask) -> tuple[int, int, int, int]:
        """How many permitted documents, chunks, tokens and bytes a collection has."""
        rows = self._table[permitted & (self._table["collection"] == key)]
        return len(rows), int(rows["chunks"].sum()), int(rows["tokens"].sum()), int(rows["size"].sum())

    def keys(self, key: int | None, permitted: Mask) -> NDArray[np.int64]:
        """The keys of the permitted documents of a collection, or of all collections, in order."""
        chosen = permitted if key is None else permitted & (self._table["collection"] == key)
        return np.flatnonzero(chosen)

    def _with_attribute(self, db: Connection, name: str, value: str) -> Mask:
        pair = (name, value)
        if pair not in self._attributes:
            mask = np.zeros(len(self._table), bool)
            mask[documents.with_attribute(db, name, value)] = True
            self._attributes[pair] = mask
            if len(self._attributes) > KEPT_FILTERS:
                self._attributes.popitem(last=False)
        return self._attributes[pair]


_ROW = np.dtype(
    [
        ("alive", np.bool_),
        ("collection", np.int32),
        ("permissions", np.int32),
        ("day", np.int32),
        ("chunks", np.int32),
        ("tokens", np.int64),
        ("size", np.int64),
        ("updated_at", np.float64),
    ]
)


def _grown(array: NDArray[Any], index: int) -> NDArray[Any]:
    """The array, or a larger copy that has this index."""
    if index < len(array):
        return array
    larger = np.zeros(max(index + 1, len(array) * 3 // 2, 1024), array.dtype)
    larger[: len(array)] = array
    return larger


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

    parts: tuple[tuple[Segment, segment.Scored], ...]
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
