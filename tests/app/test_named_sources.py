"""MCP servers and other configured sources, asked by name through /v1/query and /rag/stream."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text
from support.mcp_pool_fixtures import server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("aggregate")]

QUESTION = "How long do refunds for printed books take?"
NOTES = (
    {"title": "Refund notes", "text": "Refunds for printed books take 14 days.", "url": "https://notes.example/1"},
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    servers = {"notes": server("notes", results=NOTES), "broken": server("broken", mishaps={"*": "error"})}
    async with library(tmp_path_factory.mktemp("data"), models_dir, rate_limit=0, mcp_servers=servers) as opened:
        await opened.collection("shop")
        await opened.ingest("shop", text("Refunds for printed books take 30 days.", title="Handbook"))
        yield opened


async def test_a_named_mcp_server_is_the_only_source(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION, sources=["notes"])
    assert answer["answer"].startswith("Refunds for printed books take 14 days.")
    [found] = answer["sources"]
    assert (found["source"], found["collection"], found["url"]) == ("notes", "", "https://notes.example/1")
    assert (found["citation_index"], found["start_char"], found["end_char"]) == (1, 0, len(NOTES[0]["text"]))
    [cited] = answer["citations"]
    assert (cited["chunk_id"], cited["quoted_text"]) == (found["chunk_id"], NOTES[0]["text"])
    [status] = answer["source_status"]
    assert (status["source"], status["status"], status["results"]) == ("notes", "success", 1)


async def test_with_collections_named_too_both_are_asked_and_one_that_fails_costs_nothing(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION, sources=["notes", "broken"], collections=["shop"])
    assert {found["title"] for found in answer["sources"]} == {"Handbook", "Refund notes"}
    told = {status["source"]: status["status"] for status in answer["source_status"]}
    assert told == {"collections": "success", "notes": "success", "broken": "error"}
    events = await shelf.stream(QUESTION, sources=["notes", "broken"], collections=["shop"])
    assert [event.name for event in events][-2:] == ["sources", "done"]


async def test_one_that_fails_alone_is_an_error_and_all_of_several_a_refusal(shelf: Library) -> None:
    reply = await shelf.call("POST", "/v1/query", {"query": QUESTION, "sources": ["broken"]})
    assert reply.status == 503
    assert "reports an error" in reply.body["message"]
    answer = await shelf.ask(QUESTION, sources=["notes", "broken"])
    assert not answer["refused"]


async def test_unconfigured_source_names_are_refused(shelf: Library) -> None:
    reply = await shelf.call("POST", "/v1/query", {"query": QUESTION, "sources": ["nobody"]})
    assert reply.status == 400
    assert "notes, broken" in reply.body["message"]


@pytest.mark.parametrize("path", ["/v1/query", "/rag/stream"])
async def test_only_the_operator_may_name_them(shelf: Library, path: str) -> None:
    request = {"query": QUESTION, "sources": ["notes"]}
    refused = await shelf.call("POST", path, request, who="bob")
    assert refused.status == 403
    assert "Only the operator may name configured sources" in str(refused.body)
    assert (await shelf.call("POST", path, request, who="root")).status == 200


async def test_rag_stream_accepts_named_sources(shelf: Library) -> None:
    url, body = f"{shelf.server.url}/rag/stream", {"query": QUESTION, "sources": ["notes"], "threshold": 0}
    async with shelf.server.session.post(url, json=body) as response:
        assert response.status == 200
        frames = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    end = frames[-1]["data"]
    assert [found["source"] for found in end["sources"]] == ["notes"]
    assert end["source_status"][0]["status"] == "success"
    assert "14 days" in "".join(frame["data"] for frame in frames if frame["type"] == "token")


async def test_without_named_sources_only_collections_are_asked(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION)
    assert "30 days" in answer["answer"]
    assert "source_status" not in answer
