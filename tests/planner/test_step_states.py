"""Whatever happens to a step in whatever order: one end, the last event, and revisions that only rise."""

from typing import Literal, get_args

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from anabranch.domain.events import (
    PlanStepCompleted,
    StepCompleted,
    StepEvent,
    SubagentCompleted,
    SubagentPending,
    SubagentResult,
    SubagentStatus,
)
from anabranch.domain.steps import Directive, Expected, Fragment, Progress, Trace
from anabranch.planner.encoder import encode
from anabranch.planner.step import Applied, Step
from support.examples import examples

KEYS = ("a", "b", "c")
keys = st.sampled_from(KEYS)
attempts = st.integers(1, 4)
numbers = st.none() | st.integers(0, 6)
statuses = st.sampled_from(get_args(SubagentStatus))
verdicts = st.sampled_from([None, None, None, None, "allow", "warn", "block"])
TRACE = Trace(trace_id="0" * 32, span_id="0" * 16)


def what(revision: int, fragment: Fragment) -> tuple[int, str, bytes]:
    return revision, fragment.status, b"" if fragment.status == "error" else bytes(fragment.payload)


class Steps(RuleBasedStateMachine):
    @initialize(
        deadlines=st.lists(st.integers(1, 20), min_size=3, max_size=3),
        required=st.lists(st.booleans(), min_size=3, max_size=3),
    )
    def begin(self, deadlines: list[int], required: list[bool]) -> None:
        expected = tuple(
            Expected(key=key, result_key=key, deadline_ms=deadline * 1000, required=must)
            for key, deadline, must in zip(KEYS, deadlines, required, strict=True)
        )
        self.now = 0.0
        self.deadlines = dict(zip(KEYS, deadlines, strict=True))
        self.required = {key for key, must in zip(KEYS, required, strict=True) if must}
        self.step = Step(Directive(session_id="s", plan_step_id="p", expected=expected), now=0.0, timeout_s=5)
        self.events: list[StepEvent] = list(self.step.begin().events)
        # What each attempt has sent with a revision: the revision, the status and, but of an error, the payload.
        self.sent: dict[tuple[str, int], set[tuple[int, str, bytes]]] = {}

    def heard(self, applied: Applied) -> Applied:
        ended_before = any(isinstance(event, PlanStepCompleted) for event in self.events)
        if ended_before:
            assert not applied.events
        self.events += applied.events
        return applied

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.heard(self.step.expire(self.now))
        assert self.step.due() > self.now

    @rule(key=keys, status=statuses, attempt=attempts, revision=numbers, verdict=verdicts)
    def deliver(
        self,
        key: str,
        status: SubagentStatus,
        attempt: int,
        revision: int | None,
        verdict: Literal["allow", "warn", "block"] | None,
    ) -> None:
        self.heard(self.step.expire(self.now))
        before, ended = self.step.part(key), self.step.end
        fragment = Fragment(status=status, payload=msgspec.Raw(b"{}"), verdict=verdict)
        applied = self.heard(self.step.deliver(key, fragment, self.now, attempt=attempt, revision=revision))
        results = [event for event in applied.events if isinstance(event, SubagentResult)]
        assert len(results) == (applied.ignored is None)
        match applied.ignored:
            case None:
                assert before.state in ("waiting", "running", "error")
                assert attempt > before.attempt or before.state != "error"
                assert results[0].revision > before.revision
            case "ended":
                assert ended is not None
            case "late":
                assert self.now >= self.deadlines[key]
            case "degraded":
                assert before.state == "degraded"
            case "completed":
                assert before.state == "success" or (before.state == "error" and attempt == before.attempt)
            case "superseded":
                assert attempt < before.attempt or (revision is not None and before.numbered)
            case "duplicate":
                assert attempt == before.attempt
                assert revision is not None
        self.remember(key, fragment, revision, applied)
        if applied.ignored is None and revision is not None:  # once more the very same
            again = self.heard(self.step.deliver(key, fragment, self.now, attempt=attempt, revision=revision))
            assert again.ignored == ("duplicate" if self.step.end is None else "ended")

    @rule(key=keys, status=statuses, revision=numbers, payload=st.sampled_from([b'{"n":1}', b'{"n":2}']))
    def push(self, key: str, status: SubagentStatus, revision: int | None, payload: bytes) -> None:
        """Without an attempt: after an error it is a retry, unless the failed attempt has sent the very same."""
        self.heard(self.step.expire(self.now))
        before, ended = self.step.part(key), self.step.end
        fragment = Fragment(status=status, payload=msgspec.Raw(payload))
        known = revision is not None and what(revision, fragment) in self.sent.get((key, before.attempt), ())
        applied = self.heard(self.step.deliver(key, fragment, self.now, revision=revision))
        taken = applied.ignored is None
        if before.state == "error" and ended is None and self.now < self.deadlines[key]:
            assert taken is not known
            assert self.step.part(key).attempt == before.attempt + taken
        elif taken:
            assert self.step.part(key).attempt == max(1, before.attempt)
        self.remember(key, fragment, revision, applied)

    def remember(self, key: str, fragment: Fragment, revision: int | None, applied: Applied) -> None:
        if applied.ignored is None and revision is not None:
            self.sent.setdefault((key, self.step.part(key).attempt), set()).add(what(revision, fragment))

    @rule(key=keys)
    def start(self, key: str) -> None:
        self.heard(self.step.start(key, self.now))

    @rule(key=keys)
    def degrade(self, key: str) -> None:
        self.heard(self.step.degrade(key, "off", self.now))

    @rule(key=keys, ahead=st.integers(0, 2))
    def retry(self, key: str, ahead: int) -> None:
        part = self.step.part(key)
        if ahead and part.state == "running":
            self.heard(self.step.retry(key, part.attempt + ahead, "again", self.now))

    @rule(key=keys, attempt=attempts)
    def fail(self, key: str, attempt: int) -> None:
        self.heard(self.step.fail(key, attempt, "broke", self.now))

    @rule(decision=st.sampled_from(["allow", "warn", "allow", "warn", "block", "?"]))
    def decide(self, decision: str) -> None:
        self.heard(self.step.decide(decision, "", self.now))

    @rule(step_id=st.sampled_from([None, "q", "r"]))
    def progress(self, step_id: str | None) -> None:
        self.heard(self.step.progress(Progress(next_step_id=step_id), self.now))

    @rule(status=st.sampled_from(["cancelled", "worker_lost"]), really=st.integers(0, 9))
    def stop(self, status: Literal["cancelled", "worker_lost"], really: int) -> None:
        if not really:
            self.heard(self.step.stop(status, "", self.now))

    @rule(key=keys, status=statuses)
    def undo(self, key: str, status: SubagentStatus) -> None:
        """What was undone leaves no trace."""
        mark, due = self.step.state, self.step.due()
        self.step.deliver(key, Fragment(status=status), self.now)
        self.step.decide("block", "", self.now)
        self.step.state = mark
        assert self.step.state == mark
        assert self.step.due() == due

    @invariant()
    def one_end_and_it_is_the_last(self) -> None:
        ends = [event for event in self.events if isinstance(event, PlanStepCompleted)]
        assert len(ends) == (self.step.end is not None)
        assert not ends or self.events[-1] is ends[0]
        completed = [at for at, event in enumerate(self.events) if isinstance(event, StepCompleted)]
        assert completed == [len(self.events) - 2] * len(ends)

    @invariant()
    def every_subagent_is_pending_first(self) -> None:
        pending = [event.result_key for event in self.events[1:4] if isinstance(event, SubagentPending)]
        assert pending == list(KEYS)
        assert not any(isinstance(event, SubagentPending) for event in self.events[4:])

    @invariant()
    def only_rising_revisions_under_every_key(self) -> None:
        latest: dict[str, int] = {}
        for event in self.events:
            entry = encode(event, session_id="s", plan_step_id="p", at=0.0, trace=TRACE).entry
            assert entry.revision > latest.get(entry.key, 0), event
            latest[entry.key] = entry.revision

    @invariant()
    def outcomes_are_what_the_events_say(self) -> None:
        end = self.step.end
        if end is None:
            return
        outcomes = end.outcomes
        assert set(outcomes) == set(KEYS)
        delivered = {
            event.result_key
            for event in self.events
            if isinstance(event, SubagentResult) and event.status in ("partial", "success")
        }
        last = {event.result_key: event for event in self.events if isinstance(event, SubagentCompleted)}
        for key, outcome in outcomes.items():
            if outcome.status in ("success", "error"):
                assert last[key].status == outcome.status
                assert last[key].attempt == outcome.attempts
        missed = {key for key, outcome in outcomes.items() if outcome.status != "success"}
        if end.status in ("success", "partial_failure", "failed"):
            assert all(outcome.status != "cancelled" for outcome in outcomes.values())
            failed = bool(missed & self.required) or not delivered
            assert end.status == ("success" if not missed else "failed" if failed else "partial_failure")


Steps.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30)
TestSteps = Steps.TestCase
