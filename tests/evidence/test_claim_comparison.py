"""Which words of which passages a claim is compared with, what is found, and how long that takes."""

import time
from typing import Literal
from unicodedata import normalize

import msgspec
import pytest

from anabranch.domain.evidence import Verdict
from anabranch.domain.model import Passage
from anabranch.evidence.claim_weights import ClaimFeatures, probability
from anabranch.evidence.claims import (
    CANDIDATES,
    MAX_COMPARED,
    MAX_READ,
    MAX_UNITS,
    MOST_UNITS,
    Candidate,
    Finding,
    Quoted,
    ReadPassages,
    best_of,
    features,
    finding,
)
from anabranch.text.exact_checks import differences
from anabranch.text.reading import ExactDifference
from support.quoted_answers import passage

FERRY = passage("The Zanzibar ferry leaves every morning at 7. The crossing takes 2 hours.", "Ferry")
COD = passage("Murray cod grow slowly. The largest weighed 113 kg and was caught in 1902.", "Cod")
YES = Verdict(supported=0.98, unknown=0.01, contradicted=0.01)
UNSURE = Verdict(supported=0.35, unknown=0.45, contradicted=0.2)
NO = Verdict(supported=0.001, unknown=0.998, contradicted=0.001)
OPPOSITE = Verdict(supported=0.001, unknown=0.001, contradicted=0.998)


def copied(claim: str, *passages: Passage, cited: tuple[int, ...] = ()) -> tuple[int, str] | None:
    found = ReadPassages(passages).copied(claim, cited)
    return (found.passage, passages[found.passage].text[slice(*found.span)]) if found else None


def candidates(claim: str, *passages: Passage, cited: tuple[int, ...] = ()) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.passage, one.units) for one in ReadPassages(passages).candidates(claim, cited)]


def found_in(claim: str, verdict: Verdict | None, *passages: Passage) -> Finding:
    read = ReadPassages(passages)
    [candidate, *_] = read.candidates(claim)
    return finding(claim, read, candidate, verdict, read.comparison(claim, candidate).differing)


# --- copied sentences


@pytest.mark.parametrize(
    "claim",
    [
        "The crossing takes 2 hours.",
        "the crossing   takes\n2 hours",
        "**The crossing** takes _2_ hours!",
        "However, the crossing takes 2 hours.",
        "“The crossing takes 2 hours.”",
    ],
)
def test_a_sentence_with_other_white_space_case_or_punctuation_is_copied(claim: str) -> None:
    assert copied(claim, COD, FERRY) == (1, "The crossing takes 2 hours.")


@pytest.mark.parametrize(
    "claim",
    [
        "The crossing takes 2.5 hours.",
        "The crossing takes 2 hours and a half.",
        "The ferry leaves every morning at 7.",
        "The crossing takes -2 hours.",
        "2 hours",
        "",
    ],
)
def test_part_of_a_sentence_or_another_number_is_not_copied(claim: str) -> None:
    assert copied(claim, FERRY) is None


