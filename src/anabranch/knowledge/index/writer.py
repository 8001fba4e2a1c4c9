"""The writer: folds what is new into segments and merges them. Only the holder of the indexer's lock has one."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from secrets import token_hex

import msgspec
import numpy as np

from anabranch.knowledge.index.binary_vectors import BinaryVectors
from anabranch.knowledge.index.catalog import Catalog, Mask
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.index.reader import load, since
from anabranch.knowledge.index.segment import Segment
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import Database

FOLD_ROWS = 5_000
FOLD_S = 60.0
# As many segments of about one size become one.
FAN = 4
DEAD = 0.2
# At rest, everything becomes one segment once the small ones are this share of the large one.
TAIL = 0.25
SOME_DOCUMENTS = 2_000
KEPT_CHANGES = 100_000


class IndexWriter:
    def __init__(self, database: Database, generations: Generations, embedder: str) -> None:
        self._database = database
        self._generations = generations
        self._embedder = embedder
        self._catalog = Catalog()

    def behind(self) -> tuple[int, float]:
        """How many chunks the index has not yet, and for how long the oldest has waited."""
        manifest = self._generations.current()

        def count(db: sqlite3.Connection) -> tuple[int, float]:
            row = db.execute(
                "SELECT coalesce(sum(chunk_count), 0), min(updated_at) FROM documents WHERE first_chunk > ?",
                (manifest.last_chunk,),
            ).fetchone()
            return int(row[0]), time.time() - row[1] if row[1] else 0.0

        return self._database.reading(count)

    def fold(self) -> IndexManifest:
        """Bring the index up to the records: new chunks into new segments, then whatever is worth merging."""
        while self._fold_some():
            pass
        self._merge(plan)
        self._rewrite_dead()
        return self._generations.current()

    def compact(self) -> IndexManifest:
        """One segment, if the small ones are more than a tail."""
        self._merge(lambda sizes: 0 if len(sizes) > 1 and sum(sizes[1:]) > TAIL * sizes[0] else None)
        return self._generations.current()

    def rebuild(self) -> IndexManifest:
        """Everything anew from the records."""
        manifest = self._generations.current()
        self._publish(IndexManifest(number=manifest.number))
        self.fold()
        self._merge(lambda sizes: 0 if len(sizes) > 1 else None)
        return self._generations.current()

    def _fold_some(self) -> bool:
        """One segment of what is new; whether there is more."""
        manifest = self._generations.current()

        def read(db: sqlite3.Connection) -> tuple[Segment, bool]:
            waiting = since(db, manifest.last_chunk)
            self._catalog.refresh(db)
            return load(db, waiting[:SOME_DOCUMENTS]), len(waiting) > SOME_DOCUMENTS

        segment, more = self._database.reading(read)
        if len(segment):
            segment.sketch = BinaryVectors.of(segment.vectors)
            number = manifest.number + 1
            names = (*manifest.segments, self._written(segment, number))
            last = int(segment.keys[-1])
            self._publish(
                IndexManifest(
                    number=number,
                    seq=self._catalog.seq,
                    last_chunk=last,
                    dimensions=segment.vectors.shape[1],
                    segments=names,
                )
            )
            self._trim()
        return more

    def _merge(self, chosen: Callable[[Sequence[int]], int | None]) -> None:
        manifest = self._generations.current()
        parts = [Segment.map(self._generations.path(name), manifest.dimensions) for name in manifest.segments]
        begin = chosen([len(part) for part in parts])
        if begin is None:
            return
        self._replace(manifest, begin, len(parts), parts[begin:])

    def _rewrite_dead(self) -> None:
        manifest = self._generations.current()
        for at, name in enumerate(manifest.segments):
            part = Segment.map(self._generations.path(name), manifest.dimensions)
            if len(part) - int(self._alive(part).sum()) > DEAD * len(part):
                self._replace(manifest, at, at + 1, [part])
                self._rewrite_dead()
                return

    def _replace(self, manifest: IndexManifest, begin: int, end: int, parts: Sequence[Segment]) -> None:
        """One segment in place of some neighbours, without the chunks that are no more."""
        whole = Segment.merge(parts, [self._alive(part) for part in parts])
        whole.sketch = BinaryVectors.of(whole.vectors)
        new = (self._written(whole, manifest.number + 1),) if len(whole) else ()
        names = (*manifest.segments[:begin], *new, *manifest.segments[end:])
        self._publish(
            msgspec.structs.replace(manifest, number=manifest.number + 1, segments=names, seq=self._catalog.seq)
        )

    def _alive(self, part: Segment) -> Mask:
        self._database.reading(self._catalog.refresh)
        alive = self._catalog.permitted(Caller(operator=True))
        documents = self._catalog.documents_of(part.keys)
        return np.asarray(alive[documents], bool) if len(alive) else np.zeros(len(part), bool)

    def _written(self, segment: Segment, number: int) -> str:
        # No name is used twice, not even after somebody has deleted the index: readers know segments by their names.
        name = f"segment-{number}-{token_hex(3)}"
        segment.write(self._generations.path(name))
        return name

    def _publish(self, manifest: IndexManifest) -> None:
        manifest = msgspec.structs.replace(manifest, embedder=self._embedder, built_at=time.time())
        self._generations.publish(manifest)
        self._generations.sweep(manifest)

    def _trim(self) -> None:
        """Forget changes that every reader has long seen; one that has not, starts afresh."""
        if self._catalog.seq > KEPT_CHANGES:
            oldest = self._catalog.seq - KEPT_CHANGES
            self._database.writing(lambda db: db.execute("DELETE FROM changes WHERE seq < ?", (oldest,)))


def plan(sizes: Sequence[int]) -> int | None:
    """Where the run of segments begins that should become one: at least FAN of them, the first no larger than the
    rest together. So a chunk is rewritten about as often as the collection has doubled."""
    for begin in range(len(sizes) - FAN + 1):
        if sizes[begin] <= sum(sizes[begin + 1 :]):
            return begin
    return None
