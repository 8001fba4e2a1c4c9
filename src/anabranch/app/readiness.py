"""Whether this process can do its work: what `/ready` says."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.records import UNREACHABLE, is_unreachable
from anabranch.domain.errors import AnabranchError
from anabranch.knowledge.disk import LEAST_FREE, is_nearly_full
from anabranch.knowledge.records.database import DiskFull, StoreFailed

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

T = TypeVar("T")

CHECKED_FOR_S = 1.0
# A database that does not answer in this time cannot be reached.
PATIENCE_S = 3.0
# A thread of its own: other work must not make a process that can answer look as if it could not.
THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="readiness")
NotReady = Literal["disk_full", "records_not_writable", "records_unreachable", "index_unreachable", "index_damaged"]


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
            opened = await self._knowledge() if self._knowledge.is_open else None
            async with asyncio.timeout(self._patience_s):
                if await _in_thread(is_nearly_full, self._folder, self._least_free):
                    return "disk_full"
                if opened is not None:
                    await _in_thread(opened.check_writable)
            return None if opened is None else await self._check_index(opened)
        except DiskFull:
            return "disk_full"
        except TimeoutError:
            return UNREACHABLE
        except AnabranchError as error:
            return UNREACHABLE if is_unreachable(error) else "records_not_writable"

    async def _check_index(self, opened: "Knowledge") -> NotReady | None:
        try:
            await opened.check_index()
        except AnabranchError:
            return "index_unreachable"
        try:
            async with asyncio.timeout(self._patience_s):
                return "index_damaged" if await opened.is_index_damaged() else None
        except (StoreFailed, TimeoutError):  # too busy to say
            return self._reason if self._reason == "index_damaged" else None

    @property
    def _patience_s(self) -> float | None:
        return PATIENCE_S if self._knowledge.is_remote else None


async def _in_thread(work: Callable[..., T], *values: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(THREAD, work, *values)
