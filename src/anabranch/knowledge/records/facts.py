"""Facts about the records as a whole, by name."""

from anabranch.knowledge.records.database import Session


def fact(db: Session, name: str) -> str | None:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row[0])


def set_fact(db: Session, name: str, value: str) -> None:
    db.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", (name, value))


def forget_fact(db: Session, name: str) -> None:
    db.execute("DELETE FROM facts WHERE name = ?", (name,))
