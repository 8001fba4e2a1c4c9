"""Documents and their chunks, and the sequence of every change to them."""

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from anabranch.domain.model import Embedding, Value
from anabranch.knowledge.model import Permissions, SourceType, StoredDocument
from anabranch.knowledge.parsed import Piece
from anabranch.knowledge.records.identifiers import new_id

MAX_ATTRIBUTES = 200
MAX_ATTRIBUTE = 500


class DocumentDraft(Value):
    """A document that is ready to be kept. `recipe` names everything besides the content that shapes its chunks."""

    id: str
    collection: int
    owner: str
    source: SourceType
    identity: str
    filename: str | None
    url: str | None
    title: str
    content: str
    content_hash: str
    recipe: str
    metadata: Mapping[str, Any]
    permissions: Permissions
    day: int
    pages: int | None
    size: int


def insert(
    db: sqlite3.Connection, draft: DocumentDraft, pieces: Sequence[Piece], embeddings: Sequence[Embedding]
) -> StoredDocument:
    """Keep a document, in place of the one with its identity if there is one: nobody sees both, or neither."""
    old = by_identity(db, draft.collection, draft.identity)
    if old is not None:
        remove(db, old.key, forget_quotes=False)
    first = _next_chunk(db)
    key = _insert_document(db, draft, old, first, pieces)
    db.execute("INSERT INTO contents VALUES (?, ?)", (key, draft.content))
    db.executemany("INSERT INTO attributes VALUES (?, ?, ?)", ((*pair, key) for pair in attributes(draft.metadata)))
    db.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (
                number,
                new_id(),
                key,
                piece.start,
                piece.end,
                piece.tokens,
                piece.kind,
                _json(piece.headers),
                piece.page,
                draft.content[piece.start : piece.end],
            )
            for number, piece in enumerate(pieces, first)
        ),
    )
    db.executemany(
        "INSERT INTO embeddings VALUES (?, ?, ?)",
        ((number, embedding.vector, embedding.tokens) for number, embedding in enumerate(embeddings, first)),
    )
    changed(db, "add", key)
    kept = by_key(db, key)
    assert kept is not None
    return kept


def _insert_document(
    db: sqlite3.Connection, draft: DocumentDraft, old: StoredDocument | None, first_chunk: int, pieces: Sequence[Piece]
) -> int:
    now = time.time()
    cursor = db.execute(
        "INSERT INTO documents VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            old.id if old else draft.id,
            draft.collection,
            draft.owner,
            draft.source,
            draft.identity,
            draft.filename,
            draft.url,
            draft.title,
            draft.content_hash,
            draft.recipe,
            _json(draft.metadata),
            draft.permissions.visibility,
            _json(draft.permissions.allowed_users),
            _json(draft.permissions.allowed_groups),
            draft.day,
            draft.pages,
            first_chunk,
            len(pieces),
            sum(piece.tokens for piece in pieces),
            draft.size,
            old.created_at if old else now,
            now,
        ),
    )
    return int(cursor.lastrowid or 0)


def remove(db: sqlite3.Connection, key: int, *, forget_quotes: bool = True) -> int:
    """A document and everything of it; how many chunks it had."""
    row = db.execute("SELECT id, first_chunk, chunk_count FROM documents WHERE key = ?", (key,)).fetchone()
    if row is None:
        return 0
    span = (row["first_chunk"], row["first_chunk"] + row["chunk_count"])
    db.execute("DELETE FROM embeddings WHERE chunk >= ? AND chunk < ?", span)
    db.execute("DELETE FROM chunks WHERE key >= ? AND key < ?", span)
    db.execute("DELETE FROM contents WHERE document = ?", (key,))
    db.execute("DELETE FROM attributes WHERE document = ?", (key,))
    db.execute("DELETE FROM documents WHERE key = ?", (key,))
    if forget_quotes:
        db.execute("DELETE FROM citations WHERE document = ?", (row["id"],))
    changed(db, "remove", key)
    return int(row["chunk_count"])


def describe(
    db: sqlite3.Connection,
    key: int,
    *,
    title: str,
    metadata: Mapping[str, Any],
    permissions: Permissions,
    day: int,
) -> None:
    """What is said about a document, and who may see it, anew."""
    db.execute(
        "UPDATE documents SET title = ?, metadata = ?, visibility = ?, allowed_users = ?, allowed_groups = ?, day = ?, "
        "updated_at = ? WHERE key = ?",
        (
            title,
            _json(metadata),
            permissions.visibility,
            _json(permissions.allowed_users),
            _json(permissions.allowed_groups),
            day,
            time.time(),
            key,
        ),
    )
    db.execute("DELETE FROM attributes WHERE document = ?", (key,))
    db.executemany("INSERT INTO attributes VALUES (?, ?, ?)", ((*pair, key) for pair in attributes(metadata)))
    changed(db, "update", key)


