"""How a step's events are written down: one form for the log, the stream and the replay."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import assert_never

import msgspec

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
from anabranch.domain.steps import EMPTY, Trace
from anabranch.domain.streams import one_line


class Telemetry(Value, gc=False, omit_defaults=True):
    """What an event says of its trace."""

    trace_id: str
    span_id: str
    traceparent: str
    parent_span_id: str | None = None
    tracestate: str | None = None
    latency_ms: int | None = None
    metrics: Mapping[str, float] = {}


class Content(Value):
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
    content: Content
    telemetry: Telemetry


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
        content=Content(
            stage=event.stage,
            status=event.status,
            payload=event.payload,
            revision=event.revision,
            result_key=event.result_key,
        ),
        telemetry=Telemetry(
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
