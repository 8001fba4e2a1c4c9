"""How the evidence model's input is laid out in tokens. Training and inference share this module, so it imports nothing
but the standard library."""

from collections.abc import Sequence
from typing import NamedTuple

CLS, SEP = 101, 102
# Unused entries of the vocabulary: one stands before each unit, the other after [CLS] says that the head is a claim.
UNIT, CLAIM = 1, 2
# Where a claim's own tokens begin.
CLAIM_START = 2

MAX_QUESTION, MAX_CLAIM = 64, 96
MAX_TITLE, MAX_BEFORE = 32, 24
# Tokens of an input of one page, and of several pages.
SINGLE, JOINT = 384, 512
# A page or a unit for which fewer tokens are left is not read.
LEAST_PAGE, LEAST_UNIT = 12, 6

Ids = Sequence[int]


class UnitIds(NamedTuple):
    before: Ids
    text: Ids


class PageIds(NamedTuple):
    title: Ids
    units: Sequence[UnitIds]


class UnitPlace(NamedTuple):
    """Where a unit is in the input: its marker, and the first token after its text."""

    page: int
    unit: int
    marker: int
    end: int


class InputIds(NamedTuple):
    """`pages_start` is the index of the first token of the second segment."""

    ids: list[int]
    pages_start: int
    places: list[UnitPlace]


def laid_out(head: Ids, pages: Sequence[PageIds], limit: int, *, claim: bool = False) -> InputIds:
    """[CLS] question [SEP] title before [unit] text before [unit] text … [SEP] title …; what is too long is cut."""
    ids = [CLS, CLAIM, *head[:MAX_CLAIM], SEP] if claim else [CLS, *head[:MAX_QUESTION], SEP]
    pages_start = len(ids)
    places: list[UnitPlace] = []
    for number, page in enumerate(pages):
        title = page.title[:MAX_TITLE]
        room = limit - len(ids) - len(title) - 1
        if room < LEAST_PAGE:
            break
        ids += title
        for index, unit in enumerate(page.units):
            before = unit.before[:MAX_BEFORE]
            if room - len(before) < LEAST_UNIT:
                break
            text = unit.text[: room - len(before) - 1]
            ids += before
            places.append(UnitPlace(number, index, len(ids), len(ids) + 1 + len(text)))
            ids.append(UNIT)
            ids += text
            room -= len(before) + 1 + len(text)
        ids.append(SEP)
    return InputIds(ids, pages_start, places)
