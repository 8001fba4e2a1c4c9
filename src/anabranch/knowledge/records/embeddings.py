"""The vectors of all chunks, and the embedder that made them."""

import sqlite3
from collections.abc import Sequence

from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import StoreFailed, as_json


def embedder(db: sqlite3.Connection) -> tuple[str, int] | None:
    """The embedder's name and the length of its vectors; None until something is embedded."""
    facts = dict(db.execute("SELECT name, value FROM facts WHERE name IN ('embedder', 'dimensions')").fetchall())
    return (facts["embedder"], int(facts["dimensions"])) if len(facts) == 2 else None


def require_embedder(db: sqlite3.Connection, name: str, dimensions: int) -> None:
    """The first embedder is recorded; vectors of another one are refused."""
    known = embedder(db)
    if known is None:
        _set_embedder(db, name, dimensions)
    elif known != (name, dimensions):
        raise ConfigurationError(mismatch(known[0], name, f"{known[1]} numbers a vector, not {dimensions}"))


def check_embedder(db: sqlite3.Connection, name: str) -> None:
    known = embedder(db)
    if known is not None and known[0] != name:
        raise ConfigurationError(mismatch(known[0], name))


def mismatch(known: str, name: str, why: str = "") -> str:
    return (
        f"The documents here were embedded with {known!r}{f' ({why})' if why else ''}, and the settings say {name!r}. "
        f"Set it back, or run: anabranch index rebuild"
    )


def token_vectors(db: sqlite3.Connection, chunks: Sequence[int]) -> dict[int, bytes]:
    """The stored token vectors of chunks, by chunk key."""
    rows = db.execute(
        "SELECT chunk, tokens FROM embeddings WHERE chunk IN (SELECT value FROM json_each(?))", (as_json(chunks),)
    )
    return dict(rows.fetchall())


def begin_replacement(db: sqlite3.Connection) -> None:
    """Create a table for new vectors. What a killed rebuild left may come from another embedder."""
    drop_replacement(db)
    db.execute("CREATE TABLE embeddings_next (chunk INTEGER PRIMARY KEY, vector BLOB NOT NULL, tokens BLOB NOT NULL)")


def add_replacements(db: sqlite3.Connection, rows: Sequence[tuple[int, bytes, bytes]]) -> None:
    db.executemany("INSERT INTO embeddings_next VALUES (?, ?, ?)", rows)


def drop_replacement(db: sqlite3.Connection) -> None:
    db.execute("DROP TABLE IF EXISTS embeddings_next")


def swap_in_replacement(db: sqlite3.Connection, name: str) -> None:
    """Replace all vectors and the recorded embedder in one transaction."""
    db.execute("DELETE FROM embeddings_next WHERE chunk NOT IN (SELECT key FROM chunks)")  # deleted meanwhile
    missing = db.execute("SELECT count(*) FROM chunks WHERE key NOT IN (SELECT chunk FROM embeddings_next)")
    if missing.fetchone()[0]:
        raise StoreFailed("Documents were added while others were embedded; nothing was changed. Run it again.")
    length = db.execute("SELECT length(vector) FROM embeddings_next LIMIT 1").fetchone()
    db.execute("DROP TABLE embeddings")
    db.execute("ALTER TABLE embeddings_next RENAME TO embeddings")
    if length is None:
        db.execute("DELETE FROM facts WHERE name IN ('embedder', 'dimensions')")  # the next embedder is recorded
    else:
        _set_embedder(db, name, length[0] // 4)
    db.execute("UPDATE collections SET settings = json_set(settings, '$.embedding_model', ?)", (name,))
    # A gap in the sequence of changes: readers with the old vectors in memory reload everything.
    documents.record_change(db, "collection", 0)
    documents.record_change(db, "collection", 0)
    db.execute("DELETE FROM changes WHERE seq < (SELECT max(seq) FROM changes)")


def _set_embedder(db: sqlite3.Connection, name: str, dimensions: int) -> None:
    db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", [("embedder", name), ("dimensions", str(dimensions))])
