"""Reports events to telemetry and to a stage where they first occur: replays of a cached or shared answer are not
reported again."""

from collections.abc import Callable

from anabranch.domain.contracts import Emit, Telemetry
from anabranch.domain.events import AnswerEvent
from anabranch.domain.model import Context


def observed(
    emit: Emit, telemetry: Telemetry, context: Context, observe: Callable[[AnswerEvent], None] = lambda _: None
) -> Emit:
    async def emit_observed(event: AnswerEvent) -> None:
        telemetry.happened(event, context)
        observe(event)
        await emit(event)

    return emit_observed
