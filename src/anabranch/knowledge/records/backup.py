"""Backup and restore of the records with SQLite's online backup."""

import fcntl
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.knowledge.durable_files import sync_file
from anabranch.knowledge.records import audit, documents, erasures
from anabranch.knowledge.records.database import NAME, PAGES, Connection, Database, migrate, read_only
from anabranch.knowledge.records.encryption import Decryption, Encryption, is_encrypted
from anabranch.knowledge.records.schema import MIGRATIONS

PLAIN = ".decrypted-backup-"
FORMAT_AT = 18
TABLES = {"facts", "collections", "documents", "chunks", "embeddings", "jobs", "keys"}


def back_up(database: Database, file: Path, encryption: Encryption = Encryption()) -> dict[str, int]:  # noqa: B008  frozen
    """Copy the records into a file while they are in use; the file appears when it is complete. Returns the number of
    rows in the main tables."""
    encryption.check()
    beside = file.with_name(erasures.partial_name(file))
    for path in (file, beside):
        database.writing(partial(erasures.note_backup, path=path))
    try:
        with _partial(beside):
            counts = _copy_encrypted(database, beside, encryption) if encryption else _copy(database, beside)
            sync_file(beside)
            beside.replace(file)
            sync_file(file.resolve().parent)
            return counts
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{file} cannot be written ({getattr(error, 'strerror', error)}).") from None


def _copy(database: Database, target: Path) -> dict[str, int]:
    with closing(_unlocked(target)) as copy:
        database.backup(copy)
    with target.open("r+b") as written:
        _without_log(written)
    with read_only(target) as copy:
        return contents(copy)


def _copy_encrypted(database: Database, target: Path, encryption: Encryption) -> dict[str, int]:
    """The copy that is encrypted is beside the records: what is not encrypted is not written anywhere else."""
    with _unnamed(database.path.parent) as (plain, writer, reader), target.open("wb") as encrypted:
        database.backup(writer)
        _without_log(plain)
        encryption.encrypt(plain, encrypted)
        return contents(reader)


@contextmanager
def readable(file: Path, decryption: Decryption, folder: Path) -> Iterator[Connection]:
    """A snapshot of the backup, or for an encrypted one of a decrypted copy beside the records."""
    if not is_encrypted(file):
        with read_only(file) as db:
            yield db
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _unnamed(folder) as (plain, _, reader):
        decryption.decrypt(file, plain)
        _without_log(plain)
        yield reader


@contextmanager
def _unnamed(folder: Path) -> Iterator[tuple[BinaryIO, Connection, Connection]]:
    """A temporary file, with a connection that writes it as a database and one that reads it then. It has lost its name
    before anything is written: however the process ends, nothing is left. SQLite opens files only by name."""
    remove_plain(folder)
    path = folder / f"{PLAIN}{os.getpid()}-{threading.get_ident()}"
    try:
        with (
            open(path, "w+b", opener=_private) as plain,
            closing(_unlocked(path)) as writer,
            closing(_unlocked(path)) as reader,
        ):
            path.unlink()
            yield plain, writer, reader
    finally:
        path.unlink(missing_ok=True)


def _without_log(database: BinaryIO) -> None:
    """Set the file format in SQLite's header to that without a write-ahead log, which a copy does not have."""
    database.flush()
    database.seek(FORMAT_AT)
    if database.read(2) == b"\2\2":
        database.seek(FORMAT_AT)
        database.write(b"\1\1")
        database.flush()
    database.seek(0)


def remove_plain(folder: Path) -> None:
    """Delete decrypted copies that an earlier version has left when it was killed; ours have names only while they are
    empty."""
    for left in folder.glob(f"{PLAIN}*"):
        with suppress(FileNotFoundError):
            if left.stat().st_size:
                left.unlink()


@contextmanager
def _partial(file: Path) -> Iterator[None]:
    """Hold the temporary file of a backup, empty, and delete it unless it was renamed. What a killed backup of the same
    name has left is overwritten."""
    while True:
        with open(file, "ab", opener=_private) as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(f"Another backup of this name is running: it writes {file}.") from None
            if not file.exists() or not os.path.samestat(file.stat(), os.fstat(held.fileno())):
                continue  # the other one has just ended
            try:
                held.truncate(0)
                yield
                return
            finally:
                if file.exists() and os.path.samestat(file.stat(), os.fstat(held.fileno())):
                    file.unlink()


def _private(path: str, flags: int) -> int:
    """Opens a file that others can never read."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _unlocked(file: Path) -> Connection:
    """A database that nobody else uses, without a journal: an incomplete one is deleted."""
    db = sqlite3.connect(f"{file.resolve().as_uri()}?mode=rw&nolock=1", uri=True, isolation_level=None)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = OFF")
    return db


def restore(folder: Path, source: Connection, name: Path) -> Path | None:
    """Replace the records in a folder with a backup; returns where the old ones are kept. The caller holds the lock."""
    fresh = folder / f"{NAME}.restoring"
    fresh.unlink(missing_ok=True)
    try:
        with _deleted_unless_renamed(fresh):
            with closing(sqlite3.connect(fresh, isolation_level=None)) as copy:
                source.backup(copy, pages=PAGES, progress=lambda *_: None)
                copy.execute("PRAGMA journal_mode = DELETE")
                migrate(copy)
                documents.forget_indexed(copy)
                audit.append(copy, _restored(name, folder / NAME))
            sync_file(fresh)
            return _replace(folder, fresh)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{name} cannot be restored into {folder} ({error}).") from None


def validate(db: Connection, name: Path) -> None:
    """Raises ConfigurationError unless it is an undamaged backup of a supported version."""
    try:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version < 1 or not tables >= TABLES:
            raise ConfigurationError(f"{name} is a database, but not one of Anabranch's.")
        if version > len(MIGRATIONS):
            raise ConfigurationError(
                f"{name} is of schema version {version}, written by a newer Anabranch. Update Anabranch."
            )
        if db.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
            raise ConfigurationError(f"{name} is damaged.")
    except sqlite3.Error as error:
        raise ConfigurationError(f"{name} is not a backup, or a damaged one ({error}).") from None


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


def contents(db: Connection) -> dict[str, int]:
    """The number of rows in the main tables of a backup."""
    return {
        table: int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608  our own names
        for table in ("collections", "documents", "chunks", "keys")
    }


@contextmanager
def _deleted_unless_renamed(file: Path) -> Iterator[None]:
    """Create a temporary file that others can never read."""
    open(file, "xb", opener=_private).close()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _restored(file: Path, replaced: Path) -> AuditEntry:
    """The record of a restore, with the newest one of the log that is replaced: it is kept aside with the rest."""
    details: dict[str, int | str] = {}
    if replaced.is_file():
        with suppress(sqlite3.Error, audit.AuditDamaged), closing(sqlite3.connect(replaced)) as db:
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
