"""What commands put on a terminal or into a pipe: text of others made safe, tables, JSON, progress."""

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from anabranch.domain.model import Passage

# In a pipe nothing is cut or wrapped: who reads it there wants whole names.
UNBOUNDED = 10_000
CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")

Advance = Callable[[int, int], None]


def printable(text: str) -> str:
    """Text of others as it is safe on a terminal: a control character other than a line's end is shown, not obeyed."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def flat(text: str) -> str:
    """The same on one line."""
    return printable(" ".join(text.split()))


def output(*, wrapped: bool = False) -> Console:
    """Standard output. What is not `wrapped` has lines of any length in a pipe."""
    return _console(sys.stdout, stderr=False, wrapped=wrapped)


def notes() -> Console:
    """Standard error: what is said about the work rather than its result."""
    return _console(sys.stderr, stderr=True, wrapped=False)


def _console(stream: object, *, stderr: bool, wrapped: bool) -> Console:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a ✓ that the encoding lacks is no reason to fail
    console = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not (wrapped or console.is_terminal):
        console.width = UNBOUNDED
    return console


def print_json(value: Any) -> None:
    """One JSON document. Control characters that JSON lets through are escaped as well."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    safe = CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(safe + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str | int | Text]]) -> None:
    """Numbers stand to the right; the first column of text gives way where there is no room."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    texts = [at for at in range(len(columns)) if rows and not isinstance(rows[0][at], int)]
    for at, name in enumerate(columns):
        is_number = at not in texts
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=at not in texts[:1], overflow="ellipsis"
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row))
    output().print(table)


def print_fields(fields: Sequence[tuple[str, str | int]]) -> None:
    """Names and values, one to a line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, Text(_cell(value)))
    output().print(table)


def _cell(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else flat(value)


@contextmanager
def progress(description: str, *, unit: str = "") -> Iterator[Advance]:
    """A bar on standard error, if that is a terminal; called with how much is done, and of how much."""
    console = notes()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def place_of(passage: Passage) -> str:
    """Where in its document a passage stands: the page, the headings above it."""
    if passage.place is None:
        return ""
    page = [f"p. {passage.place.page}"] if passage.place.page is not None else []
    headers = [" > ".join(flat(header) for header in passage.place.headers)] if passage.place.headers else []
    return " · ".join([*page, *headers])


def moment(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def size(count: int) -> str:
    """Bytes as a person reads them."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
