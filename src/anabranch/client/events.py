"""What a client hears: the events of a step, the frames of an answer, and that everything begins again."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from anabranch.domain.model import Value
from anabranch.domain.steps import Ignored

# A step that ended in one of these goes on in the next one, if it names one.
GOES_ON = ("success", "partial_failure", "failed")
LAST_OF_ANSWER = ("done", "error")
UNNAMED = "message"


class Content(Value):
    stage: str
    status: str
    payload: Mapping[str, Any]
    revision: int
    result_key: str | None = None


class PlannerEvent(Value):
    """One thing that happened in a step. A later one under the same `key` with a higher revision replaces it."""

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
        """It ends its step, and no other follows on this stream."""
        goes_on = self.content.status in GOES_ON and self.content.payload.get("next_step_id")
        return self.ends_step and not goes_on


class Reset(Value, gc=False):
    """The cursor meant nothing to the server. What was built from the stream so far is void: it comes again, from the
    beginning."""

    sequence: int = 0
    epoch: int = 0


class AnswerFrame(Value, gc=False):
    """One event of an answer, in the dialect that it was asked in. Without an id (0) it cannot be resumed from."""

    event: str
    data: str
    id: int = 0

    @property
    def ends_answer(self) -> bool:
        """It is the last one; all dialects call that the same, one of them inside its data."""
        return (self.event if self.event != UNNAMED else _type(self.data)) in LAST_OF_ANSWER


class Begun(Value):
    """A step that was handed over. `created` is false if it had been before. Where streaming is switched off, `status`
    is the end's, and `results` are by result key."""

    session_id: str
    plan_step_id: str
    status: str
    created: bool = False
    sequence: int = 0
    results: Mapping[str, Any] = {}


class Pushed(Value, gc=False):
    """What became of something that was sent to a step: its place in the stream, or the `reason` why it was passed
    over. One of several may also have been refused; `error` is its code, and `message` says why."""

    accepted: bool = True
    sequence: int | None = None
    reason: Ignored | None = None
    error: str | None = None
    message: str | None = None


class Replay(Value):
    """A page of what is kept of a step. `reset` says that the cursor meant nothing, and that it begins again."""

    session_id: str
    plan_step_id: str
    events: tuple[PlannerEvent, ...]
    next_cursor: int
    has_more: bool
    reset: bool = False


class _Typed(Value):
    type: str = ""


def _type(data: str) -> str:
    try:
        return msgspec.json.decode(data, type=_Typed).type
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""


class StepView:
    """Keeps the latest revision under every key, and so comes to the same state whether events came live, by replay,
    once or twice. A stream that goes on in the next step is held here too: keys carry their step."""

    def __init__(self, events: Iterable[PlannerEvent | Reset] = ()) -> None:
        self.sequence = 0
        self._latest: dict[tuple[str, str, str | None], PlannerEvent] = {}
        for event in events:
            self.apply(event)

    def apply(self, event: PlannerEvent | Reset) -> bool:
        """Whether it changed anything."""
        if isinstance(event, Reset):
            self.sequence = 0
            self._latest.clear()
            return True
        self.sequence = max(self.sequence, event.sequence)
        known = self._latest.get(event.key)
        if known is not None and known.content.revision >= event.content.revision:
            return False
        self._latest[event.key] = event
        return True

    @property
    def latest(self) -> Mapping[tuple[str, str, str | None], PlannerEvent]:
        """By step, type and result key."""
        return self._latest

    @property
    def results(self) -> dict[str, PlannerEvent]:
        """The latest result, or part of one, by result key; of a later step where two use the same."""
        return {
            event.content.result_key: event
            for event in sorted(self._latest.values(), key=lambda event: event.sequence)
            if event.type == "subagent_result" and event.content.result_key is not None
        }

    def status(self, plan_step_id: str) -> str | None:
        """How a step stands: `in_progress`, or how it ended; None if nothing has been heard of it."""
        if end := self._latest.get((plan_step_id, "plan_step_completed", None)):
            return end.content.status
        return "in_progress" if any(step == plan_step_id for step, _, _ in self._latest) else None
