"""Judges units and passages: the evidence model's readings and rules, combined by fitted weights."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anabranch.domain.contracts import RunInThread
from anabranch.domain.evidence import Evidence, Reading
from anabranch.domain.model import Passage
from anabranch.evidence.choice import candidates
from anabranch.evidence.features import JointReading, Observed, QuestionWords, joined, observed
from anabranch.evidence.pages import Pages, PlacedUnit, paged
from anabranch.evidence.weights import probability_of_support, probability_of_unit
from anabranch.text.language import is_english
from anabranch.text.support import WORD, bare
from anabranch.text.units import Unit

# A joint reading has the best units of the best pages.
JOINT_PAGES, JOINT_UNITS = 8, 3
# The first passage is read alone, the others a few at a time. Once the log-odds that one answers are above SURE, no
# more are read, nor jointly; nor are they jointly if all are below SURELY_NOT. The figures hardly change, and it is
# half of the cost.
AT_A_TIME = 2
SURE, SURELY_NOT = 1.0, -3.5
# Of more passages, those to read are chosen in a thread; those with more characters are split into units in one.
INLINE_PASSAGES, INLINE_CHARACTERS = 100, 20_000
# A shorter title is found in any text.
LEAST_TITLE = 3
# Judging takes at most this long.
MAX_S = 2.0
# The probability of support from which on an answer is given: at 0.5 many more answerable questions are refused.
SUPPORTED = 0.42


class JudgedUnit(NamedTuple):
    placed: PlacedUnit
    probability: float
    # The question's words in it.
    words: int


class Judgement(NamedTuple):
    """`support` is the probability that the passages answer the question; `passages` that of each passage that it has
    evidence, None if it was not read; `units` are those that were read, `whole` all units of each passage. `sure`: a
    passage surely answers, which ends the reading."""

    support: float
    passages: tuple[float | None, ...]
    units: tuple[JudgedUnit, ...]
    whole: Mapping[int, Sequence[Unit]]
    words: QuestionWords
    sure: bool


class Judge:
    """Reads at most `limit` passages."""

    def __init__(self, evidence: Evidence, limit: int, run: RunInThread = asyncio.to_thread) -> None:
        self._evidence = evidence
        self._limit = limit
        self._run = run

    async def judge(self, question: str, passages: Sequence[Passage], until: float | None = None) -> Judgement | None:
        """None where rules have to do: the question has no words, it or most of the passages are not English, the model
        is not there or had no time, or it would refuse although some passages are not English."""
        found = await self.judgement_or_reason(question, passages, until)
        return found if isinstance(found, Judgement) else None

    async def judgement_or_reason(
        self, question: str, passages: Sequence[Passage], until: float | None
    ) -> Judgement | str:
        """The judgement, or why rules are used instead."""
        order = await self._candidates(question, passages)
        chosen = [passages[index] for index in order]
        foreign = sum(not is_english(passage.text) for passage in chosen)
        if not WORD.search(question):
            return "the question has no words"
        if not is_english(question):
            return "the question is not in English"
        if foreign * 2 >= len(chosen):
            return "too few passages are in English"
        found = await self.observe(question, chosen, until)
        if found is None:
            return "no time was left, or the evidence model is not installed"
        judged = judgement(found, order, len(passages))
        if foreign and judged.support < SUPPORTED:
            return "the passages in English do not answer, and others are not in English"
        return judged

    async def _candidates(self, question: str, passages: Sequence[Passage]) -> Sequence[int]:
        if len(passages) <= INLINE_PASSAGES:
            return candidates(question, passages, self._limit)
        return await self._run(candidates, question, passages, self._limit)

    async def observe(self, question: str, passages: Sequence[Passage], until: float | None = None) -> Observed | None:
        """None if nothing was read. The best passage of every source comes before a second one of a source."""
        is_short = sum(len(passage.text) for passage in passages) <= INLINE_CHARACTERS
        pages = paged(question, passages) if is_short else await self._run(paged, question, passages)
        sources = len({passage.source for passage in passages})
        readings = await self._read(question, pages, sources, until, linked=_names_another(passages))
        if not readings:
            return None
        joint = None
        if len(readings) > 1 and SURELY_NOT <= _best(readings) < SURE:
            together, places = joined(pages, readings, JOINT_PAGES, JOINT_UNITS)
            (reading,) = await self._evidence.read(question, [together], until=until)
            joint = JointReading(reading, places) if reading is not None else None
        return observed(question, passages, pages, readings, joint)

    async def _read(
        self, question: str, pages: Pages, least: int, until: float | None, *, linked: bool
    ) -> list[Reading]:
        """The readings of the first pages, until one surely answers, or there is no time. If the first passage is
        `linked` to another, reading goes on after it: the question may need both."""
        found: list[Reading] = []
        while len(found) < len(pages.pages):
            begin = len(found)
            end = pages.end_of(max(pages.passage_of(begin) + (AT_A_TIME if begin else 1), least))
            inputs = [(page,) for page in pages.pages[begin:end]]
            for reading in await self._evidence.read(question, inputs, until=until):
                if reading is None:
                    return found
                found.append(reading)
            if _best(found) >= SURE and (begin or not linked):
                break
        return found


def _names_another(passages: Sequence[Passage]) -> bool:
    """Whether the first passage names the document of another."""
    text = passages[0].text.lower()
    own, *others = [bare(passage.title).strip().lower() for passage in passages]
    return any(len(title) > LEAST_TITLE and title != own and title in text for title in others)


def _best(readings: Sequence[Reading]) -> float:
    return max(reading.answerable for reading in readings)


def judgement(found: Observed, order: Sequence[int], passages: int) -> Judgement:
    """`order` has the number of each passage that was observed among all `passages`."""
    units = tuple(
        JudgedUnit(placed._replace(passage=order[placed.passage]), probability_of_unit(features), words)
        for placed, features, words in zip(found.placed, found.units, found.words.units, strict=True)
    )
    best: list[float | None] = [None] * passages
    for unit in units:
        best[unit.placed.passage] = max(best[unit.placed.passage] or 0.0, unit.probability)
    return Judgement(
        support=probability_of_support(found.support, max((unit.probability for unit in units), default=0.0)),
        passages=tuple(best),
        units=units,
        whole={order[index]: whole for index, whole in enumerate(found.whole)},
        words=found.words,
        sure=found.support.answerable >= SURE,
    )
