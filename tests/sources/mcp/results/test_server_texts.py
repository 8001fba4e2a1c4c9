"""Texts of hostile servers: no secrets, no control characters, little CPU."""

import time

import pytest
from mcp_types import CallToolResult, TextContent, Tool

from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.connection import sanitize
from anabranch.sources.mcp.results.extraction import passages
from anabranch.sources.mcp.tool_selection import NoTool, choose

SECRET = "s3cr3t-0123456789abcdef"


@pytest.mark.parametrize(
    "given",
    [
        {"env": {"KEY": SECRET}},
        {"env": {"DSN": f"postgres://me:{SECRET}@host/db"}},
        {"args": ("--quiet", f"--api-key={SECRET}")},
        {"args": ("--token", SECRET, "folder")},
        {"args": (f"postgres://me:{SECRET}@host/db",)},
        {"url": f"https://host.example/mcp?key={SECRET}"},
        {"url": f"https://host.example/{SECRET}/mcp"},
        {"url": "https://host.example/mcp", "headers": {"Authorization": f"Bearer {SECRET}"}},
    ],
    ids=["env", "dsn", "option", "value", "argument", "query", "path", "header"],
)
def test_configured_secrets_are_masked_in_server_messages(given: dict[str, object]) -> None:
    server = McpServer(name="one", **given)  # type: ignore[arg-type]
    said = sanitize(f"bad key {SECRET} for folder handbook", server)
    assert SECRET not in said
    assert said == "bad key [removed] for folder handbook."


def test_other_text_of_server_messages_stays() -> None:
    server = McpServer(name="one", command="python", args=("-c", "print('no licence')", "/srv/handbook"))
    assert sanitize("no licence for /srv/handbook", server) == "no licence for /srv/handbook."


def test_server_messages_contain_no_control_characters() -> None:
    assert "\x1b" not in sanitize("\x1b[31mred\u202e", McpServer(name="one"))


def test_results_contain_no_control_characters() -> None:
    text = "one\x1b[31m\x07 two\u202e three\u2028four\x85five\tsix\x00"
    result = CallToolResult(content=[TextContent(type="text", text=text)])
    [passage] = passages(result, McpServer(name="one"))
    assert passage.text == "one[31m two three\nfour\nfive\tsix"


def test_hostile_tool_lists_are_read_quickly() -> None:
    """Each property of each part refers to the next; every one of them was once followed, and then forgotten."""
    steps = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(50)}
    part = {"properties": {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(200)}}
    schema = {"type": "object", "$defs": steps, "allOf": [part] * 50}
    tools = [Tool(name=f"t{n}", input_schema=schema) for n in range(40)]
    began = time.process_time()
    with pytest.raises(NoTool):
        choose(McpServer(name="one"), tools)
    assert time.process_time() - began < 4.0


def test_results_of_another_aggregator_are_unwrapped() -> None:
    content = {"title": "Refunds", "text": "Refunds take 30 days.", "url": "https://a.example/1", "date": None}
    result = {"server_name": "alpha", "content": content, "response_time_ms": 3, "timestamp": "2026-11-15T12:00:00Z"}
    ranked = {"results": [{"rank": 1, "relevance_score": 0.7, "server_result": result}], "metadata": {"servers": []}}
    [passage] = passages(CallToolResult(content=[], structured_content=ranked), McpServer(name="one"))
    assert (passage.title, passage.text, passage.url) == ("Refunds", "Refunds take 30 days.", "https://a.example/1")
    assert (passage.date, passage.score) == (None, 0.7)


def test_an_answer_object_is_one_result() -> None:
    said = {"answer": "Refunds take 30 days. [1]", "sources": [{"name": "a", "status": "success", "results": 3}]}
    [passage] = passages(CallToolResult(content=[], structured_content=said), McpServer(name="one"))
    assert passage.text == "Refunds take 30 days. [1]"
