"""Judges units and passages: the evidence model's readings and rules, combined by fitted weights."""

from collections.abc import Sequence
from typing import NamedTuple

from anabranch.domain.evidence import Evidence, Reading
from anabranch.domain.model import Passage
from anabranch.evidence.features import JointReading, Observed, QuestionWords, joined, observed
from anabranch.evidence.pages import Pages, PlacedUnit, paged
from anabranch.evidence.weights import probability_of_support, probability_of_unit
from anabranch.text.language import is_english

# A joint reading has the best units of the best pages.
JOINT_PAGES, JOINT_UNITS = 8, 3
# Passages are read a few at a time. Once the log-odds of one are above SURE, no more are read, nor jointly: neither
# changed the figures, and both together are half of the cost.
AT_A_TIME, SURE = 2, 2.0


class JudgedUnit(NamedTuple):
    placed: PlacedUnit
    probability: float
    # The question's words in it.
    words: int


class Judgement(NamedTuple):
    """`support` is the probability that the passages answer the question; `passages` that of each passage that it has
    evidence; `units` are in reading order. Passages that were not read have no units."""

    support: float
    passages: tuple[float, ...]
    units: tuple[JudgedUnit, ...]
    words: QuestionWords


class Judge:
    """Reads at most `limit` passages."""

    def __init__(self, evidence: Evidence, limit: int) -> None:
        self._evidence = evidence
        self.limit = limit

    async def judge(
        self, question: str, passages: Sequence[Passage], *, least: int = 0, until: float | None = None
    ) -> Judgement | None:
        """Reads at least `least` passages. None if the question or most of the passages are not English, or if the
        model is not there or had no time."""
        passages = passages[: self.limit]
        if not is_english(question) or sum(is_english(one.text) for one in passages) * 2 <= len(passages):
            return None
        found = await self.observe(question, passages, least=least, until=until)
        return judgement(found, len(passages)) if found is not None else None

    async def observe(
        self, question: str, passages: Sequence[Passage], *, least: int = 0, until: float | None = None
    ) -> Observed | None:
        pages = paged(passages)
        readings = await self._read(question, pages, least, until)
        if not readings:
            return None
        joint = None
        if len(readings) > 1 and max(reading.answerable for reading in readings) < SURE:
            together, places = joined(pages, readings, JOINT_PAGES, JOINT_UNITS)
            (reading,) = await self._evidence.read(question, [together], until=until)
            joint = JointReading(reading, places) if reading is not None else None
        return observed(question, passages, pages, readings, joint)

    async def _read(self, question: str, pages: Pages, least: int, until: float | None) -> list[Reading]:
        """The readings of the first pages, until one surely answers, or there is no time."""
        found: list[Reading] = []
        while len(found) < len(pages.pages):
            begin = len(found)
            passage = pages.passage_of(begin)
            end = pages.end_of(max(passage + AT_A_TIME, least))
            for reading in await self._evidence.read(
                question, [(page,) for page in pages.pages[begin:end]], until=until
            ):
                if reading is None:
                    return found
                found.append(reading)
            if max(reading.answerable for reading in found) >= SURE:
                break
        return found


def judgement(found: Observed, passages: int) -> Judgement:
    units = tuple(
        JudgedUnit(placed, probability_of_unit(features), words)
        for placed, features, words in zip(found.placed, found.units, found.words.units, strict=True)
    )
    best = [0.0] * passages
    for unit in units:
        best[unit.placed.passage] = max(best[unit.placed.passage], unit.probability)
    return Judgement(probability_of_support(found.support, max(best, default=0.0)), tuple(best), units, found.words)
