"""The query log: one record per question, from every surface, with its settings and its outcome."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from anabranch import Anabranch, Settings
from anabranch.domain.model import Question, Until
from anabranch.domain.signals import QuestionNotRecorded
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.queries import QueryRecord
from anabranch.knowledge.records.schema import MIGRATIONS
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase, connect, migrate
from anabranch.testing import Document, Space
from anabranch.testing.fakes import Recorder
from conftest import LOCAL, ref, running
from support.cli_runner import process
from support.collection_server import library, text
from support.mcp_tool_client import client, equipped, stub
from support.scripted_source import until


def recorded(folder: Path, **wanted: str) -> list[dict[str, Any]]:
    """The rows of the query log, each with its answer if it has one."""
    rows = "SELECT * FROM queries LEFT JOIN responses ON responses.query = queries.id ORDER BY queries.created_at"
    with closing(sqlite3.connect(folder / NAME)) as db:
        db.row_factory = sqlite3.Row
        found = [dict(row) for row in db.execute(rows)]
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


async def record_of(folder: Path, **wanted: str) -> dict[str, Any]:
    """The one record, which is written behind the answer."""
    await until(lambda: recorded(folder, **wanted))
    (found,) = recorded(folder, **wanted)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder in which there is nothing yet."""
    SqliteDatabase.open(tmp_path / "data").close()
    return tmp_path / "data"


def chat(space: Space, **more: Any) -> dict[str, Any]:
    return {"prompt": "Why?", "model": ref(space, "scribe"), "data_sources": [ref(space, "docs")], **more}


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(data_dir=str(folder), endpoint_allowlist=LOCAL, log_level="ERROR", **more)


async def test_records_that_cannot_be_written_are_a_warning_and_no_bug(folder: Path) -> None:
    """The answer has gone out by then."""
    recorder = Recorder()
    async with Anabranch.open(settings=settings(folder), telemetry=recorder) as ab:
        assert await ab.query_log.rate(Caller(), "none", "thumbs_up", None) is False  # so that the records are open
        with closing(sqlite3.connect(folder / NAME)) as db:
            db.execute("DROP TABLE queries")
        query = QueryRecord(id="q", user="alice", original="Why?", top_k=5, collections=())
        ab.query_log.write(query, Question(text="Why?"), ab.context())
        await ab.query_log.settled()
    assert [signal.reason for signal in recorder.signals if isinstance(signal, QuestionNotRecorded)] == [
        "The records cannot be written (no such table: queries)."
    ]
    assert recorder.crashes == []


async def test_chat_without_a_data_folder_creates_none(space: Space, tmp_path: Path) -> None:
    async with running(settings(tmp_path / "none")) as server:
        await server.chat(**chat(space))
    assert not (tmp_path / "none").exists()


async def test_chat_of_a_guest_is_recorded_without_its_text(space: Space, folder: Path) -> None:
    async with running(settings(folder)) as server:
        await server.chat(**chat(space, top_k=3))
    (row,) = recorded(folder)
    assert (row["surface"], row["outcome"], row["user"], row["top_k"]) == ("chat", "answered", "(guest)", 3)
    assert (row["original"], row["answer"]) == ("", "")
    used = json.loads(row["settings"])
    assert (used["profile"], used["sources"], used["model"]) == ("chat", ["docs"], "scribe")
    assert space.url not in row["settings"]


async def test_chat_of_a_key_holder_is_recorded_with_its_text(space: Space, tmp_path: Path, models_dir: Path) -> None:
    async with library(tmp_path, models_dir, auth="api_key") as there:
        await there.good("POST", "/api/v1/chat", chat(space), who="alice")
        row = await record_of(tmp_path, surface="chat")
    assert (row["user"], row["original"]) == ("alice", "Why?")
    assert row["answer"]


async def test_a_failed_question_is_recorded_with_its_error(space: Space, folder: Path) -> None:
    async with running(settings(folder, model_retries=0)) as server:
        assert (await server.post("/api/v1/chat", chat(space, model=ref(space, "html"))))[0] >= 500
    (row,) = recorded(folder)
    assert (row["outcome"], row["answer"]) == ("generation_failed", None)


async def test_with_zero_days_nothing_is_recorded(space: Space, folder: Path) -> None:
    async with running(settings(folder, query_log_days=0)) as server:
        await server.chat(**chat(space))
    assert recorded(folder) == []


async def test_the_library_records_only_if_it_is_asked_to(space: Space, folder: Path) -> None:
    for asked, rows in ((False, 0), (True, 1)):
        async with Anabranch.open(settings=settings(folder), log_queries=asked) as anabranch:
            await anabranch.ask("Why?", sources=[f"{space.url}/docs"], until=Until.MERGE)
        assert len(recorded(folder, surface="library")) == rows


async def test_the_command_line_is_recorded(space: Space, folder: Path) -> None:
    sources = ("--source", f"{space.url}/docs", "--model", f"{space.url}/scribe")
    ran = await asyncio.to_thread(process, folder, "ask", "Why?", *sources, AGGREGATOR_ENDPOINT_ALLOWLIST=LOCAL[0])
    assert ran.code == 0, ran
    (row,) = recorded(folder)
    assert (row["surface"], row["outcome"], row["original"], row["user"]) == ("cli", "answered", "Why?", "")


