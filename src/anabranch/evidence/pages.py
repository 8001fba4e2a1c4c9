"""Passages as the evidence model reads them: units of evidence on pages that fit its input."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.domain.evidence import Page, ReadableUnit
from anabranch.domain.model import Passage
from anabranch.text.units import Unit, units

# Characters of a page: with the title and a question they fit the model's input.
MAX_PAGE = 1_200
# Of a longer unit the model reads this much; the whole of it is quoted.
MAX_UNIT = 800
MAX_PASSAGE = 8_000
MAX_UNITS = 200


class PlacedUnit(NamedTuple):
    """A unit of a passage, and the page and the place on it where the model reads it."""

    passage: int
    order: int
    unit: Unit
    page: int
    place: int


class Pages(NamedTuple):
    pages: list[Page]
    units: list[PlacedUnit]


def paged(passages: Sequence[Passage]) -> Pages:
    """The pages of all passages; most passages fit one."""
    pages: list[Page] = []
    placed: list[PlacedUnit] = []
    for index, passage in enumerate(passages):
        text = passage.text[:MAX_PASSAGE]
        found = units(text)[:MAX_UNITS]
        title = titled(passage)
        for begin, end in _windows(found):
            pages.append(Page(title=title, units=readable(text, found[begin:end])))
            placed += [
                PlacedUnit(index, order, found[order], len(pages) - 1, order - begin) for order in range(begin, end)
            ]
    return Pages(pages, placed)


def titled(passage: Passage) -> str:
    """The title of the document and the headings above the passage, as far as they say more."""
    headers = passage.place.headers if passage.place is not None else ()
    return " > ".join(dict.fromkeys(part for part in (passage.title, *headers[-2:]) if part))


def readable(text: str, found: Sequence[Unit]) -> tuple[ReadableUnit, ...]:
    """Each unit with what has to be read before it, unless the unit before it had that already: its heading, and the
    header row of its table."""
    heading = header = None
    read: list[ReadableUnit] = []
    for unit in found:
        before: list[str] = []
        if unit.heading is not None and unit.heading != heading:
            heading = unit.heading
            before.append(text[slice(*heading)])
        if unit.kind == "row" and unit.lead is not None and unit.lead != header:
            header = unit.lead
            before.append(text[slice(*header)])
        read.append(ReadableUnit(text=text[unit.start : unit.end][:MAX_UNIT], before="\n".join(before)))
    return tuple(read)


def _windows(found: Sequence[Unit]) -> Iterator[tuple[int, int]]:
    """Ranges of units of at most MAX_PAGE characters, or of one unit."""
    begin = size = 0
    for at, unit in enumerate(found):
        length = min(unit.end - unit.start, MAX_UNIT)
        if at > begin and size + length > MAX_PAGE:
            yield begin, at
            begin, size = at, 0
        size += length
    if begin < len(found):
        yield begin, len(found)
