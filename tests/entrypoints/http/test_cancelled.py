"""Readers of /rag/stream who leave: what they asked for ends with them, unless somebody else waits for it too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from anabranch.testing import Space
from anabranch.testing.space import Recorded
from support.load_clients import HANDBOOK, Crowd, crowd

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rag")]

SAID = "Refunds take 30 days [1]. That is what it says."
GONE_WITHIN_S = 1.0


class Counts(NamedTuple):
    requests: float
    cancelled: float
    errors: float
    running: float

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def writer() -> AsyncIterator[Space]:
    async with Space() as space:
        yield space


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, writer: Space) -> AsyncIterator[Crowd]:
    settings: Any = {"model_url": writer.url, "model_name": "writer", "query_rewriting": "false", "rate_limit": "0"}
    bounds: Any = {"max_running": "2", "max_waiting": "2"}
    async with crowd(tmp_path_factory.mktemp("cancelled"), models_dir, **settings, **bounds) as opened:
        yield opened
        assert opened.complaints() == []


@pytest.fixture(autouse=True)
def slow(writer: Space) -> None:
    """Nobody hears the last word."""
    writer.model("writer", reply="word " * 1_000, chunk_delay_s=0.03)
    writer.requests.clear()


async def counts(asked: Crowd) -> Counts:
    read = await asked.metrics()

    def total(name: str) -> float:
        return sum(sample.value for sample in read.all(name))

    names = ("rag_stream_requests_total", "rag_stream_cancelled_total", "rag_stream_errors_total")
    return Counts(*map(total, (*names, "anabranch_questions_running")))


async def begun(asked: Crowd, query: str, stack: AsyncExitStack) -> AsyncIterator[bytes]:
    """A stream of which the first word has been read."""
    response = await stack.enter_async_context(asked.asking(query))
    assert response.status == 200
    assert b"token" in await response.content.readuntil(b"\n\n")
    stack.callback(response.close)
    return response.content.iter_any()


async def is_left(writer: Space, request: Recorded) -> None:
    await writer.wait_for(lambda: request.disconnected, GONE_WITHIN_S)


async def test_a_reader_who_leaves_in_mid_stream_ends_it(asked: Crowd, writer: Space) -> None:
    query, before = "How long do refunds take?", await counts(asked)
    async with AsyncExitStack() as stack:
        await begun(asked, query, stack)
        [request] = writer.requests
        assert not request.disconnected
    await is_left(writer, request)
    assert not request.finished
    await asked.reads("rag_stream_cancelled_total", before.cancelled + 1)
    assert (await counts(asked)).since(before) == Counts(requests=1, cancelled=1, errors=0, running=0)
    writer.model("writer", reply=SAID)
    assert [(await asked.ask(query)).end["cached"] for _ in range(2)] == [False, True]


async def test_a_reader_who_leaves_before_the_first_word_ends_it_too(asked: Crowd, writer: Space) -> None:
    writer.model("writer", reply=SAID, delay_s=30)
    before = await counts(asked)
    async with asked.asking("When do parcels to Iceland leave?") as response:
        await writer.wait_for(lambda: writer.requests)
        response.close()
    await is_left(writer, writer.requests[0])
    await asked.reads("rag_stream_cancelled_total", before.cancelled + 1)
    assert (await counts(asked)).since(before) == Counts(requests=1, cancelled=1, errors=0, running=0)


async def test_the_first_who_asked_may_leave_the_second_alone(asked: Crowd, writer: Space) -> None:
    query, before = "How many days do refunds take?", await counts(asked)
    joined = (await asked.metrics()).value("anabranch_questions_joined_total")
    said = SAID + " Or so they say." * 6
    writer.model("writer", reply=said, chunk_delay_s=0.03)
    async with AsyncExitStack() as stack:
        await begun(asked, query, stack)
        other = asyncio.create_task(asked.ask(query))
        await asked.reads("anabranch_questions_joined_total", joined + 1)
    told = await other
    assert told.is_answered
    assert "".join(frame["data"] for frame in told.frames if frame["type"] == "token") == said
    assert len(writer.requests) == 1
    assert (await counts(asked)).since(before) == Counts(requests=2, cancelled=1, errors=0, running=0)
    assert (await asked.ask(query)).end["cached"]


async def test_a_shared_answer_ends_when_all_its_clients_disconnect(asked: Crowd, writer: Space) -> None:
    query, before = "How long do printed books take?", await counts(asked)
    async with AsyncExitStack() as stack:
        await begun(asked, query, stack)
        await begun(asked, query, stack)
        [request] = writer.requests
    await is_left(writer, request)
    await asked.reads("rag_stream_cancelled_total", before.cancelled + 2)
    assert (await counts(asked)).since(before) == Counts(requests=2, cancelled=2, errors=0, running=0)
    writer.model("writer", reply=SAID)
    assert not (await asked.ask(query)).end["cached"]


async def test_who_leaves_the_queue_takes_nobodys_turn(asked: Crowd, writer: Space) -> None:
    """Two are answered, two wait, and the first of those leaves."""
    before = await counts(asked)
    async with AsyncExitStack() as stack:
        for number in range(2):
            await begun(asked, f"How long do refunds for books take, number {number}?", stack)
        waiting = await stack.enter_async_context(asked.asking("When do parcels leave?"))
        last = asyncio.create_task(asked.ask("Which parcels leave on Tuesdays?"))
        await asked.reads("anabranch_questions_waiting", 2)
        refused = await asked.ask("And one more?")
        assert (refused.status, refused.end["error_code"]) == (503, "overloaded")
        waiting.close()
        await asked.reads("anabranch_questions_waiting", 1)
        writer.model("writer", reply=SAID)
    assert (await last).is_answered
    assert len(writer.requests) == 3  # who left in the queue was never written for
    await asked.reads("anabranch_questions_running", 0)
    assert (await counts(asked)).since(before) == Counts(requests=5, cancelled=3, errors=1, running=0)


async def test_a_document_that_comes_in_mid_stream_does_not_spoil_the_cache(asked: Crowd, writer: Space) -> None:
    writer.model("writer", reply=SAID, chunk_delay_s=0.05)
    query = "How long do refunds for printed books take by now?"
    async with AsyncExitStack() as stack:
        stream = await begun(asked, query, stack)
        await asked.ingest("shop", f"{HANDBOOK} Refunds for printed books take 10 days by now.", title="News")
        assert b'"done"' in b"".join([piece async for piece in stream])
    writer.model("writer", reply=SAID)
    told = await asked.ask(query)
    assert not told.end["cached"]
    assert "News" in {source["title"] for source in told.end["sources"]}
