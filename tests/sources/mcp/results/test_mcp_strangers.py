"""What a hostile server cannot do: repeat what it was given in confidence, control a terminal, keep us busy."""

import time

import pytest
from mcp_types import CallToolResult, TextContent, Tool

from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.errors import sanitize
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
def test_a_secret_is_masked(given: dict[str, object]) -> None:
    server = McpServer(name="one", **given)  # type: ignore[arg-type]
    said = sanitize(f"bad key {SECRET} for folder handbook", server)
    assert SECRET not in said
    assert said == "bad key *** for folder handbook."


def test_other_words_stay() -> None:
    server = McpServer(name="one", command="python", args=("-c", "print('no licence')", "/srv/handbook"))
    assert sanitize("no licence for /srv/handbook", server) == "no licence for /srv/handbook."


def test_what_is_shown_controls_no_terminal() -> None:
    assert "\x1b" not in sanitize("\x1b[31mred\u202e", McpServer(name="one"))


def test_results_have_no_signs_that_are_for_machines() -> None:
    text = "one\x1b[31m\x07 two\u202e three\u2028four\x85five\tsix\x00"
    result = CallToolResult(content=[TextContent(type="text", text=text)])
    [passage] = passages(result, McpServer(name="one"))
    assert passage.text == "one[31m two three\nfour\nfive\tsix"


def test_a_hostile_list_of_tools_is_read_in_little_time() -> None:
    """Each property of each part refers to the next; every one of them was once followed, and then forgotten."""
    steps = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(50)}
    part = {"properties": {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(200)}}
    schema = {"type": "object", "$defs": steps, "allOf": [part] * 50}
    tools = [Tool(name=f"t{n}", input_schema=schema) for n in range(40)]
    began = time.process_time()
    with pytest.raises(NoTool):
        choose(McpServer(name="one"), tools)
    assert time.process_time() - began < 4.0


def test_what_another_aggregator_has_ranked_is_what_its_server_found() -> None:
    content = {"title": "Refunds", "text": "Refunds take 30 days.", "url": "https://a.example/1", "date": None}
    result = {"server_name": "alpha", "content": content, "response_time_ms": 3, "timestamp": "2026-11-15T12:00:00Z"}
    ranked = {"results": [{"rank": 1, "relevance_score": 0.7, "server_result": result}], "metadata": {"servers": []}}
    [passage] = passages(CallToolResult(content=[], structured_content=ranked), McpServer(name="one"))
    assert (passage.title, passage.text, passage.url) == ("Refunds", "Refunds take 30 days.", "https://a.example/1")
    assert (passage.date, passage.score) == (None, 0.7)


def test_an_answer_is_no_list_of_who_was_asked() -> None:
    said = {"answer": "Refunds take 30 days. [1]", "sources": [{"name": "a", "status": "success", "results": 3}]}
    [passage] = passages(CallToolResult(content=[], structured_content=said), McpServer(name="one"))
    assert passage.text == "Refunds take 30 days. [1]"
