"""Jobs: the queue of documents to ingest. An accepted document stays here until it is stored; if it fails, what a retry
needs is kept for a while. Until then its item is open."""

import time
from collections import deque
from collections.abc import Collection as Some
from collections.abc import Iterator, Sequence
from hashlib import sha256
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from anabranch.domain.audit import AuditEntry
from anabranch.domain.model import Value
from anabranch.knowledge.model import (
    Caller,
    Chunking,
    Collection,
    Erased,
    ItemStatus,
    Job,
    JobItem,
    NewDocument,
)
from anabranch.knowledge.records import audit, collections, documents, nodes, open_items
from anabranch.knowledge.records.database import ResultRow, Session, as_json, new_id

# A document that was being processed this often when the process died is given up. After the first time it is
# chunked, embedded and stored alone, because another document may have been the cause.
ATTEMPTS = 5
CLAIM_BYTES = 8 * 1024 * 1024
# So many items are looked at for one that need not wait for another.
WINDOW = 16
# What is kept of failed documents, of all owners together. Beyond the bytes, the oldest of the owner who has most keep
# their error, but cannot be retried.
FAILED_DAYS = 7
MAX_FAILED = 10_000
MAX_FAILED_BYTES = 256 * 1024 * 1024
# What is left of an item whose document was erased.
BLANK = NewDocument(source="text")
Hold = tuple[int, str]


class Lane(NamedTuple):
    """What takes its turn in the queue: the files of an owner, or the URLs, which may take long to fetch."""

    owner: str
    is_url: bool


class Backlog(NamedTuple):
    """What one owner has sent that is not processed yet, by the names of the limits on it."""

    pending_documents: int
    pending_bytes: int


class Claim(Value):
    """An item that the indexer is processing."""

    key: int
    job: str
    owner: str
    collection: Collection
    document_id: str
    arrived: NewDocument
    content_hash: str
    chunking: Chunking
    attempts: int
    node: str = ""

    @property
    def lane(self) -> Lane:
        return Lane(self.owner, self.arrived.source == "url")

    @property
    def holds(self) -> set[Hold]:
        return holds_of(self.collection.key, self.arrived.identity, self.content_hash)


def create(
    db: Session, collection: Collection, caller: Caller, arrived: Sequence[NewDocument], chunking: Chunking
) -> str:
    """Accept documents; once this is committed, none of them is lost."""
    identifier, job = _insert_job(db, collection, caller.owner, chunking)
    for ordinal, document in enumerate(arrived):
        content_hash = _hash_of(document)
        identity = identity_for(db, collection, caller, document, content_hash)
        described = msgspec.structs.replace(document, data=b"", identity=identity)
        queued = Queued(job, caller.owner, ordinal, len(document.data))
        item = _insert_item(db, collection, queued, described, content_hash)
        db.execute("INSERT INTO uploads VALUES (?, ?)", (item, document.data))
    _record(db, "accepted", identifier, collection, documents=len(arrived))
    return identifier


def retry(db: Session, failed: open_items.OpenItem, collection: Collection, chunking: Chunking) -> str:
    """Queue a failed document again, in a job of the same owner; returns the job's id."""
    arrived = msgspec.structs.replace(failed.arrived, overruled=True)
    identifier, job = _insert_job(db, collection, failed.owner, chunking)
    data = db.execute("SELECT data FROM uploads WHERE item = ?", (failed.key,)).fetchone()["data"]
    item = _insert_item(db, collection, Queued(job, failed.owner, 0, len(data)), arrived, failed.content_hash)
    db.execute("INSERT INTO uploads VALUES (?, ?)", (item, data))
    _drop_uploads(db, "key = ?", failed.key)
    _record(db, "retried", identifier, collection, document=failed.document_id)
    return identifier


def _record(db: Session, what: str, job: str, collection: Collection, **details: str | int) -> None:
    about = {"collection": collection.id, **details}
    audit.append(db, AuditEntry(action=f"ingest.{what}", object=f"job:{job}", details=about))


