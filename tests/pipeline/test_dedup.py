"""Which texts are kept: exactly those of the plain greedy loop, at a fraction of its price, and never at any price."""

import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from anabranch.pipeline import dedup
from anabranch.pipeline.dedup import RUN, Distinct, furthest, sketches
from support.examples import examples

ALPHABETS = (
    "ab",
    "abcdefghijklmnopqrstuvwxyz    ",
    "aé\u0301\u0316ñ ß",
    "水の流れ川本流",
    "😀😁👩\u200d🚀\U0001f3fd",
    "a\ud800\udc00b",
    "a\x00\n ",
)
THRESHOLDS = (0.0, 0.2, 1 / 3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)


def plainly(texts: Sequence[str], threshold: float) -> list[int]:
    """The definition: against everything kept, one by one."""
    kept: list[int] = []
    for index, text in enumerate(texts):
        if not any(text == texts[one] or similarity(text, texts[one]) > threshold for one in kept):
            kept.append(index)
    return kept


def similarity(one: str, other: str) -> float:
    return 1 - Levenshtein.distance(one, other) / max(len(one), len(other))


def edited(text: str, edits: int, alphabet: str, chance: random.Random) -> str:
    """At most so many edits away; now and then all of them at one end, so that everything else is shifted."""
    signs = list(text)
    at_one_end = chance.choice((None, None, 0, -1))
    for _ in range(edits):
        at = chance.randrange(len(signs) + 1) if at_one_end is None else min(len(signs), at_one_end % (len(signs) + 1))
        what = chance.choice(("insert", "delete", "replace"))
        if what == "insert":
            signs.insert(at, chance.choice(alphabet))
        elif at < len(signs):
            signs[at : at + 1] = [] if what == "delete" else [chance.choice(alphabet)]
    return "".join(signs)


def near_the_edge(seed: int, threshold: float, longest: int, count: int) -> list[str]:
    """Texts, and others that are about as far from one of them as they may be."""
    chance = random.Random(seed)
    alphabet = chance.choice(ALPHABETS)
    texts = [""] if chance.random() < 0.3 else ["x"]
    while len(texts) < count:
        if chance.random() < 0.3:
            texts.append("".join(chance.choices(alphabet, k=chance.randrange(longest))))
            continue
        text = chance.choice(texts)
        edge = round((1 - threshold) * len(text))
        texts.append(edited(text, max(0, edge + chance.randrange(-2, 3)), alphabet, chance))
    return texts


@settings(max_examples=examples(150))
@given(st.integers(0, 2**32), st.sampled_from(THRESHOLDS) | st.floats(0, 1), st.sampled_from([12, 80, 400]))
def test_dedup_equals_the_pairwise_loop(seed: int, threshold: float, longest: int) -> None:
    texts = near_the_edge(seed, threshold, longest, count=45)
    assert list(Distinct(texts, threshold)) == plainly(texts, threshold)


@given(st.lists(st.text(st.characters(exclude_categories=[]), max_size=12), max_size=20), st.sampled_from(THRESHOLDS))
@example(["", "", "a", "a"], 0.0)
@example(["abcde", "abcdx"], 0.8)
@example(["abcdefghij", "abcdefghix", "abcdefghi"], 0.9)
@example(["a", "b"], 0.0)
def test_dedup_equals_the_pairwise_loop_for_any_texts(texts: list[str], threshold: float) -> None:
    assert list(Distinct(texts, threshold)) == plainly(texts, threshold)


@pytest.mark.parametrize("threshold", [0.8, 0.9, 0.55])
def test_dedup_equals_the_pairwise_loop_for_long_texts(threshold: float) -> None:
    texts = near_the_edge(7, threshold, longest=2_000, count=90) + list(results(90, seed=3))
    assert list(Distinct(texts, threshold)) == plainly(texts, threshold)


def test_dedup_keeps_a_similarity_equal_to_the_threshold() -> None:
    assert similarity("abcde", "abcdx") == 0.8
    assert list(Distinct(["abcde", "abcdx"], 0.8)) == [0, 1]
    assert list(Distinct(["abcde", "abcdx"], 0.79)) == [0]


@given(st.integers(1, 3_000), st.sampled_from(THRESHOLDS) | st.floats(0, 1))
def test_dedup_rounds_like_the_definition(length: int, threshold: float) -> None:
    bound = int(furthest(np.array([length]), threshold)[0])
    assert all((1 - distance / length > threshold) == (distance <= bound) for distance in range(length + 1))


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_dedup_lower_bounds_never_exceed_the_distance(seed: int, left_off: int) -> None:
    one, other, *_ = near_the_edge(seed, 0.7, longest=300, count=8)[-2:]
    distance = Levenshtein.distance(one, other)
    left, right = np.unpackbits(sketches([one, other]), axis=1).astype(bool)
    assert max((left & ~right).sum(), (right & ~left).sum()) <= RUN * distance
    left_off = min(left_off, len(one), len(other))
    assert Levenshtein.distance(one[: len(one) - left_off], other[: len(other) - left_off]) <= distance


