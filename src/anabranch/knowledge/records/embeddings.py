"""The vectors of chunks, and how those of another embedder replace all."""

from collections.abc import Iterator, Sequence

import msgspec

from anabranch.knowledge.records import changes, collections, documents
from anabranch.knowledge.records.database import Session, StoreFailed, as_json
from anabranch.knowledge.records.facts import fact, set_fact
from anabranch.knowledge.records.schema import MEASURE

LIKE_EMBEDDINGS = {
    "sqlite": "(chunk INTEGER PRIMARY KEY, vector BLOB NOT NULL, tokens BLOB NOT NULL)",
    "postgres": "(LIKE embeddings INCLUDING ALL)",
}
REPLACED_FACT = "embeddings_replaced_at"


def token_vectors(db: Session, chunks: Sequence[int]) -> dict[int, bytes]:
    """The stored token vectors of chunks, by chunk key."""
    query = "SELECT chunk, tokens FROM embeddings WHERE chunk IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
    return dict(db.execute(query, (as_json(chunks),)).fetchall())


def vectors_between(db: Session, first: int, last: int, limit: int) -> Iterator[tuple[list[int], list[bytes]]]:
    """The keys and vectors of the chunks from one key to another, so many at once."""
    query = "SELECT chunk, vector FROM embeddings WHERE chunk BETWEEN ? AND ? ORDER BY chunk LIMIT ?"
    while found := db.execute(query, (first, last, limit)).fetchall():
        yield [key for key, _ in found], [vector for _, vector in found]
        first = found[-1][0] + 1


def begin_replacement(db: Session) -> None:
    """Create a table for new vectors. What a killed rebuild left may come from another embedder."""
    drop_replacement(db)
    db.execute(f"CREATE TABLE embeddings_next {LIKE_EMBEDDINGS[db.kind]}")


def add_replacements(db: Session, rows: Sequence[tuple[int, bytes, bytes]]) -> None:
    db.executemany("INSERT INTO embeddings_next VALUES (?, ?, ?)", rows)


def drop_replacement(db: Session) -> None:
    db.execute("DROP TABLE IF EXISTS embeddings_next")


def swap_in_replacement(db: Session, name: str) -> None:
    """Replace all vectors and the recorded embedder in one transaction."""
    db.execute("DELETE FROM embeddings_next WHERE chunk NOT IN (SELECT key FROM chunks)")  # deleted meanwhile
    if db.execute("SELECT key FROM chunks WHERE key NOT IN (SELECT chunk FROM embeddings_next) LIMIT 1").fetchone():
        raise StoreFailed("Documents were added while others were embedded; nothing was changed. Run it again.")
    db.execute("DROP TABLE embeddings")
    db.execute("ALTER TABLE embeddings_next RENAME TO embeddings")
    db.execute(MEASURE)
    # Without a vector, the next embedder is recorded.
    documents.forget_embedder(db)
    for row in db.execute("SELECT length(vector) FROM embeddings LIMIT 1").fetchall():
        documents.set_embedder(db, name, row[0] // 4)
    for one in collections.listed(db):
        settings = msgspec.structs.replace(one.settings, embedding_model=name)
        db.execute("UPDATE collections SET settings = ? WHERE key = ?", (as_json(settings), one.key))
    # A gap in the sequence of changes: readers with the old vectors in memory reload everything.
    changes.record(db, "collection", 0)
    changes.record(db, "collection", 0)
    newest = changes.state(db).newest
    changes.trim(db, newest)
    set_fact(db, REPLACED_FACT, str(newest))


def replaced_at(db: Session) -> int:
    """The change with which another embedder has replaced all vectors; 0 if none has."""
    return int(fact(db, REPLACED_FACT) or 0)
