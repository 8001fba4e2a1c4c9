"""How a step's events are written down: one form for the log, the stream and the replay."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import assert_never

import msgspec

from anabranch.domain.contracts import Breadcrumbs
from anabranch.domain.eventlog import Entry, one_line
from anabranch.domain.events import (
    SafetyDecided,
    StepCompleted,
    StepEvent,
    StepProgressed,
    StepStarted,
    StreamDegraded,
    SubagentCompleted,
    SubagentDegraded,
    SubagentEvent,
    SubagentResult,
    SubagentRetried,
    SubagentStarted,
    SubagentTimedOut,
)
from anabranch.domain.model import Value
from anabranch.domain.steps import (
    EMPTY,
    Breadcrumb,
    Cancel,
    Command,
    Decision,
    Directive,
    Progress,
    Push,
    Trace,
    verdict_of,
)
from anabranch.planner.commands import StepCommand


class StepTelemetry(Value, gc=False, omit_defaults=True):
    """What an event says of its trace."""

    trace_id: str
    span_id: str
    traceparent: str
    parent_span_id: str | None = None
    tracestate: str | None = None
    latency_ms: int | None = None
    metrics: Mapping[str, float] = {}


class StepContent(Value):
    stage: str
    status: str
    payload: msgspec.Raw
    revision: int
    result_key: str | None


class StepRecord(Value):
    """An event as it is kept and sent: everything but its sequence, which is its place in the log."""

    session_id: str
    plan_step_id: str
    type: str
    timestamp: str
    content: StepContent
    telemetry: StepTelemetry


class Described(Value, gc=False):
    """What a step's event is called, where it belongs and how it stands."""

    type: str
    stage: str
    status: str
    revision: int
    result_key: str | None = None
    payload: msgspec.Raw = EMPTY
    partial: bool = False

    @property
    def key(self) -> str:
        """Under which later revisions replace it: spec 2's result key, beside the type that tells lifecycle and
        result apart."""
        return f"{self.type}:{self.result_key}" if self.result_key is not None else f"{self.type}:"


def described(event: StepEvent) -> Described:
    match event:
        case StepStarted():
            expected = raw({"expected_subagents": event.expected})
            return Described(type="step_started", stage="step", status="in_progress", revision=1, payload=expected)
        case StreamDegraded():
            why = raw({"reason": event.reason})
            return Described(type="degraded", stage="stream", status="degraded", revision=event.epoch, payload=why)
        case SafetyDecided():
            decision = raw({"decision": event.verdict, "reason": event.reason, "subagent": event.subagent})
            return Described(
                type="safety", stage="safety", status=event.verdict, revision=event.revision, payload=decision
            )
        case StepProgressed():
            return Described(
                type="progress", stage=event.stage, status=event.status, revision=event.revision, payload=event.payload
            )
        case StepCompleted():
            end = raw({"subagents": event.outcomes, "reason": event.reason, "next_step_id": event.next_step_id})
            return Described(type="plan_step_completed", stage="step", status=event.status, revision=1, payload=end)
        case _:
            name, status, revision, payload = _of_subagent(event)
            return Described(
                type=name,
                stage=event.subagent,
                status=status,
                revision=revision,
                result_key=event.result_key,
                payload=payload,
                partial=name == "subagent_result" and status not in ("success", "error"),
            )


def _of_subagent(event: SubagentEvent) -> tuple[str, str, int, msgspec.Raw]:
    match event:
        case SubagentStarted():
            return "subagent_started", "in_progress", event.attempt, EMPTY
        case SubagentResult():
            return "subagent_result", event.status, event.revision, event.payload
        case SubagentCompleted():
            end = {"latency_ms": event.latency_ms, "attempts": event.attempt, "error": event.error}
            return "subagent_completed", event.status, event.attempt, raw(end)
        case SubagentRetried():
            again = {"attempt": event.attempt, "retry_count": event.attempt - 1, "reason": event.reason}
            return "retry", "retrying", event.attempt, raw(again)
        case SubagentTimedOut():
            return "timeout", "timeout", 1, raw({"deadline_ms": event.deadline_ms})
        case SubagentDegraded():
            return "degraded", "degraded", 1, raw({"reason": event.reason})
        case _:
            assert_never(event)


