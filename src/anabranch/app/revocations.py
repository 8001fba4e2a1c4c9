"""Ends what an API key has begun here once its secret is not valid any more: the key was revoked, by whichever process
on the same data folder, or it has expired, or was rotated and the overlap is over."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from anabranch.domain.errors import AnabranchError, Unauthorized

EVERY_S = 2.0
REVOKED = "The API key was revoked, or has expired."

Stop = Callable[[AnabranchError], None]


class Revocations:
    """What goes on under each credential (the secret of a key), and how it is stopped. `valid` reads those that are
    valid now; it is asked every `every_s` seconds while something goes on under one, and not at all otherwise."""

    def __init__(self, valid: Callable[[], Awaitable[Collection[str]]], *, every_s: float = EVERY_S) -> None:
        self._valid = valid
        self.every_s = every_s
        self._stops: defaultdict[str, set[Stop]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None

    def add(self, credential: str, stop: Stop) -> None:
        self._stops[credential].add(stop)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())

    def discard(self, credential: str, stop: Stop) -> None:
        self._stops[credential].discard(stop)
        if not self._stops[credential]:
            del self._stops[credential]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while self._stops:
            await asyncio.sleep(self.every_s)
            known = tuple(self._stops)  # one that comes while the records are read may be newer than what is read
            with suppress(AnabranchError):  # records that cannot be read now are read again
                valid = await self._valid()
                for stop in [stop for one in known if one not in valid for stop in self._stops.get(one, ())]:
                    stop(Unauthorized(REVOKED))
