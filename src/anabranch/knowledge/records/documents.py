"""Documents and their chunks in the records, the embedder of these, and up to which chunk an index was written."""

import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec

from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError, QuotaReached
from anabranch.domain.model import Embedding
from anabranch.knowledge.model import Caller, ChunkView, DocumentDraft, Erased, Permissions, Piece, StoredDocument
from anabranch.knowledge.records import attributes, audit, changes
from anabranch.knowledge.records.database import ResultRow, Session, as_json, new_id
from anabranch.knowledge.records.facts import fact, forget_fact, set_fact
from anabranch.knowledge.records.schema import MEASURE
from anabranch.knowledge.records.visibility import VISIBLE, visible_to

INDEXED_FACT = "indexed_chunk"
EMBEDDER_FACT, DIMENSIONS_FACT = "embedder", "dimensions"
MAX_KEY = 2**63 - 1
NameColumn = Literal["filename", "title"]
NAME_COLUMNS: tuple[NameColumn, ...] = ("filename", "title")
# What the permissions of one owner's documents may name, and how many of a short list. The index has that number, too.
MAX_NAMES = 250_000
FEW_NAMES = 4
# A page ends early where the metadata of its documents is more than this, but not before it has so many of them.
MAX_PAGE_BYTES = 2_000_000
LEAST_PAGE = 30


def insert(
    db: Session, draft: DocumentDraft, pieces: Sequence[Piece], embeddings: Sequence[Embedding]
) -> StoredDocument:
    """Store a document; it replaces the one with its identity in the same transaction. QuotaReached before anything is
    changed, if its owner's documents would name too many."""
    check_names(db, draft.owner, draft.permissions)
    old = by_identity(db, draft.collection, draft.identity)
    if old is not None:
        remove(db, old.key, delete_citations=False, recorded=False)
    first = db.reserve("chunks", len(pieces))
    key = _insert_document(db, draft, old, first, pieces)
    starts = as_json(draft.page_starts) if draft.page_starts else None
    db.execute("INSERT INTO contents VALUES (?, ?, ?)", (key, draft.content, starts))
    attributes.replace(db, key, draft.metadata, draft.connector_id)
    db.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                as_json(piece.later_pages) if piece.later_pages else None,
            )
            for number, piece in enumerate(pieces, first)
        ),
    )
    db.executemany(
        "INSERT INTO embeddings VALUES (?, ?, ?)",
        ((number, embedding.vector, embedding.tokens) for number, embedding in enumerate(embeddings, first)),
    )
    db.execute(f"{MEASURE} WHERE key = ?", (key,))
    changes.record(db, "add", key)
    [stored] = _select(db, "key = ?", key)
    _record(db, "replaced" if old else "added", stored, chunks=stored.chunk_count)
    return stored


def _insert_document(
    db: Session, draft: DocumentDraft, old: StoredDocument | None, first_chunk: int, pieces: Sequence[Piece]
) -> int:
    now = time.time()
    values = {
        "key": db.reserve("documents", 1),
        "id": old.id if old else draft.id,
        "collection": draft.collection,
        "owner": draft.owner,
        "source": draft.source,
        "connector_id": draft.connector_id,
        "identity": draft.identity,
        "filename": draft.filename,
        "url": draft.url,
        "title": draft.title,
        "content_hash": draft.content_hash,
        "recipe": draft.recipe,
        "metadata": as_json(draft.metadata),
        **_permission_columns(draft.permissions),
        "day": draft.day,
        "pages": draft.pages,
        "first_chunk": first_chunk,
        "chunk_count": len(pieces),
        "tokens": sum(piece.tokens for piece in pieces),
        "size": draft.size,
        "created_at": old.created_at if old else now,
        "updated_at": now,
        "processed_at": now,
    }
    columns, places = ", ".join(values), ", ".join(f":{name}" for name in values)
    db.execute(f"INSERT INTO documents ({columns}) VALUES ({places})", values)  # noqa: S608  our own names
    return int(values["key"])


