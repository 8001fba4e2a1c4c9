"""The commands with records in PostgreSQL: all of them work, or say why not; `verify` finds what is damaged."""

import asyncio
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

from anabranch.app.records import node_of
from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.main import commands
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.model import NewDocument
from anabranch.knowledge.records import nodes
from anabranch.knowledge.records.nodes import Node
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.models.factory import LocalEmbedder
from anabranch.testing import FakeEmbedder
from support.cli_runner import Ran, Run, here, process
from support.knowledge_fixtures import OPERATOR, Workshop, query_record
from support.postgres_server import shared_postgres

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-postgres-commands")]

RIVERS = "An anabranch leaves the river and joins it again.\n"
QUERY = "01a1e32c-9aeb-7968-aac4-97372bad0890"
# In an order in which each can do something. KEY is the id of the key that was made, HERE the folder of the test.
WORKING = {
    "collections list": "",
    "collections show": "texts",
    "collections create": "plans",
    "collections permissions": "plans --visibility public",
    "publish": "plans --as root/plans",
    "published": "",
    "unpublish": "root/plans",
    "keys create": "--user erin --group staff --collection texts --expires 30d",
    "keys rotate": "KEY --overlap 1h",
    "keys list": "",
    "keys revoke": "KEY",
    "documents list": "--status all",
    "documents show": "rivers.txt --content",
    "documents permissions": "rivers.txt --visibility restricted --user bob",
    "documents retry": "--failed --no-wait",
    "ingest": "HERE/texts -c more",
    "search": "anabranch",
    "ask": "anabranch --json",
    "queries list": "",
    "queries show": QUERY,
    "queries export": "-o HERE/queries.jsonl",
    "feedback list": "",
    "index status": "",
    "index rebuild": "--embed",
    "cluster list": "",
    "cluster remove": "gone",
    "erase": "--user erin --yes",
    "documents delete": "herons.txt --yes",
    "collections delete": "more --yes",
    "queries forget": "--all --yes",
    "audit list": "--action key",
    "audit export": "-o HERE/audit.jsonl",
    "audit verify": "",
    "verify": "",
}
# They copy the file of the records.
REFUSED = {"backup": "HERE/copy.sqlite", "restore": "HERE/texts/rivers.txt --force"}
# They use no records, or have tests of their own.
ELSEWHERE = {
    *("replay", "models install", "models list", "mcp servers", "mcp", "serve", "migrate"),
    *("eval answers", "eval calibration", "eval retrieval"),
}


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


class Kept:
    """Records in PostgreSQL, and a data folder with the index of a node."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    def execute(self, *statements: str) -> list[Any]:
        """As a superuser whom no trigger holds up; what the last statement returns."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            done = [connection.execute(one.encode()) for one in statements][-1]
            return done.fetchall() if done.description else []

    def opened(self) -> "closing[PostgresDatabase]":
        return closing(PostgresDatabase.open(self.url))


