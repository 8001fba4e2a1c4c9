"""The index writer: writes new chunks into segments, merges segments, and replaces the vectors of another embedder.
Needs the indexer lock."""

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import TypeVar

import msgspec
import numpy as np

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.knowledge.index.catalog import Catalog
from anabranch.knowledge.index.manifest import CURRENT, Generations, IndexManifest, SegmentDamaged
from anabranch.knowledge.index.reader import REBUILT, is_foreign, is_manifest_lost, load
from anabranch.knowledge.index.segment import BinaryVectors, Mask, Segment
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import changes, documents, embeddings
from anabranch.knowledge.records.database import Database, Session, StoreFailed
from anabranch.telemetry.log import Log

T = TypeVar("T")

FOLD_S = 60.0
# This many segments of similar size are merged into one.
FAN = 4
DEAD = 0.2
# When idle, all segments are merged once the small ones reach this share of the large one.
TAIL = 0.25
FOLD_DOCUMENTS = 2_000
KEPT_CHANGES = 100_000
EMBED_BATCH = 256
ATTEMPTS = 3
FOREIGN = "the index is ahead of the records, so it is not theirs; it is built again. Were the records lost?"


class IndexWriter:
    fold_s = FOLD_S

    def __init__(self, database: Database, generations: Generations, embedder: str, log: Log | None = None) -> None:
        self._log = log
        self._database = database
        self._generations = generations
        self._embedder = embedder
        self._catalog = Catalog()
        # The indexer updates the index in one task, checks it in another, and erases in a third.
        self._lock = threading.Lock()
        # Opened and found whole; the others are opened when they are needed.
        self._opened: dict[str, Segment] = {}

    @property
    def seq(self) -> int:
        """The last change that the index includes."""
        return self._generations.current().seq

    def unindexed(self) -> tuple[int, float]:
        """How many chunks are not in the index yet, and the age in seconds of the oldest."""
        manifest = self._generations.current()

        def unindexed(db: Session) -> tuple[int, float | None]:
            return documents.unindexed(db, 0 if is_foreign(db, manifest) else manifest.last_chunk)

        chunks, oldest = self._database.reading(unindexed)
        return chunks, time.time() - oldest if oldest else 0.0

    def fold(self) -> IndexManifest:
        """Index everything in the records: new chunks into new segments, then merges that are due."""

        def fold() -> IndexManifest:
            while self._fold_next():
                pass
            self._merge(plan)
            self._rewrite_dead()
            return self._generations.current()

        return self._on_whole_segments(fold)

    def compact(self) -> IndexManifest:
        """Merge everything into one segment if the small ones are a large enough share."""

        def compact() -> IndexManifest:
            self._merge(lambda sizes: 0 if len(sizes) > 1 and sum(sizes[1:]) > TAIL * sizes[0] else None)
            return self._generations.current()

        return self._on_whole_segments(compact)

    def drop_deleted(self) -> int:
        """Rewrite every segment that has chunks of deleted documents, and delete its files; returns how many."""
        return self._on_whole_segments(lambda: self._rewrite_dead(allowed=0.0))

    def reported(self) -> bool:
        """Whether a reader has found a segment damaged, or the manifest is damaged or lost."""
        return bool(self._generations.reported()) or (self._generations.intact() is None and self._is_manifest_lost())

    def repair(self) -> tuple[str, ...]:
        """Rebuild segments that are damaged, or that earlier versions wrote without a checksum, from the records;
        returns the names of those that were damaged. Until each is rebuilt, nothing is read from a damaged one."""
        with self._lock:
            damaged = self._repair()
            self._note_indexed()
        while self._rebuild_unchecked():
            pass
        return damaged

    def verify(self, paced: Callable[[int], None]) -> tuple[str, ...]:
        """Read all segments again; returns the names of those that are damaged, which are no longer read from."""
        manifest = self._generations.current()
        damaged = [name for name in manifest.segments if not self._is_whole(manifest, name, paced)]
        with self._lock:
            # Others may have been merged meanwhile: those are gone, not damaged.
            return self._leave_out(damaged)

    def _is_whole(self, manifest: IndexManifest, name: str, paced: Callable[[int], None]) -> bool:
        try:
            self._generations.check(manifest, name, paced)
        except SegmentDamaged:
            return False
        return True

    def _repair(self) -> tuple[str, ...]:
        self._drop_foreign()
        if self._is_manifest_lost():
            self._rebuild_manifest()
        manifest = self._generations.current()
        found = [name for name in manifest.segments if self._open(manifest, name) is None]
        damaged = self._leave_out({*found, *self._generations.reported()})
        while left_out := (manifest := self._generations.current()).damaged:
            self._rebuild_segment(manifest.segments.index(left_out[0]))
        return damaged

    def _is_manifest_lost(self) -> bool:
        return self._database.reading(lambda db: is_manifest_lost(db, self._generations))

    def _drop_foreign(self) -> None:
        """Drop an index that was not made of these records: it is ahead of them."""
        manifest = self._generations.current()
        if self._database.reading(lambda db: is_foreign(db, manifest)):
            if self._log is not None:
                self._log.warning("index_of_other_records", hint=FOREIGN)
            self._catalog = Catalog()
            self._publish(IndexManifest(number=manifest.number))

    def _rebuild_manifest(self) -> None:
        """Build the index from the records if its manifest is damaged or lost. Readers serve the index that they have
        open until the new one is complete."""
        if self._log is not None:
            self._log.error("index_damaged", segments=(CURRENT,), hint=REBUILT)
        self._opened.clear()
        self._generations.sweep(IndexManifest())  # makes room
        self._database.reading(self._catalog.refresh)
        _, dimensions = self._database.reading(documents.embedder) or ("", 0)
        new = tuple(self._from_records(0, documents.MAX_KEY, 1))
        last = int(Segment.map(self._generations.path(new[-1][0]), dimensions).keys[-1]) if new else 0
        self._replace(IndexManifest(dimensions=dimensions, last_chunk=last), 0, 0, new)

    def _note_indexed(self) -> None:
        """Let the records say up to which chunk an index was written: a lost one is told from none by that."""
        last, node = self._generations.current().last_chunk, self._generations.node
        if self._database.reading(lambda db: documents.indexed_up_to(db, node)) != last:
            self._database.writing(lambda db: documents.note_indexed(db, last, node))

    def _on_whole_segments(self, work: Callable[[], T]) -> T:
        """Repair the index, and change it; again if a segment turns out to be damaged meanwhile."""
        for _ in range(ATTEMPTS):
            with self._lock, suppress(SegmentDamaged):
                self._repair()
                return work()
        raise StoreFailed("New segments of the index are damaged as soon as they are written. Check the disk.")

    def _open(self, manifest: IndexManifest, name: str) -> Segment | None:
        """A segment, checked when it is first opened; None if it is damaged."""
        self._opened = {kept: part for kept, part in self._opened.items() if kept in manifest.segments}
        if name in manifest.damaged:
            return None
        if name not in self._opened:
            try:
                self._generations.check(manifest, name)
                self._opened[name] = Segment.map(self._generations.path(name), manifest.dimensions)
            except SegmentDamaged:
                return None
        return self._opened[name]

    def _leave_out(self, damaged: Collection[str]) -> tuple[str, ...]:
        """Let nobody read from damaged segments any more; returns those that the manifest has."""
        manifest = self._generations.current()
        found = tuple(name for name in manifest.segments if name in damaged and name not in manifest.damaged)
        for name in found:
            self._opened.pop(name, None)
            shutil.rmtree(self._generations.path(name), ignore_errors=True)  # makes room for the manifest
        if found:
            left_out = (*manifest.damaged, *found)
            self._publish(msgspec.structs.replace(manifest, number=manifest.number + 1, damaged=left_out))
        return found

    def _rebuild_unchecked(self) -> bool:
        """Rebuild a segment that an earlier version wrote; returns whether there was one. The lock is released between
        two of them, so that others can write."""
        with self._lock:
            manifest = self._generations.current()
            unchecked = [at for at, name in enumerate(manifest.segments) if name not in manifest.checksums]
            if unchecked:
                self._rebuild_segment(unchecked[0])
            if len(unchecked) == 1:
                self._merge(plan)
            return bool(unchecked)

    def _rebuild_segment(self, at: int) -> None:
        """Replace a segment, and the damaged ones after it, with new ones from the records. Segments are ranges of
        chunk keys, so those around them say which chunks they held."""
        manifest = self._generations.current()
        end = at + 1
        while end < len(manifest.segments) and manifest.segments[end] in manifest.damaged:
            end += 1
        is_last = end == len(manifest.segments)
        first = int(self._whole(manifest, manifest.segments[at - 1]).keys[-1]) if at else 0
        last = manifest.last_chunk if is_last else int(self._whole(manifest, manifest.segments[end]).keys[0]) - 1
        new = tuple(self._from_records(first, last, manifest.number + 1))
        self._replace(manifest, at, end, new)

    def _from_records(self, first: int, last: int, number: int) -> Iterator[tuple[str, str]]:
        """Segments of the chunks after `first`, up to `last`: their names and checksums."""

        def read(db: Session) -> tuple[list[int], Segment]:
            waiting = documents.after_chunk(db, first, last)[:FOLD_DOCUMENTS]
            return waiting, load(db, waiting)

        while True:
            waiting, segment = self._database.reading(read)
            if len(segment):
                first = int(segment.keys[-1])
                yield self._written(segment, number)
            if len(waiting) < FOLD_DOCUMENTS:
                return

    def rebuild(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> IndexManifest:
        """Build the index from the records."""
        _, total = self._database.reading(documents.counts)
        self._publish(IndexManifest(number=self._generations.current().number))
        self.fold()
        progress(total, total)
        self._merge(lambda sizes: 0 if len(sizes) > 1 else None)
        return self._generations.current()

    def _fold_next(self) -> bool:
        """Write one segment of new chunks; returns whether there are more."""
        manifest = self._generations.current()

        def read(db: Session) -> tuple[Segment, bool]:
            waiting = documents.after_chunk(db, manifest.last_chunk)
            self._catalog.refresh(db)
            return load(db, waiting[:FOLD_DOCUMENTS]), len(waiting) > FOLD_DOCUMENTS

        segment, more = self._database.reading(read)
        if len(segment):
            held = msgspec.structs.replace(
                manifest, last_chunk=int(segment.keys[-1]), dimensions=segment.vectors.shape[1]
            )
            at = len(manifest.segments)
            self._replace(held, at, at, [self._written(segment, manifest.number + 1)])
            self._note_indexed()
            # A reader that has not seen them reloads everything.
            self._database.writing(lambda db: changes.trim(db, self._catalog.seq - KEPT_CHANGES))
        return more

    def _merge(self, chosen: Callable[[Sequence[int]], int | None]) -> None:
        manifest = self._generations.current()
        parts = [self._whole(manifest, name) for name in manifest.segments]
        begin = chosen([len(part) for part in parts])
        if begin is not None:
            self._join(manifest, begin, len(parts))

    def _rewrite_dead(self, allowed: float = DEAD) -> int:
        """Rewrite the segments of which more than a share is deleted; returns how many."""
        manifest = self._generations.current()
        for at, name in enumerate(manifest.segments):
            part = self._whole(manifest, name)
            if len(part) - int(self._alive(part).sum()) > allowed * len(part):
                self._join(manifest, at, at + 1)
                return 1 + self._rewrite_dead(allowed)
        return 0

    def _join(self, manifest: IndexManifest, begin: int, end: int) -> None:
        """Replace adjacent segments with one that leaves out deleted chunks. They are read again first: what is damaged
        must not get a new checksum."""
        names = manifest.segments[begin:end]
        for name in names:
            self._opened.pop(name, None)
        parts = [self._whole(manifest, name) for name in names]
        joined = Segment.merge(parts, [self._alive(part) for part in parts])
        self._replace(manifest, begin, end, [self._written(joined, manifest.number + 1)] if len(joined) else [])

    def _whole(self, manifest: IndexManifest, name: str) -> Segment:
        segment = self._open(manifest, name)
        if segment is None:
            raise SegmentDamaged(name)
        return segment

    def _replace(self, manifest: IndexManifest, begin: int, end: int, new: Sequence[tuple[str, str]]) -> None:
        """Publish a manifest with new segments, of these names and checksums, in the place of others."""
        segments = (*manifest.segments[:begin], *(name for name, _ in new), *manifest.segments[end:])
        checksums = {**manifest.checksums, **dict(new)}
        self._publish(
            msgspec.structs.replace(
                manifest,
                number=manifest.number + 1,
                segments=segments,
                checksums={name: checksums[name] for name in segments if name in checksums},
                damaged=tuple(name for name in manifest.damaged if name in segments),
                seq=max(manifest.seq, self._catalog.seq),
                seq_at=self._catalog.at if self._catalog.seq >= manifest.seq else manifest.seq_at,
            )
        )

    def _alive(self, part: Segment) -> Mask:
        self._database.reading(self._catalog.refresh)
        alive = self._catalog.permitted(Caller(operator=True))
        keys = self._catalog.documents_of(part.keys)
        return np.asarray(alive[keys], bool) if len(alive) else np.zeros(len(part), bool)

    def _written(self, segment: Segment, number: int) -> tuple[str, str]:
        """Write a segment; returns its name and checksum."""
        # A name is never reused, not even after the index was deleted: readers cache segments by name.
        name = f"segment-{number}-{token_hex(3)}"
        segment.binary = BinaryVectors.of(segment.vectors)
        return name, segment.write(self._generations.path(name))

    def _publish(self, manifest: IndexManifest) -> None:
        manifest = msgspec.structs.replace(manifest, embedder=self._embedder, built_at=time.time())
        self._generations.publish(manifest)
        self._generations.sweep(manifest)


def plan(sizes: Sequence[int]) -> int | None:
    """The first of the trailing segments to merge, or None. At least FAN are merged, the first no larger than the rest
    together, so a chunk is rewritten about once per doubling of the collection."""
    return next((at for at in range(len(sizes) - FAN + 1) if sizes[at] <= sum(sizes[at + 1 :])), None)


async def reembed(
    database: Database,
    embedder: Embedder,
    drop_index: Callable[[], None],
    progress: Callable[[int, int], None],
    *,
    batch_size: int = EMBED_BATCH,
) -> int:
    """Embed every chunk with another embedder; returns their number. The caller holds the indexer lock and rebuilds the
    index afterwards: `drop_index` has emptied it. Killed at any moment, this leaves the old vectors or the new ones,
    never both, and never an index of one beside records of the other."""
    _, total = database.reading(documents.counts)
    _check_lengths(database, embedder, batch_size)
    database.writing(embeddings.begin_replacement)
    done = 0
    try:
        for batch in _batches(database, batch_size):
            embedded = await embedder.embed([text for _, text in batch])
            rows = [(key, one.vector, one.tokens) for (key, _), one in zip(batch, embedded, strict=True)]
            database.writing(partial(embeddings.add_replacements, rows=rows))
            done += len(batch)
            progress(done, total)
        # The index goes first, because it holds the old vectors: without one, searches read the records.
        drop_index()
        database.writing(lambda db: embeddings.swap_in_replacement(db, embedder.name))
    except BaseException:
        with suppress(AnabranchError):
            database.writing(embeddings.drop_replacement)
        raise
    return done


def _check_lengths(database: Database, embedder: Embedder, batch_size: int) -> None:
    """A chunk that the embedder would truncate could not be found by its end."""
    too_long = sum(
        len(embedder.tokens(text)) > embedder.window for batch in _batches(database, batch_size) for _, text in batch
    )
    if too_long:
        raise ConfigurationError(
            f"{too_long:,} chunks are longer than the {embedder.window:,} tokens that {embedder.name!r} accepts. Set "
            f"the embedder back and ingest their documents again with a smaller --chunk-size, then rebuild."
        )


def _batches(database: Database, size: int) -> Iterator[list[tuple[int, str]]]:
    last = 0
    while batch := database.reading(partial(documents.chunk_texts, after=last, limit=size)):
        yield batch
        last = batch[-1][0]
