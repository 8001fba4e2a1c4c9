"""How a step's events are encoded: one JSON form for the log, the stream and the replay, and the breadcrumb of each."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import assert_never

import msgspec

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
from anabranch.planner.commands import EVENT_TYPES, StepCommand
from anabranch.planner.services import PlannerServices
from anabranch.planner.step import FINAL


class StepTelemetry(Value, gc=False, omit_defaults=True):
    """The trace and the measurements of an event."""

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
    """An event as it is stored and sent: everything but its sequence, which is its place in the log."""

    session_id: str
    plan_step_id: str
    type: str
    timestamp: str
    content: StepContent
    telemetry: StepTelemetry

    @property
    def key(self) -> str:
        """Later revisions under this key replace it: spec 2's result key, after the type, which separates lifecycle
        events from results."""
        return f"{self.type}:{self.content.result_key or ''}"


class EncodedEvent(Value):
    """An event as a log entry, with the record that the entry holds."""

    event: StepEvent
    record: StepRecord
    entry: Entry


def encode(
    event: StepEvent,
    *,
    session_id: str,
    plan_step_id: str,
    at: float,
    trace: Trace,
    latency_ms: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> EncodedEvent:
    """The entry's body is JSON on one line: an object that lacks only its sequence."""
    content = content_of(event)
    record = StepRecord(
        session_id=session_id,
        plan_step_id=plan_step_id,
        type=EVENT_TYPES[type(event)],
        timestamp=stamp(at),
        content=content,
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
    entry = Entry(
        key=record.key,
        revision=content.revision,
        body=one_line(msgspec.json.encode(record)),
        partial=isinstance(event, SubagentResult) and event.status not in FINAL,
        final=isinstance(event, StepCompleted),
    )
    return EncodedEvent(event=event, record=record, entry=entry)


def content_of(event: StepEvent) -> StepContent:
    match event:
        case StepStarted():
            return _content("step", "in_progress", 1, raw({"expected_subagents": event.expected}))
        case StreamDegraded():
            return _content("stream", "degraded", event.epoch, raw({"reason": event.reason}))
        case SafetyDecided():
            decision = {"decision": event.verdict, "reason": event.reason, "subagent": event.subagent}
            return _content("safety", event.verdict, event.revision, raw(decision))
        case StepProgressed():
            return _content(event.stage, event.status, event.revision, event.payload)
        case StepCompleted():
            end = {"subagents": event.outcomes, "reason": event.reason, "next_step_id": event.next_step_id}
            return _content("step", event.status, 1, raw(end))
        case SubagentStarted():
            return _content(event.subagent, "in_progress", event.attempt, EMPTY, event.result_key)
        case SubagentResult():
            return _content(event.subagent, event.status, event.revision, event.payload, event.result_key)
        case SubagentCompleted():
            done = {"latency_ms": event.latency_ms, "attempts": event.attempt, "error": event.error}
            return _content(event.subagent, event.status, event.attempt, raw(done), event.result_key)
        case SubagentRetried():
            retry = {"attempt": event.attempt, "retry_count": event.attempt - 1, "reason": event.reason}
            return _content(event.subagent, "retrying", event.attempt, raw(retry), event.result_key)
        case SubagentTimedOut():
            return _content(event.subagent, "timeout", 1, raw({"deadline_ms": event.deadline_ms}), event.result_key)
        case SubagentDegraded():
            return _content(event.subagent, "degraded", 1, raw({"reason": event.reason}), event.result_key)
        case _:
            assert_never(event)


def _content(
    stage: str, status: str, revision: int, payload: msgspec.Raw, result_key: str | None = None
) -> StepContent:
    return StepContent(stage=stage, status=status, payload=payload, revision=revision, result_key=result_key)


def numbered(body: bytes, sequence: int) -> bytes:
    """A stored event with its sequence, as it is sent."""
    return b'{"sequence":%d,%b' % (sequence, body[1:])


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def stamp(at: float) -> str:
    """Seconds since 1970 as ISO 8601, in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class StepEncoder:
    """Encodes one step's events and records its breadcrumbs. `traces` are those of the subagents, by result key;
    `trace` is the step's own."""

    def __init__(self, directive: Directive, services: PlannerServices, trace: Trace, traces: dict[str, Trace]) -> None:
        self._session_id = directive.session_id
        self._plan_step_id = directive.plan_step_id
        self._crumbs = services.crumbs
        self._wall = services.time.wall
        self._trace = trace
        self._traces = traces

    def encode(self, event: StepEvent, command: StepCommand) -> EncodedEvent:
        result_key: str | None = getattr(event, "result_key", None)
        own = result_key is not None and result_key == command.result_key
        measured = own and isinstance(event, SubagentResult)
        if isinstance(event, SafetyDecided) and event.subagent is not None:
            result_key, own = command.result_key, True
        return encode(
            event,
            session_id=self._session_id,
            plan_step_id=self._plan_step_id,
            at=self._wall(),
            trace=command.trace if own and command.trace is not None else self._trace_of(result_key),
            latency_ms=command.latency_ms if measured else None,
            metrics=command.metrics if measured else None,
        )

    def _trace_of(self, result_key: str | None) -> Trace:
        return self._traces.get(result_key or "", self._trace)

    def record(self, encoded: EncodedEvent, command: StepCommand, sequence: int, ignored: str | None = None) -> None:
        event, record = encoded.event, encoded.record
        own = record.content.result_key is not None and record.content.result_key == command.result_key
        self._crumbs.drop(
            Breadcrumb(
                session_id=self._session_id,
                plan_step_id=self._plan_step_id,
                type=record.type,
                timestamp=record.timestamp,
                sequence=sequence,
                subagent=getattr(event, "subagent", None),
                result_key=record.content.result_key,
                status=record.content.status,
                revision=record.content.revision,
                retry_count=max(0, getattr(event, "attempt", command.attempt if own else 1) - 1),
                latency_ms=getattr(event, "latency_ms", record.telemetry.latency_ms),
                trace_id=record.telemetry.trace_id,
                ignored=ignored,
            )
        )

    def record_ignored(self, command: StepCommand, ignored: str) -> None:
        """A breadcrumb for a command that had no effect."""
        trace = command.trace or self._trace_of(command.result_key)
        self._crumbs.drop(
            Breadcrumb(
                session_id=self._session_id,
                plan_step_id=self._plan_step_id,
                type=EVENT_TYPES[command.answers],
                timestamp=stamp(self._wall()),
                subagent=command.subagent,
                result_key=command.result_key,
                status=command.status,
                retry_count=max(0, command.attempt - 1),
                latency_ms=command.latency_ms,
                trace_id=trace.trace_id,
                ignored=ignored,
            )
        )


def too_late(session_id: str, plan_step_id: str, command: Command, timestamp: str) -> Breadcrumb:
    """The breadcrumb of a command that was sent after the end of its step."""
    crumb = Breadcrumb(session_id=session_id, plan_step_id=plan_step_id, type="", timestamp=timestamp, ignored="ended")
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
