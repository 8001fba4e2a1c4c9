"""The state machine of a planner step: pure, without clock or I/O. Commands change the state and return events."""

import math
from collections.abc import Collection
from typing import Literal, cast

import msgspec

from anabranch.domain.errors import InvalidQuestion, StreamUnavailable
from anabranch.domain.eventlog import LAST
from anabranch.domain.events import (
    Outcome,
    OutcomeStatus,
    PlanStepCompleted,
    SafetyDecided,
    SafetyVerdict,
    StepCompleted,
    StepEvent,
    StepProgressed,
    StepStarted,
    StepStatus,
    StreamDegraded,
    SubagentCompleted,
    SubagentDegraded,
    SubagentPending,
    SubagentResult,
    SubagentRetried,
    SubagentStarted,
    SubagentTimedOut,
)
from anabranch.domain.model import Value
from anabranch.domain.steps import MAX_ATTEMPTS, Directive, Expected, Fragment, Ignored, Progress, verdict_of

State = Literal["waiting", "running"] | OutcomeStatus
OPEN = ("waiting", "running")
FINAL = ("success", "error")
# How many results of an attempt are remembered, to recognize one that is sent again: more than a request can have.
MAX_REMEMBERED = 200


class SubagentState(Value):
    """The state of one subagent. The revisions of its `attempt` count from `base`; `numbered` says that it has sent one
    with a number, `sent` has a digest of each. `deadline` holds for all attempts together."""

    expected: Expected
    deadline: float
    deadline_ms: int
    state: State = "waiting"
    attempt: int = 0
    base: int = 0
    revision: int = 0
    numbered: bool = False
    sent: tuple[int, ...] = ()
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
            status="cancelled" if self.open else cast("OutcomeStatus", self.state),
            revision=self.revision,
            attempts=self.attempt,
            latency_ms=self.latency_ms,
            error=self.error,
        )

    def implied_attempt(self, revision: int | None, fragment: Fragment) -> int:
        """The attempt of a result that names none: after an error the next one, unless the failed attempt has sent the
        same result under the same revision. Without a revision every result is a new one."""
        is_new = revision is None or digest(revision, fragment) not in self.sent
        return max(1, self.attempt) + (self.state == "error" and is_new)

    def remembered(self, attempt: int, revision: int | None, fragment: Fragment) -> tuple[int, ...]:
        """What the attempt has sent, with this result."""
        sent = self.sent if attempt == self.attempt else ()
        return sent if revision is None else (*sent, digest(revision, fragment))[-MAX_REMEMBERED:]

    def placed(self, attempt: int, revision: int | None) -> tuple[int, int]:
        """The base of an attempt's revisions, and the revision's place among all of this result."""
        fresh = attempt != self.attempt
        base = self.revision if fresh else self.base
        if revision is None:
            return base + 1, self.revision + 1  # later numbered revisions count from here
        if revision < 1 and (fresh or not self.numbered):  # a subagent that counts from zero
            base = self.revision + 1 - revision
        return base, base + revision


def digest(revision: int, fragment: Fragment) -> int:
    """Equal, within this process, for results with the same revision, status and payload; for errors whatever their
    payload, which may name a time or a trace."""
    return hash((revision, fragment.status, b"" if fragment.status == "error" else bytes(fragment.payload)))


def outcome_of(parts: Collection[SubagentState]) -> StepStatus:
    """The status of a step whose subagents have all ended."""
    missed = [part for part in parts if part.state != "success"]
    if not missed:
        return "success"
    if any(part.expected.required for part in missed) or not any(part.delivered for part in parts):
        return "failed"
    return "partial_failure"


class Applied(Value):
    """The events of a command, in this order. `ignored` says why the command itself had no effect."""

    events: tuple[StepEvent, ...] = ()
    ignored: Ignored | None = None


class StepState(Value):
    parts: dict[str, SubagentState]
    next_step_id: str | None
    started: bool = False
    end: PlanStepCompleted | None = None
    decisions: int = 0
    progress: int = 0


