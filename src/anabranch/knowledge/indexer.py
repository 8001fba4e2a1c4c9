"""The indexer: the one process that takes documents in and writes the index, elected by a lock on the data folder."""

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
GROUP = 16
LANES = 2
REST_S = 3.0
FORGET_S = 3_600.0


class Indexer:
    """Two lanes take documents in, so that one is read while another is embedded; beside them the index is folded."""

    def __init__(self, database: Database, ingestion: Ingestion, writer: IndexWriter, *, retention_days: int) -> None:
        self._database = database
        self._ingestion = ingestion
        self._writer = writer
        self._retention_days = retention_days
        self._busy = 0
        self._held: set[Hold] = set()
        self._claiming = asyncio.Lock()

    async def run(self) -> None:
        """Until it is cancelled; what it has in hand is then given back."""
        await self._database.write(jobs.recover)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(LANES):
                    tasks.create_task(self._lane())
                tasks.create_task(self._folding())
                tasks.create_task(self._forgetting())
        except ExceptionGroup as group:
            # One of them in our own words says more than a group of tasks that were cancelled for it.
            raise next((error for error in group.exceptions if isinstance(error, AnabranchError)), group) from group

    async def drain(self) -> None:
        """Take in everything that waits, bring the index up to it, and return."""
        await self._database.write(jobs.recover)
        while await self._step():
            pass
        await asyncio.to_thread(self._writer.fold)

    async def _lane(self) -> None:
        while True:
            if not await self._step():
                await asyncio.sleep(POLL_S)

    async def _step(self) -> bool:
        """Take some documents in; False if there are none for now."""
        async with self._claiming:  # one at a time, or both would look at the same rows for nothing
            if not self._database.reading(jobs.is_pending):
                return False
            await self._ingestion.warm()
            claims = await self._database.write(partial(jobs.claim, limit=GROUP, held=self._held))
            if not claims:
                return not self._held
            if any(claim.attempts for claim in claims):
                # With the lock, for it is to be alone: if it ends the process again, it was to blame.
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
            await self._database.write(partial(jobs.give_back, items=keys))
            raise
        finally:
            self._busy -= 1

    async def _folding(self) -> None:
        """Fold when enough has come or it has waited long enough, or once when it has become quiet; then tidy up."""
        quiet_s, tidy = 0.0, False
        while True:
            rows, age_s = await asyncio.to_thread(self._writer.behind)
            quiet_s = 0.0 if self._busy else quiet_s + POLL_S
            if rows and (rows >= FOLD_ROWS or age_s >= FOLD_S or quiet_s >= REST_S):
                await asyncio.to_thread(self._writer.fold)
                tidy = False
            elif quiet_s >= 2 * REST_S and not tidy:
                await asyncio.to_thread(self._writer.compact)
                tidy = True
            await asyncio.sleep(POLL_S)

    async def _forgetting(self) -> None:
        while True:
            await self._database.write(lambda db: queries.forget(db, self._retention_days))
            await asyncio.sleep(FORGET_S)
