"""What is sent to a step, or happens to it, as actions: what each does, and what if the log will not have it."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

from anabranch.domain.errors import StreamFull
from anabranch.domain.events import (
    SafetyDecided,
    StepCompleted,
    StepProgressed,
    StepStarted,
    StreamDegraded,
    SubagentCompleted,
    SubagentResult,
    SubagentRetried,
    SubagentTimedOut,
)
from anabranch.domain.steps import Decision, Expected, Fragment, Progress, Push, Trace, verdict_of
from anabranch.streams.actions import Action, plain
from anabranch.streams.step import Applied, Step

APART = "The workers' shared log is out of reach; the stream goes on from one worker alone."
NO_ROOM = f"There is no room for its result in the stream ({StreamFull.code})."


def begun(here: Iterable[str], refused: Mapping[str, str], now: float) -> Action:
    """`here` are those who work here, `refused` those who are not asked, and why; both by result key."""

    def apply(step: Step) -> Applied:
        events = list(step.begin().events)
        for result_key, why in refused.items():
            events += step.degrade(result_key, why, now).events
        for result_key in here:
            events += step.start(result_key, now).events
        return Applied(events=tuple(events))

    return Action(apply=apply, answers=StepStarted, type="step_started", asked=True)


def pushed(
    push: Push, expected: Expected, fragment: Fragment, metrics: Mapping[str, float], trace: Trace | None, now: float
) -> Action:
    return Action(
        apply=partial(
            Step.bring,
            result_key=expected.result_key,
            fragment=fragment,
            now=now,
            attempt=push.attempt,
            revision=push.revision,
            latency_ms=push.latency_ms,
        ),
        answers=SubagentResult,
        type="subagent_result",
        asked=True,
        subagent=expected.key,
        result_key=expected.result_key,
        status=fragment.status,
        attempt=push.attempt or 1,
        trace=trace,
        latency_ms=push.latency_ms,
        metrics=metrics,
        instead=_vetoed(fragment, expected, now),
    )


def brought(expected: Expected, fragment: Fragment, attempt: int, latency_ms: int, now: float) -> Action:
    """By one who works here. If there is no room for its last word, that has failed."""
    instead = _vetoed(fragment, expected, now)
    if instead is None and fragment.status in ("success", "error"):
        instead = failed(expected, attempt, NO_ROOM, now)
    return Action(
        apply=partial(Step.bring, result_key=expected.result_key, fragment=fragment, now=now, attempt=attempt),
        answers=SubagentResult,
        type="subagent_result",
        keeps=True,
        subagent=expected.key,
        result_key=expected.result_key,
        status=fragment.status,
        attempt=attempt,
        latency_ms=latency_ms,
        metrics=fragment.metrics,
        instead=instead,
    )


def retried(expected: Expected, attempt: int, reason: str, now: float) -> Action:
    return Action(
        apply=partial(Step.retry, result_key=expected.result_key, attempt=attempt, reason=reason, now=now),
        answers=SubagentRetried,
        type="retry",
        keeps=True,
        forced=True,
        subagent=expected.key,
        result_key=expected.result_key,
        status="retrying",
        attempt=attempt,
    )


def failed(expected: Expected, attempt: int, error: str, now: float) -> Action:
    return Action(
        apply=partial(Step.fail, result_key=expected.result_key, attempt=attempt, error=error, now=now),
        answers=SubagentCompleted,
        type="subagent_completed",
        keeps=True,
        forced=True,
        subagent=expected.key,
        result_key=expected.result_key,
        status="error",
        attempt=attempt,
    )


def progressed(said: Progress, now: float) -> Action:
    apply = partial(Step.progress, said=said, now=now)
    return Action(apply=apply, answers=StepProgressed, type="progress", status=said.status, asked=True)


def decided(said: Decision, now: float) -> Action:
    """One that ends the step does so even if it cannot be written at once."""
    blocks = verdict_of(said.decision) == "block"
    return Action(
        apply=partial(Step.decide, decision=said.decision, reason=plain(said.reason), now=now),
        answers=SafetyDecided,
        type="safety",
        status=verdict_of(said.decision),
        asked=True,
        keeps=blocks,
        forced=blocks,
    )


def ended(
    status: Literal["cancelled", "worker_lost", "failed"], reason: str, now: float, *, asked: bool = False
) -> Action:
    return Action(
        apply=partial(Step.stop, status=status, reason=plain(reason), now=now),
        answers=StepCompleted,
        type="plan_step_completed",
        status=status,
        keeps=True,
        forced=True,
        asked=asked,
    )


def expired(now: float) -> Action:
    apply = partial(Step.expire, now=now)
    return Action(apply=apply, answers=SubagentTimedOut, type="timeout", keeps=True, forced=True)


def apart(epoch: int) -> Action:
    def apply(step: Step) -> Applied:
        return Applied() if step.end is not None else Applied(events=(StreamDegraded(epoch=epoch, reason=APART),))

    return Action(apply=apply, answers=StreamDegraded, type="degraded", keeps=True, forced=True)


def renewed() -> Action:
    """Nothing new, but we are still here."""
    return Action(apply=lambda _: Applied(), answers=StepStarted, type="lease", renews=True)


def _vetoed(fragment: Fragment, expected: Expected, now: float) -> Action | None:
    """What is left of a verdict that ends the step, if there is no room for the result that carries it."""
    if fragment.verdict != "block":
        return None
    apply = partial(Step.decide, decision="block", reason=fragment.reason, now=now, subagent=expected.key)
    return Action(
        apply=apply,
        answers=SafetyDecided,
        type="safety",
        keeps=True,
        forced=True,
        subagent=expected.key,
        status="block",
    )
