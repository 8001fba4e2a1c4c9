"""Reads the index: the catalog of what a caller may see, and search over all segments."""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import ChunkType, Filters
from anabranch.knowledge.collection_names import only
from anabranch.knowledge.index.manifest import CURRENT, Generations, IndexManifest, SegmentDamaged
from anabranch.knowledge.index.permission_classes import CollectionReaders, PermissionClasses
from anabranch.knowledge.index.segment import Hits, Mask, Scored, Segment, top
from anabranch.knowledge.model import Caller, Collection
from anabranch.knowledge.records import attributes, changes, collections, documents, embeddings
from anabranch.knowledge.records.database import ResultRow, Session, StaleSnapshot
from anabranch.text.words import terms

T = TypeVar("T")

MAX_CACHED_FILTERS = 64
MAX_TYPES_READ = 50_000
MAX_DELTA_PARTS = 8
# Cached until something changes: the same callers ask again and again.
MAX_CACHED_VIEWS = 32
REBUILT = "the index is rebuilt from the records; check the disk"


class Catalog:
    """Arrays indexed by document key, and the document of each chunk key. They only grow."""

    def __init__(self) -> None:
        self.seq = -1
        # When the last change was made: records that were restored, or whose last changes a failover has lost, have
        # another one of its number.
        self.at: float | None = None
        # The last change that is known, by the thread whose snapshot did not have it.
        self._missed: dict[int, int] = {}
        self.collections: dict[int, Collection] = {}
        self._table = np.zeros(0, _ROW)
        self._chunks = np.zeros(0, np.int32)
        self._classes = PermissionClasses()
        self._readers = CollectionReaders()
        self._attributes: OrderedDict[tuple[str, str], Mask] = OrderedDict()

    def refresh(self, db: Session) -> tuple[int, bool]:
        """Apply all changes up to the connection's snapshot; returns its newest change, and whether everything was read
        again because older changes are deleted."""
        log = changes.state(db, self.seq)
        head, others = log.newest, self._are_others(log)
        if head <= self.seq and not others:
            return head, False
        everything = others or self.seq < 0 or log.oldest > self.seq + 1
        self._refresh_collections(db, [0] if everything else changes.collections_since(db, self.seq))
        if everything:
            self._table, self._chunks = np.zeros(0, _ROW), np.zeros(0, np.int32)
            self._store(documents.rows(db))
        else:
            changed = changes.documents_since(db, self.seq)
            rows = list(documents.rows(db, changed))
            removed = set(changed) - {row["key"] for row in rows}
            self._table["alive"][[key for key in removed if key < len(self._table)]] = False
            self._store(rows)
        self._classes.renumber(self._table["permissions"], self._table["alive"])
        self._attributes.clear()
        self.seq, self.at = head, changes.state(db, head).made_at
        return head, everything

    def _are_others(self, log: changes.LogState) -> bool:
        """Whether the records are not those that were read before."""
        if (head := log.newest) >= self.seq:
            self._missed.pop(threading.get_ident(), None)
            return self.at is not None and log.made_at not in (None, self.at)
        # A snapshot can be older than what another thread has read. The next one of this thread is not.
        missed, self._missed[threading.get_ident()] = self._missed.get(threading.get_ident(), -1), self.seq
        return head < missed

    def _refresh_collections(self, db: Session, keys: Sequence[int]) -> None:
        """Read those that have changed: others may have long lists of users. 0 stands for all."""
        if 0 in keys:
            self.collections, self._readers = {}, CollectionReaders()
        for key in keys:
            if key in self.collections:
                self._readers.remove(self.collections.pop(key))
        for one in collections.listed(db) if 0 in keys else collections.by_keys(db, keys):
            self.collections[one.key] = one
            self._readers.add(one)

    def _store(self, rows: Iterable[ResultRow]) -> None:
        for row in rows:
            key, first, count = row["key"], row["first_chunk"], row["chunk_count"]
            self._table = _grown(self._table, key)
            self._table[key] = (
                True,
                row["collection"],
                self._classes.number(row["owner"], documents.permissions_of(row), row["collection"]),
                row["day"],
                count,
                row["tokens"],
                row["size"],
                row["stored_bytes"],
                row["updated_at"],
            )
            if count:
                self._chunks = _grown(self._chunks, first + count - 1)
                self._chunks[first : first + count] = key

    def documents_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int32]:
        """The document key of each chunk; 0, which is never alive, for chunks the catalog does not know."""
        self._chunks = _grown(self._chunks, int(chunks[-1]) if len(chunks) else 0)
        return self._chunks[chunks]

    def permitted(self, caller: Caller) -> Mask:
        """A mask of the documents that exist and that the caller may see."""
        allowed = self._classes.permitted(caller, self._readers.permitting(caller))
        alive = self._table["alive"].copy()
        if caller.rights.collections is not None:
            alive &= np.isin(self._table["collection"], caller.rights.collections)
        return alive if allowed.all() else alive & allowed[self._table["permissions"]]

    def mask(self, db: Session, filters: Filters, caller: Caller) -> Mask:
        """A mask of the documents that the caller may see and that match the filters."""
        mask = self.permitted(caller)
        if filters.collections is not None:
            named = [one.key for one in self.named(filters.collections, caller, mask)]
            mask &= np.isin(self._table["collection"], named)
        if filters.start is not None:
            mask &= self._table["day"] >= date.fromisoformat(filters.start).toordinal()
        if filters.end is not None:
            mask &= self._table["day"] <= date.fromisoformat(filters.end).toordinal()
        for name, value in (*filters.metadata.items(), *(("tags", tag) for tag in filters.tags)):
            mask &= self.with_attribute(db, name, attributes.comparable(value))
        return mask

    def named(self, names: tuple[str, ...], caller: Caller, permitted: Mask) -> list[Collection]:
        """The visible collections with these ids, addresses or names; Conflict if a name is ambiguous."""
        visible = self.visible(caller, permitted)
        return [found for name in names if (found := only(name, visible, caller)) is not None]

    def visible(self, caller: Caller, permitted: Mask) -> list[Collection]:
        """The collections that a caller can see: those whose permissions permit it, and those that hold a document that
        it may see."""
        seen = {*np.unique(self._table["collection"][permitted]).tolist(), *self._readers.permitting(caller)}
        return [one for key, one in sorted(self.collections.items()) if key in seen and caller.sees(key)]

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

    def totals(self, key: int, permitted: Mask) -> dict[str, int]:
        """How many permitted documents, chunks and tokens a collection has, the bytes that were uploaded, and those in
        the records."""
        rows = self._table[permitted & (self._table["collection"] == key)]
        columns = ("chunks", "tokens", "size", "stored_bytes")
        return {"documents": len(rows), **{name: int(rows[name].sum()) for name in columns}}

    def keys(self, key: int | None, permitted: Mask) -> NDArray[np.int64]:
        """The keys of the permitted documents of a collection, or of all collections, in order."""
        return np.flatnonzero(permitted if key is None else permitted & (self._table["collection"] == key))

    def with_attribute(self, db: Session, name: str, value: str) -> Mask:
        """A mask of the documents with an attribute of this value."""
        mask = self._attributes.get((name, value))
        if mask is None:
            mask = self._attributes[name, value] = np.zeros(len(self._table), bool)
            mask[attributes.documents_with(db, name, value)] = True
            if len(self._attributes) > MAX_CACHED_FILTERS:
                self._attributes.popitem(last=False)
        return mask


