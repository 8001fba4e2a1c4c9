"""Collections: named sets of documents with their chunking and default permissions, and the endpoints that publish
them."""

import time
from collections.abc import Iterable, Sequence

import msgspec

from anabranch.domain.audit import AuditEntry
from anabranch.domain.model import Value
from anabranch.knowledge.model import Collection, CollectionSettings, DefaultVisibility, Erased
from anabranch.knowledge.records import audit, changes, documents
from anabranch.knowledge.records.database import ResultRow, Session, as_json, new_id
from anabranch.knowledge.records.facts import fact


class PublishedEndpoint(Value):
    owner: str
    slug: str
    collection: int
    collection_id: str
    collection_name: str
    created_at: float
    by_operator: bool

    @property
    def path(self) -> str:
        return f"{self.owner}/{self.slug}"


def create(db: Session, *, owner: str, name: str, description: str, settings: CollectionSettings) -> Collection | None:
    """Create a collection; None if its owner has one of that name."""
    row = db.execute(
        "INSERT INTO collections (id, owner, name, description, settings, created_at) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT DO NOTHING RETURNING *",
        (new_id(), owner, name, description, as_json(settings), time.time()),
    ).fetchone()
    if row is None:
        return None
    created = _collection(row)
    changes.record(db, "collection", -created.key)
    granted = settings.default_permissions.granted
    _record(db, "created", created, granted=granted, visibility=settings.default_permissions.visibility)
    return created


def default_visibility(db: Session) -> DefaultVisibility:
    """Who sees a new collection for which nobody says it, if the settings do not."""
    return "public" if fact(db, "default_visibility") == "public" else "private"


def describe(db: Session, found: Collection, description: str, settings: CollectionSettings) -> Collection:
    """Change the description and the settings of a collection; if they are others, this leaves a record."""
    if (description, settings) == (found.description, found.settings):
        return found
    db.execute(
        "UPDATE collections SET description = ?, settings = ? WHERE key = ?",
        (description, as_json(settings), found.key),
    )
    changes.record(db, "collection", -found.key)
    chosen = settings.default_permissions
    changed = msgspec.structs.replace(found, description=description, settings=settings)
    what = "changed" if chosen == found.settings.default_permissions else "permissions_changed"
    _record(db, what, changed, granted=chosen.granted, visibility=chosen.visibility)
    return changed


def by_key(db: Session, key: int) -> Collection | None:
    return next(map(_collection, db.execute("SELECT * FROM collections WHERE key = ?", (key,))), None)


def count_of(db: Session, owner: str) -> int:
    return int(db.execute("SELECT count(*) FROM collections WHERE owner = ?", (owner,)).fetchone()[0])


def by_keys(db: Session, keys: Iterable[int]) -> list[Collection]:
    query = "SELECT * FROM collections WHERE key IN (SELECT CAST(value AS BIGINT) FROM json_each(?)) ORDER BY key"
    return list(map(_collection, db.execute(query, (as_json(list(keys)),))))


def versions(db: Session, keys: Sequence[int] | None = None) -> dict[int, int]:
    """The versions of these collections, or of all of which a document has changed: every change of a document replaces
    its collection's."""
    query = "SELECT collection, version FROM versions"
    values: tuple[str, ...] = ()
    if keys is not None:
        query += " WHERE collection IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
        values = (as_json(keys),)
    return {row["collection"]: row["version"] for row in db.execute(query, values)}


def listed(db: Session) -> list[Collection]:
    return [_collection(row) for row in db.execute("SELECT * FROM collections ORDER BY key")]


def delete(db: Session, key: int) -> None:
    """Delete a collection with all its documents."""
    keys = [row[0] for row in db.execute("SELECT key FROM documents WHERE collection = ?", (key,))]
    if (deleted := by_key(db, key)) is not None:
        _record(db, "deleted", deleted, documents=len(keys))
    for document in keys:
        documents.remove(db, document, recorded=False)
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
    db.execute("DELETE FROM query_counts WHERE collection = ?", (key,))
    db.execute("DELETE FROM versions WHERE collection = ?", (key,))
    db.execute("DELETE FROM collections WHERE key = ?", (key,))
    changes.record(db, "collection", -key)


