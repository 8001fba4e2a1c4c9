"""The query log, read: entries that a caller may see, with their answers, and the turns of a conversation."""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from anabranch.domain.model import Scores, Value
from anabranch.domain.sentences import SentenceView
from anabranch.knowledge.model import Caller, Rating
from anabranch.knowledge.records.database import ResultRow, Session, as_json
from anabranch.knowledge.records.queries import (
    ASKED_WITHIN,
    IN_GROUPS,
    OWN,
    WITHIN,
    FoundAt,
    LoggedCitation,
    own_to,
    readable_user,
)
from anabranch.knowledge.records.visibility import VISIBLE, collections_of, visible_to

# How many turns of a conversation a model reads with a question.
MAX_TURNS = 5
# They rest on no more passages than this, which are recorded with the question.
MAX_EARLIER_PASSAGES = 1_000
MAX_SNIPPET = 200
# A list has the beginning of a longer question.
MAX_LISTED = 10_000
BY_DOCUMENT = msgspec.json.Decoder(dict[str, list[str]])


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


class LoggedQuery(Value):
    """An entry with its position in the log (`key`) and in the feedback (`rated_us`); `shared`: others may read it.
    Entries of version 0.1.0 have no surface and no settings."""

    key: int
    rated_us: int | None
    shared: bool
    entry: QueryEntry


class LoggedPassage(Value):
    """A passage that was found for a logged question, with its scores. `content_snippet` is null if its document has a
    new version."""

    rank: int
    chunk_id: str
    document_id: str
    title: str
    content_snippet: str | None
    scores: Scores


class LoggedAnswer(Value):
    """An entry with its answer, quoting only documents that its reader may see. An answer can quote every passage on
    which it rests: if its reader may not see all of them any more, it is `withheld`. `sentences` are None if they are
    withheld, or were not kept; `own`: the reader has asked it, or is the operator."""

    query: LoggedQuery
    answer: str | None
    withheld: bool
    citations: tuple[LoggedCitation, ...]
    passages: tuple[LoggedPassage, ...]
    relevance: float | None
    sentences: tuple[SentenceView, ...] | None
    own: bool


class Turn(Value):
    """A turn of a conversation, and the passages on which its answer rests."""

    question: str
    answer: str
    passages: frozenset[FoundAt]


# What was found for some entries, and for entries of earlier versions also for the turns before them: for these it is
# unknown which turns the model has read.
FOUND = """
SELECT query, document, chunk FROM retrievals WHERE query IN (SELECT value FROM json_each(:ids))
"""
FOUND_BEFORE = """
SELECT later.id, document, chunk FROM queries AS later JOIN queries AS earlier ON earlier.user = later.user
AND earlier.conversation = later.conversation AND earlier.created_at <= later.created_at
JOIN retrievals ON query = earlier.id
WHERE later.id IN (SELECT value FROM json_each(:ids))
"""


# The caller's own questions.
ASKED = (
    "SELECT id, original, answer FROM queries LEFT JOIN responses ON responses.query = queries.id "  # noqa: S608
    f"WHERE user = :user AND {ASKED_WITHIN}"
)


def turns(db: Session, caller: Caller, conversation: str, limit: int, last: str | None = None) -> list[Turn]:
    """Of the last turns of the caller's conversation, up to the query `last`, those whose answers it may still read,
    oldest first; no more than rest on MAX_EARLIER_PASSAGES."""
    rows = db.execute(
        f"{ASKED} AND conversation = :conversation AND answer IS NOT NULL "  # noqa: S608
        "AND (:last IS NULL OR (queries.created_at, queries.id) <= "
        "(SELECT created_at, id FROM queries WHERE id = :last)) "
        "ORDER BY queries.created_at DESC, queries.id DESC LIMIT :limit",
        {**own_to(caller, caller.owner), "conversation": conversation, "last": last, "limit": limit},
    ).fetchall()
    return list(_readable(db, caller, rows).values())[::-1]


def turns_by_id(db: Session, caller: Caller, ids: Sequence[str]) -> dict[str, Turn | None]:
    """The caller's own questions of these ids, which are given oldest first. None stands for one without an answer that
    it may still read, and for those before the last ones that rest on MAX_EARLIER_PASSAGES."""
    values = {**own_to(caller, caller.owner), "ids": as_json(ids)}
    rows = db.execute(f"{ASKED} AND id IN (SELECT value FROM json_each(:ids))", values).fetchall()  # noqa: S608
    position = {one: at for at, one in enumerate(ids)}
    rows.sort(key=lambda row: position[row["id"]], reverse=True)
    found = _readable(db, caller, [row for row in rows if row["answer"] is not None])
    return {row["id"]: found.get(row["id"]) for row in rows}


