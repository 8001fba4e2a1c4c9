"""Whether passages support a sentence of an answer, and with which words."""

import math
import re
from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

import msgspec

from anabranch.domain.evidence import EvidencePage, Verdict
from anabranch.domain.model import Passage, Support
from anabranch.evidence.claim_weights import (
    CONTRADICTED,
    DOUBTED,
    MOST,
    MOST_IN_PART,
    PARTLY,
    SUPPORTED,
    ClaimFeatures,
    is_denied,
    probability,
)
from anabranch.text.exact_checks import differences
from anabranch.text.language import is_english
from anabranch.text.normal_forms import normal_form
from anabranch.text.notation import Notation, in_notation_of
from anabranch.text.pages import page, titled
from anabranch.text.reading import ExactDifference
from anabranch.text.sentences import Span
from anabranch.text.units import LISTED, Unit, units
from anabranch.text.words import terms

# Characters of all passages that are read, and units of each.
MAX_READ, MAX_UNITS = 200_000, 2_000
MAX_CLAIM = 1_000
# Characters that are compared with a claim at once, and the number of units in them.
MAX_COMPARED, MOST_UNITS = 480, 3
# Passages that a claim is compared with; the share of the best one's words that a cited one must have to be the first,
# and of the first one's words that a second must have.
CANDIDATES, FEWER, SECOND = 2, 0.6, 0.7
# A further unit must have this share of the claim's words that are still missing.
ADDS = 0.05
# Words in the title and the headings of a passage count for less than those in its units.
ABOVE = 0.3
# A unit with this share of the claim's words supports it even if the model that reads it does not point at it.
OBVIOUS = 0.5

# With another currency or unit of measure than the source, a claim is at most partly supported, whatever a model says:
# of 762 right claims of the fitted ones, this concerns one.
CERTAIN = "unit"
# From this share of its words on, a claim is nearly in the words of the source.
NEAR = 0.6

TOKEN = re.compile(r"\d+(?:[.,:]\d+)*|(?:[^\W\d_]+[\u0300-\u036f]{0,4})+|[-+<>=\u2264\u2265%\u00b0$\u20ac\u00a3\u2212]")
ACCENT = re.compile(r"[\u0300-\u036f]")
NUMBER = re.compile(r"(?<!\d)\d+(?:[.,:]\d+)+")
# Words with which a model may begin a sentence that it has otherwise copied.
OPENING = re.compile(
    r"(?:and|but|also|however|additionally|furthermore|moreover|thus|so|finally|in addition)[, ]+", re.IGNORECASE
)
LEAST_COPIED = 3
WORDS = re.compile(r"[^\W\d_]{2}|[$\u20ac\u00a3\u00a5]")
# Letters of other scripts: Chinese has no spaces between words.
LONG_WORDS = re.compile(r"[^\W\d_\x00-\u024f][^\n]{3}")


class Candidate(NamedTuple):
    """Units of one passage that may support a claim, by their numbers; `shared` is the share of its words in them."""

    passage: int
    units: tuple[int, ...]
    shared: float


class Comparison(NamedTuple):
    """What a claim is compared with, the claim as a model reads it, and what exact checks found."""

    candidate: Candidate
    asked: Notation
    differing: tuple[ExactDifference, ...]


class Quoted(NamedTuple):
    passage: int
    span: Span


class Finding(NamedTuple):
    """What was found about a claim; `doubted` are spans of its text."""

    verdict: Support
    support: float
    quotes: tuple[Quoted, ...] = ()
    doubted: tuple[Span, ...] = ()


UNSUPPORTED = Finding("unsupported", 0.0)


class ReadPassage(NamedTuple):
    """A passage, its units with their words and those of their subjects, the words of its titles, and its tokens for
    the comparison of copied sentences: joined, with where each begins, and where they are in the text."""

    passage: Passage
    text: str
    units: list[Unit]
    words: list[frozenset[int]]
    subjects: list[frozenset[int]]
    above: frozenset[int]
    joined: str
    begins: list[int]
    spans: list[Span]
    is_english: bool
    # The numbers of the tokens that begin a unit, in order, and that end one.
    firsts: tuple[int, ...]
    lasts: frozenset[int]


