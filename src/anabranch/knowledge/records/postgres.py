"""The records in PostgreSQL."""

import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

import psycopg
from psycopg import RawCursor, conninfo
from psycopg.adapt import Dumper, Loader
from psycopg.pq import TransactionStatus
from psycopg.types.string import StrDumperUnknown

from anabranch.domain.errors import ConfigurationError, NotFound
from anabranch.knowledge.records.database import DiskFull, StaleSnapshot, StoreFailed
from anabranch.knowledge.records.dialect import translated
from anabranch.knowledge.records.postgres_schema import MIGRATIONS, SINCE
from anabranch.policies.fair_threads import FairThreads

T = TypeVar("T")

READERS = 8
# Connections of a process: of the readers, of the writer, and of threads of others, such as those that index.
CONNECTIONS = READERS + 8
SNAPSHOTS = 5
# Locks of transactions: of the writers, and of the migrations.
WRITING, MIGRATING = 0x616E6162, 0x616E6163
# For so long a failed transaction is tried again: a standby is promoted, or a server starts again.
PATIENCE_S = 15.0
RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
OPTIONS = {
    "connect_timeout": "3",
    "application_name": "anabranch",
    "tcp_user_timeout": "10000",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
}
STATEMENT_MS, LOCK_MS, IDLE_MS = 30_000, 20_000, 60_000
# No time-out of the server ends a commit that waits for a synchronous standby.
COMMIT_S = 30.0
VERSION_FACT = "schema_version"
NEWEST = SINCE + len(MIGRATIONS) - 1
READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# What another transaction has caused, or a server that ends, is a standby by now, or is not there.
TRANSIENT = ("40001", "40P01", "55P03", "57P01", "57P02", "57P03", "25006", "53300")
DISK_FULL = "53100"
# After so long without a reply it is asked whether the server takes connections at all.
SILENT_S = 5.0
# The details of errors of a server that cannot be reached.
UNREACHABLE: Mapping[str, str] = {"reason": "records_unreachable"}


class _TextDumper(StrDumperUnknown):
    """PostgreSQL's texts have no NUL."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in obj else obj)


class _NumberLoader(Loader):
    """Sums of integers are integers."""

    def load(self, data: Any) -> float:
        number = bytes(data).decode()
        return int(number) if number.lstrip("-").isdigit() else float(number)


class _TruthDumper(Dumper):
    """Truth values are 0 and 1."""

    oid = psycopg.adapters.types["int2"].oid

    def dump(self, obj: bool) -> bytes:
        return b"1" if obj else b"0"


@lru_cache(maxsize=500)
def _row_type(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The rows of a result with these columns: tuples that also have names, as those of SQLite."""
    places = {name: at for at, name in reversed(list(enumerate(names)))}

    class Named(tuple[Any, ...]):
        __slots__ = ()

        def __getitem__(self, column: Any) -> Any:
            return tuple.__getitem__(self, places[column] if isinstance(column, str) else column)

        def keys(self) -> tuple[str, ...]:
            return names

    return Named


def _rows(cursor: "psycopg.Cursor[Any]") -> Callable[[Sequence[Any]], Any]:
    return _row_type(tuple(one.name for one in cursor.description or ()))


