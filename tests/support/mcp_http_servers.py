"""MCP servers over HTTP for tests: real ones of both protocols, and scripted ones."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import uvicorn
from aiohttp import web as aiohttp_web
from aiohttp.test_utils import TestServer
from mcp.client.client import Client

from anabranch.domain.contracts import Exchange
from anabranch.domain.mcp import McpServer
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.sources.mcp import process_guard
from anabranch.sources.mcp.http_transport import http_transport
from anabranch.sources.mcp.services import McpTiming
from conftest import EndsAtOnce
from support.mcp_children import ENV, NODE_BIN

MAX_REPLY = 100_000
MAX_EVENT = 16 * 1024 * 1024
Plain = Callable[[aiohttp_web.Request], Awaitable[aiohttp_web.StreamResponse]]
Handler = Callable[[aiohttp_web.Request, Any], Awaitable[aiohttp_web.StreamResponse]]


class Recording:
    """The real way out, which remembers what was sent. Nothing is allowed but what the operator has configured."""

    def __init__(self, inner: AiohttpOutbound) -> None:
        self._inner = inner
        self.sent: list[tuple[str, str, Mapping[str, str]]] = []

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        operator: bool = False,
        public_only: bool = False,
    ) -> AbstractAsyncContextManager[Exchange]:
        self.sent.append((method, url, headers))
        return self._inner.request(method, url, headers=headers, body=body, operator=operator, public_only=public_only)


@asynccontextmanager
async def outbound(max_reply_bytes: int = MAX_REPLY) -> AsyncIterator[Recording]:
    inner = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=max_reply_bytes)
    try:
        yield Recording(inner)
    finally:
        await inner.close()


@asynccontextmanager
async def client(
    url: str,
    way_out: Recording,
    headers: Mapping[str, str] | None = None,
    timing: McpTiming | None = None,
    **given: Any,
) -> AsyncIterator[Client]:
    server = McpServer(name="w", url=url, headers=headers or {})
    async with Client(
        http_transport(server, way_out, max_event=MAX_EVENT, timing=timing or McpTiming()), mode="auto", **given
    ) as connected:
        yield connected


@asynccontextmanager
async def everything() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """The reference server of the old era, under the process guard: Node is a grandchild here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours, theirs = socket.socketpair()
    with ours:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", process_guard.__file__, str(theirs.fileno())),
            *(str(NODE_BIN / "mcp-server-everything"), "streamableHttp"),
            env=ENV | {"PORT": str(port)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"listening" not in await process.stderr.readline():
                pass
        try:
            yield f"http://127.0.0.1:{port}/mcp", process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """An application of the SDK's own, under uvicorn."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="on")
    config.load()
    server = EndsAtOnce(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        await server.shutdown()


@asynccontextmanager
async def scripted(handler: Handler, routes: Mapping[str, Plain] | None = None) -> AsyncIterator[str]:
    """A server that greets as one of the old era and leaves everything else to a handler, which gets the message."""

    async def respond(request: aiohttp_web.Request) -> aiohttp_web.StreamResponse:
        asked = await request.json() if request.method == "POST" else {}
        match asked.get("method"):
            case "server/discover":
                return answer(asked, error={"code": -32601, "message": "What?"})
            case "initialize":
                info = {"name": "scripted", "version": "1"}
                version = asked["params"]["protocolVersion"]
                reply = answer(asked, {"protocolVersion": version, "capabilities": {}, "serverInfo": info})
                reply.headers["Mcp-Session-Id"] = "one"
                return reply
            case "tools/list":
                return answer(asked, {"tools": []})
            case "notifications/initialized":
                return aiohttp_web.Response(status=202)
        return await handler(request, asked)

    async with listening({"/mcp": respond, **(routes or {})}) as origin:
        yield f"{origin}/mcp"


@asynccontextmanager
async def listening(routes: Mapping[str, Plain]) -> AsyncIterator[str]:
    app = aiohttp_web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    async with TestServer(app, handler_cancellation=True) as server:
        yield f"http://127.0.0.1:{server.port}"


def answer(asked: Any, result: Any = None, **more: Any) -> aiohttp_web.Response:
    said = {"result": result} if result is not None else more
    return aiohttp_web.json_response({"jsonrpc": "2.0", "id": asked["id"], **said})


def text(said: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": said}]}
