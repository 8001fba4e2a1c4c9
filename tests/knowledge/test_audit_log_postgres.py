"""The audit log in PostgreSQL: a superuser changes records past the trigger, or the schema, and it is found."""

import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest

from anabranch.domain.audit import Actor, AuditEntry, AuditFilter, AuditRecord
from anabranch.knowledge.records import audit, keys
from anabranch.knowledge.records.audit import AuditDamaged
from anabranch.knowledge.records.audit_schema import COLUMNS
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.postgres import PostgresDatabase
from support.postgres_server import shared_postgres

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-audit-log-postgres")]

DAVID = Actor(name="user:david", address="192.0.2.7", surface="http", key="k1", request="r1")
FLIPS = 100


@pytest.fixture
def url() -> Iterator[str]:
    made = shared_postgres().create_database()
    yield made
    shared_postgres().drop(made)


@pytest.fixture
def database(url: str) -> Iterator[PostgresDatabase]:
    with closing(PostgresDatabase.open(url)) as opened:
        yield opened


def filled(database: PostgresDatabase, count: int = 10) -> None:
    def fill(db: Session) -> None:
        for number in range(count):
            entry = AuditEntry(action="document.added", object=f"document:{number}", name=f"Title {number}")
            granted = AuditEntry(action="key.created", object="key:1", name="user:erin", granted=("group:staff",))
            by = Actor(name=f"user:{number % 3}", address=f"192.0.2.{number % 5}", surface="http")
            audit.append(db, entry, by)
            audit.append(db, granted, by)

    database.writing(fill)


def problems(database: PostgresDatabase) -> list[str]:
    return [f"{one.seq}: {one.problem}" for one in database.reading(audit.verify)]


def records(database: PostgresDatabase) -> list[AuditRecord]:
    return database.reading(lambda db: audit.listed(db, AuditFilter(), None, 1_000))


def execute(url: str, *statements: str, values: tuple[Any, ...] = ()) -> None:
    """As a superuser, in one transaction."""
    with psycopg.connect(url) as connection:
        for statement in statements:
            connection.execute(statement.encode(), values)


def tamper(url: str, *statements: str, values: tuple[Any, ...] = ()) -> None:
    """Past the trigger, which is there again afterwards."""
    trigger = "ALTER TABLE audit {} TRIGGER audit_is_not_changed"
    execute(url, trigger.format("DISABLE"))
    execute(url, *statements, values=values)
    execute(url, trigger.format("ENABLE"))


def test_a_log_of_which_nothing_was_changed_is_whole(database: PostgresDatabase) -> None:
    filled(database)
    assert problems(database) == []
    assert records(database)[0].granted == ("group:staff",)


def test_records_are_not_changed(database: PostgresDatabase) -> None:
    filled(database)
    with pytest.raises(Exception, match="not changed"):
        database.writing(lambda db: db.execute("UPDATE audit SET action = 'c.d'"))


TAMPERED: dict[str, tuple[tuple[str, ...], str]] = {
    "an action": (("UPDATE audit SET action = 'document.read' WHERE seq = 7",), "7: The record was changed"),
    "a time": (("UPDATE audit SET at_us = at_us + 1 WHERE seq = 7",), "7: The record was changed"),
    "who": (
        ("UPDATE audit SET actor = (SELECT actor FROM audit WHERE seq = 3) WHERE seq = 7",),
        "7: The record was changed",
    ),
    "a deleted record": (("DELETE FROM audit WHERE seq = 7",), "8: Record 7 is missing"),
    "the oldest record": (("DELETE FROM audit WHERE seq = 1",), "2: Record 1 is missing"),
    "the newest record": (("DELETE FROM audit WHERE seq = 20",), "20: The newest record should be 20"),
    "all records": (("DELETE FROM audit",), "20: The newest record should be 20"),
    "swapped records": (
        (
            "UPDATE audit SET seq = -7 WHERE seq = 7",
            "UPDATE audit SET seq = 7 WHERE seq = 8",
            "UPDATE audit SET seq = 8 WHERE seq = -7",
        ),
        "7: The record was changed",
    ),
    "an inserted record": (
        (
            "INSERT INTO audit SELECT 21, at_us, action, outcome, actor, address, surface, api_key, request, object, "
            "name, details, hash FROM audit WHERE seq = 20",
        ),
        "21: The record was changed",
    ),
    "a name": (
        ("UPDATE audit_names SET name = 'user:mallory' WHERE name = 'user:1'",),
        "0: A name was changed.",
    ),
    "a deleted name": (("DELETE FROM audit_names WHERE name = 'user:1'",), "A name is missing"),
    "the oldest, with the anchor": (
        (
            "UPDATE audit_chain SET anchor_seq = 5, anchor_hash = (SELECT hash FROM audit WHERE seq = 5)",
            "DELETE FROM audit WHERE seq <= 5",
        ),
        "5: Records up to 5 were deleted, and no record says so.",
    ),
    "no anchor": (("DELETE FROM audit_chain",), "0: The log should have one newest record"),
    "two anchors": (("INSERT INTO audit_chain SELECT * FROM audit_chain",), "0: The log should have one newest record"),
    "what was passed on": (("INSERT INTO facts VALUES ('audit_otlp', '21')",), "0: Records up to 21 are noted"),
}


