"""The HTTP transport to MCP servers."""

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from aiohttp import web as aiohttp_web
from mcp.client.client import Client
from mcp.client.subscriptions import ToolsListChanged
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, TextContent

from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.http_transport import OutboundTransport
from anabranch.sources.mcp.services import McpTiming
from support.mcp_http_servers import (
    MAX_EVENT,
    MAX_REPLY,
    Recording,
    answer,
    client,
    everything,
    listening,
    outbound,
    scripted,
    served,
    text,
)


async def called(connected: Client, tool: str, **arguments: str) -> str:
    result = await connected.call_tool(tool, arguments, read_timeout_seconds=10)
    first = result.content[0]
    assert isinstance(first, TextContent)
    return first.text


async def failure(url: str, way_out: Recording, **given: Any) -> str:
    """Why no connection comes about, out of the groups that the SDK's tasks put it in."""
    with pytest.raises(ExceptionGroup) as failed:
        async with client(url, way_out, **given):
            pass
    error: BaseException = failed.value
    while isinstance(error, BaseExceptionGroup):
        assert len(error.exceptions) == 1
        error = error.exceptions[0]
    assert isinstance(error, MCPError)
    return error.error.message


async def test_http_server_of_the_legacy_protocol_with_a_session() -> None:
    async with everything() as (url, process), outbound(1_000_000) as way_out:
        async with client(url, way_out, headers={"X-Key": "mine"}) as connected:
            assert connected.protocol_version == "2025-11-25"
            calls = [called(connected, "echo", message=str(n)) for n in range(5)]
            assert await asyncio.gather(*calls) == [f"Echo: {n}" for n in range(5)]
            session = way_out.sent[-1][2]["Mcp-Session-Id"]
            async with way_out.request("DELETE", url, headers={"Mcp-Session-Id": session}, operator=True) as reply:
                assert reply.status == 200
            with pytest.raises(MCPError, match="Session terminated") as failed:
                await called(connected, "echo", message="x")
            assert failed.value.code == INVALID_REQUEST
            process.terminate()
            await process.wait()
            with pytest.raises(MCPError, match="No connection could be made") as failed:
                await called(connected, "echo", message="x")
            assert failed.value.code == CONNECTION_CLOSED
        assert {method for method, _, _ in way_out.sent} == {"POST", "GET", "DELETE"}
        assert all(headers["X-Key"] == "mine" for _, _, headers in way_out.sent if len(headers) > 1)
        assert all(name == name.title() for _, _, headers in way_out.sent for name in headers)


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "events"])
async def test_http_server_of_the_modern_protocol(as_json: bool) -> None:
    server = MCPServer("new", tools=[])

    @server.tool()
    async def shout(query: str) -> str:
        return query.upper()

    async with served(server.streamable_http_app(json_response=as_json)) as url, outbound() as way_out:
        async with client(url, way_out) as connected:
            assert connected.protocol_version == "2026-07-28"
            for n in range(3):
                assert await called(connected, "shout", query=f"é{n}") == f"É{n}"
        assert {method for method, _, _ in way_out.sent} == {"POST"}


async def test_subscriptions_of_the_modern_protocol_stay_open() -> None:
    """They come in reply to a call that does not end, over more bytes than any other reply may have."""
    server = MCPServer("new", tools=[])

    @server.tool()
    async def change(context: Context[Any]) -> str:
        await context.notify_tools_changed()
        return "changed"

    async with (
        served(server.streamable_http_app()) as url,
        outbound(2_000) as way_out,
        client(url, way_out) as connected,
        connected.listen(tools_list_changed=True) as news,
    ):
        for _ in range(40):
            assert await called(connected, "change") == "changed"
            assert isinstance(await asyncio.wait_for(anext(news), 10), ToolsListChanged)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "goes on"])
async def test_a_connection_is_reused_after_a_stream_that_ends_with_its_answer(ends: bool) -> None:
    timing = McpTiming(last_bytes_s=5.0 if ends else 0.01)
    peers: set[Any] = set()

    async def handler(request: aiohttp_web.Request, asked: Any) -> aiohttp_web.StreamResponse:
        if request.method != "POST":
            return aiohttp_web.Response(status=405)
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        response = aiohttp_web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        said = {"jsonrpc": "2.0", "id": asked["id"], "result": text("here")}
        await response.write(b"event: message\ndata: " + json.dumps(said).encode() + b"\n\n")
        if not ends:
            await asyncio.Event().wait()
        return response

    async with scripted(handler) as url, outbound() as way_out, client(url, way_out, timing=timing) as connected:
        for _ in range(6):
            assert await called(connected, "any") == "here"
    assert len(peers) < 6 if ends else len(peers) == 6


async def test_connection_refused_is_explained(unused_tcp_port: int) -> None:
    async with outbound() as way_out:
        sentence = await failure(f"http://127.0.0.1:{unused_tcp_port}/mcp", way_out)
        assert sentence == "No connection could be made."


@pytest.mark.parametrize(
    ("status", "content_type", "body", "sentence"),
    [
        (401, "text/html", "<h1>Who?</h1>", "The server rejected the request (401); check the configured headers"),
        (403, "application/json", '{"detail": "Not you."}', "configured headers: Not you."),
        (429, "text/plain", "", "The server's rate limit is exceeded (429)."),
        (500, "application/json", "{", "The server answered with an error (500)."),
        (404, "text/html", "<h1>Nothing</h1>", "There is no MCP server at this URL (404)."),
        (400, "application/json", '{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"Bad."}}', "Bad."),
    ],
    ids=["401", "403", "429", "500", "404", "400"],
)
async def test_http_error_statuses_are_explained(status: int, content_type: str, body: str, sentence: str) -> None:
    async def refuse(request: aiohttp_web.Request) -> aiohttp_web.Response:
        return aiohttp_web.Response(status=status, text=body, content_type=content_type)

    async with listening({"/mcp": refuse}) as origin, outbound() as way_out:
        assert sentence in await failure(f"{origin}/mcp", way_out)


