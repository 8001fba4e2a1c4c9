"""Every source passes the contract suite of sources."""

from collections.abc import AsyncIterator, Callable

import pytest

from anabranch.domain.contracts import Source, SystemClock
from anabranch.domain.model import Endpoint, Passage, SourceReply, Status
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.policies.breaker import Policy
from anabranch.policies.resilience import Resilience
from anabranch.sources.space import SpaceSource
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import Failure, FakeSource, Space
from anabranch.testing.contracts.source import SourceContract

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


@pytest.fixture(params=["space", "resilient", "hedged", "fake"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
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


class TestSource(SourceContract):
    """Every source over the Space wire, and the fake."""
