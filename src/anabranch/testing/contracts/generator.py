"""The tests of the contract Generator."""

import time
from collections.abc import Callable
from contextlib import aclosing

import pytest

from anabranch.domain.contracts import Generator
from anabranch.domain.errors import GenerationFailed
from anabranch.domain.model import Context, Message, Prompt

TEXT = "Streams leave the river and rejoin it, naïvely — 東京."
PROMPT = Prompt(
    question="Why?",
    messages=(Message(role="user", content="Why?"),),
    max_tokens=50,
    temperature=0.1,
    passages=(),
    version="test",
)


def context() -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + 30)


class GeneratorContract:
    """The fixture `make` gives a generator by its slug: `talker` writes TEXT, `broken` fails at once or midway."""

    async def test_the_deltas_are_the_text_and_one_has_the_usage(self, make: Callable[[str], Generator]) -> None:
        deltas = [delta async for delta in make("talker").generate(PROMPT, context())]
        assert "".join(delta.text for delta in deltas) == TEXT
        assert any(delta.usage for delta in deltas)

    async def test_every_failure_is_a_generation_failed(self, make: Callable[[str], Generator]) -> None:
        with pytest.raises(GenerationFailed) as raised:
            assert [delta async for delta in make("broken").generate(PROMPT, context())]
        assert raised.value.message

    async def test_a_generation_can_be_closed_midway(self, make: Callable[[str], Generator]) -> None:
        async with aclosing(make("talker").generate(PROMPT, context())) as deltas:
            async for delta in deltas:
                if delta.text:
                    break
