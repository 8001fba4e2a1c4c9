"""The tables in PostgreSQL are those of SQLite, and opening records either works or says what is wrong."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import psycopg
import pytest

from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.records.postgres_schema import SINCE
from anabranch.knowledge.records.schema import MIGRATIONS
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.postgres_server import shared_postgres

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-schema")]

PATIENCE_S = 30.0
# A way to say the same type in each of the two.
TYPES = {"bigint": "INTEGER", "integer": "INTEGER", "double precision": "REAL", "text": "TEXT", "bytea": "BLOB"}
ONLY_IN_POSTGRES = {"reserved"}
OPENS = (
    "import sys; from anabranch.knowledge.records.postgres import PostgresDatabase as D; D.open(sys.argv[1]).close()"
)
# Neither it nor its parts may be in a message.
PASSWORD = "Xyzzy-Plugh"


class ColumnShape(NamedTuple):
    name: str
    kind: str
    is_required: bool
    default: str | None


@pytest.fixture
def url() -> Iterator[str]:
    """An empty database."""
    made = shared_postgres().create_database()
    yield made
    shared_postgres().drop(made)


@pytest.fixture(scope="module")
def migrated() -> Iterator[PostgresDatabase]:
    made = shared_postgres().create_database()
    with closing(PostgresDatabase.open(made)) as opened:
        yield opened
    shared_postgres().drop(made)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SqliteDatabase]:
    with closing(SqliteDatabase.open(tmp_path)) as opened:
        yield opened


def rows(sql: str, *values: Any) -> "Any":
    return lambda db: [tuple(row) for row in db.execute(sql, values)]


# Tables


def test_every_table_and_column_is_in_both_databases_in_the_same_order(
    files: SqliteDatabase, migrated: PostgresDatabase
) -> None:
    """`INSERT INTO … VALUES` names no columns, and `SELECT *` none either."""
    there, here = files.reading(_sqlite_tables), migrated.reading(_postgres_tables)
    assert set(here) - set(there) == ONLY_IN_POSTGRES
    assert set(there) - set(here) == set()
    # In SQLite it is there without being named.
    assert [one.name for one in here["queries"][len(there["queries"]) :]] == ["rowid"]
    here["queries"] = here["queries"][: len(there["queries"])]
    assert {table: here[table] for table in there} == there


def _sqlite_tables(db: Session) -> dict[str, list[ColumnShape]]:
    names = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    return {name: _sqlite_columns(db, name) for (name,) in db.execute(names).fetchall()}


def _sqlite_columns(db: Session, table: str) -> list[ColumnShape]:
    return [
        ColumnShape(row["name"], row["type"], bool(row["notnull"] or row["pk"]), row["dflt_value"])
        for row in db.execute(f"PRAGMA table_info({table})").fetchall()
    ]


def _postgres_tables(db: Session) -> dict[str, list[ColumnShape]]:
    found = db.execute(
        "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
        "JOIN information_schema.tables USING (table_schema, table_name) "
        "WHERE table_schema = 'public' AND table_type = 'BASE TABLE' ORDER BY table_name, ordinal_position"
    )
    tables: dict[str, list[ColumnShape]] = {}
    for table, column, kind, nullable, default in found:
        shape = ColumnShape(column, TYPES[kind], nullable == "NO", default and default.removesuffix("::text"))
        tables.setdefault(table, []).append(shape)
    return tables


def test_the_view_of_open_items_has_the_same_columns(files: SqliteDatabase, migrated: PostgresDatabase) -> None:
    there = [column.name for column in files.reading(lambda db: _sqlite_columns(db, "open_items"))]
    names = (
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'open_items' ORDER BY ordinal_position"
    )
    assert [name for (name,) in migrated.reading(rows(names))] == there


def test_every_primary_key_and_unique_constraint_is_in_both(files: SqliteDatabase, migrated: PostgresDatabase) -> None:
    there, here = files.reading(_sqlite_unique), migrated.reading(_postgres_unique)
    assert there - here == {
        ("attributes", ("name", "value", "document")),  # values can be longer than an entry of an index may be
        ("documents", ("collection", "identity")),  # a digest of the identity, for the same reason
    }
    assert here - there == {
        ("documents", ("collection", "md5(identity)")),
        ("queries", ("rowid",)),
        ("reserved", ("name",)),
    }


def _sqlite_unique(db: Session) -> set[tuple[str, tuple[str, ...]]]:
    found: set[tuple[str, tuple[str, ...]]] = set()
    for table in _sqlite_tables(db):
        columns = sorted((row["pk"], row["name"]) for row in db.execute(f"PRAGMA table_info({table})") if row["pk"])
        if columns:
            found.add((table, tuple(name for _, name in columns)))
        for index in db.execute(f"PRAGMA index_list({table})").fetchall():
            if index["unique"]:
                names = db.execute(f"PRAGMA index_info({index['name']})").fetchall()
                found.add((table, tuple(row["name"] for row in names)))
    return found


def _postgres_unique(db: Session) -> set[tuple[str, tuple[str, ...]]]:
    found = db.execute(
        "SELECT tables.relname, pg_index.indexrelid, number, pg_get_indexdef(pg_index.indexrelid, number, TRUE) "
        "FROM pg_index JOIN pg_class AS tables ON tables.oid = indrelid, generate_series(1, indnkeyatts) AS number "
        "WHERE indisunique AND relnamespace = 'public'::regnamespace ORDER BY 1, 2, 3"
    )
    indexes: dict[tuple[str, int], list[str]] = {}
    for table, index, _, column in found:
        indexes.setdefault((table, index), []).append(column.strip('"'))
    return {(table, tuple(columns)) for (table, _), columns in indexes.items()}


def test_all_texts_of_the_tables_are_compared_byte_by_byte(migrated: PostgresDatabase) -> None:
    others = migrated.reading(
        rows(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public' "
            "AND data_type = 'text' AND collation_name IS DISTINCT FROM 'C' AND table_name != 'open_items'"
        )
    )
    assert others == []


# Opening


def test_an_empty_database_gets_the_tables_of_the_newest_version(url: str) -> None:
    with closing(PostgresDatabase.open(url)) as opened:
        facts = opened.reading(rows("SELECT name, value FROM facts ORDER BY name"))
        assert facts == [("default_visibility", "private"), ("schema_version", str(len(MIGRATIONS)))]
        assert opened.reading(rows("SELECT count(*), max(head_seq) FROM audit_chain")) == [(1, 0)]
    with closing(PostgresDatabase.open(url)) as again:  # nothing is made twice
        assert again.reading(rows("SELECT name, value FROM facts ORDER BY name")) == facts


def test_both_databases_have_migrations_of_the_same_number(migrated: PostgresDatabase) -> None:
    """Migration 20 of SQLite is the second one of PostgreSQL."""
    [(version,)] = migrated.reading(rows("SELECT value FROM facts WHERE name = 'schema_version'"))
    assert SINCE <= int(version) == len(MIGRATIONS)


def test_eight_that_open_an_empty_database_at_once_all_succeed(url: str) -> None:
    ready = threading.Barrier(8)

    def opened(_: int) -> PostgresDatabase:
        ready.wait(PATIENCE_S)
        return PostgresDatabase.open(url)

    with ThreadPoolExecutor(8) as threads:
        databases = list(threads.map(opened, range(8)))
    assert databases[0].reading(rows("SELECT count(*) FROM audit_chain")) == [(1,)]
    for database in databases:
        database.close()


def test_two_processes_that_open_an_empty_database_at_once_both_succeed(url: str) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", OPENS, url], stderr=subprocess.PIPE, text=True) for _ in "ab"]
    ended = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    assert (ended, [process.returncode for process in processes]) == (["", ""], [0, 0])
    with closing(PostgresDatabase.open(url)) as opened:
        assert opened.reading(rows("SELECT count(*) FROM audit_chain")) == [(1,)]


def test_a_process_that_ends_while_it_makes_the_tables_leaves_none(url: str) -> None:
    """What was there already stops it in the middle."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE jobs (key text)")
        with pytest.raises(ConfigurationError, match=r'AGGREGATOR_DATABASE_URL: .*"jobs" already exists'):
            PostgresDatabase.open(url)
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        assert tables == [("jobs",)]
        connection.execute("DROP TABLE jobs")
        PostgresDatabase.open(url).close()


