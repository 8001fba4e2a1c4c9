"""Whether this process can do its work: what `/ready` says."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.domain.errors import AnabranchError
from anabranch.knowledge.disk import LEAST_FREE, is_nearly_full
from anabranch.knowledge.records.database import DiskFull, StoreFailed

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

CHECKED_FOR_S = 1.0
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
            if await asyncio.to_thread(is_nearly_full, self._folder, self._least_free):
                return "disk_full"
            return await self._check_opened(await self._knowledge()) if self._knowledge.is_open else None
        except DiskFull:
            return "disk_full"
        except AnabranchError:
            return "records_not_writable"

    async def _check_opened(self, opened: "Knowledge") -> NotReady | None:
        await asyncio.to_thread(opened.check_writable)
        try:
            return "index_damaged" if await opened.is_index_damaged() else None
        except StoreFailed:  # too busy to say
            return self._reason
