"""How long a client waits before it comes back, and when it stops trying."""

import pytest

from anabranch.client.reconnect import ConnectionLost, Pace, Reconnect
from anabranch.domain.errors import StreamUnavailable
from anabranch.testing import ManualClock

PACE = Pace(first_s=1.0, most_s=8.0, patience_s=60.0)


class Waiting:
    """A comeback whose waits pass at once, and are written down."""

    def __init__(self, *, jitter: float = 0.0, eager: bool = False) -> None:
        self.waits: list[float] = []
        self.clock = ManualClock()
        self.comeback = Reconnect(PACE, eager=eager, sleep=self._sleep, jitter=lambda: jitter, now=self.clock.monotonic)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.clock.advance(seconds)

    async def cut(self, times: int = 1, *, wait_s: float = 0.0, clean: bool = False) -> None:
        for _ in range(times):
            await self.comeback.wait(ConnectionLost("gone", wait_s, clean=clean))


async def test_each_wait_is_twice_the_one_before_up_to_a_bound() -> None:
    waiting = Waiting()
    await waiting.cut(6)
    assert waiting.waits == [1, 2, 4, 8, 8, 8]


async def test_a_sign_of_life_begins_anew() -> None:
    waiting = Waiting()
    await waiting.cut(3)
    waiting.comeback.heard()
    await waiting.cut(2)
    assert waiting.waits == [1, 2, 4, 1, 2]


async def test_what_the_server_asks_for_is_the_least() -> None:
    waiting = Waiting(jitter=1.0)
    waiting.comeback.told(2000)
    waiting.comeback.told(None)
    await waiting.cut(2)
    await waiting.cut(wait_s=30)
    assert waiting.waits == [3, 6, 30]


async def test_chance_spreads_those_who_were_cut_together() -> None:
    early, late = Waiting(jitter=0.0), Waiting(jitter=0.999)
    await early.cut()
    await late.cut()
    assert 1 == early.waits[0] < late.waits[0] < 1.5


async def test_patience_is_counted_from_the_first_failure() -> None:
    waiting = Waiting()
    waiting.clock.advance(1000)  # somebody took their time over an event
    with pytest.raises(StreamUnavailable, match="too long: gone"):
        await waiting.cut(100)
    assert sum(waiting.waits) == 1 + 2 + 4 + 8 * 6
    waiting.comeback.heard()
    await waiting.cut()


async def test_an_eager_one_asks_at_once_whether_it_was_the_end() -> None:
    waiting = Waiting(eager=True)
    await waiting.cut(2, clean=True)
    assert waiting.waits == [0, 2]
    waiting.comeback.heard()
    await waiting.cut()
    assert waiting.waits == [0, 2, 1]