async def test_a_verified_answer_is_recorded_with_its_faithfulness_and_verdicts(space: Space, folder: Path) -> None:
    space.source("policies", documents=[Document(title="Refunds", content="Refunds take 30 days.")])
    space.model("writer", reply="Refunds take 30 days [1]. Penguins swim very well [1].")
    asked: dict[str, Any] = {"sources": [f"{space.url}/policies"], "model": f"{space.url}/writer"}
    async with Anabranch.open(settings=settings(folder), log_queries=True) as anabranch:
        await anabranch.ask("Checked?", **asked)
        await anabranch.ask("Not checked?", verify=False, **asked)
    (checked,), (unchecked,) = recorded(folder, original="Checked?"), recorded(folder, original="Not checked?")
    assert checked["faithfulness"] == 0.5
    assert json.loads(checked["verdicts"]) == {"supported": 1, "unsupported": 1}
    assert (unchecked["faithfulness"], unchecked["verdicts"]) == (None, None)


async def test_leaving_a_stream_is_recorded_as_cancelled(space: Space, folder: Path) -> None:
    async with (
        Anabranch.open(settings=settings(folder), log_queries=True) as anabranch,
        anabranch.stream("Why?", sources=[f"{space.url}/docs"], model=f"{space.url}/hang") as events,
    ):
        await anext(events)
    (row,) = recorded(folder)
    assert (row["outcome"], row["original"]) == ("cancelled", "Why?")


async def test_a_log_that_cannot_be_written_costs_no_answer(space: Space, folder: Path) -> None:
    async with Anabranch.open(settings=settings(folder), log_queries=True) as anabranch:
        (await anabranch.knowledge())._database.writing(lambda db: db.execute("DROP TABLE responses"))
        answer = await anabranch.ask("Why?", sources=[f"{space.url}/docs"], model=f"{space.url}/scribe")
    assert answer.text


async def test_rag_query_and_mcp_tools_are_recorded(tmp_path: Path, models_dir: Path) -> None:
    async with equipped(tmp_path, models_dir, stub("rivers")) as there:
        await there.ask("What is query?")
        await there.good("POST", "/rag/stream", {"query": "What is rag?"})
        async with client(there, "auto") as tools:
            await tools.call_tool("search", {"query": "What is search?"})
            await tools.call_tool("ask", {"question": "What is ask?"})
            await tools.call_tool("aggregate", {"query_text": "What is aggregate?"})
        surfaces = {
            name: (await record_of(tmp_path, original=f"What is {name}?"))["surface"]
            for name in ("query", "rag", "search", "ask", "aggregate")
        }
    assert surfaces == {"query": "query", "rag": "rag_stream", "search": "mcp", "ask": "mcp", "aggregate": "mcp"}


async def test_the_collections_of_a_question_are_counted(tmp_path: Path, models_dir: Path) -> None:
    async with library(tmp_path, models_dir) as there:
        shelf = await there.collection("shelf")
        await there.collection("other")
        await there.ingest(shelf, text("Refunds take five days."))
        await there.ask("How long do refunds take?")
        await there.ask("How long do refunds take?", collections=["shelf"])
        await until(lambda: len(recorded(tmp_path)) == 2)
        stats = [await there.good("GET", f"/v1/collections/{name}/stats") for name in ("shelf", "other")]
    assert [one["query_count_30d"] for one in stats] == [2, 1]


async def test_a_data_folder_of_the_first_release_is_read_and_logged_into(space: Space, tmp_path: Path) -> None:
    connection = connect(tmp_path / NAME)
    for statement in MIGRATIONS[0].split(";\n\n"):
        connection.executescript(statement + ";")
    old = ("old", "", None, "Before?", None, "[]", "null", 5, None, None, 1, 2, time.time())
    connection.execute(f"INSERT INTO queries VALUES ({', '.join('?' * 13)})", old)
    connection.execute("PRAGMA user_version = 1")
    migrate(connection)
    connection.close()
    async with running(settings(tmp_path)) as server:
        await server.chat(**chat(space))
    assert [(row["original"], row["surface"]) for row in recorded(tmp_path)] == [("Before?", None), ("", "chat")]


async def test_the_query_log_keeps_the_beginning_of_long_questions_and_answers(space: Space, folder: Path) -> None:
    space.model("verbose", reply="Because. " * 20_000)
    async with Anabranch.open(settings=settings(folder), log_queries=True) as anabranch:
        await anabranch.ask("Why? " * 40_000, sources=[f"{space.url}/docs"], model=f"{space.url}/verbose", verify=False)
    (row,) = recorded(folder)
    assert row["original"].endswith("Why?  … [the query log keeps 100,000 of 200,000 characters]")
    assert row["answer"].startswith("Because. Because. ")
    assert row["answer"].endswith(" … [the query log keeps 100,000 of 180,000 characters]")
    assert len(row["original"]) + len(row["answer"]) < 2 * 100_100


async def test_questions_that_do_not_fit_into_the_queue_of_the_query_log_are_not_recorded(folder: Path) -> None:
    """Each caller has a part of it; answers never wait for it."""
    recorder = Recorder()
    async with Anabranch.open(settings=settings(folder), telemetry=recorder) as ab:
        for number in range(60):
            query = QueryRecord(id=f"a{number}", user="alice", original="x" * 100_000, top_k=5, collections=())
            ab.query_log.write(query, Question(text="Why?"), ab.context())
        query = QueryRecord(id="b", user="bob", original="Why?", top_k=5, collections=())
        ab.query_log.write(query, Question(text="Why?"), ab.context())
        await ab.query_log.settled()
        query = QueryRecord(id="later", user="alice", original="Why?", top_k=5, collections=())
        ab.query_log.write(query, Question(text="Why?"), ab.context())
    assert [row["id"] for row in recorded(folder)] == [*(f"a{number}" for number in range(39)), "b", "later"]
    reasons = [signal.reason for signal in recorder.signals if isinstance(signal, QuestionNotRecorded)]
    assert reasons == ["Too much of the query log waits to be written"] * 21