class Step:
    """Every command takes what happened and when (monotonic, never running backwards). A time-out counts from its
    deadline, even if no command noticed it: later commands find it done. To undo commands, assign an earlier
    `state`."""

    __slots__ = ("_directive", "_events", "_started_at", "state")

    def __init__(self, directive: Directive, *, now: float, timeout_s: float) -> None:
        if not directive.expected:
            raise InvalidQuestion("A step must expect at least one subagent.")
        self._directive = directive
        self._started_at = now
        # The events of the command that is being applied.
        self._events: list[StepEvent] = []
        parts: dict[str, SubagentState] = {}
        for expected in directive.expected:
            if expected.result_key in parts:
                raise InvalidQuestion(f"Two subagents have the same result key, {expected.result_key!r}.")
            deadline_ms = round(timeout_s * 1000) if expected.deadline_ms is None else expected.deadline_ms
            deadline = now + deadline_ms / 1000
            parts[expected.result_key] = SubagentState(expected=expected, deadline=deadline, deadline_ms=deadline_ms)
        self.state = StepState(parts=parts, next_step_id=directive.next_step_id)

    @property
    def end(self) -> PlanStepCompleted | None:
        return self.state.end

    @property
    def status(self) -> str:
        return "in_progress" if self.end is None else self.end.status

    def part(self, result_key: str) -> SubagentState:
        return self.state.parts[result_key]

    def due(self) -> float:
        """The next deadline of an open subagent; after the end none is open."""
        return min((part.deadline for part in self.state.parts.values() if part.state in OPEN), default=math.inf)

    def begin(self) -> Applied:
        self._set(started=True)
        expected = self._directive.expected
        pending = (SubagentPending(subagent=one.key, result_key=one.result_key) for one in expected)
        return Applied(events=(StepStarted(expected=tuple(one.key for one in expected)), *pending))

    def start(self, result_key: str, now: float) -> Applied:
        """The subagent is called."""
        part = self._part_at(now, result_key)
        if part.state == "waiting":
            self._change(part, state="running", attempt=1)
            self._events.append(SubagentStarted(subagent=part.expected.key, result_key=result_key))
        return self._applied()

    def degrade(self, result_key: str, reason: str, now: float) -> Applied:
        """The subagent is not called at all."""
        part = self._part_at(now, result_key)
        if part.state == "waiting":
            self._change(part, state="degraded", error=reason)
            self._events.append(SubagentDegraded(subagent=part.expected.key, result_key=result_key, reason=reason))
        return self._end_if_complete()

    def deliver(
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
        self._require_started()
        part = self.part(result_key)
        attempt = part.implied_attempt(revision, fragment) if attempt is None else attempt
        base, placed = part.placed(attempt, revision)
        if not 1 <= attempt <= MAX_ATTEMPTS and self.end is None:
            raise InvalidQuestion(
                f"The attempt is out of range: a result has at most {MAX_ATTEMPTS:,} attempts. Start another step."
            )
        if placed > LAST or (revision is not None and revision < 0):
            raise InvalidQuestion("The revision is out of range.")
        part = self._part_at(now, result_key)
        if part.open and attempt == part.attempt and fragment.status in FINAL and placed <= part.revision:
            base, placed = base + part.revision + 1 - placed, part.revision + 1  # the end of an attempt is never stale
        if ignored := self._ignored(part, attempt, revision, placed, now):
            return self._applied(ignored)
        key = part.expected.key
        if part.state == "waiting":
            self._events.append(SubagentStarted(subagent=key, result_key=result_key, attempt=attempt))
        if attempt > max(1, part.attempt):
            reason = part.error or ""
            self._events.append(SubagentRetried(subagent=key, result_key=result_key, attempt=attempt, reason=reason))
        part = self._change(
            part,
            state="running",
            attempt=attempt,
            base=base,
            revision=placed,
            numbered=revision is not None or (attempt == part.attempt and part.numbered),
            sent=part.remembered(attempt, revision, fragment),
            delivered=part.delivered or fragment.status in ("partial", "success"),
            latency_ms=None,
            error=None,
        )
        self._events.append(
            SubagentResult(
                subagent=key, result_key=result_key, status=fragment.status, revision=placed, payload=fragment.payload
            )
        )
        verdict = fragment.verdict and self._decide(fragment.verdict, fragment.reason, key)
        if fragment.status in FINAL:
            self._complete(part, fragment.status == "success", fragment.reason, now, latency_ms)
        return self._finish("blocked", fragment.reason) if verdict == "block" else self._end_if_complete()

    def retry(self, result_key: str, attempt: int, reason: str, now: float) -> Applied:
        """The subagent failed and is called again."""
        part = self._part_at(now, result_key)
        if ignored := self._ignored(part, attempt, None, part.revision + 1, now):
            return self._applied(ignored)
        self._change(part, state="running", attempt=attempt, base=part.revision, numbered=False, sent=(), error=None)
        self._events.append(
            SubagentRetried(subagent=part.expected.key, result_key=result_key, attempt=attempt, reason=reason)
        )
        return self._applied()

    def fail(self, result_key: str, attempt: int, error: str, now: float) -> Applied:
        """The subagent failed for good. What it has delivered stays."""
        part = self._part_at(now, result_key)
        if ignored := self._ignored(part, attempt, None, part.revision + 1, now):
            return self._applied(ignored)
        self._complete(self._change(part, attempt=attempt), False, error, now, None)
        return self._end_if_complete()

    def decide(self, decision: str, reason: str, now: float, subagent: str | None = None) -> Applied:
        self._require_started()
        if self._ended_at(now):
            return self._applied("ended")
        blocked = self._decide(decision, reason, subagent) == "block"
        return self._finish("blocked", reason) if blocked else self._applied()

    def progress(self, progress: Progress, now: float) -> Applied:
        self._require_started()
        if self._ended_at(now):
            return self._applied("ended")
        revision = self.state.progress + 1
        self._set(progress=revision, next_step_id=progress.next_step_id or self.state.next_step_id)
        self._events.append(
            StepProgressed(payload=progress.payload, revision=revision, stage=progress.stage, status=progress.status)
        )
        return self._applied()

    def stop(self, status: Literal["cancelled", "worker_lost", "failed"], reason: str, now: float) -> Applied:
        return self._applied("ended") if self._ended_at(now) else self._finish(status, reason)

    def expire(self, now: float) -> Applied:
        self._ended_at(now)
        return self._applied()

    def detach(self, epoch: int) -> Applied:
        """The log continues in another epoch, without Redis."""
        event = StreamDegraded(epoch=epoch, reason="Redis is unreachable; the stream continues on one worker.")
        return Applied(events=(event,) if self.end is None else ())

    def _require_started(self) -> None:
        """A step whose start event is not written accepts no commands."""
        if not self.state.started:
            raise StreamUnavailable("The start of the step could not be written.")

    def _ended_at(self, now: float) -> bool:
        """Begin a command: apply the time-outs up to now. Whether the step has ended."""
        self._events = []
        late = [part for part in self.state.parts.values() if part.open and part.deadline <= now]
        for part in sorted(late, key=lambda part: part.deadline):
            self._change(part, state="timeout", latency_ms=part.deadline_ms)
            key, result_key = part.expected.key, part.expected.result_key
            self._events.append(SubagentTimedOut(subagent=key, result_key=result_key, deadline_ms=part.deadline_ms))
            self._end_if_complete()
        return self.end is not None

    def _part_at(self, now: float, result_key: str) -> SubagentState:
        """Begin a command on one subagent."""
        self._ended_at(now)
        return self.part(result_key)

    def _applied(self, ignored: Ignored | None = None) -> Applied:
        return Applied(events=tuple(self._events), ignored=ignored)

    def _ignored(
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
        if revision is not None and part.numbered and placed <= part.revision:
            return "duplicate" if placed == part.revision else "superseded"
        return None if part.open else "completed"

    def _decide(self, decision: str, reason: str, subagent: str | None) -> SafetyVerdict:
        verdict, revision = verdict_of(decision), self.state.decisions + 1
        self._set(decisions=revision)
        self._events.append(SafetyDecided(verdict=verdict, reason=reason, revision=revision, subagent=subagent))
        return verdict

    def _complete(self, part: SubagentState, good: bool, reason: str, now: float, latency_ms: int | None) -> None:
        if latency_ms is None:
            latency_ms = max(0, round((now - self._started_at) * 1000))
        status: Literal["success", "error"] = "success" if good else "error"
        error = None if good else reason or None
        self._change(part, state=status, latency_ms=latency_ms, error=error, sent=() if good else part.sent)
        self._events.append(
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
        self._set(parts={**self.state.parts, part.expected.result_key: changed})
        return changed

    def _set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def _end_if_complete(self) -> Applied:
        """End the step if no subagent is open."""
        parts = self.state.parts.values()
        if self.end is not None or any(part.state in OPEN for part in parts):
            return self._applied()
        return self._finish(outcome_of(parts), None)

    def _finish(self, status: StepStatus, reason: str | None) -> Applied:
        for part in list(self.state.parts.values()):
            if part.open:
                self._change(part, state="cancelled")
        outcomes = {key: part.outcome for key, part in self.state.parts.items()}
        end = PlanStepCompleted(
            status=status, outcomes=outcomes, reason=reason or None, next_step_id=self.state.next_step_id
        )
        self._set(end=end)
        self._events += [StepCompleted(**msgspec.structs.asdict(end)), end]
        return self._applied()
