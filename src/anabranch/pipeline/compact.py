"""Compact context: of each passage the units that bear on the question, within a number of tokens."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from anabranch.domain.contracts import RunInThread
from anabranch.domain.evidence import Evidence
from anabranch.domain.model import Passage
from anabranch.pipeline.prompt import Excerpt, escaped, estimate
from anabranch.text.language import is_english
from anabranch.text.pages import page
from anabranch.text.sentences import Span
from anabranch.text.support import Wording, bare, each_bit, readable
from anabranch.text.units import Unit, units

OMISSION = "…"
# What may stand between two units without a word that is left out: white space, punctuation, the number of an item.
MARKUP = re.compile(r"\W*(?:\d{1,3}[.)][ \t]+)?")
LINE_END = re.compile(r"[ \t]*\n")
# More than that is no mark of an item.
MAX_MARKUP = 12
# Beside the text of a span: what is lost by rounding, and what stands before it.
SPAN_TOKENS = 8
# A unit that does not fit is cut if so many tokens are left for it.
WORTH_CUTTING = 40
# A sentence is read with those beside it: this part of their score counts for it, too.
BESIDE = 0.3
MAX_TITLE = 300
# So many characters of each passage tell the language.
SAMPLE = 250

# Passages with more characters are read in a thread.
INLINE_CHARACTERS = 20_000

# The scores by words. The question's words that are only in the heading, the lead-in or the title have a share of their
# weight; a higher rank is an advantage; what is below the threshold does not bear on the question.
ABOVE_SHARE, RANK, THRESHOLD = 0.5, 0.05, 0.1
# The log-odds from which on a unit bears on the question: low, because a prompt has more room than an answer.
LOG_ODDS = -4.0
# What the evidence model has not read comes after all that it has.
UNREAD = -100.0

Scores = Sequence[Sequence[float]]


class Compactor:
    """Chooses excerpts of passages by what the evidence model says of the units of the first `most` passages; by their
    words without one, and if the question or the passages are not English, which is all that it has learned."""

    def __init__(self, evidence: Evidence | None = None, most: int = 8, run: RunInThread = asyncio.to_thread) -> None:
        self._evidence = evidence
        self._most = most
        self._run = run

    async def choose(
        self, question: str, passages: Sequence[Passage], overheads: Sequence[int], room: int
    ) -> Sequence[Excerpt]:
        """Excerpts within `room` tokens; each passage costs its `overheads` beside its text."""
        texts = readable(passages)
        is_short = sum(map(len, texts)) <= INLINE_CHARACTERS
        read = (question, passages, texts)
        split, scores = _read(*read) if is_short else await self._run(_read, *read)
        if self._evidence is not None and is_english(question) and is_english(_sample(texts[: self._most])):
            pages = [
                (page(one.title, one.place.headers if one.place is not None else (), text, found),)
                for one, text, found in zip(passages[: self._most], texts, split, strict=False)
            ]
            readings = await self._evidence.read(question, pages)
            scores = evidence_scores([None if one is None else one.units[:1] for one in readings], scores)
        return excerpts(passages, split, scores, overheads, room)


def _read(question: str, passages: Sequence[Passage], texts: Sequence[str]) -> tuple[Sequence[Sequence[Unit]], Scores]:
    split = [units(text) or _whole(text) for text in texts]
    return split, word_scores(question, passages, texts, split)


def word_scores(
    question: str, passages: Sequence[Passage], texts: Sequence[str], split: Sequence[Sequence[Unit]]
) -> Scores:
    """How much of the question's words a unit has: rare ones weigh more. Above 0 it bears on the question."""
    wording = Wording(question)
    within = [
        [wording.within(text[unit.start : unit.end]) for unit in found]
        for text, found in zip(texts, split, strict=True)
    ]
    spread = Counter(bit for found in within for bits in found for bit in each_bit(bits))
    count = sum(map(len, within))
    weights = {bit: math.log(1 + (count + 1) / (spread[bit] + 0.5)) for bit in each_bit(wording.everything)}
    whole = sum(weights.values()) or 1.0

    def weight(bits: int) -> float:
        return sum(weights[bit] for bit in each_bit(bits)) / whole

    scores = []
    for rank, (passage, text, found, words) in enumerate(zip(passages, texts, split, within, strict=False)):
        title = wording.within(f"{bare(passage.title)} | {_headers(passage)}")
        above = [title | wording.within(" | ".join(text[slice(*span)] for span in _above(unit))) for unit in found]
        first = RANK / (1 + rank) - THRESHOLD
        scores.append(
            [first + weight(own) + ABOVE_SHARE * weight(more & ~own) for own, more in zip(words, above, strict=True)]
        )
    return scores


