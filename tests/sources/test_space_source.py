"""What every Source promises."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from anabranch.domain.clock import SystemClock
from anabranch.domain.contracts import Source
from anabranch.domain.model import Context, Endpoint, Passage, Query, SourceReply, Status
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.policies.resilience import Resilience
from anabranch.policies.upstreams import Policy
from anabranch.sources.space import SpaceSource
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import Failure, FakeSource, Space

QUERY = Query(text="Why?", limit=2, similarity_threshold=0.1)
Make = Callable[[str], Source]

FOUND = SourceReply(
    path="alice/docs",
    status=Status.SUCCESS,
    passages=tuple(Passage(source="alice/docs", title=f"T{n}", text=f"Text {n}.", score=0.5) for n in range(2)),
)
FAKES = {
    "docs": FakeSource(FOUND),
    "broken": FakeSource(SourceReply(path="alice/broken", status=Status.ERROR, error="It broke.")),
    "hang": FakeSource(FOUND, delay_s=3600),
}


def context() -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + 30)


@pytest.fixture(params=["space", "resilient", "hedged", "fake"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """A source by name: `docs` has something, `broken` fails, `hang` never answers."""
    if request.param == "fake":
        yield FAKES.__getitem__
        return
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=1_000_000)
    async with Space(everything=True) as space:
        space.fails("broken", Failure.RESET)
        resilience = Resilience(Policy(), SystemClock(), SilentTelemetry())

        def made(slug: str) -> Source:
            alternate = space.url if request.param == "hedged" else None
            endpoint = Endpoint(slug=slug, owner="alice", url=space.url, operator=True, alternate=alternate)
            if request.param == "space":
                return SpaceSource(endpoint, outbound)
            return resilience.source(endpoint, lambda each: SpaceSource(each, outbound))

        yield made
        await outbound.close()


async def test_space_source_passages_carry_title_score_and_document_id(make: Make) -> None:
    reply = await make("docs").search(QUERY, context())
    assert (reply.path, reply.status, reply.error) == ("alice/docs", Status.SUCCESS, None)
    assert 0 < len(reply.passages) <= QUERY.limit
    for passage in reply.passages:
        assert passage.source == "alice/docs"
        assert passage.title
        assert passage.text
        assert 0 <= passage.score <= 1


async def test_space_source_failures_become_error_replies(make: Make) -> None:
    reply = await make("broken").search(QUERY, context())
    assert (reply.path, reply.status, reply.passages) == ("alice/broken", Status.ERROR, ())
    assert reply.error


async def test_a_source_search_can_be_cancelled(make: Make) -> None:
    asking = asyncio.create_task(make("hang").search(QUERY, context()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_source_answers_concurrent_searches(make: Make) -> None:
    source = make("docs")
    replies = await asyncio.gather(*(source.search(QUERY, context()) for _ in range(20)))
    assert all(reply.passages == replies[0].passages for reply in replies)
