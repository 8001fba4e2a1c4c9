"""The audit log in the records: every change has its record, and a record that is not as it was is found."""

import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.domain.audit import Actor, AuditEntry, AuditFilter, AuditRecord, acting
from anabranch.knowledge.key_requests import KeyRequest
from anabranch.knowledge.model import CollectionSettings, NewDocument, Permissions
from anabranch.knowledge.records import audit, collections, keys
from anabranch.knowledge.records.audit import MAX_GRANTED, AuditDamaged
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.sqlite import SqliteDatabase, connect_to
from support.knowledge_fixtures import ALICE, OPERATOR, text, workshop

SETTINGS = CollectionSettings(embedding_model="none")
DAVID = Actor(name="user:david", address="192.0.2.7", surface="http", key="k1", request="r1")
HOSTILE = "two\nlines \x1b[31mred\x1b[0m \u202e\x00 \ud800"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    with closing(SqliteDatabase.open(tmp_path)) as opened:
        yield opened


def add(database: SqliteDatabase, *actions: str, by: Actor = DAVID, **more: Any) -> None:
    def work(db: Any) -> None:
        for action in actions:
            audit.append(db, AuditEntry(action=action, **more), by)

    database.writing(work)


def filled(database: SqliteDatabase, count: int = 30) -> None:
    for number in range(count):
        entry = AuditEntry(action="document.added", object=f"document:{number}", name=f"Title {number}")
        granted = AuditEntry(action="key.created", object="key:1", name="user:erin", granted=("group:staff",))
        by = Actor(name=f"user:{number % 3}", address=f"192.0.2.{number % 5}", surface="http")
        database.writing(partial(audit.append, entry=entry, by=by))
        database.writing(partial(audit.append, entry=granted, by=by))


def records(database: Database, **wanted: Any) -> list[AuditRecord]:
    return database.reading(lambda db: audit.listed(db, AuditFilter(**wanted), None, 1_000))


def problems(database: Database) -> list[str]:
    return [f"{one.seq}: {one.problem}" for one in database.reading(audit.verify)]


def tamper(database: SqliteDatabase, *statements: str) -> None:
    """Change the file as somebody does who has it, and leave its schema as it was."""
    with closing(sqlite3.connect(database.path)) as db, changeable(db):
        for statement in statements:
            db.execute(statement)
        db.commit()


