"""The query log: questions, retrieved passages, answers, citations and feedback; and the number of questions per
collection, user and day."""

import sqlite3
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from anabranch.domain.audit import USER, AuditEntry
from anabranch.domain.model import Passage, Scores, Value
from anabranch.domain.sentences import SentenceView
from anabranch.knowledge.model import Caller, Erased, Rating
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import as_json
from anabranch.knowledge.records.visibility import VISIBLE, collections_of, visible_to

DAY_S = 86_400
# Counts are kept for this many days, however long questions are kept.
COUNTED_DAYS = 30
# The user of guests' questions; "" is the operator.
GUEST = "(guest)"
# How many turns of a conversation a model reads with a question.
MAX_TURNS = 5


# A longer list of sentences is not kept.
MAX_SENTENCES_BYTES = 200_000


class QuotedChunk(Value):
    """Words of a chunk; `start` and `end` are their offsets in the document, which old entries do not have."""

    citation_index: int
    chunk: str
    document: str
    text: str
    start: int | None = None
    end: int | None = None


class QueryRecord(Value):
    """A question and its outcome: `answered`, `refused`, or the code of an error; then `answer` is None. `id` is what a
    client sends with its feedback. `key_collections` are those to which the asker's key was restricted. `verdicts`
    counts the `sentences` of a verified answer. If it is not `kept`, it is only counted."""

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
    verdicts: dict[str, int] | None = None
    sentences: tuple[SentenceView, ...] = ()
    relevance: float | None = None
    surface: str | None = None
    settings: Any = None
    outcome: str | None = None
    key_collections: tuple[int, ...] | None = None
    kept: bool = True


class QueryFilter(Value):
    """Which entries of the query log are wanted; None: all. `since` and `until` (exclusive) are seconds since 1970. The
    outcome `failed` is that of every question that ended with an error; `slower_than_ms` is exclusive."""

    user: str | None = None
    collection: int | None = None
    conversation: str | None = None
    surface: str | None = None
    outcome: str | None = None
    rating: Rating | None = None
    since: float | None = None
    until: float | None = None
    slower_than_ms: int | None = None


class LoggedQuery(Value):
    """An entry of the query log, without its answer. `key` is its position in the log, `rated_us` in the feedback.
    `question` is empty if it was not kept; entries of version 0.1.0 have no surface and no settings. `rewritten` and
    `variants` are empty if they may repeat an answer that is withheld. `verdicts` counts the sentences of a verified
    answer."""

    key: int
    id: str
    user: str
    created_at: float
    surface: str | None
    conversation: str | None
    question: str
    rewritten: str | None
    variants: tuple[str, ...]
    filters: Any
    settings: dict[str, Any]
    outcome: str | None
    refused: bool
    retrieval_ms: int
    latency_ms: int
    model: str | None
    input_tokens: int
    output_tokens: int
    rating: Rating | None
    comment: str | None
    rated_us: int | None
    faithfulness: float | None
    verdicts: dict[str, int] | None
    shared: bool


class RetrievedPassage(Value):
    """A passage that was found for a question. `text` is None if its document has a new version."""

    rank: int
    chunk: str
    document: str
    title: str
    text: str | None
    scores: Scores


class LoggedAnswer(Value):
    """An entry with its answer, quoting only documents that its reader may see. An answer can quote every passage that
    was found for it: if its reader may not see all of them any more, it is `withheld`. `sentences` are None if they
    are withheld, or were not kept; `own`: the reader has asked it, or is the operator."""

    query: LoggedQuery
    answer: str | None
    withheld: bool
    citations: tuple[QuotedChunk, ...]
    passages: tuple[RetrievedPassage, ...]
    relevance: float | None
    sentences: tuple[SentenceView, ...] | None
    own: bool


class Rated(Value):
    """A recorded rating: the surface of its question, and whether it is the question's first."""

    surface: str | None
    first: bool


class Turn(Value):
    question: str
    answer: str


