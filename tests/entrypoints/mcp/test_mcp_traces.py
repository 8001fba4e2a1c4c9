"""Questions over /mcp: their trace and their hops reach the sources, and what the server says of changed tools."""

import json
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from anabranch.domain.mcp import HOPS, McpServer
from support.mcp_pool_fixtures import server as librarian
from support.mcp_tool_client import ERAS

pytestmark = pytest.mark.xdist_group("mcp-server")

Mode = Literal["legacy", "auto"]
REMOTE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "rojo=1"}


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize("sent", ["metadata", "headers"])
async def test_a_question_through_two_instances_carries_its_trace_and_counts_its_hops(
    serve: Any, tmp_path: Path, mode: Mode, sent: str
) -> None:
    lib = librarian("lib", results=1, traced=True)
    async with serve(mcp_servers={"lib": lib}) as far:
        to_far = McpServer(name="far", url=f"{far.url}/mcp")
        async with (
            serve(mcp_servers={"far": to_far}, data_dir=str(tmp_path / "near")) as near,
            httpx2.AsyncClient(headers=REMOTE if sent == "headers" else {}, timeout=30) as web,
            Client(streamable_http_client(f"{near.url}/mcp", http_client=web), mode=mode) as tools,
        ):
            meta: Any = REMOTE if sent == "metadata" else None
            result = await tools.call_tool("aggregate", {"query_text": "rivers"}, meta=meta)
    (found,) = result.structured_content["results"]
    received = json.loads(found["server_result"]["content"]["text"])
    assert {name: received[name] for name in (*REMOTE, HOPS)} == {**REMOTE, HOPS: 2}


async def test_a_traceparent_with_digits_of_another_script_is_not_passed_on(serve: Any) -> None:
    arabic = REMOTE["traceparent"].replace("4", "\N{ARABIC-INDIC DIGIT FOUR}")
    meta: Any = {"traceparent": arabic, "tracestate": "rojo=1"}
    async with (
        serve(mcp_servers={"lib": librarian("lib", results=1, traced=True)}) as server,
        Client(f"{server.url}/mcp") as tools,
    ):
        result = await tools.call_tool("aggregate", {"query_text": "rivers"}, meta=meta)
    (found,) = result.structured_content["results"]
    received = json.loads(found["server_result"]["content"]["text"])
    assert received.get("traceparent") is None
    assert received.get("tracestate") is None


@pytest.mark.parametrize("given", [{HOPS: 4}, {HOPS: 4, "traceparent": "nonsense", "tracestate": 7}])
async def test_a_question_that_has_passed_three_instances_is_not_passed_on(serve: Any, given: dict[str, Any]) -> None:
    meta: Any = given
    async with (
        serve(mcp_servers={"lib": librarian("lib")}) as server,
        Client(f"{server.url}/mcp") as tools,
    ):
        result = await tools.call_tool("aggregate", {"query_text": "rivers"}, meta=meta)
    assert result.is_error
    assert "too many aggregators" in result.structured_content["message"]


@pytest.mark.parametrize("mode", ERAS)
async def test_tools_over_http_do_not_claim_to_announce_their_changes(serve: Any, mode: Mode) -> None:
    async with serve() as server, Client(f"{server.url}/mcp", mode=mode) as tools:
        capability = tools.server_capabilities.tools
    assert capability is not None
    assert not capability.list_changed
