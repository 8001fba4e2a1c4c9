"""Caches at their limits, and with a Redis that is slow, unreachable or holds foreign values."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.contracts import SystemClock
from anabranch.policies.cache import ENTRY_BYTES, MAX_SHARED_BYTES, MAX_WRITES, MemoryCache, RedisCache
from anabranch.redis.client import Redis
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing.fakes import ManualClock
from support.valkey_server import Valkey, running_valkey

NOISE_S = 0.8
WAIT_S = 0.05
LONG_S = 20.0


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    opened = Redis(valkey.url, timeout_s=LONG_S, clock=SystemClock(), telemetry=SilentTelemetry())
    yield opened
    await opened.close()


def redis_only(redis: Redis, wait_s: float = LONG_S) -> RedisCache:
    """Without room in the local cache, every read goes to Redis."""
    return RedisCache(redis, MemoryCache(0, ManualClock()), wait_s)


async def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache = MemoryCache(10 * (ENTRY_BYTES + 1_200), ManualClock())
    for number in range(10):
        await cache.put(str(number), bytes(1_000), 60)
    assert await cache.get("0") is not None
    for number in range(10, 14):
        await cache.put(str(number), bytes(1_000), 60)
    kept = [number for number in range(14) if await cache.get(str(number)) is not None]
    assert 0 in kept
    assert 1 not in kept
    assert kept[-4:] == [10, 11, 12, 13]


async def test_a_value_larger_than_a_quarter_of_the_cache_is_not_kept() -> None:
    cache = MemoryCache(100_000, ManualClock())
    await cache.put("key", b"small", 60)
    await cache.put("other", b"small", 60)
    await cache.put("key", bytes(25_000), 60)
    assert await cache.get("key") is None
    assert await cache.get("other") == b"small"


puts = st.lists(st.tuples(st.sampled_from("abcdefäö"), st.integers(0, 3_000), st.sampled_from([0.0, 1.0, 5.0])))


@given(puts)
def test_the_memory_cache_stays_within_its_bytes(calls: list[tuple[str, int, float]]) -> None:
    async def play() -> None:
        clock = ManualClock()
        cache = MemoryCache(6_000, clock)
        for key, size, ttl_s in calls:
            await cache.put(key, bytes(size), ttl_s)
            clock.advance(0.5)
            assert sum(len(key) + len(value) + ENTRY_BYTES for key, (value, _) in cache._items.items()) <= 6_000
            kept = await cache.get(key)
            assert kept is None or len(kept) == size
        for key in "abcdefäö":
            await cache.put(key, b"", 0)
        assert (cache._bytes, len(cache._items)) == (0, 0)

    asyncio.run(play())


async def test_a_frozen_redis_delays_a_read_by_its_timeout_and_a_write_not_at_all(valkey: Valkey, redis: Redis) -> None:
    cache = redis_only(redis, WAIT_S)
    await cache.put("key", b"value", 60)
    await cache.settled()
    assert await cache.get("key") == b"value"
    valkey.freeze()
    began = time.monotonic()
    assert await cache.get("key") is None
    assert time.monotonic() - began < WAIT_S + NOISE_S
    for number in range(2 * MAX_WRITES):
        await cache.put(str(number), b"value", 60)
    assert len(cache._writes) == MAX_WRITES
    valkey.thaw()
    await cache.settled()
    assert await redis.execute("DBSIZE") == MAX_WRITES + 1
    assert await cache.get("key") == b"value"
    assert redis.reachable


async def test_without_redis_the_local_cache_still_answers(valkey: Valkey, redis: Redis) -> None:
    cache = RedisCache(redis, MemoryCache(1_000_000, ManualClock()), LONG_S)
    await cache.put("before", b"1", 60)
    await cache.settled()
    valkey.kill()
    await cache.put("after", b"2", 60)
    await cache.settled()
    assert await cache.get("before") == b"1"
    assert await cache.get("after") == b"2"
    assert await cache.get("never") is None
    assert not redis.reachable
    await cache.put("gone", b"3", 60)
    assert await cache.get("gone") == b"3"
    assert await redis_only(redis).get("gone") is None


async def test_a_value_from_redis_stays_in_the_local_cache_for_its_remaining_ttl(redis: Redis) -> None:
    clock = ManualClock()
    cache = RedisCache(redis, MemoryCache(1_000_000, clock), LONG_S)
    await redis.execute("SET", "key", b"value", "PX", 60_000)
    assert await cache.get("key") == b"value"
    await redis.execute("DEL", "key")
    clock.advance(30)
    assert await cache.get("key") == b"value"
    clock.advance(30)
    assert await cache.get("key") is None


async def test_foreign_values_in_redis_are_misses(redis: Redis) -> None:
    near = MemoryCache(1_000_000, ManualClock())
    cache = RedisCache(redis, near, LONG_S)
    await redis.execute("LPUSH", "list", "x")
    await redis.execute("SET", "endless", b"\x80not ours")
    assert await cache.get("list") is None
    assert await cache.get("endless") == b"\x80not ours"
    assert await near.get("endless") is None
    await cache.put("list", b"ours", 60)
    await cache.settled()
    assert await redis_only(redis).get("list") == b"ours"
    assert redis.reachable


async def test_a_very_large_value_is_not_written_to_redis(redis: Redis) -> None:
    cache = redis_only(redis)
    await cache.put("large", bytes(MAX_SHARED_BYTES + 1), 60)
    await cache.put("fits", bytes(MAX_SHARED_BYTES), 60)
    await cache.settled()
    assert await cache.get("large") is None
    assert await cache.get("fits") == bytes(MAX_SHARED_BYTES)
