"""Keeps the index whole: verifies its segments in the background, and has damaged ones rebuilt from the records."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from anabranch.app.background import background
from anabranch.domain.errors import AnabranchError
from anabranch.telemetry.log import Log

if TYPE_CHECKING:
    from anabranch.knowledge.index.contract import IndexUpdates

LOOK_S = 0.5
RETRY_S = 10.0
# Slow, because questions need the disk and the core.
BYTES_PER_S = 64 * 1024 * 1024


class Stopped(Exception):
    """The verification was stopped."""


class IndexScrubber:
    """Repairs what readers report at once, and verifies all segments every so often."""

    def __init__(self, writer: "IndexUpdates", every_s: float, log: Log | None, *, look_s: float = LOOK_S) -> None:
        self._writer = writer
        self._every_s = every_s
        self._log = log
        self._look_s = look_s
        self._stopping = threading.Event()
        self._failure = ""

    async def run(self) -> None:
        verified_at = time.monotonic()
        is_due = True  # the process that begins opens all segments, which verifies them
        while True:
            try:
                if time.monotonic() - verified_at >= self._every_s:
                    verified_at = time.monotonic()
                    self._note(await asyncio.to_thread(self._writer.verify, self._paced))
                    is_due = True
                if is_due or self._writer.reported():
                    self._note(await asyncio.to_thread(self._writer.repair))
                is_due, self._failure = False, ""
            except Stopped:
                return
            except (AnabranchError, OSError) as error:
                is_due = True
                self._fail(str(error))
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(self._look_s)

    def stop(self) -> None:
        self._stopping.set()

    def _paced(self, count: int) -> None:
        if self._stopping.wait(count / BYTES_PER_S):
            raise Stopped

    def _note(self, damaged: tuple[str, ...]) -> None:
        if damaged and self._log is not None:
            self._log.error("index_damaged", segments=damaged, hint="they are rebuilt from the records; check the disk")

    def _fail(self, reason: str) -> None:
        if reason != self._failure and self._log is not None:
            self._log.warning("index_not_repaired", reason=reason)
        self._failure = reason


@asynccontextmanager
async def scrubbing(writer: "IndexUpdates", every_s: float, log: Log | None) -> AsyncIterator[None]:
    scrubber = IndexScrubber(writer, every_s, log)
    async with background(scrubber.run()):
        try:
            yield
        finally:
            scrubber.stop()
