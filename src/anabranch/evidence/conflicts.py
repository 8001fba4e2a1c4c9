"""Documents that contradict each other on what was asked. A wrong "the sources disagree" is worse than a missed one:
sentences must be about the same and differ in one exact thing, and a model must find that one contradicts the other."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from anabranch.domain.contracts import RunInThread
from anabranch.domain.evidence import ClaimChecker, EvidencePage, Verdict
from anabranch.domain.model import ConflictKind, Passage, QuotedSpan, SourceConflict
from anabranch.text.disagreement import ReadStatement, Stated, disagreement
from anabranch.text.exact_checks import differences
from anabranch.text.language import is_english
from anabranch.text.pages import page
from anabranch.text.reading import root
from anabranch.text.support import Wording, share
from anabranch.text.units import Unit, units

# Passages that are compared, sentences of each, the share of the question's words that they must have, and that of the
# words of the best one: what says less of them is about something else.
MAX_PASSAGES, MAX_SENTENCES, ASKED, AS_GOOD = 8, 3, 0.6, 0.6
MAX_PASSAGE, MAX_UNITS, MAX_UNIT = 8_000, 200, 400
# Pairs that a model checks, in both directions: at most six checks for a question.
MAX_PAIRS = 3
# A passage that the evidence model has read and that has less evidence than this is not compared.
LEAST_EVIDENCE = 0.05
# The probability from which on a sentence contradicts another; and that of support, from which on it does not.
CONTRADICTED, SUPPORTED = 0.8, 0.4
MAX_S = 1.0
# A sentence that reports a conflict has this share of its words from the two sides and their titles.
REPORTED = 0.7
# Words with which it says that somebody says it.
_REPORTING = """
source document passage text page disagree differ contradict conflict inconsistent one other another first second say
state report give name claim mention according while whereas both two however
"""
REPORTING = frozenset(map(root, _REPORTING.split()))


class Side(NamedTuple):
    """A sentence that may answer; `asked` is the share of the question's words in it and above it."""

    passage: int
    unit: Unit
    asked: float
    statement: ReadStatement


class Pair(NamedTuple):
    """Sentences that differ; `fuller`: the first says more."""

    one: Side
    other: Side
    kind: ConflictKind
    fuller: bool


async def conflicts(
    checker: ClaimChecker,
    question: str,
    passages: Sequence[Passage],
    until: float,
    run: RunInThread = asyncio.to_thread,
) -> tuple[SourceConflict, ...]:
    """The surest first; at most one for two passages."""
    found = await run(pairs, question, passages)
    certain: list[SourceConflict] = []
    for pair in found:
        probability = await _probability(checker, pair, passages, until)
        if probability is not None:
            certain.append(_conflict(pair, probability))
    return tuple(sorted(certain, key=lambda one: -one.probability))


def pairs(question: str, passages: Sequence[Passage]) -> list[Pair]:
    """What a model has to check, the best first."""
    if not is_english(question):
        return []
    wording = Wording(question)
    compared = [side for at in range(min(len(passages), MAX_PASSAGES)) for side in _sides(wording, at, passages[at])]
    least = AS_GOOD * max((side.asked for side in compared), default=0.0)
    compared = [side for side in compared if side.asked >= least]
    asked = ReadStatement(Stated(question))
    found: dict[tuple[int, int], Pair] = {}
    for one, other in combinations(compared, 2):
        places = one.passage, other.passage
        if places in found or _document(passages[one.passage]) == _document(passages[other.passage]):
            continue
        if (differing := disagreement(asked, one.statement, other.statement)) is not None:
            found[places] = Pair(one, other, *differing)
    return sorted(found.values(), key=lambda pair: -min(pair.one.asked, pair.other.asked))[:MAX_PAIRS]


