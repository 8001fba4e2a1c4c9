"""The indexer: the only process that ingests documents and writes the index; it holds the lock of the data folder."""

import asyncio
from collections.abc import Sequence
from functools import partial

from anabranch.domain.errors import AnabranchError
from anabranch.knowledge.index.writer import FOLD_ROWS, FOLD_S, IndexWriter
from anabranch.knowledge.ingest import Ingestion
from anabranch.knowledge.records import jobs, queries
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.jobs import Claim, Hold

POLL_S = 0.1
CLAIM_LIMIT = 16
INGEST_TASKS = 2
IDLE_S = 3.0
DELETE_QUERIES_S = 3_600.0


class Indexer:
    """Two ingestion tasks, so that one parses while the other embeds, and a task that updates the index."""

    def __init__(self, database: Database, ingestion: Ingestion, writer: IndexWriter, *, retention_days: int) -> None:
        self._database = database
        self._ingestion = ingestion
        self._writer = writer
        self._retention_days = retention_days
        self._busy = 0
        self._held: set[Hold] = set()
        self._claiming = asyncio.Lock()

    async def run(self) -> None:
        """Run until cancelled; claimed items are then released."""
        await self._database.write(jobs.recover)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(INGEST_TASKS):
                    tasks.create_task(self._ingest())
                tasks.create_task(self._update_index())
                tasks.create_task(self._delete_old_queries())
        except ExceptionGroup as group:
            # An error of ours says more than the group of tasks that it cancelled.
            raise next((error for error in group.exceptions if isinstance(error, AnabranchError)), group) from group

    async def drain(self) -> None:
        """Ingest everything that waits, update the index, and return."""
        await self._database.write(jobs.recover)
        while await self._step():
            pass
        await asyncio.to_thread(self._writer.fold)

    async def _ingest(self) -> None:
        while True:
            if not await self._step():
                await asyncio.sleep(POLL_S)

    async def _step(self) -> bool:
        """Ingest some documents; False if none can be claimed now."""
        async with self._claiming:  # otherwise both tasks would examine the same rows
            if not self._database.reading(jobs.is_pending):
                return False
            await self._ingestion.warm()
            claims = await self._database.write(partial(jobs.claim, limit=CLAIM_LIMIT, held=self._held))
            if not claims:
                return not self._held
            if any(claim.attempts for claim in claims):
                # Under the lock, so that it runs alone: if the process dies again, this document is the cause.
                await self._take(claims)
                return True
            self._held.update(*(claim.holds for claim in claims))
        try:
            await self._take(claims)
        finally:
            self._held.difference_update(*(claim.holds for claim in claims))
        return True

    async def _take(self, claims: Sequence[Claim]) -> None:
        self._busy += 1
        try:
            await self._ingestion.take(claims)
        except BaseException:
            keys = [claim.key for claim in claims]
            await self._database.write(partial(jobs.release, items=keys))
            raise
        finally:
            self._busy -= 1

    async def _update_index(self) -> None:
        """Update the index when enough chunks wait, the oldest is old enough, or when idle; then compact it."""
        idle_s, compacted = 0.0, False
        while True:
            rows, age_s = await asyncio.to_thread(self._writer.behind)
            idle_s = 0.0 if self._busy else idle_s + POLL_S
            if rows and (rows >= FOLD_ROWS or age_s >= FOLD_S or idle_s >= IDLE_S):
                await asyncio.to_thread(self._writer.fold)
                compacted = False
            elif idle_s >= 2 * IDLE_S and not compacted:
                await asyncio.to_thread(self._writer.compact)
                compacted = True
            await asyncio.sleep(POLL_S)

    async def _delete_old_queries(self) -> None:
        while True:
            await self._database.write(lambda db: queries.forget(db, self._retention_days))
            await asyncio.sleep(DELETE_QUERIES_S)
