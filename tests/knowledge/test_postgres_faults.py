"""Records in PostgreSQL when the server is killed, paused or replaced, or the connection is lost.

What a write has acknowledged is there once. A write whose outcome nobody knows fails."""

import asyncio
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from anabranch.knowledge.records.database import Session, StoreFailed
from anabranch.knowledge.records.postgres import PATIENCE_S, PostgresDatabase
from support.cutting_proxy import PIECE_BYTES, CuttingProxy, Link
from support.postgres_server import (
    PostgresServer,
    _binaries,
    _environment,
    _user,
    running_postgres,
    shared_postgres,
)

# More than a call may take that fails: a server that does not answer is not waited for in vain.
BOUND_S = 60.0
TABLE = "CREATE TABLE written (number BIGINT NOT NULL, writer BIGINT NOT NULL)"
INSERT = "INSERT INTO written VALUES (?, ?)"

# Notes a figure in the report of pytest (-o junit_family=xunit1 --junitxml=FILE).
Record = Callable[[str, object], None]

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-postgres-faults")]
soak = pytest.mark.soak


@pytest.fixture
def url() -> Iterator[str]:
    made = shared_postgres().create_database()
    yield made
    shared_postgres().drop(made)


@contextmanager
def opened(url: str) -> Iterator[PostgresDatabase]:
    """Records with the table `written`."""
    with closing(PostgresDatabase.open(url)) as database:
        database.writing(lambda db: db.execute(TABLE))
        yield database


def insert(db: Session, number: int, writer: int = 0) -> None:
    db.execute(INSERT, (number, writer))


def numbers(database: PostgresDatabase) -> list[int]:
    return database.reading(lambda db: [row[0] for row in db.execute("SELECT number FROM written ORDER BY number")])


class Writer:
    """Writes numbered rows, one after the other, and notes which are acknowledged, and when."""

    def __init__(self, database: PostgresDatabase, number: int = 0) -> None:
        self._database = database
        self._number = number
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.acknowledged: dict[int, float] = {}
        self.failed: dict[int, StoreFailed] = {}

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                self._database.writing(partial(insert, number=number, writer=self._number))
                self.acknowledged[number] = time.monotonic()
            except StoreFailed as error:
                self.failed[number] = error

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def writes(self, more: int) -> None:
        """Until so many more are acknowledged."""
        wanted, deadline = len(self.acknowledged) + more, time.monotonic() + BOUND_S
        while len(self.acknowledged) < wanted:
            assert time.monotonic() < deadline, f"{len(self.acknowledged)} of {wanted}; {self.failed}"
            time.sleep(0.002)

    @property
    def gap_s(self) -> float:
        """The longest time without an acknowledged write."""
        times = sorted(self.acknowledged.values())
        return max(later - earlier for earlier, later in pairwise(times))

    def check(self, database: PostgresDatabase) -> None:
        """What was acknowledged is there once; what has failed at most once."""
        found = database.reading(
            lambda db: [row[0] for row in db.execute("SELECT number FROM written WHERE writer = ?", (self._number,))]
        )
        counts = Counter(found)
        assert set(self.acknowledged) <= set(counts)
        assert set(counts) <= {*self.acknowledged, *self.failed}
        assert set(counts.values()) == {1}
        unknown = [error for error in self.failed.values() if "while it was decided" in error.message]
        assert list(self.failed.values()) == unknown


def bounded(work: Callable[[], Any], *, resume: Callable[[], None]) -> tuple[Exception | None, float]:
    """How a call ends that may hang, and after how many seconds. In the end the server goes on: the thread must end."""
    with ThreadPoolExecutor(1) as threads:
        started, call = time.monotonic(), threads.submit(work)
        try:
            error = call.exception(BOUND_S)
        except TimeoutError:
            resume()
            pytest.fail(f"still waiting after {BOUND_S:.0f} s")
        assert error is None or isinstance(error, Exception)
        return error, time.monotonic() - started


# Killed and started again


