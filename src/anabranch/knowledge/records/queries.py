"""The query log, written: questions, retrieved passages, answers, citations and feedback; and the number of questions
per collection, user and day."""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from anabranch.domain.audit import USER, AuditEntry
from anabranch.domain.model import Passage, Value
from anabranch.domain.sentences import SentenceView
from anabranch.knowledge.model import Caller, Erased, Rating
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Session, as_json
from anabranch.knowledge.records.visibility import visible_to

DAY_S = 86_400
# Counts are kept for this many days, however long questions are kept.
COUNTED_DAYS = 30
# The user of guests' questions; "" is the operator.
GUEST = "(guest)"
# A longer list of sentences is not kept.
MAX_SENTENCES_BYTES = 200_000


class FoundAt(NamedTuple):
    """Where a passage was found. A new version of a document has new chunks."""

    document: str
    chunk: str


class LoggedCitation(Value):
    """A citation of a logged answer; `start_char` and `end_char` are offsets in the document as it was then. They are
    null if an earlier version has logged it."""

    citation_index: int
    chunk_id: str
    document_id: str
    quoted_text: str
    start_char: int | None
    end_char: int | None


class QueryRecord(Value):
    """A question and its outcome: `answered`, `refused`, or the code of an error; then `answer` is None. `id` is what a
    client sends with its feedback. `key_collections` are those to which the asker's key was restricted, `key_groups`
    the groups that it was in; None: an operator's. `earlier` are the passages on which the turns that the model has
    read with it rest. `verdicts` counts the `sentences` of a verified answer. If it is not `kept`, it is only
    counted."""

    id: str
    user: str
    original: str
    top_k: int
    answer: str | None = None
    refused: bool = False
    model: str | None = None
    found: tuple[Passage, ...] = ()
    earlier: frozenset[FoundAt] = frozenset()
    quotes: tuple[LoggedCitation, ...] = ()
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
    verdicts: dict[str, int] | None = None
    sentences: tuple[SentenceView, ...] = ()
    relevance: float | None = None
    surface: str | None = None
    settings: Any = None
    outcome: str | None = None
    key_collections: tuple[int, ...] | None = None
    key_groups: tuple[str, ...] | None = ()
    kept: bool = True


# What an entry keeps nothing of when it is written after a document that was found was deleted; as `erase` leaves it.
BLANK: dict[str, Any] = {
    "original": "",
    "rewritten": None,
    "variants": (),
    "filters": None,
    "answer": "",
    "quotes": (),
    "sentences": (),
}


class Rated(Value):
    """A recorded rating: the surface of its question, and whether it is the question's first."""

    surface: str | None
    first: bool


# Of the rows of `queries`, those that a key may read: what was asked with no more rights than its own. (An answer may
# rest on more than what its entry names: on earlier turns, and on versions of documents that are gone.) That is, for a
# key that is restricted to some collections, what was asked with keys that were restricted to no others; and for one
# that is no operator's, what was asked with keys that were none either, and in no other groups.
NO_OTHERS = """({column} IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM json_each({column}) WHERE value NOT IN (SELECT value FROM json_each({given}))
))"""
WITHIN = NO_OTHERS.format(column="key_collections", given="{}")
IN_GROUPS = NO_OTHERS.format(column="key_groups", given="{}")
ASKED_WITHIN = (
    f"((:collections IS NULL OR {WITHIN.format(':collections')}) AND (:operator = 1 OR {IN_GROUPS.format(':groups')}))"
)
# Those that are the caller's own; an operator owns all. Its values come from `own_to`.
OWN = f"((:operator = 1 OR user = :user) AND {ASKED_WITHIN})"


def asker(caller: Caller) -> str:
    """The user under which a caller's questions are recorded."""
    return caller.owner if caller.user is not None or caller.operator else GUEST


def record(db: Session, query: QueryRecord) -> None:
    now = time.time()
    if query.kept and _is_any_gone(db, query):
        query = msgspec.structs.replace(query, **BLANK)
    if query.answer is not None:
        _count(db, query, now)
    if query.kept:
        _record_question(db, query, now)
        if query.answer is not None:
            _record_answer(db, query, now)