def _insert_job(db: Session, collection: Collection, owner: str, chunking: Chunking) -> tuple[str, int]:
    identifier = new_id()
    row = db.execute(
        "INSERT INTO jobs (id, collection, collection_id, owner, chunking, created_at) VALUES (?, ?, ?, ?, ?, ?) "
        "RETURNING key",
        (identifier, collection.key, collection.id, owner, as_json(chunking), time.time()),
    ).fetchone()
    return identifier, int(row[0])


class Queued(NamedTuple):
    """Where an item is in its job, and what its owner's backlog grows by."""

    job: int
    owner: str
    ordinal: int
    size: int


def _insert_item(db: Session, collection: Collection, queued: Queued, arrived: NewDocument, content_hash: str) -> int:
    """Add an item with the id of the document that it replaces or follows; failed versions before it are given up."""
    identity = arrived.identity or ""
    stored = documents.by_identity(db, collection.key, identity)
    document_id = stored.id if stored else open_items.id_of(db, collection.key, identity) or new_id()
    _drop_uploads(db, "document_id = ? AND status = 'failed'", document_id)
    row = db.execute(
        "INSERT INTO items (job, owner, ordinal, size, is_url, document_id, status, arrived, content_hash) "
        "VALUES (?, ?, ?, ?, ?, ?, 'pending', ?, ?) RETURNING key",
        (*queued, arrived.source == "url", document_id, as_json(arrived), content_hash),
    ).fetchone()
    return int(row[0])


def count_versions(db: Session, collection: Collection, caller: Caller, sent: Sequence[NewDocument]) -> int:
    """How many of these are versions of documents that are stored."""
    identities = {identity_for(db, collection, caller, one, _hash_of(one)) for one in sent}
    return sum(documents.by_identity(db, collection.key, one) is not None for one in identities)


def _hash_of(document: NewDocument) -> str:
    return sha256(document.data or (document.url or "").encode()).hexdigest()


def _drop_uploads(db: Session, which: str, *values: str | float) -> None:
    """Delete the uploads of some items; a document that fails every day has many that are older than all uploads."""
    items = f"SELECT key FROM items WHERE {which} AND key >= (SELECT min(item) FROM uploads)"  # noqa: S608  our own names
    db.execute(f"DELETE FROM uploads WHERE item IN ({items})", values)  # noqa: S608


def identity_for(db: Session, collection: Collection, caller: Caller, document: NewDocument, content_hash: str) -> str:
    """The identity of a document in the records. Where one that the caller may not see has it, the caller's own gets
    another, and keeps it: as if the hidden one did not exist."""
    identity = _identity_of(document, content_hash)
    if caller.operator:
        return identity
    own = f"owner:{caller.owner}:{identity}"
    if documents.by_identity(db, collection.key, own) or open_items.id_of(db, collection.key, own):
        return own
    stored = documents.by_identity(db, collection.key, identity)
    if stored is not None:
        is_hidden = not documents.visible_by_ids(db, caller, [stored.id])
    else:
        open_id = open_items.id_of(db, collection.key, identity)
        is_hidden = open_id is not None and not open_items.by_documents(db, caller, [open_id])
    return own if is_hidden else identity


def _identity_of(document: NewDocument, content_hash: str) -> str:
    if document.identity or document.source == "url":
        return document.identity or f"url:{document.url}"
    return f"file:{document.filename}" if document.filename else f"sha256:{content_hash}"


def by_id(db: Session, identifier: str) -> Job | None:
    row = db.execute("SELECT * FROM jobs WHERE id = ?", (identifier,)).fetchone()
    if row is None:
        return None
    items = tuple(map(_item, db.execute("SELECT * FROM items WHERE job = ? ORDER BY ordinal", (row["key"],))))
    done = sum(item.status in ("completed", "failed", "cancelled") for item in items)
    failed = sum(item.status == "failed" for item in items)
    return Job(
        key=row["key"],
        id=row["id"],
        collection=row["collection"],
        collection_id=row["collection_id"],
        owner=row["owner"],
        status=_status(row, items, done, failed),
        total=len(items),
        processed=done,
        failed=failed,
        created_at=row["created_at"],
        completed_at=row["completed_at"],
        items=items,
    )


