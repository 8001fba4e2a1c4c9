"""What every Generator promises."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from anabranch.domain.clock import SystemClock
from anabranch.domain.contracts import Generator
from anabranch.domain.errors import GenerationFailed
from anabranch.domain.model import Context, Endpoint, Message, Prompt, Usage
from anabranch.models.openai import OpenAIModel
from anabranch.models.space import SpaceModel
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.policies.resilience import Resilience
from anabranch.policies.upstreams import Policy
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import Failure, FakeGenerator, Space

SAID = "Streams leave the river and rejoin it, naïvely — 東京."
PROMPT = Prompt(
    question="Why?",
    messages=(Message(role="user", content="Why?"),),
    max_tokens=50,
    temperature=0.1,
    passages=(),
    version="test",
)
Make = Callable[[str], Generator]


def context() -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + 30)


@pytest.fixture(params=["space", "space streaming", "openai", "resilient", "fake"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """A generator by name: `talker` speaks, `broken` fails in the middle or at once."""
    if request.param == "fake":
        words = [word + " " for word in SAID.split(" ")[:-1]] + [SAID.rsplit(" ", maxsplit=1)[-1]]
        fakes = {
            "talker": FakeGenerator(words, usage=Usage(total_tokens=9)),
            "broken": FakeGenerator(words, fail_after=1),
        }
        yield fakes.__getitem__
        return
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=1_000_000)
    async with Space(everything=True) as space:
        space.model("talker", reply=SAID, chunk_delay_s=0.001)
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


async def test_the_deltas_are_the_text_and_one_has_the_usage(make: Make) -> None:
    deltas = [delta async for delta in make("talker").generate(PROMPT, context())]
    assert "".join(delta.text for delta in deltas) == SAID
    assert [delta.usage for delta in deltas if delta.usage] != []


async def test_every_failure_is_one_kind_of_error(make: Make) -> None:
    with pytest.raises(GenerationFailed) as caught:
        async for _ in make("broken").generate(PROMPT, context()):
            pass
    assert caught.value.message


async def test_it_can_be_left_in_the_middle(make: Make) -> None:
    async with aclosing(make("talker").generate(PROMPT, context())) as deltas:
        async for delta in deltas:
            if delta.text:
                break
