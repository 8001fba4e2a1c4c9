"""Commands for documents: ingest, collections, documents, search, ask."""

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from anyio.from_thread import start_blocking_portal

from anabranch.configuration.settings import Settings
from conftest import LOCAL
from support.cli_runner import Ran, Run, environment, here, on_terminal, process
from support.collection_server import indexing

pytestmark = pytest.mark.xdist_group("knowledge-commands")

REFUNDS = """# Handbook

## Refunds

Refunds are paid within 30 days of the return. The shop pays for the return label, and says so in the mail.

## Holidays

Everyone has 28 days of holidays a year. They have to be agreed on with the team.
"""
RIVERS = "An anabranch is a section of a river that leaves the main stem and joins it again further down.\n"


class Shelf(NamedTuple):
    """A data folder with a collection in it, the folder it came from, and what its ingest said."""

    data: Path
    books: Path
    first: Ran


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Shelf:
    home = tmp_path_factory.mktemp("shelf")
    books = home / "handbook"
    (books / "hr").mkdir(parents=True)
    (books / "hr" / "refunds.md").write_text(REFUNDS)
    (books / "rivers.txt").write_text(RIVERS)
    (books / "broken.pdf").write_bytes(b"%PDF-1.4 and no more")
    (books / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (books / ".hidden.txt").write_text("Not for you.")
    (books / "again").symlink_to("../handbook")
    first = process(home / "data", "ingest", str(books), "-c", "handbook", "--tag", "staff", "--meta", "year=2024")
    return Shelf(home / "data", books, first)


@pytest.fixture
def shelf(kept: Shelf, tmp_path: Path) -> Shelf:
    """A copy that a test may change."""
    shutil.copytree(kept.data, tmp_path / "data")
    shutil.copytree(kept.books, tmp_path / "handbook", symlinks=True)
    return Shelf(tmp_path / "data", tmp_path / "handbook", kept.first)


@pytest.fixture
def run(kept: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Commands that only look."""
    yield from here(kept.data, monkeypatch, capsys)


@pytest.fixture
def change(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Commands that change something."""
    yield from here(shelf.data, monkeypatch, capsys)


@pytest.fixture
def indexed(shelf: Shelf, models_dir: Path) -> Iterator[None]:
    """An indexer in a thread, as beside a running server: no command starts one of its own."""
    settings = Settings(
        data_dir=str(shelf.data), models_dir=str(models_dir), endpoint_allowlist=LOCAL, log_level="ERROR"
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(indexing(settings)):
        yield


# --- ingest


def test_each_file_has_its_outcome_and_a_failure_its_reason(kept: Shelf) -> None:
    assert kept.first.code == 1
    assert kept.first.err == ""
    assert re.search(r"^✓ added     hr/refunds\.md  2 chunks$", kept.first.out, re.MULTILINE)
    assert re.search(r"^✗ failed    broken\.pdf\n  The PDF is damaged\. .*\.$", kept.first.out, re.MULTILINE)
    assert kept.first.out.endswith("handbook: 2 added, 1 failed (left out: 1 hidden, 1 .png, 1 repeated link)\n")


def test_ingesting_a_folder_again_ingests_only_changed_files(change: Run, shelf: Shelf) -> None:
    (shelf.books / "broken.pdf").unlink()
    (shelf.books / "rivers.txt").write_text(RIVERS + "A bayou is another.\n")
    (shelf.books / "new.txt").write_text("Something new is here.\n")
    arguments = ("ingest", str(shelf.books), "-c", "handbook", "--tag", "staff", "--meta", "year=2024", "--json")
    ran = change(*arguments)
    assert (ran.code, ran.err) == (0, "")
    said = json.loads(ran.out)
    outcomes = {one["name"]: one["outcome"] for one in said["documents"]}
    assert outcomes == {"hr/refunds.md": "unchanged", "rivers.txt": "replaced", "new.txt": "added"}
    assert said["counts"]["failed"] == 0
    found = change("search", "bayou", "--json")
    assert json.loads(found.out)["passages"][0]["text"].endswith("A bayou is another.")
    assert json.loads(change("index", "status", "--json").out)["behind_chunks"] == 0


@pytest.mark.usefixtures("indexed")
def test_links_that_leave_the_folder_are_skipped_and_named(change: Run, shelf: Shelf) -> None:
    outside = shelf.books.parent / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("The password is swordfish.\n")
    (shelf.books / "broken.pdf").unlink()
    arguments = ("ingest", str(shelf.books), "-c", "handbook", "--tag", "staff", "--meta", "year=2024")
    (shelf.books / "link.txt").symlink_to(outside / "secret.txt")
    ran = change(*arguments)
    assert (ran.code, ran.err) == (0, "")
    assert "- skipped   link.txt\n  The symbolic link leaves the folder; --follow-links allows it.\n" in ran.out
    assert ran.out.endswith("handbook: 2 unchanged, 1 skipped (left out: 1 hidden, 1 .png, 1 repeated link)\n")
    said = json.loads(change(*arguments, "--json").out)
    assert said["counts"]["skipped"] == 1
    (link,) = (one for one in said["documents"] if one["outcome"] == "skipped")
    assert (link["name"], link["document_id"]) == ("link.txt", None)
    assert "--follow-links" in link["error"]
    assert "swordfish" not in change("search", "password", "--json").out
    followed = json.loads(change(*arguments, "--follow-links", "--json").out)
    assert (followed["counts"]["added"], followed["counts"]["skipped"]) == (1, 0)
    assert "swordfish" in change("search", "password", "--json").out


@pytest.mark.usefixtures("indexed")
def test_ingesting_a_folder_of_links_that_leave_it_is_an_error(change: Run, shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "rivers.txt").symlink_to(shelf.books / "rivers.txt")
    ran = change("ingest", str(tmp_path / "links"), "-c", "handbook")
    assert (ran.code, ran.out) == (2, "")
    assert "--follow-links allows them: rivers.txt." in ran.err
    named = json.loads(change("ingest", str(tmp_path / "links" / "rivers.txt"), "-c", "new", "--json").out)
    assert [(one["name"], one["outcome"]) for one in named["documents"]] == [("rivers.txt", "added")]


@pytest.mark.usefixtures("indexed")
def test_ingest_again_without_visibility_keeps_the_permissions(change: Run, shelf: Shelf) -> None:
    file, more = str(shelf.books / "rivers.txt"), ("-c", "handbook", "--json")

    def outcome(*options: str) -> tuple[str, str]:
        (said,) = json.loads(change("ingest", file, *more, *options).out)["documents"]
        listed = json.loads(change("documents", *more).out)
        (kept,) = (one for one in listed if one["filename"] == "rivers.txt")
        return said["outcome"], kept["permissions"]["visibility"]

    assert outcome("--visibility", "private") == ("updated", "private")
    assert outcome() == ("unchanged", "private")
    assert outcome("--meta", "year=2025") == ("updated", "private")
    (shelf.books / "rivers.txt").write_text(RIVERS + "A bayou is another.\n")
    assert outcome() == ("replaced", "private")
    assert outcome("--visibility", "public") == ("updated", "public")


@pytest.mark.usefixtures("indexed")
def test_ingest_beside_a_running_indexer_leaves_the_work_to_it(shelf: Shelf) -> None:
    (shelf.books / "broken.pdf").unlink()
    (shelf.books / "new.txt").write_text("Something new is here.\n")
    ran = process(shelf.data, "ingest", str(shelf.books), "-c", "handbook")
    assert ran.code == 0, ran
    assert "✓ added     new.txt" in ran.out


def test_ctrl_c_during_ingest_keeps_accepted_documents(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = tmp_path / "many", tmp_path / "data"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"Document {number}. " + "It goes on and on about rivers. " * 200)
    started = subprocess.Popen(
        [sys.executable, "-m", "anabranch", "ingest", str(folder), "-c", "many"],
        env=environment(data),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        wait_for_items(data / "records.sqlite", started)
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=20)
    finally:
        started.kill()
        started.wait()
    assert started.returncode == 130
    assert err.startswith(b"Stopped after ")
    assert b"run the same command again" in err
    assert b"Traceback" not in err
    run = next(here(data, monkeypatch, capsys))
    waiting = json.loads(run("index", "status", "--json").out)["waiting_documents"]
    assert 0 < waiting <= 40


def wait_for_items(records: Path, started: "subprocess.Popen[bytes]") -> None:
    """Until the documents were accepted."""
    while started.poll() is None:
        try:
            with closing(sqlite3.connect(records, timeout=5)) as db:
                if db.execute("SELECT count(*) FROM items").fetchone()[0]:
                    return
        except sqlite3.Error:
            continue
    raise AssertionError("it ended before it could be interrupted")


def test_a_web_page_is_ingested_by_its_url(change: Run, shelf: Shelf) -> None:
    handler = partial(QuietFiles, directory=str(shelf.books))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        page = f"http://127.0.0.1:{server.server_address[1]}/rivers.txt"
        guarded = change("ingest", page, "-c", "web")
        taken = change("ingest", page, "-c", "web", AGGREGATOR_ENDPOINT_ALLOWLIST="127.0.0.0/8")
        server.shutdown()
        thread.join()
    assert guarded.code == 1
    assert f"✗ failed    {page}\n  The address cannot be fetched." in guarded.out
    assert taken.code == 0
    assert f"✓ added     {page}  1 chunk\n" in taken.out


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def test_ingest_no_wait_only_accepts_documents(change: Run, shelf: Shelf) -> None:
    ran = change("ingest", str(shelf.books / "rivers.txt"), "-c", "later", "--no-wait")
    assert ran.code == 0
    assert "… accepted  rivers.txt" in ran.out
    assert "The server or the next ingest processes them" in ran.err
    counted = {one["name"]: one["documents"] for one in json.loads(change("collections", "--json").out)}
    assert counted == {"handbook": 2, "later": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing-here"], 2, "nothing-here cannot be read"),
        (["."], 2, "There is no document in ."),
        (["http://[::1/x"], 2, "cannot be fetched"),
        (["handbook", "--title", "Both"], 2, "--title can be given for a single document only"),
        (["handbook", "--meta", "year"], 2, "not of the form key=value"),
        (["handbook", "--visibility", "public", "--user", "bob"], 2, "--visibility restricted"),
        (["handbook", "--chunk-size", "0"], 2, "--chunk-size"),
    ],
)
def test_ingest_usage_errors(
    run: Run, kept: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path if arguments == ["."] else kept.data.parent)
    ran = run("ingest", *arguments, "-c", "c")
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err


def test_a_missing_embedding_model_is_reported_at_once(run: Run, kept: Shelf, tmp_path: Path) -> None:
    for arguments in (("ingest", str(kept.books), "-c", "c"), ("search", "x"), ("index", "rebuild")):
        ran = run(*arguments, AGGREGATOR_MODELS_DIR=str(tmp_path))
        assert (ran.code, ran.out) == (2, "")
        assert "Run: anabranch models install" in ran.err


# --- collections and documents


def test_collections_list_and_show(run: Run) -> None:
    assert run("collections").out.split() == [
        *["collection", "documents", "chunks", "visibility"],
        *["handbook", "2", "3", "private"],
    ]
    assert json.loads(run("collections", "list", "--json").out)[0]["documents"] == 2
    shown = run("collections", "show", "handbook").out
    assert re.search(r"^chunking +semantic, at most 254 tokens, 50 repeated *$", shown, re.MULTILINE)
    missing = run("collections", "show", "nothing")
    assert (missing.code, missing.err) == (1, "anabranch: There is no collection 'nothing'.\n")


def test_collections_create_and_delete(change: Run) -> None:
    made = change(
        "collections", "create", "plans", "--chunk-size", "100", "--chunking", "fixed", "--user", "bob", "--json"
    )
    shown = json.loads(made.out)
    assert shown["chunking"] == {"strategy": "fixed", "size": 100, "overlap": 50}
    assert shown["permissions"] == {"visibility": "restricted", "allowed_users": ["bob"], "allowed_groups": []}
    assert change("collections", "create", "plans").err == "anabranch: There is a collection named 'plans' already.\n"
    assert change("collections", "delete", "handbook", "--yes").out == "Deleted handbook and 2 documents.\n"
    assert [one["name"] for one in json.loads(change("collections", "--json").out)] == ["plans"]


def test_read_only_commands_create_no_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = next(here(tmp_path / "data", monkeypatch, capsys))
    assert "There is no collection yet" in run("collections").err
    assert run("collections", "--json").out == "[]\n"
    assert "There is no key yet" in run("keys").err
    assert run("documents", "--json").out == "[]\n"
    assert run("published", "--json").out == "[]\n"
    for arguments in (["search", "x"], ["index", "status"], ["backup", "b"], ["documents", "show", "x"]):
        assert "There are no documents in" in run(*arguments).err
    assert not (tmp_path / "data").exists()


def test_restricted_without_users_and_groups_is_noted(change: Run) -> None:
    ran = change("documents", "permissions", "rivers.txt", "--visibility", "restricted")
    assert ran.code == 0
    assert ran.err == "anabranch: Only the owner may see it: no user or group is named (--user, --group).\n"


def test_documents_list_show_permissions_and_delete(change: Run) -> None:
    listed = json.loads(change("documents", "list", "-c", "handbook", "--json").out)
    assert sorted(one["filename"] for one in listed) == ["hr/refunds.md", "rivers.txt"]
    chosen = next(one for one in listed if one["filename"] == "rivers.txt")
    assert chosen["metadata"] == {"year": "2024", "tags": ["staff"]}
    assert chosen["id"] in change("documents", "-c", "handbook").out
    assert change("documents", "show", chosen["id"], "--content").out == RIVERS
    assert re.search(r"^file +rivers.txt *$", change("documents", "show", chosen["id"]).out, re.MULTILINE)
    changed = change("documents", "permissions", chosen["id"], "--visibility", "restricted", "--group", "hr")
    assert changed.out == "rivers.txt is restricted (group hr) now.\n"
    assert change("documents", "permissions", chosen["id"]).code == 2
    assert change("documents", "delete", chosen["id"]).out.endswith("and its 1 chunk.\n")
    assert change("documents", "show", chosen["id"]).code == 1
    assert "1 of 1" not in change("documents").err


# --- search and ask


@pytest.mark.usefixtures("indexed")
def test_failed_documents_are_listed_and_retried(change: Run, shelf: Shelf) -> None:
    ran = change("documents", "list", "--status", "failed")
    assert ran.code == 0
    assert re.search(
        r"^broken\.pdf +handbook +0 +collection +\S+ +failed *\n\nbroken\.pdf: The PDF is damaged\.",
        ran.out,
        re.MULTILINE,
    )
    (failed,) = json.loads(change("documents", "--status", "failed", "--json").out)
    assert (failed["searchable"], failed["bytes"]) == (False, len(b"%PDF-1.4 and no more"))
    assert "broken.pdf" not in change("documents").out
    again = change("documents", "retry", "--failed")
    assert (again.code, again.err) == (1, "")
    assert re.search(r"^✗ failed    broken\.pdf\n  The PDF is damaged\. .*\n1 failed$", again.out, re.MULTILINE)
    one = json.loads(change("documents", "retry", "broken.pdf", "--json").out)
    assert (one["counts"]["failed"], one["documents"][0]["name"]) == (1, "broken.pdf")
    shown = change("documents", "show", "broken.pdf").out
    assert re.search(r"^status +failed *$", shown, re.MULTILINE)
    assert change("documents", "delete", "broken.pdf").out.startswith("Deleted broken.pdf (")
    assert change("documents", "retry", "--failed").out == "No document has failed.\n"


@pytest.mark.usefixtures("indexed")
def test_retry_continues_after_a_document_that_cannot_be_retried(change: Run, shelf: Shelf) -> None:
    (shelf.books / "empty.md").touch()
    assert change("ingest", str(shelf.books / "empty.md"), "-c", "handbook").code == 1
    with closing(sqlite3.connect(shelf.data / "records.sqlite")) as db, db:
        db.execute("UPDATE uploads SET data = x'' WHERE length(data) > 0")  # as beyond the limit of kept bytes
    ran = change("documents", "retry", "--failed")
    assert (ran.code, ran.err) == (1, "")
    broken, reason, empty, why, count = ran.out.splitlines()
    assert (broken, empty, count) == ("✗ failed    broken.pdf", "✗ failed    empty.md", "2 failed")
    assert "is no longer kept" in reason
    assert why == "  The file is empty."
    named = json.loads(change("documents", "retry", "nosuch.md", "empty.md", "--json").out)["documents"]
    assert [(one["name"], one["error"]) for one in named] == [
        ("nosuch.md", "There is no document 'nosuch.md'."),
        ("empty.md", "The file is empty."),
    ]


def test_a_collection_is_deleted_only_after_a_confirmation(change: Run, shelf: Shelf) -> None:
    refused = change("collections", "delete", "handbook")
    assert (refused.code, refused.out) == (2, "")
    assert "'handbook' with 2 documents" in refused.err
    assert "is not a terminal: add --yes" in refused.err
    declined = on_terminal(shelf.data, "collections", "delete", "handbook", typed="n\n")
    assert (declined.code, declined.out) == (1, "")
    assert declined.err.endswith("Nothing was deleted.\n")
    agreed = on_terminal(shelf.data, "collections", "delete", "handbook", typed="y\n")
    assert (agreed.code, agreed.out) == (0, "Deleted handbook and 2 documents.\n")


def test_a_document_is_deleted_after_a_confirmation_on_a_terminal(change: Run, shelf: Shelf) -> None:
    declined = on_terminal(shelf.data, "documents", "delete", "rivers.txt", typed="n\n")
    assert (declined.code, declined.out) == (1, "")
    assert re.search(r"^Delete 'rivers.txt' \(\S+\)\?.*Nothing was deleted\.$", declined.err, re.MULTILINE)
    assert change("documents", "delete", "rivers.txt").code == 0
    assert on_terminal(shelf.data, "documents", "delete", "Handbook", "--yes", typed="").code == 0


def test_the_list_of_documents_shows_file_and_collection(change: Run, shelf: Shelf) -> None:
    header, *rows = change("documents").out.splitlines()
    assert header.split() == ["document", "file", "collection", "chunks", "visibility", "id"]
    assert ["Handbook", "hr/refunds.md", "handbook", "2"] in [row.split()[:4] for row in rows]
    assert {one["collection"] for one in json.loads(change("documents", "--json").out)} == {"handbook"}
    narrow = process(shelf.data, "documents", FORCE_COLOR="1", COLUMNS="80").out
    plain = re.sub(r"\x1b\[[\d;]*m", "", narrow).splitlines()
    assert max(map(len, plain)) <= 80
    assert plain[0].split() == ["document", "file", "collection", "id"]


@pytest.mark.usefixtures("indexed")
def test_documents_with_the_same_name_are_listed_with_file_and_collection(change: Run, shelf: Shelf) -> None:
    assert change("ingest", str(shelf.books / "hr" / "refunds.md"), "-c", "second").code == 0
    ran = change("documents", "show", "Handbook")
    assert ran.code == 1
    assert re.search(r"[0-9a-f-]{36} \('hr/refunds.md', 'Handbook' in 'handbook'\)", ran.err)
    assert re.search(r"[0-9a-f-]{36} \('refunds.md', 'Handbook' in 'second'\)", ran.err)


def test_the_list_of_failed_documents_says_that_none_has_failed(change: Run) -> None:
    assert change("documents", "delete", "broken.pdf").code == 0
    assert change("documents", "--status", "failed").err == "No document has failed.\n"


def test_ask_quotes_what_the_evidence_model_chooses(run: Run) -> None:
    ran = run("ask", "How many days of holidays does everyone have?", "--json", AGGREGATOR_EVIDENCE="auto")
    answer = json.loads(ran.out)
    assert (ran.code, answer["text"]) == (0, "Everyone has 28 days of holidays a year. [1]")
    assert 0.5 <= answer["support"] <= 1
    assert answer["passages"][0]["evidence"] >= 0.5


def test_ask_exits_2_if_the_embedding_model_is_not_installed(run: Run, tmp_path: Path) -> None:
    ran = run("ask", "Who pays for the return label?", AGGREGATOR_MODELS_DIR=str(tmp_path))
    assert ran.code == 2
    assert "anabranch models install" in " ".join(ran.out.split())


@pytest.mark.usefixtures("indexed")
def test_a_mended_document_is_stored_by_a_retry(change: Run, shelf: Shelf) -> None:
    """The page is not to be had at first."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(shelf.books))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        page = f"http://127.0.0.1:{server.server_address[1]}/later.txt"
        first = change("ingest", page, "-c", "web", "--connector", "crawler")
        (shelf.books / "later.txt").write_text("The page is here now.\n")
        retried = change("documents", "retry", "--failed", "--collection", "web")
        server.shutdown()
        thread.join()
    assert (first.code, retried.code) == (1, 0)
    assert f"✓ added     {page}  1 chunk\n1 added\n" in retried.out
    (stored,) = json.loads(change("documents", "--connector", "crawler", "--json").out)
    assert (stored["url"], stored["status"], stored["connector_id"]) == (page, "completed", "crawler")


def test_documents_are_named_by_file_name_or_title(run: Run) -> None:
    for name in ("hr/refunds.md", "Handbook", "handbook"):
        assert json.loads(run("documents", "show", name, "--json").out)["filename"] == "hr/refunds.md"
    ran = run("documents", "show", "hr/refund.md")
    assert (ran.code, ran.err) == (
        1,
        "anabranch: There is no document 'hr/refund.md'. Did you mean 'hr/refunds.md'?\n",
    )


@pytest.mark.parametrize("arguments", [(), ("broken.pdf", "--failed"), ("broken.pdf", "--collection", "handbook")])
def test_retry_takes_documents_or_failed(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run("documents", "retry", *arguments)
    assert ran.code == 2
    assert "--failed" in ran.err


def test_search_prints_excerpt_and_position(run: Run) -> None:
    ran = run("search", "refund label", "-k", "1")
    assert ran.code == 0
    title, words = ran.out.splitlines()
    assert title.startswith(" 1 Handbook · handbook · Handbook > Refunds")
    assert "The shop pays for the return label" in words


def test_search_explain_prints_all_scores(run: Run) -> None:
    ran = run("search", "refunds", "--explain")
    scores = r"^   rank 1 · dense 0\.\d{3} · sparse \d+\.\d\d · fused 0\.\d{5} · rerank -?\d+\.\d{3}$"
    assert re.search(scores, ran.out, re.MULTILINE)
    assert re.search(r"ms opening · \d+ ms loading and searching · \d+\.\d ms searching again$", ran.out, re.MULTILINE)
    plain = json.loads(run("search", "refunds", "--no-rerank", "--json").out)
    assert plain["passages"][0]["place"]["scores"]["rerank"] is None
    assert plain["timings_ms"]["first_search"] > 0


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--tag", "staff"], True),
        (["--tag", "other"], False),
        (["--meta", "year=2024"], True),
        (["--meta", "year=2023"], False),
        (["--since", "2020-01-01"], True),
        (["--until", "2020-01-01"], False),
        (["--type", "paragraph"], True),
        (["--type", "table", "--type", "code"], False),
    ],
)
def test_search_filters(run: Run, filters: list[str], found: bool) -> None:
    ran = run("search", "refunds", "-c", "handbook", *filters)
    assert ran.code == (0 if found else 3)
    assert ("Nothing was found." in ran.err) is not found


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["refunds", "-c", "nothing"], 1, "There is no collection 'nothing'."),
        (["refunds", "--since", "yesterday"], 2, "is not a date such as"),
        ([" "], 2, "The query is empty"),
        (["refunds", "-k", "0"], 2, "-k"),
    ],
)
def test_search_usage_errors(run: Run, arguments: list[str], code: int, words: str) -> None:
    ran = run("search", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err


@pytest.mark.usefixtures("indexed")
def test_search_shows_a_near_duplicate_once_and_names_the_other(change: Run, shelf: Shelf) -> None:
    text = "The shop in the harbour sells ropes, lamps, nets and boots, and it repairs sails on {} mornings in winter."
    for name, mornings in (("north", "cold"), ("south", "dark")):
        (shelf.books / f"{name}.txt").write_text(text.format(mornings))
    change("ingest", str(shelf.books), "-c", "handbook")
    shown = change("search", "Which shop repairs sails?", "-k", "2").out
    assert re.search(r"also in (north|south)\.txt$", shown, re.MULTILINE)
    first, second = json.loads(change("search", "Which shop repairs sails?", "-k", "2", "--json").out)["passages"]
    assert {first["title"], *(one["title"] for one in first["also_in"])} == {"north.txt", "south.txt"}
    assert (first["place"]["chunk_type"], second["also_in"]) == ("paragraph", [])
    assert (first["also_in_count"], second["also_in_count"]) == (1, 0)


def test_ask_answers_from_a_collection_with_citations(kept: Shelf) -> None:
    ran = process(kept.data, "ask", "Who pays for the return label?")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("The shop pays for the return label, and says so in the mail. [1]")
    assert re.search(r"^✓  collections +\d+ +\d+  success *$", ran.out, re.MULTILINE)
    assert re.search(r"^\[1\] Handbook · handbook · Handbook > Refunds", ran.out, re.MULTILINE)


def test_ask_explains_each_passages_way_within_80_columns(change: Run, shelf: Shelf) -> None:
    for name in ("north", "south"):
        (shelf.books / f"{name}.txt").write_text(
            f"The shop in the {name}ern harbour repairs sails. " + "It sews. " * 40
        )
    assert change("ingest", str(shelf.books), "-c", "handbook").code == 1  # one document is broken
    ran = change("ask", "Which shop repairs sails?", "-k", "1", "--explain", COLUMNS="80")
    assert ran.code == 0
    _, _, explanation = ran.out.partition("Passages: ")
    assert max(map(len, explanation.splitlines())) <= 80
    assert re.search(r"^\[1\] (north|south)\.txt · handbook$", explanation, re.MULTILINE)
    assert re.search(r"→ merge 1\s+→ evidence \(not read: the evidence model is off", explanation)
    assert "→ prompt 1" in explanation
    assert re.search(r"^Left out: the source returns only its best passages\n✗ \w+\.txt", explanation, re.MULTILINE)
    answer = json.loads(change("ask", "Which shop repairs sails?", "-k", "1", "--explain", "--json").out)
    assert answer["explanation"]["passages"][0]["citation_index"] == 1
    assert "explain" not in change("ask", "Which shop repairs sails?").out


def test_ask_takes_a_collection_as_source(run: Run) -> None:
    ran = run("ask", "What is an anabranch?", "-s", "handbook")
    assert ran.code == 0
    assert re.search(r"^✓  handbook ", ran.out, re.MULTILINE)
    assert "[1] rivers.txt · handbook" in ran.out
    assert "'nobody'" in run("ask", "What?", "-s", "nobody").err


@pytest.mark.usefixtures("indexed")
def test_control_characters_in_documents_are_not_printed(change: Run, shelf: Shelf) -> None:
    trick = "\x1b[2J\x1b]0;pwned\x07\x9b31m"
    (shelf.books / "evil.txt").write_text(f"A zebra {trick} is striped.")
    taken = change("ingest", str(shelf.books / "evil.txt"), "-c", f"c{'d'}", "--title", f"T{trick}itle")
    assert taken.code == 0
    shown = [
        change("search", "zebra", "-k", "1"),
        change("search", "zebra", "--json"),
        change("documents", "-c", "cd"),
        change("ask", "What is striped?", "-s", "cd"),
        change("collections", "show", f"x{trick}"),
    ]
    for ran in shown:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", ran.out + ran.err)
