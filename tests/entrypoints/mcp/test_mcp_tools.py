"""The three tools, used by MCP's own client over HTTP in both eras of the protocol."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from anabranch.testing import Space
from conftest import LOCAL
from support.collection_server import Library
from support.mcp_tool_client import ERAS, client, equipped, stub

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("mcp-server")]

Mode = Literal["legacy", "auto"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    servers = (stub("rivers"), stub("failing"), stub("off", enabled=False))
    async with equipped(tmp_path_factory.mktemp("data"), models_dir, *servers) as opened:
        yield opened


class Heard(list[tuple[float, float | None, str | None]]):
    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.append((progress, total, message))


@pytest.mark.parametrize("mode", ERAS)
async def test_listed_mcp_tools_have_valid_schemas_and_descriptions(shelf: Library, mode: Mode) -> None:
    async with client(shelf, mode) as tools:
        listed = {tool.name: tool for tool in (await tools.list_tools()).tools}
    assert list(listed) == ["aggregate", "search", "ask"]
    for tool in listed.values():
        for schema in (tool.input_schema, tool.output_schema):
            assert schema is not None
            assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
            jsonschema.Draft202012Validator.check_schema(schema)
            assert schema["type"] == "object"
        assert tool.input_schema["additionalProperties"] is False
        assert tool.title
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint
    description = listed["aggregate"].description
    assert description is not None
    assert description.endswith("Servers: rivers, failing.")


@pytest.mark.parametrize("mode", ERAS)
async def test_aggregate_tool_searches_servers_and_reports_progress(shelf: Library, mode: Mode) -> None:
    heard = Heard()
    async with client(shelf, mode) as tools:
        await tools.list_tools()  # so that what comes back is held against its schema
        asked = {"query_text": "What is an anabranch?", "request_id": "mine"}
        result = await tools.call_tool("aggregate", asked, progress_callback=heard)
    assert not result.is_error
    said = result.structured_content
    assert [one["server_result"]["content"]["title"] for one in said["results"]] == ["Anabranch", "Delta"]
    assert said["metadata"]["request_id"] == "mine"
    assert said["metadata"]["servers_queried"] == 2
    assert {one["server_name"]: one["status"] for one in said["metadata"]["servers"]} == {
        "rivers": "success",
        "failing": "error",
    }
    assert sorted(progress[:2] for progress in heard) == [(1, 2), (2, 2)]
    assert any(message and message.startswith("rivers: 2 results in ") for _, _, message in heard)
    (block,) = result.content
    assert block.type == "text"
    assert "1. Anabranch (rivers, score 0." in block.text
    assert "https://example.com/a" in block.text
    assert "failing did not answer (error): " in block.text
    assert "The index is being rebuilt." in block.text


@pytest.mark.parametrize("mode", ERAS)
async def test_search_tool_returns_passages_with_offsets(shelf: Library, mode: Mode) -> None:
    async with client(shelf, mode) as tools:
        await tools.list_tools()
        result = await tools.call_tool("search", {"query": "How long do refunds take?", "limit": 1})
        missing = await tools.call_tool("search", {"query": "refunds", "collections": ["handbook", "nowhere"]})
    (found,) = result.structured_content["results"]
    assert found["text"] == "Refunds are paid within 14 days of the return."
    assert (found["collection"], found["title"], found["rank"]) == ("handbook", "Refunds", 1)
    assert (found["start_char"], found["end_char"]) == (0, len(found["text"]))
    assert (found["chunk_type"], found["also_in"], found["also_in_count"]) == ("paragraph", [], 0)
    assert missing.is_error
    assert missing.structured_content["error"] == "not_found"
    assert missing.structured_content["message"] == "There is no collection 'nowhere'; there are: handbook."


@pytest.mark.parametrize("mode", ERAS)
async def test_ask_tool_answers_with_quoted_citations(shelf: Library, mode: Mode) -> None:
    heard = Heard()
    async with client(shelf, mode) as tools:
        await tools.list_tools()
        asked = {"question": "Within how many days are refunds paid?"}
        result = await tools.call_tool("ask", asked, progress_callback=heard)
        refused = await tools.call_tool("ask", {"question": "Who won the 1954 world cup?", "sources": ["failing"]})
        mixed = await tools.call_tool("ask", {"question": "What is an anabranch?", "sources": ["handbook", "rivers"]})
    said = result.structured_content
    assert not said["refused"]
    assert 0.5 <= said["support"] <= 1
    citation = said["citations"][0]
    assert "14 days" in citation["quoted_text"]
    assert (citation["source"], citation["title"]) == ("handbook", "Refunds")
    assert said["sentences"][0]["citations"] == [citation["number"]]
    assert [one["name"] for one in said["sources"]] == ["collections", "rivers", "failing"]
    assert [message for _, _, message in heard][-1] == "writing"
    assert [progress for progress, _, _ in heard] == sorted(progress for progress, _, _ in heard)
    assert not refused.is_error
    assert refused.structured_content["refused"]
    assert refused.structured_content["sources"][0]["status"] == "error"
    assert {one["name"] for one in mixed.structured_content["sources"]} == {"collections", "rivers"}
    assert any(one["source"] == "rivers" and one["url"] for one in mixed.structured_content["citations"])


async def test_ask_tool_names_the_model_that_writes(shelf: Library) -> None:
    question = {"question": "Within how many days are refunds paid?", "sources": ["handbook"]}
    for who, names in ((None, "extractive, default"), ("bob", "extractive")):
        async with client(shelf, who=who) as tools:
            quoted = await tools.call_tool("ask", {**question, "model": "extractive"})
            unknown = await tools.call_tool("ask", {**question, "model": "nobody"})
        assert (quoted.structured_content["model"], quoted.structured_content["refused"]) == ("extractive", False)
        assert unknown.is_error
        assert unknown.structured_content["message"] == (
            f"There is no model 'nobody' that you may use; name one of: {names}."
        )


async def test_ask_tool_quotes_when_the_model_is_down_and_says_so(tmp_path: Path, models_dir: Path) -> None:
    down = {"model_url": "http://127.0.0.1:9", "model_name": "smol", "model_retries": 0}
    heard = Heard()
    async with equipped(tmp_path / "data", models_dir, **down) as shelf, client(shelf, who="bob") as tools:
        await tools.list_tools()  # so that what comes back is held against its schema
        asked = {"question": "Within how many days are refunds paid?"}
        result = await tools.call_tool("ask", asked, progress_callback=heard)
    said = result.structured_content
    assert (said["answer"], said["model"]) == ("Refunds are paid within 14 days of the return. [1]", "extractive")
    assert said["fallback"] == {"from": "smol", "reason": "unavailable", "message": "No connection could be made."}
    (block,) = result.content
    assert block.type == "text"
    assert "smol failed: No connection could be made. The answer quotes the documents instead." in block.text
    assert [message for _, _, message in heard][-1] == "smol failed; quoting the documents"


WRITTEN = (
    "Refunds are paid within 14 days of the return. Refunds are paid within 14 days of the return [2]. "
    "Penguins swim very well [1]."
)


async def test_ask_tool_checks_each_sentence_and_writes_the_right_marks(tmp_path: Path, models_dir: Path) -> None:
    async with Space() as space:
        space.model("writer", reply=WRITTEN)
        given = {"model_url": space.url, "model_name": "writer", "endpoint_allowlist": LOCAL}
        async with equipped(tmp_path / "data", models_dir, **given) as shelf, client(shelf, who="alice") as tools:
            await tools.list_tools()  # so that what comes back is held against its schema
            asked = {"question": "Within how many days are refunds paid?"}
            result = await tools.call_tool("ask", asked)
            strict = await tools.call_tool("ask", {**asked, "answer_policy": "strict"})
            plain = await tools.call_tool("ask", {**asked, "verify": False})
    said = result.structured_content
    right = next(one["number"] for one in said["citations"])
    sentence = "Refunds are paid within 14 days of the return"
    assert said["answer"] == f"{sentence}. [{right}] {sentence} [{right}]. Penguins swim very well."
    checked = said["checked_sentences"]
    assert [one["verdict"] for one in checked] == ["supported", "supported", "unsupported"]
    assert checked[0]["citations"][0]["quoted_text"] == f"{sentence}."
    assert all(said["answer"][one["start"] : one["end"]] == one["text"] for one in checked)
    for citation in said["citations"]:
        assert said["answer"][citation["answer_start"] : citation["answer_end"]] == f"[{right}]"
    assert said["faithfulness_score"] == 0.6667
    assert said["marks"]["added"] == said["marks"]["removed"] == 1
    (block,) = result.content
    assert block.type == "text"
    assert "\nFaithfulness 0.67: " in block.text
    assert "\n- no source says this: “Penguins swim very well.”" in block.text
    assert "Penguins" not in strict.structured_content["answer"]
    assert (strict.structured_content["left_out"], strict.structured_content["faithfulness_score"]) == (1, 1.0)
    assert plain.structured_content["answer"] == WRITTEN
    assert not plain.structured_content.keys() & {"checked_sentences", "faithfulness_score", "marks"}


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("aggregate", {}, "InvalidQuery", "query_text is missing"),
    ("aggregate", {"query_text": 7}, "InvalidQuery", "text of 1 to 10,000 characters"),
    ("aggregate", {"query_text": " "}, "InvalidQuery", "empty"),
    ("aggregate", {"query_text": "x" * 10_001}, "InvalidQuery", "10,001 characters; it may have 10,000"),
    ("aggregate", {"query_text": "x", "max_results": 9}, "InvalidQuery", "9; it must be from 10 to 100"),
    ("aggregate", {"query_text": "x", "max_results": "10"}, "InvalidQuery", "a whole number from 10 to 100"),
    ("aggregate", {"query_text": "x", "servers": ["nope"]}, "InvalidQuery", "nope"),
    ("aggregate", {"query_text": "x", "servers": ["off"]}, "InvalidQuery", "switched off"),
    ("aggregate", {"query_text": "x", "servers": ["failing"]}, "AllServersFailed", "The index is being rebuilt."),
    ("search", {"query": "x", "limit": 1000}, "invalid_request", "a whole number from 1 to 20"),
    ("search", {"query": "x", "colour": "blue"}, "invalid_request", "there are: query, collections, limit"),
    ("search", {"query": ["x"]}, "invalid_request", "query takes text"),
    ("ask", {"question": "x", "verify": "yes"}, "invalid_request", "verify takes true or false"),
    ("ask", {"question": "x", "answer_policy": "some"}, "invalid_request", 'answer_policy takes "all" or "strict"'),
    ("ask", {"question": "x", "sources": "handbook"}, "invalid_request", "sources takes a list"),
    (
        "ask",
        {"question": "x", "sources": ["http://127.0.0.1:1/docs"]},
        "not_found",
        "there are: handbook, rivers, failing.",
    ),
]


@pytest.mark.parametrize(
    ("tool", "arguments", "error", "words"), WRONG, ids=[f"{one[2]}-{n}" for n, one in enumerate(WRONG)]
)
async def test_invalid_tool_arguments_are_explained(
    shelf: Library, tool: str, arguments: dict[str, Any], error: str, words: str
) -> None:
    async with client(shelf) as tools:
        listed = {one.name: one for one in (await tools.list_tools()).tools}
        result = await tools.call_tool(tool, arguments)
    assert result.is_error
    said = result.structured_content
    assert said["error"] == error
    assert words in said["message"]
    # The text says it, and says it once.
    assert result.content[0].text == f"{error}: {said['message']}"  # type: ignore[union-attr]
    # Some clients hold errors against the schema as well.
    jsonschema.validate(said, listed[tool].output_schema or {})
    fields = {"InvalidQuery": ("query", "reason"), "AllServersFailed": ("attempted", "errors")}
    assert all(field in said for field in fields.get(error, ()))


async def test_null_and_integral_floats_are_accepted_as_arguments(shelf: Library) -> None:
    async with client(shelf) as tools:
        result = await tools.call_tool("search", {"query": "refunds", "collections": None, "limit": 1.0})
    assert len(result.structured_content["results"]) == 1


@pytest.mark.parametrize("mode", ERAS)
async def test_concurrent_tool_calls_are_independent(shelf: Library, mode: Mode) -> None:
    async with client(shelf, mode) as tools:
        asked = [{"query_text": f"anabranch {number}", "request_id": str(number)} for number in range(5)]
        results = await asyncio.gather(*(tools.call_tool("aggregate", one) for one in asked))
    assert [one.structured_content["metadata"]["request_id"] for one in results] == [one["request_id"] for one in asked]
