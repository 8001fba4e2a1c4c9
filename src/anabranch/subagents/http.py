"""A subagent at a URL: called once, and its reply is streamed."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

import msgspec

from anabranch.domain.contracts import Clock, Exchange, Outbound, Subagent
from anabranch.domain.errors import FailureKind, InvalidQuestion, UpstreamError, UpstreamTimedOut
from anabranch.domain.events import SubagentStatus
from anabranch.domain.model import Context, Value
from anabranch.domain.steps import EMPTY, Directive, Expected, Fragment
from anabranch.network import sse
from anabranch.network.redaction import content_of
from anabranch.policies.resilience import refused
from anabranch.subagents.payloads import MAX_BYTES, UNDECODABLE, within

MAX_FRAGMENTS = 10_000
MAX_METRICS = 50
MAX_METRIC = 100
JSON_LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
STATUSES: Mapping[str, SubagentStatus] = {
    "pending": "pending",
    "in_progress": "in_progress",
    "partial": "partial",
    "success": "success",
    "completed": "success",
    "error": "error",
}
# Spec 2's adapter output; an object with other fields and no payload is a payload itself.
OUTPUT = frozenset({"type", "subagent", "status", "result_key", "payload", "telemetry", "revision", "attempt"})
KEEP_ALIVE = (b'"heartbeat"', b'"ping"')
DONE = b"[DONE]"

T = TypeVar("T")


class Measured(Value):
    metrics: dict[str, Any] = {}


class HttpSubagent:
    """A Subagent that is called at the envelope's URL, through the address guard. The reply is JSON, server-sent events
    or JSON lines. Each part is spec 2's adapter output, or the payload itself, which then is the whole result. Nothing
    is read after a success or an error. `inner` is the adapter of its key."""

    def __init__(
        self, inner: Subagent, outbound: Outbound, clock: Clock, *, max_fragments: int = MAX_FRAGMENTS
    ) -> None:
        self._inner = inner
        self._outbound = outbound
        self._clock = clock
        self._max_fragments = max_fragments

    def convert(self, payload: bytes, status: SubagentStatus) -> Fragment:
        return self._inner.convert(payload, status)

    async def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:
        call = self._outbound.request(
            "POST", expected.url or "", headers=_headers(context), body=_body(expected, directive)
        )
        async with AsyncExitStack() as stack:
            exchange = await self._in_time(stack.enter_async_context(call), context)
            if not 200 <= exchange.status < 300:
                raise await self._in_time(refused(exchange, UpstreamError), context)
            outputs = await stack.enter_async_context(aclosing(_outputs(exchange)))
            for _ in range(self._max_fragments):
                output = await self._in_time(anext(outputs, None), context)
                if output is None:
                    raise UpstreamError("It ended without a result.", FailureKind.DOWN)
                fragment = self._fragment(output)
                yield fragment
                if fragment.status in ("success", "error"):
                    return
            raise UpstreamError(f"It sent more than {self._max_fragments:,} parts.", FailureKind.UNUSABLE)

    async def _in_time(self, waited_for: Awaitable[T], context: Context) -> T:
        """Wait for one step of a call: a generator must not yield inside a time-out."""
        late = UpstreamTimedOut("It did not answer in time.", FailureKind.DOWN)
        return await within(waited_for, context.deadline - self._clock.monotonic(), late)

    def _fragment(self, output: bytes) -> Fragment:
        """One output in its adapter's form. Output that cannot be used is the subagent's failure, not the planner's."""
        if len(output) > MAX_BYTES:
            raise UpstreamError(f"It sent a part of more than {MAX_BYTES:,} bytes.", FailureKind.UNUSABLE)
        output = content_of(output.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        try:
            given = msgspec.json.decode(output, type=dict[str, msgspec.Raw])
        except UNDECODABLE as error:
            raise UpstreamError("It replied with something else than a JSON object.", FailureKind.UNUSABLE) from error
        try:
            if not _is_output(given):
                return self._inner.convert(output, "success")
            fragment = self._inner.convert(_payload(given), _status(given.get("status")))
        except InvalidQuestion as error:
            raise UpstreamError(f"Its reply cannot be used: {error.message}", FailureKind.UNUSABLE) from error
        return msgspec.structs.replace(fragment, metrics={**fragment.metrics, **_metrics(given.get("telemetry"))})


async def _outputs(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    if exchange.content_type == "text/event-stream":
        async for data in sse.events(exchange.chunks()):
            event = data.encode()
            if event.strip() == DONE:
                return
            if not _keeps_alive(event):
                yield event
    elif exchange.content_type in JSON_LINES:
        async for line in _lines(exchange.chunks()):
            if not _keeps_alive(line):
                yield line
    else:
        yield await exchange.read()


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines that are not empty; a last one without its end counts too."""
    pending = bytearray()
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = bytes(pending + end).strip()
            pending.clear()
            if line:
                yield line
        pending += rest
        if len(pending) > MAX_BYTES:
            raise UpstreamError(f"It sent a part of more than {MAX_BYTES:,} bytes.", FailureKind.UNUSABLE)
    if last := bytes(pending).strip():
        yield last


def _keeps_alive(event: bytes) -> bool:
    if len(event) > MAX_METRIC or not any(name in event for name in KEEP_ALIVE):
        return False
    try:
        return bytes(msgspec.json.decode(event, type=dict[str, msgspec.Raw]).get("type", EMPTY)) in KEEP_ALIVE
    except UNDECODABLE:
        return False


def _is_output(given: Mapping[str, msgspec.Raw]) -> bool:
    named = "status" in given or "payload" in given
    return named and (given.keys() <= OUTPUT or bytes(given.get("payload", b"")).startswith(b"{"))


def _payload(given: Mapping[str, msgspec.Raw]) -> bytes:
    payload = bytes(given.get("payload", EMPTY))
    return bytes(EMPTY) if payload == b"null" else payload


def _status(given: msgspec.Raw | None) -> SubagentStatus:
    with suppress(*UNDECODABLE, KeyError):
        return STATUSES["success" if given is None else msgspec.json.decode(given, type=str)]
    raise InvalidQuestion(f"status must be one of {', '.join(STATUSES)}.")


def _metrics(telemetry: msgspec.Raw | None) -> dict[str, float]:
    """The metrics that are numbers; others are ignored."""
    try:
        measured = msgspec.json.decode(telemetry or EMPTY, type=Measured).metrics
    except UNDECODABLE:
        return {}
    numbers = [
        (name, float(value))
        for name, value in measured.items()
        if isinstance(value, int | float) and abs(value) < 2**53 and len(name) <= MAX_METRIC
    ]
    return dict(numbers[:MAX_METRICS])


def _body(expected: Expected, directive: Directive) -> bytes:
    """The request to a subagent; it never contains a token."""
    return msgspec.json.encode(
        {
            "session_id": directive.session_id,
            "plan_step_id": directive.plan_step_id,
            "subagent": expected.key,
            "result_key": expected.result_key,
            "input": EMPTY if expected.input is None else expected.input,
            **({"planner_context": directive.planner_context} if directive.planner_context else {}),
        }
    )


def _headers(context: Context) -> dict[str, str]:
    sent = {
        "Content-Type": "application/json",
        "Accept": ", ".join(("application/json", "text/event-stream", JSON_LINES[0])),
        "X-Correlation-ID": context.correlation_id,
    }
    if context.traceparent:
        sent["traceparent"] = context.traceparent
        if context.tracestate:
            sent["tracestate"] = context.tracestate
    return sent
