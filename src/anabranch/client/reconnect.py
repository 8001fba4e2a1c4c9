"""Coming back after a cut: how long to wait, how often, and when to give up."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from anabranch.client.sse import Frame
from anabranch.domain.errors import StreamUnavailable
from anabranch.domain.model import Value


class Pace(Value):
    """How a client behaves towards a server that is away. It waits `first_s` (or what the server's `retry:` says), then
    twice as long each time, `most_s` at most, and gives up after `patience_s` without a sign of life. The server's
    heartbeat comes every `heartbeat_s`; three that did not come are a cut."""

    first_s: float = 1.0
    most_s: float = 30.0
    patience_s: float = 120.0
    heartbeat_s: float = 15.0
    connect_s: float = 10.0

    @property
    def silence_s(self) -> float:
        return 3 * self.heartbeat_s


class ConnectionLost(Exception):
    """The connection is gone, or could not be made, and that may pass. `wait_s` is how long the server asks for;
    `clean` says that it was the server that ended it, in due form."""

    def __init__(self, reason: str, wait_s: float = 0.0, *, clean: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.clean = clean


class Reconnect:
    """One who is `eager` comes back at once from a clean end: it may be the end of all, and only asking shows it."""

    def __init__(
        self,
        pace: Pace,
        *,
        eager: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace = pace
        self._eager = eager
        self._sleep = sleep
        self._jitter = jitter
        self._now = now
        self._first_s = pace.first_s
        self._failures = 0
        self._since: float | None = None

    def heard(self) -> None:
        """A sign of life."""
        self._failures = 0
        self._since = None

    def told(self, retry_ms: int | None) -> None:
        """What the server's `retry:` asks for."""
        if retry_ms is not None:
            self._first_s = retry_ms / 1000

    async def wait(self, cut: ConnectionLost) -> None:
        """Never shorter than the server asks, and not at the same moment as everybody else."""
        at_once = self._eager and cut.clean and not self._failures
        backoff_s = 0.0 if at_once else min(self._first_s * 2**self._failures, self._pace.most_s)
        wait_s = max(backoff_s * (1 + self._jitter() / 2), cut.wait_s)
        self._failures = min(self._failures + 1, 16)
        now = self._now()
        # Counted from the first failure, not from the last frame: whoever reads may take its time over one.
        self._since = now if self._since is None else self._since
        if now + wait_s > self._since + self._pace.patience_s:
            raise StreamUnavailable(f"The server could not be reached for too long: {cut}")
        await self._sleep(wait_s)


async def again(connect: Callable[[], AsyncGenerator[Frame]], comeback: Reconnect) -> AsyncGenerator[Frame]:
    """The frames of one connection after another, until one of them ends without a Cut."""
    while True:
        try:
            async with aclosing(connect()) as frames:
                async for frame in frames:
                    comeback.heard()
                    yield frame
        except ConnectionLost as cut:
            await comeback.wait(cut)
        else:
            return
