"""`anabranch backup` and `restore`: the records copied while they are in use, and put back."""

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import click

from anabranch.app.knowledge_opener import folder_of
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.options import config_option, configured, json_option
from anabranch.entrypoints.cli.resources import alone, exist, records, require_records
from anabranch.entrypoints.cli.terminal import counted, notes, output, print_json, size
from anabranch.knowledge.index.files import sync_file, sync_folder
from anabranch.knowledge.records import facts
from anabranch.knowledge.records.database import NAME
from anabranch.knowledge.records.schema import MIGRATIONS
from anabranch.models.factory import LocalEmbedder

OURS = {"facts", "collections", "documents", "chunks", "embeddings", "jobs", "keys"}


class Contents(Value):
    """What a copy of the records holds, as `--json` gives it."""

    file: str
    bytes: int
    collections: int
    documents: int
    chunks: int
    keys: int


@click.command("backup")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@json_option
@config_option
def backup(file: Path, force: bool, as_json: bool, config: Path | None) -> None:
    """Copy the records into FILE, also while a server runs.

    The search index is not in it: it is made anew from the records.
    """
    settings = configured(config)
    require_records(settings)
    if file.exists() and not force:
        raise ConfigurationError(f"{file} is there already; --force replaces it.")
    if file.resolve() == (folder_of(settings) / NAME).resolve():
        raise ConfigurationError(f"{file} is where the records themselves are.")
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        # Made before anything is in it, so that it is never readable for others.
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with records(settings) as database:
            database.backup(beside)
        sync_file(beside)
        beside.replace(file)
        sync_folder(file.resolve().parent)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written ({error.strerror}).") from None
    except sqlite3.Error as error:
        raise ConfigurationError(f"{file} cannot be written ({error}).") from None
    finally:
        beside.unlink(missing_ok=True)
    _print("Backed up", _contents(file), as_json=as_json)


@click.command("restore")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Also if there are records; they are kept aside.")
@json_option
@config_option
def restore(file: Path, force: bool, as_json: bool, config: Path | None) -> None:
    """Put the records from FILE, a backup, in place."""
    settings = configured(config)
    folder = folder_of(settings)
    _validate(file)
    with alone(folder):
        if exist(settings) and _holds_anything(folder / NAME) and not force:
            raise Conflict(f"There are records in {folder} already; --force keeps them aside and restores over them.")
        fresh = folder / f"{NAME}.restoring"
        fresh.unlink(missing_ok=True)
        try:
            os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with closing(_readable(file)) as source, closing(sqlite3.connect(fresh)) as copy:
                source.backup(copy)
            sync_file(fresh)
            aside = _put(folder, fresh)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"{file} cannot be restored into {folder} ({error}).") from None
        finally:
            fresh.unlink(missing_ok=True)
        with records(settings) as database:  # which brings the schema up to date
            known = database.reading(facts.embedder)
    if aside is not None:
        notes().print(f"What was there is kept as {aside}.")
    wanted = settings.embedding_model or LocalEmbedder.name
    if known is not None and known[0] != wanted:
        notes().print(facts.mismatch(known[0], wanted))
    _print("Restored", _contents(file), as_json=as_json)


def _put(folder: Path, fresh: Path) -> Path | None:
    """The new records in place of the old, which stay beside them; where. At every moment one of the two is there."""
    current = folder / NAME
    aside = None
    # The index goes first: beside other records it would be wrong, and without one they are whole.
    (folder / "index" / "CURRENT").unlink(missing_ok=True)
    shutil.rmtree(folder / "index", ignore_errors=True)
    if current.exists():
        aside = folder / f"{NAME}.before-restore-{time.strftime('%Y%m%d-%H%M%S')}"
        is_whole = _checkpointed(current)
        for log in (current.with_name(f"{NAME}{suffix}") for suffix in ("-wal", "-shm")):
            if log.exists() and is_whole:
                raise Conflict(f"{current} is open in another process. Stop it, and run this again.")
            if log.exists():
                log.replace(log.with_name(log.name.replace(NAME, aside.name)))
        os.link(current, aside)
    fresh.replace(current)
    sync_folder(folder)
    return aside


def _checkpointed(file: Path) -> bool:
    """Bring the write-ahead log into the file, as whoever closes it last does; False if it is too damaged for that."""
    try:
        with closing(sqlite3.connect(file)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:
        return False
    return True


def _validate(file: Path) -> None:
    """That it is a database of ours, whole, and not of a later version."""
    try:
        with closing(_readable(file)) as db:
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if version < 1 or not tables >= OURS:
                raise ConfigurationError(f"{file} is a database, but not one of Anabranch's.")
            if version > len(MIGRATIONS):
                raise ConfigurationError(f"{file} is of version {version}, which a newer Anabranch wrote. Update it.")
            if db.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
                raise ConfigurationError(f"{file} is damaged.")
    except sqlite3.Error as error:
        raise ConfigurationError(f"{file} is not a backup, or a damaged one ({error}).") from None


def _readable(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)


def _holds_anything(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(file)) as db:
            tables = ("collections", "keys", "queries")
            return any(db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in tables)  # noqa: S608
    except sqlite3.Error:
        return True  # what cannot be read may still be worth something


def _contents(file: Path) -> Contents:
    with closing(_readable(file)) as db:
        counts = {
            table: int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608  our own names
            for table in ("collections", "documents", "chunks", "keys")
        }
    return Contents(file=str(file), bytes=file.stat().st_size, **counts)


def _print(done: str, found: Contents, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    parts = [counted(found.collections, "collection"), counted(found.documents, "document")]
    parts += [counted(found.chunks, "chunk"), counted(found.keys, "key")]
    output().print(f"{done} {', '.join(parts)}: {found.file} ({size(found.bytes)}).")
