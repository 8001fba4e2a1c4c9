"""What is known about each unit, and about the passages together, before it is weighted."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.domain.evidence import EvidencePage, Reading
from anabranch.domain.model import Passage
from anabranch.evidence.pages import Pages, PlacedUnit
from anabranch.text.support import MAX_TITLE, Wording, bare, nearness, share, word_weights
from anabranch.text.units import Unit

# Log-odds are clipped: beyond this they say nothing more.
CLIP = 8.0
# The log-odds of what was not read.
UNREAD = -6.0
# Words of a question: a longer one counts as one of this length.
MAX_LENGTH = 25
ASKS_HOW = re.compile(r"\W*how (?:do|can|to|would|should)\b", re.IGNORECASE)


class UnitFeatures(NamedTuple):
    """`alone` and `jointly` are the model's log-odds that the unit is evidence, `answer` those of the shortest answer
    if the unit has it; `words` is the weight of the question's words in the unit, its headings and its title."""

    alone: float
    jointly: float
    answer: float
    words: float
    near: float
    rank: float
    first_of_section: float
    code_for_how: float
    item: float


class SupportFeatures(NamedTuple):
    """The largest values of all pages and units. `length` is that of the question in tens of words: a long one more
    often asks for a subject than for a fact, and is then answered by what is near."""

    answerable: float
    relevance: float
    jointly_answerable: float
    jointly_relevant: float
    answer: float
    unit: float
    near: float
    length: float
    near_if_long: float


class Observed(NamedTuple):
    """What was observed about the units of passages that were read; `whole` are all units of each passage, `words` the
    question's words in each unit."""

    whole: Sequence[Sequence[Unit]]
    placed: Sequence[PlacedUnit]
    units: Sequence[UnitFeatures]
    support: SupportFeatures
    words: "QuestionWords"


class JointReading(NamedTuple):
    """A reading of the best units of several pages, and the place in it of each (page, unit)."""

    reading: Reading
    places: dict[tuple[int, int], tuple[int, int]]

    def unit(self, placed: PlacedUnit) -> float:
        place = self.places.get((placed.page, placed.place))
        return _at(self.reading, *place) if place is not None else UNREAD

    def answer(self, placed: PlacedUnit) -> float:
        place = self.places.get((placed.page, placed.place))
        answer = self.reading.answer
        return clip(answer.score) if answer is not None and (answer.page, answer.unit) == place else UNREAD


class QuestionWords:
    """Which words of the question each unit has, itself or in its headings and title, and what they weigh."""

    def __init__(self, question: str, passages: Sequence[Passage], units: Sequence[PlacedUnit]) -> None:
        # Capital letters must not change an answer.
        self.wording = Wording(question.lower())
        self.passages = [self.wording.within(bare(passage.title)) for passage in passages]
        above = [
            self.wording.within(" | ".join(passage.place.headers)[:MAX_TITLE]) if passage.place is not None else 0
            for passage in passages
        ]
        self.units: list[int] = []
        titles = tuple(self.passages)
        for placed in units:
            text, unit = passages[placed.passage].text, placed.unit
            found = titles[placed.passage] | self.wording.within(text[unit.start : unit.end])
            found |= self.wording.within(text[slice(*unit.heading)]) if unit.heading else above[placed.passage]
            if unit.lead is not None:
                found |= self.wording.within(text[slice(*unit.lead)])
            self.units.append(found)
            self.passages[placed.passage] |= found
        self._weights = word_weights(self.wording, self.passages)

    def weight(self, bits: int) -> float:
        return sum(weight for bit, weight in self._weights.items() if bits & bit)


def observed(
    question: str,
    passages: Sequence[Passage],
    pages: Pages,
    readings: Sequence[Reading],
    joint: JointReading | None,
) -> Observed:
    """`readings` are those of the first pages; the units of other pages are left out. Without a joint reading, that of
    each page stands for it."""
    placed = [unit for unit in pages.units if unit.page < len(readings)]
    words = QuestionWords(question, passages, placed)
    near = [
        nearness(passage, share(bits, words.wording.everything))
        for passage, bits in zip(passages, words.passages, strict=True)
    ]
    how = ASKS_HOW.match(question) is not None
    units: list[UnitFeatures] = []
    for at, one in enumerate(placed):
        reading = readings[one.page]
        alone = _at(reading, 0, one.place)
        found = reading.answer is not None and reading.answer.unit == one.place
        own = clip(reading.answer.score) if reading.answer is not None and found else UNREAD
        starts = one.order == 0 or placed[at - 1].unit.heading != one.unit.heading
        units.append(
            UnitFeatures(
                alone=alone,
                jointly=joint.unit(one) if joint is not None else alone,
                answer=joint.answer(one) if joint is not None else own,
                words=words.weight(words.units[at]),
                near=near[one.passage],
                rank=1 / (1 + one.passage),
                first_of_section=float(starts),
                code_for_how=float(how and one.unit.kind == "code"),
                item=float(one.unit.kind == "item"),
            )
        )
    length = min(MAX_LENGTH, len(words.wording.stems)) / 10
    return Observed(pages.whole, placed, units, _support(readings, joint, units, near, length), words)


def _support(
    readings: Sequence[Reading],
    joint: JointReading | None,
    units: Sequence[UnitFeatures],
    near: Sequence[float],
    length: float,
) -> SupportFeatures:
    answerable = max((clip(reading.answerable) for reading in readings), default=UNREAD)
    relevance = max((clip(reading.relevance) for reading in readings), default=UNREAD)
    nearest = max(near, default=0.0)
    return SupportFeatures(
        answerable=answerable,
        relevance=relevance,
        jointly_answerable=clip(joint.reading.answerable) if joint is not None else answerable,
        jointly_relevant=clip(joint.reading.relevance) if joint is not None else relevance,
        answer=max((clip(one.answer.score) for one in readings if one.answer is not None), default=UNREAD),
        unit=max((unit.jointly for unit in units), default=UNREAD),
        near=nearest,
        length=length,
        near_if_long=nearest * length,
    )


def joined(
    pages: Pages, readings: Sequence[Reading], most_pages: int, most_units: int
) -> tuple[tuple[EvidencePage, ...], dict[tuple[int, int], tuple[int, int]]]:
    """The best units of the best pages, in reading order, and where each unit of a page is among them."""
    best = sorted(range(len(readings)), key=lambda page: -readings[page].relevance)[:most_pages]
    found: list[EvidencePage] = []
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for page in best:
        kept = list(_best_units(readings[page], most_units))
        if kept:
            places.update({(page, unit): (len(found), place) for place, unit in enumerate(kept)})
            whole = pages.pages[page]
            found.append(EvidencePage(title=whole.title, units=tuple(whole.units[unit] for unit in kept)))
    return tuple(found), places


def _best_units(reading: Reading, most: int) -> Iterator[int]:
    scores = reading.units[0] if reading.units else ()
    yield from sorted(sorted(range(len(scores)), key=lambda unit: -scores[unit])[:most])


def _at(reading: Reading, page: int, unit: int) -> float:
    if page >= len(reading.units) or unit >= len(reading.units[page]):
        return UNREAD
    return clip(reading.units[page][unit])


def clip(value: float) -> float:
    return min(CLIP, max(-CLIP, value))