_ROW = np.dtype(
    [
        ("alive", np.bool_),
        ("collection", np.int32),
        ("permissions", np.int32),
        ("day", np.int32),
        ("chunks", np.int32),
        ("tokens", np.int64),
        ("size", np.int64),
        ("stored_bytes", np.int64),
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


class ChunkTypes:
    """The type of every chunk, by its key, read from the records when a filter first needs it. Keys are never used
    again, so only new chunks are read later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._types = np.zeros(0, np.int8)
        self._last = 0

    def refresh(self, db: Session) -> None:
        """Read the types of all chunks up to the connection's snapshot."""
        with self._lock:
            while rows := documents.chunk_types(db, self._last, MAX_TYPES_READ):
                self._last = rows[-1][0]
                self._types = _grown(self._types, self._last)
                self._types[[key for key, _ in rows]] = [_TYPE_NUMBERS[name] for _, name in rows]

    def mask(self, wanted: Sequence[ChunkType]) -> Mask | None:
        """A mask of the chunks of these types; None is all."""
        return np.isin(self._types, [_TYPE_NUMBERS[name] for name in wanted]) if wanted else None


# 0 is no chunk.
_TYPE_NUMBERS = {name: number for number, name in enumerate(get_args(ChunkType), 1)}


class ReadSegment(NamedTuple):
    """A segment and the document key of each of its rows."""

    segment: Segment
    documents: NDArray[np.int32]


class View(NamedTuple):
    """What one search covers: each segment with the mask of its permitted rows (None permits all). `seen` hashes the
    permitted documents. `partial`: a part of the index is damaged, and its chunks are not covered."""

    parts: tuple[tuple[Segment, Mask | None], ...]
    rows: int
    average: float
    seen: str = ""
    partial: bool = False

    def nearest(self, query: NDArray[np.float32], limit: int) -> Hits:
        """The chunks nearest to a vector: keys and scores."""
        return _merged([(part, part.nearest(query, limit, mask)) for part, mask in self.parts], limit)

    def lexical(self, text: str) -> "Lexical":
        """The BM25 scores of every permitted chunk."""
        weights = self.weights(text)
        scored = tuple((part, part.matching(weights, self.average, mask)) for part, mask in self.parts)
        return Lexical(scored, weights)

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
        counted = {
            term: sum(part.row_count(term, mask) for part, mask in self.parts) for term in dict.fromkeys(terms(text))
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
            at, rows = _places(part, keys)
            for term, weight in self.weights if len(at) else ():
                found[at[part.contains(term, rows)]] += weight
        return found / np.float32(sum(weight for _, weight in self.weights) or 1.0)

    def best(self, limit: int) -> Hits:
        """The chunks with the highest scores: keys and scores."""
        return _merged([(part, scored.best(limit)) for part, scored in self.parts], limit)

    def at(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The scores of given chunks; 0 where no term matches."""
        found = np.zeros(len(keys), np.float32)
        for part, scored in self.parts:
            at, rows = _places(part, keys)
            found[at] = scored.scores[rows]
        return found


class IndexReader:
    """Shared by all threads of a process. `view` and `with_catalog` refresh it under a lock, and raise StaleSnapshot
    if the connection's snapshot is too old. `damaged` gets the name of each damaged segment when it is opened, or of
    the manifest."""

    def __init__(self, generations: Generations, damaged: Callable[[str], None] = lambda _: None) -> None:
        self._generations = generations
        self._damaged = damaged
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._segments: dict[str, ReadSegment] = {}
        self._delta: tuple[ReadSegment, ...] = ()
        self._delta_seq = -1
        self._views: dict[tuple[int, int, bytes], View] = {}
        # The last change of the manifest, by the thread whose snapshot did not have it.
        self._missed: dict[int, int] = {}
        self._chunk_types = ChunkTypes()
        self.manifest = IndexManifest()
        self.catalog = Catalog()

    def view(self, db: Session, filters: Filters, caller: Caller) -> View:
        """A view of what the caller may find in the connection's snapshot."""
        if filters.chunk_types:  # before the lock: the first time it reads all chunks
            self._chunk_types.refresh(db)
        with self._lock:
            self._refresh(db)
            if filters.chunk_types:  # those of other records, if these were replaced
                self._chunk_types.refresh(db)
            wanted = (self.catalog.seq, self.manifest.number, msgspec.json.encode((filters, caller)))
            if wanted not in self._views:
                if len(self._views) >= MAX_CACHED_VIEWS:
                    self._views.clear()
                chunks = self._chunk_types.mask(filters.chunk_types)
                self._views[wanted] = self._viewed(self.catalog.mask(db, filters, caller), chunks)
            return self._views[wanted]

    def _viewed(self, mask: Mask, chunks: Mask | None) -> View:
        """A view of the documents in the mask; of their chunks in the other mask, if there is one."""
        parts = tuple(
            (part.segment, _narrowed(mask, part, chunks)) for part in (*self._segments.values(), *self._delta)
        )
        rows = sum(len(segment) if chosen is None else int(chosen.sum()) for segment, chosen in parts)
        words = sum(segment.count_words(chosen) for segment, chosen in parts)
        average = words / rows if words else 1.0
        return View(parts, rows, average, self.catalog.fingerprint(mask), self.is_partial)

    @property
    def is_partial(self) -> bool:
        """Whether a part of the index is damaged, as of the last refresh."""
        return len(self._segments) < len(self.manifest.segments)

    def is_reported_damaged(self, db: Session) -> bool:
        """Whether the manifest is damaged, lost or of other records, or says that a segment is damaged."""
        manifest = self._generations.intact()
        if manifest is None:
            return is_manifest_lost(db, self._generations)
        return bool(manifest.damaged) or is_foreign(db, manifest)

    def with_catalog(self, db: Session, work: Callable[[Session, Catalog], T]) -> T:
        """Do something with the catalog as of the connection's snapshot; meanwhile nobody changes it."""
        with self._lock:
            self._refresh(db)
            return work(db, self.catalog)

    def _refresh(self, db: Session) -> None:
        snapshot, everything = self.catalog.refresh(db)
        if everything:  # perhaps with the vectors of another embedder, or other records
            self._chunk_types = ChunkTypes()
            self._segments, self._delta, self._delta_seq = {}, (), -1
            self.manifest, self._stamp = IndexManifest(), None
        stamp = self._generations.stamp()
        manifest = self.manifest if stamp == self._stamp else self._newest(db)
        if manifest.seq > snapshot and self._missed.pop(threading.get_ident(), -1) > snapshot:
            manifest = IndexManifest()  # of changes that a failover has lost: this snapshot began after it was written
        if max(self.catalog.seq, manifest.seq) > snapshot:
            self._missed[threading.get_ident()] = manifest.seq
            raise StaleSnapshot
        if stamp != self._stamp:
            if manifest is not self.manifest:
                self._adopt(manifest, stamp)
            self._stamp = stamp
        if self._delta_seq != self.catalog.seq:
            self._extend(db)
            self._delta_seq = self.catalog.seq

    def _newest(self, db: Session) -> IndexManifest:
        """The manifest on disk. If it is damaged or lost, the open one, or an empty one: what no open segment has is
        read from the records, so that searches are complete."""
        manifest = self._generations.intact()
        if manifest is None and is_manifest_lost(db, self._generations):
            self._damaged(CURRENT)
        if manifest is not None and manifest.seq <= self.catalog.seq and is_foreign(db, manifest):
            return IndexManifest()  # of records that were replaced; the writer builds another one
        return manifest or self.manifest

    def _adopt(self, manifest: IndexManifest, stamp: tuple[int, int]) -> None:
        opened: dict[str, ReadSegment] = {}
        for name in manifest.segments:
            try:
                opened[name] = self._opened(manifest, name)
            except SegmentDamaged:
                if self._generations.stamp() != stamp:
                    raise StaleSnapshot from None  # a newer generation has replaced the segment
                if name not in manifest.damaged:
                    self._damaged(name)
                    self._generations.report(name)
        self._segments = opened
        if manifest.last_chunk < self.manifest.last_chunk:  # the delta begins earlier now
            self._delta, self._delta_seq = (), -1
        beyond = [(part, part.segment.keys > manifest.last_chunk) for part in self._delta]
        self._delta = tuple(
            part if keep.all() else self._part(Segment.merge([part.segment], [keep]))
            for part, keep in beyond
            if keep.any()
        )
        self.manifest = manifest
        self._views.clear()  # they keep files mapped that have been replaced

    def _opened(self, manifest: IndexManifest, name: str) -> ReadSegment:
        """A segment that is what was written; SegmentDamaged otherwise."""
        if name in self._segments and name not in manifest.damaged:
            return self._segments[name]
        self._generations.check(manifest, name)
        return self._part(Segment.map(self._generations.path(name), manifest.dimensions))

    def _extend(self, db: Session) -> None:
        """Add the documents to the delta that are in no segment yet; their chunks have the highest keys."""
        last = int(self._delta[-1].segment.keys[-1]) if self._delta else self.manifest.last_chunk
        segment = load(db, documents.after_chunk(db, last))
        if len(segment):
            self._delta = (*self._delta, self._part(segment))
        if len(self._delta) > MAX_DELTA_PARTS:
            parts = [part.segment for part in self._delta]
            self._delta = (self._part(Segment.merge(parts, [np.ones(len(part), bool) for part in parts])),)

    def _part(self, segment: Segment) -> ReadSegment:
        return ReadSegment(segment, self.catalog.documents_of(segment.keys))


def is_manifest_lost(db: Session, generations: Generations) -> bool:
    """Whether the manifest is damaged, or gone although an index was written for chunks that the records hold."""
    try:
        return generations.read() is None and documents.indexed(db, generations.node) > 0
    except SegmentDamaged:
        return True


def is_foreign(db: Session, manifest: IndexManifest) -> bool:
    """Whether an index was made of other records than those of a snapshot that began after its manifest was read, or
    holds the vectors of an earlier embedder."""
    log = changes.state(db, manifest.seq)
    return (
        manifest.seq > log.newest
        or (manifest.seq_at is not None and log.made_at not in (None, manifest.seq_at))
        or (bool(manifest.segments) and manifest.seq < embeddings.replaced_at(db))
    )


def load(db: Session, keys: Sequence[int]) -> Segment:
    """A segment in memory of the chunks of some documents."""
    rows = documents.indexable_chunks(db, keys)
    vectors = np.frombuffer(b"".join(row["vector"] for row in rows), np.float32)
    vectors = vectors.reshape(len(rows), -1) if rows else vectors.reshape(0, 0)
    return Segment.build([row["key"] for row in rows], vectors, [_terms_of(row) for row in rows])


def _terms_of(row: ResultRow) -> list[int]:
    """The terms of a chunk: its text, its document's title, and the headings above it."""
    above = [row["title"], *msgspec.json.decode(row["headers"])]
    return terms(" \n".join([*(line for line in above if line not in row["text"]), row["text"]]))


def _narrowed(mask: Mask, part: ReadSegment, chunks: Mask | None) -> Mask | None:
    """A mask of the rows of a segment; None permits all."""
    chosen = mask[part.documents] if len(mask) else np.zeros(len(part.documents), bool)
    if chunks is not None and chosen.any():
        known = part.segment.keys < len(chunks)
        chosen = chosen & known
        chosen[chosen] = chunks[part.segment.keys[chosen]]
    return None if chosen.all() else chosen


def _places(segment: Segment, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions of the keys that a segment contains, and their rows."""
    rows = segment.keys.searchsorted(keys)
    rows[rows == len(segment)] = 0
    at = np.flatnonzero(segment.keys[rows] == keys) if len(segment) else np.empty(0, np.int64)
    return at, rows[at]


def _merged(found: Sequence[tuple[Segment, Hits]], limit: int) -> Hits:
    """The best chunks of all segments: keys and scores."""
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    keys = np.concatenate([segment.keys[rows] for segment, (rows, _) in found])
    return top(keys, np.concatenate([scores for _, (_, scores) in found]), limit)
