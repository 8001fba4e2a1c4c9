"""The query log: questions, retrieved passages, answers, citations and feedback."""

import sqlite3
import time
from typing import Any, Literal

from anabranch.domain.model import Passage, Value
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import as_json

DAY_S = 86_400
# The user of guests' questions; "" is the operator.
GUEST = "(guest)"
Rating = Literal["thumbs_up", "thumbs_down"]


class QuotedChunk(Value):
    citation_index: int
    chunk: str
    document: str
    text: str


class QueryRecord(Value):
    """A question and its outcome: `answered`, `refused`, or the code of an error; then `answer` is None. `id` is what a
    client sends with its feedback."""

    id: str
    user: str
    original: str
    top_k: int
    answer: str | None = None
    refused: bool = False
    model: str | None = None
    found: tuple[Passage, ...] = ()
    quotes: tuple[QuotedChunk, ...] = ()
    collections: tuple[int, ...] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    retrieval_ms: int = 0
    latency_ms: int = 0
    conversation: str | None = None
    rewritten: str | None = None
    variants: tuple[str, ...] = ()
    filters: Any = None
    endpoint: str | None = None
    transaction_token: str | None = None
    faithfulness: float | None = None
    relevance: float | None = None
    surface: str | None = None
    settings: Any = None
    outcome: str | None = None


class Turn(Value):
    question: str
    answer: str


def asker(caller: Caller) -> str:
    """The user under which a caller's questions are recorded."""
    return caller.owner if caller.user is not None or caller.operator else GUEST


def record(db: sqlite3.Connection, query: QueryRecord) -> None:
    now = time.time()
    db.execute(
        "INSERT INTO queries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            query.id,
            query.user,
            query.conversation,
            query.original,
            query.rewritten,
            as_json(query.variants),
            as_json(query.filters),
            query.top_k,
            query.endpoint,
            query.transaction_token,
            query.retrieval_ms,
            query.latency_ms,
            now,
            query.surface,
            as_json(query.settings),
            query.outcome,
        ),
    )
    db.executemany(
        "INSERT INTO query_collections VALUES (?, ?, ?)", ((key, query.id, now) for key in query.collections or ())
    )
    if query.answer is not None:
        _record_answer(db, query, now)


def _record_answer(db: sqlite3.Connection, query: QueryRecord, now: float) -> None:
    db.executemany(
        "INSERT INTO retrievals VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                query.id,
                rank,
                passage.place.chunk_id,
                passage.document_id,
                passage.place.scores.dense,
                passage.place.scores.sparse,
                passage.place.scores.fused,
                passage.place.scores.rerank,
            )
            for rank, passage in enumerate(query.found, 1)
            if passage.place is not None
        ),
    )
    db.execute(
        "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, ?)",
        (
            query.id,
            query.answer,
            query.refused,
            query.model,
            query.input_tokens,
            query.output_tokens,
            query.faithfulness,
            query.relevance,
            now,
        ),
    )
    db.executemany(
        "INSERT INTO citations VALUES (?, ?, ?, ?, ?, ?)",
        (
            (query.id, ordinal, quote.citation_index, quote.chunk, quote.document, quote.text)
            for ordinal, quote in enumerate(query.quotes)
        ),
    )


def turns(db: sqlite3.Connection, user: str, conversation: str, limit: int) -> list[Turn]:
    """The last turns of a user's conversation, oldest first."""
    rows = db.execute(
        "SELECT original, answer FROM queries JOIN responses ON responses.query = queries.id "
        "WHERE user = ? AND conversation = ? ORDER BY queries.created_at DESC, queries.id DESC LIMIT ?",
        (user, conversation, limit),
    ).fetchall()
    return [Turn(question=row[0], answer=row[1]) for row in reversed(rows)]


def rate(db: sqlite3.Connection, query: str, caller: Caller, rating: Rating, comment: str | None) -> bool:
    """Feedback on the caller's own question; False if none of that id was answered."""
    rated = db.execute(
        "UPDATE responses SET feedback = ?, comment = ? WHERE query = ? "
        "AND EXISTS (SELECT 1 FROM queries WHERE id = query AND (? OR user = ?))",
        (rating, comment, query, caller.operator, asker(caller)),
    )
    return rated.rowcount == 1


def count(db: sqlite3.Connection, collection: int, days: int, user: str | None = None) -> int:
    """The number of recent questions to a collection, of one user or of all."""
    found = db.execute(
        "SELECT count(*) FROM query_collections JOIN queries ON queries.id = query_collections.query "
        "WHERE collection = ? AND query_collections.created_at >= ? AND (? IS NULL OR user = ?)",
        (collection, time.time() - days * DAY_S, user, user),
    )
    return int(found.fetchone()[0])


def forget(db: sqlite3.Connection, days: float, user: str | None = None) -> int:
    """Delete questions older than some days, of one user or of all; returns how many."""
    old = db.execute(
        "SELECT id FROM queries WHERE created_at < ? AND (? IS NULL OR user = ?)",
        (time.time() - days * DAY_S, user, user),
    ).fetchall()
    for column in (
        "query_collections WHERE query",
        "retrievals WHERE query",
        "responses WHERE query",
        "citations WHERE query",
        "queries WHERE id",
    ):
        db.executemany(f"DELETE FROM {column} = ?", old)  # noqa: S608  our own names
    return len(old)
