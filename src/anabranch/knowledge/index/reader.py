"""Reads the index: search over all segments, and over what is not in one yet."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import ChunkType, Filters
from anabranch.knowledge.index.catalog import Catalog, grown
from anabranch.knowledge.index.contract import SnapshotReader, Wanted
from anabranch.knowledge.index.manifest import CURRENT, Generations, IndexManifest, SegmentDamaged
from anabranch.knowledge.index.segment import Mask, Segment
from anabranch.knowledge.index.view import View
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import changes, documents, embeddings
from anabranch.knowledge.records.database import ResultRow, Session, StaleSnapshot
from anabranch.text.words import terms

T = TypeVar("T")

MAX_TYPES_READ = 50_000
MAX_DELTA_PARTS = 8
# Cached until something changes: the same callers ask again and again.
MAX_CACHED_VIEWS = 32
REBUILT = "the index is rebuilt from the records; check the disk"


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
                self._types = grown(self._types, self._last)
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

    async def find(self, reading: SnapshotReader, wanted: Wanted, work: Callable[[Session, View], T]) -> T:
        return await reading(lambda db: work(db, self.view(db, wanted.filters, wanted.caller)))

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
                self._views[wanted] = self._viewed(db, filters, caller, chunks)
            return self._views[wanted]

    def _viewed(self, db: Session, filters: Filters, caller: Caller, chunks: Mask | None) -> View:
        """A view of the documents that match; of their chunks in the mask, if there is one."""
        mask = self.catalog.mask(db, filters, caller)
        segments = (*self._segments.values(), *self._delta)
        parts = tuple((part.segment, _narrowed(mask, part, chunks)) for part in segments)
        return View.of(parts, seen=self.catalog.seen(filters, caller), partial=self.is_partial)

    @property
    def is_partial(self) -> bool:
        """Whether a part of the index is damaged, as of the last refresh."""
        return len(self._segments) < len(self.manifest.segments)

    async def check_reachable(self) -> None:
        """It is in the data folder."""

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
    return built(documents.indexable_chunks(db, keys))


def built(rows: Sequence[ResultRow]) -> Segment:
    vectors = np.frombuffer(b"".join(row["vector"] for row in rows), np.float32)
    vectors = vectors.reshape(len(rows), -1) if rows else vectors.reshape(0, 0)
    return Segment.build([row["key"] for row in rows], vectors, [terms_of(row) for row in rows])


def terms_of(row: ResultRow) -> list[int]:
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