def _readable(db: Session, caller: Caller, rows: Sequence[ResultRow]) -> dict[str, Turn]:
    """Of some answered questions, newest first, those whose answers a caller may still read."""
    basis = _basis(db, [row["id"] for row in rows])
    withheld = _withheld(db, caller, basis)
    found: dict[str, Turn] = {}
    passages: frozenset[FoundAt] = frozenset()
    for row in rows:
        if row["id"] not in withheld:
            turn = Turn(question=row["original"], answer=row["answer"], passages=basis[row["id"]])
            passages |= turn.passages
            if len(passages) > MAX_EARLIER_PASSAGES:
                break
            found[row["id"]] = turn
    return found


def _basis(db: Session, ids: Collection[str]) -> dict[str, frozenset[FoundAt]]:
    """What the answer of each of some entries rests on: the passages that were found for it, and those on which the
    turns rest that the model has read with it."""
    if not ids:
        return {}
    basis: dict[str, set[FoundAt]] = {one: set() for one in ids}
    of_earlier_versions = []
    chosen = "SELECT id, earlier_passages FROM queries WHERE id IN (SELECT value FROM json_each(:ids))"
    for one, earlier in db.execute(chosen, {"ids": as_json(list(ids))}):
        if earlier is None:
            of_earlier_versions.append(one)
        else:
            by_document = BY_DOCUMENT.decode(earlier)
            basis[one].update(FoundAt(document, chunk) for document in by_document for chunk in by_document[document])
    for found, wanted in ((FOUND, ids), (FOUND_BEFORE, of_earlier_versions)):
        for one, document, chunk in db.execute(found, {"ids": as_json(list(wanted))}) if wanted else ():
            basis[one].add(FoundAt(document, chunk))
    return {one: frozenset(passages) for one, passages in basis.items()}


def _withheld(db: Session, caller: Caller, basis: Mapping[str, Collection[FoundAt]]) -> set[str]:
    """Those of some entries whose answer is withheld from a caller: a document on which it rests is deleted, or the
    caller may not see it any more."""
    documents = {passage.document for passages in basis.values() for passage in passages}
    if not documents:
        return set()
    query = f"SELECT id FROM documents WHERE id IN (SELECT value FROM json_each(:ids)) AND {VISIBLE}"  # noqa: S608
    visible = {row["id"] for row in db.execute(query, {"ids": as_json(list(documents)), **visible_to(caller)})}
    return {one for one, passages in basis.items() if any(passage.document not in visible for passage in passages)}


def _all_stored(db: Session, passages: Collection[FoundAt]) -> bool:
    """Whether no document of these passages was deleted or has a new version."""
    found = db.execute(
        "SELECT count(DISTINCT chunks.id) FROM documents JOIN chunks "
        "ON chunks.key >= first_chunk AND chunks.key < first_chunk + chunk_count "
        "WHERE documents.id IN (SELECT value FROM json_each(?)) AND chunks.id IN (SELECT value FROM json_each(?))",
        (as_json(list({one.document for one in passages})), as_json(list({one.chunk for one in passages}))),
    )
    return bool(found.fetchone()[0] == len({one.chunk for one in passages}))


