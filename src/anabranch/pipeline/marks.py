"""Writes the right citation marks into a verified answer."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from anabranch.domain.model import Answer, CheckedSentence, Citation
from anabranch.pipeline.cite import NAMES, NUMBER, Marks

Place = tuple[int, int]
FENCES = ("```", "~~~")
# A name with one of these signs cannot be a mark.
UNNAMEABLE = re.compile(r"[\[\]\u3010\u3011,;\n]")
# The end of a word, and what may follow it.
WORD_END, BEHIND_WORD = re.compile(r"[\w\"'\u201d\u2019)%]"), re.compile(r"[.,;:!?)\"'\u201d\u2019]*(?:\s|\Z)")
LOOK = 80
# Directly behind a mark, these would make it a link.
LINKING = ("(", ":")


class Edit(NamedTuple):
    """Characters of an answer that are replaced by a mark with what stands around it. `place` is that of the citations
    that the mark is for."""

    start: int
    end: int
    place: Place
    before: str = ""
    mark: str = ""
    after: str = ""

    @property
    def growth(self) -> int:
        return len(self.before) + len(self.mark) + len(self.after) - (self.end - self.start)


def with_marks(answer: Answer) -> Answer:
    """A verified answer with the right marks in its text: those of checked sentences name the passages that support
    them, wrong ones are gone, and missing ones are there. All offsets are those in the new text."""
    editor = MarkEditor(answer)
    edits = [edit for sentence in answer.sentences for edit in editor.edits(sentence)]
    return _edited(answer, edits) if edits else answer


class MarkStyle:
    """How the marks of an answer name passages: as the model has written them, by the names of sources, else by
    numbers."""

    def __init__(self, answer: Answer) -> None:
        self.marks = Marks(answer.passages)
        self._passages = answer.passages
        first = next((mark[1] for mark, named in self.marks.read(answer.text) if any(named)), "1")
        self._by_name = NUMBER.fullmatch(NAMES.split(first)[0].strip()) is None

    def mark(self, passages: Iterable[int]) -> str:
        return f"[{', '.join(dict.fromkeys(map(self._name, passages)))}]"

    def _name(self, passage: int) -> str:
        source = self._passages[passage].source
        return source if self._by_name and source and not UNNAMEABLE.search(source) else str(passage + 1)


class MarkEditor:
    """Finds what has to change in the marks of sentences."""

    def __init__(self, answer: Answer) -> None:
        self._text = answer.text
        self._style = MarkStyle(answer)
        self._cited: dict[Place, list[int]] = {}
        for one in answer.citations:
            self._cited.setdefault((one.start, one.end), []).append(one.passage)

    def edits(self, sentence: CheckedSentence) -> Iterator[Edit]:
        if sentence.corrected or sentence.removed:
            yield from self._changed(sentence)
        place = (sentence.end, sentence.end)
        if sentence.added and place in self._cited:
            yield self._added(sentence, place)

    def _changed(self, sentence: CheckedSentence) -> Iterator[Edit]:
        start = sentence.start
        removed: Place | None = None
        written: dict[Place, list[Sequence[int]]] = {}
        for mark in self._style.marks.written(self._text[start : sentence.end], start):
            written.setdefault((mark.start, mark.end), []).append(mark.named)
        for place, named_passages in written.items():
            cited = set(self._cited.get(place, ()))
            if removed is not None and self._text[removed[1] : place[0]].strip(" "):
                yield self._removal(sentence, removed)
                removed = None
            if not cited and sentence.removed:
                removed = (removed or place)[0], place[1]
            elif cited and not (
                all(cited & set(named) for named in named_passages) and cited <= set().union(*named_passages)
            ):
                if removed is not None:
                    yield self._removal(sentence, removed)
                    removed = None
                after = " " if self._text.startswith(LINKING, place[1]) else ""
                yield Edit(*place, place, mark=self._style.mark(self._cited[place]), after=after)
        if removed is not None:
            yield self._removal(sentence, removed)

    def _removal(self, sentence: CheckedSentence, marks: Place) -> Edit:
        """Of marks that stand side by side, with the space before them, and with brackets around: [[2]]."""
        start, end = marks
        while start > sentence.start and self._text[start - 1] == "[" and self._text[end : end + 1] == "]":
            start, end = start - 1, end + 1
        start -= start > sentence.start and self._text[start - 1] == " "
        return Edit(start, end, marks, before=gap(self._text[max(0, start - 1) : start], self._text[end : end + LOOK]))

    def _added(self, sentence: CheckedSentence, place: Place) -> Edit:
        """Behind the sentence; in the last cell of a row of a table, and below code."""
        mark, end = self._style.mark(self._cited[place]), sentence.end
        if self._text.endswith("|", sentence.start, end):
            return Edit(end - 1, end, place, mark=mark, after=" |")
        after = " " if self._text[end : end + 1].strip() else ""
        return Edit(end, end, place, "\n" if self._text.endswith(FENCES, sentence.start, end) else " ", mark, after)


def gap(before: str, after: str) -> str:
    """What must stand between two texts where a mark was removed: they are joined only at the end of a word. Elsewhere
    they could become HTML or an address: "<[2]img", "http[2]s://"."""
    apart = not before or not after or before[-1].isspace() or after[0].isspace()
    return "" if apart or (WORD_END.match(before[-1]) and BEHIND_WORD.match(after)) else " "


def _edited(answer: Answer, edits: Sequence[Edit]) -> Answer:
    """The edits are in the order of the text."""
    ends = [edit.end for edit in edits]
    growth = [0, *accumulate(edit.growth for edit in edits)]

    def moved(at: int) -> int:
        return at + growth[bisect_right(ends, at)]

    pieces, read = [], 0
    places: dict[Place, Place] = {}
    for number, edit in enumerate(edits):
        pieces += [answer.text[read : edit.start], edit.before, edit.mark, edit.after]
        read = edit.end
        start = edit.start + growth[number] + len(edit.before)
        places[edit.place] = (start, start + len(edit.mark))
    pieces.append(answer.text[read:])

    def placed(citation: Citation) -> Citation:
        place = citation.start, citation.end
        start, end = places.get(place) or (moved(place[0]), moved(place[1]))
        return msgspec.structs.replace(citation, start=start, end=end)

    def put(sentence: CheckedSentence) -> CheckedSentence:
        # Without a mark that follows.
        doubted = tuple((moved(start), moved(end - 1) + 1) for start, end in sentence.doubted)
        return msgspec.structs.replace(sentence, start=moved(sentence.start), end=moved(sentence.end), doubted=doubted)

    return msgspec.structs.replace(
        answer,
        text="".join(pieces),
        citations=tuple(map(placed, answer.citations)),
        sentences=tuple(map(put, answer.sentences)),
    )
