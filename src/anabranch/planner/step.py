"""One subagent's part of a step: where it stands, and what that makes of the step."""

import math
from collections.abc import Collection
from typing import Literal, get_args

import msgspec

from anabranch.domain.errors import InvalidQuestion, StreamUnavailable
from anabranch.domain.eventlog import LAST
from anabranch.domain.events import (
    Outcome,
    OutcomeStatus,
    SafetyDecided,
    SafetyVerdict,
    StepCompleted,
    StepEvent,
    StepProgressed,
    StepStarted,
    StepStatus,
    SubagentCompleted,
    SubagentDegraded,
    SubagentResult,
    SubagentRetried,
    SubagentStarted,
    SubagentTimedOut,
)
from anabranch.domain.model import Value
from anabranch.domain.steps import Directive, Expected, Fragment, Ignored, Progress, verdict_of

Open = Literal["waiting", "running"]
State = Open | OutcomeStatus
OPEN: tuple[Open, ...] = ("waiting", "running")
CLOSED: dict[str, OutcomeStatus] = {status: status for status in get_args(OutcomeStatus)}


class SubagentState(Value):
    """Where one subagent stands. Of its `attempt`, revisions count from `base`; `heard` says that it has brought one
    with a number. `deadline` is when its time is over, however it is tried in between."""

    expected: Expected
    deadline: float
    deadline_ms: int
    state: State = "waiting"
    attempt: int = 0
    base: int = 0
    revision: int = 0
    heard: bool = False
    delivered: bool = False
    latency_ms: int | None = None
    error: str | None = None

    @property
    def open(self) -> bool:
        return self.state in OPEN

    @property
    def outcome(self) -> Outcome:
        return Outcome(
            subagent=self.expected.key,
            status=CLOSED.get(self.state, "cancelled"),
            revision=self.revision,
            attempts=self.attempt,
            latency_ms=self.latency_ms,
            error=self.error,
        )

    def meant(self, revision: int | None) -> int:
        """Which attempt one belongs to that does not say: after an error it is the next, unless it is an old one."""
        attempt = max(1, self.attempt)
        again = self.state == "error" and (revision is None or self.placed(attempt, revision)[1] > self.revision)
        return attempt + again

    def placed(self, attempt: int, revision: int | None) -> tuple[int, int]:
        """From where an attempt's revisions count, and where this one stands among all of this result's."""
        fresh = attempt != self.attempt
        base = self.revision if fresh else self.base
        if revision is None:
            return base + 1, self.revision + 1  # numbered ones go on counting behind it
        if revision < 1 and (fresh or not self.heard):  # whoever counts from zero
            base = self.revision + 1 - revision
        return base, base + revision


def outcome_of(parts: Collection[SubagentState]) -> StepStatus:
    """How a step ended that nobody ended."""
    missed = [part for part in parts if part.state != "success"]
    if not missed:
        return "success"
    if any(part.expected.required for part in missed) or not any(part.delivered for part in parts):
        return "failed"
    return "partial_failure"


FINAL = ("success", "error")


class Applied(Value):
    """What is to be written, in this order; `ignored` says that what was sent is not among it, and why."""

    events: tuple[StepEvent, ...] = ()
    ignored: Ignored | None = None


class Marked(Value):
    """A step's state, to come back to."""

    begun: bool
    parts: dict[str, SubagentState]
    end: StepCompleted | None
    decisions: int
    hooks: int
    next_step_id: str | None