def cancel(db: Session, key: int) -> None:
    """Cancel the pending items of a job; documents that are stored stay."""
    db.execute("UPDATE jobs SET cancelled = 1 WHERE key = ? AND completed_at IS NULL", (key,))
    _drop_uploads(db, "job = ? AND status = 'pending'", key)
    cancelled = db.execute("UPDATE items SET status = 'cancelled' WHERE job = ? AND status = 'pending'", (key,))
    _close(db, key)
    row = db.execute("SELECT id FROM jobs WHERE key = ?", (key,)).fetchone()
    about = {"documents": cancelled.rowcount}
    audit.append(db, AuditEntry(action="ingest.cancelled", object=f"job:{row['id']}", details=about))


def recover(db: Session, node: str = "", *, restarted: bool = True) -> int:
    """Release the claims that this node had before it was `restarted`, or else those of dead nodes. Without nodes there
    are only its own. If one was processed alone, it was the cause, and the others of its node have not failed."""
    held = {row[0] for row in db.execute("SELECT DISTINCT node FROM items WHERE status = 'processing'")}
    if restarted:
        return sum(_recover(db, one) for one in held if one == node or not node)
    alive = {one.id for one in nodes.listed(db) if one.is_alive}
    return sum(_recover(db, one) for one in held - {node} - alive)


def abandoned(db: Session, node: str) -> bool:
    """Whether a dead node, other than this one, has claims."""
    held = {row[0] for row in db.execute("SELECT DISTINCT node FROM items WHERE status = 'processing'")} - {node}
    return bool(held) and not held <= {one.id for one in nodes.listed(db) if one.is_alive}


def _recover(db: Session, node: str) -> int:
    theirs = "status = 'processing' AND node = ?"
    if db.execute(f"SELECT 1 FROM items WHERE {theirs} AND alone = 1 LIMIT 1", (node,)).fetchone():  # noqa: S608
        db.execute(f"UPDATE items SET attempts = attempts - 1 WHERE {theirs} AND alone = 0", (node,))  # noqa: S608
    return db.execute(f"UPDATE items SET status = 'pending', alone = 0 WHERE {theirs}", (node,)).rowcount  # noqa: S608


def lanes(db: Session) -> list[Lane]:
    """The lanes in which items wait. The index is searched once for each owner, however many items wait."""
    rows = db.execute(
        "WITH RECURSIVE owners (owner) AS ("
        "SELECT min(owner) FROM items WHERE status = 'pending' UNION ALL "
        "SELECT (SELECT min(owner) FROM items WHERE status = 'pending' AND owner > owners.owner) FROM owners "
        "WHERE owner IS NOT NULL) "
        "SELECT owner, kind.value AS is_url FROM owners, (SELECT 0 AS value UNION ALL SELECT 1) AS kind WHERE EXISTS ("
        "SELECT 1 FROM items WHERE status = 'pending' AND items.owner = owners.owner AND is_url = kind.value)"
    )
    return [Lane(row["owner"], bool(row["is_url"])) for row in rows]


def backlog(db: Session, owner: str) -> Backlog:
    row = db.execute(
        "SELECT count(*), coalesce(sum(size), 0) FROM items WHERE owner = ? AND status IN ('pending', 'processing')",
        (owner,),
    ).fetchone()
    return Backlog(*row)