def remove(db: Session, key: int, *, delete_citations: bool = True, recorded: bool = True) -> int:
    """Delete a document and everything that belongs to it; returns how many chunks it had. Unless it is `recorded` in
    the audit log, the caller records what it does."""
    row = db.execute("SELECT id, title, first_chunk, chunk_count FROM documents WHERE key = ?", (key,)).fetchone()
    if row is None:
        return 0
    if recorded:
        deleted = AuditEntry(action="document.deleted", object=f"document:{row['id']}", name=row["title"])
        audit.append(db, deleted)
    span = (row["first_chunk"], row["first_chunk"] + row["chunk_count"])
    db.execute("DELETE FROM embeddings WHERE chunk >= ? AND chunk < ?", span)
    db.execute("DELETE FROM chunks WHERE key >= ? AND key < ?", span)
    db.execute("DELETE FROM contents WHERE document = ?", (key,))
    db.execute("DELETE FROM attributes WHERE document = ?", (key,))
    db.execute("DELETE FROM documents WHERE key = ?", (key,))
    if delete_citations:
        # The sentences of an answer quote what was found for it.
        quoting = "query IN (SELECT query FROM retrievals WHERE document = ?)"
        db.execute(f"UPDATE responses SET sentences = NULL WHERE {quoting}", (row["id"],))  # noqa: S608
        db.execute("DELETE FROM citations WHERE document = ?", (row["id"],))
    changes.record(db, "remove", key)
    return int(row["chunk_count"])


def ids_in(db: Session, collection: int) -> list[str]:
    return _column(db, "SELECT id FROM documents WHERE collection = ?", collection)


def ids_of(db: Session, user: str) -> list[str]:
    """The documents that a user owns, and those in the user's collections."""
    owned = "owner = ? OR collection IN (SELECT key FROM collections WHERE owner = ?)"
    return _column(db, f"SELECT id FROM documents WHERE {owned}", user, user)  # noqa: S608  our own names


def erase(db: Session, erased: Erased) -> int:
    """Delete documents, and remove users from the permissions of others; returns how many documents that were."""
    keys = _column(
        db, "SELECT key FROM documents WHERE id IN (SELECT value FROM json_each(?))", as_json(erased.documents)
    )
    for key in keys:
        remove(db, key)
    for user in erased.users:
        allowed = "EXISTS (SELECT 1 FROM json_each(allowed_users) WHERE value = ?)"
        for stored in _select(db, allowed, user):
            permissions = stored.permissions.without(user)
            _set_permissions(db, stored.key, permissions)
            changes.record(db, "update", stored.key)
            _record(db, "permissions_changed", msgspec.structs.replace(stored, permissions=permissions))
    return len(keys)


def describe(
    db: Session,
    stored: StoredDocument,
    *,
    title: str,
    metadata: Mapping[str, Any],
    permissions: Permissions,
    day: int,
    connector_id: str | None = None,
) -> StoredDocument:
    """Update the title, metadata, permissions and day of a document, and its connector if one is given; returns it. If
    they are others, this leaves a record."""
    given = (title, metadata, permissions, connector_id or stored.connector_id)
    if given == (stored.title, stored.metadata, stored.permissions, stored.connector_id):
        return stored
    if permissions != stored.permissions:
        check_names(db, stored.owner, permissions)
    key = stored.key if title == stored.title else _renumber(db, stored.key)
    _set_permissions(db, key, permissions)
    db.execute(
        "UPDATE documents SET title = ?, metadata = ?, day = ?, connector_id = coalesce(?, connector_id), "
        "updated_at = ? WHERE key = ?",
        (title, as_json(metadata), day, connector_id, time.time(), key),
    )
    attributes.replace(db, key, metadata, connector_id or stored.connector_id)
    changes.record(db, "update", key)
    [changed] = _select(db, "key = ?", key)
    _record(db, "changed" if permissions == stored.permissions else "permissions_changed", changed)
    return changed