@soak
@pytest.mark.timeout(180)
def test_writes_go_on_after_the_server_was_killed_and_what_was_acknowledged_is_there_once(
    tmp_path: Path, record_property: Record
) -> None:
    with running_postgres(tmp_path, durable=True) as server, opened(server.create_database()) as database:
        writers = [Writer(database, number) for number in range(3)]
        with ExitStack() as running:
            for writer in writers:
                running.enter_context(writer)
            for _ in range(3):
                writers[0].writes(30)
                server.kill()
                server.restart()
                writers[0].writes(1)
            for writer in writers:
                writer.writes(10)
        for writer in writers:
            writer.check(database)
            assert writer.gap_s < PATIENCE_S
        record_property("gap_s", max(writer.gap_s for writer in writers))


@soak
@pytest.mark.timeout(180)
def test_a_read_waits_for_a_server_that_starts_again(tmp_path: Path) -> None:
    with running_postgres(tmp_path, durable=True) as server, opened(server.create_database()) as database:
        server.kill()
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(numbers, database)
            server.restart()
            assert reading.result(PATIENCE_S) == []


@soak
@pytest.mark.timeout(180)
def test_everything_fails_in_a_bounded_time_while_the_server_is_gone(tmp_path: Path) -> None:
    with running_postgres(tmp_path, durable=True) as server, opened(server.create_database()) as database:
        server.kill()
        with ThreadPoolExecutor(4) as threads:
            insertion = partial(database.writing, partial(insert, number=1))
            calls: list[Callable[[], object]] = [
                partial(numbers, database),
                insertion,
                database.compact,
                database.check_writable,
            ]
            for call in [threads.submit(one) for one in calls]:
                assert isinstance(call.exception(PATIENCE_S + 10), StoreFailed)
        server.restart()
        database.check_writable()
        database.writing(partial(insert, number=2))
        assert numbers(database) == [2]


@soak
@pytest.mark.timeout(180)
def test_the_records_are_writable_as_soon_as_the_server_is_back(tmp_path: Path) -> None:
    """A connection from before is no reason to say that they are not."""
    with running_postgres(tmp_path, durable=True) as server, opened(server.create_database()) as database:
        assert numbers(database) == []
        server.kill()
        server.restart()
        database.check_writable()


def test_a_connection_that_the_server_has_ended_is_replaced(url: str) -> None:
    with opened(url) as database:
        for number in range(3):
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid != pg_backend_pid()"
                )
            if number % 2:
                assert numbers(database) == [0]
            else:
                database.writing(partial(insert, number=number))
        assert numbers(database) == [0, 2]


def test_a_write_whose_connection_is_lost_before_its_end_is_done_once(url: str) -> None:
    """Nothing of the first try is kept, so it can be tried again."""
    tries: list[int] = []

    def work(db: Session) -> None:
        insert(db, 1)
        tries.append(1)
        if len(tries) == 1:
            [(pid,)] = db.execute("SELECT pg_backend_pid()").fetchall()
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        insert(db, 2)

    with opened(url) as database:
        database.writing(work)
        assert (numbers(database), len(tries)) == ([1, 2], 2)


def test_a_deadlock_of_two_writes_is_solved_by_trying_one_again(url: str) -> None:
    both, met = threading.Barrier(2), set()

    def work(db: Session, first: int) -> None:
        update = "UPDATE written SET writer = writer + 1 WHERE number = ?"
        db.execute(update, (first,))
        if first not in met:
            met.add(first)
            both.wait(BOUND_S)
        db.execute(update, (3 - first,))

    with opened(url) as database, ThreadPoolExecutor(2) as threads:
        for number in (1, 2):
            database.writing(partial(insert, number=number))
        calls = [threads.submit(database.writing, partial(work, first=first), ordered=False) for first in (1, 2)]
        for call in calls:
            call.result(BOUND_S)
        assert database.reading(lambda db: [row[0] for row in db.execute("SELECT writer FROM written")]) == [2, 2]


# Paused


@pytest.fixture(scope="module")
def pausable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with running_postgres(tmp_path_factory.mktemp("pausable")) as server:
        yield server


@soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", ["read", "write", "check_writable", "compact"])
def test_a_call_to_a_server_that_does_not_answer_fails_in_a_bounded_time(
    pausable: PostgresServer, call: str, record_property: Record
) -> None:
    with opened(pausable.create_database()) as database:
        database.writing(partial(insert, number=1))
        calls: dict[str, Callable[[], Any]] = {
            "read": partial(numbers, database),
            "write": partial(database.writing, partial(insert, number=2)),
            "check_writable": database.check_writable,
            "compact": database.compact,
        }
        pausable.pause()
        try:
            error, after_s = bounded(calls[call], resume=pausable.resume)
        finally:
            pausable.resume()
        assert isinstance(error, StoreFailed)
        record_property("after_s", after_s)
        database.writing(partial(insert, number=3))
        assert {1, 3} <= set(numbers(database)) <= {1, 2, 3}


@soak
@pytest.mark.timeout(300)
def test_a_server_that_does_not_answer_in_the_middle_of_a_write_is_not_waited_for(pausable: PostgresServer) -> None:
    def work(db: Session) -> None:
        insert(db, 1)
        pausable.pause()
        insert(db, 2)

    with opened(pausable.create_database()) as database:
        try:
            error, _ = bounded(partial(database.writing, work), resume=pausable.resume)
        finally:
            pausable.resume()
        assert isinstance(error, StoreFailed)
        assert numbers(database) == []
        database.writing(partial(insert, number=3))  # the lock of the first one does not stay
        assert numbers(database) == [3]


@soak
@pytest.mark.timeout(300)
def test_a_server_that_does_not_answer_cannot_be_opened(pausable: PostgresServer) -> None:
    url = pausable.create_database()
    pausable.pause()
    try:
        error, after_s = bounded(partial(PostgresDatabase.open, url), resume=pausable.resume)
    finally:
        pausable.resume()
    assert "AGGREGATOR_DATABASE_URL" in str(error)
    assert after_s < 20


# Lost while it commits


class CommitCutter(CuttingProxy):
    """Cuts a connection at a COMMIT: before it reaches the server, or before the answer reaches the client."""

    def __init__(self, server_url: str, *, arrives: bool) -> None:
        super().__init__(server_url)
        self._arrives = arrives
        self._answered: set[Link] = set()
        self.armed = False

    async def _ask(self, asked: asyncio.StreamReader, link: Link) -> None:
        with suppress(OSError):
            while piece := await asked.read(PIECE_BYTES):
                if self.armed and b"COMMIT" in piece:
                    self.armed = False
                    if not self._arrives:
                        break
                    self._answered.add(link)
                link.server.write(piece)
                await link.server.drain()
        link.abort()

    async def _say(self, said: asyncio.StreamReader, link: Link, left: int | None) -> None:
        while piece := await said.read(PIECE_BYTES):
            if link in self._answered:
                self.cuts += 1
                return
            link.client.write(piece)
            await link.client.drain()
        link.client.close()


def through(proxy: CuttingProxy, url: str) -> str:
    """The address of a database behind a proxy."""
    user, _, rest = url.partition("@")
    return f"{user}@{proxy.url.removeprefix('http://')}/{rest.partition('/')[2]}"


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_write_whose_commit_is_not_answered_fails_and_is_not_tried_again(url: str, arrives: bool) -> None:
    """It may be done, and may be not: only the caller can look."""
    server = f"http://{url.partition('@')[2]}"
    async with CommitCutter(server, arrives=arrives) as proxy:
        database = await asyncio.to_thread(PostgresDatabase.open, through(proxy, url))
        try:
            await database.write(lambda db: db.execute(TABLE))
            proxy.armed = True
            with pytest.raises(StoreFailed, match="while it was decided"):
                await database.write(partial(insert, number=1))
            assert await asyncio.to_thread(numbers, database) == ([1] if arrives else [])
            await database.write(partial(insert, number=2))
            assert await asyncio.to_thread(numbers, database) == ([1, 2] if arrives else [2])
        finally:
            await asyncio.to_thread(database.close)


