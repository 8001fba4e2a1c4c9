"""Erasing a document or a user: afterwards nothing of it is in any file or key."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from anabranch.app.redis_erasure import KEYS
from anabranch.knowledge.records import backup
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.erasures import TABLES
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase, connect
from support.cli_runner import environment
from support.collection_server import Library, library, text
from support.data_bytes import files_with, keys_with, values
from support.knowledge_fixtures import records_in
from support.paused_model import PausedModel
from support.planner_fixtures import Desk
from support.postgres_server import shared_postgres
from support.valkey_server import Valkey, running_valkey

pytestmark = pytest.mark.xdist_group("erasure")

MARKER = "Quillonbrax"
SECRET = f"The {MARKER} ferry to Texel leaves every thirty minutes from quay nine."
OTHER = "The bridge to Marken is closed on Sundays."
ASKED = f"When does the {MARKER} ferry to Texel leave?"
PATIENCE_S = 30.0
RESUMABLE = {"Accept": "text/event-stream", "Prefer": "resumable"}
MCP = {"Accept": "application/json, text/event-stream"}


@asynccontextmanager
async def opened(home: Path, models_dir: Path, **given: Any) -> AsyncIterator[Library]:
    async with library(home / "data", models_dir, rate_limit=0, **given) as there:
        yield there


async def filled(there: Library) -> str:
    """A document with the marker, another one, a failed upload; the id of the first."""
    await there.collection("ferries", who="alice")
    (found,) = await there.ingest(
        "ferries", text(SECRET, title=f"{MARKER} timetable", metadata={"tags": [f"{MARKER}-tag"]}), who="alice"
    )
    await there.ingest("ferries", text(OTHER, title="Bridges"), who="alice")
    return str(found["id"])


async def asked_everywhere(there: Library) -> list[str]:
    """The question on every surface; the ids of the resumable answers."""
    first = await there.ask(ASKED, who="alice", conversation_id="talk")
    assert MARKER in first["answer"]
    await there.ask(ASKED, who="alice", conversation_id="talk", filters={"tags": [f"{MARKER}-tag"]})
    # A later turn finds nothing, but may repeat what was found before.
    await there.ask(f"And what of {MARKER}?", who="alice", conversation_id="talk", filters={"tags": ["none"]})
    feedback = {"query_id": first["query_id"], "rating": "thumbs_up", "comment": f"{MARKER} is right"}
    await there.good("POST", "/v1/feedback", feedback, who="alice")
    streams = []
    for path, body in (
        ("/v1/query", {"query": ASKED}),
        ("/rag/stream", {"query": ASKED, "threshold": 0}),
        ("/v1/responses", {"model": "all", "input": ASKED, "stream": True}),
        ("/v1/chat/completions", {"model": "all", "messages": [{"role": "user", "content": ASKED}], "stream": True}),
    ):
        reply = await there.call("POST", path, body, who="bob", headers=RESUMABLE)
        assert reply.status == 200, reply
        assert MARKER in reply.body
        streams += [reply.headers["Stream-ID"]] if "Stream-ID" in reply.headers else []
    ask = {"name": "ask", "arguments": {"question": ASKED}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ask}
    assert MARKER in str((await there.call("POST", "/mcp", call, who="bob", headers=MCP)).body)
    await there.good("GET", "/v1/queries", who="alice")  # all are recorded now
    return streams


async def erased(there: Library, url: str | None = None, **what: str) -> Any:
    """Erase, run the second pass as soon as the first is over, and wait for its end."""
    reply = await there.call("POST", "/v1/erasures", what, who="root")
    assert reply.status == 202, reply
    path = f"/v1/erasures/{reply.body['id']}"
    await _until(there, path, "settling")
    await asyncio.to_thread(settle, there.folder, url)
    return await _until(there, path, "complete")


async def _until(there: Library, path: str, state: str) -> Any:
    until = time.monotonic() + PATIENCE_S
    while (found := await there.good("GET", path, who="root"))["state"] != state:
        assert time.monotonic() < until, found
        await asyncio.sleep(0.02)
    return found


def settle(folder: Path, url: str | None = None) -> None:
    """As if the time had come for the last pass."""
    now = time.time()
    with closing(records_in(folder) if url is None else PostgresDatabase.open(url)) as database:
        settled = "UPDATE erasures SET settled_at = ?, next_at = ? WHERE next_at IS NOT NULL"
        database.writing(lambda db: db.execute(settled, (now, now)))


def tables_with(marker: str, url: str) -> list[str]:
    """The tables of PostgreSQL with a row that has the marker, as a text or as bytes."""

    def read(db: Session) -> list[str]:
        names = [row[0] for row in db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
        forms = (f"%{marker}%", f"%{marker.encode().hex()}%")
        named = "SELECT 1 FROM {0} WHERE CAST({0} AS text) LIKE ? OR CAST({0} AS text) LIKE ? LIMIT 1"
        return [name for name in names if db.execute(named.format(name), forms).fetchone()]

    with closing(PostgresDatabase.open(url)) as database:
        return database.reading(read)


def removed(erasure: Any) -> dict[str, int]:
    return {one["store"]: one["removed"] for one in erasure["erased"]}


@pytest.fixture
def valkey(tmp_path: Path) -> Any:
    (tmp_path / "valkey").mkdir()
    with running_valkey(tmp_path / "valkey") as server:
        yield server


async def test_an_erased_document_is_in_no_table_and_no_file_of_a_node(tmp_path: Path, models_dir: Path) -> None:
    url = shared_postgres().create_database()
    async with opened(tmp_path, models_dir, database_url=url) as there:
        document = await filled(there)
        await asked_everywhere(there)
        assert {"contents", "chunks", "responses", "citations", "audit_names"} <= set(tables_with(MARKER, url))
        erasure = await erased(there, url, document=document)
        counts = removed(erasure)
        assert all(counts[store] > 0 for store in ("documents", "ingest jobs", "query log"))
    assert tables_with(MARKER, url) == []
    assert files_with(MARKER, tmp_path / "data") == []


async def test_an_erased_document_is_in_no_file_and_no_key(tmp_path: Path, models_dir: Path, valkey: Valkey) -> None:
    data = tmp_path / "data"
    copy = data / f"{NAME}.before-restore-20260101-000000"
    async with opened(tmp_path, models_dir, redis_url=valkey.url, redis_timeout=5.0) as there:
        document = await filled(there)
        streams = await asked_everywhere(there)
        with closing(connect(data / NAME)) as db, closing(sqlite3.connect(copy)) as earlier:
            db.backup(earlier)
        before = await keys_with(MARKER, valkey.url)
        assert {f"{NAME}-wal", copy.name} <= set(files_with(MARKER, data))
        assert {key.split(":")[0] for key in before} >= {"rag", "anabranch"}
        assert streams
        # Every key says whether it can hold what is erased.
        assert [key for key in await values(valkey.url) if not any(fnmatchcase(key, one) for one in KEYS)] == []

        erasure = await erased(there, document=document)
        assert await keys_with(MARKER, valkey.url) == []
        counts = removed(erasure)
        assert all(counts[store] > 0 for store in ("documents", "ingest jobs", "query log", "Redis"))
        assert counts["copies of earlier records"] == 2  # one copy, in two passes
        assert erasure["documents"] == 1
        assert (await there.call("GET", f"/v1/documents/{document}", who="alice")).status == 404
        assert (await there.ask("When is the bridge to Marken closed?", who="alice"))["answer"] != ""
        entries = (await there.good("GET", "/v1/queries", who="alice"))["queries"]
        assert {one["query"] for one in entries} == {None, "When is the bridge to Marken closed?"}
    assert files_with(MARKER, data) == []
    with closing(sqlite3.connect(copy)) as earlier:
        assert earlier.execute("SELECT title FROM documents").fetchall() == [("Bridges",)]


async def test_an_erased_document_is_in_no_recording_and_no_memory(tmp_path: Path, models_dir: Path) -> None:
    data, recordings = tmp_path / "data", tmp_path / "recordings"
    async with opened(tmp_path, models_dir) as there:
        document = await filled(there)
        await asked_everywhere(there)
    async with opened(tmp_path, models_dir, recordings_dir=str(recordings)) as there:
        await there.ask(ASKED, who="alice")
        await there.ask("When is the bridge closed?", who="alice", limit=1, filters={"tags": ["none"]})
        (stream, *_) = await asked_everywhere(there)
        assert len(files_with(MARKER, recordings)) > 1
        erasure = await erased(there, document=document)
        assert removed(erasure)["recordings"] > 1
        until = time.monotonic() + PATIENCE_S
        while "streams in memory" not in removed(erasure):  # every process looks at its own memory by itself
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
            erasure = await there.good("GET", f"/v1/erasures/{erasure['id']}", who="root")
        assert removed(erasure)["streams in memory"] >= 1
        assert (await there.call("GET", f"/v1/streams/{stream}", who="bob")).status == 404
    assert files_with(MARKER, data) == []
    assert files_with(ASKED, recordings) == []


async def test_what_a_question_writes_after_the_erasure_of_its_document_has_no_text(
    tmp_path: Path, models_dir: Path
) -> None:
    data, recordings = tmp_path / "data", tmp_path / "recordings"
    async with (
        PausedModel() as model,
        opened(tmp_path, models_dir, model_url=model.url, recordings_dir=str(recordings)) as there,
    ):
        model.says(f"The {MARKER} ferry", f" leaves every thirty minutes, says {MARKER} [1].", paused=True)
        document = await filled(there)
        asking = asyncio.create_task(there.ask(ASKED, who="alice"))
        until = time.monotonic() + PATIENCE_S
        while not model.asked:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        await erased(there, document=document)
        model.go.set()
        assert MARKER in (await asking)["answer"]  # its asker gets it
        (entry,) = (await there.good("GET", "/v1/queries", who="alice"))["queries"]
        assert (entry["query"], entry["outcome"]) == (None, "answered")
    assert files_with(MARKER, data) == files_with(MARKER, recordings) == []


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_a_planner_step_in_progress_ends_when_a_document_that_was_found_for_it_is_erased(
    tmp_path: Path, models_dir: Path, valkey: Valkey, shared: bool
) -> None:
    redis = {"redis_url": valkey.url, "redis_timeout": 5.0} if shared else {}
    async with opened(tmp_path, models_dir, **redis) as there:
        document = await filled(there)
        desk = Desk(there.server, there.secrets)
        human = {"key": "row_selection", "deadline_ms": 3_600_000}
        await desk.begin("s", "p", {"key": "documentation", "input": {"question": ASKED}}, human, who="alice")
        await desk.begin("s", "other", human, who="alice")
        path = "/planner/sessions/s/steps/p/events"
        until = time.monotonic() + PATIENCE_S
        while MARKER not in str(await desk.events("s", "p", who="alice")):
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        async with desk.stream("s", "p", who="alice") as stream:
            await erased(there, document=document)
            ended = [event async for event in stream][-1]
        assert "erased" in str(ended)
        while (await desk.ask("GET", path, who="alice"))[0] != 404:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        if shared:
            assert await keys_with(MARKER, valkey.url) == []
        assert "plan_step_completed" not in str(await desk.events("s", "other", who="alice"))


async def test_recordings_of_later_turns_are_erased(tmp_path: Path, models_dir: Path) -> None:
    recordings = tmp_path / "recordings"
    async with (
        PausedModel() as model,
        opened(tmp_path, models_dir, model_url=model.url, recordings_dir=str(recordings)) as there,
    ):
        model.says(f"The {MARKER} ferry leaves every thirty minutes [1].")
        document = await filled(there)
        await there.collection("bridges", who="alice")
        await there.ingest("bridges", text(OTHER, title="Bridges"), who="alice")
        await there.ask(ASKED, who="alice", conversation_id="talk")
        model.says("It is closed on Sundays [1].")
        later = "When is the bridge to Marken closed?"
        await there.ask(later, who="alice", conversation_id="talk", collections=["bridges"])
        await there.ask("Who keeps the bridge?", who="alice", filters={"tags": ["none"]})
        until = time.monotonic() + PATIENCE_S
        while not set(files_with("Who keeps", recordings)) or len(files_with(MARKER, recordings)) < 2:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        await there.ask("Who keeps the bridge?", who="alice", filters={"tags": ["none"]})
        await erased(there, document=document)
        assert files_with(MARKER, recordings) == []
        assert files_with("Who keeps the bridge?", recordings) != []


async def test_a_token_that_is_the_id_of_a_document_keeps_no_recording_from_its_erasure(
    tmp_path: Path, models_dir: Path
) -> None:
    recordings = tmp_path / "recordings"
    async with opened(tmp_path, models_dir, recordings_dir=str(recordings)) as there:
        document = await filled(there)
        for token in (document, document[:8]):
            chat = {"prompt": ASKED, "data_sources": [{"slug": "collection:ferries"}], "endpoint_tokens": {"x": token}}
            await there.good("POST", "/api/v1/chat", chat, who="alice")
        until = time.monotonic() + PATIENCE_S
        while len(files_with(MARKER, recordings)) < 2:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        assert len(files_with("*" * 36, recordings)) == 1, "it was removed as a secret"
        assert removed(await erased(there, document=document))["recordings"] == 2
    assert files_with(MARKER, recordings) == []


async def test_an_erased_user_is_in_no_file_and_no_key(tmp_path: Path, models_dir: Path, valkey: Valkey) -> None:
    data = tmp_path / "data"
    async with opened(tmp_path, models_dir, redis_url=valkey.url, redis_timeout=5.0) as there:
        made = await there.good("POST", "/v1/keys", {"user": MARKER, "note": "for erasing"}, who="root")
        there.secrets[MARKER] = made["key"]
        await there.collection("mine", who=MARKER)
        await there.ingest("mine", text("My secret harbour is Oudeschild.", title="Harbour"), who=MARKER)
        await there.good("PUT", "/v1/collections/mine/endpoint", {"as": f"{MARKER}/mine"}, who=MARKER)
        await there.ask("Which harbour is secret?", who=MARKER, conversation_id="talk")
        chat = {
            "prompt": "Is it open?",
            "data_sources": [{"url": "", "slug": f"collection:{MARKER}/mine"}],
            "model": {"slug": "extractive", "url": ""},
        }
        await there.good("POST", "/api/v1/chat", chat, who="bob")
        await there.good("GET", "/v1/queries", who="bob")
        broken = b64encode(b"%PDF-1.4 broken").decode()
        failed = {"source": {"type": "file", "content": broken, "filename": "x.pdf"}, "title": "A walk to Oudeschild"}
        await there.ingest("mine", failed, who=MARKER)
        await there.collection("plans for Oudeschild", who=MARKER)
        await there.good("DELETE", "/v1/collections/plans%20for%20Oudeschild", who=MARKER)
        await there.collection("theirs", who="alice")
        allowed = {"visibility": "restricted", "allowed_users": [MARKER, "bob"]}
        (shared,) = await there.ingest("theirs", text(OTHER, title="Bridges", permissions=allowed), who="alice")
        assert NAME in " ".join(files_with(MARKER, data))

        erasure = await erased(there, user=MARKER)
        assert removed(erasure)["API keys"] == removed(erasure)["collections"] == 1
        assert (await there.call("GET", "/v1/documents", who=MARKER)).status == 401
        kept = await there.good("GET", f"/v1/documents/{shared['id']}", who="bob")
        assert kept["title"] == "Bridges"
        assert await keys_with(MARKER, valkey.url) == await keys_with("Oudeschild", valkey.url) == []
    assert files_with(MARKER, data) == files_with("Oudeschild", data) == []


async def test_deleting_says_when_the_text_is_erased_and_then_it_is(tmp_path: Path, models_dir: Path) -> None:
    async with opened(tmp_path, models_dir, erase_after=7_200.0) as there:
        document = await filled(there)
        await there.ask(ASKED, who="alice")
        reply = await there.good("DELETE", f"/v1/documents/{document}", who="alice")
        assert reply["deleted"]
        (erasure,) = (await there.good("GET", "/v1/erasures", who="root"))["erasures"]
        assert (erasure["state"], erasure["complete_by"]) == ("due", reply["erased_by"])
        waits = datetime.fromisoformat(erasure["due_at"]) - datetime.fromisoformat(erasure["requested_at"])
        assert timedelta(seconds=5_398) <= waits <= timedelta(seconds=7_202)  # quarters of it are erased together
        assert (await there.call("GET", "/v1/erasures", who="alice")).status == 403
        gone = await there.good("DELETE", "/v1/collections/ferries", who="alice")
        assert gone["erased_by"] >= reply["erased_by"]
        await asyncio.to_thread(settle, there.folder)
        await _until(there, f"/v1/erasures/{erasure['id']}", "complete")
    assert files_with(MARKER, tmp_path / "data") == []


async def test_deleting_a_collection_erases_what_was_never_stored(tmp_path: Path, models_dir: Path) -> None:
    broken = {
        "source": {
            "type": "file",
            "content": b64encode(f"%PDF-1.4 {MARKER}".encode()).decode(),
            "filename": f"{MARKER}.pdf",
        },
        "id": f"{MARKER}-id",
        "title": f"{MARKER} plans",
        "metadata": {"author": MARKER, "tags": [MARKER]},
        "permissions": {"visibility": "restricted", "allowed_users": [MARKER]},
    }
    async with opened(tmp_path, models_dir, erase_after=0.0) as there:
        await there.collection("plans", who="alice")
        (failed,) = await there.ingest("plans", broken, who="alice")
        assert failed["status"] == "failed"
        await there.good("DELETE", "/v1/collections/plans", who="alice")
        (erasure,) = (await there.good("GET", "/v1/erasures", who="root"))["erasures"]
        assert erasure["documents"] == 1
        await asyncio.to_thread(settle, there.folder)
        await _until(there, f"/v1/erasures/{erasure['id']}", "complete")
    assert files_with(MARKER, tmp_path / "data") == []


async def test_an_erasure_that_was_interrupted_goes_on_at_the_next_start(tmp_path: Path, models_dir: Path) -> None:
    async with opened(tmp_path, models_dir, redis_url="redis://127.0.0.1:1") as there:  # nothing answers there
        document = await filled(there)
        await there.ask(ASKED, who="alice")
        reply = await there.call("POST", "/v1/erasures", {"document": document}, who="root")
        path = f"/v1/erasures/{reply.body['id']}"
        until = time.monotonic() + PATIENCE_S
        while (found := await there.good("GET", path, who="root"))["error"] is None:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        assert (found["state"], found["completed_at"]) == ("failed", None)
        assert found["error"].startswith("Redis: ")
    settle(tmp_path / "data")
    async with opened(tmp_path, models_dir) as there:
        assert (await _until(there, path, "complete"))["error"] is None
    assert files_with(MARKER, tmp_path / "data") == []


async def test_a_command_without_the_settings_of_the_server_leaves_the_erasure_to_the_server(
    tmp_path: Path, models_dir: Path, valkey: Valkey
) -> None:
    data, recordings = tmp_path / "data", tmp_path / "recordings"
    given = {"redis_url": valkey.url, "redis_timeout": 5.0, "recordings_dir": str(recordings)}
    async with opened(tmp_path, models_dir, **given) as there:
        document = await filled(there)
        await there.ask(ASKED, who="alice")
    command = [sys.executable, "-m", "anabranch", "erase", "--document", document, "--yes"]
    ran = await asyncio.to_thread(subprocess.run, command, env=environment(data), capture_output=True, check=False)
    assert (ran.returncode, f"Redis and recordings in {recordings} must be erased from" in ran.stderr.decode()) == (
        1,
        True,
    )
    async with opened(tmp_path, models_dir, **given) as there:
        (one,) = (await there.good("GET", "/v1/erasures", who="root"))["erasures"]
        await _until(there, f"/v1/erasures/{one['id']}", "settling")
        await asyncio.to_thread(settle, there.folder)
        await _until(there, f"/v1/erasures/{one['id']}", "complete")
        assert await keys_with(MARKER, valkey.url) == files_with(MARKER, recordings) == []
    async with opened(tmp_path, models_dir) as there:  # it uses them no more
        assert (await erased(there, user="bob"))["error"] is None


async def test_backups_that_may_hold_what_was_erased_are_named(tmp_path: Path, models_dir: Path) -> None:
    async with opened(tmp_path, models_dir) as there:
        document = await filled(there)
        file = tmp_path / "copy.sqlite"
        with closing(SqliteDatabase.open(there.folder)) as database:
            backup.back_up(database, file)
        erasure = await erased(there, document=document)
        assert erasure["backups"] == [str(file)]
        with closing(SqliteDatabase.open(there.folder)) as database:
            backup.back_up(database, file)
        erasure = await there.good("GET", f"/v1/erasures/{erasure['id']}", who="root")
        assert erasure["backups"] == []
    assert files_with(MARKER, tmp_path) == []


async def test_an_erasure_by_the_id_of_a_deleted_document_meets_no_document_that_is_named_like_it(
    tmp_path: Path, models_dir: Path
) -> None:
    async with opened(tmp_path, models_dir) as there:
        document = await filled(there)
        await there.ask(ASKED, who="alice")
        await there.collection("mine", who="bob")
        decoys = [text("A decoy.", title=document), text("Another decoy.", filename=document)]
        made = [(await there.ingest("mine", one, who="bob"))[0] for one in decoys]
        await there.good("DELETE", f"/v1/documents/{document}", who="alice")
        await erased(there, document=document)
        for one in made:
            await there.good("GET", f"/v1/documents/{one['id']}", who="bob")
    assert files_with(MARKER, tmp_path / "data") == []


async def test_an_erasure_by_a_name_that_several_documents_have_is_refused_with_their_ids(
    tmp_path: Path, models_dir: Path
) -> None:
    async with opened(tmp_path, models_dir) as there:
        document = await filled(there)
        await there.collection("mine", who="bob")
        (decoy,) = await there.ingest("mine", text("A decoy.", filename=f"{MARKER} timetable"), who="bob")
        reply = await there.call("POST", "/v1/erasures", {"document": f"{MARKER} timetable"}, who="root")
        assert (reply.status, document in str(reply.body), decoy["id"] in str(reply.body)) == (409, True, True)
        assert (await there.call("POST", "/v1/erasures", {"document": "bridges"}, who="root")).status == 202


async def test_what_is_erased_must_be_said(tmp_path: Path, models_dir: Path) -> None:
    async with opened(tmp_path, models_dir) as there:
        bodies: list[dict[str, str]] = [{}, {"document": "a", "user": "b"}, {"user": " "}, {"user": ""}, {"name": "a"}]
        for body in bodies:
            assert (await there.call("POST", "/v1/erasures", body, who="root")).code == "VALIDATION_ERROR"
        assert (await there.call("POST", "/v1/erasures", {"document": "none"}, who="root")).status == 404
        assert (await there.call("GET", "/v1/erasures/none", who="root")).status == 404


async def test_the_erasure_of_an_unknown_user_says_so(tmp_path: Path, models_dir: Path) -> None:
    async with opened(tmp_path, models_dir) as there:
        reply = await there.call("POST", "/v1/erasures", {"user": "nobody-at-all"}, who="root")
        assert (reply.status, "no user 'nobody-at-all'" in reply.body["warning"]) == (202, True)
        reply = await there.call("POST", "/v1/erasures", {"user": "bob "}, who="root")
        assert (reply.status, reply.body["warning"]) == (202, None)
        assert (await there.call("GET", "/v1/documents", who="bob")).status == 401


def test_every_table_says_whether_it_can_hold_what_is_erased(tmp_path: Path) -> None:
    with closing(SqliteDatabase.open(tmp_path)) as database, closing(connect(database.path)) as db:
        names = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    # PostgreSQL has one more: SQLite keeps the last keys of tables itself.
    assert {*(name for name in names if not name.startswith("sqlite_")), "reserved"} == set(TABLES)
