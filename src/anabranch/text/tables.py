"""Reads tables: the rows, their header, and the first cell of each row, which names what the row is about."""

import re
from itertools import pairwise
from typing import NamedTuple

from anabranch.text.blocks import TextLine, spanned
from anabranch.text.sentences import Span, trim

MAX_RECORD = 600
# A name is a code span or bold text at the head of a term, else all of it.
_NAME = re.compile(
    r"[\[*]{0,3}(?:(?::[\w:+-]{1,40}:)?``?~?(?P<code>[^`\n]{1,120}?)(?:[ ]<[^`\n]{1,120}>)?`"
    r"|(?P<words>[^\n]{1,120}?)\**(?:\s{0,4}:?\s{0,4}\Z|\s{1,4}:\s))"
)
_CELL = re.compile(r"[|\s]*+([^|\n]*[^|\s])")
_BOLD_ROW = re.compile(r"[|\s]*+(?:\*\*[^*|\n]++\*\*[|\s]*+)++")
_COLUMN = re.compile(r"\S+(?: \S+)*")
_COLUMN_GAP = re.compile(r"(?<=[^\s.!?:])  +(?=\S)")
_PAIRS = re.compile(
    r"[^\s:;|][^:;\n]{0,60}+: (?P<value>[^;\n]*+)(?:;(?! [^:;\n]{1,60}+: )[^;\n]*+)*+; [^:;\n]{1,60}+: "
)
_PAIR = re.compile(r"([^\W_][\w .\[\]/-]{0,40}): \S")
_HEADER_ROWS = re.compile(r":header-rows:\s*(\d)")
_HEADER = re.compile(r":header:\s*(\S[^\n]*)")
_DATUM = re.compile(r"[\d`.:;]|\S{30}")


class Row(NamedTuple):
    span: Span
    name: Span | None


class TextTable(NamedTuple):
    lead: Span | None
    rows: list[Row]


def name_of(text: str, start: int, end: int, pattern: re.Pattern[str] = _NAME) -> Span | None:
    """The name that the pattern finds at the head of a span, in one of its groups."""
    found = pattern.match(text, start, end)
    return trim(text, *found.span(found.lastgroup or 0)) if found else None


def _row(text: str, first: TextLine, last: TextLine) -> Row:
    cell = _CELL.match(text, first.start, first.end)
    return Row((first.start, last.end), cell and name_of(text, *cell.span(1)))


def pipe_table(text: str, lines: list[TextLine]) -> TextTable:
    """A Markdown table. The line below its header is a separator."""
    header = len(lines) > 1 and lines[1].kind == "separator"
    body = [line for line in lines[2 if header else 0 :] if line.kind != "separator"]
    return TextTable(spanned(lines[:2]) if header else None, [_row(text, line, line) for line in body])


def grid_table(text: str, lines: list[TextLine]) -> TextTable:
    """A table with a border around every row. The border below the header is of equals signs."""
    edges = [index for index, line in enumerate(lines) if line.kind == "grid"]
    lead, rows = None, []
    for above, below in pairwise(edges):
        inner = lines[above + 1 : below]
        if inner and text.find("=", lines[below].start, lines[below].end) >= 0:
            lead = (inner[0].start, lines[below].end)
        elif inner:
            rows.append(_row(text, inner[0], inner[-1]))
    return _with_bold_header(text, TextTable(lead, rows))


def simple_table(text: str, lines: list[TextLine]) -> TextTable:
    """A table whose columns are marked by borders of equals signs. A row goes on where its first column is empty."""
    borders = [index for index, line in enumerate(lines) if line.kind == "border" and text[line.start] == "="]
    indent = lines[borders[0]].indent if borders else 0
    lead, first = None, 0
    if len(borders) > 2 and borders[1] > borders[0] + 1:
        lead, first = (lines[borders[0] + 1].start, lines[borders[1]].end), borders[1] + 1
    body = [line for line in lines[first:] if line.kind not in ("blank", "border")]
    heads = [index for index, line in enumerate(body) if line.indent <= indent + 1]
    rows = []
    for head, following in pairwise([*heads, len(body)]):
        row = _aligned_row(text, body[head])
        rows.append(row._replace(span=(body[head].start, body[following - 1].end)))
    return _with_bold_header(text, TextTable(lead, rows))


