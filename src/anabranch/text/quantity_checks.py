"""Numbers, units and dates of a claim that its evidence does not state."""

from collections.abc import Iterator, Sequence
from datetime import date
from functools import cached_property
from itertools import combinations, islice, pairwise
from typing import Literal

from anabranch.text.quantities import Day, Quantities, Quantity, unit_of
from anabranch.text.reading import ExactDifference, ReadText, TextToken
from anabranch.text.times_of_day import times_of_day

MAX_DERIVED = 12
_WEEK = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WEEKDAYS = frozenset(_WEEK)
_SEASONS = frozenset(["spring", "summer", "autumn", "winter"])
# A claim with one of them may add numbers up.
_SUMS = frozenset(
    ["total", "together", "altogether", "combined", "overall", "more", "fewer", "remaining", "other", "rest"]
)
# Words that often count nothing.
_INEXACT = frozenset(["one", "once", "both", "half", "single", "sole", "quarter", "pair", "couple", "first", "hundred"])


class _Compared:
    """The numbers of the claim, the evidence and the context; the last are read only if they are needed."""

    def __init__(self, claim: ReadText, evidence: ReadText, context: ReadText) -> None:
        self.claim, self.evidence, self._context = claim, evidence, context
        self.claimed = Quantities(claim)

    @cached_property
    def stated(self) -> Quantities:
        return Quantities(self.evidence)

    @cached_property
    def known(self) -> Quantities:
        return Quantities(self._context)

    @cached_property
    def unused(self) -> list[Quantity]:
        """The numbers of the evidence that the claim does not have."""
        return [one for one in self.stated.numbers if not any(same_quantity(own, one) for own in self.claimed.numbers)]

    def is_around(self, one: Quantity) -> bool:
        if one.kind not in ("share", "version") and one.value in self.known.loose:
            return True
        return any(same_quantity(one, other) for other in self.known.numbers)


def quantity_findings(claim: ReadText, evidence: ReadText, context: ReadText) -> Iterator[ExactDifference]:
    compared = _Compared(claim, evidence, context)
    for number in compared.claimed.numbers:
        if (finding := _number(number, compared)) is not None:
            yield finding
    for day in compared.claimed.days:
        if (finding := _day(day, compared)) is not None:
            yield finding
    yield from _unit_words(compared)
    said, shown = claim.stems & _SEASONS, evidence.stems & _SEASONS
    if said and shown and said.isdisjoint(shown):
        yield ExactDifference("date", min(said), min(shown))
    yield from _weekdays(claim, evidence)
    yield from _times(claim, evidence)


def _times(claim: ReadText, evidence: ReadText) -> Iterator[ExactDifference]:
    """A time of day that the evidence does not have, where it has others."""
    said = list(times_of_day(claim.text))
    shown = {one.minutes: one.text for one in times_of_day(evidence.text)} if said else {}
    wrong = next((one for one in said if one.minutes not in shown), None)
    if wrong is not None and shown:
        yield ExactDifference("number", wrong.text, next(iter(shown.values())), certain=True)


def _weekdays(claim: ReadText, evidence: ReadText) -> Iterator[ExactDifference]:
    """A weekday that the evidence does not have, where it has another one; of a range, that is certain."""
    said, has_range = _days_of_week(claim.tokens)
    shown, _ = _days_of_week(evidence.tokens)
    missing = [day for day in said if day not in shown]
    if shown and missing and (has_range or len(missing) == len(said)):
        yield ExactDifference("date", missing[0], next(iter(shown)), certain=has_range)


def _days_of_week(tokens: Sequence[TextToken]) -> tuple[dict[str, None], bool]:
    """The weekdays of a text, also those inside of ranges, in their order, and whether it has a range."""
    places = [at for at, token in enumerate(tokens) if token.stem in _WEEKDAYS]
    found = dict.fromkeys(tokens[at].stem for at in places)
    has_range = False
    for at, following in pairwise(places):
        between = [token.low for token in tokens[at + 1 : following]]
        if between in (["to"], ["through"], ["until"], ["-"]):
            first, last = (_WEEK.index(tokens[one].stem) for one in (at, following))
            found |= dict.fromkeys(_WEEK[(first + day) % 7] for day in range((last - first) % 7 + 1))
            has_range = True
    return found, has_range


