"""Where a question goes that names no source, on each surface, and what it says when there is nothing to ask."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch import Anabranch, Settings
from anabranch.domain.mcp import Aggregation, ServerRule
from anabranch.domain.model import Endpoint, Ground
from anabranch.testing import Document, Space
from support.collection_server import Library, library, text
from support.mcp_tool_client import client, stub

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("where-questions-go")]

QUESTION = "How long do refunds for printed books take?"
RULES = Aggregation(
    server_timeout_s=30, server_rules=(ServerRule(pattern="river|delta", servers=("rivers", "switched-off")),)
)
EVERYTHING = {"collections", "alice/wiki", "rivers", "lakes"}
NOTHING = "There are no documents here that you can read"
HOW = ("anabranch ingest FOLDER --collection NAME", "POST /v1/ingest")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with Space() as started:
        started.source("wiki", documents=[Document(title="Wiki", content="Refunds for printed books take 7 days.")])
        started.model("writer", reply="Thirty days [1].")
        yield started


def configured(space: Space) -> dict[str, Any]:
    servers = (stub("rivers"), stub("lakes"), stub("switched-off", enabled=False))
    return {
        "sources": {"wiki": Endpoint(slug="wiki", url=space.url, owner="alice", operator=True)},
        "mcp_servers": {server.name: server for server in servers},
        "aggregation": RULES,
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, space: Space) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir, rate_limit=0, **configured(space)) as opened:
        await opened.collection("shop")
        await opened.collection("attic")
        await opened.ingest("shop", text("Refunds for printed books take 30 days.", title="Handbook"))
        yield opened


async def rag(shelf: Library, query: str, *, who: str | None = None, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text and the last frame of /rag/stream."""
    url, body = f"{shelf.server.url}/rag/stream", {"query": query, "threshold": 0, **more}
    async with shelf.server.session.post(url, json=body, headers=shelf.key(who)) as response:
        assert response.status == 200, await response.text()
        frames = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    return "".join(frame["data"] for frame in frames[:-1]), frames[-1]["data"]


async def told(shelf: Library, who: str | None = None, **arguments: Any) -> Any:
    async with client(shelf, who=who) as tools:
        return (await tools.call_tool("ask", arguments)).structured_content


def asked(statuses: list[dict[str, Any]]) -> set[str]:
    return {status.get("source") or status["name"] for status in statuses}


async def test_sources_all_asks_collections_sources_and_mcp_servers(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION, sources="all")
    assert asked(answer["source_status"]) == EVERYTHING
    assert {"Handbook", "Wiki"} <= {found["title"] for found in answer["sources"]}
    _, done = await rag(shelf, QUESTION, sources="all")
    assert asked(done["source_status"]) == EVERYTHING


async def test_sources_all_with_named_collections_asks_only_these_collections(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION, sources="all", collections=["attic"])
    assert asked(answer["source_status"]) == EVERYTHING
    assert "Handbook" not in {found["title"] for found in answer["sources"]}


async def test_sources_all_leaves_out_what_the_caller_may_not_use(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION, who="bob", sources="all")
    assert asked(answer["source_status"]) == {"collections"}
    assert "30 days" in answer["answer"]
    assert asked((await shelf.ask(QUESTION, who="root", sources="all"))["source_status"]) == EVERYTHING


@pytest.mark.parametrize("sources", ["some", "", 5, ["all", 5]])
async def test_sources_takes_names_or_the_word_all(shelf: Library, sources: Any) -> None:
    reply = await shelf.call("POST", "/v1/query", {"query": QUESTION, "sources": sources})
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert "sources" in reply.body["message"]


async def test_mcp_ask_without_names_asks_everything_that_the_caller_may_use(shelf: Library) -> None:
    assert asked((await told(shelf, question=QUESTION))["sources"]) == EVERYTHING
    assert asked((await told(shelf, who="root", question=QUESTION))["sources"]) == EVERYTHING
    assert asked((await told(shelf, who="bob", question=QUESTION))["sources"]) == {"collections"}
    assert asked((await told(shelf, question=QUESTION, sources=["lakes"]))["sources"]) == {"lakes"}