ENTRY = (
    "SELECT queries.rowid AS key, id, user, conversation, {original}, rewritten, variants, filters, top_k, "
    "retrieval_ms, latency_ms, queries.created_at, surface, settings, outcome, shared, {answer} refused, model, "
    "input_tokens, output_tokens, faithfulness, relevance, feedback, comment, rated_us, verdicts FROM queries "
    "LEFT JOIN responses ON responses.query = queries.id WHERE "
)
DETAIL = ENTRY.format(original="original", answer="answer,")
# Without what a list does not show.
LISTED = ENTRY.format(
    original=f"CASE WHEN length(original) > {MAX_LISTED} THEN substr(original, 1, {MAX_LISTED}) || ' …' "
    "ELSE original END AS original",
    answer="",
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
    db: Session,
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
        if (user := readable_user(caller)) is None:
            return []
        values |= {conditions["user"]: user, IN_GROUPS.format("?"): as_json(caller.groups)}
    if (collections := collections_of(caller)) is not None:
        values[WITHIN.format("?")] = collections
    if before is not None:
        values[f"{position} < ?"] = before
    where = " AND ".join(["feedback IS NOT NULL" if rated else "TRUE", *values])
    rows = db.execute(f"{LISTED} {where} ORDER BY {position} DESC LIMIT ?", (*values.values(), limit)).fetchall()
    return _entries(db, caller, rows)


def ids_with_prefix(db: Session, prefix: str, limit: int) -> list[str]:
    """The ids that begin with the prefix, in their order, up to the limit."""
    values = (prefix, f"{prefix}\U0010ffff", limit)
    rows = db.execute("SELECT id FROM queries WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?", values)
    return [str(row["id"]) for row in rows]


def detail(db: Session, caller: Caller, identifier: str) -> LoggedAnswer | None:
    """One entry with its answer; None if the caller may not read it."""
    row = db.execute(DETAIL + "queries.id = ?", (identifier,)).fetchone()
    if row is None:
        return None
    own = _is_own(db, caller, row)
    basis = _basis(db, [identifier])
    withheld = identifier in _withheld(db, caller, basis)
    # Who may see the newest version of a document may have had no right to the one that the answer quotes.
    shared = row["shared"] and readable_user(caller) is not None and not withheld
    if not own and not (shared and _all_stored(db, basis[identifier])):
        return None
    found = db.execute(
        f"SELECT retrievals.*, title, chunks.text, documents.key IS NOT NULL AND {VISIBLE} AS visible "  # noqa: S608
        "FROM retrievals LEFT JOIN documents ON documents.id = retrievals.document "
        "LEFT JOIN chunks ON chunks.key >= first_chunk AND chunks.key < first_chunk + chunk_count "
        "AND chunks.id = retrievals.chunk WHERE query = :query ORDER BY rank",
        {"query": identifier, **visible_to(caller)},
    ).fetchall()
    shown = [one for one in found if one["visible"]]
    visible = {one["document"] for one in shown}
    quotes = db.execute("SELECT * FROM citations WHERE query = ? ORDER BY ordinal", (identifier,))
    entry = _entries(db, caller, [row])[0]
    return LoggedAnswer(
        query=entry if own else _for_others(entry),
        answer=None if withheld else row["answer"],
        withheld=withheld,
        citations=tuple(
            LoggedCitation(
                citation_index=one["citation_index"],
                chunk_id=one["chunk"],
                document_id=one["document"],
                quoted_text=one["quoted"],
                start_char=one["start_char"],
                end_char=one["end_char"],
            )
            for one in quotes
            if one["document"] in visible
        ),
        passages=tuple(_passage(one) for one in shown),
        relevance=row["relevance"],
        sentences=None if withheld else _stored_sentences(db, identifier),
        own=own,
    )


def _is_own(db: Session, caller: Caller, row: ResultRow) -> bool:
    query = f"SELECT 1 FROM queries WHERE id = :id AND {OWN}"  # noqa: S608
    return db.execute(query, {"id": row["id"], **own_to(caller, readable_user(caller))}).fetchone() is not None


def _for_others(found: LoggedQuery) -> LoggedQuery:
    """What an entry says to those with whom it is shared: nothing about its conversation, no feedback, and not
    what was chosen to be searched: that may name collections which they may not see."""
    entry = msgspec.structs.replace(
        found.entry,
        user=UNSET,
        conversation_id=None,
        rewritten_query=None,
        variants=(),
        rating=None,
        comment=None,
        filters=None,
        settings={},
    )
    return msgspec.structs.replace(found, rated_us=None, entry=entry)


def _stored_sentences(db: Session, identifier: str) -> tuple[SentenceView, ...] | None:
    row = db.execute("SELECT sentences FROM responses WHERE query = ?", (identifier,)).fetchone()
    try:
        return msgspec.json.decode(row["sentences"] or "", type=tuple[SentenceView, ...]) if row is not None else None
    except msgspec.DecodeError:  # not kept, or by another version
        return None


def _entries(db: Session, caller: Caller, rows: Sequence[ResultRow]) -> list[LoggedQuery]:
    """Entries for a caller. A question was rewritten with the turns before it, and may repeat their answers."""
    rewritten = [row["id"] for row in rows if row["rewritten"] or row["variants"] != "[]"]
    withheld = _withheld(db, caller, _basis(db, rewritten))
    return [_entry(row, rewriting=row["id"] not in withheld) for row in rows]


def _entry(row: ResultRow, *, rewriting: bool) -> LoggedQuery:
    entry = QueryEntry(
        id=row["id"],
        created_at=datetime.fromtimestamp(row["created_at"], UTC),
        surface=row["surface"],
        conversation_id=row["conversation"],
        query=row["original"] or None,
        rewritten_query=row["rewritten"] if rewriting else None,
        variants=tuple(msgspec.json.decode(row["variants"])) if rewriting else (),
        outcome=row["outcome"],
        refused=bool(row["refused"]),
        rating=row["feedback"],
        comment=row["comment"],
        model=row["model"],
        input_tokens=row["input_tokens"] or 0,
        output_tokens=row["output_tokens"] or 0,
        latency_ms=row["latency_ms"],
        retrieval_ms=row["retrieval_ms"],
        settings={"top_k": row["top_k"], **(msgspec.json.decode(row["settings"] or "null") or {})},
        filters=msgspec.json.decode(row["filters"]),
        faithfulness=row["faithfulness"],
        verdicts=msgspec.json.decode(row["verdicts"] or "null"),
        user=row["user"] or None,
    )
    return LoggedQuery(key=row["key"], rated_us=row["rated_us"], shared=bool(row["shared"]), entry=entry)


def _passage(row: ResultRow) -> LoggedPassage:
    return LoggedPassage(
        rank=row["rank"],
        chunk_id=row["chunk"],
        document_id=row["document"],
        title=row["title"],
        content_snippet=None if row["text"] is None else row["text"][:MAX_SNIPPET],
        scores=Scores(dense=row["dense"], sparse=row["sparse"], fused=row["fused"], rerank=row["rerank"]),
    )
