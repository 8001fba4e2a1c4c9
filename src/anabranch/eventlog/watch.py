"""Watches on streams: readers wait here until a stream may have changed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StreamSignal:
    """Counts the changes of one stream, so that a watch misses none while it is not waiting."""

    __slots__ = ("changes", "waiting", "watches")

    def __init__(self) -> None:
        self.changes = 0
        self.watches = 0
        self.waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        self.changes += 1
        waiting, self.waiting = self.waiting, set()
        for each in waiting:
            if not each.done():
                each.set_result(None)


class StreamWatch:
    """A Watch that has seen a signal up to some change."""

    __slots__ = ("_seen", "_signal")

    def __init__(self, signal: StreamSignal) -> None:
        self._signal = signal
        self._seen = signal.changes

    async def changed(self) -> None:
        signal = self._signal
        while self._seen == signal.changes:
            # One future for each waiter: cancelling a shared one would cancel all.
            waiting = asyncio.get_running_loop().create_future()
            signal.waiting.add(waiting)
            try:
                await waiting
            finally:
                signal.waiting.discard(waiting)
        self._seen = signal.changes


class Watchers:
    """Signals by stream name. A signal exists while anybody watches, whether or not its stream exists."""

    def __init__(self) -> None:
        self._signals: dict[str, StreamSignal] = {}

    def __len__(self) -> int:
        return len(self._signals)

    @asynccontextmanager
    async def watch(self, stream: str) -> AsyncIterator[StreamWatch]:
        signal = self._signals.setdefault(stream, StreamSignal())
        signal.watches += 1
        try:
            yield StreamWatch(signal)
        finally:
            signal.watches -= 1
            if not signal.watches:
                del self._signals[stream]

    def notify(self, stream: str) -> None:
        if (signal := self._signals.get(stream)) is not None:
            signal.notify()