def claim(db: Session, limit: int, held: Some[Hold] = (), lane: Lane | None = None, node: str = "") -> list[Claim]:
    """Claim the next items of a lane, or of all, for a node, in order of arrival; a large one by itself, and so a
    retried one. An item waits while one with the same identity or content is processed (those of this node are `held`),
    and a version waits for earlier ones."""
    held = {*held, *_held_elsewhere(db, node)}
    rows = db.execute(
        "SELECT items.*, jobs.id AS job_id, jobs.owner AS job_owner, jobs.collection AS job_collection, "
        "jobs.chunking, uploads.data FROM items "
        "JOIN jobs ON jobs.key = items.job JOIN uploads ON uploads.item = items.key "
        "WHERE items.key IN (SELECT CAST(value AS BIGINT) FROM json_each(?)) ORDER BY items.key",
        (as_json(_claimable(db, limit, held, lane)),),
    ).fetchall()
    claims: list[Claim] = []
    for row in rows:
        collection = collections.by_key(db, row["job_collection"])
        claimed = "UPDATE items SET status = 'processing', attempts = attempts + 1, node = ? WHERE key = ?"
        db.execute(claimed, (node, row["key"]))
        if collection is None:
            finish(db, row["key"], "failed", error="The collection was deleted.")
        elif row["attempts"] >= ATTEMPTS:
            reason = f"The document ended its process {ATTEMPTS} times; it is not tried again."
            finish(db, row["key"], "failed", keep_upload=True, error=reason)
        else:
            arrived = msgspec.json.decode(row["arrived"], type=NewDocument)
            claims.append(
                Claim(
                    key=row["key"],
                    job=row["job_id"],
                    owner=row["job_owner"],
                    collection=collection,
                    document_id=row["document_id"],
                    arrived=msgspec.structs.replace(arrived, data=row["data"]),
                    content_hash=row["content_hash"],
                    chunking=msgspec.json.decode(row["chunking"], type=Chunking),
                    attempts=row["attempts"],
                    node=node,
                )
            )
    return claims


def is_claimable(db: Session, held: Some[Hold], lane: Lane, node: str) -> bool:
    """Whether `claim` would find something: a look that no other write waits for."""
    return bool(_claimable(db, 1, {*held, *_held_elsewhere(db, node)}, lane))


def _held_elsewhere(db: Session, node: str) -> set[Hold]:
    """What other nodes are processing."""
    rows = db.execute(
        "SELECT collection, arrived, content_hash FROM items JOIN jobs ON jobs.key = items.job "
        "WHERE status = 'processing' AND node != ?",
        (node,),
    )
    return {
        hold
        for collection, arrived, content_hash in rows.fetchall()
        for hold in holds_of(collection, msgspec.json.decode(arrived, type=NewDocument).identity, content_hash)
    }


def _claimable(db: Session, limit: int, held: Some[Hold], lane: Lane | None) -> list[int]:
    within = "" if lane is None else "AND items.owner = ? AND is_url = ?"
    pending = db.execute(
        "SELECT items.key, attempts, collection, arrived, content_hash, length(data) AS size FROM items "  # noqa: S608
        "JOIN jobs ON jobs.key = items.job JOIN uploads ON uploads.item = items.key "
        f"WHERE status = 'pending' {within} ORDER BY items.key LIMIT ?",
        (*(lane or ()), max(limit, WINDOW)),
    ).fetchall()
    free: list[ResultRow] = []
    all_held = set(held)
    for row in pending:
        identity = msgspec.json.decode(row["arrived"], type=NewDocument).identity
        holds = holds_of(row["collection"], identity, row["content_hash"])
        if holds.isdisjoint(all_held) and not _follows(db, row["key"], row["collection"], identity or ""):
            free.append(row)
        all_held |= holds
    if retried := [row for row in free if row["attempts"]]:
        return [min(retried, key=lambda row: (row["attempts"], row["key"]))["key"]]
    sizes = accumulate(row["size"] for row in free[:limit])
    return [row["key"] for row, size in zip(free, sizes, strict=False) if size <= CLAIM_BYTES or row is free[0]]