class _Connection(psycopg.Connection[Any]):
    """A connection that fails when its server says nothing and takes no new connection either: it is frozen. What
    statements may take at most only a server that runs can know."""

    target = ""
    # After so long it is given up, whatever the server says; None: it has time-outs of its own.
    given_up_s: float | None = None

    def wait(self, gen: Any, *options: Any, **more: Any) -> Any:
        return super().wait(self._watched(gen), *options, **more)

    def _watched(self, replies: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        began = asked_at = time.monotonic()
        try:
            wanted = next(replies)
            while True:
                heard = yield wanted
                if not heard and self.given_up_s is not None and time.monotonic() - began > self.given_up_s:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("a commit takes too long; does it wait for a standby?")
                if not heard and time.monotonic() - asked_at > SILENT_S:
                    self._check_server()
                    asked_at = time.monotonic()
                wanted = replies.send(heard)
        except StopIteration as done:
            return done.value

    def _check_server(self) -> None:
        host, port = self.info.host, self.info.port
        try:
            psycopg.connect(
                conninfo.make_conninfo(self.target, host=host, port=port, target_session_attrs="any")
            ).close()
        except psycopg.errors.ConnectionTimeout as error:
            self.pgconn.finish()  # whether a commit has arrived is not known
            raise psycopg.OperationalError("the server does not answer") from error
        except psycopg.Error:
            return  # it answers, or has ended: then this connection has, too


class PostgresSession:
    """A connection within a transaction."""

    kind: Literal["sqlite", "postgres"] = "postgres"

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> "psycopg.Cursor[Any]":
        statement = translated(sql)
        return self._cursor().execute(statement.sql, statement.values(values) if statement.slots else None)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> "psycopg.Cursor[Any]":
        statement, cursor = translated(sql), self._cursor()
        cursor.executemany(statement.sql, [statement.values(tuple(row)) for row in rows])
        return cursor

    def reserve(self, table: str, count: int) -> int:
        """The first of so many keys in a row of a table whose keys are never used again."""
        [(last,)] = self.execute(
            "INSERT INTO reserved VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET last = reserved.last + excluded.last RETURNING last",
            (table, count),
        ).fetchall()
        return int(last) - count + 1

    def now(self) -> float:
        """The time of the database, in seconds since 1970."""
        [(now,)] = self._cursor().execute("SELECT extract(epoch FROM clock_timestamp())").fetchall()
        return float(now)

    def size(self) -> int:
        """The bytes of the database on disk."""
        [(size,)] = self._cursor().execute("SELECT pg_database_size(current_database())").fetchall()
        return int(size)

    def _cursor(self) -> "psycopg.Cursor[Any]":
        return RawCursor(self._connection, row_factory=_rows)


class PostgresDatabase:
    """The records in a PostgreSQL server, or in the one of several that can be written. The transactions of all
    processes that write in order hold a lock."""

    def __init__(self, url: str) -> None:
        self._target = target(url)
        # Guards what follows; notified when a connection is given back.
        self._lock = threading.Condition()
        self._idle: list[_Connection] = []
        self._used = 0
        self._closed = False
        self._failure: StoreFailed | None = None
        # Since when the server cannot be reached; None while it can.
        self._lost_at: float | None = None
        self._writer = FairThreads.of(1, "records-writer")
        self._readers = FairThreads.of(READERS, "records-reader")

    @classmethod
    def open(cls, url: str, *, as_they_are: bool = False) -> "PostgresDatabase":
        """Connect to the records; unless they are to be opened as they are, create or migrate them if needed."""
        database = cls(url)
        try:
            with database._connection() as connection:
                if not as_they_are:
                    migrate(connection)
                elif not _known_version(connection):
                    raise NotFound("The database of AGGREGATOR_DATABASE_URL has no records yet; a server makes them.")
        except (psycopg.Error, StoreFailed) as error:
            database.close()
            raise ConfigurationError(
                f"AGGREGATOR_DATABASE_URL: the records cannot be opened ({reason_of(error)}). Check that PostgreSQL "
                "runs there, that the database exists, and that its user may create tables in it.",
                **(UNREACHABLE if isinstance(error, psycopg.Error) and _is_lost(error) else {}),
            ) from None
        except BaseException:
            database.close()
            raise
        return database

    async def read(self, work: Callable[[PostgresSession], T]) -> T:
        return await self._readers.run(self.reading, work)

    def reading(self, work: Callable[[PostgresSession], T]) -> T:
        """Read in the calling thread, in one snapshot; in a new one if `work` raises StaleSnapshot."""

        def read() -> T:
            for _ in range(SNAPSHOTS):
                with self._connection() as connection, suppress(StaleSnapshot):
                    return _in_transaction(connection, READ, work)
            raise StoreFailed("The index is being replaced too often to search it; ask again.")

        return self._tried(read, "read")

    async def write(self, work: Callable[[PostgresSession], T], *, deleting: bool = False, ordered: bool = True) -> T:
        return await self._writer.run(partial(self.writing, work, deleting=deleting, ordered=ordered))

    def writing(self, work: Callable[[PostgresSession], T], *, deleting: bool = False, ordered: bool = True) -> T:  # noqa: ARG002
        """Write in the calling thread: all or nothing, and on disk when this returns."""

        def locked(db: PostgresSession) -> T:
            if ordered:
                db.execute("SELECT pg_advisory_xact_lock(?)", (WRITING,))
            return work(db)

        def write() -> T:
            with self._connection() as connection:
                return _in_transaction(connection, "BEGIN", locked)

        try:
            done = self._tried(write, "written")
        except StoreFailed as error:
            self._failure = error
            raise
        self._failure = None
        return done

    def _tried(self, work: Callable[[], T], what: str) -> T:
        """The result of a transaction, which is tried again where another one or a failover has ended it. While the
        server is down for longer, each fails at once: those who wait would keep the threads from others."""
        began, waits = time.monotonic(), iter(RETRY_S)
        while True:
            try:
                done = work()
            except Unknown as error:
                raise StoreFailed(f"The connection was lost while it was decided whether this is {what}.") from error
            except psycopg.Error as error:
                self._lost_at = (self._lost_at or time.monotonic()) if _is_lost(error) else None
                if not _is_transient(error) or time.monotonic() > (self._lost_at or began) + PATIENCE_S:
                    raise _failed(error, what) from error
            else:
                self._lost_at = None
                return done
            time.sleep(next(waits, RETRY_S[-1]))

    def check_writable(self) -> None:
        """Raise StoreFailed if the records cannot be written now."""
        has_idle = bool(self._idle)
        try:
            with self._connection() as connection:
                row = connection.execute("SELECT current_setting('transaction_read_only') = 'on'").fetchone()
        except psycopg.Error as error:
            if not (has_idle and _is_lost(error)):
                raise _failed(error, "written") from error
            self.check_writable()  # that connection was from before; now there are none of those
            return
        if row is None or row[0]:
            raise StoreFailed("The records cannot be written: the database is a standby, or can only be read.")
        if self._failure is not None:
            self.writing(lambda db: db.execute("UPDATE reserved SET last = last WHERE name = ''"), ordered=False)

    def bytes_to_compact(self) -> int:
        """How much free space in the data folder `compact` needs."""
        return 0

    def compact(self) -> int:
        """Free the space of deleted rows for others; returns 0: the files do not become smaller."""
        try:
            with self._connection() as connection:
                connection.execute("SET statement_timeout = 0")
                try:
                    connection.execute("VACUUM")
                finally:
                    with suppress(psycopg.Error):
                        connection.execute(f"SET statement_timeout = {STATEMENT_MS}")
        except psycopg.Error as error:
            raise _failed(error, "rewritten") from error
        return 0

    def close(self) -> None:
        self._writer.close()
        self._readers.close()
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._used)
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """A connection that no other thread uses meanwhile; at most CONNECTIONS at once."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed or self._used < CONNECTIONS)
            if self._closed:
                raise StoreFailed("The records are closed.")
            self._used += 1
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None or connection.closed:
                connection = _connect(self._target)
            yield connection
        except psycopg.OperationalError:
            # The server may be another one by now: none of the others is used again either.
            with self._lock:
                stale, self._idle = self._idle, []
            for one in (*stale, *(() if connection is None else (connection,))):
                one.close()
            raise
        finally:
            with self._lock:
                self._used -= 1
                if connection is not None and not connection.closed:
                    self._idle.append(connection)
                self._lock.notify_all()


class Unknown(psycopg.Error):
    """The connection was lost after a commit was sent."""


PORTS = re.compile(r"[0-9,]*")
WRITTEN_SO = (
    "Write it as postgresql://USER:PASSWORD@HOST:PORT/NAME; in the password, write other characters than letters and "
    "digits as in addresses (@ is %40, / is %2F)."
)


def target(url: str) -> str:
    """What is connected to: with several hosts the one that can be written, unless the address says otherwise."""
    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.Error as error:
        reason = reason_of(error).partition('"')[0].rstrip(" :(")  # what is quoted may be the password
        raise ConfigurationError(
            f"AGGREGATOR_DATABASE_URL is no address of a database ({reason}). {WRITTEN_SO}"
        ) from None
    if "@" in str(given.get("host", "")) or not PORTS.fullmatch(str(given.get("port", ""))):
        raise ConfigurationError(f"AGGREGATOR_DATABASE_URL is no address of a database. {WRITTEN_SO}")
    several = {"target_session_attrs": "read-write"} if "," in str(given.get("host", "")) else {}
    return conninfo.make_conninfo("", **{**OPTIONS, **several, **given})


def _connect(to: str) -> _Connection:
    connection = _Connection.connect(to, autocommit=True)
    connection.target = to
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: _Connection) -> None:
    connection.adapters.register_dumper(str, _TextDumper)
    connection.adapters.register_dumper(bool, _TruthDumper)
    connection.adapters.register_loader("numeric", _NumberLoader)
    connection.execute(
        f"SET statement_timeout = {STATEMENT_MS}; SET lock_timeout = {LOCK_MS}; "
        f"SET idle_in_transaction_session_timeout = {IDLE_MS}; SET client_encoding = 'UTF8'; SET jit = off; "
        "SET extra_float_digits = 1"
    )


def _in_transaction(connection: "_Connection", begin: str, work: Callable[[PostgresSession], T]) -> T:
    connection.execute(begin)
    try:
        done = work(PostgresSession(connection))
    except BaseException:
        if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")
        raise
    connection.given_up_s = COMMIT_S
    try:
        ended = connection.execute("COMMIT").statusmessage
    except psycopg.OperationalError as error:
        if begin == READ:
            return done
        if connection.closed or connection.broken:
            raise Unknown(str(error)) from error
        raise
    finally:
        connection.given_up_s = None
    if ended != "COMMIT" and begin != READ:
        raise StoreFailed("Nothing was written: a statement had failed, and this was ignored.")
    return done


def _is_transient(error: psycopg.Error) -> bool:
    return _is_lost(error) or error.sqlstate in TRANSIENT


def _is_lost(error: psycopg.Error) -> bool:
    """Whether the server cannot be reached: the connection was refused or lost, or the server ends or starts."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate.startswith("08") or error.sqlstate in ("57P01", "57P02", "57P03")