def settings_of(kept: Kept) -> Settings:
    return Settings(data_dir=str(kept.folder), database_url=kept.url)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two documents in a segment, one that failed, and a question. The vectors are made up."""
    home = tmp_path_factory.mktemp("postgres")
    (home / "texts").mkdir()
    (home / "texts" / "rivers.txt").write_text(RIVERS)
    kept = Kept(home / "data", shared_postgres().create_database())
    node = node_of(settings_of(kept))
    embedder = FakeEmbedder(dimensions=LocalEmbedder.dimensions)
    embedder.name = LocalEmbedder.name
    documents = [
        NewDocument(source="file", data=RIVERS.encode(), filename="rivers.txt"),
        NewDocument(source="file", data=b"Herons eat fish.", filename="herons.txt"),
        NewDocument(source="file", data=b"%PDF-1.4 and no more", filename="broken.pdf"),
    ]

    async def make(database: PostgresDatabase) -> None:
        shop = Workshop(kept.folder, embedder=embedder, database=database)
        shop.generations.node = node
        await shop.collection("texts")
        await shop.room.ingest(OPERATOR, "texts", documents)
        await shop.ingest_pending()
        shop.writer.fold()
        await shop.room.record(query_record(QUERY, ""))

    with kept.opened() as database:
        asyncio.run(make(database))
    yield kept
    shared_postgres().drop(kept.url)


@pytest.fixture
def kept(made: Kept, tmp_path: Path) -> Iterator[Kept]:
    shutil.copytree(made.folder.parent / "texts", tmp_path / "texts")
    name = f"copy_{secrets.token_hex(8)}"
    with psycopg.connect(shared_postgres().url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {made.url.rpartition('/')[2]}".encode())
    url = shared_postgres().url(name)
    yield Kept(Path(shutil.copytree(made.folder, tmp_path / "data")), url)
    shared_postgres().drop(url)


@pytest.fixture
def run(kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    for once in here(kept.folder, monkeypatch, capsys):
        yield partial(once, AGGREGATOR_DATABASE_URL=kept.url)


def add_node(kept: Kept, name: str, *, age_s: float = 0.0, erased_pass: int = 0, seq: int = 0) -> str:
    """A node that was heard of some time ago; its id."""
    identifier = f"00000000-0000-4000-8000-{secrets.token_hex(6)}"
    node = Node(id=identifier, name=name, version="0.9", started_at=1e9, seen_at=0, seq=seq, erased_pass=erased_pass)
    with kept.opened() as database:
        database.writing(partial(nodes.beat, node=node))
    kept.execute(f"UPDATE nodes SET seen_at = seen_at - {age_s} WHERE id = '{identifier}'")
    return identifier


def test_every_command_works_or_says_why_not(kept: Kept, run: Run) -> None:
    assert set(leaves(commands)) - ELSEWHERE == WORKING.keys() | REFUSED.keys(), "does a new command work, too?"
    add_node(kept, "gone", age_s=60)
    key = ""
    for command, given in {**WORKING, **REFUSED}.items():
        arguments = given.replace("HERE", str(kept.folder.parent)).replace("KEY", key).split()
        done = run(*command.split(), *arguments)
        assert done.code == (2 if command in REFUSED else 0), (command, done)
        assert command not in REFUSED or "The records are in PostgreSQL" in done.err
        key = done.err.split()[1].rstrip(":") if command == "keys create" else key
    assert not (kept.folder / "records.sqlite").exists()
    actions = [one["action"] for one in map(json.loads, (kept.folder.parent / "audit.jsonl").read_text().splitlines())]
    assert {"node.removed", "index.rebuilt", "erasure.requested", "queries.exported"} <= set(actions)


def judged_dataset(folder: Path) -> Path:
    folder.mkdir()
    texts = {"a": RIVERS, "b": "Herons eat fish and stand still for hours."}
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": name, "title": name, "text": text}) + "\n" for name, text in texts.items())
    )
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "What do herons eat?"}) + "\n")
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\tb\t1\n")
    return folder


def answer_dataset(folder: Path) -> Path:
    (folder / "documents").mkdir(parents=True)
    (folder / "documents" / "herons.md").write_text("# Herons\n\nHerons eat fish.\n")
    row = {
        "question": "What do herons eat?",
        "answers": ["fish"],
        "evidence": [{"document": "herons.md", "text": "Herons eat fish."}],
    }
    (folder / "questions.jsonl").write_text(json.dumps(row) + "\n")
    return folder


EVALUATIONS = {"retrieval": judged_dataset, "answers": answer_dataset}


@pytest.mark.parametrize("what", EVALUATIONS)
def test_an_evaluation_keeps_nothing_in_the_shared_records(
    run: Run, kept: Kept, tmp_path: Path, models_dir: Path, what: str
) -> None:
    counts = "SELECT (SELECT count(*) FROM collections), (SELECT count(*) FROM jobs), (SELECT max(seq) FROM audit)"
    before = kept.execute(counts)
    out = tmp_path / "out"
    arguments = ("eval", what, "--dataset", str(EVALUATIONS[what](tmp_path / "set")), "--output", str(out))
    ran = run(*arguments, AGGREGATOR_MODELS_DIR=str(models_dir))
    assert ran.code == 0, ran
    assert kept.execute(counts) == before
    assert kept.url not in "".join(file.read_text() for file in out.iterdir())


def test_index_status_shows_the_size_of_the_database(run: Run) -> None:
    status = json.loads(run("index", "status", "--json").out)
    assert (status["chunks"], status["behind_chunks"]) == (2, 0)
    assert status["records_bytes"] > 1_000_000


# What `verify` finds


def checked(run: Run, *arguments: str) -> tuple[int, dict[str, list[str]]]:
    ran = run("verify", "--json", *arguments)
    said = json.loads(ran.out)
    assert said["ok"] is (ran.code == 0)
    return ran.code, {one["name"]: one["problems"] for one in said["checks"] if one["problems"]}


def test_what_is_whole_is_verified_and_not_changed(run: Run, kept: Kept) -> None:
    before = {file: file.read_bytes() for file in kept.folder.rglob("*") if file.is_file()}
    counts = "SELECT count(*), max(seq) FROM audit"
    (counted,) = kept.execute(counts)
    ran = run("verify")
    assert (ran.code, ran.out.count(" ok ")) == (0, 5)
    assert "records    ok (2 documents, 2 chunks)" in ran.out
    assert "index      ok (1 segment, 2 chunks)" in ran.out
    assert f"audit log  ok (up to record {counted[1]})" in ran.out
    assert "backups    ok (not applicable: the tools of PostgreSQL make and verify them)" in " ".join(
        ran.out.split("\n")
    )
    assert {file: file.read_bytes() for file in kept.folder.rglob("*") if file.is_file()} == before
    assert kept.execute(counts) == [counted]


def test_records_can_be_verified_where_no_node_is(run: Run, kept: Kept) -> None:
    shutil.rmtree(kept.folder)
    assert run("verify").code == 0
    assert not kept.folder.exists()


DAMAGED = {
    "DELETE FROM embeddings WHERE chunk = 1": "has no vector",
    "DELETE FROM chunks WHERE key = 1": "another number of chunks",
    "DELETE FROM contents": "has no text",
    "UPDATE embeddings SET vector = '\\x00' WHERE chunk = 1": "another length",
    "DELETE FROM collections": "refers to a row of collections that is not there",
    "DELETE FROM jobs": "refers to a row of jobs that is not there",
    "UPDATE chunks SET document = 999 WHERE key = 1": "belongs to no document",
    "UPDATE chunks SET text = 'Herons eat bread.' WHERE key = 1": "Chunk 1 has another text than document",
    "UPDATE chunks SET start_char = 1 WHERE key = 1": "Chunk 1 has another text than document",
    "UPDATE contents SET page_starts = '[7,3]'": "pages that begin outside of its text",
    "UPDATE contents SET page_starts = 'none'": "pages that begin outside of its text",
    "UPDATE chunks SET page = 2 WHERE key = 1": "Chunk 1 is on a page that its document does not have",
    "UPDATE chunks SET later_pages = '[1]' WHERE key = 1": "Chunk 1 has pages that begin outside of it",
    "UPDATE documents SET visibility = 'nonsense'": "has permissions that cannot be read",
    "UPDATE documents SET allowed_users = 'bob'": "has permissions that cannot be read",
    "UPDATE documents SET allowed_groups = '{}'": "has permissions that cannot be read",
    "UPDATE collections SET settings = '{}'": "Collection",
    "DROP TABLE contents": "cannot be read",
}


@pytest.mark.parametrize("statement", DAMAGED)
def test_rows_that_do_not_fit_together_are_problems(run: Run, kept: Kept, statement: str) -> None:
    kept.execute(statement)
    code, found = checked(run)
    assert code == 1
    assert any(DAMAGED[statement] in one for one in found["records"]), found


def test_a_changed_record_of_the_audit_log_is_a_problem(run: Run, kept: Kept) -> None:
    kept.execute("UPDATE audit SET outcome = 'failed' WHERE seq = 2")
    code, found = checked(run)
    assert (code, found) == (1, {"audit log": ["Record 2: The record was changed, or the one before it."]})
    ran = run("audit", "verify")
    assert (ran.code, ran.out) == (1, "Record 2: The record was changed, or the one before it.\n")


def test_an_audit_log_that_lacks_a_noted_record_is_a_problem(run: Run) -> None:
    _, found = checked(run, "--noted", f"3:{'00' * 32}")
    assert found["audit log"] == ["Record 3: The record has another hash than the one that was noted."]


LOSSES: dict[str, tuple[Callable[[Generations], object], str]] = {
    "a damaged segment": (
        lambda index: (index.path(index.current().segments[0]) / "keys.bin").write_bytes(b""),
        "is damaged.",
    ),
    "no manifest": (
        lambda index: (index.folder / "CURRENT").unlink(),
        "The manifest of the index is missing: no segment has 2 chunks of the records.",
    ),
}


@pytest.mark.parametrize("how", LOSSES)
def test_a_damaged_index_of_this_node_is_a_problem(run: Run, kept: Kept, how: str) -> None:
    lose, problem = LOSSES[how]
    lose(Generations(kept.folder / "index"))
    code, found = checked(run)
    assert code == 1
    assert [one for one in found["index"] if problem in one], found


def test_an_index_that_differs_from_the_records_is_a_problem(run: Run, kept: Kept) -> None:
    kept.execute("UPDATE embeddings SET vector = (SELECT vector FROM embeddings WHERE chunk = 1) WHERE chunk = 2")
    _, found = checked(run)
    assert [one.partition(" has ")[2] for one in found["index"]] == ["other vectors than the records for 1 chunk."]


def test_backups_that_are_named_are_verified(run: Run, kept: Kept) -> None:
    file = kept.folder.parent / "monday.sqlite"
    file.write_bytes(b"no database")
    _, found = checked(run, str(file))
    assert len(found["backups"]) == 1


def test_a_database_without_records_or_with_newer_ones_is_not_verified(run: Run, kept: Kept) -> None:
    kept.execute("UPDATE facts SET value = '999' WHERE name = 'schema_version'")
    ran = run("verify")
    assert (ran.code, "schema version 999, written by a newer Anabranch" in ran.err) == (2, True)
    kept.execute("DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    ran = run("verify")
    assert (ran.code, "has no records yet" in ran.err) == (1, True)
    assert kept.execute("SELECT to_regclass('facts')") == [(None,)]


# The cluster


def test_the_nodes_are_listed_with_how_far_each_has_come(run: Run, kept: Kept) -> None:
    settings = Settings(data_dir=str(kept.folder), database_url=kept.url)
    this = node_of(settings)
    node = Node(id=this, name="one", version="0.9", started_at=1e9, seen_at=0, seq=0, erased_pass=0)
    with kept.opened() as database:
        database.writing(partial(nodes.beat, node=node))
    other, gone = add_node(kept, "two", seq=1), add_node(kept, "three", age_s=7_300)
    found = json.loads(run("cluster", "--json").out)
    assert (found["records"]["kind"], found["records"]["is_reachable"]) == ("postgres", True)
    assert int(found["records"]["server_version"].partition(".")[0]) >= 13
    assert (found["leader"], found["waiting_documents"], found["last_pass"]) == (min(this, other), 0, 0)
    by_id = {one["id"]: one for one in found["nodes"]}
    assert list(by_id) == sorted((this, other, gone))
    shown = {
        identifier: (one["name"], one["is_alive"], one["is_this"], one["leads"]) for identifier, one in by_id.items()
    }
    leads = {one: one == min(this, other) for one in by_id}
    assert shown == {
        this: ("one", True, True, leads[this]),
        other: ("two", True, False, leads[other]),
        gone: ("three", False, False, False),
    }
    assert by_id[other]["behind"] == found["head"] - 1
    assert by_id[gone]["behind"] == found["head"]
    assert 7_300 <= by_id[gone]["age_s"] < 7_400
    listed = run("cluster").out
    assert "one (this one)" in listed
    assert "not heard of for 2 hours" in listed
    assert f"{found['head'] - 1} changes behind" in listed


def test_a_node_that_is_gone_is_removed_with_a_record_and_no_erasure_waits_for_it(run: Run, kept: Kept) -> None:
    gone = add_node(kept, "three", age_s=60)
    assert run("erase", "--document", "herons.txt", "--yes").code == 0
    alive = add_node(kept, "two")
    ran = run("cluster", "remove", "two")
    assert (ran.code, "is alive. Stop its server first." in ran.err) == (1, True)
    ran = run("cluster", "remove", "three")
    assert (ran.code, "1 erasure no longer waits for it" in ran.err) == (0, True)
    assert "delete that folder" in ran.err
    assert [one["id"] for one in json.loads(run("cluster", "--json").out)["nodes"]] == [alive]
    (record,) = json.loads(run("audit", "list", "--action", "node.removed", "--json").out)
    assert (record["object"], record["name"], record["details"]) == (f"node:{gone}", "three", {"erasures": 1})
    ran = run("cluster", "remove", "three")
    assert (ran.code, "There is no node 'three'" in ran.err) == (1, True)


def test_a_node_is_named_by_its_id_if_several_have_the_name(run: Run, kept: Kept) -> None:
    first, second = (add_node(kept, "twin", age_s=60) for _ in range(2))
    ran = run("cluster", "remove", "twin")
    assert (ran.code, first in ran.err, second in ran.err) == (1, True, True)
    removed = json.loads(run("cluster", "remove", first, "--json").out)
    assert removed == {"id": first, "name": "twin", "erasures": 0}


# The start


def refusal(kept: Kept, *arguments: str, url: str) -> Ran:
    return process(kept.folder, *arguments, AGGREGATOR_DATABASE_URL=url)


@pytest.mark.parametrize("arguments", [("serve", "--port", "0"), ("verify",), ("audit", "list")])
def test_a_database_that_is_down_is_one_sentence_with_what_to_do(kept: Kept, arguments: tuple[str, ...]) -> None:
    ran = refusal(kept, *arguments, url="postgresql://me:secret@127.0.0.1:1/records")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("anabranch: AGGREGATOR_DATABASE_URL: the records cannot be opened (")
    assert "Check that PostgreSQL runs there" in ran.err
    assert "secret" not in ran.err


def test_an_address_that_is_none_is_not_repeated(kept: Kept) -> None:
    ran = refusal(kept, "serve", "--port", "0", url="postgresql://me:secret@[::1/records")
    assert (ran.code, "secret" in ran.err) == (2, False)
    assert "Write it as postgresql://USER:PASSWORD@HOST:PORT/NAME" in ran.err


def test_without_psycopg_the_start_says_which_extra_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.configuration.extras.find_spec", lambda name: None if name == "psycopg" else name)
    ran = run("serve", "--port", "0")
    assert (ran.code, ran.err) == (
        2,
        "anabranch: Keeping the records in PostgreSQL (AGGREGATOR_DATABASE_URL) needs psycopg, which is not installed: "
        "pip install 'anabranch[postgres]'\n",
    )


def test_psycopg_without_the_library_of_postgresql_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "anabranch.knowledge.records.postgres", None)
    ran = run("serve", "--port", "0")
    assert (ran.code, "needs libpq" in ran.err, "pip install 'anabranch[postgres]'" in ran.err) == (2, True, True)
