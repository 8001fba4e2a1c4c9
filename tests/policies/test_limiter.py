"""What every Limiter promises."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from anabranch.domain.clock import SystemClock
from anabranch.domain.contracts import Limiter
from anabranch.policies.rate_limits import MemoryLimiter, RedisLimiter
from anabranch.redis.client import Redis
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing.fakes import ManualClock
from support.valkey_server import running_valkey

LIMIT = 5
WINDOW_S = 300.0
# Far more than any test takes: what Redis measures goes on meanwhile.
MARGIN_S = 30.0


class World(NamedTuple):
    limiter: Limiter
    passes: Callable[[float], Awaitable[None]]


@pytest.fixture(params=["memory", "redis", "redis that is gone"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    clock = ManualClock(1_000_000.1)
    local = MemoryLimiter(LIMIT, WINDOW_S, clock)

    async def later(seconds: float) -> None:
        clock.advance(seconds)

    if request.param == "memory":
        yield World(local, later)
        return

    with running_valkey(tmp_path) as server:
        redis = Redis(server.url, timeout_s=20.0, clock=SystemClock(), telemetry=SilentTelemetry())

        async def all_earlier(seconds: float) -> None:
            """Time passes in Redis too: whatever happened there has happened so much earlier."""
            clock.advance(seconds)
            keys = await redis.execute("KEYS", "*") if redis.reachable else []
            for key in keys if isinstance(keys, list) else []:
                assert isinstance(key, bytes)
                calls = await redis.execute("ZRANGE", key, 0, -1)
                for call in calls if isinstance(calls, list) else []:
                    assert isinstance(call, bytes)
                    await redis.execute("ZINCRBY", key, -round(seconds * 1_000_000), call)

        if request.param == "redis that is gone":
            server.kill()
        yield World(RedisLimiter(redis, local, LIMIT, WINDOW_S), all_earlier)
        await redis.close()


async def test_it_counts_down_and_then_says_how_long_to_wait(world: World) -> None:
    for used in range(LIMIT):
        allowance = await world.limiter.admit("rl:rag_stream:alice")
        assert (allowance.limit, allowance.remaining, allowance.wait_s) == (LIMIT, LIMIT - used - 1, 0)
        assert allowance.reset_s == pytest.approx(WINDOW_S)
    allowance = await world.limiter.admit("rl:rag_stream:alice")
    assert (allowance.limit, allowance.remaining) == (LIMIT, 0)
    assert WINDOW_S - MARGIN_S < allowance.wait_s <= allowance.reset_s <= WINDOW_S


async def test_waiting_as_long_as_it_says_admits_and_no_sooner(world: World) -> None:
    for _ in range(LIMIT):
        assert not (await world.limiter.admit("k")).wait_s
        await world.passes(40.0)
    # The first is over 300 s after it came, the next 40 s later, and so on; in between there is no room.
    for _ in range(3):
        early = await world.limiter.admit("k")
        assert early.wait_s > 0
        await world.passes(max(early.wait_s - MARGIN_S, 0))
        allowance = await world.limiter.admit("k")
        assert 0 < allowance.wait_s <= MARGIN_S + 0.001
        await world.passes(allowance.wait_s)
        assert not (await world.limiter.admit("k")).wait_s


async def test_after_the_reset_all_of_them_are_there_again(world: World) -> None:
    for _ in range(LIMIT):
        await world.limiter.admit("k")
        await world.passes(10.0)
    refused = await world.limiter.admit("k")
    assert refused.wait_s < refused.reset_s
    await world.passes(refused.reset_s)
    assert (await world.limiter.admit("k")).remaining == LIMIT - 1


async def test_being_refused_costs_nothing(world: World) -> None:
    for _ in range(LIMIT):
        await world.limiter.admit("k")
    await world.passes(WINDOW_S / 2)
    for _ in range(3 * LIMIT):
        assert (await world.limiter.admit("k")).wait_s
    await world.passes(WINDOW_S / 2)
    for _ in range(LIMIT):
        assert not (await world.limiter.admit("k")).wait_s


async def test_however_many_ask_at_once(world: World) -> None:
    allowances = await asyncio.gather(*(world.limiter.admit("k") for _ in range(20 * LIMIT)))
    admitted = [allowance for allowance in allowances if not allowance.wait_s]
    assert sorted(allowance.remaining for allowance in admitted) == list(range(LIMIT))


async def test_keys_are_apart_whatever_is_in_them(world: World) -> None:
    keys = ["", " ", "a", "A", "a:b", "ä", "half \ud83d", "line\r\nbreak", "nul\0", "{tag}", "x" * 5000]
    for _ in range(LIMIT):
        for key in keys:
            assert not (await world.limiter.admit(key)).wait_s
    for key in keys:
        assert (await world.limiter.admit(key)).wait_s