def both_sides(
    claim: str, cited: Sequence[int], passages: Sequence[Passage], found: Sequence[SourceConflict]
) -> SourceConflict | None:
    """The conflict of which a sentence reports both sides: it cites both or none, says what differs of both, and
    nothing else but that somebody says it."""
    for one in found:
        if cited and not {one.claim.passage, one.against.passage} <= set(cited):
            continue
        said = [passages[side.passage].text[side.start : side.end] for side in (one.claim, one.against)]
        titles = "\n".join(passages[side.passage].title for side in (one.claim, one.against))
        words = ReadStatement(Stated(claim)).words - REPORTING
        known = ReadStatement(Stated("\n".join(said), titles))
        one_side, other_side = (ReadStatement(Stated(side)).words for side in said)
        # Both have words that the other side does not have, or the sentence differs from each of them.
        both = words & (one_side - other_side) and words & (other_side - one_side)
        reported = (both or all(differences(claim, side) for side in said)) and not differences(
            claim, "\n".join(said), titles
        )
        if reported and len(words & (known.words | known.above_words)) >= REPORTED * len(words):
            return one
    return None


def _sides(wording: Wording, at: int, passage: Passage) -> Iterator[Side]:
    """The sentences of a passage with most of the question's words, the best first."""
    text = passage.text[:MAX_PASSAGE]
    if (passage.evidence is not None and passage.evidence < LEAST_EVIDENCE) or not is_english(text):
        return
    title = wording.within(passage.title)
    found: list[tuple[float, Unit]] = []
    for unit in units(text)[:MAX_UNITS]:
        says = unit.kind not in ("code", "row") and unit.end - unit.start <= MAX_UNIT and text[unit.end - 1] != "?"
        if says and (own := wording.within(text[unit.start : unit.end])):
            found.append((share(own | title, wording.words), unit))
    found.sort(key=lambda one: -one[0])
    for asked, unit in found[:MAX_SENTENCES]:
        if asked >= ASKED:
            yield Side(at, unit, asked, ReadStatement(_stated(passage, text, unit)))


def _stated(passage: Passage, text: str, unit: Unit) -> Stated:
    headers = passage.place.headers if passage.place is not None else ()
    heading = text[slice(*unit.heading)] if unit.heading else headers[-1] if headers else ""
    title, is_first = passage.title, unit.heading is not None and text[: unit.heading[0]] == "# "
    # The first heading is the title of the document.
    if is_first or heading in (title, *headers[:1]):
        title, heading = f"{title}\n{heading}", ""
    subject = "\n".join(text[slice(*span)] for span in (unit.lead, unit.subject) if span is not None)
    return Stated(text[unit.start : unit.end], title, heading, subject)


def _document(passage: Passage) -> tuple[str, str]:
    return passage.source, passage.document_id or passage.title


async def _probability(checker: ClaimChecker, pair: Pair, passages: Sequence[Passage], until: float) -> float | None:
    """None if it is no contradiction, or there is no verdict. The sentence that says less is checked first: what is
    added in the other is not known to it, which is no contradiction."""
    sides = (pair.other, pair.one) if pair.fuller else (pair.one, pair.other)
    found: list[Verdict] = []
    for claim, against in (sides, sides[::-1]):
        (verdict,) = await checker.check(claim.statement.text, [(_page(against, passages),)], until=until)
        if verdict is None or verdict.supported >= SUPPORTED:
            return None
        found.append(verdict)
        if len(found) == 1 and verdict.contradicted < CONTRADICTED:
            return None
    return round(found[0].contradicted, 4)


def _page(side: Side, passages: Sequence[Passage]) -> EvidencePage:
    passage = passages[side.passage]
    headers = passage.place.headers if passage.place is not None else ()
    return page(passage.title, headers, passage.text, [side.unit])


def _conflict(pair: Pair, probability: float) -> SourceConflict:
    claim, against = (
        QuotedSpan(passage=side.passage, start=side.unit.start, end=side.unit.end) for side in (pair.one, pair.other)
    )
    return SourceConflict(claim=claim, against=against, kind=pair.kind, probability=probability)
