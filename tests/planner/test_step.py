"""A step's rules, one by one."""

from typing import Any

import msgspec
import pytest

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.eventlog import LAST
from anabranch.domain.events import (
    PlanStepCompleted,
    SafetyDecided,
    StepCompleted,
    StepEvent,
    StepProgressed,
    StepStarted,
    SubagentCompleted,
    SubagentDegraded,
    SubagentPending,
    SubagentResult,
    SubagentRetried,
    SubagentStarted,
    SubagentStatus,
    SubagentTimedOut,
)
from anabranch.domain.steps import Directive, Expected, Fragment, Progress
from anabranch.planner.step import Applied, Step


def stepped(*keys: str, next_step_id: str | None = None, **more: Any) -> Step:
    expected = tuple(Expected(key=key, result_key=f"{key}_result", **more) for key in keys)
    directive = Directive(session_id="s", plan_step_id="p", expected=expected, next_step_id=next_step_id)
    step = Step(directive, now=0.0, timeout_s=10.0)
    pending = [SubagentPending(subagent=key, result_key=f"{key}_result") for key in keys]
    assert step.begin().events == (StepStarted(expected=keys), *pending)
    return step


def deliver(step: Step, key: str, status: SubagentStatus, now: float = 1.0, **more: Any) -> Applied:
    words = {name: more.pop(name) for name in ("verdict", "reason") if name in more}
    payload = msgspec.Raw(msgspec.json.encode(more.pop("payload", {"a": 1})))
    fragment = Fragment(status=status, payload=payload, **words)
    return step.deliver(f"{key}_result", fragment, now, **more)


def kinds(applied: Applied) -> list[type[StepEvent]]:
    return [type(event) for event in applied.events]


def revisions(applied: Applied) -> list[int]:
    return [event.revision for event in applied.events if isinstance(event, SubagentResult)]


def end(applied: Applied) -> PlanStepCompleted:
    before, last = applied.events[-2:]
    assert isinstance(before, StepCompleted)
    assert isinstance(last, PlanStepCompleted)
    assert msgspec.structs.asdict(before) == msgspec.structs.asdict(last)
    return last


def test_a_pushing_subagent_starts_with_its_first_push_and_completes_with_its_last() -> None:
    step = stepped("docs")
    assert kinds(deliver(step, "docs", "partial")) == [SubagentStarted, SubagentResult]
    applied = deliver(step, "docs", "success", now=2.5)
    assert kinds(applied) == [SubagentResult, SubagentCompleted, StepCompleted, PlanStepCompleted]
    assert applied.events[1] == SubagentCompleted(
        subagent="docs", result_key="docs_result", status="success", latency_ms=2500
    )
    assert end(applied).status == step.status == "success"
    assert end(applied).outcomes["docs_result"].revision == 2


def test_the_latency_that_a_subagent_reports_is_used() -> None:
    applied = deliver(stepped("docs"), "docs", "success", latency_ms=930)
    assert end(applied).outcomes["docs_result"].latency_ms == 930


def test_only_higher_revisions_are_applied() -> None:
    step = stepped("docs")
    assert revisions(deliver(step, "docs", "partial", revision=2)) == [2]
    assert deliver(step, "docs", "partial", revision=2).ignored == "duplicate"
    assert deliver(step, "docs", "partial", revision=1).ignored == "superseded"
    assert revisions(deliver(step, "docs", "partial")) == [3]
    assert deliver(step, "docs", "partial", revision=2).ignored == "duplicate"
    assert revisions(deliver(step, "docs", "partial", revision=3)) == [4]


def test_a_subagent_may_number_only_its_partials() -> None:
    step = stepped("docs")
    deliver(step, "docs", "pending")
    deliver(step, "docs", "in_progress")
    assert revisions(deliver(step, "docs", "partial", revision=1)) == [3]
    assert revisions(deliver(step, "docs", "partial", revision=2)) == [4]
    assert deliver(step, "docs", "partial", revision=1).ignored == "superseded"
    assert revisions(deliver(step, "docs", "in_progress", attempt=2)) == [5]
    assert revisions(deliver(step, "docs", "partial", attempt=2, revision=0)) == [6]
    assert end(deliver(step, "docs", "success", attempt=2, revision=0)).status == "success"


