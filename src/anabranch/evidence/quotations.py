"""Which units an answer quotes: the one that answers first, then what supports it, and one for each source that
answers."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.domain.model import Passage
from anabranch.evidence.judge import JudgedUnit, Judgement
from anabranch.text.near_duplicates import similarity
from anabranch.text.support import Wording, share
from anabranch.text.units import Unit

# Quotations of an answer, and the characters after which no further one is added.
MOST, SHORT = 3, 400
# A list is quoted whole up to this length.
MAX_LIST = 1_200
# A unit is quoted beside the best one from this probability on, and from this share of the best one's.
LIKELY, BESIDE_BEST = 0.5, 0.6
# Units that are more similar than this say the same.
SAME = 0.9
# The share of the question's words that only the heading has, from which on it is quoted with its unit.
IN_HEADING = 0.2
ASKS_LIST = re.compile(
    r"\b(?:which|what|list|name|enumerate)\b(?:\s+\S+){0,4}?\s+(?:are|\w{3,}s)\b|\b(?:list|all|types of|kinds of)\b",
    re.IGNORECASE,
)
POINTS_BACK = re.compile(
    r"[\"'“(]*(?:it|its|he|his|she|her|they|their|this|these|those|such|both|then|also|however)\b", re.IGNORECASE
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
    """The best first. Empty without units."""
    ranked = sorted(judged.units, key=lambda unit: -unit.probability)
    if not ranked:
        return []
    chosen = _chosen(passages, ranked)
    reader = Quoting(question, passages, judged.units)
    found = [reader.quotation(unit) for unit in chosen]
    return _named(found, passages)


def _chosen(passages: Sequence[Passage], ranked: Sequence[JudgedUnit]) -> list[JudgedUnit]:
    best = ranked[0]
    chosen = [best]
    texts = [_text(passages, best)]
    left = SHORT - len(texts[0])
    sources = {passages[best.placed.passage].source}
    likely = [unit for unit in ranked[1:] if unit.probability >= max(LIKELY, BESIDE_BEST * best.probability)]
    # The best of every other source comes before a second one of a source.
    likely.sort(key=lambda unit: passages[unit.placed.passage].source in sources)
    for unit in likely:
        text = _text(passages, unit)
        source = passages[unit.placed.passage].source
        if len(chosen) == MOST or (len(text) > left and source in sources):
            continue
        if any(similarity(text, other, SAME) >= SAME for other in texts):
            continue
        chosen.append(unit)
        texts.append(text)
        left -= len(text)
        sources.add(source)
    return chosen


def _text(passages: Sequence[Passage], judged: JudgedUnit) -> str:
    unit = judged.placed.unit
    return passages[judged.placed.passage].text[unit.start : unit.end]


def _named(found: list[Quotation], passages: Sequence[Passage]) -> list[Quotation]:
    sources = {passages[one.passage].source for one in found}
    if len(sources) < 2:
        return found
    return [one._replace(source=passages[one.passage].source) for one in found]


class Quoting:
    """Turns units into quotations: with their lead, the whole list if it is asked for, and what they refer to."""

    def __init__(self, question: str, passages: Sequence[Passage], units: Sequence[JudgedUnit]) -> None:
        self._wording = Wording(question)
        self._asks_list = ASKS_LIST.search(question) is not None
        self._passages = passages
        self._units: dict[int, list[Unit]] = {}
        for judged in units:
            self._units.setdefault(judged.placed.passage, []).append(judged.placed.unit)

    def quotation(self, judged: JudgedUnit) -> Quotation:
        at, unit = judged.placed.passage, judged.placed.unit
        siblings = self._items(at, unit)
        if siblings:
            lead = siblings[0].lead
            spans = (*([lead] if lead else []), *((one.start, one.end) for one in siblings))
            return Quotation(at, spans, self._heading(at, unit), block=True)
        spans = ((unit.start, unit.end),)
        if unit.lead is not None and (unit.kind == "row" or unit.kind == "item"):
            spans = (unit.lead, *spans)
        elif before := self._antecedent(at, judged.placed.order):
            spans = (before, *spans)
        return Quotation(at, spans, self._heading(at, unit), block=unit.kind in ("row", "code"))

    def _items(self, at: int, unit: Unit) -> list[Unit]:
        """The items of the list that the unit leads to, or is part of if a list is asked for."""
        lead = (unit.start, unit.end)
        if unit.kind == "item" and self._asks_list:
            items = [one for one in self._units[at] if one.kind == "item" and one.lead == unit.lead]
            items = list(_adjacent(items, unit, self._units[at]))
        else:
            items = [one for one in self._units[at] if one.lead == lead]
        kept: list[Unit] = []
        size = 0
        for item in items:
            size += item.end - item.start
            if size > MAX_LIST:
                break
            kept.append(item)
        return kept

    def _antecedent(self, at: int, order: int) -> Span | None:
        """The unit before one that begins with "It" or "This"."""
        units = self._units[at]
        unit = units[order]
        text = self._passages[at].text
        if order == 0 or not POINTS_BACK.match(text, unit.start, unit.end):
            return None
        before = units[order - 1]
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


def _adjacent(items: Sequence[Unit], unit: Unit, units: Sequence[Unit]) -> Iterator[Unit]:
    """Those items that are in one run with the unit: two lists of a passage may both have no lead."""
    places = [units.index(item) for item in items]
    middle = places.index(units.index(unit))
    first = middle
    while first and places[first - 1] == places[first] - 1:
        first -= 1
    for place, item in zip(places[first:], items[first:], strict=True):
        if place - places[first] != items.index(item) - first:
            break
        yield item