def erase(db: Session, erased: Erased) -> int:
    """Delete the collections of users with all their documents, and remove the users from the default permissions of
    others; returns how many collections were deleted."""
    owned = [one for one in listed(db) if one.owner in erased.users]
    for one in owned:
        delete(db, one.key)
    audit.forget(db, *(f"collection:{one.id}" for one in owned), *audit.created_by(db, "collection", erased.users))
    for one in listed(db):
        permissions = one.settings.default_permissions
        for user in erased.users:
            permissions = permissions.without(user)
        describe(db, one, one.description, msgspec.structs.replace(one.settings, default_permissions=permissions))
    return len(owned)


def _collection(row: ResultRow) -> Collection:
    return Collection(
        key=row["key"],
        id=row["id"],
        owner=row["owner"],
        name=row["name"],
        description=row["description"],
        settings=msgspec.json.decode(row["settings"], type=CollectionSettings),
        created_at=row["created_at"],
    )


def publish(db: Session, owner: str, slug: str, collection: int, *, by_operator: bool) -> bool:
    """Publish a collection; False if the owner has another one under that slug. What the operator publishes, again or
    for the first time, is from then on the operator's."""
    row = db.execute("SELECT collection FROM endpoints WHERE owner = ? AND slug = ?", (owner, slug)).fetchone()
    if row is not None:
        here = "owner = ? AND slug = ? AND collection = ?"
        db.execute(
            f"UPDATE endpoints SET by_operator = 1 WHERE {here} AND ? = 1",  # noqa: S608  our own names
            (owner, slug, collection, by_operator),
        )
        return bool(row["collection"] == collection)
    db.execute("INSERT INTO endpoints VALUES (?, ?, ?, ?, ?)", (owner, slug, collection, time.time(), by_operator))
    _record_endpoint(db, "published", owner, slug, collection)
    return True


def withdraw(db: Session, owner: str, slug: str, collection: int | None = None) -> bool:
    """Withdraw what is published there; with a `collection` only if it is that one. False if there is nothing."""
    query = "DELETE FROM endpoints WHERE owner = ? AND slug = ? AND collection = coalesce(?, collection) RETURNING *"
    row = next(iter(db.execute(query, (owner, slug, collection)).fetchall()), None)
    if row is not None:
        _record_endpoint(db, "withdrawn", owner, slug, row["collection"])
    return row is not None


def published(db: Session, slug: str | None = None, keys: Sequence[int] | None = None) -> list[PublishedEndpoint]:
    """What is published, in the order of the paths: all, or what has a slug, or is one of some collections."""
    rows = db.execute(
        "SELECT endpoints.*, collections.id AS collection_id, collections.name AS collection_name "
        "FROM endpoints JOIN collections ON collections.key = endpoints.collection "
        "WHERE slug = coalesce(:slug, slug) AND (:keys IS NULL "
        "OR collection IN (SELECT CAST(value AS BIGINT) FROM json_each(:keys))) "
        "ORDER BY endpoints.owner, slug",
        {"slug": slug, "keys": None if keys is None else as_json(keys)},
    )
    return [msgspec.convert(dict(row), PublishedEndpoint, strict=False) for row in rows]


def _record(
    db: Session, what: str, collection: Collection, *, granted: tuple[str, ...] = (), **details: str | int
) -> None:
    audit.append(
        db,
        AuditEntry(
            action=f"collection.{what}",
            object=f"collection:{collection.id}",
            name=collection.name,
            granted=granted,
            details=details,
        ),
    )


def _record_endpoint(db: Session, what: str, owner: str, slug: str, key: int) -> None:
    collection = by_key(db, key)
    identifier = f"collection:{collection.id}" if collection is not None else "collection:"
    audit.append(db, AuditEntry(action=f"collection.{what}", object=identifier, name=f"{owner}/{slug}"))
