"""Documents that contradict each other on what was asked: found where they do, and not where both are right."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.evidence import EvidencePage, Verdict
from anabranch.domain.model import Passage, Place
from anabranch.evidence.conflicts import MAX_PAIRS, conflicts, pairs
from anabranch.models.evidence import OnnxClaims
from anabranch.testing import FakeEvidence
from support.examples import examples

LEAVE = "How many days of parental leave do employees get?"
THIRTY = "Parental leave is generous. Employees get 30 days of parental leave."
FORTY_FIVE = "Employees get 45 days of parental leave. Requests go to the HR team."


def passage(text: str, title: str = "Leave", source: str = "docs", **fields: object) -> Passage:
    return msgspec.structs.replace(
        Passage(source=source, title=title, text=text, score=0.9, document_id=title), **fields
    )


def blocks(name: str) -> Iterator[tuple[str, str, list[Passage]]]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for block in text.strip().split("\n\n")[1:]:
        kind, question, *documents = block.split("\n")
        yield kind, question, [passage(said, title) for title, said in (line.split(" | ", 1) for line in documents)]


class Says:
    """A ClaimChecker that always says the same."""

    def __init__(self, verdict: Verdict | None) -> None:
        self.verdict = verdict
        self.calls = 0

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        self.calls += 1
        return [self.verdict] * len(inputs)


CONTRADICTED = Verdict(supported=0.02, unknown=0.03, contradicted=0.95)


def soon() -> float:
    return time.monotonic() + 60


async def test_two_documents_with_different_numbers_are_a_conflict_with_the_words_of_both() -> None:
    passages = [passage(THIRTY, "Policy"), passage("The canteen opens at noon.", "Canteen"), passage(FORTY_FIVE, "FAQ")]
    (found,) = await conflicts(FakeEvidence(), LEAVE, passages, soon())
    assert (found.kind, found.claim.passage, found.against.passage) == ("number", 0, 2)
    assert THIRTY[found.claim.start : found.claim.end] == "Employees get 30 days of parental leave."
    assert FORTY_FIVE[found.against.start : found.against.end] == "Employees get 45 days of parental leave."
    assert 0.75 <= found.probability <= 1


async def test_two_passages_of_one_document_are_not_compared() -> None:
    checker = Says(CONTRADICTED)
    assert await conflicts(checker, LEAVE, [passage(THIRTY), passage(FORTY_FIVE)], soon()) == ()
    assert checker.calls == 0


async def test_the_same_title_in_two_sources_is_two_documents() -> None:
    passages = [passage(THIRTY, source="a"), passage(FORTY_FIVE, source="b")]
    assert len(await conflicts(Says(CONTRADICTED), LEAVE, passages, soon())) == 1


@pytest.mark.parametrize(
    "verdict",
    [
        None,
        Verdict(supported=0.9, unknown=0.05, contradicted=0.05),
        Verdict(supported=0.1, unknown=0.8, contradicted=0.1),
    ],
)
async def test_without_a_model_that_finds_a_contradiction_there_is_no_conflict(verdict: Verdict | None) -> None:
    passages = [passage(THIRTY, "Policy"), passage(FORTY_FIVE, "Handbook")]
    assert await conflicts(Says(verdict), LEAVE, passages, soon()) == ()


async def test_a_question_costs_at_most_six_checks() -> None:
    checker = Says(CONTRADICTED)
    many = [passage(f"Employees get {days} days of parental leave.", f"Policy {'abcdefgh'[days]}") for days in range(8)]
    assert len(await conflicts(checker, LEAVE, many, soon())) == MAX_PAIRS
    assert checker.calls == 2 * MAX_PAIRS


@pytest.mark.parametrize(
    ("question", "one", "other"),
    [
        ("What is the limit of requests?", "The limit of requests is 60.", "The limit of requests is 5,000."),
        ("How many seats are included?", "There are 3 seats included.", "There are 25 seats included."),
    ],
)
def test_different_headings_are_about_different_things(question: str, one: str, other: str) -> None:
    def under(heading: str, text: str) -> Passage:
        place = Place(chunk_id="1", collection="c", start=0, end=9, tokens=9, headers=("Limits", heading))
        return passage(text, f"all about {heading.lower()}", place=place)

    assert pairs(question, [under("Free", one), under("Paid", other)]) == []
    assert len(pairs(question, [under("Same", one), passage(other, "Other", place=under("Same", one).place)])) == 1


def test_what_is_asked_must_differ() -> None:
    one, other = (
        passage("Ada Merrin was born in Tallow in 1902.", "A"),
        passage("Ada Merrin was born in Tallow in 1904."),
    )
    assert len(pairs("When was Ada Merrin born?", [one, other])) == 1
    assert pairs("Where was Ada Merrin born?", [one, other]) == []


@pytest.mark.parametrize("name", ["not_asked_conflicts.txt", "held_out_not_asked_conflicts.txt"])
def test_documents_that_disagree_on_something_that_is_not_asked_are_not_compared(name: str) -> None:
    assert [question for _, question, passages in blocks(name) if pairs(question, passages)] == []


@pytest.mark.parametrize(
    ("said", "one", "other", "asked", "not_asked"),
    [
        (
            "The Tidal Museum opened in {}.",
            "1994",
            "1997",
            ["When did the Tidal Museum open?", "What was the opening year of the Tidal Museum?"],
            ["How old is the Tidal Museum?", "When does the Tidal Museum open?"],
        ),
        (
            "The Tidal Museum was founded by {}.",
            "Ada Krog",
            "Ole Berg",
            ["Who founded the Tidal Museum?", "Who is the founder of the Tidal Museum?"],
            ["Where was the Tidal Museum founded?", "Who is the director of the Tidal Museum?"],
        ),
        (
            "The Tidal Museum is in {}.",
            "Lund",
            "Turku",
            ["Where is the Tidal Museum?", "Which town is the Tidal Museum in?"],
            ["What is the Tidal Museum?", "Who owns the Tidal Museum?"],
        ),
        (
            "The Tidal Museum tour takes {}.",
            "6 hours",
            "8 hours",
            ["How long does the Tidal Museum tour take?"],
            ["How much is the Tidal Museum tour?", "What is the Tidal Museum tour?"],
        ),
        (
            "The Tidal Museum has {} floors.",
            "3",
            "4",
            ["How many floors does the Tidal Museum have?"],
            ["What is the Tidal Museum?", "How many rooms does the Tidal Museum have?"],
        ),
    ],
)
def test_the_name_of_the_subject_is_not_enough(
    said: str, one: str, other: str, asked: list[str], not_asked: list[str]
) -> None:
    passages = [passage(said.format(one), "Tidal Museum"), passage(said.format(other), "Museums")]
    found = {question: len(pairs(question, passages)) for question in asked + not_asked}
    assert found == dict.fromkeys(asked, 1) | dict.fromkeys(not_asked, 0)


def test_a_passage_without_evidence_and_texts_that_are_not_english_are_not_compared() -> None:
    one, other = passage(THIRTY, "Policy"), passage(FORTY_FIVE, "Handbook")
    assert len(pairs(LEAVE, [one, other])) == 1
    assert pairs(LEAVE, [one, msgspec.structs.replace(other, evidence=0.01)]) == []
    german = "Wie viele Tage Elternzeit bekommen Angestellte bei uns im Jahr nach der Geburt?"
    assert pairs(german, [one, other]) == []


@pytest.mark.parametrize(
    "text", ["a. " * 20_000, "1 " * 20_000, "not " * 20_000, "\u202e[" * 5_000, "", " ", "A1" * 20_000]
)
def test_hostile_passages_take_little_time_and_are_no_conflict(text: str) -> None:
    began = time.process_time()
    hostile = passage(text, text[:5_000] or "x")
    assert pairs(LEAVE, [hostile, passage(THIRTY, "Policy"), passage(text, "B"), passage(text + "1", "C")]) == []
    assert time.process_time() - began < 2


PIECES = [
    *(
        "Employees get",
        "30 days",
        "45 days",
        "of parental leave",
        "not",
        "never",
        "was made by",
        "Ada Merrin's",
        "`main`",
    ),
    *(
        "in 1931",
        "Mr.",
        "\u2019s",
        "'s",
        "version 2",
        "\n\n# Leave\n\n",
        "- item",
        ".",
        "?",
        "\u202e",
        "A1-b",
        "is",
        "12.5 kg",
    ),
]
said = st.lists(st.sampled_from(PIECES), max_size=14).map(" ".join)


@settings(max_examples=examples(300))
@given(st.sampled_from([LEAVE, "Who made A1-b?", "When was it?", "Is it not?", "how many 's"]), said, said, said)
def test_any_texts_can_be_compared_and_the_words_stand_where_a_pair_says(
    question: str, one: str, other: str, title: str
) -> None:
    for pair in pairs(question, [passage(one, title), passage(other, "Handbook")]):
        for side, text in ((pair.one, one), (pair.other, other)):
            assert text[side.unit.start : side.unit.end] == side.statement.text


@pytest.mark.parametrize("name", ["no_conflicts.txt", "more_no_conflicts.txt", "held_out_no_conflicts.txt"])
async def test_documents_that_are_both_right_are_no_conflict(shipped_claims: OnnxClaims, name: str) -> None:
    """Versions, plans, countries, years, units, rounding: all of them."""
    wrong = [
        question
        for _, question, passages in blocks(name)
        if await conflicts(shipped_claims, question, passages, soon())
    ]
    assert wrong == []


@pytest.mark.parametrize(("name", "count"), [("planted_conflicts.txt", 60), ("held_out_conflicts.txt", 20)])
async def test_most_planted_conflicts_are_found_with_their_kind(
    shipped_claims: OnnxClaims, name: str, count: int
) -> None:
    found = 0
    every = list(blocks(name))
    for kind, question, passages in every:
        for conflict in await conflicts(shipped_claims, question, passages, soon()):
            assert conflict.kind == kind, question
            found += 1
    assert len(every) == count
    assert found >= 0.6 * count
