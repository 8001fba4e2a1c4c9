"""Which passages the evidence model reads."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.model import Passage
from anabranch.evidence.choice import FEWEST, candidates, passage_features
from anabranch.evidence.weights import probabilities_of_passages
from support.quoted_answers import passage

QUESTION = "When does the Zanzibar ferry leave?"
FERRY = "The ferry to Zanzibar leaves every hour."
HARBOUR = "The harbour was built in 1871. It has two piers."


def chosen(*passages: Passage, limit: int = 8) -> list[int]:
    return candidates(QUESTION, passages, limit)


def test_passages_with_the_words_of_the_question_come_first() -> None:
    passages = [passage(HARBOUR, f"Harbour {number}") for number in range(9)]
    assert chosen(*passages, passage(FERRY, "Ferry"))[0] == 9


def test_a_passage_whose_heading_has_the_words_comes_before_one_without() -> None:
    headed = passage("They leave every hour.", "Timetable", headers=("The Zanzibar ferry",))
    assert chosen(passage("They leave every hour.", "Timetable"), headed)[0] == 1


def test_one_that_is_much_more_similar_than_the_others_leaves_them_unread() -> None:
    passages = [passage(HARBOUR, f"Harbour {number}", near=0.1) for number in range(9)]
    assert chosen(passage(FERRY, "Ferry", near=0.9), *passages) == list(range(FEWEST))


def test_passages_that_look_the_same_are_read_in_their_order_up_to_the_limit() -> None:
    passages = [passage(HARBOUR, f"Harbour {number}") for number in range(20)]
    assert chosen(*passages) == list(range(8))


def test_a_source_that_tells_no_scores_is_read_in_its_order() -> None:
    passages = [Passage(source="ann/docs", title=f"Page {number}", text=HARBOUR, score=0.5) for number in range(5)]
    assert chosen(*passages)[:FEWEST] == list(range(FEWEST))


def test_what_was_judged_before_is_judged_again_and_nothing_else() -> None:
    judged = msgspec.structs.replace(passage(HARBOUR), evidence=0.1)
    assert chosen(judged, passage(FERRY), judged) == [0, 2]


@given(
    st.text(max_size=40), st.lists(st.tuples(st.text(max_size=60), st.sampled_from("ab"), st.floats(-1, 1)), max_size=9)
)
def test_any_question_to_any_passages(question: str, texts: list[tuple[str, str, float]]) -> None:
    passages = [passage(text, source=source, near=near) for text, source, near in texts]
    order = candidates(question, passages, 4)
    assert len(set(order)) == len(order)
    assert min(FEWEST, len(passages)) <= len(order) <= 4
    probable = probabilities_of_passages(passage_features(question, passages))
    assert sum(probable) == pytest.approx(1.0 if passages else 0.0)
    assert order == candidates(question.upper().lower(), passages, 4) or question.upper().lower() != question.lower()


def test_the_first_two_of_the_search_are_read_whatever_headings_say() -> None:
    found = [passage("It runs.", f"Page {number}", near=0.6) for number in range(2)]
    headed = [passage("It runs.", "The Zanzibar ferry leaves", near=0.6) for _ in range(12)]
    assert {0, 1} <= set(chosen(*found, *headed))
    assert {0, 1} <= set(chosen(*found, *headed, limit=4))
    assert len(chosen(*found, *headed, limit=1)) == 1