# Of the rows of `queries`, those that a key restricted to some collections may read: what was asked with keys that were
# restricted to no others. (An answer may rest on more than what its entry names: on earlier turns.)
WITHIN = """(key_collections IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM json_each(key_collections) WHERE value NOT IN (SELECT value FROM json_each({}))
))"""
ASKED_WITHIN = f"(:collections IS NULL OR {WITHIN.format(':collections')})"


def asker(caller: Caller) -> str:
    """The user under which a caller's questions are recorded."""
    return caller.owner if caller.user is not None or caller.operator else GUEST


def record(db: sqlite3.Connection, query: QueryRecord) -> None:
    now = time.time()
    if query.answer is not None:
        _count(db, query, now)
    if query.kept:
        _record_question(db, query, now)
        if query.answer is not None:
            _record_answer(db, query, now)


def _count(db: sqlite3.Connection, query: QueryRecord, now: float) -> None:
    db.executemany(
        "INSERT INTO query_counts VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
        ((key, _day(now), query.user) for key in query.collections or ()),
    )


def _record_question(db: sqlite3.Connection, query: QueryRecord, now: float) -> None:
    db.execute(
        "INSERT INTO queries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
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
        ),
    )
    db.executemany(
        "INSERT INTO query_collections VALUES (?, ?, ?)", ((key, query.id, now) for key in query.collections or ())
    )


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
            (query.id, ordinal, quote.citation_index, quote.chunk, quote.document, quote.text, quote.start, quote.end)
            for ordinal, quote in enumerate(query.quotes)
        ),
    )


def _sentences(query: QueryRecord) -> str | None:
    encoded = msgspec.json.encode(query.sentences) if query.sentences else b""
    return encoded.decode() if 0 < len(encoded) <= MAX_SENTENCES_BYTES else None


def turns(db: sqlite3.Connection, caller: Caller, conversation: str, limit: int, last: str | None = None) -> list[Turn]:
    """Of the last turns of the caller's conversation, up to the query `last`, those whose answers it may still read,
    oldest first."""
    rows = db.execute(
        "SELECT id, original, answer FROM queries JOIN responses ON responses.query = queries.id "  # noqa: S608
        f"WHERE user = :user AND {ASKED_WITHIN} AND conversation = :conversation "
        "AND (:last IS NULL OR (queries.created_at, queries.id) <= "
        "(SELECT created_at, id FROM queries WHERE id = :last)) "
        "ORDER BY queries.created_at DESC, queries.id DESC LIMIT :limit",
        {
            "user": caller.owner,
            "collections": collections_of(caller),
            "conversation": conversation,
            "last": last,
            "limit": limit,
        },
    ).fetchall()
    withheld = _withheld(db, caller, [row["id"] for row in rows])
    return [Turn(question=row["original"], answer=row["answer"]) for row in reversed(rows) if row["id"] not in withheld]


def _withheld(db: sqlite3.Connection, caller: Caller, ids: Collection[str]) -> set[str]:
    """Those of some entries whose answer is withheld from a caller: a document that was found for it is deleted, or the
    caller may not see it any more."""
    if not ids:
        return set()
    query = (
        "SELECT value FROM json_each(:ids) WHERE EXISTS (SELECT 1 FROM retrievals LEFT JOIN documents "  # noqa: S608
        f"ON documents.id = document WHERE query = value AND (documents.key IS NULL OR {VISIBLE} IS NOT TRUE))"
    )
    return {row[0] for row in db.execute(query, {"ids": as_json(list(ids)), **visible_to(caller)})}


