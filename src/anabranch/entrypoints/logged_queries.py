"""Entries of the query log as the HTTP API and the command line show them, and the values of their filters."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Scores, Value
from anabranch.domain.sentences import SentenceView
from anabranch.knowledge.model import Rating
from anabranch.knowledge.records.logged_queries import LoggedAnswer, LoggedQuery

MAX_SNIPPET = 200


class QueryEntry(Value):
    """A question in the query log. `query` is null if its text was not kept; `outcome` is `answered`, `refused` or the
    code of an error. `rewritten_query` is null and `variants` empty if they may repeat an answer that is withheld.
    `faithfulness` is the share of the answer's sentences that its sources support, and `verdicts` how many have each
    verdict; null if they were not checked. `user` is sent to operators only: null is the operator on this machine."""

    id: str
    created_at: datetime
    surface: str | None
    conversation_id: str | None
    query: str | None
    rewritten_query: str | None
    variants: tuple[str, ...]
    outcome: str | None
    refused: bool
    rating: Rating | None
    comment: str | None
    model: str | None
    input_tokens: int
    output_tokens: int
    latency_ms: int
    retrieval_ms: int
    settings: dict[str, Any]
    filters: dict[str, Any] | None
    faithfulness: float | None
    verdicts: dict[str, int] | None
    user: str | UnsetType | None = UNSET


class LoggedCitation(Value):
    """A citation of a logged answer; `start_char` and `end_char` are offsets in the document as it was then. They are
    null if an earlier version has logged it."""

    citation_index: int
    chunk_id: str
    document_id: str
    quoted_text: str
    start_char: int | None
    end_char: int | None


class LoggedPassage(Value):
    """A passage that was found for a logged question, with its scores. `content_snippet` is null if its document has a
    new version."""

    rank: int
    chunk_id: str
    document_id: str
    title: str
    content_snippet: str | None
    scores: Scores


class QueryDetail(QueryEntry, kw_only=True):
    """An entry with its answer, citations and passages; without those of documents that the caller may not see any
    more. `answer` is null if there was none, if its text was not kept, or if it is withheld because it may quote such a
    document. `sentences` are those of a verified answer; absent if they are withheld or were not kept. `shared`: others
    who have a key and know the id may read it; `may_share`: this caller can change that."""

    answer: str | None
    answer_withheld: bool
    citations: list[LoggedCitation]
    passages: list[LoggedPassage]
    relevance: float | None
    shared: bool
    may_share: bool
    sentences: tuple[SentenceView, ...] | UnsetType = UNSET


class FeedbackEntry(Value):
    """The rating of an answer. `query` is null if the question's text was not kept. `user` is sent to operators only:
    null is the operator on this machine."""

    query_id: str
    rating: Rating
    comment: str | None
    rated_at: datetime
    surface: str | None
    query: str | None
    user: str | UnsetType | None = UNSET


def query_entry(found: LoggedQuery, *, operator: bool) -> QueryEntry:
    return QueryEntry(
        id=found.id,
        created_at=datetime.fromtimestamp(found.created_at, UTC),
        surface=found.surface,
        conversation_id=found.conversation,
        query=found.question or None,
        rewritten_query=found.rewritten,
        variants=found.variants,
        filters=found.filters,
        settings=found.settings,
        outcome=found.outcome,
        refused=found.refused,
        retrieval_ms=found.retrieval_ms,
        latency_ms=found.latency_ms,
        model=found.model,
        input_tokens=found.input_tokens,
        output_tokens=found.output_tokens,
        rating=found.rating,
        comment=found.comment,
        faithfulness=found.faithfulness,
        verdicts=found.verdicts,
        user=found.user or None if operator else UNSET,
    )


def query_detail(found: LoggedAnswer, *, operator: bool) -> QueryDetail:
    entry = query_entry(found.query, operator=operator)
    return QueryDetail(
        **msgspec.structs.asdict(entry),
        answer=found.answer or None,
        answer_withheld=found.withheld,
        citations=[
            LoggedCitation(
                citation_index=one.citation_index,
                chunk_id=one.chunk,
                document_id=one.document,
                quoted_text=one.text,
                start_char=one.start,
                end_char=one.end,
            )
            for one in found.citations
        ],
        passages=[
            LoggedPassage(
                rank=one.rank,
                chunk_id=one.chunk,
                document_id=one.document,
                title=one.title,
                content_snippet=None if one.text is None else one.text[:MAX_SNIPPET],
                scores=one.scores,
            )
            for one in found.passages
        ],
        relevance=found.relevance,
        shared=found.query.shared,
        may_share=found.own,
        sentences=UNSET if found.sentences is None else found.sentences,
    )


def feedback_entry(found: LoggedQuery, *, operator: bool) -> FeedbackEntry:
    assert found.rating is not None, "only entries with a rating are feedback"
    return FeedbackEntry(
        query_id=found.id,
        rating=found.rating,
        comment=found.comment,
        rated_at=datetime.fromtimestamp((found.rated_us or 0) / 1_000_000, UTC),
        surface=found.surface,
        query=found.question or None,
        user=found.user or None if operator else UNSET,
    )


def seconds_of(name: str, value: str | None, *, end: bool = False) -> float | None:
    """A day or a time in ISO 8601 as seconds since 1970; UTC if it names no zone. A day begins at midnight, and as the
    `end` of a range it is included."""
    if value is None:
        return None
    try:
        # In a URL, a `+` that is not escaped is read as a space.
        moment = datetime.fromisoformat(value.replace(" ", "+") if "T" in value else value)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        is_day = len(value) <= len("2024-12-31")
        return (moment + timedelta(days=1) if end and is_day else moment).timestamp()
    except (ValueError, OverflowError):
        raise InvalidQuestion(
            f"{name} is {value[:40]!r}; it takes a day such as 2024-12-31, or a time such as 2024-12-31T09:00:00Z."
        ) from None
