"""What is known about each unit, and about the passages together, before it is weighted."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from anabranch.domain.evidence import Reading
from anabranch.domain.model import Passage
from anabranch.evidence.pages import Pages, PlacedUnit
from anabranch.text.support import Wording, bare, nearness, share, signals, word_weights

# The place in the joint reading (page, unit) of a page's unit.
Members = dict[tuple[int, int], tuple[int, int]]
Span = tuple[int, int]

# Log-odds are clipped: beyond this they say nothing more.
CLIP = 8.0
# The log-odds of what was not read.
UNREAD = -6.0
ASKS_WHAT = re.compile(r"\W*(?:what(?:['’]s|\s+(?:is|are|does))|define|explain|describe)\b", re.IGNORECASE)
ASKS_HOW = re.compile(r"\W*how (?:do|can|to|would|should)\b", re.IGNORECASE)
DEFINES = re.compile(
    r"[\W_]{0,4}(?:(?:an?|the)\s+)?(?P<term>[^\n.;]{1,60}?)[`*\"']{0,3}\s*(?:\([^()\n]{1,40}\)\s*)?"
    r"(?:\b(?:is|are|means|refers to|provides|lets|allows)\b|[:—–]\s|\s-\s)",
    re.IGNORECASE,
)

UNIT_FEATURES = (
    "unit", "joint", "relevance", "answerable", "joint answerable", "answer here", "joint answer here", "words",
    "words with heading", "near", "rank", "defines", "first of its section", "code for how", "row", "item", "length",
)  # fmt: skip
SUPPORT_FEATURES = (
    "answerable", "second answerable", "relevance", "second relevance", "joint answerable", "joint relevance",
    "answer", "joint answer", "unit", "joint unit", "words in a unit", "words in a passage", "words in two passages",
    "names", "near", "about",
)  # fmt: skip


class Observed(NamedTuple):
    """`answers` are the spans of passages with the shortest words that answer, where a unit has them."""

    passages: int
    placed: Sequence[PlacedUnit]
    answers: Sequence[Span | None]
    units: Sequence[tuple[float, ...]]
    support: tuple[float, ...]


def features(
    question: str,
    passages: Sequence[Passage],
    found: Pages,
    readings: Sequence[Reading],
    joint: Reading | None,
    members: Members,
) -> Observed:
    words = QuestionWords(question, passages, found)
    marks = Marks(found, readings, joint, members)
    units = [_unit(question, passages, words, marks, at) for at in range(len(found.units))]
    return Observed(
        passages=len(passages),
        placed=found.units,
        answers=[marks.answer(at) for at in range(len(found.units))],
        units=units,
        support=_support(question, passages, words, marks),
    )


class QuestionWords:
    """Which words of the question each unit and passage has, as shares of their weight."""

    def __init__(self, question: str, passages: Sequence[Passage], found: Pages) -> None:
        self.wording = Wording(question)
        self._titles = [self.wording.within(bare(passage.title)) for passage in passages]
        self._above = [
            self.wording.within(" | ".join(passage.place.headers)[:300]) if passage.place is not None else 0
            for passage in passages
        ]
        self._plain: list[int] = []
        self._headed: list[int] = []
        within = list(self._titles)
        for placed in found.units:
            text = passages[placed.passage].text
            unit = placed.unit
            plain = self.wording.within(text[unit.start : unit.end])
            head = self.wording.within(text[slice(*unit.heading)]) if unit.heading else self._above[placed.passage]
            lead = self.wording.within(text[slice(*unit.lead)]) if unit.lead else 0
            self._plain.append(plain)
            self._headed.append(plain | head | lead | self._titles[placed.passage])
            within[placed.passage] |= plain | head | lead
        self.within = within
        self._weights = word_weights(self.wording, within)

    def share(self, bits: int) -> float:
        return sum(weight for bit, weight in self._weights.items() if bits & bit)

    def in_unit(self, at: int) -> float:
        return self.share(self._plain[at])

    def with_heading(self, at: int) -> float:
        return self.share(self._headed[at])

    def best(self) -> tuple[float, float, float]:
        """In one unit with its headings, in one passage, and in two passages."""
        pairs = [one | other for i, one in enumerate(self.within) for other in self.within[i:]]
        return (
            max(map(self.share, self._headed), default=0.0),
            max(map(self.share, self.within), default=0.0),
            max(map(self.share, pairs), default=0.0),
        )


class Marks:
    """The model's log-odds for units."""

    def __init__(self, found: Pages, readings: Sequence[Reading], joint: Reading | None, members: Members) -> None:
        self._found = found
        self.readings = readings
        self.joint = joint
        self._members = members

    def single(self, at: int) -> float:
        placed = self._found.units[at]
        return _at(self.readings[placed.page], 0, placed.place)

    def together(self, at: int) -> float:
        place = self._member(at)
        return _at(self.joint, *place) if place is not None else UNREAD

    def reading(self, at: int) -> Reading:
        return self.readings[self._found.units[at].page]

    def answered(self, at: int) -> float:
        """The log-odds of the answer's span if it is in this unit."""
        answer = self.reading(at).answer
        return clip(answer.score) if answer is not None and answer.unit == self._found.units[at].place else UNREAD

    def answered_together(self, at: int) -> float:
        answer = self.joint.answer if self.joint is not None else None
        return clip(answer.score) if answer is not None and (answer.page, answer.unit) == self._member(at) else UNREAD

    def answer(self, at: int) -> Span | None:
        """In the passage's text."""
        answer = self.reading(at).answer
        placed = self._found.units[at]
        if answer is None or answer.unit != placed.place:
            return None
        return placed.unit.start + answer.start, placed.unit.start + answer.end

    def _member(self, at: int) -> tuple[int, int] | None:
        placed = self._found.units[at]
        return self._members.get((placed.page, placed.place))


