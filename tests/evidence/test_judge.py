"""The judge: what it reads, when it stops, and when it has no opinion."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.model import Passage
from anabranch.evidence.judge import JOINT_PAGES, JOINT_UNITS, SUPPORTED, Judge
from anabranch.models.evidence import OnnxEvidence
from anabranch.models.factory import LocalEvidence
from anabranch.testing import FakeEvidence, Recorder
from support.examples import examples
from support.quoted_answers import RecordingEvidence, passage

QUESTION = "When does the Zanzibar ferry leave?"
SURE = passage("The Zanzibar ferry does leave every hour, that is when.", "Ferry")
UNSURE = "The harbour was built in 1871. It has two piers."
NEAR_IT = "The ferry harbour was built in 1871. When it was new, it had two piers."


def others(count: int) -> list[str]:
    return [f"Harbour {number}" for number in range(count)]


# --- what is read


@pytest.mark.parametrize(
    ("count", "text", "expected"),
    [(8, UNSURE, []), (200, UNSURE, ["candidates"]), (8, f"{UNSURE} " * 200, ["paged"])],
)
async def test_many_passages_and_long_ones_are_read_in_a_thread(count: int, text: str, expected: list[str]) -> None:
    works: list[str] = []

    async def in_thread(work: Callable[..., Any], /, *args: Any) -> Any:
        works.append(work.__name__)
        return work(*args)

    passages = [passage(text, title) for title in others(count)]
    assert await Judge(RecordingEvidence(), 8, in_thread).judge(QUESTION, passages) is not None
    assert works == expected


async def test_nothing_is_read_after_a_passage_that_surely_answers() -> None:
    evidence = RecordingEvidence()
    rest = [passage(UNSURE, title) for title in others(6)]
    judged = await Judge(evidence, 8).judge(QUESTION, [SURE, *rest])
    assert judged is not None
    assert evidence.titles == ["Ferry"]
    assert len(evidence.inputs) == 1, "nor jointly"
    assert {unit.placed.passage for unit in judged.units} == {0}
    assert judged.sure


async def test_reading_goes_on_after_a_sure_answer_that_names_another_document() -> None:
    evidence = RecordingEvidence()
    rest = [passage(UNSURE, title) for title in ("Harbour 0", "the zanzibar FERRY", "Harbour 2", "Harbour 3")]
    ordered = [msgspec.structs.replace(one, evidence=0.5) for one in (SURE, *rest)]
    assert await Judge(evidence, 8).judge(QUESTION, ordered)
    assert evidence.titles == ["Ferry", "Harbour 0", "the zanzibar FERRY"]


async def test_without_a_sure_answer_all_that_are_probable_are_read_and_the_best_of_them_together() -> None:
    evidence = RecordingEvidence()
    passages = [passage(f"{NEAR_IT} {UNSURE}", title) for title in others(9)]
    assert await Judge(evidence, 10).judge(QUESTION, passages)
    assert evidence.titles == others(8), "the last of nine that look the same is probably not the one"
    *_, joint = evidence.inputs
    assert len(joint) == JOINT_PAGES
    assert all(len(page.units) <= JOINT_UNITS for page in joint)


async def test_nothing_is_read_together_if_no_passage_comes_near_an_answer() -> None:
    evidence = RecordingEvidence()
    assert await Judge(evidence, 8).judge(QUESTION, [passage(UNSURE, title) for title in others(3)])
    assert len(evidence.inputs) == 3


async def test_one_passage_is_not_read_twice() -> None:
    evidence = RecordingEvidence()
    assert await Judge(evidence, 8).judge(QUESTION, [passage(UNSURE)])
    assert len(evidence.inputs) == 1


async def test_at_most_limit_passages_are_read() -> None:
    for limit in (1, 3, 8):
        evidence = RecordingEvidence()
        judged = await Judge(evidence, limit).judge(QUESTION, [passage(UNSURE, title) for title in others(20)])
        assert judged is not None
        assert evidence.titles == others(limit)
        assert [one is not None for one in judged.passages] == [True] * limit + [False] * (20 - limit)


async def test_a_passage_of_every_source_is_read_before_a_sure_answer_ends_the_reading() -> None:
    evidence = RecordingEvidence()
    passages = [passage(UNSURE, title, f"{title}/docs") for title in others(6)]
    assert await Judge(evidence, 8).judge(QUESTION, [SURE, SURE, *passages])
    assert evidence.titles == ["Ferry", *others(6)], "the second passage of a source comes after the first of each"


async def test_a_sure_answer_in_the_middle_ends_the_reading_there() -> None:
    evidence = RecordingEvidence()
    passages = [passage(UNSURE, title) for title in others(8)]
    passages[3] = SURE
    ordered = [msgspec.structs.replace(one, evidence=0.5) for one in passages]
    assert await Judge(evidence, 8).judge(QUESTION, ordered)
    assert evidence.titles == ["Harbour 0", "Harbour 1", "Harbour 2", "Ferry", "Harbour 4"]


# --- no opinion


async def test_without_time_there_is_no_judgement() -> None:
    evidence = FakeEvidence(now=lambda: 100.0)
    assert await Judge(evidence, 8).judge(QUESTION, [SURE], until=99.0) is None
    assert await Judge(evidence, 8).judge(QUESTION, [SURE], until=101.0) is not None


async def test_what_was_read_before_the_time_was_over_is_judged() -> None:
    now = iter([0.0, 0.0, 9.0, 9.0, 9.0])
    evidence = FakeEvidence(now=lambda: next(now))
    judged = await Judge(evidence, 8).judge(QUESTION, [passage(UNSURE, title) for title in others(8)], until=5.0)
    assert judged is not None
    assert {unit.placed.passage for unit in judged.units} == {0, 1, 2}
    assert not judged.sure


@pytest.mark.parametrize(
    ("question", "passages", "reason"),
    [
        ("…?", [SURE], "the question has no words"),
        ("Wann fährt die Fähre nach Sansibar ab?", [SURE], "the question is not in English"),
        (QUESTION, [SURE, passage("Die Fähre nach Sansibar fährt jede Stunde.")], "too few passages are in English"),
        (QUESTION, [SURE], "no time was left, or the evidence model is not installed"),
    ],
)
async def test_without_a_judgement_there_is_a_reason(question: str, passages: list[Passage], reason: str) -> None:
    judge = Judge(FakeEvidence(now=lambda: 100.0), 8)
    assert await judge.judgement_or_reason(question, passages, until=99.0) == reason
    assert await judge.judge(question, passages, until=99.0) is None


async def test_without_the_model_files_there_is_no_judgement(tmp_path: Path) -> None:
    evidence = LocalEvidence(tmp_path, 1, Recorder(), required=False)
    assert await Judge(evidence, 8).judge(QUESTION, [SURE]) is None


@pytest.mark.parametrize("question", ["", " ", "?!", "\u200b"])
async def test_a_question_without_words_is_not_judged(question: str) -> None:
    assert await Judge(FakeEvidence(), 8).judge(question, [SURE]) is None


async def test_without_passages_there_is_no_judgement() -> None:
    assert await Judge(FakeEvidence(), 8).judge(QUESTION, []) is None


GERMAN = "Die Fähre nach Sansibar fährt jede Stunde. Karten werden an Bord verkauft, und sie sind nicht teuer."
CHINESE = "渡轮每小时开一次。船票在船上出售。"


@pytest.mark.parametrize(
    "question", ["Wann fährt die Fähre nach Sansibar?", "渡轮什么时候开\uff1f", "Когда уходит паром?"]
)
async def test_questions_in_other_languages_are_not_judged(question: str) -> None:
    evidence = RecordingEvidence()
    assert await Judge(evidence, 8).judge(question, [SURE, passage(GERMAN), passage(CHINESE)]) is None
    assert evidence.inputs == []


@pytest.mark.parametrize("text", [GERMAN, CHINESE])
async def test_documents_in_other_languages_are_not_judged(text: str) -> None:
    judge = Judge(FakeEvidence(), 8)
    assert await judge.judge(QUESTION, [passage(text)]) is None
    assert await judge.judge(QUESTION, [passage(text), SURE]) is None, "half of them"
    assert await judge.judge(QUESTION, [passage(text), SURE, SURE]) is not None
    unsure = [passage(UNSURE, near=0.0)] * 2
    assert await judge.judge(QUESTION, [passage(text, near=0.0), *unsure]) is None, "it would refuse"
    refused = await judge.judge(QUESTION, unsure)
    assert refused is not None
    assert refused.support < SUPPORTED


# --- what it says


async def test_capital_letters_of_the_question_change_nothing(shipped_evidence: OnnxEvidence) -> None:
    judge = Judge(shipped_evidence, 8)
    passages = [passage("The Murray Cod was described by Thomas Mitchell in 1838.", "Murray Cod"), SURE]
    for question in ("Who described the Murray Cod?", QUESTION):
        spelled, lowered, raised = [
            await judge.judge(form, passages) for form in (question, question.lower(), question.upper())
        ]
        assert spelled is not None
        assert lowered is not None
        assert raised is not None
        assert spelled.support == lowered.support == raised.support
        assert spelled.passages == lowered.passages == raised.passages


async def test_the_unit_that_answers_is_the_most_probable(shipped_evidence: OnnxEvidence) -> None:
    text = "The shop opened in 1950. Goods can be returned within 30 days. The cat is called Minka."
    judged = await Judge(shipped_evidence, 8).judge("How long can I return goods?", [passage(text, "Shop")])
    assert judged is not None
    best = max(judged.units, key=lambda unit: unit.probability)
    assert text[best.placed.unit.start : best.placed.unit.end] == "Goods can be returned within 30 days."
    assert judged.passages == (best.probability,)


@settings(max_examples=examples(100))
@given(
    question=st.text(max_size=80),
    texts=st.lists(st.text(max_size=200), min_size=1, max_size=4),
    near=st.floats(),
)
async def test_a_judgement_has_probabilities_for_any_text(question: str, texts: list[str], near: float) -> None:
    passages = [passage(text, text[:20], near=near) for text in texts]
    judged = await Judge(FakeEvidence(), 3).judge(question, passages)
    if judged is None:
        return
    assert 0 <= judged.support <= 1
    assert len(judged.passages) == len(passages)
    assert sum(probability is not None for probability in judged.passages) <= 3
    assert all(probability is None or 0 <= probability <= 1 for probability in judged.passages)
    assert all(0 <= unit.probability <= 1 for unit in judged.units)


# --- hostile passages

HOSTILE = {
    "one sentence": "murray cod " * 100_000,
    "many sentences": "Cod live here. " * 70_000,
    "code fences": "```\n" * 250_000,
    "pipes": "|" * 1_000_000,
    "rows": "| a | b |\n|---|---|\n" * 50_000,
    "zero-width characters": "\u200b" * 1_000_000,
    "items": "- cod\n" * 160_000,
    "nested items": "".join(" " * (number % 500) + "- cod\n" for number in range(4_000)),
    "headings": "# Cod\n" * 160_000,
    "definitions": "Cod\n    a fish\n" * 70_000,
    "brackets": "[1] [" * 200_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_25_passages_of_one_megabyte_are_judged_in_little_time(kind: str) -> None:
    passages = [passage(HOSTILE[kind], "T" * 10_000, headers=("H" * 10_000,))] * 25
    judge = Judge(FakeEvidence(), 25)
    for question in ("How large does the Murray Cod grow?", "", "cod " * 2_500):
        began = time.process_time()
        await judge.judge(question, passages)
        assert time.process_time() - began < 2.0