@contextmanager
def changeable(db: Any) -> Iterator[None]:
    """Without the trigger that keeps records from being changed."""
    (trigger,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = 'audit_is_not_changed'").fetchone()
    db.execute("DROP TRIGGER audit_is_not_changed")
    yield
    db.execute(trigger)


def test_a_record_says_who_did_what_from_where(database: SqliteDatabase) -> None:
    acting.set(lambda: DAVID)
    permissions = Permissions(visibility="restricted", allowed_users=("erin",), allowed_groups=("staff",))
    settings = CollectionSettings(embedding_model="none", default_permissions=permissions)
    created = database.writing(
        lambda db: collections.create(db, owner="david", name="Plans", description="", settings=settings)
    )
    assert created is not None
    (record,) = records(database)
    assert (record.seq, record.action, record.outcome) == (1, "collection.created", "done")
    assert (record.actor, record.address, record.surface) == ("user:david", "192.0.2.7", "http")
    assert (record.key, record.request) == ("k1", "r1")
    assert (record.object, record.name) == (f"collection:{created.id}", "Plans")
    assert record.granted == ("user:erin", "group:staff")
    assert record.details == {"visibility": "restricted"}
    assert problems(database) == []


async def test_each_change_of_documents_leaves_a_record(tmp_path: Path) -> None:
    async with workshop(tmp_path) as opened:
        room = opened.room
        await opened.collection(caller=ALICE)
        job = await opened.put("Rivers join again.", caller=ALICE)
        await opened.put("Rivers part and join.", caller=ALICE)
        (found,), _ = await room.documents(ALICE, None, 0, 10)
        await room.describe(ALICE, found.id, title="Streams")
        shared = Permissions(visibility="restricted", allowed_users=("bob",))
        await room.describe(ALICE, found.id, permissions=shared)
        await room.publish(ALICE, "notes", "alice", "notes")
        await room.withdraw(ALICE, "notes", "alice", "notes")
        await room.delete_document(ALICE, found.id)
        waiting = await room.ingest(ALICE, "notes", [text("Later on.")])
        await room.cancel(ALICE, waiting)
        await room.delete_collection(ALICE, "notes")
        found_records = list(reversed(records(opened.database)))
        assert [one.action for one in found_records] == [
            "collection.created",
            "ingest.accepted",
            "document.added",
            "ingest.accepted",
            "document.replaced",
            "document.changed",
            "document.permissions_changed",
            "collection.published",
            "collection.withdrawn",
            "document.deleted",
            "ingest.accepted",
            "ingest.cancelled",
            "collection.deleted",
        ]
        added = found_records[2]
        assert (added.actor, added.surface, added.request, added.name) == ("user:alice", "indexer", job, "Rivers")
        assert found_records[1].object == f"job:{job}"
        assert found_records[6].granted == ("user:bob",)
        assert problems(opened.database) == []


async def test_an_erased_user_leaves_a_record_of_each_permission_and_key_that_goes(tmp_path: Path) -> None:
    async with workshop(tmp_path) as opened:
        room = opened.room
        shared = Permissions(visibility="restricted", allowed_users=("bob", "carol"))
        await opened.collection(caller=ALICE, default_permissions=shared)
        await opened.put("Rivers join.", caller=ALICE, permissions=shared)
        (document,), _ = await room.documents(ALICE, None, 0, 10)
        bobs, _ = await room.create_api_key(KeyRequest(user="bob"), ())
        revoked, _ = await room.create_api_key(KeyRequest(user="bob"), ())
        await room.revoke_api_key(revoked.id)
        before = records(opened.database)[0].seq
        erasure, _ = await room.erase(user="bob")
        since = {one.action: one for one in records(opened.database) if one.seq > before}
        assert (since["key.revoked"].object, since["key.revoked"].name) == (f"key:{bobs.id}", None)
        for action in ("document.permissions_changed", "collection.permissions_changed"):
            assert since[action].granted == ("user:carol",)
        assert since["document.permissions_changed"].object == f"document:{document.id}"
        assert since["erasure.requested"].object == f"erasure:{erasure.id}"
        assert sum(one.action == "key.revoked" for one in records(opened.database)) == 2, "each key once"
        assert problems(opened.database) == []


async def test_a_record_of_a_key_says_what_it_may_do_and_until_when(tmp_path: Path) -> None:
    async with workshop(tmp_path) as opened:
        plans = await opened.collection("plans")
        created, _ = await opened.room.create_api_key(
            KeyRequest(
                user="bob",
                scopes=("ask",),
                collections=("plans",),
                grants=("source:wiki",),
                limits={"requests": 9},
                expires_at=4e9,
            ),
            (),
        )
        await opened.room.rotate_api_key(created.id, 0, 5e9)
        await opened.room.revoke_api_key(created.id)
        await opened.room.create_api_key(KeyRequest(user="root", operator=True), ())
        details = {one.action: one.details for one in reversed(records(opened.database, action="key"))}
        scoped = {"operator": False, "scopes": ["ask"], "collections": [plans], "grants": ["source:wiki"]}
        limited = {**scoped, "limits": {"requests": 9.0}}
        assert details["key.rotated"] == {**limited, "expires_at": "2128-06-11T08:53:20Z"}
        assert details["key.revoked"] == details["key.rotated"]
        (unrestricted, first) = records(opened.database, action="key.created")
        assert first.details == {**limited, "expires_at": "2096-10-02T07:06:40Z"}
        assert unrestricted.details == {"operator": True, "scopes": ["ask", "read", "ingest", "admin"]}


async def test_a_document_that_fails_leaves_a_record(tmp_path: Path) -> None:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        empty = NewDocument(source="text", data=b" ", title="Empty", identity="Empty")
        await opened.room.ingest(OPERATOR, "notes", [empty])
        await opened.ingest_pending()
        newest = records(opened.database)[0]
        assert (newest.action, newest.outcome, newest.name) == ("document.failed", "failed", "Empty")


def test_without_a_record_there_is_no_change(database: SqliteDatabase) -> None:
    tamper(database, "DROP TABLE audit_chain")
    with pytest.raises(Exception, match="audit_chain"):
        database.writing(lambda db: keys.create(db, user="mallory", operator=True))
    assert database.reading(keys.listed) == []


CRASH = """
import os, sys
from pathlib import Path
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
database = SqliteDatabase.open(Path(sys.argv[1]))
def work(db):
    keys.create(db, user="alice")
    if sys.argv[2] == "before":
        os._exit(9)
database.writing(work)
os._exit(9)
"""


@pytest.mark.parametrize(("moment", "there"), [("before", 0), ("after", 1)])
def test_a_crash_leaves_the_change_with_its_record_or_neither(tmp_path: Path, moment: str, there: int) -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), moment], check=False, timeout=50)
    assert ended.returncode == 9
    with closing(SqliteDatabase.open(tmp_path)) as database:
        assert len(database.reading(keys.listed)) == there
        assert [one.action for one in records(database)] == ["key.created"] * there
        assert problems(database) == []