async def test_a_reply_over_the_size_limit_fails_alone() -> None:
    async def handler(request: aiohttp_web.Request, asked: Any) -> aiohttp_web.StreamResponse:
        if request.method != "POST":
            return aiohttp_web.Response(status=405)
        if asked["params"]["name"] == "slow":
            await large.wait()
            return answer(asked, text("slow"))
        if asked["params"]["name"] == "stream":
            response = aiohttp_web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: " + b"x" * 2 * MAX_REPLY)
            return response
        return answer(asked, text("x" * MAX_REPLY))

    large = asyncio.Event()
    async with scripted(handler) as url, outbound() as way_out, client(url, way_out) as connected:
        slow = asyncio.create_task(called(connected, "slow"))
        for tool in ("large", "stream"):
            with pytest.raises(MCPError, match="larger than 100,000 bytes"):
                await called(connected, tool)
        large.set()
        assert await slow == "slow"


async def test_a_get_stream_is_reopened_at_a_limited_rate() -> None:
    """A server's notices in the old era come over one stream, for as long as the session lasts. One that is dropped is
    taken up again, and not too often."""
    timing = McpTiming(listen_gap_s=0.1)
    notice = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}}
    listens: list[float] = []

    async def handler(request: aiohttp_web.Request, asked: Any) -> aiohttp_web.StreamResponse:
        if request.method != "GET":
            return aiohttp_web.Response(status=200)
        listens.append(time.monotonic())
        response = aiohttp_web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"retry: 0\ndata: \n\n")
        if len(listens) < 4:
            assert request.transport is not None
            request.transport.abort()
            return response
        for _ in range(300):
            await response.write(b"data: " + json.dumps(notice).encode() + b"\n\n")
        await asyncio.Event().wait()
        return response

    heard: list[Any] = []

    async def logged(params: Any) -> None:
        heard.append(params)
        if len(heard) == 300:
            all_heard.set()

    all_heard = asyncio.Event()
    async with (
        scripted(handler) as url,
        outbound() as way_out,
        client(url, way_out, timing=timing, logging_callback=logged),
    ):
        async with asyncio.timeout(10):
            await all_heard.wait()
    assert len(listens) == 4
    assert listens[-1] - listens[0] > 0.25
    assert all(later - sooner > 0.05 for sooner, later in pairwise(listens)), "the gap, less the time on the way"


async def test_unanswered_notifications_and_session_delete_do_not_delay_calls() -> None:
    """Neither a cancellation nor the farewell holds anything up."""
    timing = McpTiming(notification_s=0.1, session_delete_s=0.1)

    async def handler(request: aiohttp_web.Request, asked: Any) -> aiohttp_web.StreamResponse:
        if request.method == "POST" and asked.get("params", {}).get("name") == "quick":
            return answer(asked, text("quick"))
        if request.method != "GET":
            await asyncio.Event().wait()
        return aiohttp_web.Response(status=405)

    async with scripted(handler) as url, outbound() as way_out:
        async with client(url, way_out, timing=timing) as connected:
            with pytest.raises(MCPError):
                await connected.call_tool("slow", {}, read_timeout_seconds=0.1)
            assert await called(connected, "quick") == "quick"
            left_at = time.monotonic()
        assert time.monotonic() - left_at < 1.0


async def test_configured_headers_go_to_their_own_server_only() -> None:
    """A redirect within the origin is followed, as it is a matter of a slash; one to elsewhere is not."""
    heard: list[str] = []

    async def elsewhere(request: aiohttp_web.Request) -> aiohttp_web.Response:
        heard.append(request.headers.get("Authorization", ""))
        return aiohttp_web.Response(status=500)

    async def slash(request: aiohttp_web.Request) -> aiohttp_web.Response:
        raise aiohttp_web.HTTPTemporaryRedirect("/mcp")

    async def away(request: aiohttp_web.Request) -> aiohttp_web.Response:
        raise aiohttp_web.HTTPTemporaryRedirect(f"{other}/mcp")

    async def handler(request: aiohttp_web.Request, asked: Any) -> aiohttp_web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer s3cret"
        return answer(asked, text("here")) if asked else aiohttp_web.Response(status=405)

    headers = {"authorization": "Bearer s3cret", "accept-encoding": "br"}
    async with listening({"/mcp": elsewhere}) as other, outbound() as way_out:
        routes = {"/mcp/": slash, "/away": away}
        async with scripted(handler, routes) as url:
            async with client(f"{url}/", way_out, headers=headers) as connected:
                assert await called(connected, "any") == "here"
            assert "not followed" in await failure(url.replace("/mcp", "/away"), way_out, headers=headers)
    assert heard == []
    assert not any("Accept-Encoding" in headers for _, _, headers in way_out.sent)


@pytest.mark.parametrize("url", ["https://h/mcp", "http://h:81/mcp", "http://other/mcp"])
async def test_requests_to_another_origin_are_blocked(url: str) -> None:
    server = McpServer(name="w", url="http://h/mcp", headers={"Authorization": "Bearer s3cret"})
    async with (
        outbound() as way_out,
        httpx2.AsyncClient(transport=OutboundTransport(server, way_out, MAX_EVENT, McpTiming())) as sender,
    ):
        refused = await sender.get(url)
    assert refused.status_code == 502
    assert way_out.sent == []
