"""Limits: never more than so many calls in any window of that length, in this process or in all that share a Redis."""

import math
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from anabranch.domain.contracts import Clock
from anabranch.domain.model import Allowance
from anabranch.redis.client import RedisGone

if TYPE_CHECKING:
    from anabranch.redis.client import Redis, Reply

MAX_KEYS = 100_000

# A sorted set of the calls that were admitted, by the time of Redis in microseconds, which a double holds exactly. If
# that clock was set back, calls seem to lie in the future: they are moved to now, so that they count for a whole window
# more at the most and never too short. If the set holds more than the limit (it has been lowered), the caller waits
# until all but the last limit - 1 are over.
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
    """An exact moving window in this process: a call counts until the window has passed since it was admitted."""

    def __init__(self, limit: int, window_s: float, clock: Clock) -> None:
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        # For each key until when its calls count, in order; the key that was admitted last comes last.
        self._calls: dict[str, array[float]] = {}

    async def admit(self, key: str) -> Allowance:
        return self.reserve(key).allowance

    def reserve(self, key: str) -> Reservation:
        """Admit a call, in a way that can be taken back; nothing is reserved if the allowance says to wait."""
        now = self._clock.monotonic()
        calls = self._calls.get(key) or array("d")
        over = bisect_right(calls, now)
        used = len(calls) - over
        if used >= self._limit:
            allowance = Allowance(
                limit=self._limit,
                remaining=0,
                reset_s=_distance(now, calls[-1]),
                wait_s=_distance(now, calls[len(calls) - self._limit]),
            )
            return Reservation(allowance, now)
        if over > used:  # Not each time: to take away the first costs as much as there are.
            del calls[:over]
        until = now + self._window_s
        calls.append(until)
        self._calls.pop(key, None)
        self._calls[key] = calls
        self._sweep(now)
        remaining = self._limit - used - 1
        return Reservation(Allowance(limit=self._limit, remaining=remaining, reset_s=self._window_s), until)

    def release(self, key: str, reservation: Reservation) -> None:
        calls = self._calls.get(key, array("d"))
        place = bisect_left(calls, reservation.until)
        if place < len(calls) and calls[place] == reservation.until:
            del calls[place]
        if not calls:
            self._calls.pop(key, None)

    def _sweep(self, now: float) -> None:
        """Two keys that are over leave for each that comes, so that all of them do in time; too many leave anyway."""
        for _ in range(2):
            oldest = next(iter(self._calls))
            if self._calls[oldest][-1] > now and len(self._calls) <= MAX_KEYS:
                return
            del self._calls[oldest]


class RedisLimiter:
    """One window for all processes that share a Redis, and in each of them its own beneath it: what a process has
    admitted itself it knows, so the limit holds for each alone while Redis is gone and when it comes back empty."""

    def __init__(self, redis: "Redis", local: MemoryLimiter, limit: int, window_s: float) -> None:
        self._redis = redis
        self._local = local
        self._limit = limit
        self._window_us = round(window_s * 1_000_000)

    async def admit(self, key: str) -> Allowance:
        """A caller that is cancelled meanwhile keeps what was reserved: Redis may have counted the call."""
        reservation = self._local.reserve(key)
        own = reservation.allowance
        if own.wait_s:
            return own
        try:
            shared = _allowance(
                self._limit, await self._redis.execute("EVAL", SCRIPT, 1, key, self._limit, self._window_us)
            )
        except RedisGone:
            return own
        if shared.wait_s:
            self._local.release(key, reservation)
            return shared
        return Allowance(
            limit=self._limit,
            remaining=min(own.remaining, shared.remaining),
            reset_s=max(own.reset_s, shared.reset_s),
        )


def _allowance(limit: int, reply: "Reply") -> Allowance:
    match reply:
        case [int(remaining), int(reset_us), int(wait_us)]:
            return Allowance(limit=limit, remaining=remaining, reset_s=reset_us / 1e6, wait_s=wait_us / 1e6)
    raise RedisGone("Redis answered a limit with something else.")


def _distance(now: float, then: float) -> float:
    """How long to wait until then, such that adding it to now gives no less, whatever the rounding."""
    distance = then - now
    return distance if now + distance >= then else distance + math.ulp(then)
