"""What a step needs from outside: log, sessions, traces, clock, timing."""

import asyncio
import heapq
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec

from anabranch.domain.contracts import Breadcrumbs, Cache, Clock, EventLog, Subagents, Telemetry, Turns
from anabranch.domain.errors import AnabranchError, StreamUnavailable
from anabranch.domain.model import Context, Value
from anabranch.domain.steps import Trace
from anabranch.redis.client import Redis, RedisGone, script

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
# Errors of a cache; they count as a miss.
MISSES = (AnabranchError, OSError, TimeoutError)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Trace)


class TelemetryContextStore:
    """Traces by session, step and subagent, for as long as the step can be read."""

    def __init__(self, cache: Cache, ttl_s: float) -> None:
        self._cache = cache
        self._ttl_s = ttl_s

    async def put(self, session_id: str, plan_step_id: str, subagent_key: str, trace: Trace) -> None:
        try:
            await self._cache.put(_key(session_id, plan_step_id, subagent_key), _encoder.encode(trace), self._ttl_s)
        except MISSES:
            return

    async def get(self, session_id: str, plan_step_id: str, subagent_key: str) -> Trace | None:
        try:
            found = await self._cache.get(_key(session_id, plan_step_id, subagent_key))
        except MISSES:
            return None
        try:
            return None if found is None else _decoder.decode(found)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None


def step_trace(context: Context, named: Iterable[Trace] = ()) -> Trace:
    """The trace of the request that started the step; else a new span in the first trace of its envelope, or in a new
    trace."""
    if asked := requested(context):
        return Trace(trace_id=asked[0], span_id=asked[1], tracestate=context.tracestate)
    first = next(iter(named), None)
    trace_id = first.trace_id if first is not None else secrets.token_hex(16)
    return Trace(trace_id=trace_id, span_id=secrets.token_hex(8), tracestate=first.tracestate if first else None)


def within(trace: Trace, context: Context) -> Trace:
    """A subagent's trace, with the request that started the step as its parent."""
    asked = requested(context)
    if asked is None or trace.parent_span_id is not None or asked[1] == trace.span_id:
        return trace
    return msgspec.structs.replace(trace, parent_span_id=asked[1])


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


class Alarm(Protocol):
    """A timer that fires once unless it is cancelled."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Alarm]
# Sends a callback to an orchestrator's URL; raises an AnabranchError if that fails.
Notify = Callable[[str, bytes], Awaitable[None]]


def later(seconds: float, call: Callable[[], None]) -> Alarm:
    return asyncio.get_running_loop().call_later(seconds, call)


class PlannerTime(Value):
    """A monotonic clock, the time of day, and timers."""

    clock: Clock
    wall: Callable[[], float] = time.time
    later: Later = later

    def now(self) -> float:
        return self.clock.monotonic()

    async def pause(self, seconds: float) -> None:
        over = asyncio.get_running_loop().create_future()
        alarm = self.later(seconds, lambda: None if over.done() else over.set_result(None))
        try:
            await over
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
    `max_steps`: steps in progress in this worker. `lease_s` and `ttl_s`: as in the event log."""

    timeout_s: float
    retries: int
    max_steps: int
    lease_s: float
    ttl_s: float = 1800.0


class PlannerServices(Value):
    log: EventLog
    subagents: Subagents
    breakers: Callable[[str], Turns]
    telemetry: Telemetry
    crumbs: Breadcrumbs
    traces: TelemetryContextStore
    notify: Notify
    limits: StepLimits
    time: PlannerTime
    timing: PlannerTiming = PlannerTiming()
