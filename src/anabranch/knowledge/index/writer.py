"""The index writer: writes new chunks into segments, merges segments, and replaces the vectors of another embedder.
Needs the indexer lock."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex

import msgspec
import numpy as np

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.knowledge.index.reader import Catalog, Generations, IndexManifest, load
from anabranch.knowledge.index.segment import BinaryVectors, Mask, Segment
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Connection, Database

FOLD_ROWS = 5_000
FOLD_S = 60.0
# This many segments of similar size are merged into one.
FAN = 4
DEAD = 0.2
# When idle, all segments are merged once the small ones reach this share of the large one.
TAIL = 0.25
FOLD_DOCUMENTS = 2_000
KEPT_CHANGES = 100_000
EMBED_BATCH = 256


class IndexWriter:
    def __init__(self, database: Database, generations: Generations, embedder: str) -> None:
        self._database = database
        self._generations = generations
        self._embedder = embedder
        self._catalog = Catalog()
        # The indexer updates the index in one task and erases in another.
        self._lock = threading.Lock()

    def unindexed(self) -> tuple[int, float]:
        """How many chunks are not in the index yet, and the age in seconds of the oldest."""
        last_chunk = self._generations.current().last_chunk
        chunks, oldest = self._database.reading(lambda db: documents.unindexed(db, last_chunk))
        return chunks, time.time() - oldest if oldest else 0.0

    def fold(self) -> IndexManifest:
        """Index everything in the records: new chunks into new segments, then merges that are due."""
        with self._lock:
            while self._fold_next():
                pass
            self._merge(plan)
            self._rewrite_dead()
            return self._generations.current()

    def compact(self) -> IndexManifest:
        """Merge everything into one segment if the small ones are a large enough share."""
        with self._lock:
            self._merge(lambda sizes: 0 if len(sizes) > 1 and sum(sizes[1:]) > TAIL * sizes[0] else None)
            return self._generations.current()

    def drop_deleted(self) -> int:
        """Rewrite every segment that has chunks of deleted documents, and delete its files; returns how many."""
        with self._lock:
            return self._rewrite_dead(allowed=0.0)

    def rebuild(self) -> IndexManifest:
        """Build the index from the records."""
        self._publish(IndexManifest(number=self._generations.current().number))
        self.fold()
        self._merge(lambda sizes: 0 if len(sizes) > 1 else None)
        return self._generations.current()

    def _fold_next(self) -> bool:
        """Write one segment of new chunks; returns whether there are more."""
        manifest = self._generations.current()

        def read(db: Connection) -> tuple[Segment, bool]:
            waiting = documents.after_chunk(db, manifest.last_chunk)
            self._catalog.refresh(db)
            return load(db, waiting[:FOLD_DOCUMENTS]), len(waiting) > FOLD_DOCUMENTS

        segment, more = self._database.reading(read)
        if len(segment):
            segments = (*manifest.segments, self._written(segment, manifest.number + 1))
            self._publish(
                IndexManifest(
                    number=manifest.number + 1,
                    seq=self._catalog.seq,
                    last_chunk=int(segment.keys[-1]),
                    dimensions=segment.vectors.shape[1],
                    segments=segments,
                )
            )
            # A reader that has not seen them reloads everything.
            self._database.writing(lambda db: documents.trim_changes(db, self._catalog.seq - KEPT_CHANGES))
        return more

    def _merge(self, chosen: Callable[[Sequence[int]], int | None]) -> None:
        manifest = self._generations.current()
        parts = [Segment.map(self._generations.path(name), manifest.dimensions) for name in manifest.segments]
        begin = chosen([len(part) for part in parts])
        if begin is not None:
            self._replace(manifest, begin, len(parts), parts[begin:])

    def _rewrite_dead(self, allowed: float = DEAD) -> int:
        """Rewrite the segments of which more than a share is deleted; returns how many."""
        manifest = self._generations.current()
        for at, name in enumerate(manifest.segments):
            part = Segment.map(self._generations.path(name), manifest.dimensions)
            if len(part) - int(self._alive(part).sum()) > allowed * len(part):
                self._replace(manifest, at, at + 1, [part])
                return 1 + self._rewrite_dead(allowed)
        return 0

    def _replace(self, manifest: IndexManifest, begin: int, end: int, parts: Sequence[Segment]) -> None:
        """Replace adjacent segments with one that leaves out deleted chunks."""
        whole = Segment.merge(parts, [self._alive(part) for part in parts])
        new = (self._written(whole, manifest.number + 1),) if len(whole) else ()
        segments = (*manifest.segments[:begin], *new, *manifest.segments[end:])
        self._publish(
            msgspec.structs.replace(manifest, number=manifest.number + 1, segments=segments, seq=self._catalog.seq)
        )

    def _alive(self, part: Segment) -> Mask:
        self._database.reading(self._catalog.refresh)
        alive = self._catalog.permitted(Caller(operator=True))
        keys = self._catalog.documents_of(part.keys)
        return np.asarray(alive[keys], bool) if len(alive) else np.zeros(len(part), bool)

    def _written(self, segment: Segment, number: int) -> str:
        # A name is never reused, not even after the index was deleted: readers cache segments by name.
        name = f"segment-{number}-{token_hex(3)}"
        segment.binary = BinaryVectors.of(segment.vectors)
        segment.write(self._generations.path(name))
        return name

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
    generations: Generations,
    progress: Callable[[int, int], None],
    *,
    batch_size: int = EMBED_BATCH,
) -> int:
    """Embed every chunk with another embedder; returns their number. The caller holds the indexer lock and rebuilds the
    index afterwards: it is empty. Killed at any moment, this leaves the old vectors or the new ones, never both, and
    never an index of one beside records of the other."""
    _, total = database.reading(documents.counts)
    _check_lengths(database, embedder, batch_size)
    database.writing(documents.begin_replacement)
    done = 0
    try:
        for batch in _batches(database, batch_size):
            embedded = await embedder.embed([text for _, text in batch])
            rows = [(key, one.vector, one.tokens) for (key, _), one in zip(batch, embedded, strict=True)]
            database.writing(partial(documents.add_replacements, rows=rows))
            done += len(batch)
            progress(done, total)
        # The index goes first, because it holds the old vectors: without one, searches read the records.
        generations.publish(IndexManifest(number=generations.current().number))
        database.writing(lambda db: documents.swap_in_replacement(db, embedder.name))
    except BaseException:
        with suppress(AnabranchError):
            database.writing(documents.drop_replacement)
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
