"""The PostgreSQL server of the tests keeps what was committed when it is killed, and ends with the tests."""

import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest

from support.postgres_server import PATIENCE_S, running_postgres, shared_postgres

SUPPORT = Path(__file__).parents[1]
STARTS_ONE = """import sys
from pathlib import Path
from support.postgres_server import PostgresServer
server = PostgresServer.start(Path(sys.argv[1]))
print(server.url(), flush=True)
sys.stdin.read()
"""


def test_a_killed_postgres_server_has_the_committed_row_after_its_restart(tmp_path: Path) -> None:
    with running_postgres(tmp_path, durable=True) as server:
        url = server.create_database()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
            connection.execute("CREATE TABLE kept (number integer)")
            connection.execute("INSERT INTO kept VALUES (7)")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)
        server.restart()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT number FROM kept").fetchall() == [(7,)]


def test_all_processes_of_a_paused_postgres_server_stand_still_until_it_is_resumed(tmp_path: Path) -> None:
    with running_postgres(tmp_path) as server:
        with psycopg.connect(server.url()) as connection:
            server.pause()
            postmaster = psutil.Process(connection.info.backend_pid).parent()
            assert postmaster is not None
            assert {one.status() for one in (postmaster, *postmaster.children())} == {psutil.STATUS_STOPPED}
            server.resume()
            assert connection.execute("SELECT 1").fetchone() == (1,)
        server.pause()  # a paused one can be stopped


def test_databases_of_the_shared_postgres_server_are_empty_and_can_be_dropped() -> None:
    server = shared_postgres()
    assert server is shared_postgres()
    url = server.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE filled ()")
    other = server.create_database()
    with psycopg.connect(other) as connection:
        assert connection.execute("SELECT FROM pg_tables WHERE schemaname = 'public'").fetchall() == []
        server.drop(url)
    server.drop(other)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)


def test_a_postgres_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_ONE, str(tmp_path)]
    with subprocess.Popen(command, cwd=SUPPORT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        psycopg.connect(process.stdout.readline().strip()).close()
        postmaster = psutil.Process(int((tmp_path / "data" / "postmaster.pid").read_text().split()[0]))
        assert postmaster.is_running()
        process.kill()
    gone, _ = psutil.wait_procs([postmaster], timeout=PATIENCE_S)
    assert gone == [postmaster]