def check_names(db: Session, owner: str, permissions: Permissions) -> None:
    """QuotaReached if the lists of an owner's documents would name more than MAX_NAMES: each name is kept in memory.
    The operator's own have no limit, nor have short lists."""
    columns = _permission_columns(permissions)
    if not owner or columns["names"] <= FEW_NAMES:
        return
    others = "coalesce(names_digest, ?) != ?"  # what was stored before there were digests has none
    lists = f"SELECT DISTINCT names_digest, names FROM documents WHERE owner = ? AND names > 4 AND {others}"  # noqa: S608
    held = db.execute(
        f"SELECT coalesce(sum(names), 0) FROM ({lists}) AS lists",  # noqa: S608
        (owner, b"", columns["names_digest"]),
    ).fetchone()
    if held[0] + columns["names"] > MAX_NAMES:
        raise QuotaReached(
            f"The permissions of your documents name {held[0]:,} users and groups, and may name {MAX_NAMES:,}; equal "
            "lists count once. Name groups, or let the documents follow their collection.",
            limit="names",
            allowed=MAX_NAMES,
        )


def _permission_columns(permissions: Permissions) -> dict[str, Any]:
    users, groups = as_json(permissions.allowed_users), as_json(permissions.allowed_groups)
    names = len(permissions.allowed_users) + len(permissions.allowed_groups)
    return {
        "visibility": permissions.visibility,
        "allowed_users": users,
        "allowed_groups": groups,
        "names": names,
        "names_digest": blake2b(f"{users}{groups}".encode(), digest_size=16).digest() if names > FEW_NAMES else None,
    }


def _set_permissions(db: Session, key: int, permissions: Permissions) -> None:
    columns = _permission_columns(permissions)
    changed = ", ".join(f"{name} = :{name}" for name in columns)
    db.execute(f"UPDATE documents SET {changed} WHERE key = :key", {**columns, "key": key})  # noqa: S608  our own names


def _record(db: Session, what: str, stored: StoredDocument, **details: str | int) -> None:
    audit.append(
        db,
        AuditEntry(
            action=f"document.{what}",
            object=f"document:{stored.id}",
            name=stored.title,
            granted=stored.permissions.granted,
            details={"visibility": stored.permissions.visibility, **details},
        ),
    )


def _renumber(db: Session, key: int) -> int:
    """Give a document and its chunks new keys, as a new version has them; returns the new key. The index holds the
    words of the title with each chunk: chunks with new keys are indexed again, at once, with the new title."""
    row = db.execute("SELECT first_chunk, chunk_count FROM documents WHERE key = ?", (key,)).fetchone()
    span = (row["first_chunk"], row["first_chunk"] + row["chunk_count"])
    new, first = db.reserve("documents", 1), db.reserve("chunks", row["chunk_count"])
    shift = first - row["first_chunk"]
    db.execute("UPDATE embeddings SET chunk = chunk + ? WHERE chunk >= ? AND chunk < ?", (shift, *span))
    db.execute("UPDATE chunks SET key = key + ?, document = ? WHERE key >= ? AND key < ?", (shift, new, *span))
    db.execute("UPDATE contents SET document = ? WHERE document = ?", (new, key))
    db.execute("UPDATE attributes SET document = ? WHERE document = ?", (new, key))
    db.execute("UPDATE documents SET key = ?, first_chunk = ? WHERE key = ?", (new, first, key))
    changes.record(db, "remove", key)
    return new


class Stored(NamedTuple):
    """What one owner has stored, by the names of the limits on it."""

    documents: int
    stored_bytes: int


def stored_by(db: Session, owner: str) -> Stored:
    row = db.execute("SELECT documents, bytes FROM stored WHERE owner = ?", (owner,)).fetchone()
    return Stored(0, 0) if row is None else Stored(*row)


def by_id(db: Session, identifier: str) -> StoredDocument | None:
    return _first(db, "id = ?", identifier)


def by_keys(db: Session, keys: Sequence[int]) -> list[StoredDocument]:
    return _select(db, "key IN (SELECT CAST(value AS BIGINT) FROM json_each(?)) ORDER BY key", as_json(keys))


def first_of(db: Session, keys: Sequence[int]) -> list[int]:
    """The first of these keys, with as much metadata as a page may have."""
    size = MAX_PAGE_BYTES
    query = (
        "SELECT key, length(metadata) FROM documents "
        "WHERE key IN (SELECT CAST(value AS BIGINT) FROM json_each(?)) ORDER BY key"
    )
    found: list[int] = []
    for key, length in _pairs(db, query, as_json(keys)):
        size -= length
        if size < 0 and len(found) >= LEAST_PAGE:
            break
        found.append(key)
    return found


