"""What the commands of the query log and of the audit log share: the length of a list, and the export of everything."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

import click

from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError
from anabranch.entrypoints.cli.options import together
from anabranch.entrypoints.cli.resources import exist, records, write
from anabranch.entrypoints.cli.terminal import counted, notes, size, write_text
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Session

T = TypeVar("T")

limit_option = click.option(
    "--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Maximum number of lines."
)
export_options = together(
    click.option(
        "-o",
        "--output",
        "file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write into this file, which only you can read [default: standard output].",
    ),
    click.option("--force", is_flag=True, help="Replace the file if it exists."),
)


def note_more(found: Sequence[object], limit: int, export: str = "", *, as_json: bool) -> None:
    """Say that a list has more than the limit; `export` is the command that prints all."""
    if len(found) > limit and not as_json:
        everything = f", or all with: {export}" if export else "."
        notes().print(f"There are more than {limit:,}; show more with --limit{everything}")


def exported(settings: Settings, action: str, part: Callable[[T | None, Session], Sequence[T]]) -> Iterator[T]:
    """All entries of a log, recorded as `action` in the audit log. `part` reads those behind the last one; each part is
    a transaction of its own: a long one would make the write-ahead log grow."""
    if not exist(settings):
        return
    write(settings, lambda db: audit.append(db, AuditEntry(action=action)))
    last: T | None = None
    with records(settings) as database:
        while found := database.reading(partial(part, last)):
            yield from found
            last = found[-1]


def write_export(lines: Iterable[str], file: Path | None, force: bool, what: str) -> int:
    """Write lines into the file, or to standard output without one; returns how many."""
    count = 0
    with nullcontext() if file is None else _private_file(file, force) as target:
        write_line = write_text if target is None else target.write
        for line in lines:
            write_line(line)
            count += 1
    if file is not None:
        notes().print(f"Wrote {counted(count, what)}: {file} ({size(file.stat().st_size)}).")
    return count


def _private_file(file: Path, force: bool) -> "closing[TextIO]":
    """The file, opened for writing; others cannot read it."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        descriptor = os.open(file, flags, 0o600)
        os.fchmod(descriptor, 0o600)  # it may have existed
        return closing(os.fdopen(descriptor, "w", encoding="utf-8"))
    except FileExistsError:
        raise ConfigurationError(f"{file} exists already; --force replaces it.") from None
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written ({error.strerror}).") from None
