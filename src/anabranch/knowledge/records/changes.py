"""The log of the documents and collections that changed, for readers that keep a copy of them."""

import time
from typing import NamedTuple

from anabranch.knowledge.records.database import Session


def record(db: Session, op: str, document: int) -> None:
    db.execute("INSERT INTO changes (op, document, at) VALUES (?, ?, ?)", (op, document, time.time()))


class LogState(NamedTuple):
    """The oldest and the newest sequence number in the log of changes, 0 if there is none; and when a given one was
    made, None if it is not in the log."""

    oldest: int
    newest: int
    made_at: float | None


def state(db: Session, seq: int = 0) -> LogState:
    query = (
        "SELECT (SELECT coalesce(min(seq), 0) FROM changes), (SELECT coalesce(max(seq), 0) FROM changes), "
        "(SELECT at FROM changes WHERE seq = ?)"
    )
    return LogState(*db.execute(query, (seq,)).fetchone())


def documents_since(db: Session, seq: int) -> list[int]:
    """The keys of documents that were added, updated or removed after a sequence number."""
    return [
        row[0] for row in db.execute("SELECT DISTINCT document FROM changes WHERE seq > ? AND document > 0", (seq,))
    ]


def collections_since(db: Session, seq: int) -> list[int]:
    """The keys of collections that were added, changed or removed after a sequence number; 0 stands for all."""
    rows = db.execute("SELECT DISTINCT -document FROM changes WHERE seq > ? AND document <= 0", (seq,))
    return [row[0] for row in rows]


def trim(db: Session, before: int) -> None:
    db.execute("DELETE FROM changes WHERE seq < ?", (before,))


def next_at(db: Session, seq: int) -> float | None:
    """When the first change after a sequence number was made."""
    row = db.execute("SELECT at FROM changes WHERE seq > ? ORDER BY seq LIMIT 1", (seq,)).fetchone()
    return None if row is None else float(row[0])