def evidence_scores(log_odds: Sequence[Scores | None], words: Scores) -> Scores:
    """The log-odds of units, above 0 from LOG_ODDS on. What was not read follows in the order of its words."""
    if all(one is None for one in log_odds):
        return words
    scores = [[UNREAD + score for score in of_passage] for of_passage in words]
    for of_passage, read in zip(scores, log_odds, strict=False):
        said = read[0] if read else ()
        of_passage[: len(said)] = [one - LOG_ODDS for one in said[: len(of_passage)]]
    return scores


def excerpts(
    passages: Sequence[Passage],
    split: Sequence[Sequence[Unit]],
    scores: Scores,
    overheads: Sequence[int],
    room: int,
) -> list[Excerpt]:
    """The units with the best scores that fit, in the order of the passages and of their text. Of units with a score of
    0 or less, only the best is taken, and only if there are no others."""
    ranked = sorted(
        (-score, at, number)
        for at, (found, of_passage) in enumerate(zip(split, scores, strict=True))
        for number, score in enumerate(_smoothed(found, of_passage))
    )
    bearing = [one for one in ranked if one[0] < 0] or ranked[:1]
    shown: dict[int, set[Span]] = {}
    for _, at, number in bearing:
        unit, text = split[at][number], passages[at].text
        new = {(unit.start, unit.end), *_above(unit)} - shown.get(at, set())
        cost = sum(estimate(escaped(text[slice(*span)])) + SPAN_TOKENS for span in new)
        cost += 0 if at in shown else overheads[at] + SPAN_TOKENS
        left = room - overheads[at] - 2 * SPAN_TOKENS
        if cost > room and not shown and left > WORTH_CUTTING:
            new, cost = {_beginning(text, unit.start, unit.end, left)}, room
        if cost <= room:
            shown.setdefault(at, set()).update(new)
            room -= cost
    return [Excerpt(passages[at], _joined(passages[at].text, sorted(shown[at]))) for at in sorted(shown)]


def _smoothed(found: Sequence[Unit], scores: Sequence[float]) -> Iterator[float]:
    """Each score; that of a sentence with a part of the better one beside it. Items and rows stand alone."""
    prose = [score if unit.kind == "sentence" else 0.0 for unit, score in zip(found, scores, strict=True)]
    for at, score in enumerate(scores):
        beside = max((0.0, *prose[max(0, at - 1) : at], *prose[at + 1 : at + 2]))
        yield score + BESIDE * beside if found[at].kind == "sentence" else score


def _joined(text: str, spans: Sequence[Span]) -> str:
    """The spans with what is between them, if that is only markup, else with a sign for what is left out."""
    parts: list[str] = []
    at = 0
    for start, end in spans:
        if end > at:
            parts += [_gap(text[at:start], is_first=not parts), text[max(start, at) : end]]
            at = end
    if not MARKUP.fullmatch(text, at):
        parts.append(f"\n{OMISSION}" if LINE_END.match(text, at) else f" {OMISSION}")
    return "".join(parts)


def _gap(between: str, *, is_first: bool) -> str:
    """A text between two spans, or a sign for it; the mark of a list's item, which begins its last line, is kept."""
    if _is_mark(between):
        return between.lstrip("\n") if is_first else between
    omission = "" if MARKUP.fullmatch(between) else OMISSION
    _, newline, line = between.rpartition("\n")
    if not newline:
        return f"{omission} " if is_first else f" {omission} "
    mark = line if _is_mark(line) else ""
    return f"{omission}\n{mark}" if is_first else f"\n{omission}\n{mark}"


def _is_mark(text: str) -> bool:
    return len(text) <= MAX_MARKUP and MARKUP.fullmatch(text) is not None


def _beginning(text: str, start: int, end: int, tokens: int) -> Span:
    """The beginning of a unit in at most so many tokens, up to the end of a word."""
    while (needed := estimate(escaped(text[start:end]))) > tokens:
        end = start + (end - start) * tokens // needed
    space = text.rfind(" ", start + 1, end)
    return start, space if space > 0 else end


def _above(unit: Unit) -> list[Span]:
    """What is read before a unit: its heading, and its table's header or its list's lead-in."""
    return [span for span in (unit.heading, unit.lead) if span is not None]


def _sample(texts: Sequence[str]) -> str:
    return " ".join(text[:SAMPLE] for text in texts)


def _headers(passage: Passage) -> str:
    return " > ".join(passage.place.headers)[:MAX_TITLE] if passage.place is not None else ""


def _whole(text: str) -> list[Unit]:
    """A text without units as one unit."""
    start = len(text) - len(text.lstrip())
    return [Unit("sentence", start, len(text.rstrip()), None, None, None)] if text.strip() else []
