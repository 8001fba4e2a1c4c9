"""Answers compared with reference answers, as SQuAD's evaluation does."""

import pytest

from anabranch.text.answer_match import containment, token_f1, tokens


def test_case_punctuation_and_articles_do_not_count() -> None:
    assert tokens("The  River's, an Anabranch!") == ["rivers", "anabranch"]
    assert tokens("The A") == ["the", "a"]


@pytest.mark.parametrize(
    ("answer", "references", "found"),
    [
        ("It was built by Marta Olsen, in 1994.", ["marta olsen"], 1.0),
        ("It was built by Marta and Ole Olsen.", ["Marta Olsen"], 0.0),
        ("We know it.", ["no"], 0.0),
        ("Within 30 days.", ["a month", "30 days"], 1.0),
        ("", ["30 days"], 0.0),
        ("Anything.", [], 0.0),
        ("Anything.", ["..."], 0.0),
    ],
)
def test_an_answer_contains_a_reference_as_whole_words_in_order(
    answer: str, references: list[str], found: float
) -> None:
    assert containment(answer, references) == found


def test_token_f1_is_that_of_the_best_reference() -> None:
    # Two of four words are the reference's two: precision 1/2, recall 1.
    assert token_f1("Within 30 days, then", ["never", "30 days"]) == pytest.approx(2 / 3)
    assert token_f1("30 30 30", ["30"]) == pytest.approx(0.5)
    assert token_f1("Other words", ["30 days"]) == 0.0
    assert token_f1("", [""]) == 0.0
