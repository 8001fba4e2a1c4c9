"""Retrieve: every source is asked at once, each in the form it needs, and none longer than all may take."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from anabranch.domain.contracts import Clock, Directory, Emit, Source, Telemetry
from anabranch.domain.events import SourceReplied
from anabranch.domain.model import Context, Endpoint, Query, Question, SourceReply, Status

NO_VARIANTS: tuple[str, ...] = ()
EVIDENCE_DEPTH = 20


class SourceQuery(NamedTuple):
    path: str
    source: Source
    query: Query


def route(
    question: Question,
    directory: Directory,
    text: str | None = None,
    variants: tuple[str, ...] = NO_VARIANTS,
    hypothetical: str | None = None,
) -> tuple[SourceQuery, ...]:
    return tuple(
        SourceQuery(
            path=endpoint.path,
            source=directory.source(endpoint),
            query=Query(
                text=endpoint.query or text or question.text,
                limit=_depth(question, endpoint),
                similarity_threshold=question.similarity_threshold,
                filters=question.filters,
                rerank=question.rerank,
                variants=variants,
                hypothetical=hypothetical,
                diversity=question.diversity,
                raw=question.ranking is not None,
                near_duplicates=question.profile.near_duplicates,
                complete=question.evidence == "rank",
                explain=question.explain,
            ),
        )
        for endpoint in question.sources
    )


def _depth(question: Question, endpoint: Endpoint) -> int:
    """How many passages to ask for. Evidence is looked for further down in collections, which are searched here."""
    deeper = question.evidence == "rank" and endpoint.kind == "collection"
    return max(question.top_k, EVIDENCE_DEPTH) if deeper else question.top_k


async def fan_out(
    queries: Sequence[tuple[str, Source, Query]],
    context: Context,
    emit: Emit,
    clock: Clock,
    telemetry: Telemetry,
    budget_s: float,
    setting: str,
) -> tuple[SourceReply, ...]:
    """The replies in the order of the queries; each is emitted as it arrives, at the latest after `budget_s`, which
    `setting` sets."""
    own = context.until(clock.monotonic() + budget_s)
    searching: dict[int, asyncio.Task[SourceReply]] = {}
    late = SourceReply(
        path="", status=Status.TIMEOUT, error=f"The source did not answer within {budget_s:.3g} seconds ({setting})."
    )

    async def ask(index: int, path: str, source: Source, query: Query) -> SourceReply:
        began = clock.monotonic()
        try:
            reply = await source.search(query, own)
        except TimeoutError:
            reply = msgspec.structs.replace(late, path=path)
        except asyncio.CancelledError:
            # Of all that is cancelled, `end` has taken these out; but the whole question may be cancelled as well.
            if index in searching or tasks[index].uncancel():
                raise
            reply = msgspec.structs.replace(late, path=path)
        except Exception as error:  # noqa: BLE001  task boundary: one source's bug fails only that source
            telemetry.crashed(error, context)
            reply = SourceReply(path=path, status=Status.ERROR, error="Querying this source failed on our side.")
        searching.pop(index, None)
        reply = msgspec.structs.replace(reply, latency_ms=round((clock.monotonic() - began) * 1000))
        await emit(SourceReplied(index=index, reply=reply))
        return reply

    def end() -> None:
        for index in tuple(searching):
            searching.pop(index).cancel()

    # One timer for all: a time-out for each would cost as much as another source.
    ending = asyncio.get_running_loop().call_later(budget_s, end)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(index, *query)) for index, query in enumerate(queries)]
            searching.update(enumerate(tasks))
    finally:
        ending.cancel()
    return tuple(task.result() for task in tasks)
