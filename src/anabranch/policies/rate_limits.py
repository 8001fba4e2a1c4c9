"""Rate limits with an exact sliding window, in this process or in all processes that share a Redis."""

import hashlib
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

from anabranch.domain.contracts import Clock, Limiter, Telemetry
from anabranch.domain.errors import RateLimited
from anabranch.domain.model import Allowance, Context
from anabranch.domain.shares import LOCAL, Claimant, Limit
from anabranch.domain.signals import RateLimitChecked, Rejected
from anabranch.policies.shares import reached
from anabranch.redis.client import RedisGone

if TYPE_CHECKING:
    from anabranch.redis.client import Redis

MAX_KEYS = 100_000
LONGEST_NAME = 200
ADDRESS_BLOCK = 64

# A sorted set of the admitted calls, scored by the time of Redis in microseconds, which a double holds exactly. If that
# clock was set back, calls lie in the future: they are moved to now, so that they count for at most one more window. If
# the set holds more than the limit (which was lowered), the caller waits until limit - 1 are left.
SCRIPT = """
local key, limit, window = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for _, call in ipairs(redis.call('ZRANGEBYSCORE', key, string.format('(%.0f', now), '+inf')) do
  redis.call('ZADD', key, now, call)
end
redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', now - window))
local used = redis.call('ZCARD', key)
if used >= limit then
  local first = redis.call('ZRANGE', key, used - limit, used - limit, 'WITHSCORES')[2]
  local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  return {0, last + window - now, first + window - now}
end
local number = 0
while redis.call('ZADD', key, 'NX', now, string.format('%.0f:%d', now, number)) == 0 do
  number = number + 1
end
redis.call('PEXPIRE', key, math.ceil(window / 1000))
return {limit - used - 1, window, 0}
"""


class Reservation(NamedTuple):
    allowance: Allowance
    until: float