def test_records_of_a_newer_version_are_refused_and_left_as_they_are(url: str) -> None:
    newer = str(len(MIGRATIONS) + 1)
    with closing(PostgresDatabase.open(url)) as opened:
        opened.writing(lambda db: db.execute("UPDATE facts SET value = ? WHERE name = 'schema_version'", (newer,)))
        with pytest.raises(ConfigurationError, match=f"schema version {newer}.*Update Anabranch"):
            PostgresDatabase.open(url)
        assert opened.reading(rows("SELECT value FROM facts WHERE name = 'schema_version'")) == [(newer,)]


def refusal(url: str) -> str:
    """How opening the records fails. A password is in neither the message nor what was raised before."""
    with pytest.raises(ConfigurationError) as raised:
        PostgresDatabase.open(url).close()
    error: BaseException | None = raised.value
    assert raised.value.message.startswith("AGGREGATOR_DATABASE_URL")
    assert "\n" not in raised.value.message
    while error is not None:
        for part in PASSWORD.split("-"):
            assert part not in str(error)
        error = error.__cause__
    return raised.value.message


def _address(url: str, *, password: str | None = None, port: int | None = None, name: str | None = None) -> str:
    """The address of a database with another password, port or name."""
    parts = urlsplit(url)
    given = parts.password if password is None else password
    return f"postgresql://postgres:{given}@127.0.0.1:{port or parts.port}/{parts.path[1:] if name is None else name}"


