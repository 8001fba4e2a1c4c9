"""The records: migrations, transactions, several processes, backups, keys."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event

import pytest

from anabranch.domain.errors import ConfigurationError
from anabranch.domain.rights import Rights
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import backup, documents, keys, logged_queries, queries, sqlite
from anabranch.knowledge.records.database import Session, StoreFailed, made_at, new_id
from anabranch.knowledge.records.logged_queries import QueryFilter
from anabranch.knowledge.records.schema import KEY_RIGHTS, MIGRATIONS
from anabranch.knowledge.records.sqlite import NAME, RETRIES, RETRY_S, SqliteDatabase, connect, migrate
from support.knowledge_fixtures import OPERATOR, workshop


def test_opening_the_records_twice_changes_nothing_and_keeps_them_private(tmp_path: Path) -> None:
    SqliteDatabase.open(tmp_path).close()
    before = (tmp_path / NAME).stat().st_size
    SqliteDatabase.open(tmp_path).close()
    assert (tmp_path / NAME).stat().st_size == before
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0


def test_records_of_a_newer_schema_version_are_refused(tmp_path: Path) -> None:
    SqliteDatabase.open(tmp_path).close()
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(ConfigurationError, match="Update Anabranch"):
        SqliteDatabase.open(tmp_path)


def test_a_failed_migration_is_rolled_back(tmp_path: Path) -> None:
    SqliteDatabase.open(tmp_path).close()
    broken = (*MIGRATIONS, "CREATE TABLE extra (a);\nINSERT INTO nowhere VALUES (1);")
    connection = connect(tmp_path / NAME)
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, broken)
    assert connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'extra'").fetchone()[0] == 0
    connection.close()


@pytest.mark.parametrize("content", [b"no database at all", b"SQLite format 3\x00" + b"\xff" * 4096])
def test_a_damaged_records_file_is_a_configuration_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ConfigurationError, match="AGGREGATOR_DATA_DIR"):
        SqliteDatabase.open(tmp_path)


def test_a_failed_write_transaction_is_rolled_back(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path)

    def half(db: Session) -> None:
        db.execute("INSERT INTO facts VALUES ('half', 'done')")
        raise ValueError("broke")

    with pytest.raises(ValueError, match="broke"):
        database.writing(half)
    assert (
        database.reading(lambda db: db.execute("SELECT * FROM facts WHERE name NOT LIKE 'default%'").fetchall()) == []
    )
    database.close()


def test_closing_waits_for_threads_that_still_read(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path)
    reads, goes_on, closed = Event(), Event(), Event()

    def slow(db: Session) -> list[sqlite3.Row]:
        reads.set()
        assert goes_on.wait(10)
        assert not closed.is_set()
        return db.execute("SELECT * FROM facts WHERE name NOT LIKE 'default%'").fetchall()

    def close() -> None:
        database.close()
        closed.set()

    with ThreadPoolExecutor() as threads:
        read = threads.submit(database.reading, slow)
        assert reads.wait(10)
        closing = threads.submit(close)
        while not database._closed:
            time.sleep(0.001)
        goes_on.set()
        assert read.result(10) == []
        closing.result(10)
    with pytest.raises(StoreFailed, match="closed"):
        database.reading(lambda db: db.execute("SELECT * FROM facts WHERE name NOT LIKE 'default%'").fetchall())


def test_a_locked_database_is_tried_four_times_and_then_fails(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path)
    database.writing(lambda db: db.execute("INSERT INTO facts VALUES ('before', '')"))
    with database._connection() as own:
        own.execute("PRAGMA busy_timeout = 0")  # SQLite's own wait comes before each attempt
    other = connect(tmp_path / NAME)
    other.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(StoreFailed, match="locked") as failed:
        database.writing(lambda db: db.execute("INSERT INTO facts VALUES ('during', '')"))
    assert time.monotonic() - started >= RETRIES * RETRY_S
    assert (RETRIES, RETRY_S, failed.value.code) == (3, 0.1, "service_unavailable")
    other.execute("COMMIT")
    other.close()
    database.writing(lambda db: db.execute("INSERT INTO facts VALUES ('after', '')"))
    assert database.reading(lambda db: [row[0] for row in db.execute("SELECT name FROM facts WHERE value = ''")]) == [
        "after",
        "before",
    ]
    database.close()


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("SELECT * FROM documents WHERE collection = 1 AND created_at > 0", "documents_by_collection"),
        ("SELECT * FROM documents WHERE content_hash = ''", "documents_by_hash"),
        ("SELECT * FROM documents WHERE filename = '' COLLATE NOCASE", "documents_by_filename"),
        ("SELECT * FROM documents WHERE title = '' COLLATE NOCASE", "documents_by_title"),
        ("SELECT * FROM attributes WHERE name = 'tags' AND value = 'birds'", "PRIMARY KEY"),
        ("SELECT * FROM items WHERE document_id = '' AND status = 'failed'", "items_by_document"),
        ("SELECT * FROM open_items WHERE json_extract(arrived, '$.identity') = ''", "items_open_by_identity"),
        ("SELECT key FROM items WHERE status = 'failed' ORDER BY key", "items_failed"),
    ],
)
def test_lookups_use_an_index(tmp_path: Path, query: str, index: str) -> None:
    database = SqliteDatabase.open(tmp_path)
    plan = database.reading(lambda db: [row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {query}")])
    database.close()
    assert any(index in step for step in plan), plan
    assert not any(step in ("SCAN items", "SCAN documents") for step in plan)


async def test_the_chunks_of_a_document_are_stored_in_the_order_of_their_text(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("First " + "word " * 2_000)
        starts = shop.database.reading(
            lambda db: [row[0] for row in db.execute("SELECT start_char FROM chunks ORDER BY key")]
        )
        assert len(starts) > 5
        assert starts == sorted(starts)
        found = await shop.find("word", limit=100)
        places = sorted((one.place.start, one.place.index) for one in found if one.place is not None)
        assert [index for _, index in places] == list(range(len(starts)))


WRITER = """
import sys
import time
from pathlib import Path
from anabranch.knowledge.records.sqlite import SqliteDatabase
database = SqliteDatabase.open(Path(sys.argv[1]))
for number in range(100):
    database.writing(lambda db: db.execute("INSERT INTO changes (op, document, at) VALUES ('update', 1, 0)"))
