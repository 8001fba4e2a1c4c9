"""Documents from files into a collection: read in batches, left out where nothing has changed, followed to the end."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import AnabranchError, InternalError
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.files import FoundFile
from anabranch.entrypoints.cli.resources import OPERATOR
from anabranch.knowledge.chunking import effective
from anabranch.knowledge.ingest import recipe_of
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Collection, JobItem, NewDocument, StoredDocument
from anabranch.knowledge.parse.limits import mebibytes
from anabranch.knowledge.records import documents, jobs

BATCH = 50
BATCH_BYTES = 32 * 1024 * 1024
# As many jobs at most wait to be taken in, so that a large folder does not stand in the records as a whole.
AHEAD = 3
POLL_S = 0.1
# A document that ends its process is given up after three times; this often without any result means something else.
DEATHS = 10
WAITING = """
SELECT count(*) FROM items JOIN jobs ON jobs.key = items.job
WHERE items.status IN ('pending', 'processing') AND items.key <= ? AND jobs.collection = ?
"""


class IngestOutcome(Value):
    """What has become of one document. `outcome` is added, replaced, updated, unchanged, failed, cancelled, or, where
    nobody waited for it, accepted."""

    name: str
    outcome: str
    document_id: str | None = None
    chunks: int = 0
    error: str | None = None


class IngestRun:
    """`described` is what all documents have in common. `took` is told of each as soon as its outcome is known."""

    def __init__(
        self,
        room: Knowledge,
        embedder: Embedder,
        collection: Collection,
        *,
        described: NewDocument,
        chunking: Mapping[str, Any],
        max_bytes: int,
        took: Callable[[IngestOutcome], None],
    ) -> None:
        self._room = room
        self._collection = collection
        self._described = described
        self._chunking = chunking
        self._max_bytes = max_bytes
        self._took = took
        chosen = effective(msgspec.structs.replace(collection.settings.chunking, **chunking), embedder)
        self._recipe = recipe_of(chosen, embedder)
        self._batch: list[NewDocument] = []
        self._batch_bytes = 0
        self._open: dict[str, set[int]] = {}
        self._deaths = 0
        self.jobs: list[str] = []

    def died(self, _: int) -> None:
        """The indexer's process has ended; another follows."""
        self._deaths += 1

    async def run(self, found: Iterable[FoundFile], *, wait: bool) -> None:
        if wait:
            await self._settle_the_past()
        for one in found:
            document = await self._arriving(one)
            if document is None:
                continue
            self._batch.append(document)
            self._batch_bytes += len(document.data)
            if len(self._batch) == BATCH or self._batch_bytes >= BATCH_BYTES:
                await self._send(wait=wait)
                await self._follow(AHEAD)
        if self._batch:
            await self._send(wait=wait)
        await self._follow(0)

    async def _settle_the_past(self) -> None:
        """What an interrupted run left waiting is taken in first, so that it is not sent once more."""
        last = await self._room.database.read(lambda db: db.execute("SELECT max(key) FROM items").fetchone()[0])
        chosen = (last or 0, self._collection.key)
        before = None
        while waiting := await self._room.database.read(lambda db: db.execute(WAITING, chosen).fetchone()[0]):
            self._deaths = 0 if waiting != before else self._deaths
            before = waiting
            self._check_the_indexer()
            await asyncio.sleep(POLL_S)

    async def _arriving(self, found: FoundFile) -> NewDocument | None:
        """The document to send; None if there is no need to, or no way."""
        if found.path is None:
            return msgspec.structs.replace(self._described, source="url", url=found.name)
        try:
            size = found.path.stat().st_size
            if size > self._max_bytes:
                limit = mebibytes(self._max_bytes)
                raise AnabranchError(f"The file has {mebibytes(size)}, more than the limit of {limit}. Split it.")
            data = await asyncio.to_thread(found.path.read_bytes)
        except (OSError, AnabranchError) as error:
            reason = error.message if isinstance(error, AnabranchError) else f"It cannot be read ({error.strerror})."
            self._took(IngestOutcome(name=found.name, outcome="failed", error=reason))
            return None
        document = msgspec.structs.replace(self._described, source="file", filename=found.name, data=data)
        content_hash = await asyncio.to_thread(lambda: sha256(data).hexdigest())
        kept = await self._room.database.read(lambda db: self._unchanged(db, document, content_hash))
        if kept is not None:
            self._took(
                IngestOutcome(name=found.name, outcome="unchanged", document_id=kept.id, chunks=kept.chunk_count)
            )
            return None
        return document

    def _unchanged(self, db: sqlite3.Connection, arrived: NewDocument, content_hash: str) -> StoredDocument | None:
        """The document as it is kept, if sending it again would change nothing. The indexer would find the same, but
        only after the file has gone through the records."""
        identity = jobs.identity_of(arrived, content_hash)
        kept = documents.by_identity(db, self._collection.key, identity)
        if kept is None or (kept.content_hash, kept.recipe) != (content_hash, self._recipe):
            return None
        same = {**kept.metadata, **arrived.metadata} == kept.metadata and arrived.title in (None, kept.title)
        return kept if same and arrived.permissions in (None, kept.permissions) else None

    async def _send(self, *, wait: bool) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        job = await self._room.ingest(OPERATOR, self._collection.id, batch, self._chunking)
        self.jobs.append(job)
        if wait:
            self._open[job] = set()
            return
        for item in (await self._room.job(OPERATOR, job)).items:
            self._took(IngestOutcome(name=item.name, outcome="accepted", document_id=item.document_id))

    async def _follow(self, at_most: int) -> None:
        """Wait until at most so many jobs are open."""
        while len(self._open) > at_most:
            for identifier in list(self._open):
                await self._look(identifier)
            self._check_the_indexer()
            if len(self._open) > at_most:
                await asyncio.sleep(POLL_S)

    def _check_the_indexer(self) -> None:
        if self._deaths >= DEATHS:
            raise InternalError(
                f"The indexer's process has ended {self._deaths} times without taking anything in. The documents are "
                f"kept and wait; AGGREGATOR_LOG_LEVEL=DEBUG shows why."
            )

    async def _look(self, identifier: str) -> None:
        job = await self._room.job(OPERATOR, identifier)
        told = self._open[identifier]
        for item in job.items:
            if item.key not in told and item.status in ("completed", "failed", "cancelled"):
                told.add(item.key)
                self._deaths = 0
                self._took(_outcome(item))
        if job.completed_at is not None:
            del self._open[identifier]


def _outcome(item: JobItem) -> IngestOutcome:
    return IngestOutcome(
        name=item.name,
        outcome=item.outcome or item.status,
        document_id=item.document_id if item.status == "completed" else None,
        chunks=item.chunk_count,
        error=item.error,
    )


def in_order(taken: Sequence[IngestOutcome], found: Sequence[FoundFile]) -> list[IngestOutcome]:
    """As the files were found, whatever was done first."""
    place = {one.name: at for at, one in enumerate(found)}
    return sorted(taken, key=lambda one: place.get(one.name, len(place)))
