"""Passages as the evidence model reads them: units of evidence on pages that fit its input."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.domain.evidence import EvidencePage
from anabranch.domain.model import Passage
from anabranch.text.pages import page
from anabranch.text.support import Wording
from anabranch.text.units import Unit, units

# Characters of a page: with the title and a question they fit the model's input.
MAX_PAGE = 1_200
MAX_PASSAGE = 8_000
MAX_UNITS = 200
# Of a long passage, so many pages are read: those with most of the question's words.
MAX_PAGES = 3


class PlacedUnit(NamedTuple):
    """A unit of a passage, and the page and the place on it where the model reads it."""

    passage: int
    order: int
    unit: Unit
    page: int
    place: int


class Pages(NamedTuple):
    """`passages` has the number of each page's passage, `units` the units on pages, `whole` all units of each
    passage."""

    pages: list[EvidencePage]
    passages: list[int]
    units: list[PlacedUnit]
    whole: list[list[Unit]]

    def passage_of(self, page: int) -> int:
        return self.passages[page]

    def end_of(self, passage: int) -> int:
        """The number of the first page after those of the passages before this one."""
        return bisect_left(self.passages, passage)


def paged(question: str, passages: Sequence[Passage]) -> Pages:
    """The pages of all passages; most passages fit one."""
    found = Pages([], [], [], [])
    for index, passage in enumerate(passages):
        text = passage.text[:MAX_PASSAGE]
        whole = units(text)[:MAX_UNITS]
        found.whole.append(whole)
        headers = passage.place.headers if passage.place is not None else ()
        for begin, end in _chosen(question, text, whole):
            found.passages.append(index)
            found.pages.append(page(passage.title, headers, text, whole[begin:end]))
            found.units.extend(
                PlacedUnit(index, order, whole[order], len(found.pages) - 1, order - begin)
                for order in range(begin, end)
            )
    return found


def _chosen(question: str, text: str, whole: Sequence[Unit]) -> list[tuple[int, int]]:
    windows = list(_windows(whole))
    if len(windows) <= MAX_PAGES:
        return windows
    wording = Wording(question)

    def words(window: tuple[int, int]) -> int:
        return wording.within(text[whole[window[0]].start : whole[window[1] - 1].end]).bit_count()

    return sorted(sorted(windows, key=words, reverse=True)[:MAX_PAGES])


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
