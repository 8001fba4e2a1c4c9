"""Numbers in one form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.text.plain_numbers import plain_numbers


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Fifty-one panels", "51 panels"),
        ("twenty three of 1,250", "23 of 1250"),
        ("2,500,000 and 3,000.5", "2500000 and 3000.5"),
        ("three of 1,25 or 1,2345", "three of 1,25 or 1,2345"),
        ("the twenty-first, ninetyish, 12,345,67", "the twenty-first, ninetyish, 12,345,67"),
    ],
)
def test_numbers_are_written_in_digits(text: str, plain: str) -> None:
    assert plain_numbers(text)[0] == plain


@given(st.text(st.sampled_from("1,0 fifty-one."), max_size=40))
def test_places_lead_back_to_the_text(text: str) -> None:
    plain, places = plain_numbers(text)
    assert len(places) == len(plain) + 1
    assert places == sorted(places)
    assert places[-1] == len(text)
    if plain == text:
        assert places == list(range(len(text) + 1))
