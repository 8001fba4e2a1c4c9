"""Passages as the evidence model reads them: units of evidence on pages that fit its input."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.domain.evidence import EvidencePage
from anabranch.domain.model import Passage
from anabranch.text.pages import page
from anabranch.text.units import Unit, units

# Characters of a page: with the title and a question they fit the model's input.
MAX_PAGE = 1_200
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
    """`passages` has the number of each page's passage."""

    pages: list[EvidencePage]
    passages: list[int]
    units: list[PlacedUnit]

    def passage_of(self, page: int) -> int:
        return self.passages[page]

    def end_of(self, passage: int) -> int:
        """The number of the first page after those of the passages before this one."""
        return bisect_left(self.passages, passage)


def paged(passages: Sequence[Passage]) -> Pages:
    """The pages of all passages; most passages fit one."""
    pages: list[EvidencePage] = []
    of_passage: list[int] = []
    placed: list[PlacedUnit] = []
    for index, passage in enumerate(passages):
        text = passage.text[:MAX_PASSAGE]
        found = units(text)[:MAX_UNITS]
        headers = passage.place.headers if passage.place is not None else ()
        for begin, end in _windows(found):
            of_passage.append(index)
            pages.append(page(passage.title, headers, text, found[begin:end]))
            placed += [
                PlacedUnit(index, order, found[order], len(pages) - 1, order - begin) for order in range(begin, end)
            ]
    return Pages(pages, of_passage, placed)


def _windows(found: Sequence[Unit]) -> Iterator[tuple[int, int]]:
    """Ranges of units of at most MAX_PAGE characters, or of one unit."""
    begin = size = 0
    for at, unit in enumerate(found):
        length = unit.end - unit.start
        if at > begin and size + length > MAX_PAGE:
            yield begin, at
            begin, size = at, 0
        size += length
    if begin < len(found):
        yield begin, len(found)
