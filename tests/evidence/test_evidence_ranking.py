"""One order for the passages of all sources."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.model import Passage
from anabranch.evidence.choice import FEWEST, candidates
from anabranch.evidence.judge import Judge
from anabranch.evidence.ranking import ranked_by_evidence
from anabranch.models.evidence import OnnxEvidence
from anabranch.models.factory import LocalEvidence
from anabranch.testing import FakeEvidence, Recorder
from support.quoted_answers import RecordingEvidence, passage

QUESTION = "When does the Zanzibar ferry leave?"
ANSWER = "The Zanzibar ferry does leave every hour, that is when."
HARBOUR = "The harbour was built in 1871. It has two piers."


def titles(passages: tuple[Passage, ...]) -> list[str]:
    return [one.title for one in passages]


async def ranked(evidence: FakeEvidence, *passages: Passage, limit: int = 8) -> tuple[Passage, ...]:
    return await ranked_by_evidence(Judge(evidence, limit), QUESTION, passages, 30.0)


async def test_a_passage_that_answers_comes_first_whatever_its_source_scores() -> None:
    loud = [passage(HARBOUR, f"Loud {number}", "loud/docs", score=0.99) for number in range(5)]
    quiet = passage(ANSWER, "Quiet", "quiet/docs", score=0.01)
    found = await ranked(FakeEvidence(), *loud, quiet)
    assert titles(found)[0] == "Quiet"
    assert sorted(titles(found)) == sorted(titles((*loud, quiet)))


async def test_the_best_of_every_source_is_judged_first() -> None:
    sources = "aaaabbc"
    evidence = RecordingEvidence()
    passages = [passage(HARBOUR, f"{source}{at}", source) for at, source in enumerate(sources)]
    await ranked(evidence, *passages, limit=5)
    assert evidence.titles == ["a0", "b4", "c6", "a1", "b5"]


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.integers(1, 25))
def test_candidates_are_taken_from_the_sources_in_turn(sources: list[str], limit: int) -> None:
    passages = [passage(HARBOUR, source=source) for source in sources]
    chosen = candidates(QUESTION, passages, limit)
    assert len(chosen) == len(set(chosen))
    assert min(limit, len(passages), max(FEWEST, len(set(sources)))) <= len(chosen) <= limit
    counts = {source: sum(sources[index] == source for index in chosen) for source in set(sources)}
    for source, count in counts.items():
        own = [index for index, one in enumerate(sources) if one == source]
        assert [index for index in chosen if sources[index] == source] == own[:count], "the best ones of a source"
        assert count == len(own) or count >= max(counts.values()) - 1


async def test_judged_passages_come_before_those_that_were_not_judged() -> None:
    passages = [passage(HARBOUR, f"Harbour {number}") for number in range(6)]
    found = await ranked(FakeEvidence(), *passages, limit=3)
    assert titles(found)[3:] == ["Harbour 3", "Harbour 4", "Harbour 5"]
    assert [one.evidence is not None for one in found] == [True] * 3 + [False] * 3
    assert all(one.evidence is not None and 0 <= one.evidence <= 1 for one in found[:3])


async def test_a_passage_that_was_not_read_says_nothing_about_its_evidence() -> None:
    passages = [passage(ANSWER, "Ferry"), *(passage(HARBOUR, f"Harbour {number}") for number in range(4))]
    evidence = RecordingEvidence()
    found = await ranked(evidence, *passages)
    assert evidence.titles == ["Ferry"]
    assert [one.evidence is None for one in found] == [False, True, True, True, True]


async def test_one_source_of_the_same_answer_does_not_hide_another(shipped_evidence: OnnxEvidence) -> None:
    first = [passage(f"Goods can be returned within 30 days. Shop {n}.", f"A{n}", "ann/shop") for n in range(4)]
    second = passage("You can return goods within 14 days.", "B", "bob/shop", score=0.1)
    found = await ranked_by_evidence(Judge(shipped_evidence, 8), "How long can I return goods?", [*first, second], 30.0)
    assert "B" in titles(found)[:2]
    assert found[0].evidence is not None
    assert found[1].evidence is not None
    assert found[1].evidence > 0.5


async def test_the_order_stays_when_the_judge_has_no_opinion(tmp_path: Path) -> None:
    passages = (passage(HARBOUR, "Harbour"), passage(ANSWER, "Ferry"))
    german = (passage("Der Hafen wurde 1871 gebaut. Er ist groß.", "Hafen"), *passages[1:])
    no_files = LocalEvidence(tmp_path, 1, Recorder(), required=False)
    no_time = FakeEvidence(now=lambda: float("inf"))
    assert await ranked_by_evidence(Judge(no_files, 8), QUESTION, passages, 30.0) == passages
    assert await ranked_by_evidence(Judge(no_time, 8), QUESTION, passages, 30.0) == passages
    assert await ranked_by_evidence(Judge(FakeEvidence(), 8), QUESTION, passages, -1.0) == passages
    assert await ranked_by_evidence(Judge(FakeEvidence(), 8), QUESTION, german, 30.0) == german
    assert await ranked_by_evidence(Judge(FakeEvidence(), 8), "Wann fährt die Fähre?", passages, 30.0) == passages
    assert await ranked_by_evidence(Judge(FakeEvidence(), 8), QUESTION, (), 30.0) == ()


TEXTS = st.sampled_from([ANSWER, HARBOUR, "", "```", "The ferry.", "Die Fähre ist nicht da."])


@given(st.lists(st.tuples(TEXTS, st.sampled_from("abc")), max_size=12), st.integers(1, 9))
async def test_ranking_loses_and_invents_no_passage(given_ones: list[tuple[str, str]], limit: int) -> None:
    passages = [passage(text, str(at), source) for at, (text, source) in enumerate(given_ones)]
    found = await ranked(FakeEvidence(), *passages, limit=limit)
    assert sorted(titles(found)) == sorted(titles(tuple(passages)))
    judged = [one.evidence for one in found if one.evidence is not None]
    assert judged == sorted(judged, reverse=True)
    assert all(one.evidence is None for one in found[len(judged) :])
