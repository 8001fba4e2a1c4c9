"""The documentation subagent in process: a question goes down the real river, and a planner sees it come."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from anabranch.domain.contracts import Answerer, Emit, SystemClock
from anabranch.domain.errors import DeadlineExceeded, FailureKind, GenerationFailed, InvalidQuestion, UpstreamError
from anabranch.domain.events import Token
from anabranch.domain.model import (
    QUERY,
    Answer,
    Context,
    Endpoint,
    Filters,
    Ground,
    Passage,
    Place,
    Question,
    SourceReply,
    Status,
)
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.verify import Verifier
from anabranch.subagents.documentation import PENDING, DocumentationSubagent
from anabranch.testing import FakeDirectory, FakeEvidence, FakeGenerator, FakeSource, ManualClock, Recorder

TEXT = "Refunds are paid within thirty days. Shipping is free."
PLACE = Place(chunk_id="k-1", collection="handbook", start=100, end=154, tokens=10, url="https://x.example/h")
FOUND = SourceReply(
    path="collections",
    status=Status.SUCCESS,
    passages=(
        Passage(source="handbook", title="Handbook", text=TEXT, score=0.9, document_id="d-1", place=PLACE),
        Passage(source="handbook", title="Annex", text="Nothing of it.", score=0.6, document_id="d-2"),
    ),
)
WORDS = ("Refunds are paid ", "within thirty ", "days [1].")
TEMPLATE = Question(
    text="",
    sources=(Endpoint(slug="collections", kind="collection"),),
    model=Endpoint(slug="writer"),
    top_k=10,
    similarity_threshold=0.0,
    profile=QUERY,
    refuse=True,
)


async def chosen(names: Sequence[str], context: Context) -> tuple[str, ...]:
    return tuple(f"id of {name} for {context.user_id}" for name in names)


def documentation(answerer: Answerer, clock: Any = None) -> DocumentationSubagent:
    return DocumentationSubagent(answerer, clock or SystemClock(), template=TEMPLATE, max_top_k=20, chosen=chosen)


def river(reply: SourceReply = FOUND, writer: FakeGenerator | None = None) -> tuple[Pipeline, FakeSource]:
    source = FakeSource(reply)
    return Pipeline(
        directory=FakeDirectory({"collections": source}, {"writer": writer or FakeGenerator(WORDS)}),
        clock=SystemClock(),
        telemetry=Recorder(),
        limits=Limits(retrieval_timeout_s=10, generation_timeout_s=10, context_tokens=8_000),
    ), source


def envelope(given: Any) -> tuple[Expected, Directive]:
    expected = Expected(key="documentation", result_key="doc", input=msgspec.Raw(json.dumps(given).encode()))
    return expected, Directive(session_id="s", plan_step_id="p", expected=(expected,))


def context(seconds: float = 20) -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + seconds, user_id="alice")


async def told(subagent: DocumentationSubagent, given: Any) -> list[Fragment]:
    return [fragment async for fragment in subagent.work(*envelope(given), context())]


def shown(fragment: Fragment) -> Any:
    return json.loads(bytes(fragment.payload))


async def test_the_documentation_subagent_streams_sources_text_and_answer() -> None:
    pipeline, _ = river()
    fragments = await told(documentation(pipeline), {"question": "When are refunds paid?"})
    searching = [shown(one) for one in fragments if one.status == "in_progress"]
    assert searching == [
        {
            "stage": "retrieval",
            "sources": [{"source": "collections", "status": "pending", "passages": 0}],
            "passages": 0,
            "finished": False,
        },
        {
            "stage": "retrieval",
            "sources": [{"source": "collections", "status": "success", "passages": 2}],
            "passages": 2,
            "finished": False,
        },
        {
            "stage": "retrieval",
            "sources": [{"source": "collections", "status": "success", "passages": 2}],
            "passages": 2,
            "finished": True,
        },
    ]
    *_, last = fragments
    assert [one.status for one in fragments].count("success") == 1
    assert (last.status, last.metrics) == ("success", {"retrieval_count": 2.0})
    answer = shown(last)
    assert (answer["answer"], answer["model"], answer["retrieval_count"]) == ("".join(WORDS), "writer", 2)
    assert answer["refused"] is False
    (citation,) = answer["citations"]
    quote = TEXT[citation["start_char"] - 100 : citation["end_char"] - 100]
    assert citation["quoted_text"] == quote == "Refunds are paid within thirty days"
    assert (citation["document_id"], citation["title"], citation["chunk_id"]) == ("d-1", "Handbook", "k-1")
    assert answer["answer"][citation["answer_start"] : citation["answer_end"]] == "[1]"
    for partial in (shown(one)["answer"] for one in fragments if one.status == "partial"):
        assert "".join(WORDS).startswith(partial)


async def test_a_verified_answer_of_the_documentation_subagent_has_its_faithfulness() -> None:
    said = ("Refunds are paid within thirty days [1]. ", "Penguins swim very well.")
    source = FakeSource(FOUND)
    pipeline = Pipeline(
        directory=FakeDirectory({"collections": source}, {"writer": FakeGenerator(said)}),
        clock=SystemClock(),
        telemetry=Recorder(),
        limits=Limits(retrieval_timeout_s=10, generation_timeout_s=10, context_tokens=8_000),
        verifier=lambda: Verifier(FakeEvidence(), SystemClock()),
    )
    template = msgspec.structs.replace(TEMPLATE, verify=True)
    subagent = DocumentationSubagent(pipeline, SystemClock(), template=template, max_top_k=20, chosen=chosen)
    async with aclosing(subagent.work(*envelope({"question": "When?"}), context())) as fragments:
        *_, last = [fragment async for fragment in fragments]
    payload = msgspec.json.decode(last.payload)
    assert payload["faithfulness_score"] == 0.5
    assert [one["quoted_text"] for one in payload["citations"]] == ["Refunds are paid within thirty days."]


async def test_the_documentation_input_sets_question_collections_and_language() -> None:
    class Asked:
        async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
            self.question = question
            return Answer(text="Yes.", ground=Ground.DOCUMENTS)

    asked = Asked()
    await told(documentation(asked), {"query": "Why?"})
    assert asked.question == msgspec.structs.replace(TEMPLATE, text="Why?")
    everything = {"question": "Why?", "collections": ["handbook"], "top_k": 3, "language": "de-AT", "unknown": [1]}
    await told(documentation(asked), everything)
    assert asked.question == msgspec.structs.replace(
        TEMPLATE,
        text="Why?",
        top_k=3,
        filters=Filters(collections=("id of handbook for alice",)),
        language="de",
        answer_in="de",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "question"),
        ({"question": 5}, "question"),
        ({"question": " "}, "question"),
        ({"question": "x" * 10_001}, "question"),
        ({"question": "Why?", "top_k": 0}, "top_k"),
        ({"question": "Why?", "top_k": 21}, "top_k"),
        ({"question": "Why?", "top_k": "3"}, "top_k"),
        ({"question": "Why?", "collections": ["a"] * 101}, "collections"),
        ({"question": "Why?", "language": "tlh"}, "language"),
        (["question"], "JSON object"),
    ],
    ids=str,
)
async def test_an_invalid_documentation_input_is_refused_with_the_name_of_its_field(given: Any, said: str) -> None:
    with pytest.raises(InvalidQuestion, match=said):
        await told(documentation(river()[0]), given)


async def test_no_passages_is_an_answer_and_failed_sources_are_a_failure() -> None:
    nothing, _ = river(SourceReply(path="collections", status=Status.SUCCESS))
    last = (await told(documentation(nothing), {"question": "Why?"}))[-1]
    assert (last.status, shown(last)["refused"], shown(last)["citations"]) == ("success", True, [])
    broken, _ = river(SourceReply(path="collections", status=Status.ERROR, error="The store is gone."))
    work = documentation(broken).work(*envelope({"question": "Why?"}), context())
    assert [(await anext(work)).status for _ in range(3)] == ["in_progress"] * 3
    with pytest.raises(UpstreamError, match=r"The store is gone\.") as failed:
        await anext(work)
    assert failed.value.failure_kind is FailureKind.DOWN


async def test_a_failed_model_fails_the_documentation_subagent() -> None:
    pipeline, _ = river(writer=FakeGenerator(WORDS, fail_after=1))
    with pytest.raises(GenerationFailed):
        await told(documentation(pipeline), {"question": "Why?"})


# --- the words as they come


class Held:
    """An Answerer that says what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str | None] = asyncio.Queue()
        self.cancelled = False
        self.emitted = 0

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        text = ""
        try:
            while (word := await self.said.get()) is not None:
                await emit(Token(text=word))
                self.emitted += 1
                text += word
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return Answer(text=text, ground=Ground.DOCUMENTS)