class Step:
    """Every function takes what happened and when (monotonic, never running backwards). A time-out counts from its
    moment, whether or not anybody noticed: whatever happens later finds it done."""

    __slots__ = ("_began", "_begun", "_decisions", "_directive", "_hooks", "_next_step_id", "_parts", "end")

    def __init__(self, directive: Directive, *, now: float, timeout_s: float) -> None:
        if not directive.expected:
            raise InvalidQuestion("A step must expect at least one subagent.")
        self._directive = directive
        self._began = now
        self._begun = False
        self._parts: dict[str, SubagentState] = {}
        for expected in directive.expected:
            if expected.result_key in self._parts:
                raise InvalidQuestion(f"Two subagents have the same result key, {expected.result_key!r}.")
            deadline_ms = round(timeout_s * 1000) if expected.deadline_ms is None else expected.deadline_ms
            deadline = now + deadline_ms / 1000
            self._parts[expected.result_key] = SubagentState(
                expected=expected, deadline=deadline, deadline_ms=deadline_ms
            )
        self._decisions = 0
        self._hooks = 0
        self._next_step_id = directive.next_step_id
        self.end: StepCompleted | None = None

    @property
    def status(self) -> str:
        return "in_progress" if self.end is None else self.end.status

    def part(self, result_key: str) -> SubagentState:
        return self._parts[result_key]

    def due(self) -> float:
        """When the next of those who are still open runs out of time."""
        if self.end is not None:
            return math.inf
        return min((part.deadline for part in self._parts.values() if part.state in OPEN), default=math.inf)

    def marked(self) -> Marked:
        return Marked(
            begun=self._begun,
            parts=self._parts.copy(),
            end=self.end,
            decisions=self._decisions,
            hooks=self._hooks,
            next_step_id=self._next_step_id,
        )

    def back_to(self, mark: Marked) -> None:
        """What happened since then has not happened: it could not be written."""
        self._begun = mark.begun
        self._parts = mark.parts.copy()
        self.end = mark.end
        self._decisions = mark.decisions
        self._hooks = mark.hooks
        self._next_step_id = mark.next_step_id

    def begin(self) -> Applied:
        self._begun = True
        return Applied(events=(StepStarted(expected=tuple(one.key for one in self._directive.expected)),))

    def start(self, result_key: str, now: float) -> Applied:
        """It was asked."""
        events, ended = self._reached(now)
        part = self._parts[result_key]
        if ended or part.state != "waiting":
            return Applied(events=tuple(events))
        self._change(part, state="running", attempt=1)
        events.append(SubagentStarted(subagent=part.expected.key, result_key=result_key))
        return Applied(events=tuple(events))

    def degrade(self, result_key: str, reason: str, now: float) -> Applied:
        """It is not asked at all."""
        events, ended = self._reached(now)
        part = self._parts[result_key]
        if ended or part.state != "waiting":
            return Applied(events=tuple(events))
        self._change(part, state="degraded", error=reason)
        events.append(SubagentDegraded(subagent=part.expected.key, result_key=result_key, reason=reason))
        return self._through(events)

    def bring(
        self,
        result_key: str,
        fragment: Fragment,
        now: float,
        *,
        attempt: int | None = None,
        revision: int | None = None,
        latency_ms: int | None = None,
    ) -> Applied:
        """A result, or a part of one."""
        self._only_once_begun()
        part = self._parts[result_key]
        attempt = part.meant(revision) if attempt is None else attempt
        base, placed = part.placed(attempt, revision)
        if not 1 <= attempt <= LAST or placed > LAST or (revision is not None and revision < 0):
            raise InvalidQuestion("The attempt or the revision is out of range.")
        events, _ = self._reached(now)
        part = self._parts[result_key]
        if part.open and attempt == part.attempt and fragment.status in FINAL and placed <= part.revision:
            base, placed = base + part.revision + 1 - placed, part.revision + 1  # an attempt ends once: it is not stale
        if ignored := self._passed_over(part, attempt, revision, placed, now):
            return Applied(events=tuple(events), ignored=ignored)
        key = part.expected.key
        if part.state == "waiting":
            events.append(SubagentStarted(subagent=key, result_key=result_key, attempt=attempt))
        if attempt > max(1, part.attempt):
            why = part.error or ""
            events.append(SubagentRetried(subagent=key, result_key=result_key, attempt=attempt, reason=why))
        delivered = part.delivered or fragment.status in ("partial", "success")
        part = self._change(
            part,
            state="running",
            attempt=attempt,
            base=base,
            revision=placed,
            heard=revision is not None or (attempt == part.attempt and part.heard),
            delivered=delivered,
            latency_ms=None,
            error=None,
        )
        events.append(
            SubagentResult(
                subagent=key, result_key=result_key, status=fragment.status, revision=placed, payload=fragment.payload
            )
        )
        verdict = None
        if fragment.verdict is not None:
            verdict = self._decided(events, fragment.verdict, fragment.reason, key)
        if fragment.status in FINAL:
            self._complete(events, part, fragment.status == "success", fragment.reason, now, latency_ms)
        if verdict == "block":
            return self._finish(events, "blocked", fragment.reason)
        return self._through(events)

    def retry(self, result_key: str, attempt: int, reason: str, now: float) -> Applied:
        """It failed, and is asked once more."""
        events, _ = self._reached(now)
        part = self._parts[result_key]
        if ignored := self._passed_over(part, attempt, None, part.revision + 1, now):
            return Applied(events=tuple(events), ignored=ignored)
        self._change(part, state="running", attempt=attempt, base=part.revision, heard=False, error=None)
        again = SubagentRetried(subagent=part.expected.key, result_key=result_key, attempt=attempt, reason=reason)
        return Applied(events=(*events, again))

    def fail(self, result_key: str, attempt: int, error: str, now: float) -> Applied:
        """It failed for good. What it has delivered stays."""
        events, _ = self._reached(now)
        part = self._parts[result_key]
        if ignored := self._passed_over(part, attempt, None, part.revision + 1, now):
            return Applied(events=tuple(events), ignored=ignored)
        self._complete(events, self._change(part, attempt=attempt), False, error, now, None)
        return self._through(events)

    def decide(self, decision: str, reason: str, now: float, subagent: str | None = None) -> Applied:
        self._only_once_begun()
        events, ended = self._reached(now)
        if ended:
            return Applied(events=tuple(events), ignored="ended")
        if self._decided(events, decision, reason, subagent) == "block":
            return self._finish(events, "blocked", reason)
        return Applied(events=tuple(events))

    def progress(self, said: Progress, now: float) -> Applied:
        self._only_once_begun()
        events, ended = self._reached(now)
        if ended:
            return Applied(events=tuple(events), ignored="ended")
        self._hooks += 1
        self._next_step_id = said.next_step_id or self._next_step_id
        events.append(StepProgressed(payload=said.payload, revision=self._hooks, stage=said.stage, status=said.status))
        return Applied(events=tuple(events))

    def stop(self, status: Literal["cancelled", "worker_lost", "failed"], reason: str, now: float) -> Applied:
        events, ended = self._reached(now)
        if ended:
            return Applied(events=tuple(events), ignored="ended")
        return self._finish(events, status, reason)

    def expire(self, now: float) -> Applied:
        return Applied(events=tuple(self._reached(now)[0]))

    def _only_once_begun(self) -> None:
        """What comes before is not for a step that its readers know of."""
        if not self._begun:
            raise StreamUnavailable("The beginning of the step could not be written.")

    def _reached(self, now: float) -> tuple[list[StepEvent], bool]:
        """It is now that late: who has run out of time, and whether the step has ended."""
        events: list[StepEvent] = []
        if self.end is not None:
            return events, True
        if now < self.due():
            return events, False
        late = [part for part in self._parts.values() if part.open and part.deadline <= now]
        for part in sorted(late, key=lambda part: part.deadline):
            self._change(part, state="timeout", latency_ms=part.deadline_ms)
            events.append(
                SubagentTimedOut(
                    subagent=part.expected.key, result_key=part.expected.result_key, deadline_ms=part.deadline_ms
                )
            )
        return list(self._through(events).events), self.end is not None

    def _passed_over(
        self, part: SubagentState, attempt: int, revision: int | None, placed: int, now: float
    ) -> Ignored | None:
        if self.end is not None:
            return "ended"
        if part.state == "degraded":
            return "degraded"
        if part.state == "timeout":
            return "late"
        if attempt < part.attempt:
            return "superseded"
        if attempt > part.attempt:
            if part.state == "success":
                return "completed"
            return "late" if part.deadline <= now else None
        if revision is not None and part.heard and placed <= part.revision:
            return "duplicate" if placed == part.revision else "superseded"
        return None if part.open else "completed"

    def _decided(self, events: list[StepEvent], said: str, reason: str, subagent: str | None) -> SafetyVerdict:
        verdict = verdict_of(said)
        self._decisions += 1
        events.append(SafetyDecided(verdict=verdict, reason=reason, revision=self._decisions, subagent=subagent))
        return verdict

    def _complete(
        self, events: list[StepEvent], part: SubagentState, good: bool, reason: str, now: float, latency_ms: int | None
    ) -> None:
        if latency_ms is None:
            latency_ms = max(0, round((now - self._began) * 1000))
        status: Literal["success", "error"] = "success" if good else "error"
        error = None if good else reason or None
        self._change(part, state=status, latency_ms=latency_ms, error=error)
        events.append(
            SubagentCompleted(
                subagent=part.expected.key,
                result_key=part.expected.result_key,
                status=status,
                latency_ms=latency_ms,
                attempt=part.attempt,
                error=error,
            )
        )

    def _change(self, part: SubagentState, **changes: object) -> SubagentState:
        changed = msgspec.structs.replace(part, **changes)
        self._parts[part.expected.result_key] = changed
        return changed

    def _through(self, events: list[StepEvent]) -> Applied:
        """Ends the step if nobody is open any more."""
        parts = self._parts.values()
        if self.end is not None or any(part.state in OPEN for part in parts):
            return Applied(events=tuple(events))
        return self._finish(events, outcome_of(parts), None)

    def _finish(self, events: list[StepEvent], status: StepStatus, reason: str | None) -> Applied:
        for part in list(self._parts.values()):
            if part.open:
                self._change(part, state="cancelled")
        outcomes = {key: part.outcome for key, part in self._parts.items()}
        self.end = StepCompleted(
            status=status, outcomes=outcomes, reason=reason or None, next_step_id=self._next_step_id
        )
        return Applied(events=(*events, self.end))
