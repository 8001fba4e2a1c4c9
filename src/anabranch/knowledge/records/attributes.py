"""The attributes of documents: what filters can match of their metadata."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from anabranch.knowledge.records.database import Session, as_json

MAX_ATTRIBUTES = 200
MAX_ATTRIBUTE = 500
# The attribute by which filters find what a connector has sent.
CONNECTOR = "source.connector_id"


def replace(db: Session, key: int, metadata: Mapping[str, Any], connector_id: str | None) -> None:
    db.execute("DELETE FROM attributes WHERE document = ?", (key,))
    found = of(metadata) | ({(CONNECTOR, comparable(connector_id))} if connector_id else set())
    db.executemany("INSERT INTO attributes VALUES (?, ?, ?)", ((*pair, key) for pair in found))


def documents_with(db: Session, name: str, value: str, among: Sequence[int] | None = None) -> list[int]:
    """The keys of documents with an attribute of this value: of all, or among some."""
    query, values = "SELECT document FROM attributes WHERE name = ? AND value = ?", [name, value]
    if among is not None:
        query += " AND document IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
        values.append(as_json(among))
    return [row[0] for row in db.execute(query, tuple(values))]


def of_documents(db: Session, keys: Sequence[int]) -> dict[int, list[tuple[str, str]]]:
    """The attributes of documents, by key."""
    found: dict[int, list[tuple[str, str]]] = {}
    query = (
        "SELECT document, name, value FROM attributes "
        "WHERE document IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
    )
    for document, name, value in db.execute(query, (as_json(keys),)):
        found.setdefault(document, []).append((name, value))
    return found


def of(metadata: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The name and value of every scalar that filters can match, under its dotted name, with and without `custom.`."""
    named = ((alias, value) for name, value in _scalars("", metadata) for alias in (name, name.removeprefix("custom.")))
    return set(islice(dict.fromkeys(named), MAX_ATTRIBUTES))


def comparable(value: str | float | bool) -> str:
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
        case _ if value is not None:
            yield prefix[:MAX_ATTRIBUTE], comparable(value)