def test_records_are_not_changed(database: SqliteDatabase) -> None:
    add(database, "a.b")
    with pytest.raises(sqlite3.IntegrityError, match="not changed"):
        database.writing(lambda db: db.execute("UPDATE audit SET action = 'c.d'"))


TAMPERED: dict[str, tuple[str, ...]] = {
    "an action": ("UPDATE audit SET action = 'document.read' WHERE seq = 7",),
    "a time": ("UPDATE audit SET at_us = at_us + 1 WHERE seq = 7",),
    "who": ("UPDATE audit SET actor = (SELECT actor FROM audit WHERE seq = 3) WHERE seq = 7",),
    "the type of a value": ("UPDATE audit SET outcome = CAST(outcome AS BLOB) WHERE seq = 7",),
    "a deleted record": ("DELETE FROM audit WHERE seq = 7",),
    "the oldest record": ("DELETE FROM audit WHERE seq = 1",),
    "the newest record": ("DELETE FROM audit WHERE seq = 60",),
    "all records": ("DELETE FROM audit",),
    "swapped records": (
        "UPDATE audit SET seq = -7 WHERE seq = 7",
        "UPDATE audit SET seq = 7 WHERE seq = 8",
        "UPDATE audit SET seq = 8 WHERE seq = -7",
    ),
    "an added record": (
        "INSERT INTO audit SELECT 61, at_us, action, outcome, actor, address, surface, api_key, request, object, name, "
        "details, hash FROM audit WHERE seq = 60",
    ),
    "a name": ("UPDATE audit_names SET name = 'user:mallory' WHERE name = 'user:1'",),
    "a deleted name": ("DELETE FROM audit_names WHERE name = 'user:1'",),
    "the oldest, with the anchor": (
        "UPDATE audit_chain SET anchor_seq = 5, anchor_hash = (SELECT hash FROM audit WHERE seq = 5)",
        "DELETE FROM audit WHERE seq <= 5",
    ),
    "the anchor": ("UPDATE audit_chain SET anchor_hash = zeroblob(32)",),
    "no anchor": ("DELETE FROM audit_chain",),
}


@pytest.mark.parametrize("statements", TAMPERED.values(), ids=TAMPERED.keys())
def test_whoever_changes_the_log_is_found(database: SqliteDatabase, statements: tuple[str, ...]) -> None:
    filled(database)
    assert problems(database) == []
    tamper(database, *statements)
    assert problems(database) != []


IGNORED = "BEGIN SELECT RAISE(IGNORE); END"
OTHER_SCHEMAS: dict[str, tuple[str, ...]] = {
    "another actor": ("ALTER TABLE audit ADD COLUMN actor_name TEXT DEFAULT 'user:mallory'",),
    "another address": ("ALTER TABLE audit ADD COLUMN address_name TEXT DEFAULT '192.0.2.66'",),
    "another name": ("ALTER TABLE audit ADD COLUMN object_name TEXT DEFAULT 'nothing'",),
    "ignored records": (
        f"CREATE TRIGGER x BEFORE INSERT ON audit {IGNORED}",
        f"CREATE TRIGGER y BEFORE UPDATE ON audit_chain {IGNORED}",
    ),
    "records deleted with others": ("CREATE TRIGGER z AFTER INSERT ON keys BEGIN DELETE FROM audit WHERE 0; END",),
    "no trigger": ("DROP TRIGGER audit_is_not_changed",),
    "no index": ("DROP INDEX audit_names_by_subject",),
    "another index": ("CREATE UNIQUE INDEX once ON audit (action)",),
    "a view": (
        "ALTER TABLE audit_names RENAME TO kept",
        "CREATE VIEW audit_names AS SELECT digest, salt, day, subject, name FROM kept",
    ),
}


