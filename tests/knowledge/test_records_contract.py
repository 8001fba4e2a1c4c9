"""Both databases of the records keep what their contract promises.

The suite is not in `anabranch.testing`: it consists of SQL, which only `knowledge/records` may have in the package."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.knowledge.records import changes
from anabranch.knowledge.records.database import Database, Session, StaleSnapshot, StoreFailed, as_json
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.examples import examples
from support.postgres_server import shared_postgres

T = TypeVar("T")

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-contract")]

PATIENCE_S = 30.0
# Types that both databases know.
PROBE = 'CREATE TABLE probe (name TEXT, number BIGINT, score DOUBLE PRECISION, data BYTEA, "user" TEXT)'
REPLACED = "\N{REPLACEMENT CHARACTER}"


class RecordsCase(NamedTuple):
    """Records with an empty table `probe`; `another` opens them once more, as another process does. `nul` is what they
    keep of U+0000."""

    database: Database
    another: Callable[[], Database]
    nul: str

    def one(self, sql: str, *values: Any) -> Any:
        """The only column of the only row."""
        [(found,)] = self.all(sql, *values)
        return found

    def all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.database.reading(lambda db: [tuple(row) for row in db.execute(sql, values)])

    def write(self, sql: str, *values: Any) -> int:
        """How many rows it has changed."""
        return self.database.writing(lambda db: db.execute(sql, values).rowcount)

    def insert(self, *names: str) -> None:
        self.database.writing(
            lambda db: db.executemany("INSERT INTO probe (name) VALUES (?)", [(name,) for name in names])
        )

    def names(self) -> list[str]:
        return [name for (name,) in self.all("SELECT name FROM probe ORDER BY name")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A database in PostgreSQL for all tests here: to create one takes half a second."""
    server = shared_postgres()
    made = server.create_database()
    yield made
    server.drop(made)


