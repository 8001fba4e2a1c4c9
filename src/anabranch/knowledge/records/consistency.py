"""What must hold between the rows of the records."""

import sqlite3
from collections.abc import Iterator

SHOWN = 20
# Each finds the rows that are wrong, by a name for people.
RULES = {
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
}


def inconsistencies(db: sqlite3.Connection) -> Iterator[str]:
    """What is wrong with the file and between its rows."""
    try:
        for (found,) in db.execute(f"PRAGMA integrity_check({SHOWN})"):
            if found != "ok":
                yield f"The file is damaged: {found}."
        for table, row, parent, _ in db.execute("PRAGMA foreign_key_check"):
            yield f"Row {row} of {table} refers to a row of {parent} that is not there."
        for problem, query in RULES.items():
            for (name,) in db.execute(f"{query} LIMIT {SHOWN}"):
                yield problem.format(name)
    except sqlite3.Error as error:
        yield f"The records cannot be read ({error})."
