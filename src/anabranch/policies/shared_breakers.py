"""Workers tell each other which upstreams are being left alone, so that not each has to find out by itself."""

import asyncio
import hashlib
from contextlib import suppress

from anabranch.domain.contracts import Clock
from anabranch.policies.upstreams import Upstream, UpstreamKey, Upstreams
from anabranch.redis.client import Redis, RedisGone

EVERY_S = 1.0
# Of an upstream that nobody here has asked for so long, nothing needs to be known.
LATELY_S = 30.0


class SharedBreakers:
    """Once a second, beside all questions: what has opened here is told, and what has opened elsewhere opens here for
    as long as it is still left alone there. Each worker tries the upstream for itself."""

    def __init__(self, redis: Redis, upstreams: Upstreams, clock: Clock) -> None:
        self._redis = redis
        self._upstreams = upstreams
        self._clock = clock
        self._told: dict[str, float] = {}
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
        self._told = {key: until for key, until in self._told.items() if until > now}
        if not self._redis.reachable:
            return
        lately = {_key(one): upstream for one, upstream in self._upstreams.since(now - LATELY_S)}
        await self._redis.execute("PING")  # so that its going and coming is noticed without questions, too
        await asyncio.gather(*(self._exchanged(key, upstream) for key, upstream in lately.items()))

    async def _exchanged(self, key: str, upstream: Upstream) -> None:
        breaker = upstream.breaker
        if breaker.left_s > 0:
            if self._told.get(key, 0.0) < breaker.until:
                self._told[key] = breaker.until
                await self._redis.execute("SET", key, upstream.name, "PX", max(1, int(breaker.left_s * 1000)))
        elif breaker.state == "closed":
            left_ms = await self._redis.execute("PTTL", key)
            if isinstance(left_ms, int) and left_ms > 0:
                breaker.leave_alone(left_ms / 1000)
                self._told[key] = breaker.until  # it is known already, and must not be told on and on


def _key(upstream: UpstreamKey) -> str:
    return f"breaker:{hashlib.blake2b(repr(upstream).encode(errors='replace'), digest_size=16).hexdigest()}"
