"""A connection to an MCP server: protocol handshake, choice of the tool, calls, and notifications of changed tools."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import cast

from mcp.client.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import (
    HEADER_MISMATCH,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    RequestParamsMeta,
    Tool,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.domain.mcp import HOPS, McpServer
from anabranch.domain.model import Context, Query
from anabranch.sources.mcp.framing import RawReply, TappedTransport
from anabranch.sources.mcp.http_transport import http_transport
from anabranch.sources.mcp.results.extraction import tool_result
from anabranch.sources.mcp.services import McpTiming, cancel_until_done
from anabranch.sources.mcp.stdio_transport import stdio_transport
from anabranch.sources.mcp.tool_selection import ToolChoice, arguments, choose
from anabranch.telemetry.log import label

MAX_PAGES = 20
MAX_TOOLS = 500


class McpConnection:
    """A connected server. `ended` is set when the connection is lost or given up, and `reason` says why. `unanswered`
    counts the calls in a row that timed out while the server sent nothing at all."""

    def __init__(self) -> None:
        self.client: Client
        self.choice: ToolChoice
        self.ended = asyncio.Event()
        self.wakeup = asyncio.Event()
        self.reason = ""
        self.protocol = ""
        self.implementation: str | None = None
        self.tools_changed = False
        self.unanswered = 0

    def read_server_info(self) -> None:
        self.protocol = self.client.protocol_version
        info = self.client.server_info
        self.implementation = label(f"{info.name} {info.version}".strip()) if info else None

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()
            self.wakeup.set()

    def on_message(self) -> None:
        self.unanswered = 0

    async def on_notification(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._mark_tools_changed()

    def _mark_tools_changed(self) -> None:
        self.tools_changed = True
        self.wakeup.set()

    @property
    def mode(self) -> str:
        """The handshake to begin the next connection with."""
        return "auto" if self.protocol in MODERN_PROTOCOL_VERSIONS else "legacy"

    async def find_tool(self, server: McpServer) -> None:
        """Choose the tool from the server's current list."""
        self.tools_changed = False
        # In a thread: a server's schemas may take long to read.
        self.choice = await asyncio.to_thread(choose, server, await self._tools())

    async def _tools(self) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None or len(tools) >= MAX_TOOLS:
                break
        return tools[:MAX_TOOLS]

    async def probe(self) -> None:
        """Return when the server has answered, even with an error."""
        with suppress(MCPError):
            await self.client.list_tools()

    async def ask(self, server: McpServer, query: Query, context: Context) -> CallToolResult:
        """Call the tool. A reply that violates the tool's output schema or MCP's is still used."""
        text = query.text.encode(errors="replace").decode()
        given = arguments(self.choice, server, text, query.limit)
        request = CallToolRequest(
            params=CallToolRequestParams(name=self.choice.tool, arguments=given, _meta=_request_meta(context))
        )
        try:
            answer = await self.client.session.send_request(request, CallToolResult)
        except MCPError as error:
            if error.code != HEADER_MISMATCH or self.protocol not in MODERN_PROTOCOL_VERSIONS:
                raise
            # The tool's schema, and with it the required headers, have changed since it was listed.
            await self.find_tool(server)
            answer = await self.client.session.send_request(request, CallToolResult)
        raw = answer.structured_content
        assert isinstance(raw, RawReply), "the tap wraps every reply to a call"
        return tool_result(raw.reply)

    async def subscribe(self) -> None:
        """Servers of the modern protocol send notifications of changed tools only to subscribers."""
        tools = self.client.server_capabilities.tools
        if self.protocol not in MODERN_PROTOCOL_VERSIONS or tools is None or not tools.list_changed:
            return
        with suppress(MCPError, SubscriptionLost, TimeoutError):
            async with self.client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._mark_tools_changed()


@asynccontextmanager
async def connected(
    server: McpServer,
    outbound: Outbound,
    *,
    mode: str,
    max_reply_bytes: int,
    on_output: Callable[[str], None],
    timing: McpTiming | None = None,
) -> AsyncIterator[McpConnection]:
    """A server after the handshake and the choice of its tool. One task must enter and leave it. `mode` is the
    handshake: of either protocol (`auto`) or only of the one before 2026 (`legacy`)."""
    timing = timing or McpTiming()
    connection = McpConnection()
    lost = "The server's process ended." if server.url is None else "The connection to the server was lost."
    transport = (
        stdio_transport(server, max_line=max_reply_bytes, on_output=on_output, timing=timing)
        if server.url is None
        else http_transport(server, outbound, max_event=max_reply_bytes, timing=timing)
    )
    connection.client = Client(
        TappedTransport(transport, connection.on_message, lambda why: connection.end(why or lost)),
        client_info=Implementation(name="anabranch", version=version("anabranch")),
        message_handler=connection.on_notification,
        mode=mode,
        cache=None,
    )
    try:
        async with connection.client:
            connection.read_server_info()
            await connection.find_tool(server)
            subscription = asyncio.create_task(connection.subscribe())
            try:
                yield connection
            finally:
                await cancel_until_done(subscription)
    except Exception as error:
        if connection.reason:
            raise UpstreamError(connection.reason, FailureKind.DOWN) from error
        raise


def _request_meta(context: Context) -> RequestParamsMeta:
    fields = {"traceparent": context.traceparent, "tracestate": context.tracestate, HOPS: context.hops + 1}
    return cast("RequestParamsMeta", {name: value for name, value in fields.items() if value})
