"""Owners of planner sessions, in memory and in Redis."""

import heapq

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import StreamUnavailable
from anabranch.redis.client import Redis, RedisGone, script


class MemorySessions:
    """Sessions of a single process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, tuple[str, float]] = {}
        # One item per session: when to check it. It may have been claimed again by then.
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._held)

    async def claim(self, session: str, identity: str, ttl_s: float) -> bool:
        now = self._clock.monotonic()
        held = self._held.get(session)
        if held is not None and held[0] != identity and held[1] > now:
            return False
        self._held[session] = identity, now + ttl_s
        if held is None:
            heapq.heappush(self._due, (now + ttl_s, session))
        return True

    def tend(self) -> None:
        now = self._clock.monotonic()
        while self._due and self._due[0][0] <= now:
            session = self._due[0][1]
            until = self._held[session][1]
            if until > now:
                heapq.heapreplace(self._due, (until, session))
            else:
                heapq.heappop(self._due)
                del self._held[session]
        if not self._held:
            self._held.clear()


class RedisSessions:
    """Sessions of all workers that share a Redis. StreamUnavailable while it is unreachable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def claim(self, session: str, identity: str, ttl_s: float) -> bool:
        key, ttl_ms = f"anabranch:session:{session}", max(1, round(ttl_s * 1000))
        claim = script(__package__, "claim_session.lua")
        try:
            return await self._redis.execute("EVAL", claim, 1, key, identity, ttl_ms) == 1
        except RedisGone as gone:
            raise StreamUnavailable("The log that the workers share cannot be reached.") from gone