def _follows(db: Session, key: int, collection: int, identity: str) -> bool:
    """Whether an earlier version is not processed yet: it may be in another lane."""
    found = db.execute(
        "SELECT 1 FROM items JOIN jobs ON jobs.key = items.job WHERE json_extract(arrived, '$.identity') = ? "
        "AND status IN ('pending', 'processing', 'failed') AND status != 'failed' AND jobs.collection = ? "
        "AND items.key < ? AND items.key >= (SELECT min(item) FROM uploads) LIMIT 1",
        (identity, collection, key),
    )
    return found.fetchone() is not None


def mark_alone(db: Session, item: int) -> None:
    """Note that from now on only this item is chunked, embedded and stored."""
    db.execute("UPDATE items SET alone = 1 WHERE key = ?", (item,))


def holds_of(collection: int, identity: str | None, content_hash: str) -> set[Hold]:
    """The identity and the content of a document: two tasks must not process the same one, or an older version could
    win."""
    return {(collection, identity or ""), (collection, content_hash)}


def is_pending(db: Session) -> bool:
    return db.execute("SELECT 1 FROM items WHERE status = 'pending' LIMIT 1").fetchone() is not None


def waiting(db: Session, collection: int | None = None, last: int | None = None) -> int:
    """How many items are not finished, of one collection or all, up to the item `last` or all."""
    found = db.execute(
        "SELECT count(*) FROM items JOIN jobs ON jobs.key = items.job WHERE items.status IN ('pending', 'processing') "
        "AND jobs.collection = coalesce(?, jobs.collection) AND items.key <= coalesce(?, items.key)",
        (collection, last),
    )
    return int(found.fetchone()[0])


def last_item(db: Session) -> int:
    """The key of the newest item; 0 if there is none."""
    return int(db.execute("SELECT coalesce(max(key), 0) FROM items").fetchone()[0])


def is_held(db: Session, claim: Claim) -> bool:
    """Whether the claim is still its node's: one that was silent for too long has lost it to another."""
    found = db.execute(
        "SELECT 1 FROM items WHERE key = ? AND status = 'processing' AND node = ? AND attempts = ?",
        (claim.key, claim.node, claim.attempts + 1),
    )
    return found.fetchone() is not None


def still_wanted(db: Session, claim: Claim) -> Claim | None:
    """The claim with what its item says now; None if its job is cancelled or its collection deleted."""
    row = db.execute(
        "SELECT arrived FROM items JOIN jobs ON jobs.key = items.job "
        "JOIN collections ON collections.key = jobs.collection "
        "WHERE items.key = ? AND items.status = 'processing' AND jobs.cancelled = 0",
        (claim.key,),
    ).fetchone()
    if row is None:
        return None
    arrived = msgspec.json.decode(row["arrived"], type=NewDocument)
    return msgspec.structs.replace(claim, arrived=msgspec.structs.replace(arrived, data=claim.arrived.data))


def overrule(db: Session, document_id: str) -> None:
    """Note that permissions were chosen for a document after its versions that are not stored yet were accepted."""
    unfinished = "document_id = ? AND status IN ('pending', 'processing')"
    for row in db.execute(f"SELECT key, arrived FROM items WHERE {unfinished}", (document_id,)).fetchall():  # noqa: S608
        arrived = msgspec.structs.replace(msgspec.json.decode(row["arrived"], type=NewDocument), overruled=True)
        db.execute("UPDATE items SET arrived = ? WHERE key = ?", (as_json(arrived), row["key"]))


def release(db: Session, claims: Sequence[Claim]) -> None:
    """Release claims without counting an attempt, because the process is stopping."""
    db.executemany(
        "UPDATE items SET status = 'pending', attempts = attempts - 1, alone = 0 "
        "WHERE key = ? AND status = 'processing' AND node = ? AND attempts = ?",
        [(claim.key, claim.node, claim.attempts + 1) for claim in claims],
    )


