"""The guard: what an answer can stand on, and what is said when it cannot."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.model import Ground, Passage, SourceReply, Status
from anabranch.pipeline.ground import BEST, ground, refusal, similarity
from anabranch.text.messages import LANGUAGES


def passages(*scores: float) -> list[Passage]:
    return [Passage(source="a", title="T", text=str(at), score=score) for at, score in enumerate(scores)]


def replies(answered: int, failed: int = 0) -> list[SourceReply]:
    states = [Status.SUCCESS] * answered + [Status.TIMEOUT] * failed
    return [SourceReply(path=str(at), status=status) for at, status in enumerate(states)]


@pytest.mark.parametrize(
    ("scores", "threshold", "expected"),
    [
        ((0.9, 0.8), None, Ground.DOCUMENTS),
        ((0.1,), None, Ground.DOCUMENTS),
        ((0.6, 0.5), 0.55, Ground.DOCUMENTS),
        ((0.55, 0.54), 0.55, Ground.WEAK),
        ((0.95, 0.3, 0.3, 0.3), 0.55, Ground.DOCUMENTS),
        ((0.6, 0.4, 0.4, 0.4, 0.4), 0.55, Ground.WEAK),
        ((0.0, 0.0), 0.55, Ground.WEAK),
        ((0.1,), 0.0, Ground.DOCUMENTS),
        ((0.999,), 1.0, Ground.WEAK),
    ],
)
def test_guard_threshold_compares_the_mean_similarity(
    scores: tuple[float, ...], threshold: float | None, expected: Ground
) -> None:
    assert ground(replies(1), passages(*scores), threshold) is expected


@given(st.lists(st.floats(0, 1), min_size=1, max_size=BEST))
def test_guard_similarity_lies_between_mean_and_best(scores: list[float]) -> None:
    found = similarity(passages(*scores))
    assert 0 <= found <= max(scores) + 1e-9
    assert found >= sum(scores) / len(scores) - 1e-9 or not sum(scores)


@given(st.floats(0.01, 1), st.integers(1, 9))
def test_guard_similarity_of_equal_scores_is_their_mean(score: float, count: int) -> None:
    assert similarity(passages(*[score] * count)) == pytest.approx(score)


@given(st.lists(st.floats(0.6, 1), min_size=BEST, max_size=9), st.lists(st.floats(0, 0.3), max_size=40), st.randoms())
def test_irrelevant_sources_do_not_lower_the_guard_similarity(
    good: list[float], beside: list[float], chance: random.Random
) -> None:
    mixed = [*good, *beside]
    chance.shuffle(mixed)
    assert ground(replies(9), passages(*mixed), 0.55) is Ground.DOCUMENTS
    assert similarity(passages(*mixed)) == pytest.approx(similarity(passages(*good)))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (replies(0), Ground.NO_SOURCES),
        (replies(0, failed=2), Ground.ALL_FAILED),
        (replies(1, failed=1), Ground.NOTHING_FOUND),
        (replies(2), Ground.NOTHING_FOUND),
        ([SourceReply(path="collections", status=Status.SUCCESS, empty=True)], Ground.NO_SOURCES),
        ([SourceReply(path="collections", status=Status.SUCCESS, empty=True), *replies(1)], Ground.NOTHING_FOUND),
    ],
)
def test_guard_threshold_without_passages_changes_nothing(asked: list[SourceReply], expected: Ground) -> None:
    assert ground(asked, [], 0.55) is ground(asked, []) is expected


@pytest.mark.parametrize(
    ("missing", "asked", "text"),
    [
        (
            Ground.NO_SOURCES,
            replies(0),
            "No source was asked, so there is nothing to answer from. Name at least one (--source, sources or "
            "data_sources), or add documents with “anabranch ingest FOLDER --collection NAME” or POST /v1/ingest and "
            "ask those (anabranch ask, POST /v1/query).",
        ),
        (
            Ground.NO_SOURCES,
            [SourceReply(path="collections", status=Status.SUCCESS, empty=True)],
            "There are no documents here that you can read, so there is nothing to answer from. Add some with "
            "“anabranch ingest FOLDER --collection NAME” or POST /v1/ingest, or ask other sources that you may use "
            '(--source, or "sources": "all").',
        ),
        (Ground.ALL_FAILED, replies(0, 1), "The source did not answer, so there is nothing to answer from."),
        (Ground.ALL_FAILED, replies(0, 3), "None of the 3 sources answered, so there is nothing to answer from."),
        (Ground.NOTHING_FOUND, replies(1), "Nothing that answers this was found in the source."),
        (Ground.NOTHING_FOUND, replies(4), "Nothing that answers this was found in all 4 sources."),
        (Ground.NOTHING_FOUND, replies(3, 1), "Nothing that answers this was found in 3 of 4 sources."),
        (Ground.WEAK, replies(2), "What was found is not close enough to the question to answer from."),
    ],
)
def test_a_refusal_says_what_is_missing(missing: Ground, asked: list[SourceReply], text: str) -> None:
    assert refusal(missing, asked) == refusal(missing, asked, "en") == refusal(missing, asked, "tlh") == text
    others = {refusal(missing, asked, language) for language in LANGUAGES}
    assert len(others) == len(LANGUAGES)
    counts = [word for word in text.split() if word.isdecimal()]
    assert all(count in other for other in others for count in counts)


@pytest.mark.parametrize("missing", Ground)
@pytest.mark.parametrize("language", LANGUAGES)
def test_refusals_exist_in_every_language(missing: Ground, language: str) -> None:
    assert refusal(missing, replies(1, 1), language)


def test_a_refusal_in_german() -> None:
    assert refusal(Ground.NOTHING_FOUND, replies(3, 1), "de-AT") == (
        "In 3 von 4 Quellen wurde nichts gefunden, was diese Frage beantwortet."
    )