def directive_table(text: str, head: list[TextLine], body: list[TextLine]) -> TextTable:
    """A list-table, whose rows are items, or a csv-table, whose rows are lines. The header is in the directive's
    options, or the first rows."""
    indent = body[0].indent
    heads = [index for index, line in enumerate(body) if line.indent <= indent and line.kind != "blank"]
    rows = []
    for first, following in pairwise([*heads, len(body)]):
        span = trim(text, body[first].start, body[following - 1].end)
        name = name_of(text, body[first].body + (2 if body[first].kind == "item" else 0), body[first].end)
        rows += [Row(span, name)] if span else []
    options = spanned(head)
    if named := _HEADER.search(text, *options):
        return TextTable(trim(text, *named.span(1)), rows)
    counted = _HEADER_ROWS.search(text, *options)
    count = min(int(counted[1]), len(rows)) if counted else 0
    return TextTable((rows[0].span[0], rows[count - 1].span[1]) if count else None, rows[count:])


def records(text: str, lines: list[TextLine]) -> TextTable | None:
    """Lines that are the rows of a table without marks, as from HTML or CSV, or the fields of one record; else None."""
    if all(text.find(" | ", line.start, line.end) >= 0 for line in lines):
        return _with_header(text, [_row(text, line, line) for line in lines])
    if len(lines) > 2 and (_is_separated(text, lines, "\t", 1) or _is_separated(text, lines, ",", 2)):
        return _with_header(text, [Row((line.start, line.end), None) for line in lines])
    if len(lines) > 2 and _is_aligned(text, lines):
        return TextTable(None, [_aligned_row(text, line) for line in lines])
    if text.find(": ", lines[0].start, lines[0].end) < 0:
        return None
    if all(_PAIRS.match(text, line.start, line.end) for line in lines):
        return TextTable(
            None, [Row((line.start, line.end), name_of(text, line.start, line.end, _PAIRS)) for line in lines]
        )
    names = [_PAIR.match(text, line.start, line.end) for line in lines]
    if len(names) < 2 or None in names:
        return None
    if len({found[1] for found in names if found}) > 1 and lines[-1].end - lines[0].start <= MAX_RECORD:
        return TextTable(None, [Row(spanned(lines), None)])
    return TextTable(None, [Row((line.start, line.end), None) for line in lines])


def _is_aligned(text: str, lines: list[TextLine]) -> bool:
    """Whether a column begins at the same place in all lines, after two spaces or more."""
    common: set[int] | None = None
    for line in lines:
        begins = {gap.end() - line.start + line.indent for gap in _COLUMN_GAP.finditer(text, line.start, line.end)}
        common = begins if common is None else common & begins
        if not common:
            return False
    return True


def _aligned_row(text: str, line: TextLine) -> Row:
    cell = _COLUMN.match(text, line.start, line.end)
    return Row((line.start, line.end), cell and name_of(text, *cell.span()))


def _is_separated(text: str, lines: list[TextLine], sign: str, least: int) -> bool:
    """Whether all lines have the same number of separators, and none ends like a sentence or a wrapped line."""
    count = text.count(sign, lines[0].start, lines[0].end)
    return count >= least and all(
        text.count(sign, line.start, line.end) == count and text[line.end - 1] not in ".,;" for line in lines
    )


def _with_bold_header(text: str, table: TextTable) -> TextTable:
    if table.lead is None and len(table.rows) > 1 and _BOLD_ROW.fullmatch(text, *table.rows[0].span):
        return TextTable(table.rows[0].span, table.rows[1:])
    return table


def _with_header(text: str, rows: list[Row]) -> TextTable:
    """The first row is a header if it has only words, and others have figures or are clearly longer."""
    first, *rest = rows
    if rest and not _DATUM.search(text, *first.span):
        data = sum(_DATUM.search(text, *row.span) is not None for row in rest)
        length = sum(row.span[1] - row.span[0] for row in rest) / len(rest)
        if 2 * data >= len(rest) or length > 1.5 * (first.span[1] - first.span[0]):
            return TextTable(first.span, rest)
    return TextTable(None, rows)
