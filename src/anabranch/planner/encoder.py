"""How a step's events are encoded: one JSON form for the log, the stream and the replay."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import assert_never

import msgspec

from anabranch.domain.eventlog import Entry, one_line
from anabranch.domain.events import (
    PlanStepCompleted,
    SafetyDecided,
    StepCompleted,
    StepEvent,
    StepProgressed,
    StepStarted,
    StreamDegraded,
    SubagentCompleted,
    SubagentDegraded,
    SubagentEvent,
    SubagentPending,
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
    Progress,
    Push,
    Trace,
    verdict_of,
)
from anabranch.planner.step import FINAL

EVENT_TYPES: Mapping[type[StepEvent], str] = {
    StepStarted: "step_started",
    StreamDegraded: "degraded",
    SafetyDecided: "safety",
    StepProgressed: "progress",
    StepCompleted: "step_completed",
    PlanStepCompleted: "plan_step_completed",
    SubagentPending: "subagent_pending",
    SubagentStarted: "subagent_started",
    SubagentResult: "subagent_result",
    SubagentCompleted: "subagent_completed",
    SubagentRetried: "retry",
    SubagentTimedOut: "timeout",
    SubagentDegraded: "degraded",
}


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
        # Later revisions under this key replace it. The type separates lifecycle events from results.
        key=f"{record.type}:{content.result_key or ''}",
        revision=content.revision,
        body=one_line(msgspec.json.encode(record)),
        partial=isinstance(event, SubagentResult) and event.status not in FINAL,
        final=isinstance(event, PlanStepCompleted),
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
        case StepCompleted() | PlanStepCompleted():
            end = {"subagents": event.outcomes, "reason": event.reason, "next_step_id": event.next_step_id}
            return _content("step", event.status, 1, raw(end))
        case _:
            return _subagent_content(event)


def _subagent_content(event: SubagentEvent) -> StepContent:
    match event:
        case SubagentPending():
            return _content(event.subagent, "pending", 1, EMPTY, event.result_key)
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


def ignored_after_end(session_id: str, plan_step_id: str, command: Command, timestamp: str) -> Breadcrumb:
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
