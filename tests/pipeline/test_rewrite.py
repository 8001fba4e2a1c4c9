"""Rewrite: the question in other words, as far as a model says them in time."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import GenerationFailed
from anabranch.domain.model import Context, Delta, Endpoint, Message, Prompt, Query, Question, SourceReply, Status
from anabranch.pipeline import rewrite as stage
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.rewrite import rewrite
from anabranch.pipeline.run import Run
from anabranch.testing import FakeDirectory, FakeSource, Recorder

CONTEXT = Context(correlation_id="1", deadline=float("inf"))


class Told:
    """A model that says what it is told to, by what it is asked for."""

    def __init__(self, say: Callable[[str], str], delay_s: float = 0) -> None:
        self.prompts: list[Prompt] = []
        self._say = say
        self._delay_s = delay_s

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        self.prompts.append(prompt)
        await asyncio.sleep(self._delay_s)
        said = self._say(prompt.messages[0].content)
        for word in said.split(" "):
            yield Delta(text=word + " ")


def by_task(system: str) -> str:
    if system == stage.STANDALONE:
        return "How long may a customer return a bicycle?"
    if system == stage.HYPOTHETICAL:
        return "A bicycle may be returned within thirty days."
    return '1. Until when can a bicycle be brought back?\n2) "What is the time limit for returns?"\n- Return period?'


async def test_rewrite_gives_variants_and_a_hypothetical_answer() -> None:
    told = await rewrite("How long may I return it?", [], Told(by_task), CONTEXT, 5)
    assert told.text == "How long may I return it?"
    assert told.variants == (
        "Until when can a bicycle be brought back?",
        "What is the time limit for returns?",
        "Return period?",
    )
    assert told.hypothetical == "A bicycle may be returned within thirty days."


async def test_rewrite_asks_for_150_tokens_at_temperature_0() -> None:
    model = Told(by_task)
    await rewrite("How long may I return it?", [Message(role="user", content="Hello")], model, CONTEXT, 5)
    assert [(prompt.max_tokens, prompt.temperature) for prompt in model.prompts] == [(150, 0.0)] * 3


async def test_rewrite_makes_a_follow_up_question_standalone() -> None:
    model = Told(by_task)
    history = [Message(role="user", content="Do you sell bicycles?"), Message(role="assistant", content="Yes.")]
    told = await rewrite("How long may I return it?", history, model, CONTEXT, 5)
    assert told.text == "How long may a customer return a bicycle?"
    assert "Do you sell bicycles?" in model.prompts[0].messages[1].content
    assert all(told.text in prompt.messages[1].content for prompt in model.prompts[1:])


async def test_rewrite_stops_at_its_time_budget() -> None:
    told = await rewrite("How long?", [], Told(by_task, delay_s=5), CONTEXT, 0.01)
    assert told == ("How long?", (), None)


@pytest.mark.parametrize("said", ["", "   ", "no list at all", "\n\n1. \n2. \n"])
async def test_rewrite_ignores_malformed_variants(said: str) -> None:
    told = await rewrite("How long?", [], Told(lambda _: said), CONTEXT, 5)
    assert told.text == "How long?"
    assert told.variants == ()


async def test_a_model_that_fails_leaves_the_question_as_it_is() -> None:
    def fail(_: str) -> str:
        raise GenerationFailed("the model broke")

    history = [Message(role="user", content="Do you sell bicycles?")]
    assert await rewrite("How long?", history, Told(fail), CONTEXT, 5) == ("How long?", (), None)


async def test_sources_get_the_variants_and_the_answer_lists_them() -> None:
    asked: list[Query] = []

    def reply(query: Query, _: Context) -> SourceReply:
        asked.append(query)
        return SourceReply(path="notes", status=Status.SUCCESS)

    pipeline = Pipeline(
        directory=FakeDirectory({"notes": FakeSource(reply)}, {"writer": Told(by_task)}),
        clock=SystemClock(),
        telemetry=Recorder(),
        limits=Limits(retrieval_timeout_s=5, generation_timeout_s=5, context_tokens=1_000),
    )
    question = Question(
        text="How long may I return it?",
        sources=(Endpoint(slug="notes", kind="collection"),),
        model=Endpoint(slug="writer", kind="openai"),
        history=(Message(role="user", content="Do you sell bicycles?"),),
        refuse=True,
        rewrite=True,
    )
    answer = await Run(pipeline, question, CONTEXT, Recorder()).start().value()
    assert asked[0].text == answer.rewritten == "How long may a customer return a bicycle?"
    assert len(asked[0].variants) == len(answer.variants) == stage.VARIANTS
    assert asked[0].hypothetical
    assert answer.refused
