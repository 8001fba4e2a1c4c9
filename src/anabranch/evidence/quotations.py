"""Which units an answer quotes: the one that answers first, then what supports it, and one for each source that
answers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from anabranch.domain.model import MAX_QUERY, Passage
from anabranch.evidence.judge import JudgedUnit, Judgement
from anabranch.evidence.weights import NextFeatures, log_odds, probability_of_next
from anabranch.text.near_duplicates import decisive_words, similarity
from anabranch.text.support import Wording, bare, share
from anabranch.text.units import LISTED, Unit, are_of_one_list

# Quotations of an answer, and the characters after which no further one is added.
MOST, SHORT = 3, 400
# A list is quoted whole up to this length.
MAX_LIST = 1_200
MAX_UNIT = 1_000
# A unit is quoted beside the best one from this probability on; and a less likely one with at least PLAUSIBLE odds of
# being evidence itself, as long as the probability that none of the others is evidence is above DOUBT.
LIKELY, PLAUSIBLE, DOUBT = 0.2, 0.1, 0.5
# Beside a unit that is this probable, only what adds something, or is of another source, is quoted.
CERTAIN = 0.9
# The best so many are tried: others would repeat them, or not fit.
TRIED = 12
# Units that are more similar than this say the same.
SAME = 0.9
# The share of the question's words that only the heading has, from which on it is quoted with its unit.
IN_HEADING = 0.2
_PLURAL = r"(?!(?:does|is|was|has|this|its)\b)\w{2,}[^s\W]s"
_AFTER_NOUN = (
    r"(?:are|were|do|does|did|can|could|may|might|must|should|will|would|have|exist|there|in|of|for|to|from|with)"
)
# "Which formats …", "which file formats can …", "what are the …", "list all …". Not "which setting controls …".
ASKS_LIST = re.compile(
    rf"\b(?:which|what)\s+{_PLURAL}\b(?!\s*\()"
    rf"|\b(?:which|what)\s+[\w'-]+\s+(?:[\w'-]+\s+)?{_PLURAL}\s*(?:\?|$|{_AFTER_NOUN}\b)"
    r"|\b(?:what are|list|name the|types of|kinds of|all the)\b"
    r"|\b(?:allowed|possible|valid|available|supported|accepted|permitted)\s+[\w'-]{2,}[^s\W]s\b",
    re.IGNORECASE,
)
POINTS_BACK = re.compile(
    r"[\"'“(]*(?:it|its|he|his|she|her|they|their|this|these|those|such|both|then|also|however|therefore|thus|hence|"
    r"otherwise|instead|(?:for|in|because of|as) (?:this|these|that|such)\b)\b",
    re.IGNORECASE,
)

Span = tuple[int, int]


class Quotation(NamedTuple):
    """Spans of a passage that are quoted together, in reading order; `heading` is said before them, and `block` says
    that their lines stay as they are. `source` is named before the quotation where several sources answer."""

    passage: int
    spans: tuple[Span, ...]
    heading: str = ""
    block: bool = False
    source: str = ""


def quotations(question: str, passages: Sequence[Passage], judged: Judgement) -> list[Quotation]:
    """The best first. Empty without units. A question in a document says nothing."""
    judged = judged._replace(units=tuple(unit for unit in judged.units if not _asks(passages, unit)))
    if not judged.units:
        return []
    best = best_unit(judged)
    sources = {passages[best.placed.passage].source}
    likely = [
        (likelihood, unit)
        for unit, features in beside(best, passages, judged)
        if ((likelihood := probability_of_next(features)) >= LIKELY or unit.probability >= PLAUSIBLE)
        and (best.probability < CERTAIN or _adds(features) or passages[unit.placed.passage].source not in sources)
    ]
    # The best of every other source comes before a second one of a source.
    likely.sort(key=lambda one: (passages[one[1].placed.passage].source in sources, -one[0]))
    reader = Quoting(question, passages, judged.whole)
    chosen = [reader.quotation(best)]
    doubt = 1 - best.probability
    for likelihood, unit in likely[:TRIED]:
        if len(chosen) == MOST:
            break
        if (likelihood < LIKELY and doubt <= DOUBT) or _is_other_row(unit, best):
            continue
        source = passages[unit.placed.passage].source
        added = reader.quotation(unit)
        fits = sum(map(_length, chosen)) + _length(added) <= SHORT
        if (fits or source not in sources) and not _repeats(added, chosen, passages):
            chosen.append(added)
            sources.add(source)
            doubt *= 1 - unit.probability
    return _named(chosen, passages)


def best_unit(judged: Judgement) -> JudgedUnit:
    return max(judged.units, key=lambda unit: unit.probability)


def beside(
    best: JudgedUnit, passages: Sequence[Passage], judged: Judgement
) -> Iterator[tuple[JudgedUnit, NextFeatures]]:
    """The other units, with what is known of them given the best one: a question may need two documents, of which the
    first names the second."""
    words = judged.words
    said = _text(passages, best).lower()
    titles = [bare(passage.title).strip().lower() for passage in passages]
    missing = 1 - words.weight(best.words)
    for unit in judged.units:
        if unit is not best:
            at = unit.placed.passage
            same = at == best.placed.passage
            found = NextFeatures(
                unit=log_odds(unit.probability),
                added=words.weight(unit.words & ~best.words),
                named=float(not same and len(titles[at]) > 2 and titles[at] in said),
                same_passage=float(same),
                missing=missing,
            )
            yield unit, found


def _asks(passages: Sequence[Passage], judged: JudgedUnit) -> bool:
    return judged.placed.unit.kind == "sentence" and _text(passages, judged).endswith("?")


def _adds(features: NextFeatures) -> bool:
    """Whether it has words of the question that the best one lacks, or is about what the best one names."""
    return features.added > 0 or features.named > 0


def _text(passages: Sequence[Passage], judged: JudgedUnit) -> str:
    unit = judged.placed.unit
    return passages[judged.placed.passage].text[unit.start : unit.end]


def _is_other_row(one: JudgedUnit, best: JudgedUnit) -> bool:
    """Whether it is a row of the same table that has no other words of the question: the row that matches best stands
    for itself."""
    rows = one.placed.unit.kind == best.placed.unit.kind == "row" and one.placed.passage == best.placed.passage
    return rows and one.placed.unit.lead == best.placed.unit.lead and not one.words & ~best.words


def _length(quotation: Quotation) -> int:
    return sum(end - start for start, end in quotation.spans)


def _repeats(added: Quotation, chosen: Sequence[Quotation], passages: Sequence[Passage]) -> bool:
    """Whether its last part is quoted already, or in almost the same words and with the same numbers."""
    start, end = added.spans[-1]
    text = passages[added.passage].text[start:end]
    for quotation in chosen:
        if quotation.passage == added.passage and any(a < end and start < b for a, b in quotation.spans):
            return True
        own = passages[quotation.passage].text[slice(*quotation.spans[-1])]
        if similarity(text, own, SAME) >= SAME and decisive_words(text) == decisive_words(own):
            return True
    return False


def _named(found: list[Quotation], passages: Sequence[Passage]) -> list[Quotation]:
    sources = {passages[one.passage].source for one in found}
    if len(sources) < 2:
        return found
    return [one._replace(source=passages[one.passage].source) for one in found]


class Quoting:
    """Turns units into quotations: with their lead, the whole list if it is asked for, and what they refer to."""

    def __init__(self, question: str, passages: Sequence[Passage], units: Mapping[int, Sequence[Unit]]) -> None:
        self._wording = Wording(question[:MAX_QUERY].lower())
        self._asks_list = ASKS_LIST.search(question, 0, MAX_QUERY) is not None
        self._passages = passages
        self._units = units

    def quotation(self, judged: JudgedUnit) -> Quotation:
        at, order, unit = judged.placed.passage, judged.placed.order, judged.placed.unit
        heading = self._heading(at, unit)
        listed = self._list(at, order)
        if len(listed) > 1:
            lead = [unit.lead] if unit.lead is not None and unit.lead[1] <= listed[0][0] else []
            return Quotation(at, (*lead, *listed), heading, block=True)
        spans: tuple[Span, ...] = (self._cut(at, unit),)
        if unit.lead is not None:
            spans = (unit.lead, *spans)
        elif before := self._antecedent(at, order):
            spans = (before, *spans)
        announced = self._announced(at, order)
        return Quotation(at, spans + announced, heading, block=bool(announced) or unit.kind in ("row", "code"))

    def _cut(self, at: int, unit: Unit) -> Span:
        """The unit; an overlong one up to a word."""
        if unit.end - unit.start <= MAX_UNIT or unit.kind == "code":
            return unit.start, unit.end
        space = self._passages[at].text.rfind(" ", unit.start + MAX_UNIT // 2, unit.start + MAX_UNIT)
        return unit.start, space if space > 0 else unit.start + MAX_UNIT

    def _list(self, at: int, order: int) -> list[Span]:
        """The unit and the list that it introduces, or the list that it is in if one is asked for and it is not after
        the part of the list that is quoted."""
        units, unit = self._units[at], self._units[at][order]
        first, like = order, unit
        if self._introduces(at, order):
            like = units[order + 1]
        elif not self._asks_list or unit.kind not in LISTED or unit.kind == "row":
            # A row stands for itself: a question that a row answers does not ask for the table.
            return []
        while first and like is unit and are_of_one_list(units[first - 1], like):
            first -= 1
        last = order + 1
        while last < len(units) and are_of_one_list(units[last], like):
            last += 1
        spans: list[Span] = []
        for one in units[first:last]:
            if spans and one.end - units[first].start > MAX_LIST:
                break
            spans.append((one.start, one.end))
        return spans if (unit.start, unit.end) in spans else []

    def _introduces(self, at: int, order: int) -> bool:
        units = self._units[at]
        text = self._passages[at].text
        unit = units[order]
        if order + 1 == len(units) or units[order + 1].kind not in LISTED or unit.kind == "code":
            return False
        return text[unit.end - 1] == ":" or units[order + 1].lead == (unit.start, unit.end)

    def _announced(self, at: int, order: int) -> tuple[Span, ...]:
        """What follows a sentence that ends with a colon, as far as the answer stays short; a list that is asked for
        may be longer."""
        units, text = self._units[at], self._passages[at].text
        unit = units[order]
        found: list[Span] = []
        if text[unit.end - 1] == ":" and unit.kind != "code":
            for one in units[order + 1 :]:
                most = MAX_LIST if self._asks_list and one.kind in LISTED else SHORT
                if one.heading != unit.heading or one.end - unit.start > most:
                    break
                found.append((one.start, one.end))
        return tuple(found)

    def _antecedent(self, at: int, order: int) -> Span | None:
        """The unit before one that begins with "It" or "This"."""
        units = self._units[at]
        unit = units[order]
        text = self._passages[at].text
        if order == 0 or unit.kind == "code" or not POINTS_BACK.match(text, unit.start, unit.end):
            return None
        before = units[order - 1]
        if before.kind not in ("sentence", "definition"):
            return None
        fits = before.end - before.start + unit.end - unit.start <= SHORT
        return (before.start, before.end) if fits and before.heading == unit.heading else None

    def _heading(self, at: int, unit: Unit) -> str:
        """The heading, if it has words of the question that the unit does not have."""
        passage = self._passages[at]
        if unit.heading is not None:
            heading = passage.text[slice(*unit.heading)]
        else:
            heading = passage.place.headers[-1] if passage.place is not None and passage.place.headers else ""
        own = self._wording.within(passage.text[unit.start : unit.end])
        missing = self._wording.within(heading) & ~own
        return heading if heading and share(missing, self._wording.words) >= IN_HEADING else ""
