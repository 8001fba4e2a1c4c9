"""MCP servers over HTTP that announce changed tools: the tools are listed again, in both eras of the protocol."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from mcp.server.mcpserver import Context, MCPServer

from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Status
from support.mcp_http_servers import answer, listening, served, text
from support.mcp_pool_fixtures import ask, health, pooled, until

pytestmark = pytest.mark.xdist_group("mcp")

TAKES = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
CHANGED = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}


@asynccontextmanager
async def legacy() -> AsyncIterator[str]:
    """Its tool has another name after the first call; it says so on the stream of a GET."""
    names, called = ["search"], asyncio.Event()

    async def announce(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await called.wait()
        await response.write(b"event: message\ndata: " + json.dumps(CHANGED).encode() + b"\n\n")
        await asyncio.Event().wait()
        return response

    async def respond(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return await announce(request) if request.method == "GET" else web.Response()
        asked = await request.json()
        match asked["method"]:
            case "initialize":
                can = {"tools": {"listChanged": True}}
                info = {"name": "old", "version": "1"}
                reply = answer(asked, {"protocolVersion": "2025-06-18", "capabilities": can, "serverInfo": info})
                reply.headers["Mcp-Session-Id"] = "one"
                return reply
            case "tools/list":
                return answer(asked, {"tools": [{"name": names[-1], "inputSchema": TAKES}]})
            case "tools/call" if asked["params"]["name"] == names[-1]:
                names.append("find")
                called.set()
                return answer(asked, text("here"))
            case "notifications/initialized":
                return web.Response(status=202)
        return answer(asked, error={"code": -32601, "message": "What?"})

    async with listening({"/mcp": respond}) as origin:
        yield f"{origin}/mcp"


@asynccontextmanager
async def modern() -> AsyncIterator[str]:
    """The same with the SDK's server, which announces it to those who have subscribed."""
    server = MCPServer("new", tools=[])

    async def find(query: str) -> str:
        return query

    @server.tool()
    async def search(query: str, context: Context[Any]) -> str:
        server.remove_tool("search")
        server.add_tool(find)
        await context.notify_tools_changed()
        return query

    async with served(server.streamable_http_app()) as url:
        yield url


@pytest.mark.parametrize("era", [legacy, modern])
async def test_the_tools_of_an_http_server_are_listed_again_after_it_announced_a_change(era: Any) -> None:
    async with era() as url, pooled(McpServer(name="web", url=url), alone=False) as pool:
        assert (await ask(pool, "web", "first")).status is Status.SUCCESS
        await until(lambda: health(pool, "web").tool == "find")
        assert (await ask(pool, "web", "second")).status is Status.SUCCESS
        assert health(pool, "web").reconnects == 0