async def test_partial_text_is_sent_at_most_ten_times_a_second() -> None:
    held, clock = Held(), ManualClock()
    soon = Context(correlation_id="c", deadline=60.0)
    work = documentation(held, clock).work(*envelope({"question": "Why?"}), soon)
    async with aclosing(work) as fragments:
        held.said.put_nowait("One ")
        assert shown(await anext(fragments)) == {"stage": "generation", "answer": "One "}
        following = asyncio.ensure_future(anext(fragments))
        for word in ("two ", "three "):
            held.said.put_nowait(word)
        async with asyncio.timeout(10):
            while held.emitted < 3:  # noqa: ASYNC110  it announces nothing
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not following.done()
        clock.advance(0.1)
        # It is told without another word having come.
        assert shown(await following) == {"stage": "generation", "answer": "One two three "}
        held.said.put_nowait("four.")
        held.said.put_nowait(None)
        last = await anext(fragments)
        assert (last.status, shown(last)["answer"]) == ("success", "One two three four.")
        assert [one async for one in fragments] == []


async def test_closing_the_documentation_subagent_cancels_the_question() -> None:
    held = Held()
    work = documentation(held).work(*envelope({"question": "Why?"}), context())
    held.said.put_nowait("One ")
    await anext(work)
    await work.aclose()
    assert held.cancelled


async def test_a_slow_reader_of_the_documentation_subagent_delays_the_answer() -> None:
    held = Held()
    async with aclosing(documentation(held).work(*envelope({"question": "Why?"}), context())) as fragments:
        held.said.put_nowait("One ")
        await anext(fragments)
        for _ in range(2 * PENDING):
            held.said.put_nowait("more ")
        async with asyncio.timeout(10):
            while held.emitted < PENDING + 1:  # noqa: ASYNC110  it announces nothing
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert held.emitted == PENDING + 1
        held.said.put_nowait(None)
        last = [one async for one in fragments][-1]
        assert shown(last)["answer"] == "One " + "more " * 2 * PENDING


async def test_the_documentation_subagent_ends_at_its_deadline() -> None:
    held = Held()
    with pytest.raises(DeadlineExceeded):
        async for _ in documentation(held).work(*envelope({"question": "Why?"}), context(0.05)):
            pass
    assert held.cancelled


async def test_an_unexpected_exception_of_the_answerer_is_raised() -> None:
    class Broken:
        async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
            await emit(Token(text="Well"))
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        await told(documentation(Broken()), {"question": "Why?"})
