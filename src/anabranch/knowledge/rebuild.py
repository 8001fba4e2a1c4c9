"""Rebuild: every chunk embedded anew, beside the old vectors, and swapped in whole or not at all."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.records import documents, facts
from anabranch.knowledge.records.database import Database, StoreFailed

BATCH = 256

Progress = Callable[[int, int], None]
Chunk = tuple[int, str]


async def embed_anew(database: Database, embedder: Embedder, generations: Generations, progress: Progress) -> int:
    """Embed every chunk with another embedder; how many there were. Only the holder of the indexer's lock may call
    this, and the index is empty after it: the writer rebuilds it. Killed at any moment, it leaves the old vectors or
    the new ones, never both, and never an index of the one beside records of the other."""
    total = int(database.reading(lambda db: db.execute("SELECT count(*) FROM chunks").fetchone()[0]))
    _check_lengths(database, embedder)
    database.writing(_scratch)
    done = 0
    try:
        for batch in _batches(database):
            embeddings = await embedder.embed([text for _, text in batch])
            rows = [(key, one.vector, one.tokens) for (key, _), one in zip(batch, embeddings, strict=True)]
            database.writing(partial(_keep, rows=rows))
            done += len(batch)
            progress(done, total)
        # First the index goes, for it holds the old vectors: without one, searches read the records.
        generations.publish(IndexManifest(number=generations.current().number))
        database.writing(lambda db: _swap(db, embedder.name))
    except BaseException:
        with suppress(AnabranchError):
            database.writing(lambda db: db.execute("DROP TABLE IF EXISTS embeddings_next"))
        raise
    return done


def _check_lengths(database: Database, embedder: Embedder) -> None:
    """A chunk that the embedder would cut off could not be found by its end."""
    too_long = sum(len(embedder.tokens(text)) > embedder.window for batch in _batches(database) for _, text in batch)
    if too_long:
        raise ConfigurationError(
            f"{too_long:,} chunks are longer than the {embedder.window:,} tokens that {embedder.name!r} takes in. Set "
            f"the embedder back and ingest their documents again with a smaller --chunk-size, then rebuild."
        )


def _batches(database: Database) -> Iterator[list[Chunk]]:
    last = 0
    while batch := database.reading(partial(_after, key=last)):
        yield batch
        last = batch[-1][0]


def _after(db: sqlite3.Connection, key: int) -> list[Chunk]:
    found = db.execute("SELECT key, text FROM chunks WHERE key > ? ORDER BY key LIMIT ?", (key, BATCH))
    return [(row["key"], row["text"]) for row in found]


def _scratch(db: sqlite3.Connection) -> None:
    """What a rebuild that was killed may have left is of no use: its embedder may have been a third one."""
    db.execute("DROP TABLE IF EXISTS embeddings_next")
    db.execute("CREATE TABLE embeddings_next (chunk INTEGER PRIMARY KEY, vector BLOB NOT NULL, tokens BLOB NOT NULL)")


def _keep(db: sqlite3.Connection, rows: Sequence[tuple[int, bytes, bytes]]) -> None:
    db.executemany("INSERT INTO embeddings_next VALUES (?, ?, ?)", rows)


def _swap(db: sqlite3.Connection, embedder: str) -> None:
    """The new vectors in place of the old, and what says whose they are, in one transaction."""
    db.execute("DELETE FROM embeddings_next WHERE chunk NOT IN (SELECT key FROM chunks)")  # deleted meanwhile
    missing = db.execute("SELECT count(*) FROM chunks WHERE key NOT IN (SELECT chunk FROM embeddings_next)")
    if missing.fetchone()[0]:
        raise StoreFailed("Documents came in while others were embedded; nothing was changed. Run it again.")
    length = db.execute("SELECT length(vector) FROM embeddings_next LIMIT 1").fetchone()
    db.execute("DROP TABLE embeddings")
    db.execute("ALTER TABLE embeddings_next RENAME TO embeddings")
    if length is None:
        db.execute("DELETE FROM facts WHERE name IN ('embedder', 'dimensions')")  # the next that embeds decides
    else:
        facts.set_embedder(db, embedder, length[0] // 4)
    db.execute("UPDATE collections SET settings = json_set(settings, '$.embedding_model', ?)", (embedder,))
    # A gap in the sequence of changes: whoever has vectors in memory starts afresh.
    documents.changed(db, "collection", 0)
    documents.changed(db, "collection", 0)
    db.execute("DELETE FROM changes WHERE seq < (SELECT max(seq) FROM changes)")
