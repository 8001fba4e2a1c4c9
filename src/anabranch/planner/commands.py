"""Commands on a step: how each changes the state machine, and what to do if the log cannot take its events."""

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
    SubagentDegraded,
    SubagentResult,
    SubagentRetried,
    SubagentStarted,
    SubagentTimedOut,
)
from anabranch.domain.steps import Decision, Expected, Fragment, Progress, Push, Receipt, Trace, verdict_of
from anabranch.planner.step import Applied, Step

MAX_PAYLOAD = 1024 * 1024
MAX_METRICS = 64
MAX_TEXT = 500
STATUSES = ("pending", "in_progress", "partial", "success", "error")
NO_ROOM = f"There is no room for its result in the stream ({StreamFull.code})."
EVENT_TYPES: Mapping[type[StepEvent], str] = {
    StepStarted: "step_started",
    StreamDegraded: "degraded",
    SafetyDecided: "safety",
    StepProgressed: "progress",
    StepCompleted: "plan_step_completed",
    SubagentStarted: "subagent_started",
    SubagentResult: "subagent_result",
    SubagentCompleted: "subagent_completed",
    SubagentRetried: "retry",
    SubagentTimedOut: "timeout",
    SubagentDegraded: "degraded",
}

_objects = msgspec.json.Decoder(dict)


class StepCommand(msgspec.Struct, kw_only=True, eq=False):
    """One command, and how it fails. `keeps`: while the log is unreachable it waits, else it is refused. `forced`: if
    the stream is full it takes effect and only an end is written, else it is refused and `instead` is done. `asked`: a
    caller waits for the reply and should get an error rather than wait. `answers` is the event that it is about;
    `renews` renews the lease with nothing to write; `bare` is set once the stream was full."""

    apply: Callable[[Step], Applied]
    answers: type[StepEvent]
    reply: asyncio.Future[Receipt] | None = None
    keeps: bool = False
    forced: bool = False
    asked: bool = False
    renews: bool = False
    bare: bool = False
    instead: "StepCommand | None" = None
    expected: Expected | None = None
    status: str = ""
    attempt: int = 1
    trace: Trace | None = None
    latency_ms: int | None = None
    metrics: Mapping[str, float] = {}

    @property
    def subagent(self) -> str | None:
        return None if self.expected is None else self.expected.key

    @property
    def result_key(self) -> str | None:
        return None if self.expected is None else self.expected.result_key

    def answer(self, receipt: Receipt) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(receipt)

    def refuse(self, error: Exception) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(error)


def checked_payload(payload: msgspec.Raw) -> msgspec.Raw:
    """The payload, checked to be a JSON object, without line ends."""
    text = bytes(payload)
    if len(text) > MAX_PAYLOAD:
        raise InvalidQuestion(f"A payload has at most {MAX_PAYLOAD} bytes.")
    try:
        _objects.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidQuestion("A payload must be a JSON object.") from error
    if b"\n" in text or b"\r" in text:  # never inside a JSON string
        return msgspec.Raw(text.replace(b"\n", b" ").replace(b"\r", b" "))
    return payload


def checked_fragment(fragment: object) -> Fragment:
    """What a subagent yielded, checked against the contract."""
    if not isinstance(fragment, Fragment):
        raise InvalidQuestion("A subagent must yield fragments.")
    status, payload, verdict = cast("tuple[object, ...]", (fragment.status, fragment.payload, fragment.verdict))
    if not isinstance(payload, msgspec.Raw) or not isinstance(verdict, str | None) or status not in STATUSES:
        raise InvalidQuestion("A subagent must yield fragments with a status and a payload.")
    payload, reason = checked_payload(fragment.payload), plain(fragment.reason)
    check_metrics(fragment.metrics)
    if payload is fragment.payload and reason is fragment.reason:
        return fragment
    return msgspec.structs.replace(fragment, payload=payload, reason=reason)


def check_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise InvalidQuestion(f"Metrics are at most {MAX_METRICS} named numbers.")
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            raise InvalidQuestion("Metrics are named numbers.")


def plain(value: object) -> str:
    """Text of limited length that UTF-8 can encode."""
    text = value if isinstance(value, str) else repr(value)
    if text.isascii() and len(text) <= MAX_TEXT:
        return text
    return text[:MAX_TEXT].encode(errors="replace").decode()


def begun(here: Iterable[str], refused: Mapping[str, str], now: float) -> StepCommand:
    """`here` are the subagents to call, `refused` those that are not called and why; both by result key."""

    def apply(step: Step) -> Applied:
        events = list(step.begin().events)
        for result_key, why in refused.items():
            events += step.degrade(result_key, why, now).events
        for result_key in here:
            events += step.start(result_key, now).events
        return Applied(events=tuple(events))

    return StepCommand(apply=apply, answers=StepStarted, asked=True)


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
        asked=True,
        expected=expected,
        status=fragment.status,
        attempt=push.attempt or 1,
        trace=trace,
        latency_ms=push.latency_ms,
        metrics=metrics,
        instead=_blocked(fragment, expected, now),
    )


def brought(expected: Expected, fragment: Fragment, attempt: int, latency_ms: int, now: float) -> StepCommand:
    """A fragment of a subagent that is called here. If the stream has no room for its last one, it has failed."""
    instead = _blocked(fragment, expected, now)
    if instead is None and fragment.status in ("success", "error"):
        instead = failed(expected, attempt, NO_ROOM, now)
    return StepCommand(
        apply=partial(Step.bring, result_key=expected.result_key, fragment=fragment, now=now, attempt=attempt),
        answers=SubagentResult,
        keeps=True,
        expected=expected,
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
        keeps=True,
        forced=True,
        expected=expected,
        status="retrying",
        attempt=attempt,
    )


def failed(expected: Expected, attempt: int, error: str, now: float) -> StepCommand:
    return StepCommand(
        apply=partial(Step.fail, result_key=expected.result_key, attempt=attempt, error=error, now=now),
        answers=SubagentCompleted,
        keeps=True,
        forced=True,
        expected=expected,
        status="error",
        attempt=attempt,
    )


def progressed(said: Progress, now: float) -> StepCommand:
    apply = partial(Step.progress, said=said, now=now)
    return StepCommand(apply=apply, answers=StepProgressed, status=said.status, asked=True)


def decided(said: Decision, now: float) -> StepCommand:
    """A decision that ends the step takes effect even if it cannot be written at once."""
    blocks = verdict_of(said.decision) == "block"
    return StepCommand(
        apply=partial(Step.decide, decision=said.decision, reason=plain(said.reason), now=now),
        answers=SafetyDecided,
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
        status=status,
        keeps=True,
        forced=True,
        asked=asked,
    )


def expired(now: float) -> StepCommand:
    apply = partial(Step.expire, now=now)
    return StepCommand(apply=apply, answers=SubagentTimedOut, keeps=True, forced=True)


def detached(epoch: int) -> StepCommand:
    return StepCommand(apply=partial(Step.detach, epoch=epoch), answers=StreamDegraded, keeps=True, forced=True)


def renewed() -> StepCommand:
    """Renews the lease without an event."""
    return StepCommand(apply=lambda _: Applied(), answers=StepStarted, renews=True)


def _blocked(fragment: Fragment, expected: Expected, now: float) -> StepCommand | None:
    """The safety decision alone, for a blocking result that the stream has no room for."""
    if fragment.verdict != "block":
        return None
    apply = partial(Step.decide, decision="block", reason=fragment.reason, now=now, subagent=expected.key)
    return StepCommand(
        apply=apply,
        answers=SafetyDecided,
        keeps=True,
        forced=True,
        expected=expected,
        status="block",
    )