@pytest.mark.parametrize(("statements", "problem"), TAMPERED.values(), ids=TAMPERED.keys())
def test_whoever_changes_the_log_is_found(
    database: PostgresDatabase, url: str, statements: tuple[str, ...], problem: str
) -> None:
    filled(database)
    tamper(url, *statements)
    assert [one for one in problems(database) if problem in one], problems(database)


GONE = "The table audit_chain is missing."
IGNORED = "CREATE FUNCTION ignore() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
HIDING = "CREATE FUNCTION hide() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN DELETE FROM audit; RETURN NULL; END'"
OTHER_SCHEMAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "another column": (
        ("ALTER TABLE audit ADD COLUMN actor_name TEXT DEFAULT 'user:mallory'",),
        ("The column audit.actor_name is not one of Anabranch.",),
    ),
    "another type": (
        ("ALTER TABLE audit ALTER COLUMN outcome TYPE VARCHAR",),
        ("The column audit.outcome was changed.",),
    ),
    "null": (("ALTER TABLE audit ALTER COLUMN details DROP NOT NULL",), ("The column audit.details was changed.",)),
    "a default": (
        ("ALTER TABLE audit_names ALTER COLUMN salt SET DEFAULT '\\x00'",),
        ("The column audit_names.salt was changed.",),
    ),
    "a column that is gone": (
        ("ALTER TABLE audit_names DROP COLUMN day",),
        ("The column audit_names.day is missing.",),
    ),
    "a table that is gone": (
        ("DROP TABLE audit_chain",),
        (*(f"The column audit_chain.{name} is missing." for name in COLUMNS["audit_chain"]), GONE),
    ),
    "a trigger that ignores records": (
        (IGNORED, "CREATE TRIGGER x BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION ignore()"),
        ("The trigger x on audit is not one of Anabranch.",),
    ),
    "a trigger elsewhere that deletes records": (
        (HIDING, "CREATE TRIGGER z AFTER INSERT ON keys FOR EACH ROW EXECUTE FUNCTION hide()"),
        ("The function hide() is not one of Anabranch.", "The trigger z on keys is not one of Anabranch."),
    ),
    "a disabled trigger": (
        ("ALTER TABLE audit DISABLE TRIGGER ALL",),
        ("The trigger audit_is_not_changed on audit was changed.",),
    ),
    "no trigger": (
        ("DROP TRIGGER audit_is_not_changed ON audit",),
        ("The trigger audit_is_not_changed on audit is missing.",),
    ),
    "another function of the trigger": (
        (
            "CREATE OR REPLACE FUNCTION audit_is_not_changed() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN RETURN new; END'",
        ),
        ("The function audit_is_not_changed() is missing.",),
    ),
    "no index": (("DROP INDEX audit_names_by_subject",), ("The index audit_names_by_subject is missing.",)),
    "no key": (("ALTER TABLE audit DROP CONSTRAINT audit_pkey",), ("The index audit_pkey is missing.",)),
    "another index": (
        ("CREATE UNIQUE INDEX once ON audit (action)",),
        ("The index once is not one of Anabranch.",),
    ),
    "a rule": (
        ("CREATE RULE silent AS ON INSERT TO audit DO INSTEAD NOTHING",),
        ("The rule audit.silent is not one of Anabranch.",),
    ),
    "hidden rows": (
        ("ALTER TABLE audit ENABLE ROW LEVEL SECURITY", "CREATE POLICY later ON audit USING (seq > 3)"),
        ("The policy later on audit is not one of Anabranch.", "The table audit was changed."),
    ),
    "a child": (
        ("CREATE TABLE more () INHERITS (audit)",),
        ("The inheritance more of audit is not one of Anabranch.",),
    ),
    "a constraint": (
        ("ALTER TABLE audit ADD CHECK (action != 'key.created') NOT VALID",),
        ("The constraint audit_action_check is not one of Anabranch.",),
    ),
    "a view": (
        (
            "ALTER TABLE audit_names RENAME TO kept",
            "CREATE VIEW audit_names AS SELECT digest, salt, day, subject, name FROM kept",
        ),
        ("The table audit_names was changed.", "The view audit_names._RETURN is not one of Anabranch."),
    ),
}


