"""Entries of the query log as the HTTP API and the command line show them, and the values of their filters."""

from datetime import UTC, datetime, timedelta

import msgspec
from msgspec import UNSET, UnsetType

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.domain.sentences import SentenceView
from anabranch.knowledge.model import Rating
from anabranch.knowledge.records.logged_queries import LoggedAnswer, LoggedPassage, LoggedQuery, QueryEntry
from anabranch.knowledge.records.queries import LoggedCitation


class QueryDetail(QueryEntry, kw_only=True):
    """An entry with its answer, citations and passages; without those of documents that the caller may not see any
    more. `answer` is null if there was none, if its text was not kept, or if it is withheld because it may quote such a
    document. `sentences` are those of a verified answer; absent if they are withheld or were not kept. `shared`: others
    who have a key and know the id may read it; `may_share`: this caller can change that."""

    answer: str | None
    answer_withheld: bool
    citations: tuple[LoggedCitation, ...]
    passages: tuple[LoggedPassage, ...]
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
    return found.entry if operator else msgspec.structs.replace(found.entry, user=UNSET)


def query_detail(found: LoggedAnswer, *, operator: bool) -> QueryDetail:
    entry = query_entry(found.query, operator=operator)
    return QueryDetail(
        **msgspec.structs.asdict(entry),
        answer=found.answer or None,
        answer_withheld=found.withheld,
        citations=found.citations,
        passages=found.passages,
        relevance=found.relevance,
        shared=found.query.shared,
        may_share=found.own,
        sentences=UNSET if found.sentences is None else found.sentences,
    )


def feedback_entry(found: LoggedQuery, *, operator: bool) -> FeedbackEntry:
    entry = query_entry(found, operator=operator)
    assert entry.rating is not None, "only entries with a rating are feedback"
    return FeedbackEntry(
        query_id=entry.id,
        rating=entry.rating,
        comment=entry.comment,
        rated_at=datetime.fromtimestamp((found.rated_us or 0) / 1_000_000, UTC),
        surface=entry.surface,
        query=entry.query,
        user=entry.user,
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