def test_a_result_after_an_error_is_another_attempt_unless_it_was_sent_before() -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", "partial", revision=1)
    deliver(step, "docs", "error", revision=2)
    assert deliver(step, "docs", "error", revision=2).ignored == "duplicate"
    assert deliver(step, "docs", "partial", revision=1).ignored == "superseded"
    again = deliver(step, "docs", "success", revision=3)
    assert isinstance(again.events[0], SubagentRetried)
    assert again.events[0].attempt == 2
    assert step.part("docs_result").state == "success"


def test_a_retry_after_an_error_may_count_revisions_from_one_again() -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", "error", revision=1, reason="it broke")
    again = deliver(step, "docs", "success", revision=1)
    assert kinds(again) == [SubagentRetried, SubagentResult, SubagentCompleted]
    assert again.events[0] == SubagentRetried(subagent="docs", result_key="docs_result", attempt=2, reason="it broke")
    assert revisions(again) == [2]
    assert deliver(step, "docs", "success", revision=1).ignored == "duplicate"
    assert deliver(step, "docs", "error", revision=1).ignored == "duplicate"
    assert step.part("docs_result").state == "success"


def test_a_retry_is_recognized_by_its_first_result_that_differs() -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", "partial", revision=1, payload={"at": 1})
    deliver(step, "docs", "partial", revision=2, payload={"at": 2})
    deliver(step, "docs", "error", revision=3)
    assert deliver(step, "docs", "partial", revision=2, payload={"at": 2}).ignored == "superseded"
    assert deliver(step, "docs", "partial", revision=1, payload={"at": 1}).ignored == "superseded"
    assert step.part("docs_result").state == "error"
    again = deliver(step, "docs", "partial", revision=1, payload={"at": 0})
    assert kinds(again) == [SubagentRetried, SubagentResult]
    assert revisions(again) == [4]
    assert deliver(step, "docs", "partial", revision=1, payload={"at": 0}).ignored == "duplicate"
    assert revisions(deliver(step, "docs", "partial", revision=2, payload={"at": 2})) == [5]
    assert revisions(deliver(step, "docs", "success", revision=3)) == [6]


def test_the_same_error_is_a_duplicate_whatever_its_message_and_another_revision_is_another_failure() -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", "partial", revision=1)
    deliver(step, "docs", "error", revision=2, payload={"message": "at 10:02"})
    assert deliver(step, "docs", "error", revision=2, payload={"message": "at 10:03"}).ignored == "duplicate"
    again = deliver(step, "docs", "error", revision=1)
    assert kinds(again) == [SubagentRetried, SubagentResult, SubagentCompleted]
    assert step.part("docs_result").attempt == 2
    assert deliver(step, "docs", "error", revision=1).ignored == "duplicate"


def test_a_repeated_partial_of_an_attempt_that_ended_below_it_is_no_retry() -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", "partial", revision=2)
    deliver(step, "docs", "error", revision=1)
    assert deliver(step, "docs", "partial", revision=2).ignored == "completed"
    assert step.part("docs_result").state == "error"


def test_an_error_without_a_revision_can_be_retried_with_any_revision() -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", "partial", revision=1)
    deliver(step, "docs", "error")
    assert deliver(step, "docs", "partial", revision=1).ignored is not None
    assert revisions(deliver(step, "docs", "success", revision=1)) == [3]


def test_revisions_may_count_from_zero() -> None:
    step = stepped("docs")
    assert revisions(deliver(step, "docs", "partial", revision=0)) == [1]
    assert deliver(step, "docs", "partial", revision=0).ignored == "duplicate"
    assert revisions(deliver(step, "docs", "partial", revision=1)) == [2]
    assert revisions(deliver(step, "docs", "partial", attempt=2, revision=0)) == [3]


def test_another_attempt_continues_the_revisions_of_its_result_key() -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", "partial", revision=4)
    deliver(step, "docs", "error", revision=5, reason="it broke")
    again = deliver(step, "docs", "partial", attempt=2, revision=1)
    assert again.events[0] == SubagentRetried(subagent="docs", result_key="docs_result", attempt=2, reason="it broke")
    assert revisions(again) == [6]
    assert deliver(step, "docs", "partial", attempt=1, revision=9).ignored == "superseded"
    assert deliver(step, "docs", "partial", attempt=2, revision=1).ignored == "duplicate"
    done = deliver(step, "docs", "success", attempt=2, revision=1)
    assert isinstance(done.events[-1], SubagentCompleted)
    assert done.events[-1].attempt == 2
    assert step.part("docs_result").error is None


def test_a_first_push_with_a_later_attempt_is_a_retry() -> None:
    assert kinds(deliver(stepped("docs"), "docs", "partial", attempt=3)) == [
        SubagentStarted,
        SubagentRetried,
        SubagentResult,
    ]