database.close()
"""


def test_concurrent_writes_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    SqliteDatabase.open(tmp_path).close()
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(30) for process in running] == [0, 0, 0]
    database = SqliteDatabase.open(tmp_path)
    assert database.reading(lambda db: db.execute("SELECT count(*), max(seq) FROM changes").fetchone()[:]) == (300, 300)
    database.close()


async def test_a_backup_during_ingestion_is_consistent(tmp_path: Path) -> None:
    async with workshop(tmp_path / "data") as shop:
        await shop.collection()

        async def ingest() -> None:
            for number in range(30):
                await shop.put(f"Number{number} eats fish.")

        await shop.put("First eats fish.")
        ingesting = asyncio.create_task(ingest())
        assert isinstance(shop.database, SqliteDatabase)
        await asyncio.to_thread(backup.back_up, shop.database, tmp_path / "copy.sqlite")
        await ingesting
    (tmp_path / "other").mkdir()
    (tmp_path / "copy.sqlite").rename(tmp_path / "other" / NAME)
    async with workshop(tmp_path / "other") as restored:
        found = {passage.text for passage in await restored.find("eats fish", limit=100)}
        kept = restored.database.reading(lambda db: {row[0] for row in db.execute("SELECT content FROM contents")})
        assert found == kept
        assert "First eats fish." in kept


def test_a_backup_does_not_begin_again_with_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server writes more often than a large backup could begin again."""
    folder, left = tmp_path / "data", []
    filling = "INSERT INTO facts VALUES (?, hex(randomblob(4000000)))"
    with closing(SqliteDatabase.open(folder)) as records, closing(SqliteDatabase.open(folder)) as server:
        records.writing(lambda db: db.execute(filling, ("first",)))

        def copied(_status: int, remaining: int, _pages: int) -> None:
            left.append(remaining)
            assert left == sorted(left, reverse=True)
            server.writing(lambda db: db.execute(filling, (f"{remaining}",)))

        monkeypatch.setattr(sqlite, "_copied", copied)
        backup.back_up(records, tmp_path / "copy.sqlite")
    assert len(left) > 1
    with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as copy:
        assert copy.execute("SELECT name FROM facts WHERE name NOT LIKE 'default%'").fetchall() == [("first",)]


def test_vectors_of_another_embedder_are_refused(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path)
    database.writing(lambda db: documents.require_embedder(db, "one", 384))
    for name, dimensions in (("two", 384), ("one", 768)):
        with pytest.raises(ConfigurationError, match="index rebuild"):
            database.writing(lambda db, n=name, d=dimensions: documents.require_embedder(db, n, d))  # type: ignore[misc]
    database.writing(lambda db: documents.require_embedder(db, "one", 384))
    database.close()


def test_keys_of_the_version_before_rights_keep_all_of_them(tmp_path: Path) -> None:
    before = MIGRATIONS.index(KEY_RIGHTS)
    with closing(connect(tmp_path / NAME)) as db:
        migrate(db, MIGRATIONS[:before])
        for name, operator in (("old", 0), ("chief", 1)):
            hashed = sha256(f"ab_{name}".encode()).hexdigest()
            db.execute("INSERT INTO keys VALUES (?, ?, ?, '[]', ?, '', 1.0, NULL)", (name, hashed, name, operator))
    with closing(SqliteDatabase.open(tmp_path)) as database:
        old, chief = (database.reading(lambda db, s=s: keys.find(db, s)) for s in ("ab_old", "ab_chief"))  # type: ignore[misc]
    assert old is not None
    assert chief is not None
    assert old.rights == Rights(scopes=("ask", "read", "ingest"))
    assert chief.rights == Rights()
    assert (old.expires_at, old.last_used_at, old.previous_until) == (None, None, None)