def _failed(error: psycopg.Error, what: str) -> StoreFailed:
    if _is_lost(error):
        # Without the address of the server: callers read this.
        return StoreFailed(f"The records cannot be reached ({reason_of(error).rpartition(': ')[2]}).", **UNREACHABLE)
    kind = DiskFull if error.sqlstate == DISK_FULL else StoreFailed
    return kind(f"The records cannot be {what} ({reason_of(error)}).")


def reason_of(error: Exception) -> str:
    """What an error says, in one line and without what it says of the statement."""
    diagnosis = getattr(getattr(error, "diag", None), "message_primary", None)
    return str(diagnosis or error).strip().partition("\n")[0]


def migrate(connection: "psycopg.Connection[Any]") -> None:
    """Create the tables or bring them up to date. Other processes that start meanwhile wait."""
    if _version(connection) == NEWEST:
        return
    with connection.transaction():
        connection.execute("SET LOCAL lock_timeout = 0")
        connection.execute("SET LOCAL statement_timeout = 0")
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATING,))
        version = _known_version(connection)
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise ConfigurationError(
                f"AGGREGATOR_DATABASE_URL: the database has the encoding {encoding} and needs UTF8. Make another one: "
                "createdb --encoding=UTF8 --template=template0 NAME"
            )
        for migration in MIGRATIONS[max(0, version - SINCE + 1) :]:
            connection.execute(migration)
        if not version:
            _fill(connection)
        db = PostgresSession(connection)
        db.execute(
            "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (VERSION_FACT, str(NEWEST)),
        )


def _fill(connection: "psycopg.Connection[Any]") -> None:
    connection.execute("INSERT INTO facts VALUES ('default_visibility', 'private')")
    start = os.urandom(32)
    connection.execute("INSERT INTO audit_chain VALUES (0, %s, 0, %s)", (start, start))


def _known_version(connection: "psycopg.Connection[Any]") -> int:
    """The version of the schema; ConfigurationError if it is not known here."""
    if (version := _version(connection)) > NEWEST:
        raise ConfigurationError(
            f"The records have schema version {version}, written by a newer Anabranch; this one supports version "
            f"{NEWEST}. Update Anabranch."
        )
    return version


def _version(connection: "psycopg.Connection[Any]") -> int:
    """The version of the schema; 0 if there is none."""
    row = connection.execute("SELECT to_regclass('facts') IS NOT NULL").fetchone()
    if row is None or not row[0]:
        return 0
    found = connection.execute("SELECT value FROM facts WHERE name = %s", (VERSION_FACT,)).fetchone()
    return 0 if found is None else int(found[0])