@pytest.mark.parametrize(
    ("last", "attempt", "revision", "ignored"),
    [
        ("success", 1, None, "completed"),
        ("success", 2, None, "completed"),
        ("success", 1, 1, "duplicate"),
        ("error", 1, None, "completed"),
        ("error", 1, 1, "duplicate"),
        ("error", 2, None, None),
    ],
)
def test_after_a_final_result_only_another_attempt_is_applied(
    last: SubagentStatus, attempt: int, revision: int | None, ignored: str | None
) -> None:
    step = stepped("docs", "rows")
    deliver(step, "docs", last, revision=1)
    assert deliver(step, "docs", "partial", attempt=attempt, revision=revision).ignored == ignored


def test_a_time_out_counts_from_its_deadline_whichever_command_notices_it() -> None:
    step = Step(
        Directive(
            session_id="s",
            plan_step_id="p",
            expected=(
                Expected(key="docs", result_key="docs_result", deadline_ms=3000),
                Expected(key="rows", result_key="rows_result"),
            ),
        ),
        now=0.0,
        timeout_s=10.0,
    )
    step.begin()
    assert deliver(step, "docs", "partial", now=2.9).ignored is None
    late = deliver(step, "docs", "success", now=3.0)
    assert late.ignored == "late"
    assert late.events == (SubagentTimedOut(subagent="docs", result_key="docs_result", deadline_ms=3000),)
    assert step.due() == 10.0
    applied = deliver(step, "rows", "success", now=9.0)
    assert end(applied).status == "partial_failure"
    assert end(applied).outcomes["docs_result"].status == "timeout"
    assert deliver(step, "rows", "success", now=9.0).ignored == "ended"


def test_another_attempt_has_the_same_deadline() -> None:
    step = stepped("docs", "rows", deadline_ms=3000)
    deliver(step, "docs", "error")
    deliver(step, "rows", "partial")
    assert deliver(step, "docs", "partial", attempt=2, now=3.5).ignored == "ended"
    assert step.end is not None
    assert {key: outcome.status for key, outcome in step.end.outcomes.items()} == {
        "docs_result": "error",
        "rows_result": "timeout",
    }


def test_an_attempt_after_the_deadline_leaves_the_error() -> None:
    expected = (
        Expected(key="docs", result_key="docs_result", deadline_ms=3000),
        Expected(key="rows", result_key="rows_result"),
    )
    step = Step(Directive(session_id="s", plan_step_id="p", expected=expected), now=0.0, timeout_s=10.0)
    step.begin()
    deliver(step, "docs", "error")
    assert deliver(step, "docs", "success", attempt=2, now=4.0).ignored == "late"
    assert step.part("docs_result").state == "error"


def test_a_subagent_that_is_not_called_is_degraded_and_its_pushes_are_ignored() -> None:
    step = stepped("docs", "rows")
    assert step.degrade("docs_result", "off", 0.0).events == (
        SubagentDegraded(subagent="docs", result_key="docs_result", reason="off"),
    )
    assert deliver(step, "docs", "success").ignored == "degraded"
    assert end(deliver(step, "rows", "success")).status == "partial_failure"


@pytest.mark.parametrize(
    ("required", "first", "status"),
    [(False, "partial", "partial_failure"), (True, "partial", "failed"), (False, "in_progress", "failed")],
)
def test_the_status_of_a_step_depends_on_delivered_and_required_results(
    required: bool, first: SubagentStatus, status: str
) -> None:
    step = stepped("docs", required=required)
    deliver(step, "docs", first)
    assert end(step.expire(10.0)).status == status
    assert step.expire(11.0) == Applied()
    assert step.due() > 1e9


@pytest.mark.parametrize("decision", ["block", "BLOCK", "", "maybe"])
def test_a_decision_other_than_allow_and_warn_blocks(decision: str) -> None:
    step = stepped("docs", "rows", next_step_id="q")
    deliver(step, "docs", "success")
    applied = step.decide(decision, "too risky", 2.0)
    assert applied.events[0] == SafetyDecided(verdict="block", reason="too risky")
    assert end(applied).status == "blocked"
    assert end(applied).reason == "too risky"
    assert [outcome.status for outcome in end(applied).outcomes.values()] == ["success", "cancelled"]
    assert step.decide("allow", "", 3.0).ignored == "ended"