async def test_routing_rules_select_the_mcp_servers_of_a_question_without_names(shelf: Library) -> None:
    question = "Where does the river end?"
    routed = {"collections", "alice/wiki", "rivers"}
    assert asked((await shelf.ask(question, sources="all"))["source_status"]) == routed
    assert asked((await told(shelf, question=question))["sources"]) == routed
    assert asked((await told(shelf, question=question, sources=["lakes"]))["sources"]) == {"lakes"}


async def test_the_library_asks_everything_unless_sources_are_named(
    shelf: Library, models_dir: Path, space: Space
) -> None:
    settings = Settings(data_dir=str(shelf.folder), models_dir=str(models_dir), **configured(space))
    async with Anabranch.open(settings=settings) as ab:
        answer = await ab.ask(QUESTION)
        assert {reply.path for reply in answer.replies} == EVERYTHING
        routed = await ab.ask("Where does the river end?")
        assert {reply.path for reply in routed.replies} == EVERYTHING - {"lakes"}
        nothing = await ab.ask(QUESTION, sources=[])
    assert (nothing.refused, nothing.ground, nothing.replies) == (True, Ground.NO_SOURCES, ())
    assert nothing.text.startswith("No source was asked")


async def test_empty_collections_are_answered_with_how_to_add_documents(shelf: Library) -> None:
    """The named collection is empty, although others are not."""
    answer = await shelf.ask(QUESTION, collections=["attic"])
    assert (answer["refused"], answer["usage"]["output_tokens"]) == (True, 0)
    written, done = await rag(shelf, QUESTION, collections=["attic"])
    assert (done["guardrail"], done["guardrail_reason"]) == ("no_context", "no_sources")
    told_by_mcp = await told(shelf, question=QUESTION, sources=["attic"])
    assert told_by_mcp["refused"]
    for answer_text in (answer["answer"], written, told_by_mcp["answer"]):
        assert answer_text.startswith(NOTHING)
        assert all(way in answer_text for way in HOW)
    german, _ = await rag(shelf, QUESTION, collections=["attic"], language="de")
    assert "POST /v1/ingest" in german
    assert german.startswith("Hier gibt es keine Dokumente")


async def test_filters_that_match_nothing_are_not_an_empty_collection(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION, collections=["shop"], filters={"tags": ["nothing has this"]})
    assert answer["answer"] == "Nothing that answers this was found in the source."


async def test_an_empty_server_calls_no_model_and_creates_no_data_folder(
    tmp_path: Path, models_dir: Path, space: Space
) -> None:
    async with library(tmp_path / "data", models_dir, model_url=space.url, model_name="writer") as empty:
        answers = [(await empty.ask(QUESTION, who=who))["answer"] for who in (None, "bob")]
        hidden = await empty.collection("diary", who="alice", default_permissions={"visibility": "private"})
        await empty.ingest("diary", text("Refunds take 3 days.", permissions={"visibility": "private"}), who="alice")
        answers.append((await empty.ask(QUESTION, who="bob"))["answer"])
        missing = await empty.call("POST", "/v1/query", {"query": QUESTION, "collections": [hidden]}, who="bob")
    assert missing.status == 404
    assert len(set(answers)) == 1  # nobody learns that there are documents of others
    assert answers[0].startswith(NOTHING)
    assert not [request for request in space.requests if request.slug == "writer"]
    settings = Settings(data_dir=str(tmp_path / "none"), models_dir=str(models_dir))
    async with Anabranch.open(settings=settings) as ab:
        answer = await ab.ask(QUESTION)
    assert (answer.refused, answer.ground) == (True, Ground.NO_SOURCES)
    assert not (tmp_path / "none").exists()


async def test_the_operator_names_mcp_servers_and_all_collections_in_chat(shelf: Library) -> None:
    sources = [{"slug": "rivers"}, {"slug": "collections"}]
    answer = await shelf.server.chat(prompt=QUESTION, data_sources=sources, retrieval_only=True)
    assert {one["path"]: one["status"] for one in answer["retrieval_info"]} == {
        "rivers": "success",
        "collections": "success",
    }


async def test_mcp_ask_takes_the_name_that_stands_for_all_collections(shelf: Library) -> None:
    async with client(shelf) as tools:
        reply = await tools.call_tool("ask", {"question": QUESTION, "sources": ["collections", "lakes"]})
    assert {one["name"] for one in reply.structured_content["sources"]} == {"collections", "lakes"}
