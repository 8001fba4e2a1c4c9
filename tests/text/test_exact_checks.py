"""Exact checks of a claim against evidence: what differs, and what is the same in another form."""

import re
import sys
from collections import Counter
from itertools import product
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.text.exact_checks import differences
from anabranch.text.reading import ExactDifference
from support.examples import examples


def kinds(claim: str, evidence: str, context: str = "") -> set[str]:
    return {difference.kind for difference in differences(claim, evidence, context)}


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("The lake holds 1,500 boats.", "There are 1.5 thousand boats on the lake."),
        ("The lake holds 1500 boats.", "Fifteen hundred boats are on the lake."),
        ("One third of the members left.", "Of the members, 33% left."),
        ("Some 33.3 percent of the members left.", "A third of the members left."),
        ("The farm kept two dozen goats.", "On the farm were 24 goats."),
        ("She won the race twice.", "She won the race two times."),
        ("It was his seventh goal.", "It was his 7th goal."),
        ("Between 10 and 20 guests came.", "10\u201320 guests came."),
        ("About 30 ships sank.", "31 ships sank."),
        ("Nine out of ten buyers agreed.", "90% of buyers agreed."),
        ("The war lasted five years.", "The war began in 1990 and ended in 1995."),
        ("Three options exist.", "The options are red, green and blue."),
        ("In total 42 people signed.", "30 men and 12 women signed."),
        ("The trip takes 1 hour.", "The trip takes 60 minutes."),
        ("The road is 1 km long.", "The road is 1000 m long."),
        ("The disk has 0.5 GB.", "The disk has 512 MB."),
        ("The disk has 0.5 GB.", "The disk has 500 MB."),
        ("The pipe is 10 to 20 cm wide.", "The pipe is 10-20 cm wide."),
        ("The tower opened on March 4, 1998.", "On 4 March 1998 the tower opened."),
        ("The tower opened on 4 Mar 1998.", "Opening date of the tower: 1998-03-04."),
        ("The style arose in the 18th century.", "The style arose in the 1700s."),
        ("The band played in the 1990s.", "The band played in 1994."),
        ("It takes 1 h 30 min.", "It takes 90 minutes."),
        ("It lasted half a year.", "It lasted six months."),
        ("He came nine days later, on 17 June 2001.", "He left on 8 June 2001 and came on 17 June 2001."),
    ],
)
def test_the_same_number_or_date_in_another_form_is_no_difference(claim: str, evidence: str) -> None:
    assert differences(claim, evidence) == ()


@pytest.mark.parametrize(
    ("claim", "evidence", "kind"),
    [
        ("The lake holds 1,600 boats.", "There are 1,500 boats on the lake.", "number"),
        ("Two thirds of the members left.", "Of the members, 33% left.", "number"),
        ("The farm had two barns.", "The farm had three barns.", "number"),
        ("It was his sixth goal.", "It was his 7th goal.", "number"),
        ("The fix is in version 3.11.4.", "The fix is in version 3.11.2.", "number"),
        ("It has 12 doors and 40 windows.", "It has 40 doors and 12 windows.", "number"),
        ("It needs Python 3.10.", "It needs Python 3.1.", "number"),
        ("The road is 5 miles long.", "The road is 5 km long.", "unit"),
        ("The call takes 30 s.", "The call takes 30 ms.", "unit"),
        ("The file has 20 GB.", "The file has 20 MB.", "unit"),
        ("The report appears weekly.", "The report appears every month.", "unit"),
        ("The tower opened on March 5, 1998.", "On 4 March 1998 the tower opened.", "date"),
        ("The tower opened in May 1998.", "The tower opened in March 1998.", "date"),
        ("The shop opens on Monday.", "The shop opens on Tuesday.", "date"),
        ("The tower opened in 1999.", "The tower opened in 1998.", "date"),
        ("The style arose in the 17th century.", "The style arose in the 1800s.", "date"),
    ],
)
def test_another_number_unit_or_date_is_a_difference(claim: str, evidence: str, kind: str) -> None:
    assert kinds(claim, evidence) == {kind}


