"""Open circuits shared between workers over Redis."""

import asyncio
import hashlib
from contextlib import suppress

from anabranch.domain.contracts import Clock
from anabranch.policies.upstreams import Upstream, UpstreamKey, Upstreams
from anabranch.redis.client import Redis, RedisGone

EVERY_S = 1.0
# Circuits of upstreams that were not called here for so long are not exchanged.
RECENT_S = 30.0


class SharedBreakers:
    """Once a second, publishes the circuits that opened here and opens those that opened in other workers, for as long
    as they are open there. Each worker makes its own trial call."""

    def __init__(self, redis: Redis, upstreams: Upstreams, clock: Clock) -> None:
        self._redis = redis
        self._upstreams = upstreams
        self._clock = clock
        self._published: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            with suppress(RedisGone):
                await self.exchange()

    async def exchange(self) -> None:
        now = self._clock.monotonic()
        self._published = {key: until for key, until in self._published.items() if until > now}
        if not self._redis.reachable:
            return
        recent = {_key(one): upstream for one, upstream in self._upstreams.since(now - RECENT_S)}
        await self._redis.execute("PING")  # so that an outage of Redis is noticed without questions, too
        await asyncio.gather(*(self._exchanged(key, upstream) for key, upstream in recent.items()))

    async def _exchanged(self, key: str, upstream: Upstream) -> None:
        breaker = upstream.breaker
        if breaker.open_s > 0:
            if self._published.get(key, 0.0) < breaker.until:
                self._published[key] = breaker.until
                await self._redis.execute("SET", key, upstream.name, "PX", max(1, int(breaker.open_s * 1000)))
        elif breaker.state == "closed":
            left_ms = await self._redis.execute("PTTL", key)
            if isinstance(left_ms, int) and left_ms > 0:
                breaker.open(left_ms / 1000)
                self._published[key] = breaker.until  # the others know it: do not publish it again


def _key(upstream: UpstreamKey) -> str:
    return f"breaker:{hashlib.blake2b(repr(upstream).encode(errors='replace'), digest_size=16).hexdigest()}"
