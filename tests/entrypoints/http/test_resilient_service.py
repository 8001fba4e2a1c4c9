"""What a person who asks sees of it: an answer where there can be one, and a sentence where there cannot."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from anabranch.domain.contracts import Generator, Source, SystemClock
from anabranch.domain.errors import GenerationFailed
from anabranch.domain.events import AnswerEvent, Token
from anabranch.domain.model import Answer, Context, Endpoint, Question, Status
from anabranch.domain.signals import BreakerStateChanged, Retried, TokensUsed
from anabranch.models.remote import OpenAIModel
from anabranch.network.outbound import AiohttpOutbound
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.policies.breaker import Policy
from anabranch.policies.resilience import Resilience
from anabranch.sources.space import SpaceSource
from anabranch.testing import Failure, Recorder, Space
from anabranch.text.token_estimate import EstimatedTokens
from conftest import ref
from support.scripted_source import answering, reaching_out


class Directory:
    """As the app puts it together: each adapter behind the policies."""

    def __init__(self, outbound: AiohttpOutbound, resilience: Resilience) -> None:
        self._outbound = outbound
        self._resilience = resilience

    def source(self, endpoint: Endpoint) -> Source:
        return self._resilience.source(endpoint, lambda each: SpaceSource(each, self._outbound))

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        return self._resilience.generator(endpoint, OpenAIModel(endpoint, self._outbound), retried=retried)


class Asked(NamedTuple):
    answer: Answer | GenerationFailed
    events: list[AnswerEvent]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token))


class Service:
    def __init__(self, outbound: AiohttpOutbound, space: Space, retrieval_timeout_s: float = 5) -> None:
        self.space = space
        self.telemetry = Recorder()
        self.waits = 0
        clock = SystemClock()
        resilience = Resilience(Policy(), clock, self.telemetry, sleep=self._sleep)
        self.pipeline = Pipeline(
            directory=Directory(outbound, resilience),
            counter=EstimatedTokens(),
            clock=clock,
            telemetry=self.telemetry,
            limits=Limits(retrieval_timeout_s=retrieval_timeout_s, generation_timeout_s=5, context_tokens=8_000),
        )

    async def _sleep(self, seconds: float) -> None:
        """Does not wait; the second time, the model has recovered."""
        assert 0.5 <= seconds <= 2.0
        self.waits += 1
        if self.waits == 2:
            self.space.model("writer", reply="All is well.")

    async def ask(self, *sources: str, model: str = "writer") -> Asked:
        events: list[AnswerEvent] = []

        async def emit(event: AnswerEvent) -> None:
            events.append(event)

        question = Question(
            text="Why?",
            sources=tuple(Endpoint(slug=slug, url=self.space.url, operator=True) for slug in sources),
            model=Endpoint(slug=model, url=self.space.url, kind="openai", operator=True),
        )
        context = Context(correlation_id="c", deadline=time.monotonic() + 30)
        try:
            return Asked(await self.pipeline.answer(question, context, emit), events)
        except GenerationFailed as error:
            return Asked(error, events)


@pytest.fixture
async def service(space: Space) -> AsyncIterator[Service]:
    async with reaching_out() as outbound:
        yield Service(outbound, space)


async def test_a_model_that_fails_twice_and_then_answers_gives_one_good_answer(service: Service) -> None:
    service.space.fails("writer", Failure.STATUS_503)
    asked = await service.ask("docs")
    assert asked.text == "All is well."
    assert isinstance(asked.answer, Answer)
    assert asked.answer.text == asked.text
    assert [request.slug for request in service.space.requests].count("writer") == 3
    retried, spent = service.telemetry.signals[:2], service.telemetry.signals[2:]
    assert retried == [Retried(upstream="writer")] * 2
    assert [type(signal) for signal in spent] == [TokensUsed]


@pytest.mark.parametrize("failure", [Failure.STREAM_BREAK, Failure.STREAM_ERROR])
async def test_a_model_that_fails_after_its_first_word_is_an_error(service: Service, failure: Failure) -> None:
    asked = await service.ask("docs", model=failure.value)
    assert asked.text
    assert isinstance(asked.answer, GenerationFailed)
    assert [request.slug for request in service.space.requests].count(failure.value) == 1
    assert service.telemetry.signals == []


async def test_a_source_that_keeps_failing_is_skipped_and_the_others_are_not(service: Service) -> None:
    service.space.model("writer", reply="x")
    for _ in range(10):
        await service.ask("docs", "status-500", "status-404")
    asked = await service.ask("docs", "status-500", "status-404")
    assert isinstance(asked.answer, Answer)
    assert [reply.status for reply in asked.answer.replies] == [Status.SUCCESS, Status.SKIPPED, Status.ERROR]
    assert "circuit is open for" in (asked.answer.replies[1].error or "")
    assert [request.slug for request in service.space.requests].count("status-500") == 10
    moves = [signal for signal in service.telemetry.signals if isinstance(signal, BreakerStateChanged)]
    assert moves == [BreakerStateChanged(upstream="status-500", state="open")]


async def test_a_source_that_does_not_answer_in_time_is_skipped_after_a_while(space: Space) -> None:
    async with reaching_out() as outbound:
        service = Service(outbound, space, retrieval_timeout_s=0.1)
        service.space.model("writer", reply="x")
        await asyncio.gather(*[service.ask("hang") for _ in range(10)])
        asked = await service.ask("hang")
    assert isinstance(asked.answer, Answer)
    assert [reply.status for reply in asked.answer.replies] == [Status.SKIPPED]


# --- over HTTP


async def test_a_served_model_is_asked_again_as_soon_as_it_says(serve: Any, space: Space) -> None:
    replies = [web.Response(status=status, headers={"Retry-After": "0"}) for status in (503, 429)]
    replies.append(web.json_response({"choices": [{"message": {"content": "All is well."}}]}))
    async with answering(lambda: replies.pop(0)) as url, serve(model_retries=2) as server:
        answer = await server.chat(prompt="Why?", model={"url": url, "slug": "writer", "kind": "openai"})
    assert answer["response"] == "All is well."
    assert replies == []


async def test_a_source_that_is_left_alone_is_an_error_in_chat_with_the_reason(serve: Any, space: Space) -> None:
    request = {"prompt": "Why?", "model": ref(space, "scribe"), "data_sources": [ref(space, "status-500", "alice")]}
    async with serve(breaker_calls=2) as server:
        for _ in range(2):
            await server.chat(**request)
        (info,) = (await server.chat(**request))["retrieval_info"]
    assert (info["path"], info["status"]) == ("alice/status-500", "error")
    assert info["error_message"].startswith("The source has failed too often: its circuit is open for ")
    assert [asked.slug for asked in space.requests].count("status-500") == 2