async def test_a_read_whose_end_is_not_answered_has_read(url: str) -> None:
    async with CommitCutter(f"http://{url.partition('@')[2]}", arrives=True) as proxy:
        database = await asyncio.to_thread(PostgresDatabase.open, through(proxy, url))
        try:
            await database.write(lambda db: db.execute(TABLE))
            await database.write(partial(insert, number=1))
            proxy.armed = True
            assert await database.read(lambda db: db.execute("SELECT number FROM written").fetchall()[0][0]) == 1
            assert (proxy.cuts, await asyncio.to_thread(numbers, database)) == (1, [1])
        finally:
            await asyncio.to_thread(database.close)


# A standby


# With what follows until now, and the settings of a standby.
COPYING = ("--wal-method=stream", "--write-recovery-conf", "--checkpoint=fast", "--no-sync")


class Standby(PostgresServer):
    """A copy of a server that follows it."""

    @classmethod
    def of(cls, primary: PostgresServer, folder: Path) -> "Standby":
        folder.mkdir(parents=True)
        server = cls(folder, durable=True)
        server._password = primary._password
        source = f"{primary.url()}?application_name=standby"
        done = subprocess.run(
            [*_user(), str(_binaries() / "pg_basebackup"), "-D", str(server.data), "-d", source, *COPYING],
            capture_output=True,
            text=True,
            env=_environment(),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        server._start()
        return server

    def promote(self) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_promote(false)")


def both(primary: PostgresServer, standby: PostgresServer, database: str) -> str:
    """The address of a database of which one of two servers can be written."""
    start, _, rest = database.partition("@")
    first, _, name = rest.partition("/")
    return f"{start}@{first},127.0.0.1:{standby._port}/{name}"


@contextmanager
def primary_and_standby(folder: Path) -> Iterator[tuple[PostgresServer, Standby]]:
    """A commit is acknowledged when both have it on disk."""
    with running_postgres(folder / "primary", durable=True) as primary:
        standby = Standby.of(primary, folder / "standby")
        try:
            with psycopg.connect(primary.url(), autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                connection.execute("SELECT pg_reload_conf()")
                deadline = time.monotonic() + BOUND_S
                synchronous = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
                while connection.execute(synchronous).fetchone() is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            yield primary, standby
        finally:
            standby.stop()
            shutil.rmtree(standby.data)


@soak
@pytest.mark.timeout(300)
def test_writing_goes_on_with_the_promoted_standby_and_nothing_acknowledged_is_lost(
    tmp_path: Path, record_property: Record
) -> None:
    with primary_and_standby(tmp_path) as (primary, standby), ExitStack() as stack:
        database = stack.enter_context(opened(both(primary, standby, primary.create_database())))
        writers = [Writer(database, number) for number in range(3)]
        with ExitStack() as running:
            for writer in writers:
                running.enter_context(writer)
            for writer in writers:
                writer.writes(50)
            primary.kill()
            killed = time.monotonic()
            standby.promote()
            for writer in writers:
                writer.writes(50)
        for writer in writers:
            writer.check(database)
        first = min(moment for writer in writers for moment in writer.acknowledged.values() if moment > killed)
        record_property("first_write_s", first - killed)
        record_property("gap_s", max(writer.gap_s for writer in writers))
        record_property("rows", len(numbers(database)))
        record_property("unknown", sum(len(writer.failed) for writer in writers))
        assert max(writer.gap_s for writer in writers) < PATIENCE_S


@soak
@pytest.mark.timeout(300)
def test_reads_go_on_and_writes_fail_while_a_synchronous_standby_is_gone(
    tmp_path: Path, record_property: Record
) -> None:
    """A commit waits for the standby, and no time-out of the server ends that."""
    with primary_and_standby(tmp_path) as (primary, standby), ExitStack() as stack:
        database = stack.enter_context(opened(primary.create_database()))
        database.writing(partial(insert, number=1))
        standby.kill()

        def go_on() -> None:
            with psycopg.connect(primary.url(), autocommit=True) as connection:
                connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
                connection.execute("SELECT pg_reload_conf()")

        try:
            error, after_s = bounded(partial(database.writing, partial(insert, number=2)), resume=go_on)
            assert isinstance(error, StoreFailed)
            assert numbers(database) == [1]
            record_property("after_s", after_s)
        finally:
            go_on()
        database.writing(partial(insert, number=3))
        assert {1, 3} <= set(numbers(database)) <= {1, 2, 3}