class ReadPassages:
    """The passages of an answer, read once for all of its sentences."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._read: list[ReadPassage] = []
        left = MAX_READ
        for passage in passages:
            if left <= 0:
                break
            self._read.append(_read(passage, left))
            left -= len(self._read[-1].text)
        # Whether all text was read. If not, what is not found may be in the rest.
        self.complete = len(self._read) == len(passages) and all(
            len(one.text) == len(one.passage.text) and len(one.units) < MAX_UNITS for one in self._read
        )
        every = [words for one in self._read for words in one.words]
        self.units = len(every)
        spread = Counter(word for words in every for word in words)
        self._rare = {word: math.log(1 + len(every) / count) for word, count in spread.items()}
        # A word that no passage has is as rare as one in a single unit.
        self._rarest = math.log(1 + len(every)) if every else 1.0
        self.is_english = not passages or any(one.is_english for one in self._read)

    def copied(self, claim: str, cited: Sequence[int] = ()) -> Quoted | None:
        """Where a passage says the same in the same words, from the beginning of a unit to the end of one; first in
        those that are cited."""
        tokens = _tokens(OPENING.sub("", claim, count=1))[0]
        if len(tokens) < LEAST_COPIED and not LONG_WORDS.search(claim):
            return None
        wanted, cells = f" {' '.join(tokens)} ", _cells(claim)
        for number in dict.fromkeys((*cited, *range(len(self._read)))):
            one = self._read[number] if number < len(self._read) else None
            if one is None:
                continue
            if cells and (row := _row_with(cells, one)) is not None:
                return Quoted(number, row)
            if wanted not in one.joined:
                continue
            for first in one.firsts:
                last = first + len(tokens) - 1
                if last in one.lasts and one.joined.startswith(wanted, one.begins[first] - 1):
                    return Quoted(number, _widened(one, first, last))
        return None

    def candidates(self, claim: str, cited: Sequence[int] = ()) -> list[Candidate]:
        """The passage with most of the claim's words. Before it, of those that are cited, the best, unless it has far
        fewer: it is asked first, because a citation that is right stays."""
        wanted = dict.fromkeys(terms(claim[:MAX_CLAIM]))
        weight = {word: self._rare.get(word, self._rarest) for word in wanted}
        whole = sum(weight.values())
        if not whole:
            return []
        found = [
            self._candidate(number, weight, whole) for number in range(len(self._read)) if self._read[number].units
        ]
        found = sorted((one for one in found if one.shared > 0), key=lambda one: -one.shared)
        if not found:
            return []
        named = next((one for one in found if one.passage in cited), None)
        first = named if named is not None and named.shared >= found[0].shared * FEWER else found[0]
        rest = [one for one in found if one is not first and one.shared >= first.shared * SECOND]
        return [first, *sorted(rest, key=lambda one: one.passage not in cited)][:CANDIDATES]

    def _candidate(self, number: int, weight: dict[int, float], whole: float) -> Candidate:
        one = self._read[number]
        left = _of_named_subjects(one, weight)
        best = max(left, key=lambda at: _sum(weight, one.words[at]))
        chosen, has = self._grown(one, best, left, weight, whole)
        above = _sum(weight, one.above - has)
        return Candidate(number, chosen, (_sum(weight, has) + ABOVE * above) / whole)

    def _grown(
        self, one: ReadPassage, best: int, among: Sequence[int], weight: dict[int, float], whole: float
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """The best unit and those of the same passage that have what it lacks, in their order. Two rows of a table are
        not read together, unless the claim names the subjects of both: it could mix their cells."""
        chosen, has = [best], one.words[best]
        room = MAX_COMPARED - _length(one.units[best])
        while len(chosen) < MOST_UNITS:
            left = [
                at
                for at in among
                if at not in chosen
                and _length(one.units[at]) <= room
                and (one.units[at].kind != "row" or _is_named(one, at, weight))
            ]
            following = max(left, key=lambda at: _sum(weight, one.words[at] - has), default=None)
            if following is None or _sum(weight, one.words[following] - has) < ADDS * whole:
                break
            chosen.append(following)
            has |= one.words[following]
            room -= _length(one.units[following])
        return tuple(sorted(chosen)), has

    def in_english(self, candidate: Candidate) -> bool:
        return self._read[candidate.passage].is_english

    def page(self, candidate: Candidate) -> EvidencePage:
        one = self._read[candidate.passage]
        headers = one.passage.place.headers if one.passage.place is not None else ()
        return page(one.passage.title, headers, one.text, [one.units[at] for at in candidate.units])

    def comparison(self, claim: str, candidate: Candidate) -> Comparison:
        one = self._read[candidate.passage]
        headers = one.passage.place.headers if one.passage.place is not None else ()
        evidence = "\n".join(one.text[slice(*_span(one.units[at]))] for at in candidate.units)
        asked = in_notation_of(claim, evidence) if len(claim) <= MAX_CLAIM else Notation(claim)
        context = f"{titled(one.passage.title, headers)}\n{one.text}"
        return Comparison(candidate, asked, differences(asked.text, evidence, context))

    def quotes(self, claim: str, candidate: Candidate, verdict: Verdict | None) -> tuple[Quoted, ...]:
        """The units that decide, as the model points at them; else the one with most of the claim's words. Neighbours
        are one quote."""
        one = self._read[candidate.passage]
        wanted = set(terms(claim[:MAX_CLAIM]))
        shares = {at: len(wanted & one.words[at]) / max(1, len(wanted)) for at in candidate.units}
        points = dict(zip(candidate.units, verdict.units if verdict is not None else (), strict=False))
        best = max(shares, key=lambda at: (points.get(at, 0.0), shares[at]))
        chosen = {at for at in candidate.units if points.get(at, -1.0) > 0 or shares[at] >= OBVIOUS} | {best}
        spans: list[Span] = []
        for at in sorted(chosen):
            start, end = _span(one.units[at])
            if spans and at - 1 in chosen and not one.text[spans[-1][1] : start].strip(" \n\t*-+"):
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((start, end))
        return tuple(Quoted(candidate.passage, span) for span in spans)


def features(candidate: Candidate, verdict: Verdict | None, found: Sequence[ExactDifference]) -> ClaimFeatures:
    kinds = Counter(one.kind for one in found)
    return ClaimFeatures(
        model=_clipped(_odds(verdict.supported)) if verdict is not None else 0.0,
        unknown=verdict.unknown if verdict is not None else 0.0,
        words=_clipped(-max((odds for *_, odds in verdict.words), default=0.0)) if verdict is not None else 0.0,
        shared=candidate.shared,
        near=max(0.0, candidate.shared - NEAR) / (1 - NEAR),
        dates=min(1, kinds["date"]),
        units=min(1, kinds["unit"]),
        numbers=min(1, kinds["number"]),
        names=min(1, kinds["name"]),
        negation=min(1, kinds["negation"]),
        quantifiers=min(1, kinds["quantifier"]),
        directions=min(1, kinds["direction"]),
    )


def finding(
    claim: str, passages: ReadPassages, candidate: Candidate, verdict: Verdict | None, found: Sequence[ExactDifference]
) -> Finding:
    """What a comparison with the units of one passage says."""
    words_judged = verdict is None or bool(verdict.words)
    support = probability(features(candidate, verdict, found), words_judged=words_judged)
    if verdict is not None and is_denied(len(claim.split()), candidate.shared, verdict.supported):
        support = min(support, verdict.supported)
    if (verdict is not None and not verdict.whole) or any(one.certain or one.kind == CERTAIN for one in found):
        support = min(support, MOST_IN_PART)
    said: Support = "unsupported"
    if support >= SUPPORTED:
        said = "supported"
    elif verdict is not None and verdict.contradicted >= CONTRADICTED:
        said = "contradicted"
    elif support >= PARTLY:
        said = "partly"
    quotes = () if said == "unsupported" else passages.quotes(claim, candidate, verdict)
    doubted: tuple[Span, ...] = ()
    if said != "supported" and verdict is not None:
        doubted = tuple(_joined([(start, end) for start, end, odds in verdict.words if odds > DOUBTED], claim))
    return Finding(said, round(support, 4), quotes, doubted)


def in_claim(verdict: Verdict | None, asked: Notation) -> Verdict | None:
    """A verdict about a claim in another notation, with places in the claim itself."""
    if verdict is None or not asked.replaced:
        return verdict
    return msgspec.structs.replace(
        verdict, words=tuple((*asked.place((start, end)), odds) for start, end, odds in verdict.words)
    )


def best_of(findings: Sequence[Finding]) -> Finding:
    """The passages that support a claim decide, all of them; without one, the first that contradicts it; else the
    best."""
    order = {"supported": 3, "contradicted": 2, "partly": 1}
    best = max(
        findings,
        key=lambda one: (order.get(one.verdict, 0), 0.0 if one.verdict == "contradicted" else one.support),
        default=UNSUPPORTED,
    )
    if best.verdict != "supported":
        return best
    return best._replace(
        quotes=tuple(one for found in findings if found.verdict == "supported" for one in found.quotes)
    )


def _cells(row: str) -> list[str]:
    """The cells of a row of a table; none if it is no row, or has no words but its first cell."""
    row = row.strip()
    cells = [cell.strip().lower() for cell in row.strip("|").split("|")] if row.startswith("|") else []
    return cells if cells and cells[0] and any(WORDS.search(cell) for cell in cells[1:]) else []


def _row_with(cells: Sequence[str], one: ReadPassage) -> Span | None:
    """The row of a passage that has these cells, in their order, and the same first cell; it may have more."""
    for unit in one.units:
        if unit.kind == "row" and (known := _cells(one.text[slice(*_span(unit))])) and known[0] == cells[0]:
            left = iter(known)
            if all(cell in left for cell in cells):
                return _span(unit)
    return None


def _of_named_subjects(one: ReadPassage, claimed: Container[int]) -> list[int]:
    """The units that a claim may be about: of a list or table, only those whose subject the claim names, if it names
    one."""
    named = {_list_of(one.units[at]) for at in range(len(one.units)) if _is_named(one, at, claimed)}
    return [at for at, unit in enumerate(one.units) if _list_of(unit) not in named or _is_named(one, at, claimed)]


def _is_named(one: ReadPassage, at: int, claimed: Container[int]) -> bool:
    subject = one.subjects[at]
    return bool(subject) and one.units[at].kind in LISTED and all(word in claimed for word in subject)


def _list_of(unit: Unit) -> tuple[str, Span | None, Span | None]:
    return unit.kind, unit.lead, unit.heading


def _joined(spans: Sequence[Span], text: str) -> list[Span]:
    """Whole numbers, and neighbours as one span; those without anything visible are none."""
    found: list[Span] = []
    whole = [match.span() for match in NUMBER.finditer(text)]
    spans = [next((each for each in whole if each[0] <= span[0] and span[1] <= each[1]), span) for span in spans]
    for start, end in sorted({span for span in spans if text[slice(*span)].strip()}):
        if found and not text[found[-1][1] : start].strip():
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _read(passage: Passage, most: int) -> ReadPassage:
    text = passage.text[:most]
    found = units(text)[:MAX_UNITS]
    headers = passage.place.headers if passage.place is not None else ()
    tokens, spans = _tokens(text)
    begins, at = [], 1
    for token in tokens:
        begins.append(at)
        at += len(token) + 1
    starts = {span[0]: number for number, span in enumerate(spans)}
    ends = {span[1]: number for number, span in enumerate(spans)}
    edges = [(_first(starts, text, unit), _last(ends, text, unit)) for unit in found]
    return ReadPassage(
        passage=passage,
        text=text,
        units=found,
        words=[frozenset(terms(text[unit.start : unit.end])) for unit in found],
        subjects=[frozenset(terms(text[slice(*unit.subject)])) if unit.subject else frozenset() for unit in found],
        above=frozenset(terms(titled(passage.title, headers))),
        joined=f" {' '.join(tokens)} ",
        begins=begins,
        spans=spans,
        is_english=is_english(text),
        firsts=tuple(dict.fromkeys(first for first, _ in edges if first is not None)),
        lasts=frozenset(last for _, last in edges if last is not None),
    )


def _first(starts: dict[int, int], text: str, unit: Unit) -> int | None:
    found = TOKEN.search(text, unit.start, unit.end)
    return starts.get(found.start()) if found else None


def _last(ends: dict[int, int], text: str, unit: Unit) -> int | None:
    last = None
    for last in TOKEN.finditer(text, max(unit.start, unit.end - 80), unit.end):  # noqa: B007  the last one is meant
        pass
    return ends.get(last.end()) if last else None


def _tokens(text: str) -> tuple[list[str], list[Span]]:
    """Words, numbers and signs. A letter with an accent is the same as one character or as two."""
    found = list(TOKEN.finditer(text))
    tokens = [match[0].lower() for match in found]
    if ACCENT.search(text):
        tokens = [normal_form(token, "NFC") for token in tokens]
    return tokens, [match.span() for match in found]


def _widened(one: ReadPassage, first: int, last: int) -> Span:
    """From the beginning of the first unit to the end of the last, with their punctuation."""
    start, end = one.spans[first][0], one.spans[last][1]
    inside = [unit for unit in one.units if unit.start < end and unit.end > start]
    return (
        (min(start, *(unit.start for unit in inside)), max(end, *(unit.end for unit in inside)))
        if inside
        else (start, end)
    )


def _span(unit: Unit) -> Span:
    return unit.start, unit.end


def _length(unit: Unit) -> int:
    return unit.end - unit.start


def _sum(weight: dict[int, float], words: frozenset[int]) -> float:
    return sum(value for word, value in weight.items() if word in words)


def _odds(share: float) -> float:
    inside = min(1 - 1e-6, max(1e-6, share))
    return math.log(inside / (1 - inside))


def _clipped(odds: float) -> float:
    return min(MOST, max(-MOST, odds))
