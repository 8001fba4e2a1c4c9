"""Collections: named sets of documents with their chunking and default permissions."""

import sqlite3
import time

import msgspec

from anabranch.knowledge.model import Collection, CollectionSettings
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import as_json, new_id


def create(
    db: sqlite3.Connection, *, owner: str, name: str, description: str, settings: CollectionSettings
) -> Collection | None:
    """Create a collection; None if its owner has one of that name."""
    identifier = new_id()
    try:
        db.execute(
            "INSERT INTO collections (id, owner, name, description, settings, created_at) VALUES (?, ?, ?, ?, ?, ?)",
            (identifier, owner, name, description, as_json(settings), time.time()),
        )
    except sqlite3.IntegrityError:
        return None
    documents.record_change(db, "collection", 0)
    return by_id(db, identifier)


def by_id(db: sqlite3.Connection, identifier: str) -> Collection | None:
    row = db.execute("SELECT * FROM collections WHERE id = ?", (identifier,)).fetchone()
    return _collection(row) if row else None


def by_key(db: sqlite3.Connection, key: int) -> Collection | None:
    row = db.execute("SELECT * FROM collections WHERE key = ?", (key,)).fetchone()
    return _collection(row) if row else None


def listed(db: sqlite3.Connection) -> list[Collection]:
    return [_collection(row) for row in db.execute("SELECT * FROM collections ORDER BY key")]


def delete(db: sqlite3.Connection, key: int) -> int:
    """Delete a collection with all its documents; returns how many there were."""
    keys = [row[0] for row in db.execute("SELECT key FROM documents WHERE collection = ?", (key,))]
    for document in keys:
        documents.remove(db, document)
    db.execute(
        "UPDATE items SET status = 'cancelled', error = 'The collection was deleted.' WHERE status IN ('pending', "
        "'processing') AND job IN (SELECT key FROM jobs WHERE collection = ?)",
        (key,),
    )
    db.execute(
        "DELETE FROM uploads WHERE item IN (SELECT items.key FROM items JOIN jobs ON jobs.key = items.job "
        "WHERE jobs.collection = ?)",
        (key,),
    )
    db.execute("UPDATE jobs SET completed_at = ? WHERE collection = ? AND completed_at IS NULL", (time.time(), key))
    db.execute("DELETE FROM endpoints WHERE collection = ?", (key,))
    db.execute("DELETE FROM query_collections WHERE collection = ?", (key,))
    db.execute("DELETE FROM collections WHERE key = ?", (key,))
    documents.record_change(db, "collection", 0)
    return len(keys)


def _collection(row: sqlite3.Row) -> Collection:
    return Collection(
        key=row["key"],
        id=row["id"],
        owner=row["owner"],
        name=row["name"],
        description=row["description"],
        settings=msgspec.json.decode(row["settings"], type=CollectionSettings),
        created_at=row["created_at"],
    )
