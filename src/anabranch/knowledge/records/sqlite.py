"""The records in a SQLite file."""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.disk import is_nearly_full, reserve_released
from anabranch.knowledge.records.database import DiskFull, StaleSnapshot, StoreFailed
from anabranch.knowledge.records.schema import MIGRATIONS
from anabranch.policies.fair_threads import FairThreads

T = TypeVar("T")

NAME = "records.sqlite"
BUSY_S = 10.0
RETRIES = 3
RETRY_S = 0.1
READERS = 4
SNAPSHOTS = 5
# A backup copies so many at a time.
PAGES = 1_000
# A checkpoint waits for BUSY_S each time.
CHECKPOINTS = 3
# With less free space, an input/output error is taken for that of a full disk.
FULL_BYTES = 256 * 1024
# The bytes of the log for each byte that is written, and what other tables write meanwhile.
LOGGED = 1.02
SLACK_BYTES = 512 * 1024


class SqliteSession(sqlite3.Connection):
    """A connection to SQLite."""

    kind: Literal["sqlite", "postgres"] = "sqlite"

    def reserve(self, table: str, count: int) -> int:
        """The first of so many keys in a row of a table whose keys are never used again."""
        row = self.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
        first = 1 + (0 if row is None else int(row[0]))
        last = (first + count - 1, table)
        if row is None:
            self.execute("INSERT INTO sqlite_sequence (seq, name) VALUES (?, ?)", last)
        else:
            self.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", last)
        return first

    def now(self) -> float:
        """The time of the database, in seconds since 1970."""
        return time.time()

    def size(self) -> int:
        """The bytes of the database on disk."""
        size, pages = (self.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count"))
        return int(size * pages)


class SqliteDatabase:
    """The records in a file, of which one transaction at a time writes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._local = threading.local()
        self._opened: list[SqliteSession] = []
        # Guards `_opened`, `_uses` and `_closed`; notified when nothing uses a connection any more.
        self._lock = threading.Condition()
        self._uses = 0
        self._closed = False
        # The last write failed like this; None if it did not.
        self._failure: StoreFailed | None = None
        self._locked_since = 0.0
        self._writer = FairThreads.of(1, "records-writer")
        self._readers = FairThreads.of(READERS, "records-reader")

    @classmethod
    def open(cls, folder: Path) -> "SqliteDatabase":
        """Open the records in a folder; create or migrate them if needed."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            database = cls(folder)
            database.path.touch(mode=0o600)  # the folder may be readable by others
            try:
                with database._connection() as connection:
                    migrate(connection)
            except sqlite3.OperationalError:  # on a full disk a process that starts needs some space
                if not is_nearly_full(folder, FULL_BYTES):
                    raise
                with reserve_released(folder), database._connection() as connection:
                    migrate(connection)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"AGGREGATOR_DATA_DIR: the records in {folder} cannot be opened ({error}). Check who may read and "
                "write them, restore a backup (anabranch restore), or set another folder."
            ) from None
        return database

    async def read(self, work: Callable[[SqliteSession], T]) -> T:
        return await self._readers.run(self.reading, work)

    def reading(self, work: Callable[[SqliteSession], T]) -> T:
        """Read in the calling thread, in one snapshot; in a new one if `work` raises StaleSnapshot."""
        with self._connection() as connection:
            for _ in range(SNAPSHOTS):
                try:
                    with _transaction(connection, "BEGIN"):
                        return work(connection)
                except StaleSnapshot:
                    continue
                except sqlite3.OperationalError as error:
                    raise StoreFailed(f"The records cannot be read ({error}).") from error
        raise StoreFailed("The index is being replaced too often to search it; ask again.")

    async def write(self, work: Callable[[SqliteSession], T], *, deleting: bool = False, ordered: bool = True) -> T:
        return await self._writer.run(partial(self.writing, work, deleting=deleting, ordered=ordered))

    def writing(self, work: Callable[[SqliteSession], T], *, deleting: bool = False, ordered: bool = True) -> T:  # noqa: ARG002
        """Write in the calling thread: all or nothing, and on disk when this returns. If the disk is full, what deletes
        may use the reserve."""
        try:
            return self._written(work)
        except DiskFull:
            if not deleting:
                raise
        with reserve_released(self.path.parent):
            done = self._written(work, sparing=True)
            with self._connection() as connection, suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # its space is the reserve's again
            return done

    def _written(self, work: Callable[[SqliteSession], T], *, sparing: bool = False) -> T:
        with self._connection() as connection:
            for attempt in range(RETRIES + 1):
                try:
                    spared = _little_written(connection) if sparing else nullcontext()
                    with spared, _transaction(connection, "BEGIN IMMEDIATE"):
                        done = work(connection)
                except sqlite3.OperationalError as error:
                    if attempt == RETRIES or error.sqlite_errorcode not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                        self._failure = self._failed(error)
                        raise self._failure from error
                    time.sleep(RETRY_S)
                else:
                    self._failure = None
                    return done
        raise AssertionError

    def _failed(self, error: sqlite3.OperationalError) -> StoreFailed:
        is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL or (
            error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR and is_nearly_full(self.path.parent, FULL_BYTES)
        )
        kind = DiskFull if is_full else StoreFailed
        return kind(f"The records cannot be written ({error}).")

    def check_writable(self) -> None:
        """Raise StoreFailed if the records cannot be written now. Nothing is written, unless the last write has
        failed."""
        if not os.access(self.path, os.R_OK | os.W_OK) or not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise StoreFailed(f"{self.path} may not be written.")
        if self._failure is not None:
            self.writing(lambda db: db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}"))
        try:
            with closing(connect_to(self.path, timeout=0)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise StoreFailed(f"The records cannot be written ({error}).") from error
            self._locked_since = self._locked_since or time.monotonic()
            if time.monotonic() - self._locked_since > BUSY_S:
                raise StoreFailed("Another process has locked the records for too long.") from error
        else:
            self._locked_since = 0.0

    def backup(self, copy: SqliteSession) -> None:
        """Copy the records while they are in use."""
        # Outside of a transaction, each write of another connection would make SQLite begin again.
        with self._connection() as connection, _transaction(connection, "BEGIN"):
            _version(connection)  # the first statement that reads takes the snapshot
            copy_database(connection, copy)

    def bytes_to_copy(self) -> int:
        """How large a copy of the records is."""
        with self._connection() as connection:
            return connection.size()

    def bytes_to_compact(self) -> int:
        """How much free space `compact` needs: as much as is in use, and what the log adds."""
        with self._connection() as connection:
            size, pages, unused = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_size", "page_count", "freelist_count")
            )
        return int(size * (pages - unused) * LOGGED) + SLACK_BYTES

    def compact(self) -> int:
        """Rewrite the whole file, so that no page holds anything of a deleted row, and empty the write-ahead log;
        returns by how many bytes the two became smaller. Readers continue, writers wait."""
        before = self._bytes()
        try:
            with self._connection() as connection:
                _vacuum(connection)
        except sqlite3.OperationalError as error:
            raise StoreFailed(f"The records cannot be rewritten ({error}).") from error
        return max(0, before - self._bytes())

    def _bytes(self) -> int:
        files = (self.path, self.path.with_name(f"{NAME}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        self._writer.close()
        self._readers.close()
        with self._lock:
            self._closed = True
            # A thread whose caller was cancelled may still read: SQLite crashes if its connection is closed.
            self._lock.wait_for(lambda: not self._uses)
            for connection in self._opened:
                with suppress(sqlite3.Error):
                    connection.close()
            self._opened.clear()

    @contextmanager
    def _connection(self) -> Iterator[SqliteSession]:
        """The calling thread's connection, which is not closed meanwhile."""
        with self._lock:
            if self._closed:
                raise StoreFailed("The records are closed.")
            self._uses += 1
        try:
            if not hasattr(self._local, "connection"):
                self._local.connection = connect(self.path)
                with self._lock:
                    self._opened.append(self._local.connection)
            yield self._local.connection
        finally:
            with self._lock:
                self._uses -= 1
                if not self._uses:
                    self._lock.notify_all()


@contextmanager
def _little_written(connection: SqliteSession) -> Iterator[None]:
    """What is deleted is not overwritten in its pages: those would be written to the log first. The erasure that
    follows a deletion rewrites the file."""
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA wal_checkpoint(RESTART)")  # the log begins again in the space that it has
    connection.execute("PRAGMA secure_delete = FAST")
    try:
        yield
    finally:
        connection.execute("PRAGMA secure_delete = ON")


def _vacuum(connection: SqliteSession) -> None:
    connection.execute("PRAGMA wal_checkpoint(RESTART)")  # the log begins again in the space that it has
    connection.execute("VACUUM")
    # A reader of an older snapshot holds the log for the time of its query.
    for _ in range(CHECKPOINTS):
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not busy:
            return
        time.sleep(RETRY_S)
    raise sqlite3.OperationalError("the write-ahead log is in use")


def connect_to(target: Path | str, *, uri: bool = False, timeout: float = BUSY_S) -> SqliteSession:
    """A connection without settings of ours, and without transactions of its own."""
    return sqlite3.connect(
        target, uri=uri, timeout=timeout, isolation_level=None, check_same_thread=False, factory=SqliteSession
    )


def connect(path: Path) -> SqliteSession:
    connection = connect_to(path)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = OFF")  # documents.remove and collections.delete delete dependent rows
    connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten in its page
    connection.execute("PRAGMA cache_size = -16000")
    connection.execute("PRAGMA mmap_size = 17179869184")
    return connection


@contextmanager
def read_only(file: Path) -> Iterator[SqliteSession]:
    """A snapshot of a records file, which is neither changed nor migrated. StoreFailed if it cannot be read."""
    # Without a log nobody has it open: then SQLite needs no files beside it.
    access = "mode=ro" if file.with_name(f"{file.name}-wal").exists() else "immutable=1"
    try:
        with closing(connect_to(f"{file.resolve().as_uri()}?{access}", uri=True)) as reader:
            reader.row_factory = sqlite3.Row
            reader.execute("BEGIN")
            yield reader
    except sqlite3.Error as error:
        raise StoreFailed(f"{file} cannot be read ({error}).") from error


def copy_database(source: SqliteSession, target: SqliteSession) -> None:
    """SQLite's online backup. A signal interrupts it."""
    source.backup(target, pages=PAGES, progress=_copied)


def _copied(_status: int, _remaining: int, _pages: int) -> None:
    """Called after each step: Python handles signals then."""


def migrate(connection: SqliteSession, migrations: Sequence[str] = MIGRATIONS) -> None:
    if _version(connection) == len(migrations):
        return
    with _transaction(connection, "BEGIN IMMEDIATE"):
        version = _version(connection)
        if version > len(migrations):
            raise ConfigurationError(
                f"The records have schema version {version}, written by a newer Anabranch; "
                f"this one supports version {len(migrations)}. Update Anabranch."
            )
        statement = ""
        for line in "\n".join(migrations[version:]).splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):  # one by one, because executescript would commit
                connection.execute(statement)
                statement = ""
        connection.execute(f"PRAGMA user_version = {len(migrations)}")


def _version(connection: SqliteSession) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


@contextmanager
def _transaction(connection: SqliteSession, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
