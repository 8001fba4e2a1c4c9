"""Fan out: queries all sources concurrently; a slow or failing source does not affect the others."""

import asyncio
from collections.abc import Sequence

import msgspec

from anabranch.domain.contracts import Clock, Emit, Source, Telemetry
from anabranch.domain.events import SourceReplied
from anabranch.domain.model import Context, Query, SourceReply, Status


async def fan_out(
    queries: Sequence[tuple[str, Source, Query]],
    context: Context,
    emit: Emit,
    clock: Clock,
    telemetry: Telemetry,
    budget_s: float,
) -> tuple[SourceReply, ...]:
    """The replies in the order of the queries; each is emitted as it arrives, at the latest after `budget_s`."""
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
        except Exception as error:  # noqa: BLE001  task boundary: one source's bug fails only that source
            telemetry.crashed(error, context)
            reply = SourceReply(path=path, status=Status.ERROR, error="Querying this source failed on our side.")
        reply = msgspec.structs.replace(reply, latency_ms=round((clock.monotonic() - began) * 1000))
        await emit(SourceReplied(index=index, reply=reply))
        return reply

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(index, *query)) for index, query in enumerate(queries)]
    return tuple(task.result() for task in tasks)
