"""Jobs: the queue of documents to ingest. An accepted document stays here until it is stored or has failed."""

import sqlite3
import time
from collections.abc import Collection as Some
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from typing import Any

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.model import Chunking, Collection, ItemStatus, Job, JobItem, NewDocument
from anabranch.knowledge.records import collections, documents
from anabranch.knowledge.records.database import as_json, new_id

# A document that was being processed this often when the process died is given up. After the first time it is
# processed alone, because another document may have been the cause.
ATTEMPTS = 5
CLAIM_BYTES = 8 * 1024 * 1024

Hold = tuple[int, str]


class Claim(Value):
    """An item that the indexer is processing."""

    key: int
    owner: str
    collection: Collection
    document_id: str
    arrived: NewDocument
    content_hash: str
    chunking: Chunking
    attempts: int

    @property
    def holds(self) -> set[Hold]:
        return holds_of(self.collection.key, self.arrived.identity, self.content_hash)


def create(
    db: sqlite3.Connection, collection: Collection, owner: str, arrived: Sequence[NewDocument], chunking: Chunking
) -> str:
    """Accept documents; once this is committed, none of them is lost."""
    identifier = new_id()
    job = db.execute(
        "INSERT INTO jobs (id, collection, collection_id, owner, chunking, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        (identifier, collection.key, collection.id, owner, as_json(chunking), time.time()),
    ).lastrowid
    for ordinal, document in enumerate(arrived):
        content_hash = sha256(document.data or (document.url or "").encode()).hexdigest()
        identity = identity_of(document, content_hash)
        stored = documents.by_identity(db, collection.key, identity)
        described = as_json(msgspec.structs.replace(document, data=b"", identity=identity))
        item = db.execute(
            "INSERT INTO items (job, ordinal, document_id, status, arrived, content_hash) "
            "VALUES (?, ?, ?, 'pending', ?, ?)",
            (job, ordinal, stored.id if stored else new_id(), described, content_hash),
        ).lastrowid
        db.execute("INSERT INTO uploads VALUES (?, ?)", (item, document.data))
    return identifier


def identity_of(document: NewDocument, content_hash: str) -> str:
    if document.identity or document.source == "url":
        return document.identity or f"url:{document.url}"
    return f"file:{document.filename}" if document.filename else f"sha256:{content_hash}"


