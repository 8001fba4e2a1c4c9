"""Commands on a step: how each changes the state machine, and what to do if the log cannot take its events."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, cast, get_args

import msgspec

from anabranch.domain import events
from anabranch.domain.errors import InvalidQuestion, StreamFull
from anabranch.domain.steps import Decision, Expected, Fragment, Progress, Push, Receipt, Trace, verdict_of
from anabranch.planner.step import FINAL, Applied, Step

MAX_PAYLOAD = 1024 * 1024
MAX_METRICS = 64
MAX_TEXT = 500

_objects = msgspec.json.Decoder(dict)


class StepCommand(msgspec.Struct, kw_only=True, eq=False):
    """One command, and how it fails. `keeps`: while the log is unreachable it waits, else it is refused. `forced`: if
    the stream is full it takes effect and only an end is written, else it is refused and `instead` is done. `awaited`:
    a caller waits for the reply and should get an error rather than wait. `answers` is the event that it is about;
    `renews` renews the lease with nothing to write; `bare` is set once the stream was full."""

    apply: Callable[[Step], Applied]
    answers: type[events.StepEvent]
    reply: asyncio.Future[Receipt] | None = None
    keeps: bool = False
    forced: bool = False
    awaited: bool = False
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
    def result_key(self) -> str | None:
        return None if self.expected is None else self.expected.result_key

    def resolve(self, result: Receipt | Exception) -> None:
        """Give its caller the receipt or the error."""
        if self.reply is None or self.reply.done():
            return
        if isinstance(result, Receipt):
            self.reply.set_result(result)
        else:
            self.reply.set_exception(result)


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
    if (
        not isinstance(payload, msgspec.Raw)
        or not isinstance(verdict, str | None)
        or status not in get_args(events.SubagentStatus)
    ):
        raise InvalidQuestion("A subagent must yield fragments with a status and a payload.")
    check_metrics(fragment.metrics)
    return msgspec.structs.replace(fragment, payload=checked_payload(fragment.payload), reason=plain(fragment.reason))


def check_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise InvalidQuestion(f"Metrics are at most {MAX_METRICS} named numbers.")
    if not all(isinstance(name, str) and isinstance(value, int | float) for name, value in metrics.items()):
        raise InvalidQuestion("Metrics are named numbers.")


def plain(value: object) -> str:
    """Text of limited length that UTF-8 can encode."""
    text = value if isinstance(value, str) else repr(value)
    if text.isascii() and len(text) <= MAX_TEXT:
        return text
    return text[:MAX_TEXT].encode(errors="replace").decode()


def begin(called: Iterable[str], refused: Mapping[str, str], now: float) -> StepCommand:
    """`called` are the subagents to call, `refused` those that are not called and why; both by result key."""

    def apply(step: Step) -> Applied:
        applied = [step.begin()]
        applied += [step.degrade(result_key, reason, now) for result_key, reason in refused.items()]
        applied += [step.start(result_key, now) for result_key in called]
        return Applied(events=tuple(event for each in applied for event in each.events))

    return StepCommand(apply=apply, answers=events.StepStarted, awaited=True)


def push(
    push: Push, expected: Expected, fragment: Fragment, metrics: Mapping[str, float], trace: Trace | None, now: float
) -> StepCommand:
    return StepCommand(
        apply=partial(
            Step.deliver,
            result_key=expected.result_key,
            fragment=fragment,
            now=now,
            attempt=push.attempt,
            revision=push.revision,
            latency_ms=push.latency_ms,
        ),
        answers=events.SubagentResult,
        awaited=True,
        expected=expected,
        status=fragment.status,
        attempt=push.attempt or 1,
        trace=trace,
        latency_ms=push.latency_ms,
        metrics=metrics,
        instead=_block(fragment, expected, now),
    )


def deliver(expected: Expected, fragment: Fragment, attempt: int, latency_ms: int, now: float) -> StepCommand:
    """A fragment of a subagent that is called here. If the stream has no room for its last one, it has failed."""
    instead = _block(fragment, expected, now)
    if instead is None and fragment.status in FINAL:
        reason = f"There is no room for its result in the stream ({StreamFull.code})."
        instead = fail(expected, attempt, reason, now)
    return StepCommand(
        apply=partial(Step.deliver, result_key=expected.result_key, fragment=fragment, now=now, attempt=attempt),
        answers=events.SubagentResult,
        keeps=True,
        expected=expected,
        status=fragment.status,
        attempt=attempt,
        latency_ms=latency_ms,
        metrics=fragment.metrics,
        instead=instead,
    )


def retry(expected: Expected, attempt: int, reason: str, now: float) -> StepCommand:
    return StepCommand(
        apply=partial(Step.retry, result_key=expected.result_key, attempt=attempt, reason=reason, now=now),
        answers=events.SubagentRetried,
        keeps=True,
        forced=True,
        expected=expected,
        status="retrying",
        attempt=attempt,
    )


def fail(expected: Expected, attempt: int, error: str, now: float) -> StepCommand:
    return StepCommand(
        apply=partial(Step.fail, result_key=expected.result_key, attempt=attempt, error=error, now=now),
        answers=events.SubagentCompleted,
        keeps=True,
        forced=True,
        expected=expected,
        status="error",
        attempt=attempt,
    )


def progress(progress: Progress, now: float) -> StepCommand:
    apply = partial(Step.progress, progress=progress, now=now)
    return StepCommand(apply=apply, answers=events.StepProgressed, status=progress.status, awaited=True)


def decide(decision: Decision, now: float) -> StepCommand:
    """A decision that ends the step takes effect even if it cannot be written at once."""
    verdict = verdict_of(decision.decision)
    return StepCommand(
        apply=partial(Step.decide, decision=decision.decision, reason=plain(decision.reason), now=now),
        answers=events.SafetyDecided,
        status=verdict,
        awaited=True,
        keeps=verdict == "block",
        forced=verdict == "block",
    )


def end(
    status: Literal["cancelled", "worker_lost", "failed"], reason: str, now: float, *, awaited: bool = False
) -> StepCommand:
    return StepCommand(
        apply=partial(Step.stop, status=status, reason=plain(reason), now=now),
        answers=events.PlanStepCompleted,
        status=status,
        keeps=True,
        forced=True,
        awaited=awaited,
    )


def expire(now: float) -> StepCommand:
    return StepCommand(apply=partial(Step.expire, now=now), answers=events.SubagentTimedOut, keeps=True, forced=True)


def detach(epoch: int) -> StepCommand:
    return StepCommand(apply=partial(Step.detach, epoch=epoch), answers=events.StreamDegraded, keeps=True, forced=True)


def renew() -> StepCommand:
    """Renews the lease without an event."""
    return StepCommand(apply=lambda _: Applied(), answers=events.StepStarted, renews=True)


def _block(fragment: Fragment, expected: Expected, now: float) -> StepCommand | None:
    """The safety decision alone, for a blocking result that the stream has no room for."""
    if fragment.verdict != "block":
        return None
    return StepCommand(
        apply=partial(Step.decide, decision="block", reason=fragment.reason, now=now, subagent=expected.key),
        answers=events.SafetyDecided,
        keeps=True,
        forced=True,
        expected=expected,
        status="block",
    )
