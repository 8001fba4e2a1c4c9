"""What every Cache promises."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from anabranch.domain.clock import SystemClock
from anabranch.domain.contracts import Cache
from anabranch.policies.cache import MemoryCache, RedisCache, TieredCache
from anabranch.redis.client import Redis
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing.fakes import ManualClock
from support.valkey_server import running_valkey

TTL_S = 300.0


class World(NamedTuple):
    cache: Cache
    settled: Callable[[], Awaitable[None]]
    passes: Callable[[float], Awaitable[None]]

    async def put(self, key: str, value: bytes, ttl_s: float = TTL_S) -> None:
        await self.cache.put(key, value, ttl_s)
        await self.settled()


@pytest.fixture(params=["memory", "redis", "tiered", "tiered, another worker"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    clock = ManualClock()
    near = MemoryCache(1_000_000, clock)

    async def nothing() -> None: ...

    async def later(seconds: float) -> None:
        clock.advance(seconds)

    if request.param == "memory":
        yield World(near, nothing, later)
        return

    with running_valkey(tmp_path) as server:
        redis = Redis(server.url, timeout_s=20.0, clock=SystemClock(), telemetry=SilentTelemetry())
        far = RedisCache(redis, wait_s=20.0)

        async def all_earlier(seconds: float) -> None:
            """Time passes in Redis too: whatever is there lasts for so much less."""
            clock.advance(seconds)
            keys = await redis.execute("KEYS", "*")
            for key in keys if isinstance(keys, list) else []:
                left_ms = await redis.execute("PTTL", key if isinstance(key, bytes) else b"")
                assert isinstance(left_ms, int)
                await redis.execute("PEXPIRE", key if isinstance(key, bytes) else b"", left_ms - int(seconds * 1000))

        tiered: Cache = TieredCache(near, far)
        if request.param == "tiered, another worker":
            tiered = Elsewhere(tiered, TieredCache(MemoryCache(1_000_000, clock), far))
        yield World(far if request.param == "redis" else tiered, far.settled, all_earlier)
        await redis.close()


class Elsewhere:
    """Written by one worker, read by another."""

    def __init__(self, writing: Cache, reading: Cache) -> None:
        self._writing = writing
        self._reading = reading

    async def get(self, key: str) -> bytes | None:
        return await self._reading.get(key)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._writing.put(key, value, ttl_s)


async def test_what_was_put_is_there_as_it_was(world: World) -> None:
    assert await world.cache.get("key") is None
    values = [b"", b"\x00\xff\r\n", b"$5\r\nhello\r\n", bytes(range(256)) * 100]
    keys = ["", " ", "ä", "half \ud83d", "line\r\nbreak", "x" * 5000]
    for key in keys:
        for value in values:
            await world.put(f"{key}{values.index(value)}", value)
    for key in keys:
        for value in values:
            for _ in range(2):
                assert await world.cache.get(f"{key}{values.index(value)}") == value


async def test_the_last_value_counts(world: World) -> None:
    await world.put("key", b"first")
    await world.put("key", b"second")
    assert await world.cache.get("key") == b"second"


async def test_it_is_there_for_its_time_and_no_longer(world: World) -> None:
    await world.put("short", b"s", TTL_S)
    await world.put("long", b"l", 3 * TTL_S)
    await world.passes(TTL_S / 2)
    assert await world.cache.get("short") == b"s"
    assert await world.cache.get("long") == b"l"
    await world.passes(TTL_S / 2)
    assert await world.cache.get("short") is None
    assert await world.cache.get("long") == b"l"
    await world.passes(2 * TTL_S)
    assert await world.cache.get("long") is None


async def test_no_time_at_all_is_not_kept(world: World) -> None:
    await world.put("key", b"value")
    await world.put("key", b"", 0)
    assert await world.cache.get("key") is None
