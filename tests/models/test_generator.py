"""Every generator passes the contract suite of generators."""

from collections.abc import AsyncIterator, Callable

import pytest

from anabranch.domain.contracts import Generator, SystemClock
from anabranch.domain.model import Endpoint, Usage
from anabranch.models.remote import OpenAIModel, SpaceModel
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.policies.breaker import Policy
from anabranch.policies.resilience import Resilience
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import Failure, FakeGenerator, Space
from anabranch.testing.contracts.generator import TEXT, GeneratorContract

Make = Callable[[str], Generator]


@pytest.fixture(params=["space", "space streaming", "openai", "resilient", "fake"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    if request.param == "fake":
        words = [word + " " for word in TEXT.split(" ")[:-1]] + [TEXT.rsplit(" ", maxsplit=1)[-1]]
        fakes = {
            "talker": FakeGenerator(words, usage=Usage(total_tokens=9)),
            "broken": FakeGenerator(words, fail_after=1),
        }
        yield fakes.__getitem__
        return
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=1_000_000)
    async with Space(everything=True) as space:
        space.model("talker", reply=TEXT, chunk_delay_s=0.001)
        space.fails("broken", Failure.STREAM_BREAK)

        resilience = Resilience(Policy(model_retries=0), SystemClock(), SilentTelemetry())

        def made(slug: str) -> Generator:
            endpoint = Endpoint(slug=slug, url=space.url, operator=True)
            if request.param == "openai":
                return OpenAIModel(endpoint, outbound)
            if request.param == "resilient":
                return resilience.generator(endpoint, OpenAIModel(endpoint, outbound))
            return SpaceModel(endpoint, outbound, streaming=request.param == "space streaming")

        yield made
        await outbound.close()


class TestGenerator(GeneratorContract):
    """Every generator over HTTP, and the fake."""
