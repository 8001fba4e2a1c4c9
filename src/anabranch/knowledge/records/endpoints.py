"""Published collections: the owner and slug under which others may query them."""

import sqlite3
import time

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.model import Collection
from anabranch.knowledge.records import collections


class PublishedEndpoint(Value):
    owner: str
    slug: str
    collection: int
    created_at: float

    @property
    def path(self) -> str:
        return f"{self.owner}/{self.slug}"


def publish(db: sqlite3.Connection, owner: str, slug: str, collection: int) -> bool:
    """Publish a collection; False if the owner has another one under that slug."""
    row = db.execute("SELECT collection FROM endpoints WHERE owner = ? AND slug = ?", (owner, slug)).fetchone()
    if row is not None:
        return bool(row["collection"] == collection)
    db.execute("INSERT INTO endpoints VALUES (?, ?, ?, ?)", (owner, slug, collection, time.time()))
    return True


def withdraw(db: sqlite3.Connection, owner: str, slug: str) -> bool:
    return db.execute("DELETE FROM endpoints WHERE owner = ? AND slug = ?", (owner, slug)).rowcount == 1


def published(db: sqlite3.Connection, slug: str | None = None) -> list[tuple[PublishedEndpoint, Collection]]:
    """All published collections, or those with a slug, in the order of their paths."""
    by_key = {one.key: one for one in collections.listed(db)}
    rows = db.execute("SELECT * FROM endpoints WHERE slug = coalesce(?, slug) ORDER BY owner, slug", (slug,))
    found = [msgspec.convert(dict(row), PublishedEndpoint) for row in rows]
    return [(one, by_key[one.collection]) for one in found if one.collection in by_key]
