"""The sentences of a verified answer with the words that support them or say otherwise, as every surface shows them and
the query log keeps them."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from anabranch.domain.explanation import chunk_id_of
from anabranch.domain.model import (
    Answer,
    CheckedSentence,
    Passage,
    Place,
    QuotedSpan,
    Support,
    SupportingQuote,
    UncheckedReason,
    Value,
)

Probability = Annotated[float, Meta(ge=0, le=1)]


class PassageWords(Value, gc=False):
    """Words of a passage. `citation_index` is the number of the passage; `start_char` and `end_char` are offsets in the
    document's content, for a passage of another source than a collection in its text. `page` is where they begin."""

    citation_index: int
    source: str
    document_id: str
    chunk_id: str
    start_char: int
    end_char: int
    quoted_text: str
    page: int | None = None


class QuoteView(PassageWords, kw_only=True, gc=False):
    """Words of a passage that support a sentence or, of a contradicted one, say something else. `support` is the
    probability that they support the sentence."""

    support: Probability


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


def sentence_view(sentence: CheckedSentence, text: str, passages: Sequence[Passage]) -> SentenceView:
    """A sentence of an answer; `text` is what it says."""
    return SentenceView(
        start=sentence.start,
        end=sentence.end,
        text=text,
        verdict=sentence.verdict,
        support=sentence.support,
        reason=sentence.reason,
        citations=tuple(QuoteView(**words_of(one, passages), support=one.support) for one in sentence.quotes),
        doubted=tuple(
            DoubtedView(start=start, end=end, text=text[start - sentence.start : end - sentence.start])
            for start, end in sentence.doubted
        ),
    )


def sentence_views(answer: Answer) -> tuple[SentenceView, ...]:
    return tuple(sentence_view(one, answer.text[one.start : one.end], answer.passages) for one in answer.sentences)


def place_of(passage: Passage) -> Place:
    """The place in its collection; a passage of another source is a place of its own."""
    if passage.place is not None:
        return passage.place
    return Place(
        chunk_id=chunk_id_of(passage), collection="", start=0, end=len(passage.text), tokens=0, url=passage.url
    )


def words_of(span: QuotedSpan | SupportingQuote, passages: Sequence[Passage]) -> dict[str, Any]:
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
        "page": place.page_at(place.start + span.start),
    }
