"""What can happen to a step, put into words for the one who writes it down."""

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.events import StepEvent
from anabranch.domain.steps import Fragment, Receipt, Trace
from anabranch.streams.step import Applied, Step

MAX_PAYLOAD = 1024 * 1024
MAX_METRICS = 64
MAX_WORDS = 500
STATUSES = ("pending", "in_progress", "partial", "success", "error")

_objects = msgspec.json.Decoder(dict)


class Action(msgspec.Struct, kw_only=True, eq=False):
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
    instead: "Action | None" = None
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
