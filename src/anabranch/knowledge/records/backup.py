"""Backup and restore of the records with SQLite's online backup."""

import errno
import fcntl
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.knowledge.disk import LEAST_FREE, NO_SPACE, free_bytes
from anabranch.knowledge.durable_files import regular, sync_file
from anabranch.knowledge.records import audit, checksum, documents, erasures
from anabranch.knowledge.records.database import StoreFailed
from anabranch.knowledge.records.encryption import Decryption, Encryption, is_encrypted
from anabranch.knowledge.records.schema import MIGRATIONS
from anabranch.knowledge.records.sqlite import (
    NAME,
    SqliteDatabase,
    SqliteSession,
    connect_to,
    copy_database,
    migrate,
    read_only,
)

PLAIN = ".decrypted-backup-"
RESTORING = f"{NAME}.restoring"
MAGIC = b"SQLite format 3\0"
FORMAT_AT = 18
TABLES = {"facts", "collections", "documents", "chunks", "embeddings", "jobs", "keys"}
USE_ANOTHER = "Copy it again from where it is kept, or use another backup."


class Backup(NamedTuple):
    """A backup in which no damage was found. Without a checksum (its own, or that of encryption), only damage that
    SQLite notices is found."""

    db: SqliteSession
    has_checksum: bool


def back_up(
    database: SqliteDatabase,
    file: Path,
    encryption: Encryption = Encryption(),  # noqa: B008  frozen
    *,
    replace: bool = True,
) -> dict[str, int]:
    """Copy the records into a file while they are in use; the file appears when it is complete. Returns the number of
    rows in the main tables."""
    encryption.check()
    file = Path(os.path.realpath(file))  # a link stays one
    beside = file.with_name(erasures.partial_name(file))
    began = time.time()
    for path in (file, beside):
        database.writing(partial(erasures.note_backup, path=path, made_at=began), deleting=True)
    size = database.bytes_to_copy()
    try:
        counts = _write(database, file, beside, encryption, size, replace=replace)
    except FileExistsError:
        raise (_running(beside) if replace else ConfigurationError(_already_exists(file))) from None
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{file} cannot be written ({_reason(error, size)}).") from None
    with suppress(StoreFailed):  # then it is taken for as old as the one that it has replaced
        database.writing(partial(erasures.note_backup, path=file, made_at=began, complete=True), deleting=True)
    return counts


def check_target(file: Path, folder: Path, *, replace: bool) -> None:
    """Raise ConfigurationError if no backup of the records in a folder can be written into this file."""
    target = Path(os.path.realpath(file))
    if os.path.lexists(target) and not target.is_file():
        raise ConfigurationError(f"{file} is no regular file, but a folder, a pipe or a device. Name another file.")
    if os.path.lexists(file) and not replace:
        raise ConfigurationError(_already_exists(file))
    if target.parent == folder.resolve() and (target.name == NAME or target.name.startswith(f"{NAME}-")):
        raise ConfigurationError(f"{file} is the file of the records themselves. Name another file.")
    if not target.parent.is_dir():
        raise ConfigurationError(f"There is no folder {target.parent}. Create it, or name another file.")


def _already_exists(file: Path) -> str:
    return f"{file} exists already; --force replaces it."


def _reason(error: OSError | sqlite3.Error, needed: int) -> str:
    reason = str(getattr(error, "strerror", None) or error)
    is_full = (
        getattr(error, "errno", None) in NO_SPACE or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    )
    return f"{reason}: it takes {max(1, needed // 10**6):,} MB" if is_full else reason


def _write(
    database: SqliteDatabase, file: Path, beside: Path, encryption: Encryption, size: int, *, replace: bool
) -> dict[str, int]:
    """Write a backup of about this size; returns the number of rows in the main tables."""
    is_nameless = _can_be_linked(beside)
    if encryption:
        appearing = _without_name if is_nameless else _with_name
        folder = database.path.parent  # nothing in clear is written anywhere else
        with appearing(file, beside, replace=replace) as target, _unnamed(folder) as (plain, writer, reader):
            counts = _copy(database, plain, writer, reader, folder)
            encryption.encrypt(plain, target)
    elif is_nameless and free_bytes(file.parent) > 2 * size + LEAST_FREE:
        # SQLite opens files only by name, and a file that has lost its name does not get another one.
        with _without_name(file, beside, replace=replace) as target, _unnamed(file.parent) as (plain, writer, reader):
            counts = _copy(database, plain, writer, reader, file.parent)
            _duplicate(plain, target)
    else:
        with _with_name(file, beside, replace=replace) as target, _connected(beside) as (writer, reader):
            counts = _copy(database, target, writer, reader, file.parent)
    return counts


def _copy(
    database: SqliteDatabase, file: BinaryIO, writer: SqliteSession, reader: SqliteSession, folder: Path
) -> dict[str, int]:
    """Copy the records into a file in a folder, with a checksum; returns the number of rows in the main tables."""
    try:
        database.backup(writer)
        _without_log(file)
        checksum.append(file)
        return contents(reader)
    except (OSError, sqlite3.Error) as error:
        reason = _reason(error, database.bytes_to_copy())
        raise ConfigurationError(f"The records cannot be copied into {folder} ({reason}).") from None