def _number(one: Quantity, compared: _Compared) -> ExactDifference | None:
    stated = compared.stated
    kind: Literal["date", "number"] = "date" if one.kind in ("year", "period") else "number"
    if one.text.lower() == "first":
        return _exchanged(one, stated)
    if one.implied or one.text.lower() in _INEXACT:
        return None
    rival = _rival(one, compared.unused)
    if one.kind == "version":
        is_known = one.text in compared.evidence.text or (rival is None and compared.is_around(one))
        return None if is_known else ExactDifference(kind, one.text, rival)
    if any(same_quantity(one, other) for other in stated.numbers):
        return _exchanged(one, stated)
    if (other := _other_unit(one, stated)) is not None:
        return ExactDifference("unit", one.text, other.text + (" " + other.nouns[0] if not other.unit else ""))
    if not one.dimension and one.value in stated.loose and one.kind != "share" and not (one.named and "." in one.text):
        return None
    if rival is None and compared.is_around(one):
        return None
    if _uncounted(one, compared) or _derived(one, stated, compared.claim) or _ratio(one, stated, compared.claimed):
        return None
    # Without a number that may stand for it: part of a name, or a comparison.
    if rival is None and (one.named or one.kind in ("times", "ordinal")):
        return None
    return ExactDifference(kind, one.text, rival)


def _exchanged(one: Quantity, stated: Quantities) -> ExactDifference | None:
    """The evidence has the number, but another one of these things."""
    if not one.nouns:
        return None
    mine, best, rival = 0, 0, None
    for other in stated.numbers:
        shared = len(set(one.nouns) & set(other.nouns)) if other.kind == one.kind and other.value > 1 else 0
        if same_quantity(one, other):
            mine = max(mine, shared)
        elif shared > best:
            best, rival = shared, other
    if rival is None or best <= mine:
        return None
    return ExactDifference("date" if one.kind == "year" else "number", one.text, rival.text)


def same_quantity(one: Quantity, other: Quantity) -> bool:
    if "version" in (one.kind, other.kind):
        return one.text == other.text
    if one.named and other.named and "." in one.text and "." in other.text:
        return one.text == other.text
    if one.dimension and other.kind == "group":
        return False
    if "period" in (one.kind, other.kind):
        return _within(one, other)
    value, found = one.value, other.value
    if one.dimension and other.dimension:
        if one.dimension != other.dimension:
            return False
        value, found = value * one.size, found * other.size
        if one.size != other.size and one.dimension in ("size", "time", "length", "weight"):
            return 0.93 * one.slack[0] * value <= found <= 1.07 * one.slack[1] * value
    elif one.dimension and other.nouns and one.unit not in other.nouns and other.kind == "number" and other.value > 2:
        return False
    slack = 0.006 if one.kind != "year" else 0.0
    if one.kind == "share" or other.kind == "share":
        slack = 0.05 if one.text[0].isalpha() or other.text[0].isalpha() else 0.006
        if (one.kind == "share") != (other.kind == "share"):
            value, found = (
                (value * 100 if one.kind == "share" else value),
                (found * 100 if other.kind == "share" else found),
            )
            slack = 0.0
    elif value == int(value) and value < 1000:
        slack = 0.0
    low, high = one.slack if other.slack == (1.0, 1.0) else (1.0, 1.0)
    return value * low * (1 - slack) <= found <= value * high * (1 + slack)


def _within(one: Quantity, other: Quantity) -> bool:
    """Periods that overlap: a year of a decade, a decade of a century."""
    size = one.size if one.kind == "period" else 1.0
    length = other.size if other.kind == "period" else 1.0
    return one.value < other.value + length and other.value < one.value + size


def _other_unit(one: Quantity, stated: Quantities) -> Quantity | None:
    """The same number of something else."""
    if not one.dimension:
        return None
    for other in stated.numbers:
        if (
            other.value == one.value
            and other.kind == "number"
            and (other.dimension or other.nouns)
            and one.unit not in other.nouns
        ):
            return other
    return None


def _rival(one: Quantity, unused: Sequence[Quantity]) -> str | None:
    """A number of the evidence that the claim does not have, and that may stand for the claimed one."""
    for other in unused:
        is_name = not one.named or "." in other.text or (other.named and "." not in one.text)
        if other.kind == one.kind and other.dimension == one.dimension and is_name:
            return other.text
    return None


def _uncounted(one: Quantity, compared: _Compared) -> bool:
    """A small number of things that the evidence lists without a number."""
    if not one.spelled or one.value > 10 or one.dimension:
        return False
    if any(n.kind == one.kind and not n.dimension and not n.named and 1 < n.value <= 20 for n in compared.unused):
        return False
    return not any(n.kind == "number" and set(n.nouns) & set(one.nouns) for n in compared.stated.numbers)