def test_allow_and_warn_are_events_and_the_step_continues() -> None:
    step = stepped("docs")
    assert step.decide("warn", "hm", 1.0).events == (SafetyDecided(verdict="warn", reason="hm", revision=1),)
    assert step.decide("allow", "", 1.0).events == (SafetyDecided(verdict="allow", reason="", revision=2),)
    assert step.end is None


def test_a_blocking_verdict_in_a_result_ends_the_step_after_the_result() -> None:
    step = stepped("safety", "docs")
    applied = deliver(step, "safety", "success", verdict="block", reason="no")
    assert kinds(applied) == [
        SubagentStarted,
        SubagentResult,
        SafetyDecided,
        SubagentCompleted,
        StepCompleted,
        PlanStepCompleted,
    ]
    assert end(applied).status == "blocked"
    assert end(applied).outcomes["docs_result"].status == "cancelled"


def test_progress_of_the_planner_is_an_event_and_may_name_the_next_step() -> None:
    step = stepped("docs")
    said = Progress(payload=msgspec.Raw(b'{"x":1}'), stage="plan", next_step_id="q")
    assert step.progress(said, 1.0).events == (
        StepProgressed(payload=msgspec.Raw(b'{"x":1}'), revision=1, stage="plan"),
    )
    step.progress(Progress(), 1.0)
    assert end(deliver(step, "docs", "success")).next_step_id == "q"
    assert step.progress(Progress(), 2.0).ignored == "ended"


def test_a_called_subagent_is_retried_and_then_fails() -> None:
    step = stepped("docs")
    assert step.start("docs_result", 0.0).events == (SubagentStarted(subagent="docs", result_key="docs_result"),)
    deliver(step, "docs", "partial")
    assert kinds(step.retry("docs_result", 2, "down", 1.0)) == [SubagentRetried]
    assert deliver(step, "docs", "partial", attempt=1).ignored == "superseded"
    assert step.fail("docs_result", 1, "old", 1.0).ignored == "superseded"
    applied = step.fail("docs_result", 2, "down", 2.0)
    assert kinds(applied) == [SubagentCompleted, StepCompleted, PlanStepCompleted]
    assert end(applied).status == "partial_failure"
    assert end(applied).outcomes["docs_result"].error == "down"
    assert end(applied).outcomes["docs_result"].attempts == 2


@pytest.mark.parametrize("status", ["cancelled", "worker_lost"])
def test_a_step_can_be_ended_once(status: Any) -> None:
    step = stepped("docs")
    assert end(step.stop(status, "enough", 1.0)).status == status
    assert step.stop(status, "enough", 1.0) == Applied(ignored="ended")


def test_assigning_an_earlier_state_undoes_commands() -> None:
    step = stepped("docs")
    deliver(step, "docs", "partial", revision=1)
    mark = step.state
    deliver(step, "docs", "success", revision=2)
    step.state = mark
    assert step.end is None
    assert kinds(deliver(step, "docs", "success", revision=2)) == [
        SubagentResult,
        SubagentCompleted,
        StepCompleted,
        PlanStepCompleted,
    ]


@pytest.mark.parametrize(
    "given", [{"attempt": 0}, {"attempt": LAST + 1}, {"revision": -1}, {"revision": LAST + 1}, {"attempt": -3}]
)
def test_attempts_and_revisions_out_of_range_are_refused(given: dict[str, int]) -> None:
    step = stepped("docs")
    with pytest.raises(InvalidQuestion, match="out of range"):
        deliver(step, "docs", "partial", **given)
    assert step.part("docs_result").state == "waiting"


def test_a_result_has_at_most_1000_attempts_whether_a_push_names_them_or_not() -> None:
    step = stepped("docs", "web")
    for _ in range(1_000):
        assert deliver(step, "docs", "error").ignored is None
    with pytest.raises(InvalidQuestion, match=r"at most 1,000 attempts\. Start another step"):
        deliver(step, "docs", "partial")
    assert step.part("docs_result").attempt == 1_000
    assert deliver(step, "docs", "partial", attempt=1_000).ignored == "completed"
    deliver(step, "web", "success")
    assert deliver(step, "docs", "partial").ignored == "ended"


def test_a_step_needs_subagents_with_distinct_result_keys() -> None:
    with pytest.raises(InvalidQuestion, match="at least one"):
        Step(Directive(session_id="s", plan_step_id="p", expected=()), now=0.0, timeout_s=1.0)
    with pytest.raises(InvalidQuestion, match="same result key"):
        stepped("docs", "docs")