class MemoryLimiter:
    """A sliding window in this process: a call counts until the window has passed since it was admitted."""

    def __init__(self, limit: int, window_s: float, clock: Clock, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        # By key, the ends of its calls in order; the key admitted last comes last.
        self._calls: dict[str, array[float]] = {}

    async def admit(self, key: str, limit: int | None = None) -> Allowance:
        return self.reserve(key, limit).allowance

    def reserve(self, key: str, limit: int | None = None) -> Reservation:
        """Admit a call that can be released again. Nothing is reserved if the allowance has a wait."""
        limit = self._limit if limit is None else limit
        now = self._clock.monotonic()
        calls = self._calls.get(key) or array("d")
        over = bisect_right(calls, now)
        used = len(calls) - over
        if used >= limit:
            return Reservation(
                Allowance(
                    limit=limit,
                    remaining=0,
                    reset_s=_distance(now, calls[-1]),
                    wait_s=_distance(now, calls[len(calls) - limit]),
                ),
                now,
            )
        if over > used:  # Not each time: deleting from the front is linear.
            del calls[:over]
        until = now + self._window_s
        calls.append(until)
        self._calls.pop(key, None)
        self._calls[key] = calls
        self._sweep(now)
        return Reservation(Allowance(limit=limit, remaining=limit - used - 1, reset_s=self._window_s), until)

    def used(self, key: str) -> int:
        calls = self._calls.get(key) or array("d")
        return len(calls) - bisect_right(calls, self._clock.monotonic())

    def release(self, key: str, reservation: Reservation) -> None:
        calls = self._calls.get(key, array("d"))
        place = bisect_left(calls, reservation.until)
        if place < len(calls) and calls[place] == reservation.until:
            del calls[place]
        if not calls:
            self._calls.pop(key, None)

    def _sweep(self, now: float) -> None:
        """Drop up to two expired keys per new one, and the oldest keys beyond the maximum."""
        for _ in range(2):
            oldest = next(iter(self._calls))
            if self._calls[oldest][-1] > now and len(self._calls) <= self._max_keys:
                return
            del self._calls[oldest]


class RedisLimiter:
    """One window for all processes that share a Redis, and a local one in each: if Redis is unreachable or comes back
    empty, the limit still holds per process."""

    def __init__(self, redis: "Redis", local: MemoryLimiter, limit: int, window_s: float) -> None:
        self._redis = redis
        self._local = local
        self._limit = limit
        self._window_us = round(window_s * 1_000_000)

    async def admit(self, key: str, limit: int | None = None) -> Allowance:
        """A cancelled call keeps its reservation: Redis may have counted it."""
        limit = self._limit if limit is None else limit
        reservation = self._local.reserve(key, limit)
        local = reservation.allowance
        if local.wait_s:
            return local
        with suppress(RedisGone):
            match await self._redis.execute("EVAL", SCRIPT, 1, key, limit, self._window_us):
                case [int(remaining), int(reset_us), 0]:
                    remaining, reset_s = min(local.remaining, remaining), max(local.reset_s, reset_us / 1e6)
                    return Allowance(limit=limit, remaining=remaining, reset_s=reset_s)
                case [int(remaining), int(reset_us), int(wait_us)]:
                    self._local.release(key, reservation)
                    return Allowance(limit=limit, remaining=remaining, reset_s=reset_us / 1e6, wait_s=wait_us / 1e6)
        return local

    def used(self, key: str) -> int:
        return self._local.used(key)


def _distance(now: float, then: float) -> float:
    """The seconds until then, rounded so that now plus the result is not less."""
    distance = then - now
    return distance if now + distance >= then else distance + math.ulp(then)


class RateLimits:
    """The limit of each caller on each of `surfaces` (other surfaces have none), and on changes of what is stored."""

    def __init__(self, limiter: Limiter, surfaces: Collection[str], changes: Limit, telemetry: Telemetry) -> None:
        self._limiter = limiter
        self._surfaces = frozenset(surfaces)
        self._changes = changes
        self._telemetry = telemetry

    async def admit(self, context: Context) -> Allowance | None:
        """Count a question against its caller's limit, where there is one. The operator on this machine has none."""
        if context.surface not in self._surfaces or context.local_operator:
            return None
        if (bucket := bucket_of(context)) is None:
            return None
        allowance = await self._limiter.admit(bucket)
        caller = context.user_id or context.address or ""
        self._telemetry.noted(RateLimitChecked(surface=context.surface, admitted=not allowance.wait_s, caller=caller))
        if allowance.wait_s:
            self._telemetry.noted(Rejected(surface=context.surface, code=RateLimited.code))
            raise RateLimitExceeded(allowance)
        return allowance

    async def admit_key(self, key: str, limit: int, surface: str) -> Allowance:
        """Count a request of any kind against the limit that its API key has."""
        allowance = await self._limiter.admit(f"rl:key:{key}", limit)
        if allowance.wait_s:
            if surface:
                self._telemetry.noted(Rejected(surface=surface, code=RateLimited.code))
            raise RateLimitExceeded(allowance)
        return allowance

    async def admit_change(self, caller: Claimant) -> Allowance | None:
        """Count a change of what is stored against its caller's limit. Callers on this machine have none."""
        allowed = self._changes.of(caller)
        if caller is LOCAL or math.isinf(allowed):
            return None
        allowance = await self._limiter.admit(_changes_of(caller), int(allowed))
        if allowance.wait_s:
            raise RateLimitExceeded(allowance, self._changes)
        return allowance

    def changes(self, caller: Claimant) -> int:
        """The changes of a caller that count now."""
        return self._limiter.used(_changes_of(caller))


class RateLimitExceeded(RateLimited):
    """RateLimited, with the time to wait in whole seconds, rounded up."""

    def __init__(self, allowance: Allowance, limit: Limit | None = None) -> None:
        self.allowance = allowance
        wait_s = int(-(-allowance.wait_s // 1))
        if limit is None:
            message = f"You have asked {allowance.limit} times within a short while; ask again in {wait_s} s."
            super().__init__(message, retry_after_s=wait_s)
        else:
            message = f"{reached(limit, allowance.limit)}. Try again in {wait_s} s."
            super().__init__(message, limit=limit.name, allowed=allowance.limit, retry_after_s=wait_s)


def bucket_of(context: Context) -> str | None:
    """The rate limit's key: the user, or else the block of the address."""
    surface = f"rl:{context.surface}"
    user = context.user_id
    if user is not None:
        return f"{surface}:{_short(user)}"
    return None if context.address is None else f"{surface}_address:{address_block(context.address)}"


def _changes_of(caller: Claimant) -> str:
    return f"rl:changes:{_short(caller.name)}"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else hashlib.blake2b(name.encode(errors="replace")).hexdigest()


@lru_cache(maxsize=1024)
def address_block(address: str) -> str:
    """The address; of IPv6 its /64 block, all of which one client can have."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return f"{ip_network((parsed, ADDRESS_BLOCK), strict=False).network_address}/{ADDRESS_BLOCK}"
    return str(parsed)
