"""Fan out: every source at once, each within its own budget, so that none costs another its reply."""

import asyncio
from collections.abc import Sequence

import msgspec

from anabranch.domain.contracts import Clock, Emit, Source, Telemetry
from anabranch.domain.events import SourceReplied
from anabranch.domain.model import Context, Query, SourceReply, Status


async def fan_out(
    leads: Sequence[tuple[str, Source, Query]],
    context: Context,
    emit: Emit,
    clock: Clock,
    telemetry: Telemetry,
    budget_s: float,
) -> tuple[SourceReply, ...]:
    """The replies in the order of the leads; each is emitted the moment it is there. A source's deadline is its own."""
    ends = clock.monotonic() + budget_s
    own = msgspec.structs.replace(context, deadline=ends) if ends < context.deadline else context

    async def ask(index: int, path: str, source: Source, query: Query) -> SourceReply:
        began = clock.monotonic()
        try:
            async with asyncio.timeout(budget_s):
                reply = await source.search(query, own)
        except TimeoutError:
            reply = SourceReply(
                path=path, status=Status.TIMEOUT, error=f"The source did not answer within {budget_s:.3g} seconds."
            )
        except Exception as error:  # noqa: BLE001  the task's boundary: one source's bug costs only that source
            telemetry.crashed(error, context)
            reply = SourceReply(path=path, status=Status.ERROR, error="Asking this source failed on our side.")
        reply = msgspec.structs.replace(reply, latency_ms=round((clock.monotonic() - began) * 1000))
        await emit(SourceReplied(index=index, reply=reply))
        return reply

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(index, *lead)) for index, lead in enumerate(leads)]
    return tuple(task.result() for task in tasks)