def visible_by_ids(db: Session, caller: Caller, ids: Sequence[str]) -> list[StoredDocument]:
    """Of the documents with these ids, those that the caller may see."""
    query = f"SELECT * FROM documents WHERE id IN (SELECT value FROM json_each(:ids)) AND {VISIBLE}"  # noqa: S608
    return [_from_row(row) for row in db.execute(query, {"ids": as_json(ids), **visible_to(caller)})]


def with_text(db: Session, stored: StoredDocument) -> StoredDocument:
    """The document with its text, and where its pages begin in it."""
    row = db.execute("SELECT content, page_starts FROM contents WHERE document = ?", (stored.key,)).fetchone()
    if row is None:
        return stored
    starts = tuple(msgspec.json.decode(row["page_starts"])) if row["page_starts"] else ()
    return msgspec.structs.replace(stored, content=row["content"], page_starts=starts)


def by_identity(db: Session, collection: int, identity: str) -> StoredDocument | None:
    return _first(db, "collection = ? AND identity = ?", collection, identity)


def named(
    db: Session, caller: Caller, column: NameColumn, name: str, limit: int, *, ignore_case: bool = False
) -> list[StoredDocument]:
    """The newest documents with a file name or a title that the caller may see, newest first. The case of ASCII letters
    can be ignored."""
    same = f"{column} = :name COLLATE NOCASE" + ("" if ignore_case else f" AND {column} = :name")
    query = f"SELECT * FROM documents WHERE {same} AND {VISIBLE} ORDER BY key DESC LIMIT :limit"  # noqa: S608
    return [_from_row(row) for row in db.execute(query, {"name": name, "limit": limit, **visible_to(caller)})]


def names_of(db: Session, keys: Sequence[int]) -> list[str]:
    """The titles and file names of documents, newest first."""
    query = (
        "SELECT title, filename FROM documents "
        "WHERE key IN (SELECT CAST(value AS BIGINT) FROM json_each(?)) ORDER BY key DESC"
    )
    return [name for row in _pairs(db, query, as_json(keys)) for name in row if name]


def with_content(db: Session, collection: int, content_hash: str, recipe: str) -> list[StoredDocument]:
    """The documents of a collection with the same content, chunked in the same way."""
    where = "content_hash = ? AND collection = ? AND recipe = ? ORDER BY key"
    return _select(db, where, content_hash, collection, recipe)


def rows(db: Session, keys: Sequence[int] | None = None) -> Iterable[ResultRow]:
    """The rows of the table `documents` with these keys, or all of them."""
    if keys is None:
        return db.execute("SELECT * FROM documents")
    return db.execute(
        "SELECT * FROM documents WHERE key IN (SELECT CAST(value AS BIGINT) FROM json_each(?))", (as_json(keys),)
    )


def counts(db: Session) -> tuple[int, int]:
    """How many documents and chunks there are."""
    return _pairs(db, "SELECT count(*), coalesce(sum(chunk_count), 0) FROM documents")[0]


def after_chunk(db: Session, chunk: int, last: int = MAX_KEY, limit: int = MAX_KEY) -> list[int]:
    """The keys of documents whose chunks come after a chunk, up to `last`, in the order of their chunks."""
    query = "SELECT key FROM documents WHERE first_chunk > ? AND first_chunk <= ? ORDER BY first_chunk LIMIT ?"
    return _column(db, query, chunk, last, limit)


def chunk_counts(db: Session) -> dict[int, int]:
    """How many chunks each document has, by its key."""
    return dict(_pairs(db, "SELECT key, chunk_count FROM documents"))


def last_chunk(db: Session, keys: Sequence[int]) -> int:
    """The last chunk of these documents; 0 if there is none."""
    query = (
        "SELECT coalesce(max(first_chunk + chunk_count - 1), 0) FROM documents "
        "WHERE key IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
    )
    return int(db.execute(query, (as_json(keys),)).fetchone()[0])