def written(
    event: Described,
    *,
    session_id: str,
    plan_step_id: str,
    at: float,
    trace: Trace,
    latency_ms: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> bytes:
    """The event as it is kept: JSON on one line, an object that only lacks its sequence."""
    record = StepRecord(
        session_id=session_id,
        plan_step_id=plan_step_id,
        type=event.type,
        timestamp=stamp(at),
        content=StepContent(
            stage=event.stage,
            status=event.status,
            payload=event.payload,
            revision=event.revision,
            result_key=event.result_key,
        ),
        telemetry=StepTelemetry(
            trace_id=trace.trace_id,
            span_id=trace.span_id,
            traceparent=trace.traceparent,
            parent_span_id=trace.parent_span_id,
            tracestate=trace.tracestate,
            latency_ms=latency_ms,
            metrics=metrics or {},
        ),
    )
    return one_line(msgspec.json.encode(record))


def numbered(body: bytes, sequence: int) -> bytes:
    """A kept event with its place in the stream, as it is sent."""
    return b'{"sequence":%d,%b' % (sequence, body[1:])


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def stamp(at: float) -> str:
    """Seconds since 1970 as ISO 8601, in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


ENDED = "ended"


class EncodedEvents:
    """An event as it will be written, and what a breadcrumb says of it."""

    __slots__ = ("entry", "event", "latency_ms", "retries", "timestamp", "told", "trace_id")

    def __init__(
        self,
        event: StepEvent,
        told: Described,
        entry: Entry,
        *,
        timestamp: str,
        trace_id: str,
        latency_ms: int | None,
        retries: int,
    ) -> None:
        self.event = event
        self.told = told
        self.entry = entry
        self.timestamp = timestamp
        self.trace_id = trace_id
        self.latency_ms = latency_ms
        self.retries = retries


class StepEncoder:
    """`traces` are those of the subagents, by result key; `trace` is the step's own."""

    def __init__(
        self,
        directive: Directive,
        *,
        trace: Trace,
        traces: dict[str, Trace],
        crumbs: Breadcrumbs,
        wall: Callable[[], float],
    ) -> None:
        self._session_id = directive.session_id
        self._plan_step_id = directive.plan_step_id
        self._trace = trace
        self._traces = traces
        self._crumbs = crumbs
        self._wall = wall

    def line(self, event: StepEvent, action: StepCommand) -> EncodedEvents:
        told = described(event)
        own = told.result_key is not None and told.result_key == action.result_key
        trace = self._of(told.result_key, event, action, own)
        result = own and isinstance(event, SubagentResult)
        latency_ms = action.latency_ms if result else None
        at = self._wall()
        body = written(
            told,
            session_id=self._session_id,
            plan_step_id=self._plan_step_id,
            at=at,
            trace=trace,
            latency_ms=latency_ms,
            metrics=action.metrics if result else None,
        )
        final = isinstance(event, StepCompleted)
        entry = Entry(key=told.key, revision=told.revision, body=body, partial=told.partial, final=final)
        if isinstance(event, SubagentCompleted):
            latency_ms = event.latency_ms
        attempt = getattr(event, "attempt", action.attempt if own else 1)
        return EncodedEvents(
            event,
            told,
            entry,
            timestamp=stamp(at),
            trace_id=trace.trace_id,
            latency_ms=latency_ms,
            retries=max(0, attempt - 1),
        )

    def _of(self, result_key: str | None, event: StepEvent, action: StepCommand, own: bool) -> Trace:
        if result_key is None and isinstance(event, SafetyDecided) and event.subagent is not None:
            result_key, own = action.result_key, True
        if own and action.trace is not None:
            return action.trace
        return self._trace if result_key is None else self._traces.get(result_key, self._trace)

    def tell(self, line: EncodedEvents, sequence: int, ignored: str | None = None) -> None:
        self._crumbs.drop(
            Breadcrumb(
                session_id=self._session_id,
                plan_step_id=self._plan_step_id,
                type=line.told.type,
                timestamp=line.timestamp,
                sequence=sequence,
                subagent=getattr(line.event, "subagent", None),
                result_key=line.told.result_key,
                status=line.told.status,
                revision=line.told.revision,
                retry_count=line.retries,
                latency_ms=line.latency_ms,
                trace_id=line.trace_id,
                ignored=ignored,
            )
        )

    def pass_over(self, action: StepCommand, ignored: str) -> None:
        """Something was sent, and is not delivered."""
        trace = action.trace or self._traces.get(action.result_key or "", self._trace)
        self._crumbs.drop(
            Breadcrumb(
                session_id=self._session_id,
                plan_step_id=self._plan_step_id,
                type=action.type,
                timestamp=stamp(self._wall()),
                subagent=action.subagent,
                result_key=action.result_key,
                status=action.status,
                retry_count=max(0, action.attempt - 1),
                latency_ms=action.latency_ms,
                trace_id=trace.trace_id,
                ignored=ignored,
            )
        )


def too_late(session_id: str, plan_step_id: str, command: Command, timestamp: str) -> Breadcrumb:
    """Of what was sent to a step after its end."""
    crumb = Breadcrumb(session_id=session_id, plan_step_id=plan_step_id, type="", timestamp=timestamp, ignored=ENDED)
    match command:
        case Push():
            return msgspec.structs.replace(
                crumb,
                type="subagent_result",
                subagent=command.name,
                result_key=command.result_key,
                status=command.status,
                revision=command.revision or 0,
                retry_count=max(0, (command.attempt or 1) - 1),
                latency_ms=command.latency_ms,
                trace_id=command.trace.trace_id if command.trace is not None else None,
            )
        case Progress():
            return msgspec.structs.replace(crumb, type="progress", status=command.status)
        case Decision():
            return msgspec.structs.replace(crumb, type="safety", status=verdict_of(command.decision))
        case Cancel():
            return msgspec.structs.replace(crumb, type="plan_step_completed", status="cancelled")
        case _:
            assert_never(command)
