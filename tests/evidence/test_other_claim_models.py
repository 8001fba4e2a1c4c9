"""Claims that a model without judgements of words has checked, such as an external NLI model."""

import time

import pytest

from anabranch.domain.evidence import Verdict
from anabranch.domain.model import Passage
from anabranch.evidence.claims import Finding, ReadPassages, finding

TEXT = "The tower is 330 metres high. It was built in 1889 for a fair."


def found(claim: str, supported: float, contradicted: float = 0.0) -> Finding:
    passages = ReadPassages([Passage(source="s", title="Tower", text=TEXT, score=0.9)])
    [candidate] = passages.candidates(claim)
    verdict = Verdict(supported=supported, unknown=1 - supported - contradicted, contradicted=contradicted)
    return finding(claim, passages, candidate, verdict, passages.comparison(claim, candidate).differing)


@pytest.mark.parametrize(
    ("supported", "contradicted", "verdict"),
    [
        (0.9, 0.0, "supported"),
        (0.51, 0.0, "supported"),
        (0.4, 0.0, "partly"),
        (0.2, 0.0, "unsupported"),
        (0.01, 0.0, "unsupported"),
        (0.1, 0.8, "contradicted"),
    ],
)
def test_the_probability_of_the_model_decides(supported: float, contradicted: float, verdict: str) -> None:
    one = found("The height of the tower is 330 metres.", supported, contradicted)
    assert one.verdict == verdict
    assert one.support == pytest.approx(supported, abs=1e-4)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("The height of the tower is 330 metres.", "The height of the tower is 340 metres."),
        ("The height of the tower is 330 metres.", "The height of the tower is 330 feet."),
        ("It was built for a fair in 1889.", "It was built for a fair in 1898."),
    ],
)
def test_another_number_unit_or_date_is_not_supported_whatever_the_model_says(right: str, wrong: str) -> None:
    for sure in (0.9, 0.9999999):
        assert found(right, sure).verdict == "supported"
        assert found(wrong, sure).verdict != "supported"


def test_the_quote_is_the_unit_with_most_words_of_the_claim() -> None:
    [quote] = found("The height of the tower is 330 metres.", 0.9).quotes
    assert TEXT[slice(*quote.span)] == "The tower is 330 metres high."


def test_no_words_are_doubted() -> None:
    assert found("The tower was built in 1889 for a king.", 0.1, 0.8).doubted == ()


def test_a_passage_or_an_answer_that_is_one_long_number_is_checked_in_linear_time() -> None:
    text = "The tower is 330 metres high. " + "1" * 40_000
    began = time.process_time()
    passages = ReadPassages([Passage(source="s", title="Tower", text=text, score=0.9)])
    claim = "The tower is 330 metres high. 1" + "1" * 39_000
    [candidate, *_] = passages.candidates(claim)
    verdict = Verdict(supported=0.1, unknown=0.9, contradicted=0.0, words=((0, 9, 1.0),))
    finding(claim, passages, candidate, verdict, passages.comparison(claim, candidate).differing)
    assert time.process_time() - began < 1