def test_dedup_yields_the_first_texts_before_reading_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(texts: Sequence[str]) -> dedup.Sketches:
        read.extend(texts)
        return sketches(texts)

    monkeypatch.setattr(dedup, "sketches", noted)
    assert len(list(islice(Distinct(list(results(1_000)), 0.8), 30))) == 30
    assert len(read) <= 96


def test_after_its_budget_dedup_drops_only_equal_texts() -> None:
    texts = list(results(200))
    texts += texts[:50]
    whole = list(Distinct(texts, 0.8))
    some = list(Distinct(texts, 0.8, budget=4_000_000))
    assert some == list(Distinct(texts, 0.8, budget=4_000_000))
    assert some[:30] == whole[:30]
    assert set(whole) < set(some) < set(range(200))
    assert list(Distinct(texts, 0.8, budget=0)) == [n for n, text in enumerate(texts) if texts.index(text) == n]


@given(st.integers(0, 2**32), st.sampled_from(THRESHOLDS), st.sampled_from([12, 400]))
def test_dedup_says_which_kept_text_each_one_repeats(seed: int, threshold: float, longest: int) -> None:
    texts = near_the_edge(seed, threshold, longest=longest, count=40)
    distinct = Distinct(texts, threshold)
    kept = list(distinct)
    assert sorted([*kept, *distinct.left_out]) == list(range(len(texts)))
    for index, other in distinct.left_out.items():
        assert other in kept
        assert other < index
        assert texts[index] == texts[other] or similarity(texts[index], texts[other]) > threshold


@pytest.mark.parametrize("count", [3, 400])
def test_dedup_keeps_similar_texts_that_do_not_agree(count: int) -> None:
    texts = [f"The deposit of the tenant is {number} euros, to be paid before moving in." for number in range(count)]
    assert list(Distinct(texts, 0.8)) == [0]
    assert list(Distinct(texts, 0.8, agree=lambda _one, _other: False)) == list(range(count))
    even = Distinct([*texts, *texts], 0.8, agree=lambda one, other: one % 2 == other % 2)
    assert list(even) == [0, 1]
    assert all(index % 2 == other % 2 for index, other in even.left_out.items() if index < count)


def test_dedup_reports_whether_it_is_complete() -> None:
    texts = list(results(200))
    for bounds, complete in (({}, True), ({"budget": 4_000_000}, False), ({"until": time.monotonic()}, False)):
        found = Distinct(texts, 0.8, **bounds)
        assert len(set(found)) > 30
        assert found.complete is complete
    assert Distinct(["a", "b"], 1.0).complete


def test_dedup_of_hostile_texts_stays_within_its_budget() -> None:
    """Each is just different enough from every other one, which takes longest to find out."""
    chance = random.Random(5)
    text = "".join(chance.choices("abcd", k=2_000))
    texts = [edited(text, 330, "wxyz", chance) for _ in range(300)]
    started = time.process_time()
    assert len(list(Distinct(texts, 0.8, budget=100_000_000))) > 200
    assert time.process_time() - started < 1.5


def test_dedup_of_a_thousand_results_is_fast() -> None:
    """Five times what it may take; the plain loop takes a hundred times as much."""
    texts = list(results(1_000))
    started = time.process_time()
    assert len(list(islice(Distinct(texts, 0.8), 30))) == 30
    first = time.process_time()
    assert 700 <= len(list(Distinct(texts, 0.8))) < 900
    assert first - started < 0.25
    assert time.process_time() - first < 1.5


def results(count: int, seed: int = 1) -> Iterator[str]:
    """Made-up text of 200 to 2,000 characters, three in ten of them another one with some words changed."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("etaoinshrdlcumwfgypbvk", k=2 + min(9, int(n**0.25)))) for n in range(5_000)]
    weights = [1 / (n + 3) for n in range(len(words))]
    made: list[list[str]] = []
    for _ in range(count):
        if made and chance.random() < 0.3:
            rate = chance.random() * 0.3
            again = [chance.choice(words) if chance.random() < rate else word for word in chance.choice(made)]
        else:
            again = chance.choices(words, weights, k=chance.randrange(40, 330))
        made.append(again)
        yield " ".join(again)[:2_000]
