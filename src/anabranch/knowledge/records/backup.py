"""Backup and restore of the records with SQLite's online backup."""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.knowledge.durable_files import sync_file
from anabranch.knowledge.records import audit, erasures
from anabranch.knowledge.records.database import NAME, Database, migrate
from anabranch.knowledge.records.schema import MIGRATIONS

TABLES = {"facts", "collections", "documents", "chunks", "embeddings", "jobs", "keys"}


def back_up(database: Database, file: Path) -> None:
    """Copy the records into a file while they are in use; the file appears when it is complete."""
    database.writing(lambda db: erasures.note_backup(db, file))
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with _private(beside):
            database.backup(beside)
            sync_file(beside)
            beside.replace(file)
            sync_file(file.resolve().parent)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{file} cannot be written ({getattr(error, 'strerror', error)}).") from None


def restore(folder: Path, file: Path) -> Path | None:
    """Replace the records in a folder with a backup; returns where the old ones are kept. The caller holds the lock."""
    fresh = folder / f"{NAME}.restoring"
    fresh.unlink(missing_ok=True)
    try:
        with _private(fresh):
            with closing(_read_only(file)) as source, closing(sqlite3.connect(fresh, isolation_level=None)) as copy:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
                migrate(copy)
                audit.append(copy, _restored(file, folder / NAME))
            sync_file(fresh)
            return _replace(folder, fresh)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{file} cannot be restored into {folder} ({error}).") from None


def validate(file: Path) -> None:
    """Raises ConfigurationError unless the file is an undamaged backup of a supported version."""
    try:
        with closing(_read_only(file)) as db:
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if version < 1 or not tables >= TABLES:
                raise ConfigurationError(f"{file} is a database, but not one of Anabranch's.")
            if version > len(MIGRATIONS):
                raise ConfigurationError(
                    f"{file} is of schema version {version}, written by a newer Anabranch. Update Anabranch."
                )
            if db.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
                raise ConfigurationError(f"{file} is damaged.")
    except sqlite3.Error as error:
        raise ConfigurationError(f"{file} is not a backup, or a damaged one ({error}).") from None


def is_empty(folder: Path) -> bool:
    """Whether the records in a folder hold nothing; False for records that cannot be read."""
    file = folder / NAME
    if not file.is_file():
        return True
    try:
        with closing(sqlite3.connect(file)) as db:
            return not any(
                db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()  # noqa: S608  our own names
                for table in ("collections", "keys", "queries")
            )
    except sqlite3.Error:
        return False


def contents(file: Path) -> dict[str, int]:
    """The number of rows in the main tables of a backup."""
    with closing(_read_only(file)) as db:
        return {
            table: int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608  our own names
            for table in ("collections", "documents", "chunks", "keys")
        }


@contextmanager
def _private(file: Path) -> Iterator[None]:
    """Create a temporary file that others can never read; it is deleted unless it was renamed."""
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _restored(file: Path, replaced: Path) -> AuditEntry:
    """The record of a restore, with the newest one of the log that is replaced: it is kept aside with the rest."""
    details: dict[str, int | str] = {}
    if replaced.is_file():
        with suppress(sqlite3.Error), closing(sqlite3.connect(replaced)) as db:
            newest = audit.head(db)
            details = {"replaced_seq": newest.seq, "replaced_hash": newest.hash}
    return AuditEntry(action="records.restored", object="file", name=str(file.resolve()), details=details)


def _replace(folder: Path, fresh: Path) -> Path | None:
    """Rename the new records into place and keep the old ones aside. At every moment one of the two is there."""
    current = folder / NAME
    aside = None
    # The index is deleted first: beside other records it would be wrong, and records are complete without one.
    (folder / "index" / "CURRENT").unlink(missing_ok=True)
    shutil.rmtree(folder / "index", ignore_errors=True)
    if current.exists():
        aside = folder / f"{NAME}.before-restore-{time.strftime('%Y%m%d-%H%M%S')}"
        checkpointed = _checkpoint(current)
        for log in (current.with_name(f"{NAME}{suffix}") for suffix in ("-wal", "-shm")):
            if log.exists() and checkpointed:
                raise Conflict(f"{current} is open in another process. Stop it, and run this again.")
            if log.exists():
                log.replace(log.with_name(log.name.replace(NAME, aside.name)))
        os.link(current, aside)
    fresh.replace(current)
    sync_file(folder)
    return aside


def _checkpoint(file: Path) -> bool:
    """Write the write-ahead log into the file and delete it; False if the file is too damaged."""
    try:
        with closing(sqlite3.connect(file)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:
        return False
    return True


def _read_only(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)