@pytest.mark.parametrize(("said", "written"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_sentence_with_accents_as_characters_of_their_own_is_copied(
    said: Literal["NFC", "NFD"], written: Literal["NFC", "NFD"]
) -> None:
    text = "Das Café öffnet um 9 Uhr."
    document = normalize(written, f"{text} Es ist groß.")
    assert copied(normalize(said, text), passage(document)) == (0, normalize(written, text))


@pytest.mark.parametrize("claim", ["商店支付运费。", "返品は三十日以内です。", "החנות משלמת."])
def test_a_sentence_in_another_script_is_copied(claim: str) -> None:
    assert copied(claim, passage(f"{claim} 商店在九点开门。")) == (0, claim)


def test_another_currency_is_supported_in_part_at_most() -> None:
    yes = Verdict(supported=0.98, unknown=0.01, contradicted=0.01, words=((0, 3, -6.0),))
    museum = passage("Admission costs 12 euros for adults. The museum opened on 5 May 1921.", "Museum")
    assert found_in("Admission costs 12 euros for all adults.", yes, museum).verdict == "supported"
    assert found_in("Admission costs 12 dollars for all adults.", yes, museum).verdict == "partly"
    no = msgspec.structs.replace(yes, supported=0.1, contradicted=0.89)
    assert found_in("Admission costs 12 dollars for all adults.", no, museum).verdict == "contradicted"


TABLE = "| Item | Price | Stock |\n|---|---|---|\n| Desk lamp | 49 euros | 12 |\n| Chair | 199 euros | 3 |"


def test_a_row_with_fewer_columns_than_its_source_is_copied() -> None:
    assert copied("| Desk lamp | 49 euros |", passage(TABLE)) == (0, "| Desk lamp | 49 euros | 12 |")


@pytest.mark.parametrize("row", ["| Desk lamp | 199 euros |", "| 49 euros | Desk lamp |", "| Desk lamp | 12 |"])
def test_a_row_with_other_cells_is_not_copied(row: str) -> None:
    """Nor is one with a bare number, which may be of another column."""
    assert copied(row, passage(TABLE)) is None


def test_several_sentences_may_be_copied_at_once() -> None:
    assert copied(FERRY.text, FERRY) == (0, FERRY.text)


def test_of_equal_passages_the_cited_one_is_quoted() -> None:
    assert copied("The crossing takes 2 hours.", FERRY, COD, FERRY) == (0, "The crossing takes 2 hours.")
    assert copied("The crossing takes 2 hours.", FERRY, COD, FERRY, cited=(2,)) == (2, "The crossing takes 2 hours.")


def test_words_are_found_late_in_a_long_passage_and_in_the_last_of_many() -> None:
    late = passage("Filler text about nothing special here. " * 1_000 + FERRY.text)
    assert copied("The crossing takes 2 hours.", late) == (0, "The crossing takes 2 hours.")
    assert copied("The crossing takes 2 hours.", *[COD] * 200, FERRY) == (200, "The crossing takes 2 hours.")
    assert ReadPassages([late]).complete


def test_a_passage_beyond_the_limit_may_be_cited() -> None:
    many = [passage("a " * (MAX_READ // 2)), FERRY]
    assert copied("The crossing takes 2 hours.", *many, cited=(1,)) is None
    assert candidates("The crossing takes 2 hours.", *many, cited=(1,)) == []
    assert not ReadPassages(many).complete


# --- what is compared


def test_a_claim_is_compared_with_the_units_that_share_its_words() -> None:
    assert candidates("The largest was caught in 1902.", FERRY, COD)[0] == (1, (1,))
    joint = "The ferry leaves at 7, and the crossing takes 2 hours."
    assert candidates(joint, FERRY, COD)[0] == (0, (0, 1))


def test_a_claim_that_shares_no_word_is_compared_with_nothing() -> None:
    assert candidates("Elephants swim.", FERRY, COD) == []
    assert candidates("", FERRY) == []
    assert candidates("Elephants swim.") == []


def test_a_cited_passage_is_asked_first_unless_it_has_far_fewer_words() -> None:
    other = passage("Every morning the ferry to Zanzibar leaves at 7.", "Timetable")
    claim = "The Zanzibar ferry leaves at 7 every morning."
    assert [number for number, _ in candidates(claim, FERRY, other)] == [0, 1]
    assert [number for number, _ in candidates(claim, FERRY, other, cited=(1,))] == [1, 0]
    assert [number for number, _ in candidates(claim, FERRY, COD, cited=(1,))] == [0]


def test_of_the_others_those_that_are_cited_are_asked_first() -> None:
    same = [passage("The Zanzibar ferry leaves every morning at 7.", f"T{number}") for number in range(4)]
    claim = "Every morning at 7 the Zanzibar ferry leaves."
    assert [number for number, _ in candidates(claim, *same, cited=(0, 3))] == [0, 3]


def test_what_is_compared_is_limited() -> None:
    long = passage(" ".join(f"The ferry {number} leaves at {number}." for number in range(2_000)))
    read = ReadPassages([long] * 50)
    found = read.candidates(" ".join(f"ferry {number}" for number in range(60)))
    assert len(found) == CANDIDATES
    for one in found:
        assert len(one.units) <= MOST_UNITS
        assert one.units[-1] < MAX_UNITS
        assert sum(len(unit.text) for unit in read.page(one).units) <= MAX_COMPARED


# --- what is found


def test_support_decides_the_verdict() -> None:
    claim = "Every morning at 7 the Zanzibar ferry leaves."
    assert found_in(claim, YES, FERRY).verdict == "supported"
    assert found_in(claim, UNSURE, FERRY).verdict == "partly"
    assert found_in("The ferry leaves the captain of Borneo alone.", NO, FERRY).verdict == "unsupported"
    assert found_in("The ferry leaves the captain of Borneo alone.", OPPOSITE, FERRY).verdict == "contradicted"


def test_an_exact_difference_lowers_support() -> None:
    same = found_in("The crossing of the ferry takes 2 hours.", YES, FERRY)
    other = found_in("The crossing of the ferry takes 3 hours.", YES, FERRY)
    assert other.support < same.support


@pytest.mark.parametrize("kind", ["number", "unit", "date", "name", "negation", "quantifier", "direction"])
def test_no_difference_ever_raises_support(kind: str) -> None:
    [difference, *_] = differences("The crossing takes 3 hours.", "The crossing takes 2 hours.")
    one: ExactDifference = difference._replace(kind=kind)  # type: ignore[arg-type]
    candidate = Candidate(0, (0,), 0.7)
    shares = [probability(features(candidate, YES, [one] * count)) for count in range(4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] < shares[0]


def test_without_a_model_the_words_that_are_shared_decide() -> None:
    assert features(Candidate(0, (0,), 0.5), None, ()) == ClaimFeatures(0.0, 0.0, 0.0, 0.5, *[0] * 8)
    assert features(Candidate(0, (0,), 0.5), YES, ()).words == 0.0, "a model that judges no words"


def test_the_units_that_the_model_points_at_are_quoted_and_neighbours_are_one_quote() -> None:
    text = "The ferry is old. The ferry leaves at 7. It rains. The ferry takes 2 hours."
    read = ReadPassages([passage(text)])
    candidate = Candidate(0, (0, 1, 3), 1.0)

    def quoted(*units: float) -> list[str]:
        verdict = msgspec.structs.replace(YES, units=units)
        return [text[slice(*one.span)] for one in read.quotes("A boat departs.", candidate, verdict)]

    assert quoted(-3, 2, -3) == ["The ferry leaves at 7."]
    assert quoted(1, 2, 3) == ["The ferry is old. The ferry leaves at 7.", "The ferry takes 2 hours."]
    assert quoted(-3, -2, -1) == ["The ferry takes 2 hours."], "the best one"
    assert len(quoted()) == 1, "a model that cannot say"


def test_the_quote_of_a_unit_in_a_long_passage_stands_where_it_says() -> None:
    text = "Padding is here. " * 2_100 + "The crossing takes 2 hours." + " More of it." * 2_000
    assert copied("The crossing takes 2 hours.", passage(text)) is None, "beyond the units that are read"
    early = "\n\n# Ferries\n\n\u200b The crossing takes 2 hours.\n" + text
    assert copied("The crossing takes 2 hours.", passage(early)) is not None


def test_the_passages_that_support_decide_then_the_one_that_contradicts() -> None:
    yes = Finding("supported", 0.9, (Quoted(0, (0, 4)),))
    too = Finding("supported", 0.8, (Quoted(1, (2, 6)),))
    no, partly = Finding("contradicted", 0.1), Finding("partly", 0.4)
    assert best_of([no, yes, too]) == Finding("supported", 0.9, (*yes.quotes, *too.quotes))
    assert best_of([partly, no]) == no
    assert best_of([Finding("unsupported", 0.2), partly]) == partly
    assert best_of([]).verdict == "unsupported"


# --- time


@pytest.mark.parametrize(
    "text",
    ["a.", "a. ", "- a\n", "|a|b|\n", "1 ", "A B ", "a ", "[", "`", "\n", "#", "> ", "a:\n  b\n", "é\u0301", "\u200b"],
)
def test_reading_and_comparing_hostile_passages_takes_bounded_time(text: str) -> None:
    began = time.process_time()
    read = ReadPassages([passage((text * 20_000)[:20_000])] * 3)
    for claim in (text * 300, "a " * 500, "A 1 b is " * 100):
        read.copied(claim)
        for one in read.candidates(claim):
            read.page(one)
            read.comparison(claim, one)
    assert time.process_time() - began < 2.0


# --- tables, short claims, numbers

PARTS = passage(
    "| Part | Number | Price |\n|---|---|---|\n| Seal ring | SR-118 | 14.50 euros |\n"
    "| Impeller | IM-220 | 89.00 euros |\n| Filter | FF-7 | 6.25 euros |\n",
    "Parts",
)


@pytest.mark.parametrize(
    ("claim", "rows"),
    [
        ("The seal ring costs 89.00 euros.", ["| Seal ring | SR-118 | 14.50 euros |"]),
        ("The filter costs 14.50 euros.", ["| Filter | FF-7 | 6.25 euros |"]),
        ("One part costs 89.00 euros, another one 6.25.", ["| Impeller | IM-220 | 89.00 euros |"]),
        (
            "The impeller costs 89.00 and the filter 6.25.",
            ["| Impeller | IM-220 | 89.00 euros |", "| Filter | FF-7 | 6.25 euros |"],
        ),
    ],
)
def test_rows_are_read_together_only_if_the_claim_names_both(claim: str, rows: list[str]) -> None:
    read = ReadPassages([PARTS])
    [candidate] = read.candidates(claim)
    assert [unit.text for unit in read.page(candidate).units] == rows


def test_the_price_of_another_row_is_a_difference() -> None:
    read = ReadPassages([PARTS])
    claim = "The seal ring costs 89.00 euros."
    [candidate] = read.candidates(claim)
    assert [one.claimed for one in read.comparison(claim, candidate).differing] == ["89.00 euros"]


def test_a_short_claim_needs_a_model_that_supports_it() -> None:
    tank = passage("The tank holds 20 litres.", "Tank")
    words = ((0, 3, -6.0), (4, 8, -6.0), (9, 17, -6.0))
    denied = Verdict(supported=0.05, unknown=0.2, contradicted=0.75, words=words)
    assert found_in("The tank explodes.", denied, tank).verdict == "contradicted"
    assert found_in("The tank has room.", msgspec.structs.replace(denied, supported=0.9), tank).verdict == "supported"


def test_a_claim_of_which_the_source_has_few_words_needs_a_model_that_supports_it() -> None:
    museum = passage("The museum was founded in 1921 by Greta Lind.", "Museum")
    claim = (
        "The museum was founded in 1921 by Greta Lind, who became queen, won four medals, invented the telephone, owned"
        " a tiger, sold blue shoes and lived on the moon."
    )
    verdict = Verdict(supported=0.2, unknown=0.2, contradicted=0.6, words=((0, 3, -6.0),))
    assert found_in(claim, verdict, museum).verdict != "supported"
    assert found_in(claim, msgspec.structs.replace(verdict, supported=0.9), museum).verdict == "supported"


def test_a_claim_that_was_not_read_to_its_end_is_supported_in_part_at_most() -> None:
    ferry = passage("The ferry leaves at 7 every morning.", "Ferry")
    verdict = Verdict(supported=0.97, unknown=0.02, contradicted=0.01, words=((0, 3, -6.0),))
    assert found_in("Every morning at 7 the ferry leaves.", verdict, ferry).verdict == "supported"
    cut = msgspec.structs.replace(verdict, whole=False)
    assert found_in("Every morning at 7 the ferry leaves.", cut, ferry).verdict == "partly"


def test_a_doubted_number_is_shown_whole() -> None:
    claim = "The ticket for the ferry to the island costs 14.50 euros."
    verdict = Verdict(supported=0.01, unknown=0.01, contradicted=0.98, words=((45, 47, 3.0), (48, 50, 3.0)))
    ferry = passage("The ticket for the ferry to the island costs 18.20 euros.", "Ferry")
    assert [claim[slice(*span)] for span in found_in(claim, verdict, ferry).doubted] == ["14.50"]
