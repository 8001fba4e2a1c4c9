"""The reference client: follows a stream, applies every event exactly once, and reconnects at its cursor."""

from typing import TYPE_CHECKING

from anabranch._lazy import lazy_names

if TYPE_CHECKING:
    from anabranch.client.answers import AnswerClient
    from anabranch.client.connection import Pace
    from anabranch.client.events import AnswerFrame, Begun, Content, PlannerEvent, Pushed, Replay, Reset, StepView
    from anabranch.client.planner import PlannerClient
    from anabranch.domain.errors import Conflict, NotFound, StreamUnavailable, Unauthorized

__all__ = [
    "AnswerClient",
    "AnswerFrame",
    "Begun",
    "Conflict",
    "Content",
    "NotFound",
    "Pace",
    "PlannerClient",
    "PlannerEvent",
    "Pushed",
    "Replay",
    "Reset",
    "StepView",
    "StreamUnavailable",
    "Unauthorized",
]

__getattr__ = lazy_names(__name__, ("events", "connection", "answers", "planner"))
