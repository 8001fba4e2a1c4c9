"""Unicode normalization in linear time."""

import time
import unicodedata
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.model import Passage
from anabranch.evidence.claims import ReadPassages
from anabranch.knowledge.collection_names import matching
from anabranch.knowledge.model import Caller
from anabranch.pipeline.scoring import folded
from anabranch.policies.answer_cache import normalized
from anabranch.text.instructions import suspected_instructions
from anabranch.text.normal_forms import BECOME_MARKS, MOST_MARKS, normal_form, without_accents
from anabranch.text.reading import plain
from anabranch.text.support import Wording
from anabranch.text.words import terms

SIGNS = st.one_of(
    st.characters(),
    st.sampled_from("a \n-\u0301\u0316\u0308\u0344\u05b0\u3099\u1d15e\uac00\u1100\u1161\u11a8\ufdfa" + BECOME_MARKS),
)
MARKS = st.sampled_from("\u0301\u0316" + BECOME_MARKS)
MANY = 50_000


@given(
    st.lists(SIGNS, max_size=MOST_MARKS), st.lists(st.sampled_from("\u0301\u0316" + BECOME_MARKS), max_size=MOST_MARKS)
)
@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFKD"])
def test_texts_without_long_runs_of_marks_are_normalized_as_unicode_says(
    form: Literal["NFC", "NFKC", "NFKD"], signs: list[str], marks: list[str]
) -> None:
    for text in ("".join(signs), "a" + "".join(marks), "".join(signs) + "-a" + "".join(marks) + "b"):
        assert normal_form(text, form) == unicodedata.normalize(form, text)


def test_every_character_that_becomes_a_mark_counts_as_one() -> None:
    every = [chr(code) for code in range(0x110000)]
    become = [
        one
        for one in every
        if not unicodedata.combining(one) and unicodedata.combining(unicodedata.normalize("NFKD", one)[0])
    ]
    assert "".join(become) == BECOME_MARKS
    assert [one for one in every if unicodedata.combining(one) and one.isalnum()] == []


def test_marks_after_the_thirtieth_of_a_run_are_left_out() -> None:
    assert (
        normal_form("x" + "\u0301" * 31 + "y" + "\u0301" * 31, "NFKD")
        == "x" + "\u0301" * 30 + "y\u0301" + "\u0301" * 29
    )
    assert without_accents("x" + "\u0301" * 1000 + " y") == "x y"


@pytest.mark.parametrize("marks", ["\u0301\u0316", "\u0f73\u0f71", "\uff9e\u0301", "\u0f81", "\u3099\u0301"])
@pytest.mark.parametrize(
    "read",
    [
        terms,
        plain,
        folded,
        normalized,
        suspected_instructions,
        lambda text: Wording("refund").within(text),
        lambda text: matching(text, (), Caller()),
        lambda text: ReadPassages([Passage(source="s", title="Marks", text=text, score=0.9)]),
    ],
)
def test_a_long_run_of_marks_does_not_delay_what_reads_it(read: Callable[[str], object], marks: str) -> None:
    began = time.process_time()
    read("a" + marks * MANY)
    assert time.process_time() - began < 1