def _is_any_gone(db: Session, query: QueryRecord) -> bool:
    """Whether a document that was found, now or in an earlier turn, is deleted by now: then it may be erased already,
    and its text must not come back. Passages from elsewhere have no place."""
    found = {one.document_id for one in query.found if one.place is not None} | {one.document for one in query.earlier}
    gone = "SELECT 1 FROM json_each(?) WHERE value NOT IN (SELECT id FROM documents) LIMIT 1"
    return bool(found) and db.execute(gone, (as_json(sorted(filter(None, found))),)).fetchone() is not None


def _count(db: Session, query: QueryRecord, now: float) -> None:
    db.executemany(
        "INSERT INTO query_counts VALUES (?, ?, ?, 1) "
        "ON CONFLICT (collection, day, user) DO UPDATE SET count = query_counts.count + 1",
        ((key, _day(now), query.user) for key in query.collections or ()),
    )


def _record_question(db: Session, query: QueryRecord, now: float) -> None:
    db.execute(
        "INSERT INTO queries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?)",
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
            None if query.key_collections is None else as_json(query.key_collections),
            as_json(_by_document(query.earlier)),
            None if query.key_groups is None else as_json(query.key_groups),
        ),
    )
    db.executemany(
        "INSERT INTO query_collections VALUES (?, ?, ?)", ((key, query.id, now) for key in query.collections or ())
    )


def _by_document(passages: Iterable[FoundAt]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for one in passages:
        found[one.document].append(one.chunk)
    return found


def _record_answer(db: Session, query: QueryRecord, now: float) -> None:
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
        "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, ?, NULL, ?, ?)",
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
            None if query.verdicts is None else as_json(query.verdicts),
            _sentences(query),
        ),
    )
    db.executemany(
        "INSERT INTO citations VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                query.id,
                ordinal,
                quote.citation_index,
                quote.chunk_id,
                quote.document_id,
                quote.quoted_text,
                quote.start_char,
                quote.end_char,
            )
            for ordinal, quote in enumerate(query.quotes)
        ),
    )


def _sentences(query: QueryRecord) -> str | None:
    encoded = msgspec.json.encode(query.sentences) if query.sentences else b""
    return encoded.decode() if 0 < len(encoded) <= MAX_SENTENCES_BYTES else None


