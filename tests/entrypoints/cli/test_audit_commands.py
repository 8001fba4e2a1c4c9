"""The audit log on the command line: every command that changes something leaves a record; list, export and verify."""

import asyncio
import json
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from anabranch.domain.audit import Actor, AuditEntry, AuditFilter, AuditRecord
from anabranch.entrypoints.cli.main import commands
from anabranch.knowledge.model import NewDocument
from anabranch.knowledge.records import audit, nodes
from anabranch.knowledge.records.nodes import Node
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.models.factory import LocalEmbedder
from anabranch.testing import FakeEmbedder
from support.cli_runner import Run, here
from support.knowledge_fixtures import OPERATOR, workshop

pytestmark = pytest.mark.xdist_group("operator-commands")

RIVERS = "An anabranch leaves the river and joins it again.\n"
HOSTILE = "two\nlines \x1b[31mred\x1b[0m\x07 \u202egpj \x9b"
# They change nothing that is kept in the data folder. Questions are in the query log.
READING = {
    "ask",
    "replay",
    "search",
    "collections list",
    "collections show",
    "documents list",
    "documents show",
    "published",
    "keys list",
    "queries list",
    "queries show",
    "feedback list",
    "audit list",
    "audit verify",
    "cluster list",
    "verify",
    "index status",
    "models install",
    "models list",
    "mcp servers",
    "eval answers",
    "eval calibration",
    "eval retrieval",
    "serve",
}
# Each command that changes something, in an order in which it can, and the action that it is recorded as. KEY is the id
# of the key that was made, HERE the folder of the test.
CHANGING = {
    "collections create": ("plans", "collection.created"),
    "collections permissions": ("plans --visibility public", "collection.permissions_changed"),
    "publish": ("plans --as root/plans", "collection.published"),
    "unpublish": ("root/plans", "collection.withdrawn"),
    "keys create": ("--user erin --group staff", "key.created"),
    "keys rotate": ("KEY", "key.rotated"),
    "keys revoke": ("KEY", "key.revoked"),
    "documents retry": ("--failed --no-wait", "ingest.retried"),
    "migrate": ("--to HERE/moved", "records.copied"),
    "ingest": ("HERE/texts -c texts --no-wait", "ingest.accepted"),
    "documents permissions": ("rivers.txt --visibility restricted --user bob", "document.permissions_changed"),
    "erase": ("--user erin --yes", "erasure.requested"),
    "documents delete": ("rivers.txt --yes", "document.deleted"),
    "collections delete": ("texts --yes", "collection.deleted"),
    "queries export": ("-o HERE/queries.jsonl", "queries.exported"),
    "queries forget": ("--all --yes", "queries.deleted"),
    "audit export": ("-o HERE/audit.jsonl", "audit.exported"),
    "index rebuild": ("", "index.rebuilt"),
    "cluster remove": ("gone", "node.removed"),
    "backup": ("HERE/copy.sqlite", "records.backed_up"),
    "restore": ("HERE/copy.sqlite --force", "records.restored"),
}
# Where a node's records are in its data folder it is alone, so this one was left behind by something else.
GONE = Node(id="1", name="gone", version="0", started_at=1.0, seen_at=0.0, seq=0, erased_pass=0)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a document that is stored and one that has failed. Its vectors are made up: no command here
    searches."""
    home = tmp_path_factory.mktemp("audited")
    (home / "texts").mkdir()
    (home / "texts" / "rivers.txt").write_text(RIVERS)
    embedder = FakeEmbedder(dimensions=LocalEmbedder.dimensions)
    embedder.name = LocalEmbedder.name
    documents = [
        NewDocument(source="file", data=RIVERS.encode(), filename="rivers.txt"),
        NewDocument(source="file", data=b"%PDF-1.4 and no more", filename="broken.pdf"),
    ]

    async def ingest() -> None:
        async with workshop(home / "data", embedder=embedder) as opened:
            await opened.collection("texts")
            await opened.room.ingest(OPERATOR, "texts", documents)
            await opened.ingest_pending()
            opened.database.writing(lambda db: nodes.beat(db, GONE))
            opened.database.writing(lambda db: nodes.leave(db, GONE.id))

    asyncio.run(ingest())
    return home / "data"


@pytest.fixture
def data(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept.parent / "texts", tmp_path / "texts")
    return Path(shutil.copytree(kept, tmp_path / "data"))


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(data, monkeypatch, capsys)


def records(data: Path, **wanted: Any) -> list[AuditRecord]:
    with closing(SqliteDatabase.open(data)) as database:
        return database.reading(lambda db: audit.listed(db, AuditFilter(**wanted), None, 1_000))


def add(data: Path, *entries: AuditEntry, by: Actor) -> None:
    with closing(SqliteDatabase.open(data)) as database:
        for entry in entries:
            database.writing(partial(audit.append, entry=entry, by=by))


def leaves(command: click.Command, *path: str) -> Iterator[str]:
    """The commands that are no groups."""
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, *path, name)


def test_every_command_that_changes_something_leaves_a_record(data: Path, run: Run) -> None:
    assert set(leaves(commands)) == CHANGING.keys() | READING, "a new command: is what it changes recorded?"
    key = ""
    for command, (given, action) in CHANGING.items():
        before = len(records(data, action=action))
        arguments = given.replace("HERE", str(data.parent)).replace("KEY", key).split()
        done = run(*command.split(), *arguments)
        assert done.code == 0, done
        made = records(data, action=action)
        assert len(made) == before + 1, command
        assert (made[0].actor, made[0].surface, made[0].outcome) == ("operator", "cli", "done")
        assert (made[0].address or "").endswith("@localhost")
        key = made[0].object.removeprefix("key:") if action == "key.created" else key
    assert run("audit", "verify").code == 0


def test_what_is_ingested_is_recorded_with_its_outcome(data: Path) -> None:
    by_indexer = [(one.action, one.outcome, one.name) for one in records(data, action="document")]
    assert sorted(by_indexer) == [("document.added", "done", "rivers.txt"), ("document.failed", "failed", "broken.pdf")]


def test_a_backup_that_fails_is_recorded(data: Path, run: Run) -> None:
    assert run("backup", str(data.parent / ("x" * 300))).code == 2
    found = records(data, action="records.backed_up")
    assert [one.outcome for one in found] == ["failed", "done"]


def test_a_restore_records_the_log_that_it_replaced(data: Path, run: Run) -> None:
    file = data.parent / "copy.sqlite"
    assert run("backup", str(file)).code == 0
    assert run("collections", "create", "later").code == 0
    (newest, *_) = records(data)
    assert run("restore", str(file), "--force").code == 0
    (restored, *_) = records(data)
    assert (restored.action, restored.name) == ("records.restored", str(file))
    assert restored.details == {"replaced_seq": newest.seq, "replaced_hash": newest.hash}


def test_the_list_is_a_table_that_hostile_names_do_not_break(data: Path, run: Run) -> None:
    by = Actor(name=f"user:{HOSTILE}", address=HOSTILE, surface="api")
    add(data, AuditEntry(action="key.created", object="key:1", name=HOSTILE, granted=(f"group:{HOSTILE}",)), by=by)
    listed = run("audit", "list", "--limit", "1")
    header, line, *more = listed.out.splitlines()
    assert (header.split()[0], more) == ("when", [])
    assert "key.created" in line
    assert all(char.isprintable() for char in line)
    assert "There are more than 1" in listed.err
    assert run("audit", "list", "--actor", HOSTILE).out.count("key.created") == 1
    assert run("audit").out.startswith("when"), "list is the default"
    (view, *_) = json.loads(run("audit", "list", "--json").out)
    assert (view["name"], view["address"]) == (HOSTILE, HOSTILE)


def test_an_export_has_a_line_of_json_for_each_record(data: Path, run: Run) -> None:
    by = Actor(name=f"user:{HOSTILE}", address=HOSTILE, surface="api")
    add(data, AuditEntry(action="key.created", object="key:1", name=HOSTILE), by=by)
    file = data.parent / "audit.jsonl"
    assert run("audit", "export", "-o", str(file)).code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["seq"] for one in lines] == list(range(len(lines), 0, -1))
    assert (lines[0]["action"], lines[1]["name"]) == ("audit.exported", HOSTILE)
    assert run("audit", "export", "-o", str(file)).code == 2, "it exists"
    printed = run("audit", "export", "--action", "key")
    assert [json.loads(line)["action"] for line in printed.out.splitlines()] == ["key.created"]
    assert not {"\x1b", "\x07", "\x9b"}.intersection(file.read_text())
    assert run("audit", "list", "--since", "yesterday").code == 2
    assert run("audit", "list", "--since", "2999-01-01").out == ""


def test_forgotten_names_are_shown_as_such(data: Path, run: Run) -> None:
    by = Actor(name="user:alice", address="192.0.2.1", surface="api")
    add(data, AuditEntry(action="document.deleted", object="document:1", name="Her diary"), by=by)
    with closing(SqliteDatabase.open(data)) as database:
        database.writing(lambda db: audit.forget(db, "user:alice", "document:1"))
    line = run("audit", "list", "--action", "document.deleted").out.splitlines()[1]
    assert line.count("(forgotten)") == 3
    assert run("audit", "verify").code == 0


def test_verify_finds_what_was_changed(data: Path, run: Run) -> None:
    whole = run("audit", "verify")
    noted = whole.out.split()[-1]
    assert whole.out.startswith("The audit log is whole.")
    assert run("audit", "verify", "--noted", noted).code == 0
    assert run("audit", "verify", "--noted", f"1:{'00' * 32}").code == 1
    assert run("audit", "verify", "--noted", "newest").code == 2
    with closing(sqlite3.connect(data / "records.sqlite")) as db:
        db.execute("DELETE FROM audit WHERE seq = 2")
        db.commit()
    broken = run("audit", "verify")
    assert (broken.code, broken.out) == (1, "Record 3: Record 2 is missing.\n")
    assert json.loads(run("audit", "verify", "--json").out)["findings"][0]["seq"] == 3


def test_without_records_there_is_no_log(run: Run, tmp_path: Path) -> None:
    elsewhere = {"AGGREGATOR_DATA_DIR": str(tmp_path / "empty")}
    assert run("audit", **elsewhere).err == "There is no such record.\n"
    assert run("audit", "export", **elsewhere).out == ""
    assert run("audit", "verify", **elsewhere).code == 1
    assert not (tmp_path / "empty").exists()


DAMAGES = {
    "no newest record": "DELETE FROM audit_chain",
    "details": "UPDATE audit SET details = 'not json' WHERE seq = 2",
    "a hash": "UPDATE audit SET hash = 'text' WHERE seq = 2",
    "a time": "UPDATE audit SET at_us = 'text' WHERE seq = 2",
    "no UTF-8": "UPDATE audit SET action = CAST(x'ff' AS TEXT) WHERE seq = 2",
    "two newest records": "INSERT INTO audit_chain SELECT * FROM audit_chain",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_is_named_in_one_sentence(data: Path, run: Run, damage: str) -> None:
    with closing(sqlite3.connect(data / "records.sqlite", isolation_level=None)) as db:
        db.execute("DROP TRIGGER audit_is_not_changed")
        db.execute(DAMAGES[damage])
    said = "anabranch: The audit log is damaged. Find out where with: anabranch audit verify\n"
    exported, listed = run("audit", "export"), run("audit", "list")
    if damage == "two newest records":
        assert (exported.code, listed.code) == (0, 0)
    else:
        assert (exported.code, exported.err) == (1, said)
    if damage not in ("no newest record", "two newest records"):
        assert (listed.code, listed.err) == (1, said)
    assert run("audit", "verify").code == 1
