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
from anabranch.knowledge.records import audit, documents, erasures
from anabranch.knowledge.records.database import NAME, Database, migrate
from anabranch.knowledge.records.encryption import Decryption, Encryption, is_encrypted
from anabranch.knowledge.records.schema import MIGRATIONS

PLAIN = ".decrypted-backup-"
TABLES = {"facts", "collections", "documents", "chunks", "embeddings", "jobs", "keys"}


def back_up(database: Database, file: Path, encryption: Encryption = Encryption()) -> dict[str, int]:  # noqa: B008  frozen
    """Copy the records into a file while they are in use; the file appears when it is complete. Returns the number of
    rows in the main tables."""
    encryption.check()
    database.writing(lambda db: erasures.note_backup(db, file))
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with _private(beside):
            counts = _copy_encrypted(database, beside, encryption) if encryption else _copy(database, beside)
            sync_file(beside)
            beside.replace(file)
            sync_file(file.resolve().parent)
            return counts
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{file} cannot be written ({getattr(error, 'strerror', error)}).") from None


def _copy(database: Database, target: Path) -> dict[str, int]:
    database.backup(target)
    return contents(target)


def _copy_encrypted(database: Database, target: Path, encryption: Encryption) -> dict[str, int]:
    """The copy that is encrypted is beside the records: what is not encrypted is not written anywhere else."""
    with _plain_file(database.path.parent) as plain:
        counts = _copy(database, plain)
        with plain.open("rb") as source, target.open("wb") as encrypted:
            encryption.encrypt(source, encrypted)
    return counts


@contextmanager
def readable(file: Path, decryption: Decryption, folder: Path) -> Iterator[Path]:
    """The backup, or for an encrypted one a decrypted copy beside the records, which is deleted afterwards."""
    if not is_encrypted(file):
        yield file
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _plain_file(folder) as plain:
        with plain.open("wb") as target:
            decryption.decrypt(file, target)
        yield plain


@contextmanager
def _plain_file(folder: Path) -> Iterator[Path]:
    """A temporary file in the data folder. What a killed process has left there is deleted."""
    for left in folder.glob(f"{PLAIN}*"):
        if not _is_running(left.name.removeprefix(PLAIN)):
            left.unlink(missing_ok=True)
    plain = folder / f"{PLAIN}{os.getpid()}"
    with _private(plain):
        yield plain


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return int(process) != os.getpid()


def restore(folder: Path, file: Path, name: Path | None = None) -> Path | None:
    """Replace the records in a folder with a backup, whose name is another if it was decrypted; returns where the old
    ones are kept. The caller holds the lock."""
    name = name or file
    fresh = folder / f"{NAME}.restoring"
    fresh.unlink(missing_ok=True)
    try:
        with _private(fresh):
            with closing(_read_only(file)) as source, closing(sqlite3.connect(fresh, isolation_level=None)) as copy:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
                migrate(copy)
                documents.forget_indexed(copy)
                audit.append(copy, _restored(name, folder / NAME))
            sync_file(fresh)
            return _replace(folder, fresh)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{name} cannot be restored into {folder} ({error}).") from None


def validate(file: Path, name: Path | None = None) -> None:
    """Raises ConfigurationError unless the file, whose name is another if it was decrypted, is an undamaged backup of a
    supported version."""
    name = name or file
    try:
        with closing(_read_only(file)) as db:
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
