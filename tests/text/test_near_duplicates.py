"""When two texts say the same: how similar they are, and the words that make a difference however similar they are."""

import time

import pytest

from anabranch.text.near_duplicates import decisive_words, similarity

CLAUSE = (
    "The tenant pays a deposit of {} euros. It is returned {} months after the keys are handed over, and it bears {} "
    "interest. Repairs of the roof, of the walls and of the windows are paid by the landlord."
)


def test_similarity_is_one_minus_distance_over_the_longer_length() -> None:
    assert similarity("abcdefghij", "abcdefghij") == 1
    assert similarity("abcdefghij", "abcdefghix") == 0.9
    assert similarity("abcdefghij", "abcdefghi") == 0.9
    assert similarity("abc", "xyz") == 0
    assert similarity("abcdefghij", "abcdefghix", least=0.95) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (CLAUSE.format("500", "three", "no"), CLAUSE.format("600", "three", "no")),
        (CLAUSE.format("500", "three", "no"), CLAUSE.format("500", "four", "no")),
        (CLAUSE.format("500", "three", "no"), CLAUSE.format("500", "three", "some")),
        ("It costs $5.", "It costs €5."),
        ("The limit is 5 kg.", "The limit is -5 kg."),
        ("Version 1.2 is supported.", "Version 1.3 is supported."),
        ("You can't return it.", "You can return it."),
        ("You can\u2019t return it.", "You can return it."),
        ("The shop opens on Monday.", "The shop opens on Sunday."),
        ("Das Gerät ist wasserdicht.", "Das Gerät ist nicht wasserdicht."),
        ("Le chien aboie.", "Le chien n'aboie pas."),
        ("这个产品可以退货。", "这个产品不可以退货。"),
        ("价格是5元。", "价格是6元。"),
        ("From 5 to 6.", "From 6 to 5."),
    ],
)
def test_texts_with_other_numbers_negations_or_dates_say_different_things(one: str, other: str) -> None:
    assert decisive_words(one) != decisive_words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The big house has 3 doors.", "The large house has *3* doors"),
        ("It is not open (never on Monday).", "It's NOT open, never on Monday!"),
        ("colour", "color"),
        ("价格是5元质量很好。", "价格是5元质量挺好。"),
        ("", "words only"),
    ],
)
def test_other_differences_are_not_decisive(one: str, other: str) -> None:
    assert decisive_words(one) == decisive_words(other)


@pytest.mark.parametrize("text", ["a" * 300_000, "1" * 300_000, "é1" * 150_000, "不" * 300_000, "1.,:/" * 60_000])
def test_a_long_word_takes_no_time(text: str) -> None:
    begin = time.process_time()
    decisive_words(text)
    assert time.process_time() - begin < 1
