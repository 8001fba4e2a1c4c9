"""What a step needs from outside: log, sessions, traces, clock, timing."""

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import takewhile
from typing import Protocol

import msgspec

from anabranch.domain.contracts import Breadcrumbs, Cache, Clock, EventLog, Subagents, Telemetry, Turns
from anabranch.domain.errors import AnabranchError, StreamUnavailable
from anabranch.domain.model import Context, Value
from anabranch.domain.shares import Resource
from anabranch.domain.steps import Trace
from anabranch.eventlog.redis.log import UNREACHABLE
from anabranch.redis.client import Redis, RedisGone, script

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
# Errors of a cache, and of a stored trace that cannot be decoded; they count as a miss.
MISSES = (AnabranchError, OSError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError)


class TelemetryContextStore:
    """Traces by session, step and subagent, for as long as the step can be read."""

    def __init__(self, cache: Cache, ttl_s: float) -> None:
        self._cache = cache
        self._ttl_s = ttl_s

    async def put(self, session_id: str, plan_step_id: str, subagent_key: str, trace: Trace) -> None:
        with suppress(*MISSES):
            key = _key(session_id, plan_step_id, subagent_key)
            await self._cache.put(key, msgspec.json.encode(trace), self._ttl_s)

    async def get(self, session_id: str, plan_step_id: str, subagent_key: str) -> Trace | None:
        with suppress(*MISSES):
            found = await self._cache.get(_key(session_id, plan_step_id, subagent_key))
            return None if found is None else msgspec.json.decode(found, type=Trace)
        return None


def step_trace(context: Context, named: Iterable[Trace] = ()) -> Trace:
    """The trace of the request that started the step; else a new span in the first trace of its envelope, or in a new
    trace."""
    if request := requested(context):
        return Trace(trace_id=request[0], span_id=request[1], tracestate=context.tracestate)
    first = next(iter(named), Trace(trace_id=secrets.token_hex(16), span_id=""))
    return msgspec.structs.replace(first, span_id=secrets.token_hex(8), parent_span_id=None)


def within(trace: Trace, context: Context) -> Trace:
    """A subagent's trace, with the request that started the step as its parent."""
    request = requested(context)
    if request is None or trace.parent_span_id is not None or request[1] == trace.span_id:
        return trace
    return msgspec.structs.replace(trace, parent_span_id=request[1])


def requested(context: Context) -> tuple[str, str] | None:
    """The trace id and the span id of a request."""
    found = TRACEPARENT.fullmatch(context.traceparent or "")
    return None if found is None else (found[1], found[2])


def _key(session_id: str, plan_step_id: str, subagent_key: str) -> str:
    """Unique, whatever the ids contain."""
    return f"trace:{len(session_id)}:{session_id}:{len(plan_step_id)}:{plan_step_id}:{subagent_key}"


class MemorySessions:
    """Sessions of a single process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # In the order of the latest claims, which is that of their expiry if all are equally long.
        self._held: OrderedDict[str, tuple[str, float]] = OrderedDict()

    async def claim(self, session: str, identity: str, ttl_s: float) -> bool:
        now = self._clock.monotonic()
        held = self._held.get(session)
        if held is not None and held[0] != identity and held[1] > now:
            return False
        self._held[session] = identity, now + ttl_s
        self._held.move_to_end(session)
        return True

    def tend(self) -> None:
        now = self._clock.monotonic()
        for session, _ in list(takewhile(lambda held: held[1][1] <= now, self._held.items())):
            del self._held[session]
        if not self._held:
            self._held.clear()  # A dict keeps the size that it once had until it is cleared.


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
            raise StreamUnavailable(UNREACHABLE) from gone


class Alarm(Protocol):
    """A timer that fires once unless it is cancelled."""

    def cancel(self) -> None: ...


def later(seconds: float, call: Callable[[], None]) -> Alarm:
    return asyncio.get_running_loop().call_later(seconds, call)


class PlannerTime(Value):
    """A monotonic clock, the time of day, and timers."""

    clock: Clock
    wall: Callable[[], float] = time.time
    later: Callable[[float, Callable[[], None]], Alarm] = later

    def now(self) -> float:
        return self.clock.monotonic()

    async def pause(self, seconds: float) -> None:
        over = asyncio.Event()
        alarm = self.later(seconds, over.set)
        try:
            await over.wait()
        finally:
            alarm.cancel()


class PlannerTiming(Value):
    """Waits: before a failed write is tried again, before an expired deadline is checked again, before a subagent or a
    callback is tried for the second time, before a task that ignores its cancellation is cancelled again, and at
    shutdown for the last events and for cancelled tasks."""

    rewrite_s: float = 0.2
    recheck_s: float = 1.0
    first_retry_s: float = 0.5
    first_callback_s: float = 0.5
    cancel_again_s: float = 1.0
    last_events_s: float = 2.0
    cleanup_s: float = 1.0


class StepLimits(Value):
    """`timeout_s`: time of a subagent without a deadline of its own. `retries`: of a subagent that is called here.
    `lease_s` and `ttl_s`: as in the event log."""

    timeout_s: float
    retries: int
    lease_s: float
    ttl_s: float = 1800.0


class PlannerServices(Value):
    """`steps` is what callers share of the steps in progress in this worker. `notify` sends a callback to an
    orchestrator's URL; it raises an AnabranchError if that fails."""

    log: EventLog
    subagents: Subagents
    breakers: Callable[[str], Turns]
    telemetry: Telemetry
    crumbs: Breadcrumbs
    traces: TelemetryContextStore
    notify: Callable[[str, bytes], Awaitable[None]]
    limits: StepLimits
    steps: Resource
    time: PlannerTime
    timing: PlannerTiming = PlannerTiming()