def _derived(one: Quantity, stated: Quantities, claim: ReadText) -> bool:
    """A sum or difference of two numbers, also of a year and a number of years."""
    if one.kind in ("share", "ordinal", "version") or len(stated.numbers) > MAX_DERIVED:
        return False
    if one.kind == "times":
        values = [n.value for n in stated.numbers if n.kind in ("number", "share") and n.value > 0]
        return any(abs(a / b / one.value - 1) < 0.06 for a in values for b in values)
    if (
        one.dimension == "time"
        and one.value
        and any(0.94 * one.slack[0] <= span / (one.value * one.size) <= 1.06 * one.slack[1] for span in _spans(stated))
    ):
        return True
    years = {n.value for n in stated.numbers if n.kind == "year" or (n.kind == "number" and 100 < n.value < 1000)}
    if one.kind == "year":
        spans = [n.value for n in stated.numbers if n.dimension == "time" and n.size > 3e7]
        return any(one.value + span in years or one.value - span in years for span in spans)
    if (one.dimension == "time" and one.size > 3e7) or not (one.dimension or one.nouns):
        scale = one.size / 31557600.0 if one.dimension else 1.0
        low, high = one.value * scale * min(one.slack[0], 0.999), one.value * scale * max(one.slack[1], 1.001)
        if any(low <= a - b <= high for a in years for b in years):
            return True
    plain = [n for n in stated.numbers if n.kind == "number" and n.value > 1]
    sums = not _SUMS.isdisjoint(claim.words)
    return one.value > 10 and any(
        one.value in (a.value + b.value, abs(a.value - b.value))
        and a.dimension == b.dimension
        and (sums or set(a.nouns) & set(b.nouns) or set(one.nouns) & {*a.nouns, *b.nouns})
        for a, b in combinations(plain, 2)
    )


def _spans(stated: Quantities) -> list[float]:
    """The seconds between any two complete dates."""
    days = [date(d.year, d.month, d.day).toordinal() for d in _complete(stated.days)]
    return [86400.0 * abs(a - b) for a, b in combinations(days, 2) if a != b]


def _complete(days: Sequence[Day]) -> list[Day]:
    """The days with a year; a day without one gets the year of the others."""
    year = next((day.year for day in days if day.year), 2001)
    return [
        d._replace(year=d.year or year, day=min(d.day or 1, 28) if d.month == 2 else min(d.day or 1, 30))
        for d in days[:MAX_DERIVED]
    ]


def _ratio(one: Quantity, stated: Quantities, claimed: Quantities) -> bool:
    """Nine of ten is 90%, and the reverse."""
    if one.kind == "share" and one.value:
        slack = 0.05 if one.text[0].isalpha() else 0.02
        values = [n.value for n in stated.numbers if n.kind == "number" and n.value > 0][:MAX_DERIVED]
        return any(abs(a / b / one.value - 1) < slack for a in values for b in values if a < b)
    shares = [n.value for n in stated.numbers if n.kind == "share"]
    if not shares or one.kind != "number":
        return False
    values = [n.value for n in claimed.numbers if n.kind == "number" and n.value > 0]
    return any(
        abs(min(one.value, value) / max(one.value, value) - share) < 0.02
        for value in values if value != one.value and one.value > 0
        for share in shares
    )  # fmt: skip


def _day(one: Day, compared: _Compared) -> ExactDifference | None:
    stated = compared.stated
    if any(_same_day(one, other) for other in stated.days):
        return None
    if not stated.days and any(_same_day(one, other) for other in compared.known.days):
        return None
    return ExactDifference("date", one.text, next((day.text for day in stated.days), None))


def _same_day(one: Day, other: Day) -> bool:
    if one.month != other.month or (one.day and other.day and one.day != other.day):
        return False
    return not (one.year and other.year and one.year != other.year)


def _unit_words(compared: _Compared) -> Iterator[ExactDifference]:
    """A unit without a number (for weeks, weekly) where the evidence has another one of its kind."""
    claim, claimed = compared.claim, compared.claimed
    own = {
        unit[1]: (unit[0], token.raw)
        for i, token in enumerate(claim.tokens)
        if (unit := unit_of(token))
        and token.low != "second"
        and claim.tokens[i - 1].low not in ("that", "same", "this")
        and i not in claimed.unit_places
    }
    if not own:
        return
    theirs = {
        unit[1]: (unit[0], token.raw)
        for token in compared.evidence.tokens
        if token.low != "second" and (unit := unit_of(token))
    }
    stated = compared.stated
    same = {
        one.size
        for one in claimed.numbers
        if one.implied and any(same_quantity(one, other) for other in stated.numbers)
    }
    for size, (dimension, raw) in own.items():
        if size in theirs or size in same:
            continue
        rivals = (word for other, (kind, word) in theirs.items() if kind == dimension and other not in own)
        for rival in islice(rivals, 1):
            yield ExactDifference("unit", raw, rival)
