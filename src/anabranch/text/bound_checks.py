"""The same number of a claim and its evidence with opposite bounds or directions: over 12 and under 12, up 8% and down
8%, from 5 to 9 and from 9 to 5. These are certain: no wording makes both right."""

# ruff: noqa: SIM905  word lists read better as words

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from anabranch.text.negation import is_negating
from anabranch.text.quantities import CURRENCIES, Quantities, Quantity
from anabranch.text.quantity_checks import same_quantity
from anabranch.text.reading import ExactDifference, ReadText, TextToken, ends_clause, root

Side = Literal["low", "high"]
SideOf = Callable[[Sequence[TextToken], Quantity], Side | None]
# The bound that a word sets for the number behind it: "low" is the least.
_BOUNDS: dict[str, Side] = {
    **dict.fromkeys("over above exceeding beyond after".split(), "low"),
    **dict.fromkeys("under below within before".split(), "high"),
}
_THAN: dict[str, Side] = {
    **dict.fromkeys("more greater longer older higher larger bigger later".split(), "low"),
    **dict.fromkeys("less fewer shorter younger lower smaller earlier".split(), "high"),
}
_PHRASES: dict[tuple[str, str], Side] = {("at", "least"): "low", ("at", "most"): "high", ("up", "to"): "high"}
_DIRECTIONS: dict[str, Side] = {
    **{root(one): "high" for one in "up rose rise risen increase increased grew grow grown climb climbed gain".split()},
    **{root(one): "low" for one in "down fell fall fallen decrease decreased drop dropped decline shrank".split()},
}
_DIRECTION_BEFORE, _DIRECTION_BEHIND = 4, 2


def bound_findings(claim: ReadText, evidence: ReadText) -> Iterator[ExactDifference]:
    """At most one of each kind."""
    said = Quantities(claim).numbers
    bounds, directions = _sides(said, claim.tokens, _bound), _sides(said, claim.tokens, _direction)
    ranges = list(_ranges(said, claim.tokens))
    if not (bounds or directions or ranges):
        return
    shown = Quantities(evidence).numbers
    if found := _opposite(bounds, shown, evidence.tokens, _bound):
        yield ExactDifference("quantifier", *found, certain=True)
    if found := _opposite(directions, shown, evidence.tokens, _direction):
        yield ExactDifference("direction", *found, certain=True)
    theirs = list(_ranges(shown, evidence.tokens))
    for start, end in ranges:
        turned = any(same_quantity(start, last) and same_quantity(end, first) for first, last in theirs)
        kept = any(same_quantity(start, first) and same_quantity(end, last) for first, last in theirs)
        if turned and not kept:
            yield ExactDifference("number", f"{start.text} to {end.text}", f"{end.text} to {start.text}", certain=True)
            return


def _sides(numbers: Sequence[Quantity], tokens: Sequence[TextToken], side_of: SideOf) -> list[tuple[Quantity, Side]]:
    """The numbers that have a side."""
    return [(number, side) for number in numbers if (side := side_of(tokens, number)) is not None]


def _opposite(
    said: Sequence[tuple[Quantity, Side]], shown: Sequence[Quantity], evidence: Sequence[TextToken], side_of: SideOf
) -> tuple[str, str] | None:
    """A number of the claim that the evidence has only with the opposite side, and that number there."""
    for number, side in said:
        same = [one for one in shown if same_quantity(number, one)]
        if same and all(side_of(evidence, one) == _other(side) for one in same):
            return number.text, same[0].text
    return None


def _bound(tokens: Sequence[TextToken], number: Quantity) -> Side | None:
    at = number.at - 1
    if at >= 0 and tokens[at].raw in CURRENCIES:
        at -= 1
    if at < 0:
        return None
    word, before = tokens[at].low, tokens[at - 1].low if at else ""
    if (phrase := _PHRASES.get((before, word))) is not None:
        side, begin = phrase, at - 1
    elif word == "than" and before in _THAN:
        side, begin = _THAN[before], at - 1
    elif word in _BOUNDS and not (word == "over" and number.dimension == "time"):
        # "Over 30 days" may say how long, and not how many at least.
        side, begin = _BOUNDS[word], at
    else:
        return None
    is_denied = begin > 0 and (is_negating(tokens[begin - 1]) or tokens[begin - 1].low == "no")
    return _other(side) if is_denied else side


def _direction(tokens: Sequence[TextToken], number: Quantity) -> Side | None:
    """The direction word nearest to a number in its clause, before it or directly behind it; None if a negation is
    there."""
    found: tuple[int, Side] | None = None
    if number.kind == "year":
        return None
    for step in (-1, 1):
        most = _DIRECTION_BEFORE if step < 0 else _DIRECTION_BEHIND + 1
        for distance in range(1, most + 1):
            at = number.at + step * distance
            if not 0 <= at < len(tokens) or ends_clause(tokens[at]):
                break
            if is_negating(tokens[at]):
                return None
            side = _DIRECTIONS.get(tokens[at].stem)
            is_bound = tokens[at].low == "up" and at + 1 < len(tokens) and tokens[at + 1].low == "to"
            if side is not None and not is_bound and (found is None or distance < found[0]):
                found = distance, side
    return found[1] if found else None


def _ranges(numbers: Sequence[Quantity], tokens: Sequence[TextToken]) -> Iterator[tuple[Quantity, Quantity]]:
    """Numbers as in "from 5 to 9"."""
    for one, following in pairwise(numbers):
        between = [token.low for token in tokens[one.at + 1 : following.at]]
        before = [token.low for token in tokens[max(0, one.at - 2) : one.at]]
        if "from" in before and "to" in between and len(between) <= 4 and not same_quantity(one, following):
            yield one, following


def _other(side: Side) -> Side:
    return "high" if side == "low" else "low"
