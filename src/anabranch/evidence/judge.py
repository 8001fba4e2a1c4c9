"""Judges units and passages: the evidence model's readings and rules, combined by fitted weights."""

from collections.abc import Sequence
from typing import NamedTuple

from anabranch.domain.evidence import Evidence, Page, Reading
from anabranch.domain.model import Passage
from anabranch.evidence.features import Members, Observed, features
from anabranch.evidence.language import is_english
from anabranch.evidence.pages import Pages, PlacedUnit, paged
from anabranch.evidence.weights import SUPPORT, UNIT, logistic

# A joint reading has the best units of the best pages.
JOINT_PAGES, JOINT_UNITS = 8, 3


class JudgedUnit(NamedTuple):
    """`answer` is the span of the passage with the shortest words that answer, if the unit has it."""

    placed: PlacedUnit
    probability: float
    answer: tuple[int, int] | None = None


class Judgement(NamedTuple):
    """`support` is the probability that the passages answer the question; `passages` the probability of each passage
    that it does; `units` the units in reading order."""

    support: float
    passages: tuple[float, ...]
    units: tuple[JudgedUnit, ...]


class Judge:
    """Reads at most `limit` passages."""

    def __init__(self, evidence: Evidence, limit: int) -> None:
        self._evidence = evidence
        self.limit = limit

    async def judge(self, question: str, passages: Sequence[Passage], until: float | None = None) -> Judgement | None:
        """None if the question or most of the passages are not English, or if not all of it could be read by
        `until`."""
        passages = passages[: self.limit]
        if not is_english(question) or sum(is_english(one.text) for one in passages) * 2 <= len(passages):
            return None
        observed = await observe(self._evidence, question, passages, until)
        return combined(observed) if observed is not None else None


async def observe(
    evidence: Evidence, question: str, passages: Sequence[Passage], until: float | None = None
) -> Observed | None:
    """None if the model has not read all pages."""
    found = paged(passages)
    single = await evidence.read(question, [(page,) for page in found.pages], until=until)
    readings = [reading for reading in single if reading is not None]
    if len(readings) < len(single):
        return None
    joint, members = _joint(found, readings)
    (together,) = await evidence.read(question, [joint], until=until) if joint else (None,)
    return features(question, passages, found, readings, together, members)


def _joint(found: Pages, readings: Sequence[Reading]) -> tuple[tuple[Page, ...], Members]:
    """The best units of the best pages, in reading order; and where each unit of a page is in it."""
    best = sorted(range(len(readings)), key=lambda page: -readings[page].relevance)[:JOINT_PAGES]
    pages: list[Page] = []
    members: Members = {}
    for page in best:
        scores = readings[page].units[0] if readings[page].units else ()
        kept = sorted(sorted(range(len(scores)), key=lambda unit: -scores[unit])[:JOINT_UNITS])
        if kept:
            members.update({(page, unit): (len(pages), place) for place, unit in enumerate(kept)})
            whole = found.pages[page]
            pages.append(Page(title=whole.title, units=tuple(whole.units[unit] for unit in kept)))
    return tuple(pages), members


def combined(observed: Observed) -> Judgement:
    units = tuple(
        JudgedUnit(placed, logistic(UNIT, values), answer)
        for placed, values, answer in zip(observed.placed, observed.units, observed.answers, strict=True)
    )
    best = [0.0] * observed.passages
    for unit in units:
        best[unit.placed.passage] = max(best[unit.placed.passage], unit.probability)
    return Judgement(logistic(SUPPORT, observed.support), tuple(best), units)