def finish(db: Session, item: int, status: ItemStatus, *, keep_upload: bool = False, **values: Any) -> None:
    """Record the outcome of an item in the columns of the same names; its job ends with its last item. The upload of a
    failed item is kept for a retry; those of earlier versions are not needed any more."""
    row = db.execute("SELECT job, document_id, arrived FROM items WHERE key = ?", (item,)).fetchone()
    if row is None:  # erased with its owner
        return
    _drop_uploads(db, "document_id = ? AND status = 'failed' AND key < ?", row["document_id"], item)
    if not keep_upload:
        _drop_uploads(db, "key = ?", item)
    given = {"status": status, "finished_at": time.time(), "alone": 0, **values}
    columns = ", ".join(f"{name} = ?" for name in given)
    db.execute(f"UPDATE items SET {columns} WHERE key = ?", (*given.values(), item))  # noqa: S608  our own names
    if status == "failed":
        document, identifier = msgspec.json.decode(row["arrived"], type=NewDocument), f"document:{row['document_id']}"
        name = open_items.title_of(document.title, document.filename, document.url)
        audit.append(db, AuditEntry(action="document.failed", object=identifier, name=name, outcome="failed"))
    _close(db, row["job"])


def drop(db: Session, document_id: str) -> None:
    """Give up what is not stored of a document: it is not processed and cannot be retried."""
    _drop_uploads(db, "document_id = ?", document_id)
    unfinished = "document_id = ? AND status IN ('pending', 'processing')"
    rows = db.execute(f"SELECT job FROM items WHERE {unfinished}", (document_id,)).fetchall()  # noqa: S608  our own names
    db.execute(f"UPDATE items SET status = 'cancelled' WHERE {unfinished}", (document_id,))  # noqa: S608
    for row in rows:
        _close(db, row["job"])


def documents_in(db: Session, collection: int) -> list[str]:
    """The documents that were sent to a collection, also those that were never stored."""
    return _sent(db, "jobs.collection = :collection", collection=collection)


def documents_of(db: Session, user: str) -> list[str]:
    """The documents that a user has sent, and those sent to the user's collections, also if they were never stored.
    Those that somebody else has replaced in another's collection are no longer the user's."""
    replaced = (
        "EXISTS (SELECT 1 FROM documents WHERE id = items.document_id AND owner != :user)",
        "EXISTS (SELECT 1 FROM open_items WHERE document_id = items.document_id AND owner != :user)",
    )
    sent = f"jobs.owner = :user AND NOT ({' OR '.join(replaced)})"
    theirs = "jobs.collection IN (SELECT key FROM collections WHERE owner = :user)"
    return _sent(db, f"{sent} OR {theirs}", user=user)


def _sent(db: Session, which: str, **values: str | int) -> list[str]:
    """Without those that are erased already."""
    query = f"SELECT DISTINCT document_id FROM items JOIN jobs ON jobs.key = job WHERE arrived != :blank AND ({which})"  # noqa: S608
    return [row[0] for row in db.execute(query, {"blank": as_json(BLANK), **values})]


def erase(db: Session, erased: Erased) -> int:
    """Blank what items say of documents, and delete all jobs of users; returns how many items that were."""
    values = {"documents": as_json(erased.documents), "users": as_json(erased.users), "blank": as_json(BLANK)}
    theirs = "job IN (SELECT key FROM jobs WHERE owner IN (SELECT value FROM json_each(:users)))"
    named = "document_id IN (SELECT value FROM json_each(:documents)) AND arrived != :blank"
    for document in erased.documents:
        drop(db, document)
    blanked = db.execute(
        f"UPDATE items SET arrived = :blank, content_hash = '', error = NULL WHERE {named} AND NOT {theirs}",  # noqa: S608
        values,
    ).rowcount
    db.execute(f"DELETE FROM uploads WHERE item IN (SELECT key FROM items WHERE {theirs})", values)  # noqa: S608
    deleted = db.execute(f"DELETE FROM items WHERE {theirs}", values).rowcount  # noqa: S608  our own names
    db.execute("DELETE FROM jobs WHERE owner IN (SELECT value FROM json_each(:users))", values)
    return blanked + deleted + sum(_erase_from_permissions(db, user) for user in erased.users)