def unindexed(db: Session, last_chunk: int) -> tuple[int, float | None]:
    """How many chunks come after a chunk, and when the oldest of their documents was written."""
    query = "SELECT coalesce(sum(chunk_count), 0), min(updated_at) FROM documents WHERE first_chunk > ?"
    return _pairs(db, query, last_chunk)[0]


def changed_chunks(db: Session, seq: int) -> int:
    """How many chunks the documents have that have changed after a sequence number."""
    query = (
        "SELECT coalesce(sum(chunk_count), 0) FROM documents WHERE key IN "
        "(SELECT document FROM changes WHERE seq > ? AND document > 0)"
    )
    return int(db.execute(query, (seq,)).fetchone()[0])


def note_indexed(db: Session, last_chunk: int, node: str) -> None:
    """Record up to which chunk the index of a node was written."""
    set_fact(db, _indexed_fact(node), str(last_chunk))


def forget_indexed(db: Session) -> None:
    """Record that no index was written, beside records that are restored."""
    forget_fact(db, INDEXED_FACT)


def indexed_up_to(db: Session, node: str) -> int:
    """The last chunk for which the index of a node was written; 0 if none was."""
    return int(fact(db, _indexed_fact(node)) or 0)


def indexed(db: Session, node: str) -> int:
    """How many chunks there are for which the index of a node was written."""
    query = "SELECT coalesce(sum(chunk_count), 0) FROM documents WHERE first_chunk <= ?"
    return int(_column(db, query, indexed_up_to(db, node))[0])


def _indexed_fact(node: str) -> str:
    return f"{INDEXED_FACT}:{node}" if node else INDEXED_FACT


def indexable_chunks(db: Session, documents: Sequence[int]) -> list[ResultRow]:
    """Key, document, type, title, headers, text and vector of the chunks of some documents, by key."""
    # Their keys first: PostgreSQL would join by a range of keys with a scan of all chunks.
    query = (
        "SELECT first_chunk, chunk_count FROM documents WHERE key IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
    )
    spans = _pairs(db, query, as_json(documents))
    return indexable_by_key(db, [key for first, count in sorted(spans) for key in range(first, first + count)])


def indexable_by_key(db: Session, chunks: Sequence[int]) -> list[ResultRow]:
    """The same of these chunks, as far as there are any."""
    return db.execute(
        "SELECT chunks.key, chunks.document, chunks.kind, title, headers, chunks.text, embeddings.vector FROM chunks "
        "JOIN documents ON documents.key = chunks.document JOIN embeddings ON embeddings.chunk = chunks.key "
        "WHERE chunks.key IN (SELECT CAST(value AS BIGINT) FROM json_each(?)) ORDER BY chunks.key",
        (as_json(chunks),),
    ).fetchall()


def chunk_texts(db: Session, after: int, limit: int) -> list[tuple[int, str]]:
    """The next chunks after a key, each with its text."""
    return _pairs(db, "SELECT key, text FROM chunks WHERE key > ? ORDER BY key LIMIT ?", after, limit)


def chunk_types(db: Session, after: int, limit: int) -> list[tuple[int, str]]:
    """The next chunks after a key, each with its type."""
    return _pairs(db, "SELECT key, kind FROM chunks WHERE key > ? ORDER BY key LIMIT ?", after, limit)


def chunks_of(db: Session, identifier: str, begin: int, limit: int) -> list[ChunkView]:
    """The chunks of a document from an index on, in their order; none if no version of it is stored."""
    found = db.execute(
        "SELECT chunks.*, chunks.key - first_chunk AS at FROM documents JOIN chunks "
        "ON chunks.key >= first_chunk + :begin AND chunks.key < first_chunk + chunk_count "
        "WHERE documents.id = :id ORDER BY chunks.key LIMIT :limit",
        {"id": identifier, "begin": begin, "limit": limit},
    )
    return [
        ChunkView(
            id=row["id"],
            index=row["at"],
            start_char=row["start_char"],
            end_char=row["end_char"],
            tokens=row["tokens"],
            type=row["kind"],
            headers=tuple(msgspec.json.decode(row["headers"])),
            page=row["page"],
            text=row["text"],
        )
        for row in found
    ]