CURRENCIES = (
    ("12 dollars", "$12", "12 USD", "USD 12", "US$12", "12-dollar", "twelve dollars", "12 US dollars"),
    ("12 euros", "\u20ac12", "12 EUR", "EUR 12", "12 \u20ac", "twelve euros"),
    ("12 pounds", "\u00a312", "12 GBP", "GBP 12"),
    ("12 yen", "\u00a512", "12 JPY", "JPY 12"),
    ("12 francs", "12 CHF", "CHF 12"),
)


@pytest.mark.parametrize("claimed", CURRENCIES, ids=lambda forms: forms[0])
@pytest.mark.parametrize("stated", CURRENCIES, ids=lambda forms: forms[0])
def test_another_currency_is_another_unit_in_every_form(claimed: tuple[str, ...], stated: tuple[str, ...]) -> None:
    for price, evidence in product(claimed, stated):
        found = kinds(f"Admission costs {price} for adults.", f"Admission costs {evidence} for adults.")
        assert ("unit" in found) == (claimed is not stated), (price, evidence)
        assert found <= {"unit", "name"}
        assert claimed is not stated or not found, (price, evidence)


def test_a_price_in_two_currencies_supports_both_and_not_their_mixture() -> None:
    evidence = "The fee is 30 euros (33 dollars) a day."
    assert kinds("The fee is 30 dollars a day.", evidence) == {"unit"}
    assert kinds("The fee is \u20ac33 a day.", evidence) == {"unit"}
    assert differences("The fee is $33 a day.", evidence) == ()
    assert differences("The fee is 30 EUR a day.", evidence) == ()


def test_a_number_of_the_context_is_not_missing_unless_the_evidence_has_another() -> None:
    assert differences("It cost 40 dollars.", "It was cheap.", "A price of 40 dollars was asked.") == ()
    assert kinds("It opened in 1990.", "It opened in 1980.", "It closed in 1990.") == {"date"}


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("In Geneva the WHO met.", "The World Health Organization met in Geneva, as Kofi Annan asked."),
        ("Yesterday the World Health Organization met.", "The WHO met with Anna."),
        ("He moved to the United States.", "He moved to the U.S. with Anna."),
        ("Yesterday the French won in Rome.", "France won in Rome against Spain."),
        ("The prize went to Curie.", "Marie Curie received the prize in Stockholm."),
        ("Set `max_size` to enable it.", "The option max_size enables the Cache."),
        ("It reads the Registers' values.", "The values of the Register are read by Anna."),
    ],
)
def test_another_form_of_a_name_is_no_difference(claim: str, evidence: str) -> None:
    assert differences(claim, evidence) == ()


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("The prize went to Meitner.", "The prize went to Curie."),
        ("It raises a KeyError.", "It raises a ValueError."),
        ("Pass --force to the tool.", "Pass --quiet to the tool."),
        ("Call `open_file` first.", "Call `close_file` first, then `read_all`."),
    ],
)
def test_a_name_that_stands_nowhere_is_a_difference(claim: str, evidence: str) -> None:
    assert kinds(claim, evidence) == {"name"}


def test_a_name_of_the_context_is_not_invented() -> None:
    assert differences("In May he met Meitner.", "In May he met her in Vienna.", "Lise Meitner was a physicist.") == ()


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("The server does not store passwords.", "The server stores passwords."),
        ("The server stores passwords.", "The server does not store passwords."),
        ("The cache is never cleared.", "The cache is cleared at midnight."),
        ("The second key is unlikely to work.", "The second key is likely to work."),
        ("The door can't be opened.", "The door can be opened by hand."),
    ],
)
def test_a_negation_on_one_side_only_is_a_difference(claim: str, evidence: str) -> None:
    assert kinds(claim, evidence) == {"negation"}


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("The server fails to store passwords.", "The server does not store passwords."),
        ("The pump runs without oil.", "The pump needs no oil."),
        ("No, the server keeps passwords.", "The server keeps passwords."),
        ("It is not only fast but safe.", "It is fast and safe."),
        ("The key is invalid.", "The key is not valid."),
        ("No river is longer than the Nile.", "The Nile is the longest river."),
        ("Tea is drunk instead of coffee.", "People do not drink coffee but tea."),
    ],
)
def test_the_same_negation_in_other_words_is_no_difference(claim: str, evidence: str) -> None:
    assert differences(claim, evidence) == ()


