"""Equal amounts and times of a claim in the notation of its evidence: a model that reads both takes "€199" and "199
euros" for different things, "one year" and "12 months", and "6 pm" and "18:00"."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.text.quantities import CURRENCIES, Quantities, Quantity
from anabranch.text.quantity_checks import same_quantity
from anabranch.text.reading import ReadText, TextToken
from anabranch.text.sentences import Span
from anabranch.text.times_of_day import times_of_day

MAX_TOKENS = 6


class Notation(NamedTuple):
    """A claim in another notation, with the places of what was replaced: in the claim, and in the new text."""

    text: str
    replaced: tuple[tuple[Span, Span], ...] = ()

    def place(self, span: Span) -> Span:
        """Where in the claim a part of the new text is; of a part that was replaced, all of what it replaces."""
        start, end = span
        moved = 0
        for before, after in self.replaced:
            if after[1] <= start:
                moved = before[1] - after[1]
            elif after[0] < end:
                first = before[0] if after[0] <= start else start + moved
                return first, max(before[1], end + before[1] - after[1])
        return start + moved, end + moved


def in_notation_of(claim: str, evidence: str) -> Notation:
    """The claim with amounts and times that the evidence has too, written as the evidence writes them."""
    parts: list[str] = []
    replaced: list[tuple[Span, Span]] = []
    at = length = 0
    for span, new in sorted((*_amounts(claim, evidence), *_times(claim, evidence))):
        if span[0] < at or claim[slice(*span)].lower() == new.lower():
            continue
        parts += [claim[at : span[0]], new]
        start = length + span[0] - at
        length = start + len(new)
        replaced.append((span, (start, length)))
        at = span[1]
    return Notation("".join((*parts, claim[at:])), tuple(replaced))


def _amounts(claim: str, evidence: str) -> Iterator[tuple[Span, str]]:
    said = ReadText(claim)
    amounts = [one for one in Quantities(said).numbers if one.dimension and not one.implied]
    if not amounts:
        return
    shown = ReadText(evidence)
    known = [one for one in Quantities(shown).numbers if one.dimension and not one.implied]
    at = 0
    for amount in amounts:
        other = next((one for one in known if one.dimension == amount.dimension and same_quantity(amount, one)), None)
        own = _tokens(said.tokens, amount)
        found = re.compile(r"\s*".join(re.escape(token.raw) for token in own)).search(claim, at) if own else None
        if found is None:
            continue
        at = found.end()
        if other is not None and (new := _spelled(_tokens(shown.tokens, other))):
            yield found.span(), new


def _times(claim: str, evidence: str) -> Iterator[tuple[Span, str]]:
    said = list(times_of_day(claim))
    known = {one.minutes: one.text for one in times_of_day(evidence)} if said else {}
    yield from ((one.span, known[one.minutes]) for one in said if one.minutes in known)


def _tokens(tokens: Sequence[TextToken], amount: Quantity) -> Sequence[TextToken]:
    """The tokens of an amount, with the sign of a currency before it; none if they are not side by side."""
    begin = amount.at - 1 if amount.at and tokens[amount.at - 1].raw in CURRENCIES else amount.at
    for end in range(amount.at + 1, min(len(tokens), amount.at + MAX_TOKENS) + 1):
        if _spelled(tokens[amount.at : end]) == amount.text:
            return tokens[begin:end]
    return ()


def _spelled(tokens: Sequence[TextToken]) -> str:
    return "".join(token.raw if at == 0 or token.glued else f" {token.raw}" for at, token in enumerate(tokens))
