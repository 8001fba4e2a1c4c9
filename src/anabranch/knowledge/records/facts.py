"""Facts about the records as a whole: with which embedder everything in them was embedded."""

import sqlite3

from anabranch.domain.errors import ConfigurationError


def embedder(db: sqlite3.Connection) -> tuple[str, int] | None:
    """Its name and the length of its vectors; None as long as nothing was embedded."""
    facts = dict(db.execute("SELECT name, value FROM facts WHERE name IN ('embedder', 'dimensions')").fetchall())
    return (facts["embedder"], int(facts["dimensions"])) if len(facts) == 2 else None


def require_embedder(db: sqlite3.Connection, name: str, dimensions: int) -> None:
    """The first that embeds decides; vectors of another are never mixed in."""
    known = embedder(db)
    if known is None:
        set_embedder(db, name, dimensions)
    elif known != (name, dimensions):
        raise ConfigurationError(mismatch(known[0], name, f"{known[1]} numbers a vector, not {dimensions}"))


def set_embedder(db: sqlite3.Connection, name: str, dimensions: int) -> None:
    db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", [("embedder", name), ("dimensions", str(dimensions))])


def check_embedder(db: sqlite3.Connection, name: str) -> None:
    known = embedder(db)
    if known is not None and known[0] != name:
        raise ConfigurationError(mismatch(known[0], name))


def mismatch(known: str, name: str, why: str = "") -> str:
    return (
        f"The documents here were embedded with {known!r}{f' ({why})' if why else ''}, and the settings say {name!r}. "
        f"Set it back, or run: anabranch index rebuild"
    )
