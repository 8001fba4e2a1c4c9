"""Telling telemetry and the stages what is emitted, where it happens: what is only told again (a remembered answer, a
shared one) did not happen again."""

from collections.abc import Callable

from anabranch.domain.contracts import Emit, Telemetry
from anabranch.domain.events import AnswerEvent
from anabranch.domain.model import Context


def told(
    emit: Emit, telemetry: Telemetry, context: Context, heard: Callable[[AnswerEvent], None] = lambda _: None
) -> Emit:
    async def emit_told(event: AnswerEvent) -> None:
        telemetry.happened(event, context)
        heard(event)
        await emit(event)

    return emit_told