@pytest.mark.parametrize("statements", OTHER_SCHEMAS.values(), ids=OTHER_SCHEMAS.keys())
def test_whoever_changes_the_schema_of_the_log_is_found_and_forges_no_name(
    database: SqliteDatabase, statements: tuple[str, ...]
) -> None:
    add(database, "a.b", object="document:1", name="Plans")
    with closing(sqlite3.connect(database.path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()
    assert problems(database) != []
    (record,) = records(database)
    assert (record.actor, record.address, record.name) == ("user:david", "192.0.2.7", "Plans")


@pytest.mark.parametrize("ignored", ["INSERT ON audit", "UPDATE ON audit_chain"])
def test_a_change_is_refused_if_its_record_is_ignored(database: SqliteDatabase, ignored: str) -> None:
    database.writing(lambda db: db.execute(f"CREATE TRIGGER x BEFORE {ignored} {IGNORED}"))
    with pytest.raises(AuditDamaged):
        database.writing(lambda db: keys.create(db, user="mallory"))
    assert database.reading(keys.listed) == []


@pytest.mark.parametrize("ahead", ["21", "999999999", "9" * 40, "-1", "none"])
def test_a_record_that_is_noted_as_passed_on_before_it_is_there_is_found(database: SqliteDatabase, ahead: str) -> None:
    filled(database, 10)
    head = 20
    for reader, seq in (("log", head), ("otlp", 0)):
        database.writing(partial(audit.set_passed_on, reader=reader, seq=seq))
    assert problems(database) == []
    database.writing(lambda db: db.execute("UPDATE facts SET value = ? WHERE name = 'audit_otlp'", (ahead,)))
    problem = f"0: Records up to {ahead} are noted as passed on (audit_otlp), and the newest one is {head}."
    assert problems(database) == [problem]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """In every column of every table of the log, also after names were forgotten: 200 flips."""
    with closing(SqliteDatabase.open(tmp_path)) as database:
        filled(database, 10)
        database.writing(lambda db: audit.forget(db, "user:1"))
        chance = random.Random(20)
        with closing(connect_to(database.path)) as db:
            cells = [
                (table, row[0], column)
                for table in ("audit", "audit_names", "audit_chain")
                for row in db.execute(
                    f"SELECT rowid FROM {table}" if table != "audit_names" else "SELECT digest FROM audit_names"
                )
                for column in [one[1] for one in db.execute(f"PRAGMA table_info({table})")]
                if cell(db, table, row[0], column)[1]
            ]
            for _ in range(200):
                flip_one(db, *chance.choice(cells), chance=chance)


def cell(db: Any, table: str, key: int | bytes, column: str) -> tuple[str, bytes]:
    """The type and the bytes of a value."""
    which = "digest" if table == "audit_names" else "rowid"
    found = f"SELECT typeof({column}), CAST({column} AS BLOB) FROM {table} WHERE {which} = ?"
    return tuple(db.execute(found, (key,)).fetchone())


def flip_one(db: Any, table: str, key: int | bytes, column: str, *, chance: random.Random) -> None:
    which = "digest" if table == "audit_names" else "rowid"
    kind, value = cell(db, table, key, column)
    db.execute("BEGIN")
    if kind == "integer":
        changed: Any = int(value) ^ 1 << chance.randrange(40)
    else:
        flipped = bytearray(value)
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        changed = bytes(flipped)
    shown = f"CAST(? AS {'TEXT' if kind == 'text' else 'BLOB' if kind == 'blob' else 'INTEGER'})"
    with changeable(db):
        db.execute(f"UPDATE OR REPLACE {table} SET {column} = {shown} WHERE {which} = ?", (changed, key))
    assert audit.verify(db) != [], (table, key, column, value, changed)
    db.execute("ROLLBACK")
    assert audit.verify(db) == []


def test_forgotten_names_leave_the_chain_whole(database: SqliteDatabase) -> None:
    filled(database)
    assert database.writing(lambda db: audit.forget(db, "user:1", "document:0", "user:erin")) >= 4
    assert problems(database) == []
    shown = records(database)
    assert not [one for one in shown if "user:1" in (one.actor, one.name) or one.name == "Title 0"]
    assert [one for one in shown if one.actor is None and one.address is None], "with their addresses"
    with closing(sqlite3.connect(database.path)) as db:
        assert "Title 0" not in "\n".join(db.iterdump())
    add(database, "again", by=Actor(name="user:1", address="192.0.2.9", surface="http"))
    assert [one.action for one in records(database, actor="1")] == ["again"], "with another digest than before"
    assert database.writing(lambda db: audit.forget(db, "user:nobody")) == 0


def test_the_oldest_records_are_deleted_and_the_rest_is_still_verified(database: SqliteDatabase) -> None:
    filled(database)
    assert database.writing(lambda db: audit.expire(db, 1)) == 0
    assert database.writing(lambda db: audit.expire(db, -1)) == 60
    assert [one.action for one in records(database)] == ["audit.expired"]
    assert records(database)[0].details["through"] == 60
    assert problems(database) == []
    assert database.writing(lambda db: audit.expire(db, -1)) == 0, (
        "a record of a deletion alone is no reason for another"
    )
    add(database, "a.b", "c.d")
    assert problems(database) == []
    assert database.writing(lambda db: audit.expire(db, -1)) == 3
    assert problems(database) == []
    tamper(database, "DELETE FROM audit")
    assert problems(database) != []


def test_names_that_only_deleted_records_had_are_deleted(database: SqliteDatabase) -> None:
    filled(database)
    day = 86_400_000_000
    tamper(
        database,
        "INSERT INTO audit_names VALUES (x'01', x'02', 0, 'user:old', 'user:old')",
        f"UPDATE audit SET at_us = at_us - 3 * {day} WHERE seq <= 10",
    )
    database.writing(lambda db: audit.expire(db, 2))
    names = database.reading(lambda db: [row[0] for row in db.execute("SELECT name FROM audit_names")])
    assert "user:old" not in names
    assert "Title 20" in names


def test_a_noted_head_shows_that_the_log_was_replaced(tmp_path: Path) -> None:
    first, second = SqliteDatabase.open(tmp_path / "1"), SqliteDatabase.open(tmp_path / "2")
    with closing(first), closing(second):
        filled(first, 3)
        filled(second, 3)
        noted = first.reading(audit.head)
        assert first.reading(lambda db: audit.verify(db, noted)) == []
        add(first, "later")
        assert first.reading(lambda db: audit.verify(db, noted)) == []
        (finding,) = second.reading(lambda db: audit.verify(db, noted))
        assert finding.seq == noted.seq
        tamper(first, "DELETE FROM audit WHERE seq > 2")
        assert first.reading(lambda db: audit.verify(db, noted)) != []


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"action": "key"}, ["key.revoked", "key.created"]),
        ({"action": "key.created"}, ["key.created"]),
        ({"action": "ke"}, []),
        ({"action": "%"}, []),
        ({"actor": "david"}, ["query.shared"]),
        ({"actor": "user:david"}, ["query.shared"]),
        ({"actor": "operator"}, ["key.revoked", "key.created"]),
        ({"since": 4e9}, []),
        ({"until": 4e9, "since": 1e9}, ["query.shared", "key.revoked", "key.created"]),
    ],
)
def test_records_are_filtered(database: SqliteDatabase, wanted: dict[str, Any], expected: list[str]) -> None:
    add(database, "key.created", "key.revoked", by=Actor(name="operator", address="", surface="cli"))
    add(database, "query.shared")
    assert [one.action for one in records(database, **wanted)] == expected