def changed(db: sqlite3.Connection, op: str, document: int) -> None:
    db.execute("INSERT INTO changes (op, document, at) VALUES (?, ?, ?)", (op, document, time.time()))


def by_id(db: sqlite3.Connection, identifier: str, *, content: bool = False) -> StoredDocument | None:
    row = db.execute("SELECT * FROM documents WHERE id = ?", (identifier,)).fetchone()
    if row is None:
        return None
    document = from_row(row)
    if content:
        text = db.execute("SELECT content FROM contents WHERE document = ?", (document.key,)).fetchone()[0]
        document = msgspec.structs.replace(document, content=text)
    return document


def by_key(db: sqlite3.Connection, key: int) -> StoredDocument | None:
    row = db.execute("SELECT * FROM documents WHERE key = ?", (key,)).fetchone()
    return from_row(row) if row else None


def by_keys(db: sqlite3.Connection, keys: Sequence[int]) -> dict[int, StoredDocument]:
    rows = db.execute(
        "SELECT * FROM documents WHERE key IN (SELECT value FROM json_each(?))", (_json([*map(int, keys)]),)
    )
    return {row["key"]: from_row(row) for row in rows}


def by_identity(db: sqlite3.Connection, collection: int, identity: str) -> StoredDocument | None:
    row = db.execute("SELECT * FROM documents WHERE collection = ? AND identity = ?", (collection, identity)).fetchone()
    return from_row(row) if row else None


def alike(db: sqlite3.Connection, collection: int, content_hash: str, recipe: str) -> list[StoredDocument]:
    """The documents of a collection that have the same content and were cut in the same way."""
    rows = db.execute(
        "SELECT * FROM documents WHERE content_hash = ? AND collection = ? AND recipe = ? ORDER BY key",
        (content_hash, collection, recipe),
    )
    return [from_row(row) for row in rows]


def from_row(row: sqlite3.Row) -> StoredDocument:
    return StoredDocument(
        key=row["key"],
        id=row["id"],
        collection=row["collection"],
        owner=row["owner"],
        source=row["source"],
        identity=row["identity"],
        title=row["title"],
        content_hash=row["content_hash"],
        recipe=row["recipe"],
        metadata=msgspec.json.decode(row["metadata"]),
        permissions=permissions_of(row),
        day=row["day"],
        chunk_count=row["chunk_count"],
        tokens=row["tokens"],
        size=row["size"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        filename=row["filename"],
        url=row["url"],
        pages=row["pages"],
    )


def permissions_of(row: sqlite3.Row) -> Permissions:
    return Permissions(
        visibility=row["visibility"],
        allowed_users=tuple(msgspec.json.decode(row["allowed_users"])),
        allowed_groups=tuple(msgspec.json.decode(row["allowed_groups"])),
    )


def attributes(metadata: Mapping[str, Any]) -> set[tuple[str, str]]:
    """What filters can ask for: every scalar, under its dotted name; `custom.` may be left out."""
    found: set[tuple[str, str]] = set()
    for name, value in _scalars("", metadata):
        found.add((name, value))
        if name.startswith("custom."):
            found.add((name.removeprefix("custom."), value))
        if len(found) >= MAX_ATTRIBUTES:
            break
    return found


def attribute(value: str | float | bool) -> str:
    """A scalar as filters compare it: 3 and "3" are the same."""
    if isinstance(value, str):
        return value[:MAX_ATTRIBUTE]
    return msgspec.json.encode(int(value) if isinstance(value, float) and value.is_integer() else value).decode()


def _scalars(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    match value:
        case Mapping():
            for name, inner in value.items():
                yield from _scalars(f"{prefix}.{name}" if prefix else str(name), inner)
        case list() | tuple():
            for inner in value:
                if not isinstance(inner, Mapping | list | tuple):
                    yield from _scalars(prefix, inner)
        case None:
            pass
        case _:
            yield prefix[:MAX_ATTRIBUTE], attribute(value)


def _next_chunk(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'").fetchone()
    return (row[0] if row else 0) + 1


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
