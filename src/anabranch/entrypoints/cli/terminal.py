"""Output of commands: untrusted text made safe for terminals, tables, JSON and progress bars."""

import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from anabranch.domain.model import Passage
from anabranch.knowledge.model import Permissions

# In a pipe nothing is truncated or wrapped.
UNBOUNDED = 10_000
# On a narrower terminal, a list with many columns has only the most important ones.
WIDE = 130
CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")

Advance = Callable[[int, int], None]
Cell = Callable[[Any], str | int | Text]


def printable(text: str) -> str:
    """Untrusted text made safe for a terminal: control characters other than line ends are replaced."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def flat(text: str) -> str:
    """Printable text on one line."""
    return printable(" ".join(text.split()))


def output(*, wrapped: bool = False, stderr: bool = False) -> Console:
    """Standard output. Unless `wrapped`, lines in a pipe have any length."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # the encoding may lack a ✓
    console = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not (wrapped or console.is_terminal):
        console.width = UNBOUNDED
    return console


def notes() -> Console:
    """Standard error: messages that are not the result."""
    return output(stderr=True)


def write_text(text: str) -> None:
    """Write to standard output as it is; its encoding may lack characters of the text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_json(value: Any) -> None:
    """Print one JSON document. Control characters that JSON allows are escaped too."""
    write_text(_escaped(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def json_line(value: Any) -> str:
    """A JSON document on one line, escaped as `print_json` does."""
    return _escaped(msgspec.json.encode(value).decode()) + "\n"


def _escaped(document: str) -> str:
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def print_result(value: Any, line: str, *, as_json: bool) -> None:
    """The result of a command: as JSON, or as one line of text."""
    if as_json:
        print_json(value)
    else:
        output().print(line)


def print_list(
    values: Sequence[Any],
    columns: Mapping[str, Cell],
    *,
    empty: str = "",
    flexible: int = 1,
    as_json: bool,
) -> None:
    """A list: as JSON, as a table with one function of a value per column, or `empty` on standard error."""
    if as_json:
        print_json(values)
    elif values:
        rows = [[cell(value) for cell in columns.values()] for value in values]
        print_table(tuple(columns), rows, flexible=flexible)
    elif empty:
        notes().print(empty)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str | int | Text]], *, flexible: int = 1) -> None:
    """Numbers are right-aligned; the first `flexible` text columns are as narrow as the terminal requires."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    texts = [at for at in range(len(columns)) if rows and not isinstance(rows[0][at], int)]
    for at, name in enumerate(columns):
        table.add_column(
            name, justify="left" if at in texts else "right", no_wrap=at not in texts[:flexible], overflow="ellipsis"
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row))
    output().print(table)


def print_fields(value: Any, fields: Sequence[tuple[str, Any]], *, as_json: bool) -> None:
    """A value as JSON, or its fields as text, one per line; empty fields are left out."""
    if as_json:
        print_json(value)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, content in fields:
        if content not in (None, ""):
            table.add_row(flat(name), Text(_cell(content)))
    output().print(table)


def fitting(narrow: Sequence[str], **columns: Cell) -> Mapping[str, Cell]:
    """The columns of a list; on a narrow terminal only those in `narrow`."""
    return columns if output().width >= WIDE else {name: columns[name] for name in narrow if name in columns}


def one_line(text: str) -> Text:
    """A cell that is truncated, not wrapped, if its column is too narrow."""
    return Text(flat(text), no_wrap=True, overflow="ellipsis")


def confirm_deletion(what: str) -> None:
    """Ask on the terminal before something is deleted; the command ends here if the answer is no, or if there is no
    terminal."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"Deleting {what} must be confirmed, and standard input is not a terminal: add --yes.")
    if not click.confirm(f"Delete {what}?", err=True):
        notes().print("Nothing was deleted.")
        sys.exit(1)


def _cell(value: str | int | None) -> str:
    return f"{value:,}" if isinstance(value, int) else flat(value or "")


@contextmanager
def progress(description: str, *, unit: str = "") -> Iterator[Advance]:
    """A progress bar on standard error, if that is a terminal. Yields a function of the done and the total count."""
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
    """The position of a passage in its document: the page and the headings above it."""
    if passage.place is None:
        return ""
    page = "" if passage.place.page is None else f"p. {passage.place.page}"
    return joined(page, " > ".join(flat(header) for header in passage.place.headers))


def joined(*parts: str) -> str:
    """The parts that are not empty, on one line."""
    return " · ".join(filter(None, parts))


def moment(timestamp: float) -> str:
    """A timestamp in ISO 8601."""
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def size(count: int) -> str:
    """A byte count with a unit."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def permissions_text(permissions: Permissions) -> str:
    """The visibility, with the users and groups that are allowed."""
    allowed = (*permissions.allowed_users, *(f"group {name}" for name in permissions.allowed_groups))
    return permissions.visibility + (f" ({', '.join(allowed)})" if allowed else "")
