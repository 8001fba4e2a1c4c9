"""What must hold in and between the rows of the records."""

import sqlite3
from collections.abc import Iterator
from itertools import count, islice, pairwise
from typing import Any, get_args

import msgspec

from anabranch.knowledge.model import Visibility
from anabranch.knowledge.records.database import Session

SHOWN = 20
# Rows of a large result that are in memory at once, and documents with their texts.
FETCHED, FETCHED_TEXTS = 5_000, 50
VISIBILITIES = ", ".join(f"'{one}'" for one in get_args(Visibility))
PAGE_STARTS = msgspec.json.Decoder(tuple[int, ...])
LATER_PAGES = msgspec.json.Decoder(tuple[tuple[int, int], ...])
CURSORS = count()
# Each finds the rows that are wrong, by a name for people.
RULES = {
    "{} refers to a row of collections that is not there.": """
        SELECT 'Row ' || key || ' of documents' FROM documents
        WHERE NOT EXISTS (SELECT 1 FROM collections WHERE collections.key = documents.collection)""",
    "{} refers to a row of jobs that is not there.": """
        SELECT 'Row ' || key || ' of items' FROM items
        WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.key = items.job)""",
    "{} has another number of chunks than it says.": """
        SELECT 'Document ' || id FROM documents WHERE chunk_count != (
            SELECT count(*) FROM chunks
            WHERE key >= first_chunk AND key < first_chunk + chunk_count AND chunks.document = documents.key
        )""",
    "{} belongs to no document.": """
        SELECT 'Chunk ' || key FROM chunks
        WHERE NOT EXISTS (SELECT 1 FROM documents WHERE documents.key = chunks.document)""",
    "{} has no vector.": """
        SELECT 'Chunk ' || key FROM chunks WHERE NOT EXISTS (SELECT 1 FROM embeddings WHERE chunk = chunks.key)""",
    "{} belongs to no chunk.": """
        SELECT 'Vector ' || chunk FROM embeddings WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE key = chunk)""",
    "{} has another length than the other vectors.": """
        SELECT 'Vector ' || chunk FROM embeddings
        WHERE length(vector) != (SELECT length(vector) FROM embeddings LIMIT 1)""",
    "{} has no text.": """
        SELECT 'Document ' || id FROM documents
        WHERE NOT EXISTS (SELECT 1 FROM contents WHERE document = documents.key)""",
    "{} has permissions that cannot be read.": f"""
        SELECT 'Document ' || id FROM documents WHERE visibility NOT IN ({VISIBILITIES}) OR NOT coalesce(CASE
            WHEN json_valid(allowed_users) AND json_valid(allowed_groups)
            THEN json_type(allowed_users) = 'array' AND json_type(allowed_groups) = 'array' END, FALSE)
        UNION ALL SELECT 'Collection ' || id FROM collections WHERE NOT coalesce(CASE WHEN json_valid(settings)
            THEN json_extract(settings, '$.default_permissions.visibility') IN ({VISIBILITIES}) END, FALSE)""",  # noqa: S608
    "{} is on a page that its document does not have.": """
        SELECT 'Chunk ' || chunks.key FROM chunks JOIN documents ON documents.key = chunks.document
        WHERE page NOT BETWEEN 1 AND coalesce(pages, 0)""",
}


def inconsistencies(db: Session) -> Iterator[str]:
    """What is wrong with the file, if there is one, and between the rows."""
    unhurried(db)
    try:
        if db.kind == "sqlite":  # PostgreSQL verifies the checksum of each page that it reads
            for (found,) in db.execute(f"PRAGMA integrity_check({SHOWN})"):
                if found != "ok":
                    yield f"The file is damaged: {found}."
        for problem, query in RULES.items():
            for (name,) in db.execute(f"{query} LIMIT {SHOWN}"):
                yield problem.format(name)
        yield from islice(_differing_texts(db), SHOWN)
    except (sqlite3.Error, AttributeError, TypeError) as error:  # of another type than its column
        yield f"The records cannot be read ({error})."


def unhurried(db: Session) -> None:
    """Let each statement of this transaction take as long as it needs: it reads everything."""
    if db.kind == "postgres":
        db.execute("SET LOCAL statement_timeout = 0")


def streamed(db: Session, query: str, fetched: int = FETCHED) -> Iterator[Any]:
    """The rows of a large result, of which only some are in memory."""
    if db.kind == "sqlite":
        yield from db.execute(query)
        return
    name = f"streamed_{next(CURSORS)}"
    db.execute(f"DECLARE {name} NO SCROLL CURSOR FOR {query}")
    while rows := db.execute(f"FETCH {fetched} FROM {name}").fetchall():
        yield from rows


def _differing_texts(db: Session) -> Iterator[str]:
    """Where chunks and pages are not those of the document's text. Not in SQL: there, a part of a text takes as long as
    all that is before it."""
    query = "SELECT id, first_chunk, chunk_count, contents.* FROM documents JOIN contents ON document = documents.key"
    for document in map(dict, streamed(db, query, FETCHED_TEXTS)):
        content = document["content"]
        # Records of earlier versions have neither column of pages.
        if not _is_ascending(_decoded(PAGE_STARTS, document.get("page_starts")), 0, len(content)):
            yield f"Document {document['id']} has pages that begin outside of its text."
        chunks = db.execute(
            "SELECT * FROM chunks WHERE key >= ? AND key < ? + ?",
            (document["first_chunk"], document["first_chunk"], document["chunk_count"]),
        )
        for chunk in map(dict, chunks):
            start, end = chunk["start_char"], chunk["end_char"]
            if not 0 <= start < end <= len(content) or content[start:end] != chunk["text"]:
                yield f"Chunk {chunk['key']} has another text than document {document['id']} has there."
            later = _decoded(LATER_PAGES, chunk.get("later_pages"))
            if later is None or not _is_ascending([at for at, _ in later], start, end):
                yield f"Chunk {chunk['key']} has pages that begin outside of it."


def _decoded(decoder: msgspec.json.Decoder[Any], stored: str | None) -> Any:
    """Nothing for null; None if it cannot be read."""
    try:
        return decoder.decode(stored or "[]")
    except msgspec.MsgspecError:
        return None


def _is_ascending(offsets: Any, first: int, last: int) -> bool:
    return offsets is not None and all(a <= b for a, b in pairwise((first, *offsets, last)))
