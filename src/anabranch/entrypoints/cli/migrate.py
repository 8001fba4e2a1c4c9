"""`anabranch migrate`: moves the records to another database or folder."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from anabranch.app.records import folder_of, open_records, shared_records
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import ConfigurationError, Conflict, NotFound
from anabranch.entrypoints.cli.options import json_option, settings_option
from anabranch.entrypoints.cli.resources import alone, cleaning_up, records, require_records, write
from anabranch.entrypoints.cli.terminal import (
    counted,
    flat,
    moment,
    notes,
    print_json,
    print_result,
    print_table,
    progress,
    write_text,
)
from anabranch.knowledge.records import moves, nodes
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.migration import Migration, Places, RecordsComparison, RowBatch
from anabranch.knowledge.records.sqlite import NAME
from anabranch.network.redaction import PASSWORD_PARAMETERS, PASSWORDS

SHOWN = ("collections", "documents", "chunks", "keys")
STOP = "Stop it, and run this again: only what has changed since is copied then."


@click.command("migrate")
@click.option("--to", "place", metavar="PLACE", help="postgresql://USER@HOST/NAME, or a new folder.")
@click.option("--verify", is_flag=True, help="Only compare all rows of both; nothing is changed.")
@click.option("--stay", is_flag=True, help="Use records that were moved here again; those that were moved stay, too.")
@click.option("--batch-rows", type=click.IntRange(1), default=RowBatch().rows, hidden=True)
@json_option
@settings_option
def command(place: str | None, verify: bool, stay: bool, batch_rows: int, as_json: bool, settings: Settings) -> None:
    """Move the records to PostgreSQL, or back to a folder.

    The records of the settings are copied while a server uses them. Then the command asks to stop it, and run again,
    copies what has changed since, compares all rows, and prints what to set. An interrupted command continues.
    """
    require_records(settings)
    if stay:
        done = write(settings, moves.stay)
        line = "A server can use these records again." if done else "These records were not moved."
        print_result({"stays": done}, line, as_json=as_json)
        return
    if place is None:
        raise click.UsageError("Missing option '--to': postgresql://USER@HOST/NAME, or a new folder.")
    there = _settings_of(place, settings)
    places = Places(_shown(settings), _shown(there))
    with cleaning_up(), records(settings) as source, _target(there, create=not verify) as target:
        migration = Migration(source, target, places, progress, RowBatch(rows=batch_rows))
        compared = migration.compare() if verify else _move(migration, settings, there, source, target)
        completed = migration.state
    is_moved = compared.is_equal and not verify
    if as_json:
        print_json(_view(places, there, compared, is_moved=is_moved))
    else:
        _print(places, there, compared, is_moved=is_moved)
    if not compared.is_equal:
        notes().print(_advice(None if completed is None else completed.completed_at))
    sys.exit(0 if compared.is_equal else 1)


def _move(
    migration: Migration, settings: Settings, there: Settings, source: Database, target: Database
) -> RecordsComparison:
    state = migration.begin()
    if state.completed_at is not None:
        compared = migration.compare()
        if compared.is_equal:  # the last run may have ended just before
            migration.note_moved()
        return compared
    _require_unused(target, _shown(there))
    if there.database_url is None:
        _delete_index(folder_of(there))
    migration.copy()
    with _idle(settings, source):
        _require_unused(target, _shown(there))
        return migration.finish()


def _advice(completed_at: float | None) -> str:
    if completed_at is not None:
        return f"The move was completed at {moment(completed_at)}. What differs was changed since, in one of the two."
    return (
        "The move is not complete. Without --verify, the command compares every row of these tables, and copies those "
        "that differ. If they differ again then, begin with an empty database or a new folder."
    )


def _settings_of(place: str, settings: Settings) -> Settings:
    """The settings with which a server uses the target."""
    if place.startswith(("postgresql://", "postgres://")):
        there = msgspec.structs.replace(settings, database_url=place)
        is_same = place == settings.database_url
    elif "://" in place or not place:
        scheme = place.partition("://")[0]  # the rest may have a password
        raise ConfigurationError(f"--to takes postgresql://USER@HOST/NAME or a folder, not {scheme!r}.")
    else:
        folder = Path(place).expanduser().absolute()
        there = msgspec.structs.replace(settings, database_url=None, data_dir=str(folder))
        is_same = settings.database_url is None and folder.resolve() == folder_of(settings).resolve()
    if is_same:
        raise ConfigurationError(f"--to: the records are in {_shown(there)} already.")
    return there


@contextmanager
def _target(there: Settings, *, create: bool) -> Iterator[Database]:
    """The records of the target, which no server uses meanwhile."""
    with ExitStack() as stack:
        try:
            if there.database_url is not None:
                opened = open_records(there) if create else shared_records(there)
            elif create:
                stack.enter_context(alone(folder_of(there)))
                opened = open_records(there)
            else:
                opened = _existing(there)
        except (ConfigurationError, NotFound) as error:
            message = error.message.replace("AGGREGATOR_DATABASE_URL", "--to").replace("AGGREGATOR_DATA_DIR", "--to")
            raise type(error)(message) from None
        assert opened is not None, "there is an address"
        yield stack.enter_context(closing(opened))


def _existing(there: Settings) -> Database:
    if not (folder_of(there) / NAME).is_file():
        raise NotFound(f"There are no records in {folder_of(there)}.")
    return open_records(there)


def _require_unused(database: Database, place: str, consequence: str = "Stop it, and run this again.") -> None:
    """Conflict if a node uses records in PostgreSQL."""
    names = ", ".join(one.name for one in database.reading(nodes.listed) if one.is_alive)
    if names:
        raise Conflict(f"{place} is in use: a server is running ({names}). {consequence}")


@contextmanager
def _idle(settings: Settings, source: Database) -> Iterator[None]:
    """No server uses the source meanwhile; Conflict if one does."""
    with ExitStack() as stack:
        try:
            if settings.database_url is None:
                stack.enter_context(alone(folder_of(settings)))
        except Conflict:
            place = _shown(settings)
            raise Conflict(
                f"All rows are copied. {place} is in use: a server or an ingest is running. {STOP}"
            ) from None
        _require_unused(source, f"All rows are copied. {_shown(settings)}", STOP)
        yield


def _delete_index(folder: Path) -> None:
    """An index that was made of other records would be wrong; a server makes another one."""
    (folder / "index" / "CURRENT").unlink(missing_ok=True)
    shutil.rmtree(folder / "index", ignore_errors=True)


def _shown(settings: Settings) -> str:
    """Where the records are, without a password."""
    if settings.database_url is None:
        return str(folder_of(settings).absolute())
    shown = settings.database_url
    for pattern in (PASSWORDS, PASSWORD_PARAMETERS):
        for found in reversed(list(pattern.finditer(shown))):
            shown = f"{shown[: found.start(1)]}***{shown[found.end(1) :]}"
    return shown


def _assignments(there: Settings) -> dict[str, str | None]:
    """What to set, so that a server uses the target; None is what to unset."""
    if there.database_url is not None:
        return {"AGGREGATOR_DATABASE_URL": _shown(there)}
    return {"AGGREGATOR_DATA_DIR": _shown(there), "AGGREGATOR_DATABASE_URL": None}


def _view(places: Places, there: Settings, compared: RecordsComparison, *, is_moved: bool) -> dict[str, Any]:
    return {
        "from": places.source,
        "to": places.target,
        "moved": is_moved,
        "equal": compared.is_equal,
        "set": _assignments(there),
        "tables": compared.tables,
        "counters": compared.counters,
        "audit": compared.audit,
    }


def _print(places: Places, there: Settings, compared: RecordsComparison, *, is_moved: bool) -> None:
    rows = sum(compared.rows.values())
    contents = ", ".join(counted(compared.rows[one], one.removesuffix("s")) for one in SHOWN)
    if is_moved:
        write_text(f"Moved {contents}: {counted(rows, 'row')}, compared with those in {flat(places.target)}.")
        for name, value in _assignments(there).items():
            write_text(f"unset {name}" if value is None else f"{name}={value}")
        notes().print(
            f"The records in {flat(places.source)} stay as they are. What is changed there from now on is not in "
            f"{flat(places.target)}. A server makes the index again."
        )
    elif compared.is_equal:
        write_text(f"Equal: {contents}, {counted(rows, 'row')} in {flat(places.source)} and {flat(places.target)}.")
    else:
        unequal = [one for one in compared.tables if not one.is_equal]
        cells = [(one.table, one.rows, one.target_rows, "; ".join(one.differing)) for one in unequal]
        print_table(("table", "rows here", "rows there", "keys that differ"), cells)
        for table in compared.counters:
            write_text(f"{table}: keys would be used again.")
    for problem in compared.audit:
        notes().print(f"The audit log: {flat(problem)}")
