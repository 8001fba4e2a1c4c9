"""The evidence contracts: what small models say about a question, or a claim, and the text of passages."""

from collections.abc import Sequence
from typing import Protocol

from anabranch.domain.model import Value


class ReadableUnit(Value, gc=False):
    """A unit of evidence as the model reads it. `before` is read but cannot be chosen: a heading or a table's header
    row."""

    text: str
    before: str = ""


class EvidencePage(Value):
    """A passage as the model reads it."""

    title: str
    units: tuple[ReadableUnit, ...]


class AnswerSpan(Value, gc=False):
    """The shortest words that answer: characters of a unit's text. `score` is the log-odds against "no answer"."""

    page: int
    unit: int
    start: int
    end: int
    score: float


class Reading(Value):
    """What the model says about a question and pages, as log-odds: whether they are about the question's subject,
    whether they answer it, and of each unit of each page whether it is evidence. A page or unit that did not fit has no
    value, so `units` may be shorter than the pages."""

    relevance: float
    answerable: float
    units: tuple[tuple[float, ...], ...]
    answer: AnswerSpan | None = None


class Verdict(Value):
    """The probabilities that pages support a claim, say nothing about it, or contradict it. `units` are the log-odds of
    each unit of the first page that the claim depends on it; `words` has the parts of the claim that a model has judged
    by themselves, as start, end and log-odds that they are wrong. Both are empty for a model that cannot say. `whole`:
    all of the claim was read."""

    supported: float
    unknown: float
    contradicted: float
    units: tuple[float, ...] = ()
    words: tuple[tuple[int, int, float], ...] = ()
    whole: bool = True


class Evidence(Protocol):
    """Judges pages. Each input is one page, or several that are read jointly; the results are in the order of the
    inputs. Inputs are read in that order until the monotonic time `until`. None is the result of an input that was not
    read: there was no time left, the call had too many inputs, or the model is not installed."""

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]: ...


class ClaimChecker(Protocol):
    """Says whether pages support a claim. Inputs and results are those of `Evidence`."""

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]: ...
