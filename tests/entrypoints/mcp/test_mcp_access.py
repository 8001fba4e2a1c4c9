"""Who may use /mcp: as on every surface that holds data, and as MCP asks of servers on a laptop."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from mcp import MCPError

from anabranch.domain.mcp import Aggregation
from support.collection_server import Issuer, Library, Reply
from support.mcp_tool_client import ERAS, client, equipped, stub

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("mcp-server")]

FRIEND = "https://app.example.com"
ACCEPT = {"Accept": "application/json, text/event-stream"}
PATIENCE_S = 20
MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    patient = Aggregation(server_timeout_s=50.0, total_timeout_s=50.0)
    given: dict[str, Any] = {"aggregation": patient, "cors_origins": ("*", FRIEND), "max_request_bytes": 100_000}
    data = tmp_path_factory.mktemp("data")
    async with Issuer() as hub:
        given |= {"syfthub_url": hub.url, "jwt_audience": "library"}
        async with equipped(data, models_dir, stub("slow", 60.0), **given) as opened:
            opened.secrets["guest"] = hub.token(sub="guest", role="guest")
            yield opened


def message(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


async def post(shelf: Library, body: Any = None, **headers: str) -> Reply:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return await shelf.call("POST", "/mcp", body or message("ping"), headers={**ACCEPT, **sent})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example.com", "Host": "evil.example.com"}, 403),
        ({"Host": "evil.example.com"}, 401),
        ({"X_Forwarded_For": "203.0.113.9"}, 401),
        ({"Authorization": "Bearer ab_nobody"}, 401),
        ({"Origin": FRIEND}, 401),
    ],
    ids=["local", "foreign", "null", "rebound", "name", "proxy", "key", "friend"],
)
async def test_mcp_rejects_unauthorized_callers_first(shelf: Library, headers: dict[str, str], status: int) -> None:
    reply = await post(shelf, **headers)
    assert reply.status == status, reply
    assert reply.headers["X-Correlation-ID"]
    if status == 401:
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert reply.body["error"] == "unauthorized"


async def test_mcp_accepts_a_key_with_allowed_origins_and_local_hosts(shelf: Library) -> None:
    key = shelf.key("alice")
    assert (await post(shelf, **key, Origin=FRIEND)).status == 200
    assert (await post(shelf, **key, Host="anabranch.lan:8001")).status == 200
    assert (await post(shelf, **key, Host="anabranch.lan", Origin="https://anabranch.lan")).status == 200
    local = shelf.server.url.replace("127.0.0.1", "localhost")
    assert (await post(shelf, Host=local.partition("://")[2], Origin=local)).status == 200


@pytest.mark.parametrize("mode", ERAS)
async def test_mcp_search_respects_document_permissions(shelf: Library, mode: Any) -> None:
    seen = {}
    for who in ("alice", "bob"):
        async with client(shelf, mode, who=who) as tools:
            found = await tools.call_tool("search", {"query": "Where is the spare key?"})
            asked = await tools.call_tool("ask", {"question": "Where does Alice hide the spare key?"})
            seen[who] = {one["title"] for one in found.structured_content["results"]}
            assert ("flowerpot" in asked.structured_content["answer"]) == (who == "alice")
    assert seen == {"alice": {"Diary", "Refunds"}, "bob": {"Refunds"}}


@pytest.mark.parametrize("who", ["guest", "bob"])
async def test_mcp_callers_who_are_not_the_operator_can_use_only_collections(shelf: Library, who: str) -> None:
    async with client(shelf, who=who) as tools:
        listed = (await tools.list_tools()).tools
        found = await tools.call_tool("search", {"query": "refunds"})
        servers = await tools.call_tool("aggregate", {"query_text": "refunds"})
        named = await tools.call_tool("ask", {"question": "Refunds?", "sources": ["slow"]})
    assert [one["title"] for one in found.structured_content["results"]] == ["Refunds"]
    assert servers.structured_content["error"] == "forbidden"
    assert named.structured_content["error"] == "not_found"
    assert named.structured_content["message"] == "There is no source 'slow'; there are: handbook."
    assert [tool.name for tool in listed] == ["search", "ask"]
    assert "slow" not in repr(listed)


async def test_mcp_an_operator_key_sees_every_tool(shelf: Library) -> None:
    async with client(shelf, who="root") as tools:
        listed = (await tools.list_tools()).tools
    assert [tool.name for tool in listed] == ["aggregate", "search", "ask"]
    assert "slow" in repr(listed)


async def test_mcp_rejects_a_wrong_key(shelf: Library) -> None:
    shelf.secrets["stranger"] = "ab_nobody"
    with pytest.raises((MCPError, ExceptionGroup)):
        async with client(shelf, "legacy", who="stranger"):
            pass


async def test_mcp_rejects_other_methods_and_large_bodies(shelf: Library) -> None:
    for method in ("GET", "DELETE"):
        refused = await shelf.call(method, "/mcp", headers={"Accept": "text/event-stream"})
        assert (refused.status, refused.headers["Allow"]) == (405, "POST")
    assert (await post(shelf, message("ping", padding="x" * 100_001))).status == 413
    assert (await shelf.call("POST", "/mcp", headers=ACCEPT, data=b"{nonsense")).status == 400


async def test_mcp_limits_bodies_also_where_other_requests_may_be_large(tmp_path: Path, models_dir: Path) -> None:
    async with equipped(tmp_path, models_dir) as there:
        fits = await post(there, message("ping", padding=[[]] * 60_000))
        assert fits.status != 413
        refused = await post(
            there, message("tools/call", name="search", arguments={"query": "x", "more": [[]] * 100_000})
        )
    assert refused.status == 413
    assert "The request is larger than 262,144 bytes." in str(refused.body)


@pytest.mark.parametrize("era", ["old", "new"])
async def test_mcp_client_disconnect_cancels_its_run(shelf: Library, era: str) -> None:
    running = shelf.server.service._anabranch.runs._running  # type: ignore[union-attr]
    call = {"name": "ask", "arguments": {"question": "Anything?", "sources": ["slow"]}}
    if era == "old":
        headers = {**ACCEPT, "MCP-Protocol-Version": "2025-11-25"}
        body = message("tools/call", **call)
    else:
        headers = {**ACCEPT, "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "ask"}
        body = message("tools/call", **call, _meta=MODERN)
    asking = asyncio.create_task(shelf.server.session.post(f"{shelf.server.url}/mcp", json=body, headers=headers))
    async with asyncio.timeout(PATIENCE_S):
        while not running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if era == "old":
            (await asking).close()  # its answer has begun already
        else:
            asking.cancel()
        while running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.gather(asking, return_exceptions=True)


async def test_mcp_rejects_calls_while_draining(shelf: Library) -> None:
    anabranch = shelf.server.service._anabranch
    assert anabranch is not None
    anabranch.runs.draining = True
    try:
        reply = await post(shelf)
    finally:
        anabranch.runs.draining = False
    assert reply.status == 503
    assert reply.headers["Retry-After"]
