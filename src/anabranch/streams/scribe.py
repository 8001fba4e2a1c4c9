"""How a step's events become entries of its stream, each under its trace, and breadcrumbs beside it."""

from collections.abc import Callable
from typing import assert_never

import msgspec

from anabranch.domain.contracts import Breadcrumbs
from anabranch.domain.events import SafetyDecided, StepCompleted, StepEvent, SubagentCompleted, SubagentResult
from anabranch.domain.steprecords import Described, described, stamp, written
from anabranch.domain.steps import Breadcrumb, Cancel, Command, Decision, Directive, Progress, Push, Trace, verdict_of
from anabranch.domain.streams import Entry
from anabranch.streams.actions import Action

ENDED = "ended"


class Line:
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


class Scribe:
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

    def line(self, event: StepEvent, action: Action) -> Line:
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
        return Line(
            event,
            told,
            entry,
            timestamp=stamp(at),
            trace_id=trace.trace_id,
            latency_ms=latency_ms,
            retries=max(0, attempt - 1),
        )

    def _of(self, result_key: str | None, event: StepEvent, action: Action, own: bool) -> Trace:
        if result_key is None and isinstance(event, SafetyDecided) and event.subagent is not None:
            result_key, own = action.result_key, True
        if own and action.trace is not None:
            return action.trace
        return self._trace if result_key is None else self._traces.get(result_key, self._trace)

    def tell(self, line: Line, sequence: int, ignored: str | None = None) -> None:
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

    def pass_over(self, action: Action, ignored: str) -> None:
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
