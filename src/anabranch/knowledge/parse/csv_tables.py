"""CSV and TSV: each row becomes a line with the column names, readable without the header."""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits, TextBuilder

BLOCK_TARGET = 2_000
_DELIMITERS = (",", "\t", ";", "|")
_NUMBER = re.compile(r"[-+]?(?=[.,' ]*+\d)[\d.,' ]++%?")


def read_csv(text: str, limits: ParseLimits, delimiter: str | None = None) -> Parsed:
    draft = TextBuilder(limits)
    rows = _rows(text, delimiter or _delimiter(text))
    first, second = next(rows, []), next(rows, [])
    if not second or any(not cell or _NUMBER.fullmatch(cell) for cell in first):
        # Without a header, rows are kept as they are.
        lines: Iterator[str] = (" | ".join(row) for row in chain((first, second), rows) if row)
    else:
        lines = (_sentence(first, row) for row in chain((second,), rows))
    for block in grouped(lines):
        draft.add(block, "table", gap="\n")
    return draft.parsed()


def grouped(lines: Iterable[str], target: int = BLOCK_TARGET) -> Iterator[str]:
    """Lines joined into blocks of about `target` characters, so that a long table is not a million blocks."""
    held: list[str] = []
    size = 0
    for entry in lines:
        if held and size + len(entry) > target:
            yield "\n".join(held)
            held, size = [], 0
        held.append(entry)
        size += len(entry) + 1
    if held:
        yield "\n".join(held)


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    try:
        for row in reader:
            cells = [" ".join(cell.split()) for cell in row]
            while cells and not cells[-1]:
                cells.pop()
            if cells:
                yield cells
    except csv.Error as error:
        raise Unprocessable(
            f"The table cannot be read from line {reader.line_num:,} on: {error}. Is a quotation mark left open there?"
        ) from None


def _delimiter(text: str) -> str:
    """The delimiter that splits the first lines into the most consistent number of columns."""
    head = text[:65_536].splitlines()[:50]

    def columns(delimiter: str) -> tuple[int, int]:
        try:
            widths = [len(row) for row in csv.reader(head, delimiter=delimiter) if row]
        except csv.Error:
            return (0, 0)
        width = widths[0] if widths else 0
        return (sum(each == width for each in widths) if width > 1 else 0, width)

    return max(_DELIMITERS, key=columns)


def _sentence(names: list[str], row: list[str]) -> str:
    named = [*names, *(f"column {place}" for place in range(len(names) + 1, len(row) + 1))]
    return "; ".join(f"{name}: {cell}" for name, cell in zip(named, row, strict=False) if cell)
