"""Spec 2's TelemetryContextStore: the trace of each subagent of a step."""

import re
import secrets
from collections.abc import Iterable

import msgspec

from anabranch.domain.contracts import Cache
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Context
from anabranch.domain.steps import Trace

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
