"""Where a subagent that works here hands in what it has, and learns whether more is wanted."""

from collections.abc import Awaitable, Callable

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import StreamFull
from anabranch.domain.steps import Expected, Fragment, Receipt
from anabranch.streams import orders
from anabranch.streams.actions import Action

# What a log says it has already it has got from here, when nobody could tell.
COUNTS = (None, "duplicate")


class Desk:
    """One subagent's; `done` carries an action out and says what became of it."""

    __slots__ = ("_began", "_clock", "_done", "_expected")

    def __init__(self, expected: Expected, done: Callable[[Action], Awaitable[Receipt]], clock: Clock) -> None:
        self._expected = expected
        self._done = done
        self._clock = clock
        self._began = clock.monotonic()

    async def brought(self, fragment: Fragment, attempt: int) -> bool:
        """False says that nobody wants more of this attempt."""
        now = self._clock.monotonic()
        latency_ms = round((now - self._began) * 1000)
        goes_on = fragment.status not in ("success", "error")
        try:
            receipt = await self._done(orders.brought(self._expected, fragment, attempt, latency_ms, now))
        except StreamFull:
            return goes_on  # a part is passed over, and of an end the writer has made something else
        return goes_on and receipt.ignored in COUNTS and receipt.status == "in_progress"

    async def retried(self, attempt: int, reason: str) -> bool:
        receipt = await self._done(orders.retried(self._expected, attempt, reason, self._clock.monotonic()))
        return receipt.ignored in COUNTS

    async def failed(self, attempt: int, error: str) -> None:
        await self._done(orders.failed(self._expected, attempt, error, self._clock.monotonic()))
