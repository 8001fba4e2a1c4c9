"""Whether this process can do its work: what `/ready` says."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.domain.errors import AnabranchError
from anabranch.knowledge.disk import LEAST_FREE, is_nearly_full
from anabranch.knowledge.records.database import DiskFull, StoreFailed

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

CHECKED_FOR_S = 1.0
# A thread of its own: other work must not make a process that can answer look as if it could not.
THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="readiness")
NotReady = Literal["disk_full", "records_not_writable", "index_damaged"]


class Readiness:
    """Checks the data folder, if there is one, at most once a second."""

    def __init__(self, knowledge: KnowledgeOpener, folder: Path, *, least_free: int = LEAST_FREE) -> None:
        self._knowledge = knowledge
        self._folder = folder
        self._least_free = least_free
        self._checked_at = -CHECKED_FOR_S
        self._reason: NotReady | None = None
        self._checking = asyncio.Lock()

    async def reason(self) -> NotReady | None:
        """Why the process is not ready; None if it is."""
        async with self._checking:
            if time.monotonic() - self._checked_at >= CHECKED_FOR_S:
                self._reason = await self._check()
                self._checked_at = time.monotonic()
            return self._reason

    async def _check(self) -> NotReady | None:
        try:
            if not self._knowledge.exists:
                return None
            loop = asyncio.get_running_loop()
            if await loop.run_in_executor(THREAD, is_nearly_full, self._folder, self._least_free):
                return "disk_full"
            return await self._check_opened(await self._knowledge()) if self._knowledge.is_open else None
        except DiskFull:
            return "disk_full"
        except AnabranchError:
            return "records_not_writable"

    async def _check_opened(self, opened: "Knowledge") -> NotReady | None:
        await asyncio.get_running_loop().run_in_executor(THREAD, opened.check_writable)
        try:
            return "index_damaged" if await opened.is_index_damaged() else None
        except StoreFailed:  # too busy to say
            return self._reason
