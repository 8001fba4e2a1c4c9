"""MCP over HTTP: POST /mcp, both versions of the protocol, without sessions."""

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope

from anabranch.app.anabranch import Anabranch
from anabranch.configuration.extras import require
from anabranch.domain.errors import Forbidden
from anabranch.entrypoints.http.access import Access, is_local_name
from anabranch.entrypoints.http.errors import PLAIN
from anabranch.entrypoints.http.operations import Call, EventStream, Operation, header
from anabranch.entrypoints.mcp.question_tools import McpCaller
from anabranch.knowledge.model import Caller
from anabranch.telemetry.log import Log

if TYPE_CHECKING:  # MCP's SDK comes with it, which takes half a second
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from anabranch.entrypoints.mcp.server import Request

CALLER = "anabranch.mcp_caller"
# A question and its options; what is decoded may be many times as large.
MAX_REQUEST_BYTES = 256 * 1024


class McpSurface:
    """Loads the MCP SDK with the first request. Workers share no sessions, so there are none."""

    def __init__(self, anabranch: Anabranch, access: Access, log: Log) -> None:
        self._anabranch = anabranch
        self._access = access
        self._origins = frozenset(anabranch.settings.cors_origins) - {"*"}
        self._log = log
        self._closing = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[StreamableHTTPSessionManager] | None = None

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                "POST",
                "/mcp",
                "mcp",
                "Call MCP tools (JSON-RPC, both versions of the protocol, without sessions)",
                self._handle,
                PLAIN,
                request_type=bytes,
                response_types=(bytes,),
                stream=EventStream(
                    "McpEvent", "A client that accepts only `text/event-stream` gets the response as an event.", ()
                ),
                statuses={
                    200: "The response.",
                    202: "The notification was accepted.",
                    400: "Not a valid JSON-RPC message.",
                    406: "`Accept` must name `application/json` and `text/event-stream`.",
                    415: "`Content-Type` must be `application/json`.",
                },
                errors=(401, 403, 413, 422, 503),
                # Each tool has a scope of its own, too.
                scope="ask",
                identify=self._caller,
                surface="mcp",
                admission=True,
                max_request_bytes=MAX_REQUEST_BYTES,
            )
        ]

    async def _caller(self, scope: Scope) -> Caller:
        require("mcp", "The address /mcp")
        self._check_origin(scope)
        return await self._access.caller(scope)

    async def _handle(self, call: Call[bytes]) -> None:
        grants = self._access.grants(call.scope, call.caller)
        call.scope[CALLER] = McpCaller(self._access.context(call), call.caller, grants)
        manager = await self._manager()
        await manager.handle_request(call.scope, _replaying(call.body, call.receive), call.send)

    async def close(self) -> None:
        """Ends the requests that still run."""
        self._closing.set()
        if self._keeper is not None:
            await asyncio.wait([self._keeper])

    def _check_origin(self, scope: Scope) -> None:
        """Refuses DNS rebinding: a web page that reaches us by a name of its own has no key, and no local name."""
        origin, host = header(scope, b"origin"), header(scope, b"host") or ""
        if origin is None or origin in self._origins:
            return
        ours = origin.partition("://")[2] == host
        if not (ours and (is_local_name(host) or header(scope, b"authorization") is not None)):
            raise Forbidden(
                "A web page of another origin may not call this; name its origin in CORS_ORIGINS if it should."
            )

    async def _manager(self) -> "StreamableHTTPSessionManager":
        if self._loaded is None:
            self._loaded = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._loaded))
        return await asyncio.shield(self._loaded)

    async def _keep(self, loaded: "asyncio.Future[StreamableHTTPSessionManager]") -> None:
        """Runs the SDK's task group, which must begin and end in one task."""
        try:
            manager = await asyncio.to_thread(_loaded, self._anabranch, self._log)
        except Exception as error:  # noqa: BLE001  the waiting requests get it; the next request tries again
            self._loaded = None
            loaded.set_exception(error)
            return
        async with manager.run():
            loaded.set_result(manager)
            await self._closing.wait()


def _loaded(anabranch: Anabranch, log: Log) -> "StreamableHTTPSessionManager":
    # The whole package first: importing a part while another thread imports the whole gets a half-loaded module.
    import_module("mcp")
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager  # noqa: PLC0415
    from sse_starlette.sse import AppStatus  # noqa: PLC0415

    from anabranch.entrypoints.mcp.server import Tools, server  # noqa: PLC0415

    # It would end every response at the stop signal; running ones have until the end of the drain.
    AppStatus.enable_automatic_graceful_drain = False
    return StreamableHTTPSessionManager(
        # Without `ToolChanges`: there is no lasting connection to send them on.
        server(Tools(anabranch, log), _identify),
        stateless=True,
        max_request_body_size=MAX_REQUEST_BYTES,
    )


def _identify(request: "Request") -> McpCaller:
    assert request.request is not None, "over HTTP there is always a request"
    caller: McpCaller = request.request.scope[CALLER]
    return caller


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A receive that returns the body again, then the client's next messages."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Any:
        return unread.pop() if unread else await receive()

    return read