@pytest.mark.parametrize(("statements", "expected"), OTHER_SCHEMAS.values(), ids=OTHER_SCHEMAS.keys())
def test_whoever_changes_the_schema_of_the_log_is_found(
    database: PostgresDatabase, url: str, statements: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    database.writing(partial(audit.append, entry=AuditEntry(action="a.b", object="document:1", name="Plans"), by=DAVID))
    execute(url, *statements)
    found = [one.removeprefix("0: ") for one in problems(database)]
    assert set(expected) <= set(found), found


def test_what_others_keep_in_the_database_is_no_problem(database: PostgresDatabase, url: str) -> None:
    """Their own schema, a trigger that does not name the log, and the statistics of tables."""
    execute(
        url,
        "CREATE SCHEMA theirs",
        "CREATE TABLE theirs.audit (seq BIGINT)",
        IGNORED,
        "CREATE TRIGGER y AFTER INSERT ON keys FOR EACH ROW EXECUTE FUNCTION ignore()",
        "ANALYZE audit",
    )
    filled(database)
    assert problems(database) == []


def test_a_change_is_refused_if_its_record_is_ignored(database: PostgresDatabase, url: str) -> None:
    execute(url, IGNORED, "CREATE TRIGGER x BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION ignore()")
    with pytest.raises(AuditDamaged):
        database.writing(lambda db: keys.create(db, user="mallory"))
    assert database.reading(keys.listed) == []


def test_every_flipped_bit_is_found(database: PostgresDatabase, url: str) -> None:
    """In every column of every table of the log, also after names were forgotten."""
    filled(database, 5)
    database.writing(lambda db: audit.forget(db, "user:1"))
    chance = random.Random(20)
    missed = []
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # no trigger is called
        for _ in range(FLIPS):
            table = chance.choice(list(COLUMNS))
            column = chance.choice(list(COLUMNS[table]))
            rows = connection.execute(f"SELECT ctid::text, {column} FROM {table}".encode()).fetchall()
            place, value = chance.choice([row for row in rows if row[1] not in (b"", "")] or rows)
            if value in (b"", ""):
                continue
            update = f"UPDATE {table} SET {column} = %s WHERE ctid = %s RETURNING ctid::text".encode()
            ((moved,),) = connection.execute(update, (flipped(value, chance), place)).fetchall()
            if not problems(database):
                missed.append((table, column, value))
            connection.execute(update, (value, moved))
    assert missed == []
    assert problems(database) == []


def flipped(value: Any, chance: random.Random) -> Any:
    if isinstance(value, int):
        return value ^ 1 << chance.randrange(20)
    if isinstance(value, str):
        at = chance.randrange(len(value))
        return value[:at] + chr(ord(value[at]) ^ 1 << chance.randrange(1, 5)) + value[at + 1 :]
    changed = bytearray(value)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def test_names_and_addresses_with_nul_are_kept_as_postgresql_can(database: PostgresDatabase) -> None:
    hostile = "two\nlines \x1b[31m \x00 \ud800 end"
    by = Actor(name=f"user:{hostile}", address=hostile, surface="h\x00")
    entry = AuditEntry(
        action="key.created", object="document:\x00", name=hostile, granted=(f"group:{hostile}",), details={"a": "\x00"}
    )
    database.writing(partial(audit.append, entry=entry, by=by))
    assert problems(database) == []
    (record,) = records(database)
    assert record.name == "two\nlines \x1b[31m \N{REPLACEMENT CHARACTER} ? end"
    assert database.writing(lambda db: audit.forget(db, "document:\x00")) == 1
    assert problems(database) == []


def test_forgotten_names_and_deleted_records_leave_the_chain_whole(database: PostgresDatabase) -> None:
    filled(database)
    assert database.writing(lambda db: audit.forget(db, "user:1", "document:0", "user:erin")) >= 4
    assert problems(database) == []
    assert database.writing(lambda db: audit.expire(db, -1)) == 21
    assert [one.action for one in records(database)] == ["audit.expired"]
    assert problems(database) == []


def test_a_noted_head_shows_that_the_log_was_replaced(database: PostgresDatabase, url: str) -> None:
    filled(database, 3)
    noted = database.reading(audit.head)
    assert database.reading(lambda db: audit.verify(db, noted)) == []
    tamper(url, "DELETE FROM audit WHERE seq > 2")
    assert database.reading(lambda db: audit.verify(db, noted)) != []
