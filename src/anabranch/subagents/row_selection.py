"""The row selection adapter: rows of a table become a card with a preview."""

from collections.abc import Sequence
from typing import Any

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.subagents.payloads import (
    MAX_LABEL,
    Aliases,
    Object,
    cut,
    encode,
    fitted,
    joined,
    label,
    missing,
)

MAX_ROWS = 50
MAX_COLUMNS = 100
MAX_CELL = 500
MAX_SELECTED = 500
MAX_INTEGER = 2**63
ALIASES: Aliases = {
    "rows": ("records", "data"),
    "columns": ("fields", "headers"),
    "title": ("table", "table_name", "name"),
    "row_count": ("total_rows", "total", "count"),
    "selected": ("selected_rows", "selected_ids", "selection"),
}
COLUMN_ALIASES: Aliases = {"key": ("name", "field", "id"), "label": ("title", "header"), "type": ("data_type",)}


class Table(Value):
    """What a subagent sends: rows as objects or as arrays, columns as names or as objects."""

    rows: list[dict[str, Any] | list[Any]] | None = None
    columns: list[str | dict[str, Any]] | None = None
    title: str | None = None
    row_count: int | None = None
    truncated: bool | None = None
    selected: list[Any] | None = None


class Column(Value):
    key: str | None = None
    label: str | None = None
    type: str | None = None


def preview(given: Object) -> Object:
    """The card: columns with key, label and type, and the first rows as arrays."""
    table, others = fitted(given, Table, ALIASES)
    if table.rows is None:
        raise missing("rows", ALIASES)
    columns = _columns(table)
    shown = columns[:MAX_COLUMNS]
    keys = [column.key or "" for column in shown]
    rows = [_row(row, keys) for row in table.rows[:MAX_ROWS]]
    row_count = max(table.row_count or 0, len(table.rows))
    card = {
        "card": "table_preview",
        "title": cut(table.title, MAX_LABEL) if table.title else "Selected rows",
        "columns": [_described(column, [row[at] for row in rows]) for at, column in enumerate(shown)],
        "rows": rows,
        "row_count": row_count,
        "truncated": bool(table.truncated) or row_count > len(rows) or len(columns) > len(shown),
        "selected": [_cell(one) for one in (table.selected or [])[:MAX_SELECTED]],
    }
    return joined(card, others)


def _columns(table: Table) -> list[Column]:
    if table.columns is not None:
        return [_column(one, at) for at, one in enumerate(table.columns)]
    rows = (table.rows or [])[:MAX_ROWS]
    named = dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
    width = max((len(row) for row in rows if isinstance(row, list)), default=0)
    return [Column(key=key) for key in named] + [_column({}, at) for at in range(len(named), width)]


def _column(given: str | Object, at: int) -> Column:
    if isinstance(given, str):
        return Column(key=given)
    try:
        column, _ = fitted(given, Column, COLUMN_ALIASES)
    except InvalidQuestion as error:
        raise InvalidQuestion(f"columns[{at}]: {error.message}") from None
    if column.key is not None:
        return column
    return Column(key=f"column_{at + 1}", label=column.label, type=column.type)


def _row(row: Object | list[Any], keys: Sequence[str]) -> list[Any]:
    if isinstance(row, dict):
        return [_cell(row.get(key)) for key in keys]
    cells = [_cell(value) for value in row[: len(keys)]]
    return cells + [None] * (len(keys) - len(cells))


def _cell(value: Any) -> Any:
    """Scalars as they are; objects and arrays as JSON text."""
    if isinstance(value, dict | list):
        value = encode(value).decode()
    elif isinstance(value, int) and abs(value) >= MAX_INTEGER:
        value = str(value)
    return cut(value, MAX_CELL) if isinstance(value, str) else value


def _described(column: Column, cells: Sequence[Any]) -> Object:
    key = column.key or ""
    return {
        "key": cut(key, MAX_LABEL),
        "label": cut(column.label, MAX_LABEL) if column.label else label(key),
        "type": cut(column.type, MAX_LABEL) if column.type else _type(cells),
    }


def _type(cells: Sequence[Any]) -> str:
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "integer"
    return "number" if kinds and kinds <= {int, float} else "string"
