"""Reconnect backoff of the client: wait times, jitter, Retry-After, and when it gives up."""

import pytest

from anabranch.client.connection import ConnectionLost, Pace, Reconnect
from anabranch.domain.errors import StreamUnavailable
from anabranch.testing import ManualClock

PACE = Pace(first_s=1.0, most_s=8.0, patience_s=60.0)


class Waiting:
    """A Reconnect with a fake clock that records its waits."""

    def __init__(self, *, jitter: float = 0.0, eager: bool = False) -> None:
        self.waits: list[float] = []
        self.clock = ManualClock()
        self.reconnect = Reconnect(
            PACE, eager=eager, sleep=self._sleep, jitter=lambda: jitter, now=self.clock.monotonic
        )

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.clock.advance(seconds)

    async def cut(self, times: int = 1, *, wait_s: float = 0.0, clean: bool = False) -> None:
        for _ in range(times):
            await self.reconnect.wait(ConnectionLost("gone", wait_s, clean=clean))


async def test_backoff_doubles_up_to_the_maximum() -> None:
    waiting = Waiting()
    await waiting.cut(6)
    assert waiting.waits == [1, 2, 4, 8, 8, 8]


async def test_a_received_frame_resets_the_backoff() -> None:
    waiting = Waiting()
    await waiting.cut(3)
    waiting.reconnect.succeeded()
    await waiting.cut(2)
    assert waiting.waits == [1, 2, 4, 1, 2]


async def test_retry_and_retry_after_are_the_minimum_wait() -> None:
    waiting = Waiting(jitter=1.0)
    waiting.reconnect.set_retry(2000)
    waiting.reconnect.set_retry(None)
    await waiting.cut(2)
    await waiting.cut(wait_s=30)
    assert waiting.waits == [3, 6, 30]


async def test_jitter_spreads_reconnects() -> None:
    early, late = Waiting(jitter=0.0), Waiting(jitter=0.999)
    await early.cut()
    await late.cut()
    assert 1 == early.waits[0] < late.waits[0] < 1.5


async def test_the_client_gives_up_after_patience_since_the_first_failure() -> None:
    waiting = Waiting()
    waiting.clock.advance(1000)  # the caller was slow with an event
    with pytest.raises(StreamUnavailable, match="too long: gone"):
        await waiting.cut(100)
    assert sum(waiting.waits) == 1 + 2 + 4 + 8 * 6
    waiting.reconnect.succeeded()
    await waiting.cut()


async def test_an_eager_client_reconnects_at_once_after_a_clean_close() -> None:
    waiting = Waiting(eager=True)
    await waiting.cut(2, clean=True)
    assert waiting.waits == [0, 2]
    waiting.reconnect.succeeded()
    await waiting.cut()
    assert waiting.waits == [0, 2, 1]