@pytest.mark.parametrize(
    ("claim", "evidence", "kind"),
    [
        ("The valve opens after the pump starts.", "The valve opens before the pump starts.", "direction"),
        ("Prices in the region decreased.", "In the region, prices rose sharply.", "direction"),
        ("The list is in ascending order.", "The list is in descending order.", "direction"),
        ("Logging is disabled by default.", "By default, logging is enabled.", "direction"),
        ("All tickets of the museum are free.", "Some tickets of the museum are free.", "quantifier"),
        (
            "A password of at most nine letters is needed.",
            "A password of at least nine letters is needed.",
            "quantifier",
        ),
    ],
)
def test_an_opposite_word_about_the_same_thing_is_a_difference(claim: str, evidence: str, kind: str) -> None:
    assert kind in kinds(claim, evidence)


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        ("Prices in the region went up.", "In the region, prices rose sharply."),
        ("Logging is not enabled by default.", "By default, logging is disabled."),
        ("The valve opens and then closes after the pump starts.", "Before the fan turns, the light goes on."),
    ],
)
def test_an_opposite_word_that_is_denied_or_about_something_else_is_no_difference(claim: str, evidence: str) -> None:
    assert "direction" not in kinds(claim, evidence)


def test_a_difference_says_what_is_claimed_and_what_is_found() -> None:
    assert differences("The road is 5 miles long.", "The road is 5 km long.") == (
        ExactDifference("unit", "5 miles", "5 km"),
    )


HOSTILE = [
    "7" * 100_000,
    "7 " * 50_000,
    "1.1," * 30_000,
    " ".join(map(str, range(20_000))),
    " ".join(f"{i}.5 km" for i in range(20_000)),
    "`" * 100_000,
    "`a" * 50_000,
    "not " * 30_000,
    "Aa" * 50_000,
    "A b" * 50_000,
    "before after " * 10_000,
    "one hundred " * 10_000,
    "1 May 2000 " * 10_000,
    "a" * 100_000,
    "a_" * 50_000,
    "a." * 50_000,
    "'" * 100_000,
    "\u6f22\u5b57" * 50_000,
    "\u0645\u0631\u062d\u0628\u0627 \u0663\u0664 " * 10_000,
    "\u00b2\u00bd\u2460 " * 20_000,
    "\ud800 \x00\x1b",
    "31 February 2000, 1998-13-45, 00 March 0000",
    "",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_the_work_is_bounded_for_hostile_texts(text: str) -> None:
    """Counted in calls of functions, which do not depend on the machine."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1

    for claim, evidence in [(text, text[::-1]), (text[1:], "The road is 5 km long."), ("It is not 5 km long.", text)]:
        calls.clear()
        sys.setprofile(count)
        try:
            differences(claim, evidence, text)
        finally:
            sys.setprofile(None)
        assert calls.total() < 300_000, calls.most_common(3)


WORDS = st.sampled_from(
    re.split(
        " ",
        "The road not no is 5 12 1,500 1998 km miles weeks of Berlin KeyError `max_size` never all some before after "
        "first third two percent % - , . unlikely likely WHO May 4 without and increased lower at least most",
    )
)
SENTENCES = st.lists(WORDS, max_size=30).map(" ".join) | st.text(max_size=60)


@given(SENTENCES, SENTENCES, SENTENCES)
@settings(max_examples=examples(150), deadline=None)
def test_a_sentence_never_differs_from_a_text_that_contains_it(sentence: str, before: str, after: str) -> None:
    assert differences(sentence, sentence) == ()
    assert differences(sentence, f"{before} {sentence} {after}") == ()


@given(SENTENCES, SENTENCES)
@settings(max_examples=examples(150), deadline=None)
def test_white_space_does_not_change_the_result(claim: str, evidence: str) -> None:
    spaced = f"  {claim} ".replace(" ", " \n ")
    assert differences(spaced, evidence) == differences(claim, evidence)
    assert differences(claim, evidence.replace(" ", "\t ")) == differences(claim, evidence)


@given(SENTENCES, SENTENCES)
@settings(max_examples=examples(150), deadline=None)
def test_the_case_of_the_first_letter_does_not_change_what_kinds_differ(claim: str, evidence: str) -> None:
    first = claim.split(" ", maxsplit=1)[0]
    if first.isalpha() and first.isascii() and first.islower():
        assert kinds(claim, evidence) == kinds(claim[0].upper() + claim[1:], evidence)