def test_a_wrong_password_is_refused(url: str) -> None:
    assert "password authentication failed" in refusal(_address(url, password=PASSWORD))


def test_a_database_that_is_not_there_is_named(url: str) -> None:
    password = urlsplit(url).password
    assert password
    message = refusal(_address(url, name="nowhere"))
    assert 'database "nowhere" does not exist' in message
    assert password not in message


def test_a_server_that_is_not_there_is_named(url: str) -> None:
    assert "port 1 failed" in refusal(_address(url, password=PASSWORD, port=1))
    several = f"postgresql://postgres:{PASSWORD}@127.0.0.1:1,127.0.0.1:2/records"
    assert "failed" in refusal(several)


def test_a_user_who_may_not_create_tables_is_told_so(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'")
        try:
            parts = urlsplit(url)
            message = refusal(f"postgresql://reader:{PASSWORD}@127.0.0.1:{parts.port}{parts.path}")
            assert "permission denied for schema public" in message
            assert "may create tables" in message
        finally:
            connection.execute("DROP ROLE reader")


@pytest.mark.parametrize(
    "url",
    [
        f"dana:{PASSWORD}@127.0.0.1/records",
        f"127.0.0.1 {PASSWORD}",
        f"mysql://dana:{PASSWORD}@127.0.0.1/records",
        f"postgres//dana:{PASSWORD}@127.0.0.1/records",
        f"postgresql://dana:{PASSWORD}@[::1/records",
        f"postgresql://dana:{PASSWORD}%ZZ@127.0.0.1/records",
        f"postgresql://dana:{PASSWORD}%@127.0.0.1/records",
        f"postgresql://dana:{PASSWORD}@127.0.0.1/records?nonsense=1",
        f"postgresql://dana@127.0.0.1/records?password={PASSWORD}&nonsense",
        f"postgresql://dana@127.0.0.1/records?password={PASSWORD}%ZZ",
        f"host=127.0.0.1 user=dana password={PASSWORD} nonsense=1",
        f"host=127.0.0.1 user=dana password='{PASSWORD}",
        f"postgresql://dana:{PASSWORD}@127.0.0.1:port/records",
        f"postgresql://dana:{PASSWORD}@127.0.0.1:1/records?connect_timeout=soon",
        f"postgresql://dana:{PASSWORD}@127.0.0.1:1/records?sslmode=nonsense",
        f"postgresql://dana:{PASSWORD}@nowhere.invalid/records",
        # Passwords with characters that an address cannot have as they are.
        f"postgresql://dana:{PASSWORD}/@127.0.0.1:1/records",
        f"postgresql://localhost:{PASSWORD}/@127.0.0.1:1/records",
        f"postgresql://dana:x/{PASSWORD}@127.0.0.1:1/records",
        f"postgresql://dana:x@{PASSWORD}@127.0.0.1:1/records",
        f"postgresql://dana:x?{PASSWORD}@127.0.0.1:1/records",
        f"postgresql://dana:x:{PASSWORD}@127.0.0.1:1/records",
        f"postgresql://dana:x[{PASSWORD}@127.0.0.1:1/records",
        f"postgresql://dana:x,{PASSWORD}@127.0.0.1:1/records",
    ],
)
def test_an_address_with_a_mistake_is_refused_without_saying_the_password(url: str) -> None:
    refusal(url)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_cannot_hold_or_count_all_characters_is_refused(url: str, encoding: str) -> None:
    """With SQL_ASCII it counts bytes: passages would begin elsewhere in a text."""
    name = f"encoded_{encoding.lower()}"
    with psycopg.connect(url, autocommit=True) as connection:
        made = f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE_PROVIDER libc LOCALE 'C'"
        connection.execute(made.encode())
        try:
            assert "UTF8" in refusal(_address(url, name=name))
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.parametrize("password", ["p@ss:w/ord?#[]", "%41", "ä \N{ROCKET}", "'\\\""])
def test_an_encoded_password_may_have_any_character(url: str, password: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        quoted = psycopg.sql.Literal(password)
        connection.execute(psycopg.sql.SQL("CREATE ROLE strange LOGIN SUPERUSER PASSWORD {}").format(quoted))
        try:
            parts = urlsplit(url)
            address = f"postgresql://strange:{quote(password, safe='')}@127.0.0.1:{parts.port}{parts.path}"
            PostgresDatabase.open(address).close()
        finally:
            connection.execute("REASSIGN OWNED BY strange TO postgres")
            connection.execute("DROP ROLE strange")
