"""Questions to collections that a model answers, or fails to; and what happens when something is missing."""

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from anabranch.domain.model import Message
from anabranch.entrypoints.cli.resources import alone
from anabranch.testing import Document, Failure, Space
from support.collection_server import Library, library, library_with_indexer, text
from support.metrics_scrape import scrape

pytestmark = pytest.mark.xdist_group("knowledge-api-1")

FACT = "The ferry to Texel leaves from Den Helder every 30 minutes."


def writes(messages: Sequence[Message]) -> str:
    """A model that puts questions in other words, and cites the first passage."""
    system, asked = messages[0].content, messages[-1].content
    if system.startswith("Below is a conversation"):
        return "How often does the ferry to Texel leave?"
    if system.startswith("Write one short paragraph"):
        return "The ferry leaves every hour."
    if system.startswith("Put the question"):
        return "1. When does the ferry go?\n2. Ferry times?"
    assert "[1] Ferries" in asked
    return "It leaves every 30 minutes [1]. Nobody knows why [7]."


def asking(space: Space, slug: str, **more: Any) -> dict[str, Any]:
    return {"model_url": space.url, "model_name": slug, **more}


async def fill(folder: Path, models_dir: Path) -> None:
    async with library(folder, models_dir) as shelf:
        await shelf.collection("travel")
        await shelf.ingest("travel", text(FACT, title="Ferries"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "data"
    asyncio.run(fill(folder, models_dir))
    return folder


@pytest.fixture
def filled(kept: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy for those who only ask. Its lock is taken: no server starts an indexer, which nobody needs."""
    folder = Path(shutil.copytree(kept, tmp_path / "data"))
    with alone(folder):
        yield folder


async def test_a_model_answers_and_a_conversation_goes_on(filled: Path, models_dir: Path, space: Space) -> None:
    space.model("writer", reply=writes)
    async with library(filled, models_dir, **asking(space, "writer", query_rewriting=True)) as shelf:
        first = await shelf.ask("Where does the ferry to Texel leave from?", who="alice")
        assert first["answer"] == "It leaves every 30 minutes [1]. Nobody knows why [7]."
        assert first["usage"]["model"] == "writer"
        assert first["usage"]["input_tokens"] > 0
        (citation,) = first["citations"]
        assert citation["quoted_text"] == FACT
        assert first["rewritten_query"] is None

        conversation = first["conversation_id"]
        events = await shelf.stream("How often is that?", who="alice", conversation_id=conversation)
        assert [event.name for event in events][-2:] == ["sources", "done"]
        assert events[-1].data["rewritten_query"] == "How often does the ferry to Texel leave?"
        asked = [json.loads(request.raw) for request in space.requests]
        last = asked[-1]["messages"]
        assert [message["role"] for message in last] == ["system", "user", "assistant", "user"]
        assert last[1]["content"] == "Where does the ferry to Texel leave from?"
        assert last[2]["content"] == first["answer"]

        other = await shelf.ask("How often is that?", who="bob", conversation_id=conversation)
        assert other["rewritten_query"] is None
        assert not any("Where does" in message["content"] for message in json.loads(space.requests[-1].raw)["messages"])

        spoken = await shelf.ask("And?", who="alice", settings={"response_format": "json"})
        told = spoken["answer_json"]["sentences"][0]
        assert (told["text"], told["citations"]) == ("It leaves every 30 minutes.", [1])


async def test_max_tokens_reaches_the_model_and_is_1024_by_default(
    filled: Path, models_dir: Path, space: Space
) -> None:
    given = asking(space, "scribe", query_rewriting=False)
    async with library(filled, models_dir, **given) as shelf:
        for settings in ({}, {"max_tokens": 77}):
            await shelf.ask("When does the ferry to Texel leave?", settings=settings)
    assert [json.loads(request.raw)["max_tokens"] for request in space.requests] == [1024, 77]


async def test_the_same_question_asks_the_model_once(filled: Path, models_dir: Path, space: Space) -> None:
    question = "When does the ferry to Texel leave?"
    async with library(filled, models_dir, **asking(space, "scribe", query_rewriting=False)) as shelf:
        first, second = [await shelf.ask(question, who="alice") for _ in range(2)]
        assert len(space.requests) == 1
        assert (second["answer"], second["sources"]) == (first["answer"], first["sources"])
        assert second["query_id"] != first["query_id"]
        await shelf.good("POST", "/v1/query", {"query": question}, who="alice", headers={"Cache-Control": "no-cache"})
        assert len(space.requests) == 2
        entries = (await shelf.good("GET", "/v1/queries", who="alice"))["queries"]
    assert sorted(one["input_tokens"] > 0 for one in entries) == [False, True, True], "a cached answer used no tokens"


async def test_a_caller_over_the_limit_gets_429_rate_limited(filled: Path, models_dir: Path) -> None:
    async with library(filled, models_dir, rate_limit=1, rate_limit_surfaces=("query",)) as shelf:
        await shelf.ask("When does the ferry to Texel leave?", who="alice")
        reply = await shelf.call("POST", "/v1/query", {"query": "When does the ferry leave?"}, who="alice")
        assert (reply.status, reply.code, reply.body["error"]) == (429, "RATE_LIMITED", "rate_limited")
        assert int(reply.headers["Retry-After"]) > 0
        await shelf.ask("When does the ferry to Texel leave?", who="bob")


TEXEL = "When does the ferry to Texel leave?"


def failing(space: Space, failure: Failure = Failure.STATUS_500, **more: Any) -> dict[str, Any]:
    return asking(space, failure.value, model_retries=0, **more)


async def test_a_model_that_fails_is_replaced_by_quotes_and_the_answer_says_so(
    filled: Path, models_dir: Path, space: Space
) -> None:
    async with library(filled, models_dir, **failing(space)) as shelf:
        answer = await shelf.ask(TEXEL, who="alice")
        assert (answer["answer"], answer["finish_reason"]) == (f"{FACT} [1]", "stop")
        assert answer["usage"] == {"input_tokens": 0, "output_tokens": 0, "model": "extractive"}
        why = answer["fallback"]
        assert (why["from"], why["reason"]) == ("status-500", "unavailable")
        assert why["message"] == "It answered with an error (500): Internal server error"
        events = await shelf.stream(TEXEL, who="alice")
        assert [event.name for event in events] == ["fallback", "token", "sentence", "sources", "done"]
        assert events[0].data == {**why, "model": "extractive"}
        assert events[-1].data["fallback"] == why
        assert len(space.requests) == 2, "an answer that quotes instead of the model is not cached"
        metrics = await scrape(shelf.server.session, shelf.server.url, headers=shelf.key("root"))
        fallbacks = {"model": "status-500", "reason": "unavailable"}
        assert metrics.value("anabranch_model_fallbacks_total", **fallbacks) == 2
        entries = (await shelf.good("GET", "/v1/queries", who="alice"))["queries"]
        logged = [(one["model"], one["outcome"], one["settings"]["fallback_from"]) for one in entries]
        assert logged == [("extractive", "answered", "status-500")] * 2
        assert {one["settings"]["fallback_reason"] for one in entries} == {"unavailable"}
        detail = await shelf.good("GET", f"/v1/queries/{answer['query_id']}", who="alice")
        assert detail["faithfulness"] == 1.0


async def test_when_the_model_is_back_it_answers_the_question_that_was_quoted(
    filled: Path, models_dir: Path, space: Space
) -> None:
    async with library(filled, models_dir, **failing(space)) as shelf:
        assert (await shelf.ask(TEXEL))["usage"]["model"] == "extractive"
        space.model(Failure.STATUS_500.value, reply="Every 30 minutes [1].")
        back = await shelf.ask(TEXEL)
        assert (back["answer"], "fallback" in back) == ("Every 30 minutes [1].", False)


async def test_who_may_not_know_the_models_address_is_not_told_it(filled: Path, models_dir: Path, space: Space) -> None:
    given = {"model_url": "http://127.0.0.1:9", "model_name": "smol", "model_retries": 0}
    async with library(filled, models_dir, **given) as shelf:
        for who, message in {
            "alice": "No connection could be made.",
            "root": "No connection could be made: 127.0.0.1:9. Check AGGREGATOR_MODEL_URL.",
        }.items():
            assert (await shelf.ask(TEXEL, who=who))["fallback"]["message"] == message
        at_once = await asyncio.gather(*(shelf.ask(TEXEL, who=who) for who in ("root", "alice")))
        assert ["127.0.0.1:9" in one["fallback"]["message"] for one in at_once] == [True, False]


async def test_chat_and_rag_fall_back_only_if_they_are_asked_to(filled: Path, models_dir: Path, space: Space) -> None:
    space.source("ferries", documents=[Document(title="Ferries", content=FACT)])
    source, model = {"url": space.url, "slug": "ferries"}, {"url": space.url, "slug": Failure.STATUS_500.value}
    chat = {"prompt": TEXEL, "data_sources": [source], "model": model, "similarity_threshold": 0}
    async with library(filled, models_dir, **failing(space)) as shelf:
        assert (await shelf.call("POST", "/api/v1/chat", chat)).status == 502
        quoted = await shelf.good("POST", "/api/v1/chat", {**chat, "fallback": True})
        assert quoted["response"] == f"{FACT} [ferries]"
        assert quoted["metadata"]["fallback"]["from"] == Failure.STATUS_500.value
        events = await shelf.server.stream(**chat, fallback=True)
        names = [event.name for event in events]
        assert names[-3:] == ["generation_start", "token", "done"]
        assert events[-1].data["metadata"]["fallback"]["reason"] == "unavailable"
        asked = {"query": TEXEL, "threshold": 0}
        failed, answered = [
            json.loads((await shelf.call("POST", "/rag/stream", body)).body.rpartition("data: ")[2])
            for body in (asked, {**asked, "fallback": True})
        ]
        assert (failed["type"], answered["type"]) == ("error", "done")
        done = answered["data"]
        assert (done["model"], done["fallback"]["reason"]) == ("extractive", "unavailable")
        assert done["fallback"]["message"] == "It answered with an error (500)"


@pytest.mark.parametrize("more", [{"model_fallback": "off"}, {}], ids=["setting", "request"])
async def test_a_model_that_fails_is_503_or_the_end_of_the_stream(
    filled: Path, models_dir: Path, space: Space, more: dict[str, Any]
) -> None:
    wanted: dict[str, Any] = {} if more else {"settings": {"fallback": False}}
    async with library(filled, models_dir, **failing(space, **more)) as shelf:
        reply = await shelf.call("POST", "/v1/query", {"query": "When does the ferry leave?", **wanted})
        assert (reply.status, reply.code) == (503, "SERVICE_UNAVAILABLE")
        assert reply.headers["Retry-After"]
        assert reply.body["details"]["cause"] == "generation_failed"
        events = await shelf.stream("When does the ferry leave?", **wanted)
        assert [event.name for event in events] == ["error"]
        stable = ("error", "code", "message")
        assert [events[0].data[name] for name in stable] == [reply.body[name] for name in stable]
        stats = await shelf.good("GET", "/v1/collections/travel/stats")
        assert stats["query_count_30d"] == 0


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_when_the_client_goes_the_model_is_let_go(
    filled: Path, models_dir: Path, space: Space, accept: str
) -> None:
    slug = Failure.HANG.value
    given = asking(space, slug, query_rewriting=False, heartbeat_interval=0.05)
    async with library(filled, models_dir, **given) as shelf:
        heard: list[bytes] = []
        call = asyncio.create_task(listen(shelf, accept, heard))
        await space.wait_for(lambda: space.requests)
        if accept == "text/event-stream":
            await space.wait_for(lambda: len(heard) > 1)
        call.cancel()
        await space.wait_for(lambda: space.open_connections == 0)
        assert set(heard) <= {b": keep-alive\n\n"}


async def listen(shelf: Library, accept: str, heard: list[bytes]) -> None:
    body, headers = {"query": "When does the ferry leave?"}, {"Accept": accept}
    async with shelf.server.session.post(f"{shelf.server.url}/v1/query", json=body, headers=headers) as response:
        async for piece in response.content.iter_any():
            heard.append(piece)  # noqa: PERF401  as they come


async def test_without_the_embedding_model_the_answer_says_what_to_do(tmp_path: Path) -> None:
    async with library(tmp_path / "data", tmp_path / "no models") as shelf:
        await shelf.collection("travel")
        (item,) = await shelf.ingest("travel", text(FACT))
        assert (item["status"], item["code"]) == ("failed", "UNPROCESSABLE")
        reply = await shelf.call("POST", "/v1/query", {"query": "When does the ferry leave?"})
        assert (reply.status, reply.code) == (503, "SERVICE_UNAVAILABLE")
        assert "not installed" in reply.body["message"]
        events = await shelf.stream("When does the ferry leave?")
        assert [event.name for event in events] == ["error"]
        assert events[0].data == reply.body


async def test_where_the_log_is_off_questions_are_counted_and_not_kept(filled: Path, models_dir: Path) -> None:
    async with library(filled, models_dir, query_log_days=0) as shelf:
        answer = await shelf.ask("When does the ferry to Texel leave?")
        assert answer["citations"]
        reply = await shelf.call("POST", "/v1/feedback", {"query_id": answer["query_id"], "rating": "thumbs_up"})
        assert (reply.status, reply.code) == (404, "NOT_FOUND")
        assert "AGGREGATOR_QUERY_LOG_DAYS" in reply.body["message"]
        assert (await shelf.good("GET", "/v1/collections/travel/stats"))["query_count_30d"] == 1


async def test_an_indexer_that_dies_is_started_again(
    kept: Path, tmp_path: Path, models_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(kept, tmp_path / "data"))
    async with library_with_indexer(folder, models_dir, log_level="WARNING") as shelf:
        await shelf.ingest("travel", text("The ferry to Ameland takes 50 minutes."))
        (indexer,) = (
            child for child in psutil.Process().children() if "anabranch.app.indexer" in " ".join(child.cmdline())
        )
        indexer.kill()
        (item,) = await shelf.ingest("travel", text("The ferry to Vlieland takes 90 minutes."))
        assert item["status"] == "completed"
    told = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [(line["event"], line["status"]) for line in told] == [("indexer_died", -9)]


async def test_what_was_kept_is_there_after_a_restart(filled: Path, models_dir: Path) -> None:
    async with library(filled, models_dir) as shelf:
        answer = await shelf.ask("When does the ferry to Texel leave?")
    async with library(filled, models_dir) as shelf:
        assert (await shelf.ask("When does the ferry to Texel leave?"))["answer"] == answer["answer"]
        body = {"query_id": answer["query_id"], "rating": "thumbs_down"}
        assert await shelf.good("POST", "/v1/feedback", body) == {"recorded": True}
        stats = await shelf.good("GET", "/v1/collections/travel/stats")
        assert (stats["document_count"], stats["query_count_30d"]) == (1, 2)
