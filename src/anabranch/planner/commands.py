"""What can happen to a step, put into words for the one who writes it down."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, cast

import msgspec

from anabranch.domain.errors import InvalidQuestion, StreamFull
from anabranch.domain.events import (
    SafetyDecided,
    StepCompleted,
    StepEvent,
    StepProgressed,
    StepStarted,
    StreamDegraded,
    SubagentCompleted,
    SubagentResult,
    SubagentRetried,
    SubagentTimedOut,
)
from anabranch.domain.steps import Decision, Expected, Fragment, Progress, Push, Receipt, Trace, verdict_of
from anabranch.planner.step import Applied, Step

MAX_PAYLOAD = 1024 * 1024
MAX_METRICS = 64
MAX_WORDS = 500
STATUSES = ("pending", "in_progress", "partial", "success", "error")

_objects = msgspec.json.Decoder(dict)


class StepCommand(msgspec.Struct, kw_only=True, eq=False):
    """One thing to do to a step, and what becomes of it if the log will not have it.

    `keeps`: when the log is out of reach it is done once that is back, else it is refused. `forced`: when the log is
    full it counts all the same and only an end is written, else `instead` is done, and it is refused. `asked`: somebody
    outside waits for the reply and should hear of a refusal rather than wait. `answers` is the event that it is
    about; `renews` holds the lease with nothing to write; `bare` is set once there was no room."""

    apply: Callable[[Step], Applied]
    answers: type[StepEvent]
    type: str
    reply: asyncio.Future[Receipt] | None = None
    keeps: bool = False
    forced: bool = False
    asked: bool = False
    renews: bool = False
    bare: bool = False
    instead: "StepCommand | None" = None
    subagent: str | None = None
    result_key: str | None = None
    status: str = ""
    attempt: int = 1
    trace: Trace | None = None
    latency_ms: int | None = None
    metrics: Mapping[str, float] = {}

    def answer(self, receipt: Receipt) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(receipt)

    def refuse(self, error: Exception) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(error)


def sound(payload: msgspec.Raw) -> msgspec.Raw:
    """A payload that cannot break the line it is written on: a JSON object, without line ends between its words."""
    text = bytes(payload)
    if len(text) > MAX_PAYLOAD:
        raise InvalidQuestion(f"A payload has at most {MAX_PAYLOAD} bytes.")
    try:
        _objects.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidQuestion("A payload must be a JSON object.") from error
    if b"\n" in text or b"\r" in text:  # inside a string they cannot stand as they are
        return msgspec.Raw(text.replace(b"\n", b" ").replace(b"\r", b" "))
    return payload


def sound_fragment(fragment: object) -> Fragment:
    """What a subagent brought, if it is what the contract says."""
    if not isinstance(fragment, Fragment):
        raise InvalidQuestion("A subagent brings fragments.")
    status, payload, verdict = cast("tuple[object, ...]", (fragment.status, fragment.payload, fragment.verdict))
    if not isinstance(payload, msgspec.Raw) or not isinstance(verdict, str | None) or status not in STATUSES:
        raise InvalidQuestion("A subagent brings fragments with a status and a payload.")
    payload, reason = sound(fragment.payload), plain(fragment.reason)
    sound_metrics(fragment.metrics)
    if payload is fragment.payload and reason is fragment.reason:
        return fragment
    return msgspec.structs.replace(fragment, payload=payload, reason=reason)


def sound_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise InvalidQuestion(f"Metrics are at most {MAX_METRICS} named numbers.")
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            raise InvalidQuestion("Metrics are named numbers.")


def plain(words: object) -> str:
    """Words that can be written down, and not too many of them."""
    text = words if isinstance(words, str) else repr(words)
    if text.isascii() and len(text) <= MAX_WORDS:
        return text
    return text[:MAX_WORDS].encode(errors="replace").decode()


APART = "The workers' shared log is out of reach; the stream goes on from one worker alone."
NO_ROOM = f"There is no room for its result in the stream ({StreamFull.code})."


def begun(here: Iterable[str], refused: Mapping[str, str], now: float) -> StepCommand:
    """`here` are those who work here, `refused` those who are not asked, and why; both by result key."""

    def apply(step: Step) -> Applied:
        events = list(step.begin().events)
        for result_key, why in refused.items():
            events += step.degrade(result_key, why, now).events
        for result_key in here:
            events += step.start(result_key, now).events
        return Applied(events=tuple(events))

    return StepCommand(apply=apply, answers=StepStarted, type="step_started", asked=True)


def pushed(
    push: Push, expected: Expected, fragment: Fragment, metrics: Mapping[str, float], trace: Trace | None, now: float
) -> StepCommand:
    return StepCommand(
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


def brought(expected: Expected, fragment: Fragment, attempt: int, latency_ms: int, now: float) -> StepCommand:
    """By one who works here. If there is no room for its last word, that has failed."""
    instead = _vetoed(fragment, expected, now)
    if instead is None and fragment.status in ("success", "error"):
        instead = failed(expected, attempt, NO_ROOM, now)
    return StepCommand(
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


def retried(expected: Expected, attempt: int, reason: str, now: float) -> StepCommand:
    return StepCommand(
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


def failed(expected: Expected, attempt: int, error: str, now: float) -> StepCommand:
    return StepCommand(
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


def progressed(said: Progress, now: float) -> StepCommand:
    apply = partial(Step.progress, said=said, now=now)
    return StepCommand(apply=apply, answers=StepProgressed, type="progress", status=said.status, asked=True)


def decided(said: Decision, now: float) -> StepCommand:
    """One that ends the step does so even if it cannot be written at once."""
    blocks = verdict_of(said.decision) == "block"
    return StepCommand(
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
) -> StepCommand:
    return StepCommand(
        apply=partial(Step.stop, status=status, reason=plain(reason), now=now),
        answers=StepCompleted,
        type="plan_step_completed",
        status=status,
        keeps=True,
        forced=True,
        asked=asked,
    )


def expired(now: float) -> StepCommand:
    apply = partial(Step.expire, now=now)
    return StepCommand(apply=apply, answers=SubagentTimedOut, type="timeout", keeps=True, forced=True)


def apart(epoch: int) -> StepCommand:
    def apply(step: Step) -> Applied:
        return Applied() if step.end is not None else Applied(events=(StreamDegraded(epoch=epoch, reason=APART),))

    return StepCommand(apply=apply, answers=StreamDegraded, type="degraded", keeps=True, forced=True)


def renewed() -> StepCommand:
    """Nothing new, but we are still here."""
    return StepCommand(apply=lambda _: Applied(), answers=StepStarted, type="lease", renews=True)


def _vetoed(fragment: Fragment, expected: Expected, now: float) -> StepCommand | None:
    """What is left of a verdict that ends the step, if there is no room for the result that carries it."""
    if fragment.verdict != "block":
        return None
    apply = partial(Step.decide, decision="block", reason=fragment.reason, now=now, subagent=expected.key)
    return StepCommand(
        apply=apply,
        answers=SafetyDecided,
        type="safety",
        keeps=True,
        forced=True,
        subagent=expected.key,
        status="block",
    )