def chunks_by_key(db: Session, caller: Caller, keys: Sequence[int]) -> dict[int, ResultRow]:
    """Of these chunks, those that the caller may see, with the columns of their documents and the name and the owner of
    their collection."""
    found = db.execute(
        "SELECT chunks.key AS chunk_key, chunks.id AS chunk_id, chunks.start_char, chunks.end_char, "  # noqa: S608
        "chunks.tokens AS chunk_tokens, chunks.kind, chunks.headers, chunks.page, chunks.later_pages, chunks.text, "
        "documents.*, collections.name AS collection_name, collections.owner AS collection_owner FROM chunks "
        "JOIN documents ON documents.key = chunks.document JOIN collections ON collections.key = documents.collection "
        f"WHERE chunks.key IN (SELECT CAST(value AS BIGINT) FROM json_each(:keys)) AND {VISIBLE}",
        {"keys": as_json(keys), **visible_to(caller)},
    )
    return {row["chunk_key"]: row for row in found}


def following_texts(db: Session, keys: Sequence[int], length: int, most: int) -> dict[int, str]:
    """What documents have after these chunks, up to so many characters. A database reads a text from its beginning, so
    only documents of at most so many characters are read."""
    found = db.execute(
        "SELECT chunks.key, substr(content, chunks.end_char + 1, :length) FROM chunks "
        "JOIN documents ON documents.key = chunks.document JOIN contents ON contents.document = documents.key "
        "JOIN chunks AS last ON last.key = first_chunk + chunk_count - 1 "
        "WHERE chunks.key IN (SELECT CAST(value AS BIGINT) FROM json_each(:keys)) AND last.end_char <= :most",
        {"keys": as_json(keys), "length": length, "most": most},
    )
    return {row[0]: row[1] for row in found}


def _first(db: Session, where: str, *values: str | int) -> StoredDocument | None:
    return next(iter(_select(db, where, *values)), None)


def _select(db: Session, where: str, *values: str | int) -> list[StoredDocument]:
    return [_from_row(row) for row in db.execute(f"SELECT * FROM documents WHERE {where}", values)]  # noqa: S608


def _column(db: Session, query: str, *values: str | int) -> list[Any]:
    return [row[0] for row in db.execute(query, values)]


def _pairs(db: Session, query: str, *values: str | int) -> list[tuple[Any, Any]]:
    return [(row[0], row[1]) for row in db.execute(query, values)]


def _from_row(row: ResultRow) -> StoredDocument:
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
        connector_id=row["connector_id"],
        pages=row["pages"],
        processed_at=row["processed_at"],
    )


def permissions_of(row: ResultRow) -> Permissions:
    return Permissions(
        visibility=row["visibility"],
        allowed_users=tuple(msgspec.json.decode(row["allowed_users"])),
        allowed_groups=tuple(msgspec.json.decode(row["allowed_groups"])),
    )


def embedder(db: Session) -> tuple[str, int] | None:
    """The embedder's name and the length of its vectors; None until something is embedded."""
    name, dimensions = fact(db, EMBEDDER_FACT), fact(db, DIMENSIONS_FACT)
    return None if name is None or dimensions is None else (name, int(dimensions))


def require_embedder(db: Session, name: str, dimensions: int) -> None:
    """The first embedder is recorded; vectors of another one are refused."""
    known = embedder(db)
    if known is None:
        set_embedder(db, name, dimensions)
    elif known != (name, dimensions):
        raise ConfigurationError(mismatch(known[0], name, f" ({known[1]} numbers a vector, not {dimensions})"))


def check_embedder(db: Session, name: str) -> None:
    known = fact(db, EMBEDDER_FACT)
    if known is not None and known != name:
        raise ConfigurationError(mismatch(known, name))


def mismatch(known: str, name: str, why: str = "") -> str:
    return (
        f"The documents here were embedded with {known!r}{why}, and the settings say {name!r}. "
        f"Set it back, or run: anabranch index rebuild"
    )


def set_embedder(db: Session, name: str, dimensions: int) -> None:
    set_fact(db, EMBEDDER_FACT, name)
    set_fact(db, DIMENSIONS_FACT, str(dimensions))


def forget_embedder(db: Session) -> None:
    forget_fact(db, EMBEDDER_FACT)
    forget_fact(db, DIMENSIONS_FACT)
