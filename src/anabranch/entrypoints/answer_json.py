"""An answer sentence by sentence, with the numbers of the sources of each."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from anabranch.domain.model import Answer, Citation, Passage, Support, Value
from anabranch.pipeline.cite import Marks
from anabranch.pipeline.marks import gap
from anabranch.text.sentences import sentences


class Sentence(Value):
    """`verdict` is there if the answer was verified."""

    text: str
    citations: tuple[int, ...]
    verdict: Support | UnsetType = UNSET


class AnswerJson(Value):
    """The answer without citation marks, and its sentences with the numbers of their sources."""

    answer: str
    sentences: tuple[Sentence, ...]


def sentence_by_sentence(answer: Answer) -> AnswerJson:
    """The answer without citation marks. The sentences of a verified answer are those that were checked."""
    return _by_verdict(answer) if answer.sentences else _by_mark(answer)


def _by_verdict(answer: Answer) -> AnswerJson:
    """The checked sentences with what they quote; those that were not checked keep what their marks name."""
    marks, starts = Marks(answer.passages), [mark.start for mark in answer.citations]
    whole: list[str] = []
    found: list[Sentence] = []
    at = 0
    for one in answer.sentences:
        text = answer.text[one.start : one.end]
        text = text if one.reason == "code" else _unmarked(text, marks, wrong=bool(one.corrected or one.removed))
        whole += [answer.text[at : one.start], text]
        at = one.end
        marked = answer.citations[bisect_left(starts, one.start) : bisect_left(starts, one.end)]
        # What contradicts a sentence is not its source.
        named = marked if one.verdict == "contradicted" else one.quotes or marked
        numbers = dict.fromkeys(quote.passage + 1 for quote in named)
        if text:
            found.append(Sentence(text=text, citations=tuple(numbers), verdict=one.verdict))
    return AnswerJson(answer="".join([*whole, answer.text[at:]]).strip(), sentences=tuple(found))


def _unmarked(text: str, marks: Marks, *, wrong: bool) -> str:
    """The text without the marks that name a passage; if some of its marks are `wrong`, also without the others."""
    shown, at = "", 0
    for mark in marks.written(text):
        if mark.start >= at and (mark.named or wrong):
            shown = _joined(shown, text[at : mark.start].rstrip())
            at = mark.end
    return _joined(shown, text[at:]).strip()


def _joined(text: str, rest: str) -> str:
    return f"{text}{gap(text, rest)}{rest}"


def _by_mark(answer: Answer) -> AnswerJson:
    """Gives each citation mark to the sentence that contains or precedes it, and to those before it that it quotes,
    such as the items of a list."""
    text, at = "", 0
    marks: dict[int, list[Citation]] = {}
    for citation in answer.citations:
        if citation.start >= at:
            # A mark on a line of its own belongs to the lines above it.
            alone = answer.text[citation.end : citation.end + 1] in ("", "\n")
            text = _joined(text, answer.text[at : citation.start]).rstrip(None if alone else " ")
            at = citation.end
        marks.setdefault(len(text), []).append(citation)
    text = _joined(text, answer.text[at:])
    places = sorted(marks)
    found: list[Sentence] = []
    previous_end = 0
    for start, end in sentences(text):
        first, last = bisect_right(places, previous_end), bisect_right(places, end)
        own = [citation for place in places[first:last] for citation in marks[place]]
        if not own and last < len(places):
            own = _quoting(text[start:end], marks[places[last]], answer.passages)
        numbers = dict.fromkeys(citation.passage + 1 for citation in own)
        found.append(Sentence(text=text[start:end], citations=tuple(numbers)))
        previous_end = end
    return AnswerJson(answer=text.strip(), sentences=tuple(found))


def _quoting(sentence: str, citations: Sequence[Citation], passages: Sequence[Passage]) -> list[Citation]:
    """The citations whose quoted words have this sentence."""
    words = " ".join(sentence.split())
    quoted = (passages[one.passage].text[one.passage_start : one.passage_end] for one in citations)
    return [one for one, text in zip(citations, quoted, strict=True) if words in " ".join(text.split())]