def test_hostile_names_are_kept_as_far_as_they_can_be(database: SqliteDatabase) -> None:
    by = Actor(name=f"user:{HOSTILE}", address=HOSTILE, surface="http")
    add(database, "key.created", by=by, object=f"document:{HOSTILE}".encode(errors="replace").decode(), name=HOSTILE)
    assert problems(database) == []
    (record,) = records(database)
    assert record.name is not None
    assert record.name.startswith("two\nlines \x1b[31mred")
    assert len(record.name) < 100
    add(database, "key.created", object="key:1", name="n" * 100_000)
    assert len(records(database)[0].name or "") == audit.MAX_NAME


async def test_what_changes_nothing_leaves_no_record_and_a_long_list_a_short_one(tmp_path: Path) -> None:
    many = Permissions(visibility="restricted", allowed_users=tuple(f"user {number}" for number in range(1_000)))
    async with workshop(tmp_path) as opened:
        await opened.collection("hers", ALICE)
        await opened.put("Herons eat fish.", collection="hers", caller=ALICE)
        await opened.room.describe_collection(ALICE, "hers", description="Birds", permissions=many)
        await opened.room.describe(ALICE, "Herons", title="Herons", permissions=many)
        before = records(opened.database)
        for _ in range(3):
            await opened.room.describe_collection(ALICE, "hers", description="Birds", permissions=many)
            await opened.room.describe(ALICE, "Herons", title="Herons", permissions=many)
        assert records(opened.database) == before
        assert [one.details["granted_count"] for one in before[:2]] == [1_000, 1_000]
        assert len(before[0].granted) == MAX_GRANTED