def by_id(db: sqlite3.Connection, identifier: str) -> Job | None:
    row = db.execute("SELECT * FROM jobs WHERE id = ?", (identifier,)).fetchone()
    if row is None:
        return None
    items = tuple(map(_item, db.execute("SELECT * FROM items WHERE job = ? ORDER BY ordinal", (row["key"],))))
    done = sum(item.status in ("completed", "failed", "cancelled") for item in items)
    failed = sum(item.status == "failed" for item in items)
    return Job(
        key=row["key"],
        id=row["id"],
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


def cancel(db: sqlite3.Connection, key: int) -> None:
    """Cancel the pending items of a job; documents that are stored stay."""
    db.execute("UPDATE jobs SET cancelled = 1 WHERE key = ? AND completed_at IS NULL", (key,))
    db.execute("DELETE FROM uploads WHERE item IN (SELECT key FROM items WHERE job = ? AND status = 'pending')", (key,))
    db.execute("UPDATE items SET status = 'cancelled' WHERE job = ? AND status = 'pending'", (key,))
    _close(db, key)


def recover(db: sqlite3.Connection) -> int:
    """Release the claims of a dead indexer. Only the holder of the indexer lock may call this."""
    return db.execute("UPDATE items SET status = 'pending' WHERE status = 'processing'").rowcount


def claim(db: sqlite3.Connection, limit: int, held: Some[Hold] = ()) -> list[Claim]:
    """Claim the next items in order of arrival; a large one alone. `held` is being processed: an item with the same
    identity or content waits, and a retried item waits until nothing is held."""
    rows = db.execute(
        "SELECT items.*, jobs.owner AS job_owner, jobs.collection AS job_collection, jobs.chunking, uploads.data "
        "FROM items JOIN jobs ON jobs.key = items.job JOIN uploads ON uploads.item = items.key "
        "WHERE items.key IN (SELECT value FROM json_each(?)) ORDER BY items.key",
        (as_json(_claimable(db, limit, held)),),
    ).fetchall()
    claims: list[Claim] = []
    for row in rows:
        collection = collections.by_key(db, row["job_collection"])
        db.execute("UPDATE items SET status = 'processing', attempts = attempts + 1 WHERE key = ?", (row["key"],))
        if collection is None:
            finish(db, row["key"], "failed", error="The collection was deleted.")
        elif row["attempts"] >= ATTEMPTS:
            reason = f"The document ended its process {ATTEMPTS} times; it is not tried again."
            finish(db, row["key"], "failed", error=reason)
        else:
            arrived = msgspec.json.decode(row["arrived"], type=NewDocument)
            claims.append(
                Claim(
                    key=row["key"],
                    owner=row["job_owner"],
                    collection=collection,
                    document_id=row["document_id"],
                    arrived=msgspec.structs.replace(arrived, data=row["data"]),
                    content_hash=row["content_hash"],
                    chunking=msgspec.json.decode(row["chunking"], type=Chunking),
                    attempts=row["attempts"],
                )
            )
    return claims


def _claimable(db: sqlite3.Connection, limit: int, held: Some[Hold]) -> list[int]:
    pending = db.execute(
        "SELECT items.key, attempts, collection, arrived, content_hash, length(data) AS size FROM items "
        "JOIN jobs ON jobs.key = items.job JOIN uploads ON uploads.item = items.key "
        "WHERE status = 'pending' ORDER BY items.key LIMIT ?",
        (limit,),
    ).fetchall()
    free: list[sqlite3.Row] = []
    all_held = set(held)
    for row in pending:
        identity = msgspec.json.decode(row["arrived"], type=NewDocument).identity
        holds = holds_of(row["collection"], identity, row["content_hash"])
        if holds.isdisjoint(all_held):
            free.append(row)
        all_held |= holds
    if retried := [row for row in free if row["attempts"]]:
        return [] if held else [min(retried, key=lambda row: (row["attempts"], row["key"]))["key"]]
    sizes = accumulate(row["size"] for row in free)
    return [row["key"] for row, size in zip(free, sizes, strict=True) if size <= CLAIM_BYTES or row is free[0]]


def holds_of(collection: int, identity: str | None, content_hash: str) -> set[Hold]:
    """The identity and the content of a document: two tasks must not process the same one, or an older version could
    win."""
    return {(collection, identity or ""), (collection, content_hash)}


def is_pending(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM items WHERE status = 'pending' LIMIT 1").fetchone() is not None


def waiting(db: sqlite3.Connection, collection: int | None = None, last: int | None = None) -> int:
    """How many items are not finished, of one collection or all, up to the item `last` or all."""
    found = db.execute(
        "SELECT count(*) FROM items JOIN jobs ON jobs.key = items.job WHERE items.status IN ('pending', 'processing') "
        "AND jobs.collection = coalesce(?, jobs.collection) AND items.key <= coalesce(?, items.key)",
        (collection, last),
    )
    return int(found.fetchone()[0])


def last_item(db: sqlite3.Connection) -> int:
    """The key of the newest item; 0 if there is none."""
    return int(db.execute("SELECT coalesce(max(key), 0) FROM items").fetchone()[0])


def is_wanted(db: sqlite3.Connection, claim: Claim) -> bool:
    """Whether the item is still to be processed: its job is not cancelled and its collection exists."""
    row = db.execute(
        "SELECT jobs.cancelled FROM items JOIN jobs ON jobs.key = items.job "
        "JOIN collections ON collections.key = jobs.collection WHERE items.key = ? AND items.status = 'processing'",
        (claim.key,),
    ).fetchone()
    return row is not None and not row["cancelled"]


def release(db: sqlite3.Connection, items: Sequence[int]) -> None:
    """Release claims without counting an attempt, because the process is stopping."""
    db.executemany(
        "UPDATE items SET status = 'pending', attempts = attempts - 1 WHERE key = ? AND status = 'processing'",
        ((item,) for item in items),
    )


def finish(db: sqlite3.Connection, item: int, status: ItemStatus, **values: Any) -> None:
    """Record the outcome of an item in the columns of the same names; its job ends with its last item."""
    columns = ", ".join(f"{name} = ?" for name in ("status", *values))
    db.execute(f"UPDATE items SET {columns} WHERE key = ?", (status, *values.values(), item))  # noqa: S608  our own names
    db.execute("DELETE FROM uploads WHERE item = ?", (item,))
    _close(db, db.execute("SELECT job FROM items WHERE key = ?", (item,)).fetchone()[0])


def _close(db: sqlite3.Connection, job: int) -> None:
    db.execute(
        "UPDATE jobs SET completed_at = ? WHERE key = ? AND completed_at IS NULL AND NOT EXISTS "
        "(SELECT 1 FROM items WHERE job = jobs.key AND status IN ('pending', 'processing'))",
        (time.time(), job),
    )


def _status(row: sqlite3.Row, items: Sequence[JobItem], done: int, failed: int) -> Any:
    if row["completed_at"] is None:
        return "processing" if done or any(item.status == "processing" for item in items) else "pending"
    if row["cancelled"] or any(item.status == "cancelled" for item in items):
        return "cancelled"
    return "failed" if items and failed == len(items) else "completed"


def _item(row: sqlite3.Row) -> JobItem:
    arrived = msgspec.json.decode(row["arrived"], type=NewDocument)
    return JobItem(
        key=row["key"],
        ordinal=row["ordinal"],
        document_id=row["document_id"],
        name=arrived.filename or arrived.url or arrived.title or "text",
        status=row["status"],
        outcome=row["outcome"],
        chunk_count=row["chunk_count"],
        error=row["error"],
    )
