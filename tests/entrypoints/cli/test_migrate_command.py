"""`anabranch migrate`: all records move to PostgreSQL and back, also if it is interrupted, and are compared."""

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from anabranch.domain.audit import AuditFilter, AuditRecord
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.entrypoints.cli.resources import alone
from anabranch.knowledge.model import Caller, Permissions
from anabranch.knowledge.records import audit, collections, erasures, facts, keys, moves, nodes
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.migration import LEFT_OUT, TABLES, Migration, Places, RowBatch
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.records.queries import LoggedCitation
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase
from support.cli_runner import Ran, Run, environment, here
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, Workshop, query_record, text, workshop
from support.postgres_server import shared_postgres

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-migrate")]

PATIENCE_S = 30
TEXTS = tuple(f"heron{number} Herons number {number} eat fish." for number in range(30))
# PostgreSQL cannot hold the first character between the words.
NUL_TEXT = "What\0is \u00e9 \U0001f426 this?"
RESTRICTED = Permissions(visibility="restricted", allowed_users=("alice",), allowed_groups=("staff",))
# Each move adds records to the audit log of the target.
LOG = {"audit", "audit_names", "audit_chain"}
NODE = nodes.Node(id="n1", name="host-1", version="1", started_at=0, seen_at=0, seq=0, erased_pass=0)
BATCH = RowBatch()
# It has no short decimal form.
SCORE = 0.1 + 0.2
Digests = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with something in every table."""
    folder = tmp_path_factory.mktemp("migrated") / "data"

    async def fill() -> None:
        async with workshop(folder, database=SqliteDatabase.open(folder)) as shop:
            await _ingest(shop)
            await _ask(shop)

    asyncio.run(fill())
    return folder


async def _ingest(shop: Workshop) -> None:
    await shop.collection()
    await shop.collection("plans", ALICE, default_permissions=RESTRICTED)
    await shop.put(*TEXTS, metadata={"kind": "bird"})
    await shop.put("bridge The secret bridge is long.", collection="plans", caller=ALICE)
    await shop.put("replaced One.", "deleted Two.", "erased Three.")
    await shop.put("replaced Otherwise.")
    await shop.room.delete_document(OPERATOR, "deleted")
    await shop.room.erase(document="erased")
    await shop.room.publish(OPERATOR, "notes", "bob", "birds")
    await shop.room.ingest(OPERATOR, "notes", [text("pending This waits.")])
    shop.database.writing(lambda db: erasures.note_backup(db, Path("/backups/monday.sqlite"), 1.5))


async def _ask(shop: Workshop) -> None:
    found = tuple(await shop.find("herons", BOB, limit=3))
    quote = LoggedCitation(
        citation_index=1, chunk_id="c", document_id="d", quoted_text=NUL_TEXT, start_char=None, end_char=None
    )
    for number in range(4):
        asked = msgspec.structs.replace(
            query_record(f"q{number}", "bob"),
            original=NUL_TEXT,
            found=found,
            quotes=(quote,),
            collections=(1,),
            relevance=SCORE,
        )
        await shop.room.record(asked)
    await shop.room.rate(BOB, "q1", "thumbs_up", "good")
    await shop.room.cursors("queries")


@pytest.fixture
def data(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "data"))


@pytest.fixture
def secret(data: Path) -> str:
    """That of an API key."""
    with opened(data) as database:
        return database.writing(lambda db: keys.create(db, user="alice", groups=("staff",)))[1]


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(data, monkeypatch, capsys)


@pytest.fixture
def url() -> Iterator[str]:
    made = shared_postgres().create_database()
    yield made
    shared_postgres().drop(made)


@contextmanager
def opened(place: Path | str) -> Iterator[Database]:
    with closing(SqliteDatabase.open(place) if isinstance(place, Path) else PostgresDatabase.open(place)) as database:
        yield database


@contextmanager
def quiet(_: str) -> Iterator[Callable[[int, int], None]]:
    """Shows no progress."""
    yield lambda done, total: None


@contextmanager
def moving(place: Path | str, to: Path | str, shows: Any = quiet, batch: RowBatch = BATCH) -> Iterator[Migration]:
    with opened(place) as source, opened(to) as target:
        yield Migration(source, target, Places("here", "there"), shows, batch)


def moved(move: Migration) -> bool:
    """Whether all rows are equal at the end of a move."""
    move.begin()
    move.copy()
    return move.finish().is_equal


def places_of(direction: str, data: Path, url: str, back: Path) -> tuple[Path | str, Path | str]:
    """The source and the target of a move to PostgreSQL, or back from there."""
    if direction == "up":
        return data, url
    with moving(data, url) as move:
        assert moved(move)
    return url, back


def digests(ran: Ran, side: str = "") -> Digests:
    """The number of rows and the digest of each table."""
    tables = json.loads(ran.out)["tables"]
    return {one["table"]: (one[f"{side}rows"], one[f"{side}digest"]) for one in tables}


def without_log(found: Digests) -> Digests:
    return {table: value for table, value in found.items() if table not in LOG}


def unequal(ran: Ran) -> dict[str, list[str]]:
    """The tables that differ, with the first keys."""
    tables = json.loads(ran.out)["tables"]
    return {one["table"]: one["differing"] for one in tables if one["digest"] != one["target_digest"]}


def changed(url: str, statement: str) -> int:
    """How many rows a statement changes, which somebody runs in PostgreSQL."""
    with psycopg.connect(url) as connection:
        return connection.execute(statement.encode()).rowcount


def actions(place: Path | str) -> list[str]:
    """The audit log, newest first."""
    return [one.action for one in records(place)]


def records(place: Path | str) -> list[AuditRecord]:
    with opened(place) as database:
        return database.reading(lambda db: audit.listed(db, AuditFilter(), None, 1_000))


def in_shop(place: Path | str, folder: Path, work: Callable[[Workshop], Any]) -> Any:
    """What an asynchronous function of a workshop returns, with the records of a place."""

    async def do() -> Any:
        with opened(place) as database:
            async with workshop(folder, database=database) as shop:
                return await work(shop)

    return asyncio.run(do())


def titles(place: Path | str, folder: Path, question: str, caller: Caller) -> set[str]:
    return set(in_shop(place, folder, lambda shop: shop.titles(question, caller, limit=50)))


# --- there and back


def test_every_table_is_copied_or_left_out(data: Path, url: str) -> None:
    named = {one.name for one in TABLES} | set(LEFT_OUT)
    with opened(data) as database:
        tables = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        assert {row[0] for row in database.reading(lambda db: db.execute(tables).fetchall())} | {"reserved"} == named
    with opened(url) as database:
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        assert {row[0] for row in database.reading(lambda db: db.execute(tables).fetchall())} == named


def test_records_move_to_postgres_and_back(data: Path, secret: str, run: Run, url: str, tmp_path: Path) -> None:
    before = titles(data, tmp_path / "a", "herons fish", BOB)
    there = run("migrate", "--to", url, "--json")
    assert (there.code, unequal(there)) == (0, {}), there
    assert all(rows for rows, _ in digests(there).values()), "the example has rows in every table"
    assert titles(url, tmp_path / "b", "herons fish", BOB) == before
    assert "bridge" in titles(url, tmp_path / "b", "bridge", ALICE)
    assert "bridge" not in titles(url, tmp_path / "b", "bridge", BOB)
    back = run("migrate", "--to", str(tmp_path / "back"), "--json", AGGREGATOR_DATABASE_URL=url)
    assert (back.code, unequal(back)) == (0, {}), back
    assert without_log(digests(back, "target_")) == without_log(digests(there))
    assert titles(tmp_path / "back", tmp_path / "back", "herons fish", BOB) == before
    for place in (url, tmp_path / "back"):
        with opened(place) as database:
            found = database.reading(lambda db: keys.find(db, secret))
            assert found is not None
            assert (found.user, found.groups) == ("alice", ("staff",))
            assert database.reading(audit.verify) == []


def test_a_move_is_recorded_and_says_what_to_set(data: Path, run: Run, url: str) -> None:
    done = run("migrate", "--to", url)
    assert done.code == 0, done
    password = url.split(":")[2].split("@", maxsplit=1)[0]
    assert f"AGGREGATOR_DATABASE_URL={url.replace(password, '***')}\n" in done.out
    assert "Moved 2 collections, 32 documents, 32 chunks, 0 keys:" in done.out
    assert f"The records in {data} stay as they are." in done.err
    assert password not in done.out + done.err
    (copied, *_) = records(data)
    (migrated, *before) = records(url)
    assert (copied.action, copied.name) == ("records.copied", url.replace(password, "***"))
    assert (migrated.action, migrated.name, migrated.actor) == ("records.migrated", str(data), "operator")
    assert [one.hash for one in before] == [one.hash for one in records(data)]
    with opened(data) as database:
        assert database.reading(lambda db: facts.fact(db, "moved_to")) == url.replace(password, "***")


def test_a_move_to_a_folder_says_what_to_set(run: Run, url: str, tmp_path: Path) -> None:
    assert run("migrate", "--to", url).code == 0
    done = run("migrate", "--to", str(tmp_path / "back"), AGGREGATOR_DATABASE_URL=url)
    assert done.out.splitlines()[1:] == [f"AGGREGATOR_DATA_DIR={tmp_path / 'back'}", "unset AGGREGATOR_DATABASE_URL"]


def test_a_server_uses_no_records_that_were_moved_or_are_not_complete(data: Path, run: Run, url: str) -> None:
    with opened(data) as source, opened(url) as target:
        Migration(source, target, Places("here", "there"), quiet, BATCH).begin()
        with pytest.raises(ConfigurationError, match="not complete yet"):
            target.reading(moves.check_served)
        source.reading(moves.check_served)
    assert run("migrate", "--to", url).code == 0
    with opened(data) as source, opened(url) as target:
        target.reading(moves.check_served)
        with pytest.raises(ConfigurationError, match="anabranch migrate --stay"):
            source.reading(moves.check_served)
    refused = run("serve", "--port", "0")
    assert refused.code == 2
    assert "were moved to" in refused.err
    assert run("migrate", "--stay").out == "A server can use these records again.\n"
    assert run("migrate", "--stay").out == "These records were not moved.\n"
    with opened(data) as source:
        source.reading(moves.check_served)
    assert "records.used_again" in actions(data)


def test_keys_of_deleted_rows_are_not_used_again(data: Path, run: Run, url: str, tmp_path: Path) -> None:
    in_shop(data, data, lambda shop: shop.put("newest This is deleted."))
    in_shop(data, data, lambda shop: shop.room.delete_document(OPERATOR, "newest"))
    assert run("migrate", "--to", url).code == 0
    assert changed(url, "DELETE FROM queries WHERE id = 'q3'") == 1  # their keys are not counted in a folder
    assert run("migrate", "--to", str(tmp_path / "back"), AGGREGATOR_DATABASE_URL=url).code == 0
    for place in (data, url, tmp_path / "back"):
        in_shop(place, tmp_path / "index", lambda shop: shop.collection("after"))
        in_shop(place, tmp_path / "index", lambda shop: shop.put("after The counters continue.", collection="after"))
    columns = ("documents", "chunks", "collections", "jobs", "items")
    queries = [f"SELECT max(key) FROM {table}" for table in columns] + ["SELECT max(seq) FROM changes"]
    found = []
    for place in (data, url, tmp_path / "back"):
        with opened(place) as database:
            found.append([database.reading(lambda db, q=q: db.execute(q).fetchone()[0]) for q in queries])  # type: ignore[misc]
    assert found[0] == found[1] == found[2]


def test_texts_keep_all_but_nul_and_numbers_are_exact(data: Path, run: Run, url: str, tmp_path: Path) -> None:
    assert run("migrate", "--to", url).code == 0
    assert run("migrate", "--to", str(tmp_path / "back"), AGGREGATOR_DATABASE_URL=url).code == 0
    with opened(tmp_path / "back") as database:
        query = "SELECT original, relevance FROM queries JOIN responses ON query = id"
        rows = database.reading(lambda db: db.execute(query).fetchall())
    assert {tuple(row) for row in rows} == {(NUL_TEXT.replace("\0", "\N{REPLACEMENT CHARACTER}"), SCORE)}


# --- while the source is in use


def test_what_changes_after_the_first_run_is_copied_by_the_next(data: Path, run: Run, url: str) -> None:
    with alone(data):
        first = run("migrate", "--to", url)
    assert first.code == 1
    assert "All rows are copied." in first.err
    assert "Stop it, and run this again" in first.err
    assert titles(url, data, "herons fish", BOB), "all rows are copied"

    async def change(shop: Workshop) -> None:
        await shop.put("heron1 Storks eat frogs.", "heron31 Another one.")  # a new version, and a new document
        await shop.room.delete_document(OPERATOR, "heron2")
        await shop.room.describe(OPERATOR, "heron3", title="renamed", metadata={}, permissions=RESTRICTED)
        await shop.room.describe_collection(OPERATOR, "notes", description="Birds.")
        await shop.room.delete_collection(ALICE, "plans")
        await shop.collection("plans", ALICE)  # of the same name, with another key
        await shop.room.record(query_record("q9", "carol"))
        shop.database.writing(lambda db: facts.set_fact(db, "embedder", "other"))

    in_shop(data, data, change)
    second = run("migrate", "--to", url, "--json")
    assert second.code == 0, second
    assert (second.code, unequal(second)) == (0, {}), second
    assert actions(data).count("records.copied") == 1
    with opened(url) as database:
        assert [one.name for one in database.reading(collections.listed)] == ["notes", "plans"]


@pytest.mark.parametrize("direction", ["up", "back"])
def test_everything_may_change_at_any_moment_of_the_copy(data: Path, url: str, tmp_path: Path, direction: str) -> None:
    """Each table is preceded by a new version of a document, a deleted one, a new collection or a deleted one."""
    number = iter(range(100))

    async def change(shop: Workshop) -> None:
        at = next(number)
        if at % 2:
            await shop.room.delete_collection(OPERATOR, "short-lived")
        else:
            await shop.collection("short-lived")
            await shop.put(f"brief{at} Gone soon.", collection="short-lived")
        await shop.put(f"changing{at % 3} Version {at} of this.", "heron5 Other.")
        await shop.room.delete_document(OPERATOR, f"heron{at + 6}" if at < 20 else f"changing{at % 3}")
        await shop.room.record(query_record(f"r{at}", "dave"))

    @contextmanager
    def step(name: str) -> Iterator[Callable[[int, int], None]]:
        if name.startswith("Copying"):
            in_shop(places[0], data, change)
        yield lambda done, total: None

    places = places_of(direction, data, url, tmp_path / "back")
    with moving(*places, step, RowBatch(rows=3, size=2_000)) as move:
        move.begin()
        for _ in range(2):
            move.copy()
        assert not move.compare().is_equal
        assert move.finish().is_equal
        assert move.compare().is_equal
    assert next(number) > 40


@pytest.mark.parametrize("direction", ["up", "back"])
def test_nothing_is_written_to_the_source_while_it_is_compared(
    data: Path, url: str, tmp_path: Path, direction: str
) -> None:
    places = places_of(direction, data, url, tmp_path / "back")
    refused: list[Exception] = []

    @contextmanager
    def step(name: str) -> Iterator[Callable[[int, int], None]]:
        if name == "Verifying documents":
            try:
                write()
            except (sqlite3.OperationalError, psycopg.errors.LockNotAvailable) as error:
                refused.append(error)
        yield lambda done, total: None

    def write() -> None:
        if direction == "back":
            changed(url, "SET lock_timeout = 10; DELETE FROM queries")
        with closing(sqlite3.connect(data / NAME, timeout=0)) as db:
            db.execute("DELETE FROM queries")

    with moving(*places, step) as move:
        assert moved(move)
    assert len(refused) == 1


# --- what is refused


def test_a_target_with_records_is_refused(run: Run, url: str, tmp_path: Path) -> None:
    in_shop(url, tmp_path / "node", lambda shop: shop.collection("mine"))
    done = run("migrate", "--to", url)
    assert (done.code, "holds records already (collections, changes, audit" in done.err) == (1, True), done
    with opened(url) as database:
        assert [one.name for one in database.reading(collections.listed)] == ["mine"]


def test_the_move_of_other_records_is_not_continued(data: Path, run: Run, url: str, tmp_path: Path) -> None:
    with alone(data):
        assert run("migrate", "--to", url).code == 1
    in_shop(tmp_path / "other", tmp_path / "other", lambda shop: shop.collection("mine"))
    done = run("migrate", "--to", url, AGGREGATOR_DATA_DIR=str(tmp_path / "other"))
    assert (done.code, "holds the move of other records" in done.err) == (1, True), done


def test_a_target_that_a_server_uses_is_refused(run: Run, url: str) -> None:
    with opened(url) as database:
        database.writing(lambda db: nodes.beat(db, NODE))
    done = run("migrate", "--to", url)
    assert (done.code, "is in use: a server is running (host-1)" in done.err) == (1, True), done


def test_postgres_is_not_left_while_a_server_uses_it(run: Run, url: str, tmp_path: Path) -> None:
    assert run("migrate", "--to", url).code == 0
    with opened(url) as database:
        database.writing(lambda db: nodes.beat(db, NODE))
    done = run("migrate", "--to", str(tmp_path / "back"), AGGREGATOR_DATABASE_URL=url)
    assert (done.code, "All rows are copied." in done.err, "(host-1)" in done.err) == (1, True, True), done
    with opened(url) as database:
        database.writing(lambda db: nodes.leave(db, NODE.id))
    assert run("migrate", "--to", str(tmp_path / "back"), AGGREGATOR_DATABASE_URL=url).code == 0


@pytest.mark.parametrize("place", ["mysql://host/name", "postgresql://127.0.0.1:1/none", "SELF", "FILE"])
def test_a_place_that_cannot_be_used_is_named(data: Path, run: Run, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    names = {"SELF": str(data), "FILE": str(tmp_path / "file")}
    done = run("migrate", "--to", names.get(place, place))
    assert (done.code, done.err.startswith("anabranch: --to")) == (2, True), done


def test_a_verification_makes_nothing(run: Run, url: str, tmp_path: Path) -> None:
    for place in (url, str(tmp_path / "new")):
        assert run("migrate", "--to", place, "--verify").code in (1, 2)
    assert not (tmp_path / "new").exists()
    assert changed(url, "SELECT 1 FROM pg_tables WHERE schemaname = 'public'") == 0


# --- what is found


def test_a_changed_row_is_found_and_named(run: Run, url: str) -> None:
    assert run("migrate", "--to", url).code == 0
    assert changed(url, "UPDATE chunks SET text = text || ' ' WHERE key = 7") == 1
    assert changed(url, "DELETE FROM retrievals WHERE query = 'q2' AND rank = 1") == 1
    assert changed(url, "UPDATE reserved SET last = 3 WHERE name = 'chunks'") == 1
    found = run("migrate", "--to", url, "--verify", "--json")
    assert (found.code, unequal(found)) == (1, {"chunks": ["7"], "retrievals": ["q2, 1"]}), found
    assert json.loads(found.out)["equal"] is False
    shown = run("migrate", "--to", url, "--verify")
    assert (shown.code, "The move was completed at" in shown.err) == (1, True)
    assert [line.split() for line in shown.out.splitlines()[1:]] == [
        ["chunks", "32", "32", "7"],
        ["retrievals", "12", "11", "q2,", "1"],
    ]
    assert run("migrate", "--to", url).code == 1, "nothing is repaired after the move is complete"


def test_a_row_that_is_changed_before_the_end_leaves_the_move_incomplete(data: Path, run: Run, url: str) -> None:
    with alone(data):
        assert run("migrate", "--to", url).code == 1
    assert changed(url, "UPDATE embeddings SET vector = '\\x00' WHERE chunk = 9") == 1
    done = run("migrate", "--to", url, "--json")
    assert (done.code, unequal(done), json.loads(done.out)["moved"]) == (1, {"embeddings": ["9"]}, False)
    assert "The move is not complete." in done.err
    assert "records.migrated" not in actions(url)
    with opened(data) as database:
        assert database.reading(lambda db: facts.fact(db, "moved_to")) is None
    again = run("migrate", "--to", url, "--json")
    assert (again.code, unequal(again)) == (0, {}), again


def test_a_move_that_is_complete_is_only_compared(data: Path, run: Run, url: str, tmp_path: Path) -> None:
    assert run("migrate", "--to", url).code == 0
    assert run("migrate", "--to", url).code == 0
    assert actions(url).count("records.migrated") == 1
    in_shop(url, tmp_path / "node", lambda shop: shop.put("later This is newer."))
    later = run("migrate", "--to", url, "--json")
    assert later.code == 1
    assert {"documents", "chunks", "contents"} <= unequal(later).keys()
    assert not {"audit", "audit_chain", "queries"} & unequal(later).keys()


# --- interruptions


def test_a_killed_copy_continues_where_it_stopped(data: Path, run: Run, url: str) -> None:
    command = [sys.executable, "-m", "anabranch", "migrate", "--to", url, "--batch-rows", "1"]
    with opened(url):
        pass
    for table, key in (("contents", "document"), ("embeddings", "chunk"), ("items", "key")):
        with stopped_at(url, table, key, 7) as last_copied, started(command, data) as process:
            deadline = time.monotonic() + PATIENCE_S
            while last_copied() < 6:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
            process.kill()
    done = run("migrate", "--to", url, "--json")
    assert (done.code, unequal(done)) == (0, {}), done
    assert digests(done) == digests(done, "target_")
    assert actions(data).count("records.copied") == 1


@contextmanager
def started(command: list[str], data: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(command, env=environment(data), stderr=subprocess.PIPE, cwd=data.parent) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def stopped_at(url: str, table: str, key: str, value: int) -> Iterator[Callable[[], int]]:
    """Nobody else can insert a row of this key. Yields a function of the largest key that is there."""
    columns = {
        "contents": "content",
        "embeddings": "vector, tokens",
        "items": "job, ordinal, document_id, status, arrived, content_hash",
    }
    given = ", ".join("'1'" for _ in columns[table].split(","))
    with psycopg.connect(url) as holder, psycopg.connect(url, autocommit=True) as reader:
        if table == "items":  # the job to which the row refers is copied by then
            holder.execute("SET session_replication_role = replica")
        holder.execute(f"INSERT INTO {table} ({key}, {columns[table]}) VALUES ({value}, {given})".encode())
        largest = f"SELECT coalesce(max({key}), 0) FROM {table}".encode()
        yield lambda: int(reader.execute(largest).fetchall()[0][0])
        holder.rollback()


STEPS = (
    *("Copying collections", "Copying embeddings", "Copying audit", "Comparing stored", "Comparing collections"),
    *("Completing collections", "Completing facts", "Verifying collections", "Verifying stored"),
)


@pytest.mark.parametrize("direction", ["up", "back"])
def test_an_interrupted_move_continues_from_every_step(data: Path, url: str, tmp_path: Path, direction: str) -> None:
    class Interrupted(Exception):
        pass

    left = list(STEPS)

    @contextmanager
    def step(name: str) -> Iterator[Callable[[int, int], None]]:
        def advance(done: int, total: int) -> None:
            if left and left[0] == name:
                del left[0]
                raise Interrupted

        yield advance

    places = places_of(direction, data, url, tmp_path / "back")
    while left:
        at = len(left)
        with moving(*places, step, RowBatch(rows=4)) as move, pytest.raises(Interrupted):
            moved(move)
        assert len(left) == at - 1
        with opened(places[0]) as source:
            assert source.reading(lambda db: facts.fact(db, "moved_to")) is None
    with moving(*places) as move:
        assert moved(move)
        assert move.compare().is_equal
    assert actions(places[1]).count("records.migrated") == (1 if direction == "up" else 2)


def test_a_move_that_ended_before_the_source_noted_it_is_complete(data: Path, run: Run, url: str) -> None:
    assert run("migrate", "--to", url).code == 0
    with opened(data) as source:
        source.writing(lambda db: facts.forget_fact(db, "moved_to"))
    assert run("migrate", "--to", url).code == 0
    with opened(data) as source:
        assert source.reading(lambda db: facts.fact(db, "moved_to")) is not None


def test_two_copies_to_the_same_place_do_not_mix(data: Path, url: str) -> None:
    """The other one has copied a batch meanwhile."""
    moves: list[Migration] = []

    @contextmanager
    def step(name: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: moves.pop().copy() if moves and name == "Copying chunks" else None

    with moving(data, url, step, RowBatch(rows=5)) as move, moving(data, url) as other:
        move.begin()
        moves.append(other)
        with pytest.raises(Conflict, match="Another process copies to the same place"):
            move.copy()
        assert other.finish().is_equal