def _unit(question: str, passages: Sequence[Passage], words: QuestionWords, marks: Marks, at: int) -> tuple[float, ...]:
    placed = marks._found.units[at]
    unit, passage = placed.unit, passages[placed.passage]
    reading = marks.reading(at)
    own = share(words.within[placed.passage], words.wording.everything)
    return (
        marks.single(at),
        marks.together(at),
        clip(reading.relevance),
        clip(reading.answerable),
        clip(marks.joint.answerable) if marks.joint is not None else UNREAD,
        marks.answered(at),
        marks.answered_together(at),
        words.in_unit(at),
        words.with_heading(at),
        nearness(passage, own),
        1 / (1 + placed.passage),
        float(ASKS_WHAT.match(question) is not None and _defines(words.wording, passage.text, placed)),
        float(placed.order == 0 or unit.heading != marks._found.units[at - 1].unit.heading),
        float(unit.kind == "code" and ASKS_HOW.match(question) is not None),
        float(unit.kind == "row"),
        float(unit.kind == "item"),
        min(unit.end - unit.start, 1_000) / 1_000,
    )


def _support(question: str, passages: Sequence[Passage], words: QuestionWords, marks: Marks) -> tuple[float, ...]:
    answerable = sorted((clip(reading.answerable) for reading in marks.readings), reverse=True)
    relevance = sorted((clip(reading.relevance) for reading in marks.readings), reverse=True)
    answers = [clip(reading.answer.score) for reading in marks.readings if reading.answer is not None]
    joint = marks.joint
    every = range(len(marks._found.units))
    return (
        *_two(answerable),
        *_two(relevance),
        clip(joint.answerable) if joint is not None else UNREAD,
        clip(joint.relevance) if joint is not None else UNREAD,
        max(answers, default=UNREAD),
        clip(joint.answer.score) if joint is not None and joint.answer is not None else UNREAD,
        max(map(marks.single, every), default=UNREAD),
        max(map(marks.together, every), default=UNREAD),
        *words.best(),
        *(signals(words.wording, passages) if passages else (0.0, 0.0, 0.0)),
    )


def _defines(wording: Wording, text: str, placed: PlacedUnit) -> bool:
    """Whether the unit begins with the question's subject and says what it is."""
    unit = placed.unit
    found = DEFINES.match(text, unit.start, unit.end)
    term = found["term"] if found else text[slice(*unit.subject)] if unit.subject else ""
    return bool(term) and share(wording.within(term), wording.words) >= 0.5


def _two(values: Sequence[float]) -> tuple[float, float]:
    first, second, *_ = (*values, UNREAD, UNREAD)
    return first, second


def _at(reading: Reading | None, page: int, unit: int) -> float:
    if reading is None or page >= len(reading.units) or unit >= len(reading.units[page]):
        return UNREAD
    return clip(reading.units[page][unit])


def clip(value: float) -> float:
    return min(CLIP, max(-CLIP, value))
