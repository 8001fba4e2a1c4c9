"""An MCP server over HTTP with one search tool, which can require a token."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from support.mcp_http_servers import answer, listening, text

SEARCH = {
    "name": "search_notes",
    "description": "Searches the notes.",
    "inputSchema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}


@asynccontextmanager
async def search_server(said: str, token: str | None = None) -> AsyncIterator[str]:
    """Its address; each call of the tool returns `said`."""

    async def respond(request: web.Request) -> web.StreamResponse:
        if token is not None and request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        asked: Any = await request.json() if request.method == "POST" else {}
        match asked.get("method"):
            case "initialize":
                info, version = {"name": "notes", "version": "1"}, asked["params"]["protocolVersion"]
                capable = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
                return answer(asked, capable)
            case "tools/list":
                return answer(asked, {"tools": [SEARCH]})
            case "tools/call":
                return answer(asked, text(said))
            case "server/discover":
                return answer(asked, error={"code": -32601, "message": "What?"})
        return web.Response(status=202 if request.method == "POST" else 405)

    async with listening({"/mcp": respond}) as origin:
        yield f"{origin}/mcp"