def rate(db: sqlite3.Connection, query: str, caller: Caller, rating: Rating, comment: str | None) -> Rated | None:
    """Feedback on the caller's own question; None if none of that id was answered."""
    row = db.execute(
        "SELECT surface, feedback, comment FROM responses JOIN queries ON queries.id = query "  # noqa: S608
        f"WHERE query = :id AND (:operator OR user = :user) AND {ASKED_WITHIN}",
        _own(caller, query, asker(caller)),
    ).fetchone()
    if row is None:
        return None
    db.execute(
        "UPDATE responses SET feedback = ?, comment = ?, rated_us = max(?, 1 + coalesce((SELECT max(rated_us) FROM "
        "responses WHERE feedback IS NOT NULL), 0)) WHERE query = ?",
        (rating, comment, time.time_ns() // 1_000, query),
    )
    if (rating, comment) != (row["feedback"], row["comment"]):
        audit.append(db, AuditEntry(action="query.rated", object=f"query:{query}", details={"rating": rating}))
    return Rated(surface=row["surface"], first=row["feedback"] is None)


def share(db: sqlite3.Connection, caller: Caller, identifier: str, *, shared: bool) -> bool:
    """Let others read the caller's own entry, or no longer; False if there is none of that id."""
    found = db.execute(
        f"SELECT shared FROM queries WHERE id = :id AND (:operator OR user = :user) AND {ASKED_WITHIN}",  # noqa: S608
        _own(caller, identifier, _readable_user(caller)),
    ).fetchone()
    if found is not None and bool(found["shared"]) != shared:
        db.execute("UPDATE queries SET shared = ? WHERE id = ?", (shared, identifier))
        audit.append(db, AuditEntry(action=f"query.{'shared' if shared else 'unshared'}", object=f"query:{identifier}"))
    return found is not None


ENTRY = (
    "SELECT queries.rowid AS key, queries.*, answer, refused, model, input_tokens, output_tokens, faithfulness, "
    "relevance, feedback, comment, rated_us, verdicts FROM queries "
    "LEFT JOIN responses ON responses.query = queries.id WHERE "
)
CONDITIONS = {
    "user": "queries.user = ?",
    "collection": "EXISTS (SELECT 1 FROM query_collections WHERE query = queries.id AND collection = ?)",
    "conversation": "queries.conversation = ?",
    "surface": "queries.surface = ?",
    "outcome": "queries.outcome = ?",
    "rating": "responses.feedback = ?",
    "since": "queries.created_at >= ?",
    "until": "queries.created_at < ?",
    "slower_than_ms": "queries.latency_ms > ?",
}
# Every other outcome is the code of an error; entries of version 0.1.0 have none.
FAILED, NO_FAILURES = "failed", ("answered", "refused")
OUTCOME_FAILED = "queries.outcome NOT IN (SELECT value FROM json_each(?))"
RATED = {"since": "rated_us >= ? * 1000000", "until": "rated_us < ? * 1000000"}


def listed(
    db: sqlite3.Connection,
    caller: Caller,
    wanted: QueryFilter,
    before: int | None = None,
    limit: int = 50,
    *,
    rated: bool = False,
) -> list[LoggedQuery]:
    """The entries that a caller may read, newest first, before the `key` of another entry. With `rated`, only those
    with a rating, and the order, `before`, `since` and `until` are those of the ratings (`rated_us`)."""
    position, conditions = ("rated_us", CONDITIONS | RATED) if rated else ("queries.rowid", CONDITIONS)
    values = {conditions[name]: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
    if wanted.outcome == FAILED:
        del values[conditions["outcome"]]
        values[OUTCOME_FAILED] = as_json(NO_FAILURES)
    if not caller.operator:
        if (user := _readable_user(caller)) is None:
            return []
        values[conditions["user"]] = user
    if (collections := collections_of(caller)) is not None:
        values[WITHIN.format("?")] = collections
    if before is not None:
        values[f"{position} < ?"] = before
    where = " AND ".join(["feedback IS NOT NULL" if rated else "TRUE", *values])
    rows = db.execute(f"{ENTRY} {where} ORDER BY {position} DESC LIMIT ?", (*values.values(), limit)).fetchall()
    return _entries(db, caller, rows)


def ids_with_prefix(db: sqlite3.Connection, prefix: str, limit: int) -> list[str]:
    """The ids that begin with the prefix, in their order, up to the limit."""
    values = (prefix, f"{prefix}\U0010ffff", limit)
    rows = db.execute("SELECT id FROM queries WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?", values)
    return [str(row["id"]) for row in rows]


def detail(db: sqlite3.Connection, caller: Caller, identifier: str) -> LoggedAnswer | None:
    """One entry with its answer; None if the caller may not read it."""
    row = db.execute(ENTRY + "queries.id = ?", (identifier,)).fetchone()
    if row is None:
        return None
    own = _is_own(db, caller, row)
    if not own and not _shared_with(db, caller, row):
        return None
    found = db.execute(
        f"SELECT retrievals.*, title, chunks.text, documents.key IS NOT NULL AND {VISIBLE} AS visible "  # noqa: S608
        "FROM retrievals LEFT JOIN documents ON documents.id = retrievals.document "
        "LEFT JOIN chunks ON chunks.key >= first_chunk AND chunks.key < first_chunk + chunk_count "
        "AND chunks.id = retrievals.chunk WHERE query = :query ORDER BY rank",
        {"query": identifier, **visible_to(caller)},
    ).fetchall()
    shown = [one for one in found if one["visible"]]
    withheld = len(shown) < len(found)
    visible = {one["document"] for one in shown}
    quotes = db.execute("SELECT * FROM citations WHERE query = ? ORDER BY ordinal", (identifier,))
    entry = _entries(db, caller, [row])[0]
    return LoggedAnswer(
        query=entry if own else _for_others(entry),
        answer=None if withheld else row["answer"],
        withheld=withheld,
        citations=tuple(
            QuotedChunk(
                citation_index=one["citation_index"],
                chunk=one["chunk"],
                document=one["document"],
                text=one["quoted"],
                start=one["start_char"],
                end=one["end_char"],
            )
            for one in quotes
            if one["document"] in visible
        ),
        passages=tuple(_passage(one) for one in shown),
        relevance=row["relevance"],
        sentences=None if withheld else _stored_sentences(db, identifier),
        own=own,
    )


def _own(caller: Caller, identifier: str, user: str | None) -> dict[str, Any]:
    """The values for a query by its id that is the caller's own, also for `ASKED_WITHIN`."""
    return {"id": identifier, "operator": caller.operator, "user": user, "collections": collections_of(caller)}


def _is_own(db: sqlite3.Connection, caller: Caller, row: sqlite3.Row) -> bool:
    query = f"SELECT 1 FROM queries WHERE id = :id AND (:operator OR user = :user) AND {ASKED_WITHIN}"  # noqa: S608
    return db.execute(query, _own(caller, row["id"], _readable_user(caller))).fetchone() is not None


def _shared_with(db: sqlite3.Connection, caller: Caller, row: sqlite3.Row) -> bool:
    """Whether a caller may read an entry of somebody else: it is shared, and the caller may see every document that was
    found for it or for a turn that the model may have read with it."""
    return (
        bool(row["shared"])
        and _readable_user(caller) is not None
        and not _withheld(db, caller, [row["id"], *_turns_before(db, row)])
    )


def _for_others(entry: LoggedQuery) -> LoggedQuery:
    """What an entry says to those with whom it is shared: nothing about its conversation, no feedback, and not
    what was chosen to be searched: that may name collections which they may not see."""
    return msgspec.structs.replace(
        entry,
        user="",
        conversation=None,
        rewritten=None,
        variants=(),
        rating=None,
        comment=None,
        rated_us=None,
        filters=None,
        settings={},
    )


def _stored_sentences(db: sqlite3.Connection, identifier: str) -> tuple[SentenceView, ...] | None:
    row = db.execute("SELECT sentences FROM responses WHERE query = ?", (identifier,)).fetchone()
    try:
        return msgspec.json.decode(row["sentences"] or "", type=tuple[SentenceView, ...]) if row is not None else None
    except msgspec.DecodeError:  # not kept, or by another version
        return None


def _readable_user(caller: Caller) -> str | None:
    """The user whose entries a caller may read, unless it is the operator. All guests have one name in the log, so none
    of them may read any."""
    return None if caller.user == GUEST else caller.user


def _entries(db: sqlite3.Connection, caller: Caller, rows: Sequence[sqlite3.Row]) -> list[LoggedQuery]:
    """Entries for a caller. A question was rewritten with the turns before it, and may repeat their answers."""
    read = {
        row["id"]: {row["id"], *_turns_before(db, row)} for row in rows if row["rewritten"] or row["variants"] != "[]"
    }
    withheld = _withheld(db, caller, set().union(*read.values()))
    return [_entry(row, rewriting=withheld.isdisjoint(read.get(row["id"], ()))) for row in rows]


def _turns_before(db: sqlite3.Connection, row: sqlite3.Row) -> list[str]:
    """The ids of the turns that the model has read with a question, or more."""
    found = db.execute(
        "SELECT id FROM queries WHERE user = ? AND conversation = ? AND created_at <= ? AND id <> ? "
        "ORDER BY created_at DESC LIMIT ?",
        (row["user"], row["conversation"], row["created_at"], row["id"], MAX_TURNS),
    )
    return [one["id"] for one in found]


def _entry(row: sqlite3.Row, *, rewriting: bool) -> LoggedQuery:
    return LoggedQuery(
        key=row["key"],
        id=row["id"],
        user=row["user"],
        created_at=row["created_at"],
        surface=row["surface"],
        conversation=row["conversation"],
        question=row["original"],
        rewritten=row["rewritten"] if rewriting else None,
        variants=tuple(msgspec.json.decode(row["variants"])) if rewriting else (),
        filters=msgspec.json.decode(row["filters"]),
        settings={"top_k": row["top_k"], **(msgspec.json.decode(row["settings"] or "null") or {})},
        outcome=row["outcome"],
        refused=bool(row["refused"]),
        retrieval_ms=row["retrieval_ms"],
        latency_ms=row["latency_ms"],
        model=row["model"],
        input_tokens=row["input_tokens"] or 0,
        output_tokens=row["output_tokens"] or 0,
        rating=row["feedback"],
        comment=row["comment"],
        rated_us=row["rated_us"],
        faithfulness=row["faithfulness"],
        verdicts=msgspec.json.decode(row["verdicts"] or "null"),
        shared=bool(row["shared"]),
    )


def _passage(row: sqlite3.Row) -> RetrievedPassage:
    return RetrievedPassage(
        rank=row["rank"],
        chunk=row["chunk"],
        document=row["document"],
        title=row["title"],
        text=row["text"],
        scores=Scores(dense=row["dense"], sparse=row["sparse"], fused=row["fused"], rerank=row["rerank"]),
    )


def count(db: sqlite3.Connection, collection: int, days: int, user: str | None = None) -> int:
    """The number of answered questions to a collection today and on the days before (UTC), of one user or of all."""
    found = db.execute(
        "SELECT coalesce(sum(count), 0) FROM query_counts WHERE collection = ? AND day > ? AND (? IS NULL OR user = ?)",
        (collection, _day(time.time()) - days, user, user),
    )
    return int(found.fetchone()[0])


def forget(db: sqlite3.Connection, days: float, user: str | None = None, *, counts: bool = False) -> int:
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


def erase(db: sqlite3.Connection, erased: Erased) -> int:
    """Delete the questions of users with their counts, and blank those for which a document was found, with the later
    ones of the same conversation, whose answers may repeat it. What is left of a blank entry is figures. Returns how
    many entries that were."""
    deleted = sum(forget(db, -1, user, counts=True) for user in erased.users)
    entries = """WITH given (id) AS (SELECT value FROM json_each(:documents)),
    found (query) AS (
        SELECT query FROM retrievals WHERE document IN (SELECT id FROM given)
        UNION SELECT query FROM citations WHERE document IN (SELECT id FROM given)
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


def _day(moment: float) -> int:
    return int(moment // DAY_S)
