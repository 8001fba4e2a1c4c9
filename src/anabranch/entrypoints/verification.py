"""A verified answer as every surface shows it: its sentences, with the words that support them or say otherwise."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import asdict

from anabranch.domain.explanation import chunk_id_of
from anabranch.domain.model import (
    Answer,
    AnswerPolicy,
    CheckedSentence,
    ConflictKind,
    Passage,
    Place,
    QuotedSpan,
    SourceConflict,
    Support,
    SupportingQuote,
    UncheckedReason,
    Value,
)

NOT_VERIFIED: Mapping[str, Any] = {}
Probability = Annotated[float, Meta(ge=0, le=1)]


class VerifiedRequest(Value):
    """What a request says about the verification of its answer."""

    verify: (
        Annotated[
            bool,
            Meta(
                description="Whether each sentence of the answer is checked against the passages; left out, the "
                "setting AGGREGATOR_VERIFY decides"
            ),
        ]
        | None
    ) = None
    answer_policy: AnswerPolicy | None = None


class PassageWords(Value, gc=False):
    """Words of a passage. `citation_index` is the number of the passage; `start_char` and `end_char` are offsets in the
    document's content, for a passage of another source than a collection in its text."""

    citation_index: int
    source: str
    document_id: str
    chunk_id: str
    start_char: int
    end_char: int
    quoted_text: str


class QuoteView(PassageWords, kw_only=True, gc=False):
    """Words of a passage that support a sentence or, of a contradicted one, say something else. `support` is the
    probability that they support the sentence."""

    support: Probability


class ConflictView(Value, gc=False):
    """Two documents that contradict each other on what was asked, in a number, a date, a name, a negation or something
    `other`, and the probability that they do."""

    claim: PassageWords
    against: PassageWords
    kind: ConflictKind
    probability: Probability


class DoubtedView(Value, gc=False):
    """Words of the answer that the quoted words do not say; `start` and `end` are offsets in the answer."""

    start: int
    end: int
    text: str


class SentenceView(Value):
    """A sentence of the answer (`start` and `end` are offsets in it), and how far the sources support it. `support` is
    the probability that they do; null for an `unchecked` one, whose `reason` says why it was not checked."""

    start: int
    end: int
    text: str
    verdict: Support
    support: Probability | None
    reason: UncheckedReason | None
    citations: tuple[QuoteView, ...]
    doubted: tuple[DoubtedView, ...]


class MarksView(Value, gc=False):
    """Citation marks: those that the model has `written`; of these, `corrected` ones named a passage that does not
    support the sentence instead of one that does, and `removed` ones have no right passage. `added` citations had no
    mark."""

    written: int
    corrected: int
    removed: int
    added: int


class VerificationView(Value):
    """What a verified answer has in addition; all of it is absent if the answer was not verified."""

    sentences: tuple[SentenceView, ...] | UnsetType = UNSET
    faithfulness_score: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="The share of the checked sentences that the sources support; one that they support partly "
                "counts half. Null if none was checked",
            ),
        ]
        | UnsetType
        | None
    ) = UNSET
    unfaithful: (
        Annotated[bool, Meta(description="`faithfulness_score` is below AGGREGATOR_MIN_FAITHFULNESS")] | UnsetType
    ) = UNSET
    left_out: Annotated[int, Meta(description="Sentences that `answer_policy: strict` has left out")] | UnsetType = (
        UNSET
    )
    marks: MarksView | UnsetType = UNSET
    conflicts: (
        Annotated[
            tuple[ConflictView, ...],
            Meta(description="Documents that contradict each other on what was asked; absent if there are none"),
        ]
        | UnsetType
    ) = UNSET


def verification(answer: Answer) -> Mapping[str, Any]:
    """The fields of a VerificationView; none if the answer was not verified."""
    if not (answer.sentences or answer.faithfulness is not None or answer.left_out):
        return NOT_VERIFIED
    view = VerificationView(
        sentences=tuple(
            sentence_view(one, answer.text[one.start : one.end], answer.passages) for one in answer.sentences
        ),
        faithfulness_score=answer.faithfulness,
        unfaithful=answer.unfaithful or UNSET,
        left_out=answer.left_out or UNSET,
        marks=MarksView(**answer.marks),
        conflicts=tuple(conflict_view(one, answer.passages) for one in answer.conflicts) or UNSET,
    )
    return asdict(view)


def conflict_view(conflict: SourceConflict, passages: Sequence[Passage]) -> ConflictView:
    claim, against = (PassageWords(**_words(side, passages)) for side in (conflict.claim, conflict.against))
    return ConflictView(claim=claim, against=against, kind=conflict.kind, probability=conflict.probability)


def sentence_view(sentence: CheckedSentence, text: str, passages: Sequence[Passage]) -> SentenceView:
    """A sentence of an answer; `text` is what it says."""
    return SentenceView(
        start=sentence.start,
        end=sentence.end,
        text=text,
        verdict=sentence.verdict,
        support=sentence.support,
        reason=sentence.reason,
        citations=tuple(QuoteView(**_words(one, passages), support=one.support) for one in sentence.quotes),
        doubted=tuple(
            DoubtedView(start=start, end=end, text=text[start - sentence.start : end - sentence.start])
            for start, end in sentence.doubted
        ),
    )


def place_of(passage: Passage) -> Place:
    """The place in its collection; a passage of another source is a place of its own."""
    if passage.place is not None:
        return passage.place
    return Place(
        chunk_id=chunk_id_of(passage), collection="", start=0, end=len(passage.text), tokens=0, url=passage.url
    )


def _words(span: QuotedSpan | SupportingQuote, passages: Sequence[Passage]) -> dict[str, Any]:
    """The fields of PassageWords."""
    passage = passages[span.passage]
    place = place_of(passage)
    return {
        "citation_index": span.passage + 1,
        "source": passage.source,
        "document_id": passage.document_id or "",
        "chunk_id": place.chunk_id,
        "start_char": place.start + span.start,
        "end_char": place.start + span.end,
        "quoted_text": passage.text[span.start : span.end],
    }
