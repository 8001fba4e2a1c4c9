"""MCP over HTTP: POST /mcp, both eras of the protocol, without sessions."""

import asyncio
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.configuration.extras import require
from anabranch.domain.errors import AnabranchError, Forbidden
from anabranch.entrypoints.http import rate_headers
from anabranch.entrypoints.http.access import Access, is_local_name
from anabranch.entrypoints.http.asgi import Headers, header, send_json
from anabranch.entrypoints.http.errors import body_of as error_body
from anabranch.entrypoints.http.errors import status_of
from anabranch.entrypoints.http.knowledge_errors import Gone, body_of
from anabranch.entrypoints.mcp.question_tools import McpCaller
from anabranch.telemetry.log import Log

if TYPE_CHECKING:  # MCP's SDK comes with it, which takes half a second
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from anabranch.entrypoints.mcp.server import Request

SURFACE = "mcp"
ASKER = "anabranch.asker"
MORE: Mapping[int, Headers] = {
    401: ((b"www-authenticate", b"Bearer"),),
    408: ((b"connection", b"close"),),  # the rest of the request is not read
    413: ((b"connection", b"close"),),
}
FOREIGN = "A web page of another origin may not call this; name its origin in CORS_ORIGINS if it should."


class McpSurface:
    """Loads with its first request. Workers share no sessions, so there are none: each request stands by itself."""

    def __init__(self, anabranch: Anabranch, log: Log) -> None:
        self._anabranch = anabranch
        self._access = Access(anabranch)
        self._origins = frozenset(anabranch.settings.cors_origins) - {"*"}
        self._log = log
        self._closing = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[StreamableHTTPSessionManager] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            require("mcp", "The address /mcp")
            self._check_origin(scope)
            await self._anabranch.check(SURFACE)
            caller = await self._access.caller(scope)
            body = await body_of(receive, self._anabranch.settings.max_request_bytes)
        except Gone:
            return
        except AnabranchError as error:
            self._anabranch.turned_away(SURFACE, error.code)
            status = status_of(error)
            more = [*rate_headers.refused(error, status), *MORE.get(status, ())]
            await send_json(send, status, error_body(error), more)
            return
        context = self._access.context(scope, caller, SURFACE)
        scope[ASKER] = McpCaller(context, caller, self._access.vouched(scope, caller))
        manager = await self._manager()
        await manager.handle_request(scope, _again(body, receive), send)

    async def close(self) -> None:
        """What is still under way ends with this."""
        self._closing.set()
        if self._keeper is not None:
            await asyncio.wait([self._keeper])

    def _check_origin(self, scope: Scope) -> None:
        """A web page that pretends to be ours by a name of its own (DNS rebinding) has no key, and no local name."""
        origin, host = header(scope, b"origin"), header(scope, b"host") or ""
        if origin is None or origin in self._origins:
            return
        ours = origin.partition("://")[2] == host
        if not (ours and (is_local_name(host) or header(scope, b"authorization") is not None)):
            raise Forbidden(FOREIGN)

    async def _manager(self) -> "StreamableHTTPSessionManager":
        if self._loaded is None:
            self._loaded = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._loaded))
        return await asyncio.shield(self._loaded)

    async def _keep(self, loaded: "asyncio.Future[StreamableHTTPSessionManager]") -> None:
        """The SDK wants its tasks begun and ended in one of ours."""
        try:
            manager = await asyncio.to_thread(_loaded, self._anabranch, self._log)
        except Exception as error:  # noqa: BLE001  those who wait are told; the next request tries again
            self._loaded = None
            loaded.set_exception(error)
            return
        async with manager.run():
            loaded.set_result(manager)
            await self._closing.wait()


def _loaded(anabranch: Anabranch, log: Log) -> "StreamableHTTPSessionManager":
    # The whole of it first: a part of it does not wait for another thread that is loading the whole, and gets half.
    import_module("mcp")
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager  # noqa: PLC0415
    from sse_starlette.sse import AppStatus  # noqa: PLC0415

    from anabranch.entrypoints.mcp.server import server  # noqa: PLC0415

    # It would cut off every answer at the signal to stop; those that are under way have the time that the drain gives.
    AppStatus.enable_automatic_graceful_drain = False
    largest = anabranch.settings.max_request_bytes
    return StreamableHTTPSessionManager(server(anabranch, log, _asker), stateless=True, max_request_body_size=largest)


def _asker(request: "Request") -> McpCaller:
    assert request.request is not None, "over HTTP there is always a request"
    asker: McpCaller = request.request.scope[ASKER]
    return asker


def _again(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then whatever else the client does."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Any:
        return unread.pop() if unread else await receive()

    return read
