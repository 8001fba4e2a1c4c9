"""The stages, as functions of values."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from anabranch.domain.contracts import RunInThread, SystemClock
from anabranch.domain.errors import GenerationFailed
from anabranch.domain.events import AnswerEvent, SourceReplied, Token, fold
from anabranch.domain.model import (
    CHAT,
    Context,
    Endpoint,
    Ground,
    Message,
    Passage,
    Question,
    SourceReply,
    Status,
    Until,
)
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.cite import cite
from anabranch.pipeline.ground import ground, refusal
from anabranch.pipeline.merge import merge
from anabranch.pipeline.prompt import compose, estimate, surely_fits
from anabranch.pipeline.run import Run
from anabranch.testing import FakeDirectory, FakeGenerator, FakeSource, Recorder

texts = st.text(max_size=30)
found = st.builds(Passage, source=st.sampled_from(["a/x", "b/y"]), title=texts, text=texts, score=st.floats(0, 1))
replied = st.builds(
    SourceReply, path=texts, status=st.just(Status.SUCCESS), passages=st.lists(found, max_size=6).map(tuple)
)


def passage(text: str, source: str = "alice/docs", score: float = 0.9, title: str = "T") -> Passage:
    return Passage(source=source, title=title, text=text, score=score)


def reply(*passages: Passage, path: str = "alice/docs", status: Status = Status.SUCCESS) -> SourceReply:
    return SourceReply(path=path, status=status, passages=passages, error=None if passages else "It broke.")


@given(st.lists(replied, max_size=5))
def test_merge_for_chat_is_by_score_without_exact_duplicates(replies: list[SourceReply]) -> None:
    merged = merge(replies, CHAT)
    everything = [p for r in replies for p in r.passages]
    assert [p.score for p in merged] == sorted((p.score for p in merged), reverse=True)
    assert len({p.text for p in merged}) == len(merged)
    assert {p.text for p in merged} == {p.text for p in everything}
    for kept in merged:
        assert kept.score == max(p.score for p in everything if p.text == kept.text)


def test_equal_scores_keep_the_order_of_the_sources() -> None:
    first, second = passage("one"), passage("two", source="bob/faq")
    assert merge([reply(first), reply(second)], CHAT) == (first, second)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([], Ground.NO_SOURCES),
        ([reply(status=Status.TIMEOUT), reply(status=Status.ERROR)], Ground.ALL_FAILED),
        ([reply(), reply(status=Status.ERROR)], Ground.NOTHING_FOUND),
        ([reply(passage("x"))], Ground.DOCUMENTS),
    ],
)
def test_ground_of_an_answer_by_replies(replies: list[SourceReply], expected: Ground) -> None:
    basis = ground(replies, merge(replies, CHAT))
    assert basis is expected
    assert refusal(basis, replies)


async def composed(
    question: Question, passages: Sequence[Passage], basis: Ground = Ground.DOCUMENTS, budget: int = 32_000
) -> tuple[str, int]:
    prompt = await compose(question, passages, basis, budget)
    return "\n\n".join(f"[{m.role}]\n{m.content}" for m in prompt.messages), prompt.omitted


# What is too weak to answer from never comes as far as a prompt.
@pytest.mark.parametrize("basis", [basis for basis in Ground if basis is not Ground.WEAK])
async def test_chat_prompt_snapshot(basis: Ground, snapshot: SnapshotAssertion) -> None:
    passages = [passage("Refunds take <30> days & more."), passage("Ask us.", "bob/faq", 0.5, "F & A")]
    question = Question(text="How long?", history=(Message(role="user", content="Hi"),))
    shown, _ = await composed(question, passages if basis is Ground.DOCUMENTS else [], basis)
    assert shown == snapshot


@given(st.lists(st.text(alphabet="<>/&document ", max_size=40), min_size=1, max_size=4))
def test_no_document_can_close_its_own_tag(contents: list[str]) -> None:
    passages = [passage(text, title=text) for text in contents]
    shown, _ = asyncio.run(composed(Question(text="q"), passages))
    assert shown.count("</document>") == len(passages)
    assert shown.count("</documents>") == 1


async def test_prompt_budget_drops_the_lowest_documents() -> None:
    passages = [
        passage(f"{name} " + "word " * 200, score=1 - n / 10) for n, name in enumerate(["best", "good", "last"])
    ]
    size = estimate(passages[0].text)
    shown, omitted = await composed(Question(text="q"), passages, budget=int(size * 2.5))
    assert omitted == 1
    assert "best" in shown
    assert "good" in shown
    assert "last" not in shown


async def test_a_document_over_the_whole_budget_does_not_cost_the_others_their_place() -> None:
    shown, omitted = await composed(
        Question(text="q"), [passage("giant " * 5000), passage("small and useful")], budget=500
    )
    assert omitted == 1
    assert "small and useful" in shown


async def test_when_no_document_fits_the_model_is_told_there_are_none() -> None:
    shown, omitted = await composed(Question(text="q"), [passage("giant " * 5000)], budget=500)
    assert omitted == 1
    assert "returned no documents" in shown


@given(st.text(max_size=300) | st.text("ab 1é.", max_size=300), st.integers(0, 300))
def test_an_estimate_exceeds_neither_the_bytes_nor_a_budget_that_it_surely_fits(text: str, budget: int) -> None:
    assert 0 <= estimate(text) <= len(text.encode())
    assert estimate(text) <= budget or not surely_fits(text, budget)


def test_prose_surely_fits_a_budget_of_two_thirds_of_its_bytes_and_noise_does_not() -> None:
    prose = "Refunds take thirty days after the return, and support helps. " * 100
    assert surely_fits(prose, len(prose) * 2 // 3)
    assert not surely_fits("1.5,2!" * 1_000, 4_000)


TEXT = "Our shop opened in 1990. Refunds take 30 days after the return. Ask support for help."


@pytest.mark.parametrize(
    ("answer", "quote"),
    [
        ("A refund is paid within 30 days of the return [alice/docs].", "Refunds take 30 days after the return."),
        ("A refund is paid within 30 days. [alice/docs]", "Refunds take 30 days after the return."),
        ("First this. The shop was opened in 1990 [1].", "Our shop opened in 1990."),
        ("refunds take 30 days after the return [alice/docs]", "Refunds take 30 days after the return"),
        ("Help comes from support [bob/faq, alice/docs].", "Ask support for help."),
        ("Nothing alike [alice/docs].", TEXT),
    ],
)
def test_a_mark_points_at_the_words_that_carry_it(answer: str, quote: str) -> None:
    citations = cite(answer, [passage(TEXT)])
    assert [c.source for c in citations] == ["alice/docs"]
    citation = citations[0]
    assert TEXT[citation.passage_start : citation.passage_end] == quote
    assert answer[citation.start : citation.end].startswith("[")


def test_the_best_of_a_sources_passages_is_cited() -> None:
    passages = [passage("Shipping is free."), passage("Returns cost 5 euros.")]
    assert [c.passage for c in cite("You pay 5 euros for returns [alice/docs].", passages)] == [1]


@pytest.mark.parametrize("answer", ["[mallory/x] [0] [2] [99999999999] [] [ ] [[1] x", "none", "a [b] c"])
def test_unknown_citation_marks_are_text(answer: str) -> None:
    assert {c.start for c in cite(answer, [passage("x")])} <= {answer.find("[1]")}


@given(st.text(alphabet="[]alice/docs1 ,.\nİßx", max_size=200), st.text(alphabet="İßabc .\n", max_size=80))
def test_every_citation_lies_within_answer_and_passage(answer: str, text: str) -> None:
    for citation in cite(answer, [passage(text)]):
        assert 0 <= citation.start < citation.end <= len(answer)
        assert 0 <= citation.passage_start <= citation.passage_end <= len(text)


@pytest.mark.parametrize("hostile", ["[" * 200_000, "[alice/docs]" * 5_000, "a. " * 100_000 + "[1]", "[1" * 100_000])
def test_hostile_answers_are_cited_in_reasonable_time(hostile: str) -> None:
    began = time.process_time()
    cite(hostile, [passage("word. " * 5000)])
    assert time.process_time() - began < 2


def test_of_an_answer_with_very_many_names_in_marks_the_first_are_read() -> None:
    wrong = f"[{','.join('x' * 249)}] "
    assert len(cite(wrong * 10 + "[1]", [passage("word")])) == 1
    assert cite(wrong * 1_000 + "[1]", [passage("word")]) == ()


def test_of_passages_with_very_many_sentences_the_first_are_compared() -> None:
    text = "Refunds take thirty days. " + "No. " * 9_000
    found = cite("Refunds are paid within thirty days [1]. " * 20, [passage(text)])
    quoted = [text[one.passage_start : one.passage_end] for one in found]
    assert quoted == ["Refunds take thirty days."] * 6 + [text] * 14


def pipeline(directory: FakeDirectory, recorder: Recorder, in_thread: RunInThread = asyncio.to_thread) -> Pipeline:
    return Pipeline(
        directory=directory,
        clock=SystemClock(),
        telemetry=recorder,
        limits=Limits(retrieval_timeout_s=0.2, generation_timeout_s=0.2, context_tokens=1000),
        run=in_thread,
    )


def run(
    directory: FakeDirectory, question: Question, in_thread: RunInThread = asyncio.to_thread
) -> tuple[Run, Recorder]:
    recorder = Recorder()
    context = Context(correlation_id="c", deadline=time.monotonic() + 5)
    return Run(pipeline(directory, recorder, in_thread), question, context, recorder).start(), recorder


DOCS = Endpoint(slug="docs", owner="alice")
SLOW = Endpoint(slug="slow", owner="bob")
MODEL = Endpoint(slug="model")


async def test_the_value_is_the_fold_of_the_events() -> None:
    directory = FakeDirectory(
        {"alice/docs": FakeSource(reply(passage(TEXT))), "bob/slow": FakeSource(reply(path="bob/slow"), delay_s=9)},
        {"model": FakeGenerator(["Refunds take ", "30 days ", "[alice/docs]."])},
    )
    asked, recorder = run(directory, Question(text="q", sources=(SLOW, DOCS), model=MODEL))
    answer = await asked.value()
    assert fold(recorder.events) == answer
    assert [r.status for r in answer.replies] == [Status.TIMEOUT, Status.SUCCESS]
    assert [e.index for e in recorder.events if isinstance(e, SourceReplied)] == [1, 0]
    assert answer.citations[0].source == "alice/docs"


@pytest.mark.parametrize(("words", "expected"), [("Yes [1].", []), ("They take 30 days [1]. " * 600, ["cite"])])
async def test_citations_of_a_long_answer_are_looked_for_in_a_thread(words: str, expected: list[str]) -> None:
    works: list[str] = []

    async def in_thread(work: Callable[..., Any], /, *args: Any) -> Any:
        works.append(work.__name__)
        return work(*args)

    directory = FakeDirectory({"alice/docs": FakeSource(reply(passage(TEXT)))}, {"model": FakeGenerator([words])})
    asked, _ = run(directory, Question(text="q", sources=(DOCS,), model=MODEL), in_thread)
    assert (await asked.value()).citations
    assert works == expected


async def test_without_the_evidence_model_a_question_that_asks_for_evidence_keeps_top_k_passages() -> None:
    found = [passage(f"{TEXT} {number}") for number in range(20)]
    directory = FakeDirectory({"docs": FakeSource(reply(*found, path="docs"))}, {})
    collection = Endpoint(slug="docs", kind="collection")
    question = Question(text="q", sources=(collection,), top_k=3, evidence="rank", until=Until.MERGE)
    asked, _ = run(directory, question)
    assert len((await asked.value()).passages) == 3


async def test_a_source_with_a_bug_costs_only_itself() -> None:
    def broken(*_: object) -> SourceReply:
        raise KeyError("a bug")

    directory = FakeDirectory(
        {"alice/docs": FakeSource(reply(passage(TEXT))), "bob/slow": FakeSource(broken)},
        {"model": FakeGenerator(["Yes."])},
    )
    asked, recorder = run(directory, Question(text="q", sources=(SLOW, DOCS), model=MODEL))
    answer = await asked.value()
    assert [r.status for r in answer.replies] == [Status.ERROR, Status.SUCCESS]
    assert [type(error) for error in recorder.crashes] == [KeyError]


async def test_a_model_that_breaks_off_is_an_error_after_its_tokens() -> None:
    directory = FakeDirectory({}, {"model": FakeGenerator(["One ", "two "], fail_after=1)})
    asked, recorder = run(directory, Question(text="q", model=MODEL))
    with pytest.raises(GenerationFailed) as caught:
        await asked.value()
    assert caught.value.details["model_path"] == "model"
    assert [e.text for e in recorder.events if isinstance(e, Token)] == ["One "]


@pytest.mark.parametrize("until", Until)
async def test_refuse_answers_with_a_refusal_when_nothing_was_found(until: Until) -> None:
    directory = FakeDirectory({"alice/docs": FakeSource(reply())}, {})
    asked, recorder = run(directory, Question(text="q", sources=(DOCS,), model=MODEL, refuse=True, until=until))
    answer = await asked.value()
    assert answer.refused is (until is Until.GENERATE)
    assert answer.model is None
    events: list[AnswerEvent] = recorder.events
    assert fold(events) == answer
