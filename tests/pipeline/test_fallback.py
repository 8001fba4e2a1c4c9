"""A model that fails before its first token, and the model that answers instead."""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
import pytest

from anabranch.domain.contracts import Generator, SystemClock
from anabranch.domain.errors import AnabranchError, FailureKind, GenerationFailed, GenerationReason, ModelNotCalled
from anabranch.domain.events import (
    AnswerEvent,
    Failed,
    FellBack,
    GenerationStarted,
    Token,
    fold,
    unfold,
)
from anabranch.domain.model import (
    ASK,
    Answer,
    Context,
    Delta,
    Endpoint,
    Fallback,
    Passage,
    Prompt,
    Question,
    SourceReply,
    Status,
)
from anabranch.models.extractive import Extractive
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.run import Run
from anabranch.testing import FakeDirectory, FakeGenerator, FakeSource, Recorder

FACT = Passage(source="docs", title="Refunds", text="Refunds take 30 days. Ask the shop.", score=0.9)
WRITER = Endpoint(slug="writer", kind="openai", operator=True)
QUOTES = Endpoint(slug="extractive", kind="extractive", operator=True)
QUESTION = Question(
    text="How long do refunds take?",
    sources=(Endpoint(slug="docs"),),
    model=WRITER,
    fallback=QUOTES,
    refuse=True,
    profile=ASK,
)
TOTAL_S, GENERATION_S = 5.0, 0.05


class FailingGenerator:
    """Fails as it is told, after the given deltas; None is silence."""

    def __init__(self, error: Exception | None, *deltas: Delta) -> None:
        self._error = error
        self._deltas = deltas
        self.cancelled = False

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        for delta in self._deltas:
            yield delta
        if self._error is not None:
            raise self._error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def started(
    generator: Generator, question: Question = QUESTION, total_s: float = TOTAL_S, *passages: Passage
) -> tuple[Run, Recorder]:
    reply = SourceReply(path="docs", status=Status.SUCCESS, passages=passages or (FACT,))
    recorder = Recorder()
    pipeline = Pipeline(
        directory=FakeDirectory({"docs": FakeSource(reply)}, {"writer": generator, "extractive": Extractive()}),
        clock=SystemClock(),
        telemetry=recorder,
        limits=Limits(retrieval_timeout_s=1, generation_timeout_s=GENERATION_S, context_tokens=1000),
    )
    context = Context(correlation_id="c", deadline=time.monotonic() + total_s)
    return Run(pipeline, question, context, recorder).start(), recorder


async def answered(generator: Generator, question: Question = QUESTION) -> tuple[Answer, list[AnswerEvent]]:
    run, _ = started(generator, question)
    async with run.listen() as listener:
        events = [event async for event in listener]
    return await run.value(), events


