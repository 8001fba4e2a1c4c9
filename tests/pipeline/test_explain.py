"""An explanation has every passage that a source returned, once, with its place in the prompt or the stage that left it
out."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.contracts import SystemClock
from anabranch.domain.explanation import MAX_EXPLAINED, MAX_TEXT, Explanation, Notes, explained
from anabranch.domain.model import (
    ASK,
    QUERY,
    Answer,
    Context,
    Endpoint,
    Passage,
    Profile,
    Question,
    SourceReply,
    Status,
    Until,
)
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.compact import Compactor
from anabranch.pipeline.prompt import Compaction
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import FakeDirectory, FakeGenerator, FakeSource

words = st.sampled_from(["bees", "bees make honey", "honey " * 60, "hives " * 200, "a", ""])
found = st.builds(
    Passage,
    source=st.sampled_from(["a/x", "b/y"]),
    title=st.sampled_from(["T", "U"]),
    text=words,
    score=st.floats(0, 1),
)
returned = st.lists(st.lists(found, max_size=6).map(tuple), min_size=1, max_size=3)


def answered(
    replies: list[tuple[Passage, ...]],
    profile: Profile,
    *,
    tokens: int = 300,
    compact: int | None = None,
    until: Until = Until.GENERATE,
) -> Answer:
    endpoints = tuple(Endpoint(slug=f"s{index}") for index in range(len(replies)))
    model = Endpoint(slug="model", operator=compact is not None)
    sources = {
        endpoint.path: FakeSource(SourceReply(path=endpoint.path, status=Status.SUCCESS, passages=passages))
        for endpoint, passages in zip(endpoints, replies, strict=True)
    }
    pipeline = Pipeline(
        directory=FakeDirectory(sources, {"model": FakeGenerator("Honey [1].")}),
        clock=SystemClock(),
        telemetry=SilentTelemetry(),
        limits=Limits(
            retrieval_timeout_s=5, generation_timeout_s=5, context_tokens=tokens, query_context_tokens=1_500 + tokens
        ),
        compaction=None if compact is None else Compaction(compact, Compactor().choose),
    )
    question = Question(
        text="What do bees make?", sources=endpoints, model=model, profile=profile, until=until, explain=True
    )
    context = Context(correlation_id="1", deadline=time.monotonic() + 30)

    async def emit(_event: object) -> None:
        pass

    return asyncio.run(pipeline.answer(question, context, emit))


def explanation_of(answer: Answer) -> Explanation:
    assert answer.explanation is not None
    return answer.explanation


@pytest.mark.parametrize("compact", [None, 400])
@pytest.mark.parametrize("profile", [ASK, QUERY], ids=["documents", "numbered"])
@given(replies=returned)
def test_every_passage_has_a_place_in_the_prompt_or_a_stage_that_left_it_out(
    replies: list[tuple[Passage, ...]], profile: Profile, compact: int | None
) -> None:
    answer = answered(replies, profile, compact=compact)
    passages = explanation_of(answer).passages
    keys = [one.key for one in passages]
    assert len(keys) == len(set(keys))
    assert set(keys) == {explained(one).key for reply in replies for one in reply}
    assert all((one.citation_index is None) != (one.left_out is None) for one in passages)
    shown = [one for one in passages if one.citation_index is not None]
    assert [one.citation_index for one in shown] == list(range(1, len(answer.passages) + 1))
    assert [(one.source, one.title) for one in shown] == [(one.source, one.title) for one in answer.passages]
    assert len([one for one in passages if one.left_out == "budget"]) == answer.omitted
    for one in passages:
        assert one.steps[0].stage == "source"
        assert [step.left_out for step in one.steps].count(True) <= 1


def test_without_an_answer_the_ranks_are_those_of_the_result() -> None:
    texts = ("Bees make honey.", "Hives are made of wood.", "Bees make honey.")
    passages = tuple(Passage(source="a/x", title=t, text=t, score=0.9 - at / 9) for at, t in enumerate(texts))
    answer = answered([passages[:2], passages[2:]], ASK, until=Until.MERGE)
    explanation = explanation_of(answer)
    assert [(one.text, one.steps[-1].stage, one.steps[-1].rank) for one in explanation.passages] == [
        ("Bees make honey.", "result", 1),
        ("Hives are made of wood.", "result", 2),
    ]


def test_an_equal_text_names_the_passage_that_was_kept() -> None:
    one, other = (Passage(source=source, title=source, text="Bees make honey.", score=0.9) for source in ("a/x", "b/y"))
    for profile in (ASK, QUERY):
        kept, left_out = explanation_of(answered([(one,), (other,)], profile)).passages
        assert (kept.citation_index, left_out.left_out) == (1, "merge")
        end = left_out.steps[-1]
        assert end.other is not None
        assert (end.other.title, end.note) == ("a/x", "a better passage has the same text")


def test_a_long_explanation_is_cut_and_says_how_many_are_missing() -> None:
    notes = Notes()
    for at in range(1_000):
        long = Passage(source="s" * 5_000, title="t" * 5_000, text=f"{at} " + "word\n" * 5_000, score=0.5)
        notes.add(long, "merge", rank=at + 1)
        if at != 700:
            notes.add(long, "budget", left_out=True)
        else:
            notes.add(long, "prompt", rank=1)
    explanation = notes.explanation()
    assert len(explanation.passages) == MAX_EXPLAINED
    assert explanation.more == 1_000 - MAX_EXPLAINED
    assert explanation.passages[0].citation_index == 1
    assert max(len(one.text) for one in explanation.passages) == MAX_TEXT
    assert max(len(one.title) + len(one.source) for one in explanation.passages) == 400