def rate(db: Session, query: str, caller: Caller, rating: Rating, comment: str | None) -> Rated | None:
    """Feedback on the caller's own question; None if none of that id was answered."""
    row = db.execute(
        "SELECT surface, feedback, comment FROM responses JOIN queries ON queries.id = query "  # noqa: S608
        f"WHERE query = :id AND {OWN}",
        {"id": query, **own_to(caller, asker(caller))},
    ).fetchone()
    if row is None:
        return None
    db.execute(
        "UPDATE responses SET feedback = ?, comment = ?, rated_us = (SELECT max(us) FROM (SELECT ? AS us UNION ALL "
        "SELECT max(rated_us) + 1 FROM responses WHERE feedback IS NOT NULL) AS moments) WHERE query = ?",
        (rating, comment, time.time_ns() // 1_000, query),
    )
    if (rating, comment) != (row["feedback"], row["comment"]):
        audit.append(db, AuditEntry(action="query.rated", object=f"query:{query}", details={"rating": rating}))
    return Rated(surface=row["surface"], first=row["feedback"] is None)


def share(db: Session, caller: Caller, identifier: str, *, shared: bool) -> bool:
    """Let others read the caller's own entry, or no longer; False if there is none of that id."""
    found = db.execute(
        f"SELECT shared FROM queries WHERE id = :id AND {OWN}",  # noqa: S608
        {"id": identifier, **own_to(caller, readable_user(caller))},
    ).fetchone()
    if found is not None and bool(found["shared"]) != shared:
        db.execute("UPDATE queries SET shared = ? WHERE id = ?", (shared, identifier))
        audit.append(db, AuditEntry(action=f"query.{'shared' if shared else 'unshared'}", object=f"query:{identifier}"))
    return found is not None


def own_to(caller: Caller, user: str | None) -> dict[str, Any]:
    """The values of `OWN`, for the caller and the user under which its questions are recorded."""
    return visible_to(caller) | {"user": user}


def readable_user(caller: Caller) -> str | None:
    """The user whose entries a caller may read, unless it is the operator. All guests have one name in the log, so none
    of them may read any."""
    return None if caller.user == GUEST else caller.user


def count(db: Session, collection: int, days: int, user: str | None = None) -> int:
    """The number of answered questions to a collection today and on the days before (UTC), of one user or of all."""
    found = db.execute(
        "SELECT coalesce(sum(count), 0) FROM query_counts WHERE collection = ? AND day > ? AND (? IS NULL OR user = ?)",
        (collection, _day(time.time()) - days, user, user),
    )
    return int(found.fetchone()[0])


def forget(db: Session, days: float, user: str | None = None, *, counts: bool = False) -> int:
    """Delete questions older than some days, of one user or of all; returns how many. With `counts`, also the counts of
    every day that began before: a day's count cannot be divided."""
    limit = time.time() - days * DAY_S
    old = db.execute(
        "SELECT id FROM queries WHERE created_at < ? AND (? IS NULL OR user = ?)", (limit, user, user)
    ).fetchall()
    for column in (
        "query_collections WHERE query",
        "retrievals WHERE query",
        "responses WHERE query",
        "citations WHERE query",
        "queries WHERE id",
    ):
        db.executemany(f"DELETE FROM {column} = ?", old)  # noqa: S608  our own names
    if counts:
        db.execute("DELETE FROM query_counts WHERE day * ? < ? AND (? IS NULL OR user = ?)", (DAY_S, limit, user, user))
    db.execute("DELETE FROM query_counts WHERE day <= ?", (_day(time.time()) - COUNTED_DAYS,))
    if old or counts:
        granted = () if user is None else (f"{USER}{user}",)
        details = {"count": len(old), "older_than_days": days}
        audit.append(db, AuditEntry(action="queries.deleted", granted=granted, details=details))
    return len(old)


def erase(db: Session, erased: Erased) -> int:
    """Delete the questions of users with their counts, and blank those for which a document was found, with the later
    ones of the same conversation, whose answers may repeat it. What is left of a blank entry is figures. Returns how
    many entries that were."""
    deleted = sum(forget(db, -1, user, counts=True) for user in erased.users)
    for user in erased.users:
        _erase_addresses(db, user)
    entries = """WITH given (id) AS (SELECT value FROM json_each(:documents)),
    found (query) AS (
        SELECT query FROM retrievals WHERE document IN (SELECT id FROM given)
        UNION SELECT query FROM citations WHERE document IN (SELECT id FROM given)
        UNION SELECT queries.id FROM queries CROSS JOIN json_each(earlier_passages) AS earlier
        WHERE earlier.key IN (SELECT id FROM given)
    ),
    entries (id) AS (
        SELECT query FROM found UNION
        SELECT later.id FROM found JOIN queries AS first ON first.id = found.query JOIN queries AS later
        ON later.user = first.user AND later.conversation = first.conversation AND later.created_at >= first.created_at
    )
    SELECT id FROM queries WHERE id IN (SELECT id FROM entries) AND (
        original != '' OR EXISTS (SELECT 1 FROM responses WHERE query = queries.id AND (answer != '' OR comment != ''))
    )"""
    ids = [row[0] for row in db.execute(entries, {"documents": as_json(erased.documents)})]
    chosen = "IN (SELECT value FROM json_each(?))"
    values = (as_json(ids),)
    db.execute(
        "UPDATE queries SET original = '', rewritten = NULL, variants = '[]', filters = 'null', shared = 0 "  # noqa: S608
        f"WHERE id {chosen}",
        values,
    )
    db.execute(f"UPDATE responses SET answer = '', sentences = NULL, comment = NULL WHERE query {chosen}", values)  # noqa: S608
    db.execute(f"DELETE FROM citations WHERE query {chosen}", values)  # noqa: S608
    return deleted + len(ids)


def _erase_addresses(db: Session, user: str) -> None:
    """Remove the addresses of a user's collections from the questions of others."""
    begins = (f"{user}/", f"collection:{user}/")
    named = "instr(coalesce(endpoint, '') || coalesce(settings, ''), ?) > 0"
    rows = db.execute(f"SELECT id, endpoint, settings FROM queries WHERE {named}", (f"{user}/",))  # noqa: S608
    for identifier, endpoint, encoded in rows.fetchall():
        settings = None if encoded is None else msgspec.json.decode(encoded)
        if isinstance(settings, dict) and settings.get("sources"):
            settings["sources"] = [one for one in settings["sources"] if not one.startswith(begins)]
        kept = None if (endpoint or "").startswith(begins) else endpoint
        db.execute(
            "UPDATE queries SET endpoint = ?, settings = ? WHERE id = ?",
            (kept, settings and as_json(settings), identifier),
        )


def _day(moment: float) -> int:
    return int(moment // DAY_S)