@pytest.mark.parametrize(
    ("generator", "reason", "message"),
    [
        (FailingGenerator(GenerationFailed("No connection.", FailureKind.DOWN)), "unavailable", "No connection."),
        (FailingGenerator(GenerationFailed("Too many.", FailureKind.BUSY)), "busy", "Too many."),
        (FailingGenerator(GenerationFailed("It denied access (401).")), "refused", "It denied access (401)."),
        (FailingGenerator(GenerationFailed("HTML.", FailureKind.UNUSABLE)), "unusable", "HTML."),
        (FailingGenerator(ModelNotCalled("The model is not called.")), "circuit_open", "The model is not called."),
        (FailingGenerator(GenerationFailed("Broken.", FailureKind.DOWN), Delta(text="")), "unavailable", "Broken."),
        (FakeGenerator([]), "empty", "The model's reply holds no answer."),
        (
            FailingGenerator(None),
            "timeout",
            "the model did not finish within 0.05 seconds (AGGREGATOR_GENERATION_TIMEOUT).",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_model_that_fails_before_its_first_token_is_replaced_by_quotes(
    generator: Generator, reason: GenerationReason, message: str
) -> None:
    answer, events = await answered(generator)
    assert answer.text == "Refunds take 30 days. [1]"
    assert (answer.model, answer.finish_reason, answer.refused) == ("extractive", "stop", False)
    assert answer.fallback == Fallback(failed="writer", reason=reason, message=message)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 0
    (citation,) = answer.citations
    assert answer.passages[0].text[citation.passage_start : citation.passage_end] == "Refunds take 30 days."
    generation = [event for event in events if isinstance(event, GenerationStarted | FellBack | Token)]
    assert generation == [
        GenerationStarted(model="writer"),
        FellBack(model="extractive", fallback=answer.fallback),
        Token(text=answer.text),
    ]
    assert fold(events) == answer
    assert [type(event) for event in unfold(answer)] == [type(event) for event in events]


async def test_generation_time_includes_the_failed_model() -> None:
    answer, _ = await answered(FailingGenerator(None))
    assert answer.timings.generation_ms >= GENERATION_S * 1000


async def test_after_the_first_token_there_is_no_fallback() -> None:
    run, recorder = started(FakeGenerator(["Refunds ", "take "], fail_after=1))
    with pytest.raises(GenerationFailed, match="the model broke"):
        await run.value()
    assert not any(isinstance(event, FellBack) for event in recorder.events)


async def test_a_slow_model_that_has_begun_is_not_replaced() -> None:
    run, _ = started(FailingGenerator(None, Delta(text="Refunds")))
    with pytest.raises(GenerationFailed, match="did not finish"):
        await run.value()


@pytest.mark.parametrize(
    "question",
    [
        msgspec.structs.replace(QUESTION, fallback=None),
        # Without passages there is nothing to quote.
        msgspec.structs.replace(QUESTION, sources=(), refuse=False),
    ],
    ids=["not wanted", "nothing to quote"],
)
async def test_the_failure_is_the_answer_without_a_fallback(question: Question) -> None:
    run, _ = started(FailingGenerator(GenerationFailed("No connection.", FailureKind.DOWN)), question)
    with pytest.raises(GenerationFailed) as raised:
        await run.value()
    assert raised.value.message == "Model generation failed: No connection."
    assert raised.value.details.keys() == {"model_path", "latency_ms"}


async def test_the_total_time_is_not_a_failure_of_the_model() -> None:
    generator = FailingGenerator(None)
    run, recorder = started(generator, QUESTION, GENERATION_S / 2)
    with pytest.raises(AnabranchError) as raised:
        await run.value()
    assert raised.value.code == "deadline_exceeded"
    assert generator.cancelled
    assert not any(isinstance(event, FellBack) for event in recorder.events)


async def test_a_question_that_is_cancelled_is_not_answered_with_quotes() -> None:
    generator = FailingGenerator(None)
    run, recorder = started(generator)
    async with run.listen() as listener:
        async for event in listener:
            if isinstance(event, GenerationStarted):
                break
    with pytest.raises(AnabranchError) as raised:
        await run.value()
    assert raised.value.code == "cancelled"
    assert [type(event) for event in recorder.events][-2:] == [GenerationStarted, Failed]


async def test_quotes_that_do_not_answer_are_a_refusal_that_says_which_model_failed() -> None:
    question = msgspec.structs.replace(QUESTION, text="Who painted the Mona Lisa in Florence?")
    answer, _ = await answered(FailingGenerator(GenerationFailed("Down.", FailureKind.DOWN)), question)
    assert (answer.refused, answer.finish_reason, answer.model) == (True, "abstained", "extractive")
    assert answer.fallback is not None


async def test_a_refusal_cites_nothing_even_if_the_title_that_it_names_looks_like_a_mark() -> None:
    question = msgspec.structs.replace(QUESTION, text="Who painted the Mona Lisa in Florence?", model=QUOTES)
    titled = msgspec.structs.replace(FACT, title="Refunds [1]")
    run, _ = started(FakeGenerator([]), question, TOTAL_S, titled)
    answer = await run.value()
    assert (answer.refused, answer.citations) == (True, ())
    assert "Refunds [1]" in answer.text
