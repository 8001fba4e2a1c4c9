"""Published collections: under which owner and slug others may ask them."""

import sqlite3
import time

from anabranch.domain.model import Value


class PublishedEndpoint(Value):
    owner: str
    slug: str
    collection: int
    created_at: float

    @property
    def path(self) -> str:
        return f"{self.owner}/{self.slug}"


def publish(db: sqlite3.Connection, owner: str, slug: str, collection: int) -> bool:
    """False if the owner has another collection under that slug."""
    row = db.execute("SELECT collection FROM endpoints WHERE owner = ? AND slug = ?", (owner, slug)).fetchone()
    if row is not None:
        return bool(row["collection"] == collection)
    db.execute("INSERT INTO endpoints VALUES (?, ?, ?, ?)", (owner, slug, collection, time.time()))
    return True


def withdraw(db: sqlite3.Connection, owner: str, slug: str) -> bool:
    return db.execute("DELETE FROM endpoints WHERE owner = ? AND slug = ?", (owner, slug)).rowcount == 1


def named(db: sqlite3.Connection, slug: str) -> list[PublishedEndpoint]:
    """Everything published under a slug, whoever the owner is."""
    return [_published(row) for row in db.execute("SELECT * FROM endpoints WHERE slug = ? ORDER BY owner", (slug,))]


def listed(db: sqlite3.Connection) -> list[PublishedEndpoint]:
    return [_published(row) for row in db.execute("SELECT * FROM endpoints ORDER BY owner, slug")]


def _published(row: sqlite3.Row) -> PublishedEndpoint:
    return PublishedEndpoint(
        owner=row["owner"], slug=row["slug"], collection=row["collection"], created_at=row["created_at"]
    )
