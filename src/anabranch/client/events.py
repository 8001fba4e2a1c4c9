"""The values that the client returns: events of a step, frames of an answer, resets and receipts."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from anabranch.domain.model import Value
from anabranch.domain.steps import Ignored

# After a step with one of these statuses the stream continues with the next step, if the last event names one.
CONTINUES = ("success", "partial_failure", "failed")
FINAL_EVENTS = ("done", "error")


class Content(Value):
    stage: str
    status: str
    payload: Mapping[str, Any]
    revision: int
    result_key: str | None = None


class PlannerEvent(Value):
    """One event of a step. A later event with the same `key` and a higher revision replaces it."""

    sequence: int
    session_id: str
    plan_step_id: str
    type: str
    timestamp: str
    content: Content
    telemetry: Mapping[str, Any] = {}

    @property
    def key(self) -> tuple[str, str, str | None]:
        return self.plan_step_id, self.type, self.content.result_key

    @property
    def ends_step(self) -> bool:
        return self.type == "plan_step_completed"

    @property
    def ends_stream(self) -> bool:
        """Whether it ends its step, and no other step follows on this stream."""
        return self.ends_step and not (self.content.status in CONTINUES and self.content.payload.get("next_step_id"))


class Reset(Value, gc=False):
    """The server does not know the cursor. Discard what was built from the stream so far: the stream starts over from
    the beginning."""

    sequence: int = 0
    epoch: int = 0


class _Typed(Value):
    type: str = ""


class AnswerFrame(Value, gc=False):
    """One event of an answer, in the dialect of the question. An `id` of 0 cannot be used as a cursor."""

    event: str
    data: str
    id: int = 0

    @property
    def ends_answer(self) -> bool:
        """Whether it is the last event. All dialects use the same names; one has the name inside its data."""
        if self.event != "message":
            return self.event in FINAL_EVENTS
        try:
            return msgspec.json.decode(self.data, type=_Typed).type in FINAL_EVENTS
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return False


class Begun(Value):
    """A step that was started. `created` is false if it existed before. If streaming is disabled, `status` is the final
    one, and `results` are by result key."""

    session_id: str
    plan_step_id: str
    status: str
    created: bool = False
    sequence: int = 0
    results: Mapping[str, Any] = {}


class Pushed(Value, gc=False):
    """The receipt of a push: its sequence in the stream, or the `reason` why it was ignored. One of several pushes may
    also be rejected: `error` is the code, and `message` says why."""

    accepted: bool = True
    sequence: int | None = None
    reason: Ignored | None = None
    error: str | None = None
    message: str | None = None


class Replay(Value):
    """A page of a step's stored events. `reset` says that the cursor was unknown and the page is the first one."""

    session_id: str
    plan_step_id: str
    events: tuple[PlannerEvent, ...]
    next_cursor: int
    has_more: bool
    reset: bool = False


class StepView:
    """The latest revision of every key. The state is the same whether events arrived live or by replay, once or twice.
    A stream that continues with the next step is included: `latest` is by step, type and result key."""

    def __init__(self, events: Iterable[PlannerEvent | Reset] = ()) -> None:
        self.sequence = 0
        self.latest: dict[tuple[str, str, str | None], PlannerEvent] = {}
        for event in events:
            self.apply(event)

    def apply(self, event: PlannerEvent | Reset) -> bool:
        """Returns whether the state changed."""
        if isinstance(event, Reset):
            self.sequence = 0
            self.latest.clear()
            return True
        self.sequence = max(self.sequence, event.sequence)
        known = self.latest.get(event.key)
        if known is not None and known.content.revision >= event.content.revision:
            return False
        self.latest[event.key] = event
        return True

    @property
    def results(self) -> dict[str, PlannerEvent]:
        """The latest result, or part of one, by result key. If two steps use the same key, the later step's."""
        return {
            event.content.result_key: event
            for event in sorted(self.latest.values(), key=lambda event: event.sequence)
            if event.type == "subagent_result" and event.content.result_key is not None
        }

    def status(self, plan_step_id: str) -> str | None:
        """A step's status: `in_progress` or the final one; None if there is no event of it."""
        if end := self.latest.get((plan_step_id, "plan_step_completed", None)):
            return end.content.status
        return "in_progress" if any(step == plan_step_id for step, _, _ in self.latest) else None
