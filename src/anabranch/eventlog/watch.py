"""Who waits for news of a stream, and how all of them are woken at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StreamSignal:
    """One stream's: it counts how often it was rung, so that nobody misses a ring while looking elsewhere."""

    __slots__ = ("rings", "waiting", "watches")

    def __init__(self) -> None:
        self.rings = 0
        self.watches = 0
        self.waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        self.rings += 1
        waiting, self.waiting = self.waiting, set()
        for each in waiting:
            if not each.done():
                each.set_result(None)


class StreamWatch:
    """A Watch: one who has heard the bell up to some ring."""

    __slots__ = ("_bell", "_heard")

    def __init__(self, bell: StreamSignal) -> None:
        self._bell = bell
        self._heard = bell.rings

    async def changed(self) -> None:
        bell = self._bell
        while self._heard == bell.rings:
            # One for each who waits: a shared one would be cancelled for all when one of them is.
            waiting = asyncio.get_running_loop().create_future()
            bell.waiting.add(waiting)
            try:
                await waiting
            finally:
                bell.waiting.discard(waiting)
        self._heard = bell.rings


class Watchers:
    """By the streams' names; a bell is there as long as somebody listens, whether its stream is or not."""

    def __init__(self) -> None:
        self._bells: dict[str, StreamSignal] = {}

    def __len__(self) -> int:
        return len(self._bells)

    @asynccontextmanager
    async def watch(self, stream: str) -> AsyncIterator[StreamWatch]:
        bell = self._bells.setdefault(stream, StreamSignal())
        bell.watches += 1
        try:
            yield StreamWatch(bell)
        finally:
            bell.watches -= 1
            if not bell.watches:
                del self._bells[stream]

    def ring(self, stream: str) -> None:
        if (bell := self._bells.get(stream)) is not None:
            bell.ring()