def _erase_from_permissions(db: Session, user: str) -> int:
    """Remove a user from the permissions with which documents of others arrived."""
    rows = db.execute(
        "SELECT key, arrived FROM items WHERE EXISTS "
        "(SELECT 1 FROM json_each(arrived, '$.permissions.allowed_users') WHERE value = ?)",
        (user,),
    ).fetchall()
    for row in rows:
        arrived = msgspec.json.decode(row["arrived"], type=NewDocument)
        assert arrived.permissions is not None, "the query found them"
        changed = msgspec.structs.replace(arrived, permissions=arrived.permissions.without(user))
        db.execute("UPDATE items SET arrived = ? WHERE key = ?", (as_json(changed), row["key"]))
    return len(rows)


def bound_failed(db: Session, most: int = MAX_FAILED, most_bytes: int = MAX_FAILED_BYTES) -> None:
    """Limit what is kept of failed documents. What is too much is taken from the owner who has most, oldest first, so
    that nobody's failures cost others theirs."""
    rows = db.execute(
        "SELECT items.key, jobs.owner, length(uploads.data) AS size FROM items JOIN jobs ON jobs.key = items.job "
        "JOIN uploads ON uploads.item = items.key "
        "WHERE items.status = 'failed' AND items.key >= (SELECT min(item) FROM uploads) ORDER BY items.key"
    ).fetchall()
    deleted = set(_excess([(row["owner"], row["key"], 1) for row in rows], most))
    kept = [(row["owner"], row["key"], row["size"]) for row in rows if row["size"] and row["key"] not in deleted]
    db.executemany("UPDATE uploads SET data = ? WHERE item = ?", ((b"", key) for key in _excess(kept, most_bytes)))
    db.executemany("DELETE FROM uploads WHERE item = ?", ((key,) for key in deleted))


def _excess(held: Sequence[tuple[str, int, int]], limit: int) -> Iterator[int]:
    """Of owners, keys and sizes, oldest first, the keys to give up for the sizes to stay within a limit."""
    by_owner: dict[str, deque[tuple[int, int]]] = {}
    for owner, key, size in held:
        by_owner.setdefault(owner, deque()).append((key, size))
    total = sum(size for _, _, size in held)
    largest = [(-sum(size for _, size in theirs), owner) for owner, theirs in by_owner.items()]
    heapify(largest)
    while total > limit:
        negative, owner = largest[0]
        key, size = by_owner[owner].popleft()
        heapreplace(largest, (negative + size, owner))
        total -= size
        yield key


def forget_failed(db: Session, days: float = FAILED_DAYS) -> None:
    """Delete what is kept of documents that failed so many days ago."""
    _drop_uploads(db, "status = 'failed' AND coalesce(finished_at, 0) <= ?", time.time() - days * 86_400)


def _close(db: Session, job: int) -> None:
    db.execute(
        "UPDATE jobs SET completed_at = ? WHERE key = ? AND completed_at IS NULL AND NOT EXISTS "
        "(SELECT 1 FROM items WHERE job = jobs.key AND status IN ('pending', 'processing'))",
        (time.time(), job),
    )


def _status(row: ResultRow, items: Sequence[JobItem], done: int, failed: int) -> Any:
    if row["completed_at"] is None:
        return "processing" if done or any(item.status == "processing" for item in items) else "pending"
    if row["cancelled"] or any(item.status == "cancelled" for item in items):
        return "cancelled"
    return "failed" if items and failed == len(items) else "completed"


def _item(row: ResultRow) -> JobItem:
    arrived = msgspec.json.decode(row["arrived"], type=NewDocument)
    return JobItem(
        key=row["key"],
        document_id=row["document_id"],
        name=arrived.filename or arrived.url or arrived.title or "text",
        status=row["status"],
        outcome=row["outcome"],
        chunk_count=row["chunk_count"],
        error=row["error"],
    )
