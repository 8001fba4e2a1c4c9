"""Every cache passes the contract suite of caches."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.domain.contracts import Cache, SystemClock
from anabranch.policies.cache import MemoryCache, RedisCache
from anabranch.redis.client import Redis
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing.contracts.cache import CacheCase, CacheContract
from anabranch.testing.fakes import ManualClock
from support.valkey_server import running_valkey


@pytest.fixture(params=["memory", "redis only", "redis", "redis, another worker"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CacheCase]:
    clock = ManualClock()
    near = MemoryCache(1_000_000, clock)

    async def nothing() -> None: ...

    async def later(seconds: float) -> None:
        clock.advance(seconds)

    if request.param == "memory":
        yield CacheCase(near, nothing, later)
        return

    with running_valkey(tmp_path) as server:
        redis = Redis(server.url, timeout_s=20.0, clock=SystemClock(), telemetry=SilentTelemetry())
        first_bytes = 0 if request.param == "redis only" else 1_000_000
        cache = RedisCache(redis, MemoryCache(first_bytes, clock), wait_s=20.0)

        async def all_earlier(seconds: float) -> None:
            """Time passes in Redis too: whatever is there lasts for so much less."""
            clock.advance(seconds)
            keys = await redis.execute("KEYS", "*")
            for key in keys if isinstance(keys, list) else []:
                left_ms = await redis.execute("PTTL", key if isinstance(key, bytes) else b"")
                assert isinstance(left_ms, int)
                await redis.execute("PEXPIRE", key if isinstance(key, bytes) else b"", left_ms - int(seconds * 1000))

        reader: Cache = RedisCache(redis, MemoryCache(1_000_000, clock), wait_s=20.0)
        shared = WriterAndReader(cache, reader) if request.param == "redis, another worker" else cache
        yield CacheCase(shared, cache.settled, all_earlier)
        await redis.close()


class WriterAndReader:
    """Written by one worker, read by another."""

    def __init__(self, writing: Cache, reading: Cache) -> None:
        self._writing = writing
        self._reading = reading

    async def get(self, key: str) -> bytes | None:
        return await self._reading.get(key)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._writing.put(key, value, ttl_s)


class TestCache(CacheContract):
    """Every cache of this package."""
