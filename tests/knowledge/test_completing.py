"""Passages end where a list, or the code that a sentence introduces, ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.knowledge.completing import MOST, completed
from anabranch.text.units import units


def added(text: str, following: str) -> str:
    return following[: completed(text, following) - len(text)]


@pytest.mark.parametrize(
    ("text", "following", "wanted"),
    [
        ("It tracks:\n\n- requests\n- workers", "\n- errors\n- restarts\n\nThen it ends.", "\n- errors\n- restarts"),
        ("Run this:", "\n\n```\nmake test\n```\n\nIt takes a minute.", "\n\n```\nmake test\n```"),
        (
            "| name | value |\n|---|---|\n| a | 1 |",
            "\n| b | 2 |\n\nThe default is a.",
            "\n| b | 2 |",
        ),
        ("One sentence.", " Another sentence.", ""),
        ("- requests\n- workers", "\n\n# Errors\n\n- 404", ""),
        ("Everything.", "", ""),
        ("", "- a", ""),
    ],
)
def test_a_list_and_the_code_after_its_sentence_are_completed(text: str, following: str, wanted: str) -> None:
    assert added(text, following) == wanted


def test_an_endless_list_is_cut_between_two_items() -> None:
    items = "".join(f"\n- item number {number}" for number in range(500))
    more = added("All of them:\n\n- the first", items)
    assert MOST - 50 < len(more) <= MOST
    assert items.startswith(more + "\n- ")


@given(st.text(alphabet="ab .:-*|\n`#1", max_size=200), st.text(alphabet="ab .:-*|\n`#1", max_size=400))
def test_what_is_added_ends_with_a_unit(text: str, following: str) -> None:
    more = added(text, following)
    assert len(more) <= MOST
    if more:
        ends = {unit.end for unit in units(text + following[:MOST])}
        assert len(text) + len(more) in ends