def _duplicate(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file, where the file system can without copying its blocks."""
    with suppress(AttributeError, OSError):
        while os.copy_file_range(source.fileno(), target.fileno(), 64 * checksum.BLOCK):
            pass
    shutil.copyfileobj(source, target, checksum.BLOCK)  # the rest


def _can_be_linked(beside: Path) -> bool:
    """Whether a file in this folder can be written without a name, and get one later."""
    try:
        with _nameless(beside.parent) as file:
            _remove_left(beside)
            _link(file, beside)
            beside.unlink()
    except (AttributeError, OSError):  # the platform or the file system has no O_TMPFILE, or there is no /proc
        return False
    return True


def _nameless(folder: Path) -> BinaryIO:
    return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600), "wb")


def _link(file: BinaryIO, path: Path) -> None:
    """Give a nameless file a name; FileExistsError if there is such a file."""
    # Only with a descriptor of a folder, which an absolute path does not need, does Python follow the link.
    os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno())


@contextmanager
def _without_name(file: Path, beside: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """A file that gets its name when it is whole, and on disk. However the process ends before, nothing is left."""
    with _nameless(file.parent) as target:
        yield target
        _sync(target)
        if replace:
            _link(target, beside)
            try:
                beside.replace(file)
            finally:
                beside.unlink(missing_ok=True)
        else:
            _link(target, file)
    sync_file(file.parent)


@contextmanager
def _with_name(file: Path, beside: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """The same where a file needs a name: a process that is killed leaves the file beside."""
    with _partial(beside) as target:
        yield target
        _sync(target)
        if not replace and os.path.lexists(file):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
        beside.replace(file)
    sync_file(file.parent)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def opened(file: Path, decryption: Decryption, folder: Path) -> Iterator[Backup]:
    """A snapshot of a backup, or for an encrypted one of a decrypted copy beside the records. ConfigurationError unless
    it is an undamaged backup of a supported version."""
    try:
        encrypted = is_encrypted(file)
        with open(file, "rb", opener=regular) as content:
            has_checksum = encrypted or _has_checksum(content, file)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({error.strerror}).") from None
    with _decrypted(file, decryption, folder) if encrypted else read_only(file) as db:
        _validate(db, file)
        yield Backup(db, has_checksum)


@contextmanager
def _decrypted(file: Path, decryption: Decryption, folder: Path) -> Iterator[SqliteSession]:
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            plain, _, reader = stack.enter_context(_unnamed(folder))
            decryption.decrypt(file, plain)
            _has_checksum(plain, file)
            _without_log(plain)
        except (OSError, sqlite3.Error) as error:
            reason = _reason(error, file.stat().st_size)
            raise ConfigurationError(f"{file} cannot be decrypted in {folder} ({reason}).") from None
        yield reader


def _has_checksum(content: BinaryIO, name: Path) -> bool:
    """Whether a backup ends with a checksum; ConfigurationError if it is not that of its content."""
    content.seek(0)
    if content.read(len(MAGIC)) != MAGIC:
        raise ConfigurationError(f"{name} is not a backup, or a damaged one: it is no SQLite database and no age file.")
    if not checksum.exists(content):
        return False
    if not checksum.matches(content):
        raise ConfigurationError(
            f"{name} is damaged: it does not end with the checksum of its content, so it was changed or cut short. "
            f"{USE_ANOTHER}"
        )
    return True


@contextmanager
def _unnamed(folder: Path) -> Iterator[tuple[BinaryIO, SqliteSession, SqliteSession]]:
    """A temporary file, with a connection that writes it as a database and one that reads it then. It has lost its name
    before anything is written: however the process ends, nothing is left. SQLite opens files only by name."""
    remove_plain(folder)
    path = folder / f"{PLAIN}{secrets.token_hex(8)}"
    try:
        with open(path, "x+b", opener=_private) as plain, _connected(path) as (writer, reader):
            path.unlink()
            yield plain, writer, reader
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _connected(path: Path) -> Iterator[tuple[SqliteSession, SqliteSession]]:
    with closing(_unlocked(path)) as writer, closing(_unlocked(path)) as reader:
        yield writer, reader


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


def remove_restoring(folder: Path) -> None:
    """Delete what a restore has left when it was killed. The caller holds the lock of the folder."""
    for left in folder.glob(f"{RESTORING}*"):
        left.unlink()


@contextmanager
def _partial(file: Path) -> Iterator[BinaryIO]:
    """A new temporary file, which is deleted unless it was renamed."""
    _remove_left(file)
    try:
        descriptor = _private(str(file), os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise _running(file) from None
    with os.fdopen(descriptor, "w+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield held
        finally:
            if file.exists() and os.path.samestat(file.stat(), os.fstat(held.fileno())):
                file.unlink()


def _remove_left(file: Path) -> None:
    """Delete what a killed backup of the same name has left."""
    with suppress(FileNotFoundError), open(file, "r+b", opener=regular) as left:
        try:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _running(file) from None
        file.unlink()


def _running(file: Path) -> Conflict:
    return Conflict(f"Another backup of this name is running: it writes {file}.")


def _private(path: str, flags: int) -> int:
    """Opens a file that others can never read."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _unlocked(file: Path) -> SqliteSession:
    """A database that nobody else uses, without a journal: an incomplete one is deleted."""
    db = connect_to(f"{file.resolve().as_uri()}?mode=rw&nolock=1", uri=True)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")
    return db


class Restored(NamedTuple):
    """`aside`: where the replaced records are kept; None if there were none. `repeated`: the erasures that the backup
    was lacking; None if they are not known."""

    aside: Path | None
    repeated: erasures.Repeated | None


def restore(folder: Path, source: SqliteSession, name: Path) -> Restored:
    """Replace the records in a folder with a backup. What was erased since is erased from it. The caller holds the
    lock."""
    fresh = folder / RESTORING
    try:
        remove_restoring(folder)
        with _deleted_unless_renamed(fresh) as file:
            with closing(_unlocked(fresh)) as copy:
                copy_database(source, copy)
            _without_log(file)
            with closing(_unlocked(fresh)) as copy:
                migrate(copy)
                documents.forget_indexed(copy)
                repeated = erasures.repeat(copy, folder / NAME)
                audit.append(copy, _restored(name, folder / NAME, repeated))
            os.fsync(file.fileno())
            return Restored(_replace(folder, fresh), repeated)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(
            f"{name} cannot be restored into {folder} ({_reason(error, name.stat().st_size)})."
        ) from None


def _validate(db: SqliteSession, name: Path) -> None:
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
        if (found := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise ConfigurationError(f"{name} is damaged ({found}). {USE_ANOTHER}")
    except sqlite3.Error as error:
        raise ConfigurationError(f"{name} is damaged ({error}). {USE_ANOTHER}") from None


def is_empty(folder: Path) -> bool:
    """Whether the records in a folder hold nothing; False for records that cannot be read."""
    file = folder / NAME
    if not file.is_file():
        return True
    try:
        with closing(connect_to(file)) as db:
            return not any(
                db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()  # noqa: S608  our own names
                for table in ("collections", "keys", "queries")
            )
    except sqlite3.Error:
        return False


def contents(db: SqliteSession) -> dict[str, int]:
    """The number of rows in the main tables of a backup."""
    return {
        table: int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608  our own names
        for table in ("collections", "documents", "chunks", "keys")
    }


@contextmanager
def _deleted_unless_renamed(path: Path) -> Iterator[BinaryIO]:
    """Create a temporary file that others can never read."""
    with open(path, "x+b", opener=_private) as file:
        try:
            yield file
        finally:
            path.unlink(missing_ok=True)


def _restored(file: Path, replaced: Path, repeated: erasures.Repeated | None) -> AuditEntry:
    """The record of a restore, with the newest one of the log that is replaced: it is kept aside with the rest."""
    details: dict[str, int | str] = {}
    if replaced.is_file():
        with suppress(sqlite3.Error, audit.AuditDamaged), closing(connect_to(replaced)) as db:
            newest = audit.head(db)
            details = {"replaced_seq": newest.seq, "replaced_hash": newest.hash}
    if repeated is not None and repeated.erasures:
        details["erasures"] = repeated.erasures
    return AuditEntry(action="records.restored", object="file", name=str(file.resolve()), details=details)


def _replace(folder: Path, fresh: Path) -> Path | None:
    """Rename the new records into place and keep the old ones aside. At every moment one of the two is there."""
    current = folder / NAME
    aside = _keep(current) if current.exists() else None
    # The index is deleted first: beside other records it would be wrong, and records are complete without one.
    (folder / "index" / "CURRENT").unlink(missing_ok=True)
    shutil.rmtree(folder / "index", ignore_errors=True)
    fresh.replace(current)
    sync_file(folder)
    return aside


def _keep(current: Path) -> Path:
    """Give the records a second name, which they keep."""
    name = f"{NAME}.before-restore-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (current.with_name(f"{name}-{number}" if number else name) for number in count())
    aside = next(path for path in names if not path.exists())
    checkpointed = _checkpoint(current)
    for log in (current.with_name(f"{NAME}{suffix}") for suffix in ("-wal", "-shm")):
        if log.exists() and checkpointed:
            raise Conflict(f"{current} is open in another process. Stop it, and run this again.")
        if log.exists():
            log.replace(log.with_name(log.name.replace(NAME, aside.name)))
    os.link(current, aside)
    return aside


def _checkpoint(file: Path) -> bool:
    """Write the write-ahead log into the file and delete it; False if the file is too damaged."""
    try:
        with closing(connect_to(file)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:
        return False
    return True
