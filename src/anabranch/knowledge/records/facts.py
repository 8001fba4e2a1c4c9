"""Facts about the records as a whole, by name."""

import sqlite3


def fact(db: sqlite3.Connection, name: str) -> str | None:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row[0])


def set_fact(db: sqlite3.Connection, name: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def forget_fact(db: sqlite3.Connection, name: str) -> None:
    db.execute("DELETE FROM facts WHERE name = ?", (name,))
