"""Documents and chunks in the records, and the cursors of their lists."""

import hmac
import secrets
import sqlite3
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from anabranch.domain.model import Embedding
from anabranch.knowledge.model import DocumentDraft, Permissions, Piece, StoredDocument
from anabranch.knowledge.records.database import as_json, new_id

FACT = "cursor_secret"
WIDTH = 8


class Cursors:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sealed(self, key: int) -> str:
        nonce = secrets.token_bytes(WIDTH)
        hidden = _xor(key.to_bytes(WIDTH, "big"), self._digest(b"pad", nonce))
        return urlsafe_b64encode(nonce + hidden + self._digest(b"tag", nonce + hidden)).decode()

    def opened(self, cursor: str) -> int | None:
        """The key of a cursor; None if it is not valid for these records."""
        try:
            raw = urlsafe_b64decode(cursor)
        except ValueError:
            return None
        nonce, hidden, tag = raw[:WIDTH], raw[WIDTH : 2 * WIDTH], raw[2 * WIDTH :]
        if len(raw) != 3 * WIDTH or not hmac.compare_digest(tag, self._digest(b"tag", nonce + hidden)):
            return None
        return int.from_bytes(_xor(hidden, self._digest(b"pad", nonce)), "big")

    def _digest(self, use: bytes, of: bytes) -> bytes:
        return hmac.digest(self._secret, use + of, "sha256")[:WIDTH]


def find(db: sqlite3.Connection) -> Cursors | None:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (FACT,)).fetchone()
    return Cursors(bytes.fromhex(row[0])) if row else None


def make(db: sqlite3.Connection) -> Cursors:
    """The cursors of these records; their secret is stored, so all processes share it."""
    db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (FACT, secrets.token_hex(32)))
    made = find(db)
    assert made is not None
    return made


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


MAX_ATTRIBUTES = 200
MAX_ATTRIBUTE = 500


def insert(
    db: sqlite3.Connection, draft: DocumentDraft, pieces: Sequence[Piece], embeddings: Sequence[Embedding]
) -> StoredDocument:
    """Store a document; it replaces the one with its identity in the same transaction."""
    old = by_identity(db, draft.collection, draft.identity)
    if old is not None:
        remove(db, old.key, delete_citations=False)
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
                as_json(piece.headers),
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
    record_change(db, "add", key)
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
            as_json(draft.metadata),
            draft.permissions.visibility,
            as_json(draft.permissions.allowed_users),
            as_json(draft.permissions.allowed_groups),
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


def remove(db: sqlite3.Connection, key: int, *, delete_citations: bool = True) -> int:
    """Delete a document and everything that belongs to it; returns how many chunks it had."""
    row = db.execute("SELECT id, first_chunk, chunk_count FROM documents WHERE key = ?", (key,)).fetchone()
    if row is None:
        return 0
    span = (row["first_chunk"], row["first_chunk"] + row["chunk_count"])
    db.execute("DELETE FROM embeddings WHERE chunk >= ? AND chunk < ?", span)
    db.execute("DELETE FROM chunks WHERE key >= ? AND key < ?", span)
    db.execute("DELETE FROM contents WHERE document = ?", (key,))
    db.execute("DELETE FROM attributes WHERE document = ?", (key,))
    db.execute("DELETE FROM documents WHERE key = ?", (key,))
    if delete_citations:
        db.execute("DELETE FROM citations WHERE document = ?", (row["id"],))
    record_change(db, "remove", key)
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
    """Update the title, metadata, permissions and day of a document."""
    db.execute(
        "UPDATE documents SET title = ?, metadata = ?, visibility = ?, allowed_users = ?, allowed_groups = ?, day = ?, "
        "updated_at = ? WHERE key = ?",
        (
            title,
            as_json(metadata),
            permissions.visibility,
            as_json(permissions.allowed_users),
            as_json(permissions.allowed_groups),
            day,
            time.time(),
            key,
        ),
    )
    db.execute("DELETE FROM attributes WHERE document = ?", (key,))
    db.executemany("INSERT INTO attributes VALUES (?, ?, ?)", ((*pair, key) for pair in attributes(metadata)))
    record_change(db, "update", key)


def record_change(db: sqlite3.Connection, op: str, document: int) -> None:
    db.execute("INSERT INTO changes (op, document, at) VALUES (?, ?, ?)", (op, document, time.time()))


def change_range(db: sqlite3.Connection) -> tuple[int, int]:
    """The oldest and the newest sequence number in the log of changes; 0 if there is none."""
    oldest, newest = db.execute(
        "SELECT (SELECT coalesce(min(seq), 0) FROM changes), (SELECT coalesce(max(seq), 0) FROM changes)"
    ).fetchone()
    return oldest, newest


def changed_since(db: sqlite3.Connection, seq: int) -> list[int]:
    """The keys of documents that were added, updated or removed after a sequence number."""
    return _column(db, "SELECT DISTINCT document FROM changes WHERE seq > ? AND document > 0", seq)


def trim_changes(db: sqlite3.Connection, before: int) -> None:
    db.execute("DELETE FROM changes WHERE seq < ?", (before,))


def by_id(db: sqlite3.Connection, identifier: str, *, content: bool = False) -> StoredDocument | None:
    document = _first(db, "id = ?", identifier)
    if document is not None and content:
        [text] = _column(db, "SELECT content FROM contents WHERE document = ?", document.key)
        document = msgspec.structs.replace(document, content=text)
    return document


