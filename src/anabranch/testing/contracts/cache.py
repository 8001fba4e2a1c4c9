"""The tests of the contract Cache."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from anabranch.domain.contracts import Cache

TTL_S = 300.0


class CacheCase(NamedTuple):
    """A cache, `settled` to wait for its writes, and `advance` to move its clock by seconds."""

    cache: Cache
    settled: Callable[[], Awaitable[None]]
    advance: Callable[[float], Awaitable[None]]

    async def put(self, key: str, value: bytes, ttl_s: float = TTL_S) -> None:
        await self.cache.put(key, value, ttl_s)
        await self.settled()


class CacheContract:
    """The fixture `case` gives a CacheCase."""

    async def test_a_cached_value_is_returned_unchanged(self, case: CacheCase) -> None:
        assert await case.cache.get("key") is None
        values = [b"", b"\x00\xff\r\n", b"$5\r\nhello\r\n", bytes(range(256)) * 100]
        entries = {
            f"{key}{number}": value
            for key in ("", " ", "ä", "half \ud83d", "line\r\nbreak", "x" * 5000)
            for number, value in enumerate(values)
        }
        for key, value in entries.items():
            await case.put(key, value)
        for key, value in [*entries.items()] * 2:
            assert await case.cache.get(key) == value

    async def test_the_last_value_of_a_key_counts(self, case: CacheCase) -> None:
        await case.put("key", b"first")
        await case.put("key", b"second")
        assert await case.cache.get("key") == b"second"

    async def test_a_value_expires_after_its_ttl(self, case: CacheCase) -> None:
        await case.put("short", b"s", TTL_S)
        await case.put("long", b"l", 3 * TTL_S)
        for advance_s, short, long in ((0.5, b"s", b"l"), (0.5, None, b"l"), (2.0, None, None)):
            await case.advance(advance_s * TTL_S)
            assert (await case.cache.get("short"), await case.cache.get("long")) == (short, long)

    async def test_a_ttl_of_zero_removes_the_value(self, case: CacheCase) -> None:
        await case.put("key", b"value")
        await case.put("key", b"", 0)
        assert await case.cache.get("key") is None