def test_a_key_is_valid_until_it_expires_and_its_earlier_secret_until_the_overlap_ends(tmp_path: Path) -> None:
    with closing(SqliteDatabase.open(tmp_path)) as database:
        now = time.time()
        key, first = database.writing(lambda db: keys.create(db, user="alice", expires_at=now + 1_000))
        rotated = database.writing(lambda db: keys.rotate(db, key.id, 100))
        assert rotated is not None
        second = rotated[1]

        def valid(secret: str, after_s: float) -> bool:
            return database.reading(lambda db: keys.find(db, secret, now + after_s)) is not None

        def credentials(after_s: float) -> set[str]:
            return database.reading(lambda db: keys.credentials(db, now + after_s))

        assert [valid(first, 50), valid(first, 200), valid(second, 200), valid(second, 1_001)] == [1, 0, 1, 0]
        assert credentials(50) == {keys.credential_of(first), keys.credential_of(second)}
        assert (credentials(200), credentials(1_001)) == ({keys.credential_of(second)}, set())
        again = database.writing(lambda db: keys.rotate(db, key.id, 0))
        assert again is not None
        assert [valid(one, 1) for one in (first, second, again[1])] == [False, False, True]
        assert database.writing(lambda db: keys.revoke(db, key.id))
        assert database.writing(lambda db: keys.rotate(db, key.id, 0)) is None


def test_a_restricted_key_reads_only_questions_asked_with_keys_restricted_at_least_as_much(tmp_path: Path) -> None:
    def caller(*collections: int) -> Caller:
        return Caller(user="alice", rights=Rights(collections=collections or None))

    with closing(SqliteDatabase.open(tmp_path)) as database:
        for name, within in (("all", None), ("one", (1,)), ("both", (1, 2))):
            asked = queries.QueryRecord(id=name, user="alice", original="?", top_k=1, key_collections=within)
            database.writing(lambda db, asked=asked: queries.record(db, asked))  # type: ignore[misc]
        seen: dict[tuple[int, ...], set[str]] = {}
        for chosen in ((), (1,), (2,), (1, 2)):
            found = database.reading(partial(logged_queries.listed, caller=caller(*chosen), wanted=QueryFilter()))
            seen[chosen] = {one.entry.id for one in found}
    assert seen == {(): {"all", "one", "both"}, (1,): {"one"}, (2,): set(), (1, 2): {"one", "both"}}


def test_api_keys_are_stored_as_hashes_and_can_be_revoked(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path)
    key, secret = database.writing(lambda db: keys.create(db, user="alice", groups=("staff",)))
    assert database.reading(lambda db: keys.find(db, secret)) == key
    assert (key.user, key.groups, key.operator) == ("alice", ("staff",), False)
    assert database.reading(lambda db: keys.find(db, secret + "x")) is None
    assert secret.encode() not in (tmp_path / NAME).read_bytes() + (tmp_path / f"{NAME}-wal").read_bytes()
    assert database.writing(lambda db: keys.revoke(db, key.id))
    assert not database.writing(lambda db: keys.revoke(db, key.id))
    assert database.reading(lambda db: keys.find(db, secret)) is None
    database.close()


QUOTE = queries.LoggedCitation(
    citation_index=1, chunk_id="c", document_id="d", quoted_text="words", start_char=None, end_char=None
)


def asked(user: str, **more: object) -> queries.QueryRecord:
    return queries.QueryRecord(
        id=new_id(),
        user=user,
        original="Why?",
        answer="Because.",
        refused=False,
        model="extractive",
        found=(),
        quotes=(QUOTE,),
        collections=(1,),
        top_k=10,
        input_tokens=1,
        output_tokens=1,
        retrieval_ms=1,
        latency_ms=1,
        conversation="talk",
    )


def test_query_log_belongs_to_its_user_and_can_be_deleted(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path)
    hers, his = asked("alice"), asked("bob")
    for one in (hers, his):
        database.writing(lambda db, one=one: queries.record(db, one))  # type: ignore[misc]
    assert len(database.reading(lambda db: logged_queries.turns(db, Caller(user="alice"), "talk", 5))) == 1
    bob = Caller(user="bob")
    assert not database.writing(lambda db: queries.rate(db, hers.id, bob, "thumbs_up", None))
    assert database.writing(lambda db: queries.rate(db, his.id, bob, "thumbs_up", None))
    assert database.writing(lambda db: queries.rate(db, hers.id, OPERATOR, "thumbs_down", "no"))
    assert database.writing(lambda db: queries.forget(db, 0, "alice")) == 1
    left = {
        table: database.reading(lambda db, t=table: db.execute(f"SELECT count(*) FROM {t}").fetchone()[0])  # type: ignore[misc]
        for table in ("queries", "responses", "citations", "query_collections")
    }
    assert set(left.values()) == {1}
    assert database.writing(lambda db: queries.forget(db, 1)) == 0
    database.close()


def test_identifiers_carry_their_creation_time() -> None:
    assert made_at(new_id()) - 1.7e9 > 0
    assert made_at("nonsense") == made_at("6ba7b810-9dad-41d1-80b4-00c04fd430c8") == 0.0
