"""When API keys were used last, written to the records now and then and not with every request."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from anabranch.domain.errors import AnabranchError

EVERY_S = 15.0


class KeyUse:
    """`write` records moments by the id of a key. What is noted is written after `every_s` seconds, and at the end."""

    def __init__(self, write: Callable[[Mapping[str, float]], Awaitable[None]], *, every_s: float = EVERY_S) -> None:
        self._write = write
        self._every_s = every_s
        self._noted: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, key: str) -> None:
        self._noted[key] = time.time()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_later())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._write_noted()

    async def _write_later(self) -> None:
        while self._noted:
            await asyncio.sleep(self._every_s)
            await self._write_noted()

    async def _write_noted(self) -> None:
        """What cannot be written now is written with what comes later."""
        noted = dict(self._noted)
        if noted:
            with suppress(AnabranchError):
                await self._write(noted)
                self._noted = {key: at for key, at in self._noted.items() if noted.get(key) != at}