def by_key(db: sqlite3.Connection, key: int) -> StoredDocument | None:
    return _first(db, "key = ?", key)


def by_keys(db: sqlite3.Connection, keys: Sequence[int]) -> dict[int, StoredDocument]:
    return {row["key"]: _from_row(row) for row in rows(db, keys)}


def by_identity(db: sqlite3.Connection, collection: int, identity: str) -> StoredDocument | None:
    return _first(db, "collection = ? AND identity = ?", collection, identity)


def with_content(db: sqlite3.Connection, collection: int, content_hash: str, recipe: str) -> list[StoredDocument]:
    """The documents of a collection with the same content, chunked in the same way."""
    where = "content_hash = ? AND collection = ? AND recipe = ? ORDER BY key"
    return _select(db, where, content_hash, collection, recipe)


def rows(db: sqlite3.Connection, keys: Sequence[int] | None = None) -> Iterable[sqlite3.Row]:
    """The rows of the table `documents` with these keys, or all of them."""
    if keys is None:
        return db.execute("SELECT * FROM documents")
    return db.execute("SELECT * FROM documents WHERE key IN (SELECT value FROM json_each(?))", (as_json(keys),))


def counts(db: sqlite3.Connection) -> tuple[int, int]:
    """How many documents and chunks there are."""
    documents, chunks = db.execute("SELECT count(*), coalesce(sum(chunk_count), 0) FROM documents").fetchone()
    return documents, chunks


def with_attribute(db: sqlite3.Connection, name: str, value: str) -> list[int]:
    """The keys of documents with an attribute of this value."""
    return _column(db, "SELECT document FROM attributes WHERE name = ? AND value = ?", name, value)


def after_chunk(db: sqlite3.Connection, chunk: int) -> list[int]:
    """The keys of documents whose chunks come after a chunk, in the order of their chunks."""
    return _column(db, "SELECT key FROM documents WHERE first_chunk > ? ORDER BY first_chunk", chunk)


def unindexed(db: sqlite3.Connection, last_chunk: int) -> tuple[int, float | None]:
    """How many chunks come after a chunk, and when the oldest of their documents was written."""
    chunks, oldest = db.execute(
        "SELECT coalesce(sum(chunk_count), 0), min(updated_at) FROM documents WHERE first_chunk > ?", (last_chunk,)
    ).fetchone()
    return chunks, oldest


def indexable_chunks(db: sqlite3.Connection, documents: Sequence[int], after: int) -> list[sqlite3.Row]:
    """Key, title, headers, text and vector of the chunks of some documents, as far as they come after a chunk."""
    return db.execute(
        "SELECT chunks.key, title, headers, chunks.text, embeddings.vector FROM documents "
        "JOIN chunks ON chunks.key >= first_chunk AND chunks.key < first_chunk + chunk_count "
        "JOIN embeddings ON embeddings.chunk = chunks.key "
        "WHERE first_chunk > ? AND documents.key IN (SELECT value FROM json_each(?)) ORDER BY chunks.key",
        (after, as_json(documents)),
    ).fetchall()


def chunk_texts(db: sqlite3.Connection, after: int, limit: int) -> list[tuple[int, str]]:
    """The next chunks after a key, each with its text."""
    found = db.execute("SELECT key, text FROM chunks WHERE key > ? ORDER BY key LIMIT ?", (after, limit))
    return [(row["key"], row["text"]) for row in found]


def chunks_by_key(db: sqlite3.Connection, keys: Sequence[int]) -> dict[int, sqlite3.Row]:
    """Chunks with the columns of their documents and the name of their collection."""
    found = db.execute(
        "SELECT chunks.key AS chunk_key, chunks.id AS chunk_id, chunks.start_char, chunks.end_char, "
        "chunks.tokens AS chunk_tokens, chunks.headers, chunks.page, chunks.text, documents.*, "
        "collections.name AS collection_name FROM chunks JOIN documents ON documents.key = chunks.document "
        "JOIN collections ON collections.key = documents.collection "
        "WHERE chunks.key IN (SELECT value FROM json_each(?))",
        (as_json(keys),),
    )
    return {row["chunk_key"]: row for row in found}


def _first(db: sqlite3.Connection, where: str, *values: str | int) -> StoredDocument | None:
    return next(iter(_select(db, where, *values)), None)


def _select(db: sqlite3.Connection, where: str, *values: str | int) -> list[StoredDocument]:
    return [_from_row(row) for row in db.execute(f"SELECT * FROM documents WHERE {where}", values)]  # noqa: S608


def _column(db: sqlite3.Connection, query: str, *values: str | int) -> list[Any]:
    return [row[0] for row in db.execute(query, values)]


def _from_row(row: sqlite3.Row) -> StoredDocument:
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
    """The name and value of every scalar that filters can match, under its dotted name, with and without `custom.`."""
    found: set[tuple[str, str]] = set()
    for name, value in _scalars("", metadata):
        found.add((name, value))
        if name.startswith("custom."):
            found.add((name.removeprefix("custom."), value))
        if len(found) >= MAX_ATTRIBUTES:
            break
    return found


def attribute(value: str | float | bool) -> str:
    """A scalar as filters compare it: 3 and "3" are equal."""
    if isinstance(value, str):
        return value[:MAX_ATTRIBUTE]
    return as_json(int(value) if isinstance(value, float) and value.is_integer() else value)


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