@pytest.fixture(params=["sqlite", "postgres"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecordsCase]:
    is_file = request.param == "sqlite"
    opens: Callable[[], Database] = (
        partial(SqliteDatabase.open, tmp_path)
        if is_file
        else partial(PostgresDatabase.open, request.getfixturevalue("url"))
    )
    opened: list[Database] = []

    def another() -> Database:
        opened.append(opens())
        return opened[-1]

    database = another()
    database.writing(emptied)
    yield RecordsCase(database, another, "\0" if is_file else REPLACED)
    for one in opened:
        one.close()


def emptied(db: Session) -> None:
    """Without what an earlier test has left."""
    for table in ("changes", "contents", "jobs"):
        db.execute(f"DELETE FROM {table}")
    db.execute("DELETE FROM facts WHERE name NOT IN ('default_visibility', 'schema_version')")
    if db.kind == "postgres":
        db.execute("DELETE FROM reserved")
    db.execute("DROP TABLE IF EXISTS probe")
    db.execute(PROBE)


def at_once(work: Callable[[int], T], count: int) -> list[T]:
    """The results of as many calls, each in a thread of its own."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# Transactions


def test_a_write_that_returned_is_there_after_closing_and_opening_again(case: RecordsCase) -> None:
    case.insert("first", "second")
    case.database.close()
    assert case.another().reading(lambda db: db.execute("SELECT count(*) FROM probe").fetchone()[0]) == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StaleSnapshot, StoreFailed])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_write_that_fails_leaves_nothing(case: RecordsCase, error: type[BaseException], ordered: bool) -> None:
    def work(db: Session) -> None:
        db.execute("INSERT INTO probe (name) VALUES ('lost')")
        db.reserve("probes", 5)
        raise error("no")

    with pytest.raises(error, match="no"):
        case.database.writing(work, ordered=ordered)
    assert case.names() == []
    case.insert("kept")
    assert case.names() == ["kept"]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT nothing FROM probe",
        "INSERT INTO facts VALUES ('default_visibility', 'twice')",
        "INSERT INTO facts (name) VALUES ('without a value')",
        "DELETE FROM nowhere",
        "this is no statement",
    ],
)
def test_a_statement_with_an_error_leaves_the_records_usable(case: RecordsCase, statement: str) -> None:
    def work(db: Session) -> None:
        db.execute("INSERT INTO probe (name) VALUES ('lost')")
        db.execute(statement)

    for _ in range(20):  # more often than there are connections
        with pytest.raises((StoreFailed, sqlite3.Error)):
            case.database.writing(work)
    with pytest.raises((StoreFailed, sqlite3.Error)):
        case.database.reading(lambda db: db.execute("SELECT nothing FROM probe"))
    case.insert("kept")
    assert case.names() == ["kept"]
    case.database.check_writable()


def test_a_write_that_ignores_the_error_of_a_statement_is_done_or_fails(case: RecordsCase) -> None:
    def work(db: Session) -> None:
        db.execute("INSERT INTO probe (name) VALUES ('one')")
        with suppress(Exception):
            db.execute("INSERT INTO facts VALUES ('default_visibility', 'twice')")

    try:
        case.database.writing(work)
        done = True
    except StoreFailed:
        done = False
    assert case.names() == (["one"] if done else [])


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_read_sees_one_moment_while_others_write(case: RecordsCase, elsewhere: bool) -> None:
    writer = case.another() if elsewhere else case.database
    case.insert("before")

    def work(db: Session) -> tuple[int, int, int]:
        counts = [_count(db)]
        for _ in range(2):
            with ThreadPoolExecutor(1) as threads:
                threads.submit(
                    writer.writing, lambda other: other.execute("INSERT INTO probe (name) VALUES ('x')")
                ).result()
            counts.append(_count(db))
        return counts[0], counts[1], counts[2]

    assert case.database.reading(work) == (1, 1, 1)
    assert case.database.reading(_count) == 3


def _count(db: Session) -> int:
    return int(db.execute("SELECT count(*) FROM probe").fetchone()[0])


def test_a_read_of_a_stale_snapshot_is_repeated_on_a_newer_one(case: RecordsCase) -> None:
    writer, seen = case.another(), []

    def work(db: Session) -> int:
        seen.append(_count(db))
        if len(seen) < 4:
            writer.writing(lambda other: other.execute("INSERT INTO probe (name) VALUES ('x')"))
            raise StaleSnapshot
        return seen[-1]

    assert (case.database.reading(work), seen) == (3, [0, 1, 2, 3])


def test_a_read_of_which_every_snapshot_is_stale_fails(case: RecordsCase) -> None:
    def work(db: Session) -> None:
        _count(db)
        raise StaleSnapshot

    with pytest.raises(StoreFailed):
        case.database.reading(work)
    assert case.database.reading(_count) == 0


async def test_coroutines_read_and_write_as_threads_do(case: RecordsCase) -> None:
    inserts = [partial(_insert_number, number=number) for number in range(40)]
    await asyncio.gather(*(case.database.write(one, ordered=bool(at % 2)) for at, one in enumerate(inserts)))
    counts = await asyncio.gather(*(case.database.read(_count) for _ in range(40)))
    assert set(counts) == {40}
    with pytest.raises(ZeroDivisionError):
        await case.database.write(lambda db: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await case.database.read(lambda db: 1 / 0)


def test_two_databases_on_the_same_records_see_each_others_writes(case: RecordsCase) -> None:
    first, second = case.database, case.another()
    for number in range(10):
        writer, reader = (first, second) if number % 2 else (second, first)
        writer.writing(partial(_insert_number, number=number))
        found = reader.reading(lambda db: db.execute("SELECT max(number), count(*) FROM probe").fetchone())
        assert tuple(found) == (number, number + 1)


def _insert_number(db: Session, number: int) -> None:
    db.execute("INSERT INTO probe (number) VALUES (?)", (number,))


def test_ordered_writes_happen_one_after_the_other(case: RecordsCase) -> None:
    """What one has read is still so when it writes: none of the increments is lost."""
    case.write("INSERT INTO probe (name, number) VALUES ('sum', 0)")
    databases = [case.database, case.another()]

    def increment(db: Session) -> None:
        [(now,)] = db.execute("SELECT number FROM probe").fetchall()
        db.execute("UPDATE probe SET number = ?", (now + 1,))

    def work(thread: int) -> None:
        for _ in range(10):
            databases[thread % 2].writing(increment)

    at_once(work, 8)
    assert case.one("SELECT number FROM probe") == 80


def test_a_reader_of_later_changes_sees_all_while_eight_processes_write(case: RecordsCase) -> None:
    """800 changes: with numbers of which a higher one can be committed first, a third of them was never seen."""
    writing, done = [case.another() for _ in range(8)], threading.Event()

    def write(number: int) -> None:
        for change in range(100):
            writing[number].writing(partial(_recorded, document=1 + number * 100 + change))

    def read() -> list[int]:
        seen, last, ended = [], 0, False
        while not ended:
            ended = done.is_set()  # what was written until then is there
            rows = case.database.reading(partial(_changes_after, last=last))
            seen += [document for _, document in rows]
            last = rows[-1][0] if rows else last
        return seen

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        try:
            at_once(write, 8)
        finally:
            done.set()
        seen = reading.result()
    assert sorted(seen) == list(range(1, 801))


def _recorded(db: Session, document: int) -> None:
    changes.record(db, "add", document)
    db.execute("SELECT count(*) FROM probe").fetchall()  # time in which another could overtake


def _changes_after(db: Session, last: int) -> list[tuple[int, int]]:
    found = db.execute("SELECT seq, document FROM changes WHERE seq > ? ORDER BY seq", (last,))
    return [(row["seq"], row["document"]) for row in found]


def test_closing_waits_for_running_reads(case: RecordsCase) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(db: Session) -> int:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return _count(db)

    case.insert("there")
    with ThreadPoolExecutor(2) as threads:
        count = threads.submit(case.database.reading, slow)
        assert reading.wait(PATIENCE_S)
        closing = threads.submit(case.database.close)
        until(lambda: _is_closed(case.database))
        assert not closing.done()
        go_on.set()
        closing.result(PATIENCE_S)
        assert count.result() == 1


def _is_closed(database: Database) -> bool:
    try:
        database.reading(_count)
    except StoreFailed:
        return True
    return False


def test_closed_records_fail_with_what_can_be_told_to_a_caller(case: RecordsCase) -> None:
    case.database.close()
    for use in (case.database.reading, case.database.writing):
        with pytest.raises(StoreFailed, match="closed"):
            use(_count)
    case.database.close()


def test_compacting_changes_nothing_that_is_stored(case: RecordsCase) -> None:
    case.insert(*(f"name {number}" * 100 for number in range(500)))
    case.write("DELETE FROM probe WHERE name != ?", "name 7" * 100)
    assert case.database.bytes_to_compact() >= 0
    assert case.database.compact() >= 0
    assert case.names() == ["name 7" * 100]


def test_the_time_of_the_database_passes(case: RecordsCase) -> None:
    first, second = case.database.writing(lambda db: (db.now(), db.now()))
    assert first <= second
    assert abs(first - time.time()) < 5


# Keys


def test_reserved_keys_are_in_a_row_and_each_table_has_its_own(case: RecordsCase) -> None:
    def work(db: Session) -> list[int]:
        return [db.reserve("chunks", 3), db.reserve("chunks", 1), db.reserve("documents", 2), db.reserve("chunks", 2)]

    assert case.database.writing(work) == [1, 4, 1, 5]
    assert case.database.writing(work) == [7, 10, 3, 11]


def test_keys_of_a_write_that_failed_leave_no_gap(case: RecordsCase) -> None:
    assert case.database.writing(lambda db: db.reserve("chunks", 5)) == 1

    def fails(db: Session) -> None:
        db.reserve("chunks", 100)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        case.database.writing(fails)
    assert case.database.writing(lambda db: db.reserve("chunks", 1)) == 6


def test_keys_are_not_used_again_when_their_rows_are_deleted_or_the_records_opened_again(case: RecordsCase) -> None:
    def store(db: Session) -> int:
        key = db.reserve("documents", 2)
        db.execute("INSERT INTO contents VALUES (?, 'a', NULL), (?, 'b', NULL)", (key, key + 1))
        return key

    keys = [case.database.writing(store)]
    case.write("DELETE FROM contents")
    keys.append(case.database.writing(store))
    case.database.close()
    later = case.another()
    later.writing(lambda db: db.execute("DELETE FROM contents"))
    later.compact()
    keys.append(later.writing(store))
    assert keys == [1, 3, 5]


@pytest.mark.parametrize("ordered", [True, False])
def test_no_key_is_given_twice_to_eight_threads_of_two_processes(case: RecordsCase, ordered: bool) -> None:
    """Every fourth write fails: its keys are given to others."""
    databases = [case.database, case.another()]

    def work(thread: int) -> list[int]:
        given_keys: list[int] = []
        for number in range(12):
            with suppress(ZeroDivisionError):
                write = partial(_reserved, count=1 + (thread + number) % 3, fails=number % 4 == 3)
                given_keys += databases[thread % 2].writing(write, ordered=ordered)
        return given_keys

    keys = sorted(key for keys in at_once(work, 8) for key in keys)
    assert keys == list(range(1, len(keys) + 1))


def _reserved(db: Session, count: int, *, fails: bool) -> list[int]:
    first = db.reserve("chunks", count)
    if fails:
        raise ZeroDivisionError
    return list(range(first, first + count))


# Values


TEXTS = [
    "",
    "plain",
    "with\0NUL\0",
    "\0",
    "lines\u2028of\u2029many\u0085kinds\r\n",
    "\N{FAMILY}\N{ZERO WIDTH JOINER}\U0001f9d1\U0001f3fd \U0010ffff \ufeff \uffff",
    "'quoted' \"twice\" \\backslash\\u0000 $1 %s %(name)s ? :name ::text -- no comment /* nor this */",
    "Ä\u0308 \u1e9e \ufdfa",
    "e\u0301" * 10,
    "long " * 200_000 + "end",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_text_is_read_as_it_was_written(case: RecordsCase, text: str) -> None:
    case.insert(text)
    kept = text.replace("\0", case.nul)
    assert case.one("SELECT name FROM probe") == kept
    assert case.one("SELECT count(*) FROM probe WHERE name = ?", text) == 1
    assert case.one("SELECT length(CAST(name AS BLOB)) FROM probe") == len(kept.encode())


@pytest.mark.parametrize("text", [text for text in TEXTS if "\0" not in text], ids=str.__len__)
def test_characters_of_a_text_are_counted_as_python_counts_them(case: RecordsCase, text: str) -> None:
    case.insert(text)
    assert case.one("SELECT length(name) FROM probe") == len(text)
    assert case.one("SELECT substr(name, 3 + 1, 5) FROM probe") == text[3:8]


def round_trip(case: RecordsCase, column: str, values: Sequence[Any]) -> None:
    """As single values, in many rows, and found by each of them."""

    def work(db: Session) -> list[Any]:
        db.execute("DELETE FROM probe")
        db.executemany(f"INSERT INTO probe (name, {column}) VALUES (?, ?)", ((str(n), v) for n, v in enumerate(values)))
        rows = db.execute(f"SELECT {column} FROM probe ORDER BY CAST(name AS BIGINT)").fetchall()
        for value in values:
            assert db.execute(f"SELECT count(*) FROM probe WHERE {column} = ?", (value,)).fetchone()[0] >= 1
        db.execute(f"UPDATE probe SET {column} = :value", {"value": values[0]})
        assert {row[0] for row in db.execute(f"SELECT {column} FROM probe")} == {values[0]}
        return [row[0] for row in rows]

    found = case.database.writing(work)
    assert [(type(one), one) for one in found] == [(type(one), one) for one in values]


CALM = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


@CALM
@given(values=st.lists(st.floats(allow_nan=False), min_size=1, max_size=20))
def test_floats_are_exact(case: RecordsCase, values: list[float]) -> None:
    round_trip(case, "score", values)


@CALM
@given(values=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20))
def test_integers_up_to_62_bits_are_exact(case: RecordsCase, values: list[int]) -> None:
    round_trip(case, "number", values)


def test_integers_at_the_bounds_of_types_are_exact(case: RecordsCase) -> None:
    bounds = [
        sign * (2**bits + less) for bits in (7, 8, 15, 16, 31, 32, 53, 62) for less in (-1, 0, 1) for sign in (1, -1)
    ]
    round_trip(case, "number", [value for value in bounds if abs(value) <= 2**62])


@CALM
@given(values=st.lists(st.binary(max_size=200), min_size=1, max_size=10))
def test_bytes_are_exact(case: RecordsCase, values: list[bytes]) -> None:
    round_trip(case, "data", values)


def test_a_megabyte_of_bytes_is_exact(case: RecordsCase) -> None:
    round_trip(case, "data", [bytes(range(256)) * 4096, b"", b"\\x00", b"\0"])


@CALM
@given(values=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=10))
def test_texts_are_exact(case: RecordsCase, values: list[str]) -> None:
    found = case.database.writing(partial(_stored_texts, texts=values))
    assert found == [value.replace("\0", case.nul) for value in values]


def _stored_texts(db: Session, texts: Sequence[str]) -> list[str]:
    db.execute("DELETE FROM probe")
    db.executemany("INSERT INTO probe (number, name) VALUES (?, ?)", list(enumerate(texts)))
    return [row["name"] for row in db.execute("SELECT name FROM probe ORDER BY number")]


def test_truth_values_are_numbers(case: RecordsCase) -> None:
    case.write("INSERT INTO probe (name, number) VALUES ('yes', ?), ('no', ?)", True, False)
    assert case.all("SELECT name, number FROM probe ORDER BY number") == [("no", 0), ("yes", 1)]
    assert case.one("SELECT name FROM probe WHERE number = ?", True) == "yes"
    assert case.one("SELECT count(*) FROM probe WHERE ? = 1 OR name = 'no'", False) == 1
    assert bool(case.one("SELECT number = 1 FROM probe WHERE name = 'yes'")) is True
    assert bool(case.one("SELECT EXISTS (SELECT 1 FROM probe WHERE name = 'none')")) is False


def test_texts_of_the_records_are_ordered_byte_by_byte(case: RecordsCase) -> None:
    names = ["", " ", "-", "A", "Z", "a", "a b", "aB", "ab", "z", "\u00c4", "\u00e4", "\uffff", "\U0001f9d1"]
    case.database.writing(
        lambda db: db.executemany("INSERT INTO facts VALUES (?, '')", [(f"x{name}",) for name in reversed(names)])
    )
    assert [name[1:] for (name,) in case.all("SELECT name FROM facts WHERE name >= 'x' ORDER BY name")] == names
    assert case.one("SELECT max(name) FROM facts") == f"x{names[-1]}"


# Placeholders and literals


def test_none_is_null_wherever_a_placeholder_stands(case: RecordsCase) -> None:
    case.write("INSERT INTO probe (name, number, score, data, user) VALUES (?, ?, ?, ?, ?)", *[None] * 5)
    assert case.all("SELECT * FROM probe") == [(None,) * 5]
    case.write("UPDATE probe SET name = ?, number = ?, score = ?, data = ?, user = ?", "a", 1, 0.5, b"d", "u")
    assert case.all("SELECT * FROM probe") == [("a", 1, 0.5, b"d", "u")]
    for column in ("name", "number", "score", "data", "user"):
        assert case.one(f"SELECT count(*) FROM probe WHERE {column} = coalesce(?, {column})", None) == 1
        assert case.one(f"SELECT count(*) FROM probe WHERE {column} = ?", None) == 0
        assert case.one(f"SELECT count(*) FROM probe WHERE ? IS NULL OR {column} = ?", None, None) == 1
        assert case.one(f"SELECT count(*) FROM probe WHERE ? IS NOT NULL AND {column} = ?", None, None) == 0
    assert case.one("SELECT count(*) FROM probe WHERE number <= coalesce(?, number)", None) == 1
    assert case.one("SELECT count(*) FROM json_each(?)", None) == 0
    assert case.one("SELECT coalesce(?, ?, 'neither')", None, None) == "neither"
    case.write("UPDATE probe SET name = coalesce(?, name), number = coalesce(?, number)", None, None)
    case.database.writing(lambda db: db.executemany("INSERT INTO probe VALUES (?, ?, ?, ?, ?)", [(None,) * 5] * 2))
    assert case.one("SELECT count(*) FROM probe WHERE name IS NULL") == 2


@pytest.mark.parametrize("wanted", [None, "a", "b"])
@pytest.mark.parametrize(
    "condition",
    [
        ":wanted IS NULL OR name = :wanted",
        "(:wanted IS NULL OR name = :wanted) AND (:none IS NULL OR number = :none)",
        ":wanted IS NULL OR name IN (SELECT value FROM json_each(:listed))",
        "NOT (:wanted IS NOT NULL) OR name = :wanted",
        "name = coalesce(:wanted, name)",
        ":wanted IS NULL\n OR name = :wanted",
    ],
)
def test_a_named_value_may_be_none_and_stand_in_several_places(
    case: RecordsCase, condition: str, wanted: str | None
) -> None:
    case.insert("a", "b", "c")
    values = {"wanted": wanted, "none": None, "listed": as_json([wanted])}
    named = {name: value for name, value in values.items() if f":{name}" in condition}
    found = case.database.reading(
        lambda db: [row[0] for row in db.execute(f"SELECT name FROM probe WHERE {condition} ORDER BY name", named)]
    )
    assert found == (["a", "b", "c"] if wanted is None else [wanted])


@pytest.mark.parametrize("keys", [None, [], [2], [1, 3]])
def test_a_list_of_keys_may_be_none(case: RecordsCase, keys: list[int] | None) -> None:
    case.database.writing(lambda db: db.executemany("INSERT INTO probe (number) VALUES (?)", ((n,) for n in (1, 2, 3))))
    found = case.database.reading(
        lambda db: [
            row[0]
            for row in db.execute(
                "SELECT number FROM probe WHERE (:keys IS NULL OR number IN "
                "(SELECT CAST(value AS BIGINT) FROM json_each(:keys))) ORDER BY number",
                {"keys": None if keys is None else as_json(keys)},
            )
        ]
    )
    assert found == ([1, 2, 3] if keys is None else keys)


def test_a_column_may_be_called_user(case: RecordsCase) -> None:
    case.write("INSERT INTO probe (name, user) VALUES ('n', ?)", "dana")
    case.write("UPDATE probe SET user = user || ?", "!")
    assert case.all("SELECT user, probe.user, max(user) OVER () FROM probe WHERE user = ?", "dana!") == [("dana!",) * 3]
    assert (
        case.one("SELECT count(*) FROM (SELECT name AS user FROM probe GROUP BY name, user) AS t WHERE user = 'n'") == 1
    )
    row = case.database.reading(lambda db: db.execute("SELECT * FROM probe ORDER BY user").fetchone())
    assert row["user"] == "dana!"
    assert case.database.reading(lambda db: db.execute("SELECT user FROM probe").fetchone())["user"] == "dana!"


@pytest.mark.parametrize(
    "literal",
    [
        "%",
        "%s",
        "100 %(name)s",
        "?",
        "is it?",
        ":name",
        "12:30:00",
        "a::text",
        "it''s ? here",
        "-- ?",
        "user",
        "{}",
        "\\",
    ],
)
def test_literals_stay_as_they_are(case: RecordsCase, literal: str) -> None:
    assert case.one(f"SELECT '{literal}'") == literal.replace("''", "'")
    assert case.all(f"SELECT '{literal}', ?, '{literal}', ?", "a", "b") == [
        (literal.replace("''", "'"), "a", literal.replace("''", "'"), "b")
    ]
    case.insert(literal, "other")
    assert case.one("SELECT count(*) FROM probe WHERE name = ? AND name != '?'", literal) == (literal != "?")


def test_comments_hold_no_placeholders(case: RecordsCase) -> None:
    sql = "SELECT ? -- is this ? or :that a user's\n, ?"
    assert case.all(sql, "a", "b") == [("a", "b")]


PIECES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0\ud800"), max_size=8).map(lambda text: (text, None)),
    st.one_of(st.text("ab?:'", max_size=3), st.integers(-(2**40), 2**40), st.none()).map(lambda value: (None, value)),
)


@CALM
@given(pieces=st.lists(PIECES, min_size=1, max_size=8))
def test_any_mix_of_literals_and_placeholders_gives_what_it_says(
    case: RecordsCase, pieces: list[tuple[str | None, Any]]
) -> None:
    columns = ["?" if text is None else "'" + text.replace("'", "''") + "'" for text, _ in pieces]
    values = [value for text, value in pieces if text is None]
    expected = tuple(value if text is None else text for text, value in pieces)
    assert case.all(f"SELECT {', '.join(columns)}", *values) == [expected]


# JSON, and texts whose case is ignored


@pytest.mark.parametrize(
    ("data", "values"),
    [
        ('["a", "b", "a"]', ["a", "b", "a"]),
        ("[]", []),
        ("{}", []),
        ('{"x": "1", "y": "two"}', ["1", "two"]),
        ('["\\u00e4\\ud83e\\uddd1", "\\"quoted\\"", "\\\\", "\\n"]', ["\u00e4\U0001f9d1", '"quoted"', "\\", "\n"]),
        ('["", null]', ["", None]),
        (' [ "spaced" ] ', ["spaced"]),
    ],
)
def test_json_each_gives_the_elements_and_the_members(case: RecordsCase, data: str, values: list[str]) -> None:
    assert [value for (value,) in case.all("SELECT value FROM json_each(?)", data)] == values
    case.insert(data)
    assert [row[0] for row in case.all("SELECT value FROM probe, json_each(name)")] == values


def test_json_each_gives_numbers_that_can_be_cast(case: RecordsCase) -> None:
    keys = [0, 7, 2**31, 2**62, -1]
    found = case.all("SELECT CAST(value AS BIGINT) FROM json_each(?)", as_json(keys))
    assert [key for (key,) in found] == keys


def test_json_each_gives_the_names_of_members_and_the_places_of_elements(case: RecordsCase) -> None:
    assert case.all("SELECT key, value FROM json_each(?)", '{"b": "1", "a": "2"}') == [("b", "1"), ("a", "2")]
    found = case.all("SELECT CAST(key AS BIGINT), value FROM json_each(?)", '["x", "y"]')
    assert found == [(0, "x"), (1, "y")]


NESTED = '{"permissions": {"allowed_users": ["dana", "erin"], "none": null, "visibility": "public"}, "identity": "i"}'


def test_json_is_read_by_a_path(case: RecordsCase) -> None:
    case.insert(NESTED)
    each = "SELECT value FROM probe, json_each(name, ?)"
    assert case.all(each, "$.permissions.allowed_users") == [("dana",), ("erin",)]
    assert case.all("SELECT value FROM probe, json_each(name, '$.permissions.allowed_users')") == [("dana",), ("erin",)]
    assert case.all(each, "$.permissions.allowed_groups") == []
    assert case.all(each, "$.nothing.allowed_users") == []
    extract = "SELECT json_extract(name, ?) FROM probe"
    assert case.one(extract, "$.permissions.visibility") == "public"
    assert case.one(extract, "$.identity") == "i"
    assert case.one(extract, "$.nothing") is None
    assert case.one(extract, "$.permissions.none") is None
    assert case.one("SELECT count(*) FROM probe WHERE json_extract(name, '$.identity') = ?", "i") == 1
    assert case.one("SELECT count(*) FROM probe WHERE json_extract(name, '$.identity') = ?", "I") == 0


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "\\\\\\u0000u0000", "\\ufffd", "\\ud800", "u0000"])
def test_what_looks_like_an_escape_in_json_is_none(case: RecordsCase, text: str) -> None:
    case.insert(text, "other")
    assert case.all("SELECT value FROM json_each(?)", as_json([text])) == [(text,)]
    assert case.all("SELECT value FROM json_each(?, '$.x')", as_json({"x": [text]})) == [(text,)]
    assert case.one("SELECT json_extract(?, '$.x')", as_json({"x": text})) == text
    assert case.one("SELECT count(*) FROM json_each(?) WHERE value = ?", as_json([text]), text) == 1
    assert case.all("SELECT name FROM probe WHERE name IN (SELECT value FROM json_each(?))", as_json([text])) == [
        (text,)
    ]


@pytest.mark.parametrize("text", ["a\0b", "\0", "\\\0", "\\\\\0\\u0000"])
def test_json_with_a_nul_can_be_read(case: RecordsCase, text: str) -> None:
    """SQLite ends an element there; PostgreSQL replaces it, as it does in texts."""
    kept = text.partition("\0")[0] if case.nul == "\0" else text.replace("\0", case.nul)
    listed = [(kept,), ("after",)]
    assert case.all("SELECT value FROM json_each(?)", as_json([text, "after"])) == listed
    assert case.all("SELECT value FROM json_each(?, '$.x')", as_json({"x": [text, "after"], text: 1})) == listed
    data = as_json({"x": text, "y": "after"})
    assert case.all("SELECT json_extract(?, '$.x'), json_extract(?, '$.y')", data, data) == [(kept, "after")]


@CALM
@given(
    values=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=6)
)
def test_json_each_gives_any_text(case: RecordsCase, values: list[str]) -> None:
    assert [value for (value,) in case.all("SELECT value FROM json_each(?)", as_json(values))] == values


SAME_BUT_FOR_CASE = [
    ("Report.PDF", "report.pdf", True),
    ("HERON", "heron", True),
    ("heron", "heron ", False),
    ("\u00c4RGER", "\u00e4rger", False),
    ("\u00c4RGER", "\u00c4rger", True),
    ("\u0130stanbul", "istanbul", False),
    ("K", "\u212a", False),  # the Kelvin sign
    ("stra\u00dfe", "STRASSE", False),
    ("a_b", "a%b", False),
    ("[", "{", False),
    ("@", "`", False),
]


@pytest.mark.parametrize(("stored", "asked", "same"), SAME_BUT_FOR_CASE)
def test_nocase_ignores_the_case_of_ascii_letters_only(case: RecordsCase, stored: str, asked: str, same: bool) -> None:
    case.write("INSERT INTO facts VALUES ('x', ?)", stored)
    assert case.one("SELECT count(*) FROM facts WHERE name = 'x' AND value = ? COLLATE NOCASE", asked) == same
    named = "SELECT count(*) FROM facts WHERE facts.value = :asked COLLATE NOCASE AND (1 = 1 OR value = :asked)"
    assert case.database.reading(lambda db: db.execute(named, {"asked": asked}).fetchone()[0]) == same


# Results


def test_rows_are_read_by_name_and_by_position(case: RecordsCase) -> None:
    case.write("INSERT INTO probe (name, number) VALUES ('a', 1), ('b', 2)")

    def work(db: Session) -> None:
        row = db.execute("SELECT name, number, number + 1 AS more FROM probe ORDER BY name").fetchone()
        assert (row[0], row["name"], row[-1], row["more"]) == ("a", "a", 2, 2)
        assert tuple(row) == ("a", 1, 2)
        assert dict(row) == {"name": "a", "number": 1, "more": 2}
        assert list(row.keys()) == ["name", "number", "more"]
        name, *numbers = row
        assert (name, numbers) == ("a", [1, 2])
        assert tuple(row[1:]) == (1, 2)
        assert len(row) == 3
        with pytest.raises((IndexError, KeyError)):
            row["nothing"]
        with pytest.raises(IndexError):
            row[3]

    case.database.reading(work)


def test_results_are_read_in_every_way(case: RecordsCase) -> None:
    case.insert("a", "b", "c")

    def work(db: Session) -> None:
        names = "SELECT name FROM probe ORDER BY name"
        assert [row["name"] for row in db.execute(names)] == ["a", "b", "c"]
        assert [name for (name,) in db.execute(names).fetchall()] == ["a", "b", "c"]
        found = db.execute(names)
        assert [found.fetchone()[0], *(row[0] for row in found)] == ["a", "b", "c"]
        assert (found.fetchone(), found.fetchall()) == (None, [])
        assert db.execute("SELECT name FROM probe WHERE name = 'x'").fetchone() is None
        assert dict(db.execute("SELECT name, name || '!' FROM probe").fetchall())["b"] == "b!"

    case.database.reading(work)


def test_statements_run_while_the_rows_of_another_are_read(case: RecordsCase) -> None:
    case.insert("a", "b", "c")

    def work(db: Session) -> list[tuple[str, int]]:
        return [
            (row["name"], db.execute("SELECT count(*) FROM probe WHERE name <= ?", (row["name"],)).fetchone()[0])
            for row in db.execute("SELECT name FROM probe ORDER BY name")
        ]

    assert case.database.reading(work) == [("a", 1), ("b", 2), ("c", 3)]


def test_the_rowcount_is_that_of_all_changed_rows(case: RecordsCase) -> None:
    def work(db: Session) -> list[int]:
        insert = "INSERT INTO probe (name, number) VALUES (?, ?)"
        return [
            db.executemany(insert, ((str(number), number % 3) for number in range(9))).rowcount,
            db.execute("UPDATE probe SET score = 1 WHERE number = 2").rowcount,
            db.execute("UPDATE probe SET score = 1 WHERE number = 7").rowcount,
            db.executemany("UPDATE probe SET score = 2 WHERE number = ?", [(0,), (1,), (8,)]).rowcount,
            db.executemany("DELETE FROM probe WHERE name = ?", [("1",), ("5",), ("5",)]).rowcount,
            db.execute("DELETE FROM probe").rowcount,
            db.executemany(insert, []).rowcount,
        ]

    assert case.database.writing(work) == [9, 3, 0, 6, 2, 7, 0]


def test_what_was_inserted_or_deleted_is_returned(case: RecordsCase) -> None:
    def work(db: Session) -> list[Any]:
        made = db.execute(
            "INSERT INTO jobs (id, collection, collection_id, owner, chunking, created_at) "
            "VALUES ('i', 1, 'c', 'o', '{}', 0.5) RETURNING key, owner"
        ).fetchone()
        gone = db.execute("DELETE FROM jobs WHERE key = ? RETURNING *", (made["key"],)).fetchone()
        return [tuple(made), gone["created_at"], gone["cancelled"], gone["completed_at"]]

    [(key, owner), *deleted] = case.database.writing(work)
    assert (key > 0, owner, deleted) == (True, "o", [0.5, 0, None])


def test_sums_and_counts_of_integers_are_integers(case: RecordsCase) -> None:
    case.write(
        "INSERT INTO probe (name, number, score) VALUES ('ab', ?, 0.5), ('c', 3, 1.0), (NULL, NULL, NULL)", 2**61
    )
    found = case.all(
        "SELECT sum(number), count(*), count(name), max(number), sum(length(name)), coalesce(sum(number), 0), "
        "min(length(name)), sum(number * 2 - number), sum(CASE WHEN number > 0 THEN 1 ELSE 0 END) FROM probe"
    )
    assert found == [(2**61 + 3, 3, 2, 2**61, 3, 2**61 + 3, 1, 2**61 + 3, 2)]
    assert {type(value) for value in found[0]} == {int}
    assert case.all("SELECT sum(number), coalesce(sum(number), 0) FROM probe WHERE name = 'x'") == [(None, 0)]
    assert case.all("SELECT sum(score), sum(score) / 2, max(score) FROM probe") == [(1.5, 0.75, 1.0)]


def test_integers_are_divided_without_a_remainder_and_compared_with_floats(case: RecordsCase) -> None:
    case.write("INSERT INTO probe (number, score) VALUES (7, 7.5)")
    assert case.all("SELECT number / 2, number % 4, number * ?, -number / 2 FROM probe", 2) == [(3, 3, 14, -3)]
    assert case.one("SELECT count(*) FROM probe WHERE number < ? AND score > ? AND number < score", 7.25, 7) == 1
    assert case.one("SELECT number * ? FROM probe", 0.5) == 3.5


def test_thousands_of_rows_are_written_and_read_at_once(case: RecordsCase) -> None:
    rows = [(f"name {number}", number, number / 7, bytes([number % 256]) * 20) for number in range(5_000)]
    case.database.writing(
        lambda db: db.executemany("INSERT INTO probe (name, number, score, data) VALUES (?, ?, ?, ?)", iter(rows))
    )
    assert case.all("SELECT name, number, score, data FROM probe ORDER BY number") == rows


def test_upserts_and_recursive_queries(case: RecordsCase) -> None:
    upsert = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = facts.value || excluded.value"
    case.database.writing(lambda db: db.executemany(upsert, [("x", "1"), ("x", "2"), ("y", "3")]))
    assert case.all("SELECT name, value FROM facts WHERE name IN ('x', 'y') ORDER BY name") == [("x", "12"), ("y", "3")]
    counted = "WITH RECURSIVE up (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM up WHERE n < ?) SELECT sum(n) FROM up"
    assert case.one(counted, 10) == 55


def test_many_threads_read_and_write_at_once(case: RecordsCase) -> None:
    """More than there are connections."""
    with ThreadPoolExecutor(40) as threads:
        work: list[Future[Any]] = []
        for number in range(40):
            work.append(threads.submit(case.database.writing, partial(_insert_number, number=number), ordered=False))
            work.append(threads.submit(case.database.reading, _count))
        for one in work:
            one.result(PATIENCE_S)
    assert case.one("SELECT count(DISTINCT number) FROM probe") == 40
