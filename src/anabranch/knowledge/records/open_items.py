"""Open items: the newest versions of documents, as long as they are not stored."""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.model import (
    FOLLOWS_COLLECTION,
    Caller,
    Chunking,
    DocumentStatus,
    NewDocument,
    Permissions,
    StoredDocument,
)
from anabranch.knowledge.records.database import ResultRow, Session, as_json, made_at
from anabranch.knowledge.records.visibility import SEEN, visible_to

# The content hash of an upload without bytes: what tells an empty file from one whose bytes are no longer kept.
EMPTY_HASH = sha256(b"").hexdigest()
# In a list, open items come after all documents.
ITEM_KEYS = 1 << 62
# Of the rows of `open_items`, those that the caller owns, of collections that it sees. Guests own nothing: no job has
# an owner of null.
OWNED = f"((:operator = 1 OR open_items.owner = :user) AND {SEEN.format(collection='open_items.collection')})"


class OpenName(Value):
    """The names of an open item."""

    document_id: str
    filename: str | None
    title: str


class OpenItem(Value):
    """The newest version of a document, if it is not stored: it waits, is processed, or has failed."""

    key: int
    owner: str
    collection: int
    document_id: str
    status: DocumentStatus
    error: str | None
    arrived: NewDocument
    permissions: Permissions
    content_hash: str
    chunking: Chunking
    size: int
    created_at: float
    finished_at: float | None

    @property
    def has_upload(self) -> bool:
        """Whether a retry has something to process: the bytes, also of an empty file, or the URL."""
        return self.size > 0 or self.arrived.source == "url" or self.content_hash == EMPTY_HASH

    @property
    def document(self) -> StoredDocument:
        """The document of which no version is stored."""
        arrived = self.arrived
        return StoredDocument(
            key=ITEM_KEYS + self.key,
            id=self.document_id,
            collection=self.collection,
            owner=self.owner,
            source=arrived.source,
            identity=arrived.identity or "",
            filename=arrived.filename,
            url=arrived.url,
            connector_id=arrived.connector_id,
            title=title_of(arrived.title, arrived.filename, arrived.url),
            content_hash="" if arrived.source == "url" else self.content_hash,
            recipe="",
            metadata=arrived.metadata,
            permissions=self.permissions,
            day=0,
            chunk_count=0,
            tokens=0,
            size=self.size,
            created_at=self.created_at,
            updated_at=self.finished_at or self.created_at,
            status=self.status,
            error=self.error,
            processed_at=self.finished_at,
            searchable=False,
        )

    def over(self, stored: StoredDocument, key: int | None = None) -> StoredDocument:
        """The stored version, with the state of this newer one, and another key for its place in a list."""
        return msgspec.structs.replace(
            stored,
            key=stored.key if key is None else key,
            status=self.status,
            error=self.error,
            processed_at=self.finished_at,
        )


def id_of(db: Session, collection: int, identity: str) -> str | None:
    """The document id of the newest open item with an identity."""
    row = db.execute(
        "SELECT document_id FROM open_items WHERE json_extract(arrived, '$.identity') = ? AND collection = ? "
        "ORDER BY key DESC LIMIT 1",
        (identity, collection),
    ).fetchone()
    return None if row is None else str(row["document_id"])


def listed(
    db: Session,
    caller: Caller,
    *,
    collection: int | None,
    status: DocumentStatus | None,
    connector_id: str | None,
    unstored: bool,
    after: int,
    limit: int,
) -> tuple[list[OpenItem], int]:
    """A page of the caller's open items, after a key, and how many there are; with `unstored`, only those of documents
    of which no version is stored."""
    wanted = (
        f"{OWNED} AND (:collection IS NULL OR collection = :collection) AND (:status IS NULL OR status = :status) "
        "AND (:connector IS NULL OR json_extract(arrived, '$.connector_id') = :connector) "
        "AND (:unstored = 0 OR NOT is_stored)"
    )
    values = {"collection": collection, "status": status, "connector": connector_id, "unstored": unstored}
    values |= visible_to(caller) | {"after": after, "limit": limit}
    page = f"SELECT * FROM open_items WHERE {wanted} AND key > :after ORDER BY key LIMIT :limit"  # noqa: S608
    total = f"SELECT count(*) FROM open_items WHERE {wanted}"  # noqa: S608  our own names
    return [_open_item(row) for row in db.execute(page, values)], int(db.execute(total, values).fetchone()[0])


def by_documents(db: Session, caller: Caller, ids: Sequence[str]) -> dict[str, OpenItem]:
    """The caller's open items of some documents, by document id."""
    # A cross join reads one document after the other; otherwise SQLite would read all open items.
    named = "SELECT open_items.* FROM json_each(:ids) AS named CROSS JOIN open_items WHERE document_id = named.value"
    query = f"{named} AND {OWNED}"
    found = db.execute(query, {"ids": as_json(ids), **visible_to(caller)})
    return {item.document_id: item for item in map(_open_item, found)}


def names(db: Session, caller: Caller, limit: int, status: DocumentStatus | None) -> Iterator[OpenName]:
    """The names of the caller's newest open items, newest first."""
    columns = ", ".join(f"json_extract(arrived, '$.{name}') AS {name}" for name in ("filename", "title", "url"))
    which = f"{OWNED} AND (:status IS NULL OR status = :status) ORDER BY key DESC LIMIT :limit"
    query = f"SELECT document_id, {columns} FROM open_items WHERE {which}"  # noqa: S608  our own names
    for row in db.execute(query, {"limit": limit, "status": status, **visible_to(caller)}):
        title = title_of(row["title"], row["filename"], row["url"])
        yield OpenName(document_id=row["document_id"], filename=row["filename"], title=title)


def stored_documents(db: Session, caller: Caller) -> list[int]:
    """The keys of the documents of which the caller has sent a newer version that is not stored."""
    query = f"SELECT documents.key FROM open_items JOIN documents ON id = document_id WHERE {OWNED}"  # noqa: S608
    return [row[0] for row in db.execute(query, visible_to(caller))]


def title_of(title: str | None, filename: str | None, url: str | None) -> str:
    """The title of a document of which no version is stored."""
    return title or filename or url or "text"


def _open_item(row: ResultRow) -> OpenItem:
    arrived = msgspec.json.decode(row["arrived"], type=NewDocument)
    return OpenItem(
        key=row["key"],
        owner=row["owner"],
        collection=row["collection"],
        document_id=row["document_id"],
        status=row["status"],
        error=row["error"],
        arrived=arrived,
        permissions=arrived.permissions or FOLLOWS_COLLECTION,
        content_hash=row["content_hash"],
        chunking=msgspec.json.decode(row["chunking"], type=Chunking),
        size=row["size"],
        # The id is that of the first upload, also after a retry.
        created_at=made_at(row["document_id"]),
        finished_at=row["finished_at"],
    )
