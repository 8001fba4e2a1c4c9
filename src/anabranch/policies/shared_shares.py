"""Limits of callers that hold over all workers that share a Redis."""

import asyncio
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from heapq import nlargest

import msgspec

from anabranch.policies.shares import Share
from anabranch.redis.client import Redis, RedisGone, script

EVERY_S = 0.5
GONE_S = 3.0
KEY = "anabranch:shares"
# Of each resource, only the callers that hold the most are told to the others.
MAX_CALLERS = 200
HELD = msgspec.json.Decoder(dict[str, dict[str, float]])


class SharedShares:
    """Twice a second, tells the other workers what callers hold here, and counts what they hold there. While Redis is
    unreachable, limits hold in each process."""

    def __init__(self, redis: Redis, shares: Mapping[str, Share], every_s: float = EVERY_S) -> None:
        self._redis = redis
        self._shares = {name: share for name, share in shares.items() if not math.isinf(share.limit.each)}
        self._every_s = every_s
        self._worker = secrets.token_hex(8)
        self._script = script(__package__, "exchange_shares.lua")

    async def run(self) -> None:
        try:
            while True:
                await self.exchange()
                await asyncio.sleep(self._every_s)
        finally:
            with suppress(RedisGone):
                await self._redis.execute("HDEL", KEY, self._worker)

    async def exchange(self) -> None:
        held = {name: _largest(share.holders()) for name, share in self._shares.items()}
        found: object = ()
        with suppress(RedisGone):
            body = msgspec.json.encode({name: callers for name, callers in held.items() if callers})
            found = await self._redis.execute("EVAL", self._script, 1, KEY, self._worker, body, int(GONE_S * 1000))
        others = list(_decoded(found if isinstance(found, list) else ()))
        for name, share in self._shares.items():
            total: dict[str, float] = {}
            for worker in others:
                for caller, units in worker.get(name, {}).items():
                    total[caller] = total.get(caller, 0.0) + units
            share.counted_elsewhere(total)


def _decoded(workers: Iterable[bytes]) -> Iterator[dict[str, dict[str, float]]]:
    for held in workers:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            yield HELD.decode(held)


def _largest(held: Mapping[str, float]) -> Mapping[str, float]:
    if len(held) <= MAX_CALLERS:
        return held
    return {name: held[name] for name in nlargest(MAX_CALLERS, held, key=lambda name: held[name])}
