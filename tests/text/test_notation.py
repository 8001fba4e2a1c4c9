"""Equal amounts and times in the notation of the evidence, and numbers with opposite bounds."""

import pytest

from anabranch.text.exact_checks import differences
from anabranch.text.notation import in_notation_of


@pytest.mark.parametrize(
    ("claim", "evidence", "expected"),
    [
        ("The chair costs €199 today.", "| Chair | 199 euros |", "The chair costs 199 euros today."),
        ("It costs 5 euros.", "It costs €5.", "It costs €5."),
        ("It costs EUR 49, not 50.", "It is 49 euros.", "It costs 49 euros, not 50."),
        ("Revenue was £1.2 million.", "a revenue of 1.2 million pounds", "Revenue was 1.2 million pounds."),
        ("The contract lasts one year.", "It runs for 12 months.", "The contract lasts 12 months."),
        ("It closes at 6 pm on Friday.", "9:00 to 18:00", "It closes at 18:00 on Friday."),
        ("It opens at 18:30.", "It opens at 6:30 p.m. and closes at 8 p.m.", "It opens at 6:30 p.m.."),
        ("It costs 6 euros.", "It costs 5 euros.", "It costs 6 euros."),
        ("It closes at 5 pm.", "9:00 to 18:00", "It closes at 5 pm."),
        ("It costs $5.", "It costs €5.", "It costs $5."),
    ],
)
def test_equal_amounts_and_times_are_written_as_in_the_evidence(claim: str, evidence: str, expected: str) -> None:
    assert in_notation_of(claim, evidence).text == expected


def test_places_in_the_new_text_are_found_in_the_claim() -> None:
    claim = "Pay €199 or EUR 49 by 6 pm today."
    asked = in_notation_of(claim, "199 euros, 49 euros, 18:00")
    assert asked.text == "Pay 199 euros or 49 euros by 18:00 today."
    shown = {
        word: claim[slice(*asked.place((at := asked.text.index(word), at + len(word))))]
        for word in ("Pay", "or", "by", "today")
    }
    assert shown == {word: word for word in shown}
    amounts = [claim[slice(*asked.place(after))] for _, after in asked.replaced]
    assert amounts == ["€199", "EUR 49", "6 pm"]
    assert claim[slice(*asked.place((8, 13)))] == "€199"


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("Children over 12 are treated free.", "Children under 12 are treated free."),
        ("Refunds are paid after 30 days.", "Refunds are paid within 30 days of the return."),
        ("It holds more than 5 litres.", "It holds up to 5 litres."),
        ("At least 20 guests may come.", "At most 20 guests may come."),
        ("It takes no more than 3 hours.", "It takes more than 3 hours."),
        ("Revenue fell by 8%.", "Revenue was 1.2 million pounds in 2023, up 8%."),
        ("Profit fell from 150,000 to 200,000.", "Profit fell from 200,000 to 150,000 pounds."),
        ("The shop is open Monday to Saturday.", "The shop is open Monday to Friday."),
        ("It is staffed from 8 am to 8 pm.", "It is staffed from 8 am to 5 pm."),
        ("Write to support@shop.example.", "Ask support: write to help@shop.example."),
    ],
)
def test_what_cannot_both_be_right_is_certain(claim: str, evidence: str) -> None:
    assert any(found.certain for found in differences(claim, evidence, evidence))


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("Children younger than 12 are treated free.", "Children under 12 are treated free."),
        ("The refund arrives within 30 days.", "Refunds are paid within 30 days, or after 30 days by cheque."),
        ("It grew over 12 months.", "It grew within 12 months."),
        ("It takes at most 3 hours.", "It takes no more than 3 hours."),
        ("Sales did not fall by 8%.", "Sales rose by 8%."),
        ("Prices rose by 8%.", "Prices are up 8%."),
        ("After the empire fell in 1031, others ruled.", "It broke up in 1031 and others rose."),
        ("It is open on Wednesday.", "It is open Monday to Friday."),
        ("It is staffed until 5 pm.", "It is staffed from 8:00 to 17:00."),
        ("Write to help@shop.example.", "Write to help@shop.example or call."),
    ],
)
def test_the_same_in_other_words_is_not_certain_to_be_wrong(claim: str, evidence: str) -> None:
    asked = in_notation_of(claim, evidence).text
    assert not any(found.certain for found in differences(asked, evidence, evidence))
