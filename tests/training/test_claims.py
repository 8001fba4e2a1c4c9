"""Claims for training are made from sentences: right ones stay right, wrong ones differ in one place."""

import re
from random import Random

import pytest

from training import claims

SENTENCE = "In 1998, the Bank of England was founded by Ann Smith (a lawyer), and it does not close before March."


def test_a_reworded_claim_says_the_same_or_less() -> None:
    words = set(re.findall(r"\w+", SENTENCE.lower()))
    for seed in range(50):
        claim = claims.reworded(SENTENCE, "The bank", Random(seed))
        assert set(re.findall(r"\w+", claim.lower())) <= words


def test_a_wrong_claim_differs_from_the_sentence() -> None:
    passage, elsewhere = "Bob Jones saw 1984 people in Paris.", "In 1903 it was Marie Curie who came."
    wrong = {claims.made_wrong(SENTENCE, passage, elsewhere, Random(seed)) for seed in range(80)}
    assert SENTENCE not in wrong
    assert len(wrong) > 15


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("It costs 5 euros.", {"It costs 2 euros.", "It costs 4 euros.", "It costs 50 euros."}),
        ("It opens in May.", {"It opens in June.", "It opens in July."}),
        ("There are Three of them.", {"There are Four of them.", "There are Two of them."}),
    ],
)
def test_a_number_is_replaced_by_one_of_its_kind(sentence: str, wrong: set[str]) -> None:
    found = {claims.other_number(sentence, "", Random(seed)) for seed in range(200)}
    assert wrong <= found
    assert sentence not in found


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [("It is red.", {"It is not red.", "It is never red."}), ("Nothing here.", {None})],
)
def test_a_sentence_is_negated_at_its_verb(sentence: str, wrong: set[str | None]) -> None:
    assert {claims.negated(sentence, Random(seed)) for seed in range(50)} == wrong


def test_a_negation_is_taken_away() -> None:
    assert "It can be changed." in {claims.negated("It can not be changed.", Random(seed)) for seed in range(20)}


def test_names_in_a_list_are_not_exchanged() -> None:
    assert claims.exchanged_names("We saw Ann and Bob there.", Random(0)) is None
    assert claims.exchanged_names("Then Ann wrote a letter to Bob.", Random(0)) == "Then Bob wrote a letter to Ann."


def test_a_word_is_replaced_by_its_opposite() -> None:
    assert claims.opposite("The option enables caching.", Random(0)) == "The option disables caching."
    assert claims.opposite("Always there.", Random(0)) == "Never there."
