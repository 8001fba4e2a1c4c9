"""A connection to an MCP server: protocol handshake, choice of the tool, calls, notifications of changed tools, and
messages for its failures. It imports the SDK, so it is loaded late."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import cast

from mcp.client.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    URL_ELICITATION_REQUIRED,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    RequestParamsMeta,
    Tool,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from anabranch.domain.errors import AnabranchError, FailureKind, UpstreamError, UpstreamFailure
from anabranch.domain.mcp import HOPS, McpServer
from anabranch.domain.model import Context, Query, SourceReply, Status
from anabranch.network.redaction import Secrets, of_server, quoted
from anabranch.sources.mcp.framing import RawReply, tapped
from anabranch.sources.mcp.http_transport import http_transport
from anabranch.sources.mcp.results.extraction import extract, texts, tool_result
from anabranch.sources.mcp.services import EXPIRED, McpTiming, PoolServices, cancel_until_done, failed, located
from anabranch.sources.mcp.stdio_transport import stdio_transport
from anabranch.sources.mcp.tool_selection import NoTool, ToolChoice, arguments, choose
from anabranch.telemetry.log import label

MAX_PAGES = 20
MAX_TOOLS = 500
LOST = "The connection to the server was lost."
# Codes that concern the request, not the state of the server.
REQUEST_ERRORS = frozenset(
    {
        INVALID_PARAMS,
        INVALID_REQUEST,
        METHOD_NOT_FOUND,
        MISSING_REQUIRED_CLIENT_CAPABILITY,
        URL_ELICITATION_REQUIRED,
    }
)
UNREACHABLE = frozenset({CONNECTION_CLOSED, REQUEST_TIMEOUT})
# Messages of the SDK.
SDK_EXPIRED, SDK_CLOSED = "Session terminated", "Connection closed"
PARSE_FAILED = re.compile(r"Failed to parse (?:JSON response|SSE message): (.*)")
WRONG_CONTENT_TYPE = re.compile(r"Unexpected content type: ([\w.+/-]{0,100})")


class McpConnection:
    """A connected server. `ended` is set when the connection is lost or given up, and `reason` says why. `unanswered`
    counts the calls in a row that timed out while the server sent nothing at all."""

    def __init__(self, server: McpServer, timing: McpTiming) -> None:
        self.client: Client
        self.choice: ToolChoice
        self.ended = asyncio.Event()
        self.wakeup = asyncio.Event()
        self.reason = ""
        self.protocol = ""
        self.implementation: str | None = None
        self.tools_changed = False
        self.unanswered = 0
        self._server = server
        self._timing = timing

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
    def is_silent(self) -> bool:
        return self.unanswered >= self._timing.silent_calls

    def count_unanswered(self) -> None:
        self.unanswered += 1
        if self.is_silent:
            self.wakeup.set()

    @property
    def mode(self) -> str:
        """The handshake to begin the next connection with."""
        return "auto" if self.protocol in MODERN_PROTOCOL_VERSIONS else "legacy"

    async def find_tool(self) -> None:
        """Choose the tool from the server's current list."""
        self.tools_changed = False
        # In a thread: a server's schemas may take long to read.
        self.choice = await asyncio.to_thread(choose, self._server, await self._tools())

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

    async def call(self, query: Query, context: Context) -> CallToolResult:
        """Call the tool. A reply that violates the tool's output schema or MCP's is still used."""
        text = query.text.encode(errors="replace").decode()
        meta = {"traceparent": context.traceparent, "tracestate": context.tracestate, HOPS: context.hops + 1}
        request = CallToolRequest(
            params=CallToolRequestParams(
                name=self.choice.tool,
                arguments=arguments(self.choice, self._server, text, query.limit),
                _meta=cast("RequestParamsMeta", {name: value for name, value in meta.items() if value}),
            )
        )
        try:
            answer = await self.client.session.send_request(request, CallToolResult)
        except MCPError as error:
            if error.code != HEADER_MISMATCH or self.protocol not in MODERN_PROTOCOL_VERSIONS:
                raise
            # The tool's schema, and with it the required headers, have changed since it was listed.
            await self.find_tool()
            answer = await self.client.session.send_request(request, CallToolResult)
        raw = answer.structured_content
        assert isinstance(raw, RawReply), "the tap wraps every reply to a call"
        return tool_result(raw.reply)

    def call_failed(self, error: Exception) -> SourceReply | None:
        """The reply for a failed call. None if the session has expired: the server has not processed the call."""
        is_http = self._server.url is not None
        code, message = (error.code, error.message) if isinstance(error, MCPError) else (0, "")
        if is_http and code == INVALID_REQUEST and message == SDK_EXPIRED:
            self.end(EXPIRED)
        if self.reason == EXPIRED:
            return None
        if is_http and code in UNREACHABLE:
            self.count_unanswered()
        elif not is_http and message == SDK_CLOSED:
            self.end(LOST)
        return call_error(error, self._server, self.reason)

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
    server: McpServer, services: PoolServices, mode: str, on_output: Callable[[str], None]
) -> AsyncIterator[McpConnection]:
    """A server after the handshake and the choice of its tool. One task must enter and leave it. `mode` is the
    handshake: of either protocol (`auto`) or only of the one before 2026 (`legacy`)."""
    timing, max_bytes = services.timing, services.max_reply_bytes
    connection = McpConnection(server, timing)
    if server.url is None:
        lost = "The server's process ended."
        transport = stdio_transport(server, max_line=max_bytes, on_output=on_output, timing=timing)
    else:
        lost = LOST
        transport = http_transport(server, services.outbound, max_event=max_bytes, timing=timing)
    connection.client = Client(
        tapped(transport, connection.on_message, lambda why: connection.end(why or lost)),
        client_info=Implementation(name="anabranch", version=version("anabranch")),
        message_handler=connection.on_notification,
        mode=mode,
        cache=None,
    )
    try:
        async with connection.client as client:
            connection.protocol = client.protocol_version
            if info := client.server_info:
                connection.implementation = label(f"{info.name} {info.version}".strip())
            await connection.find_tool()
            subscription = asyncio.create_task(connection.subscribe())
            try:
                yield connection
            finally:
                await cancel_until_done(subscription)
    except Exception as error:
        if connection.reason:
            raise UpstreamError(connection.reason, FailureKind.DOWN) from error
        raise


def connection_error(error: BaseException, server: McpServer, within_s: float) -> str:
    """Why a connection failed; of a server at a URL, also where."""
    name = f"The server{located(server)}"
    match _root(error):
        case AnabranchError() as known:
            return known.message
        case TimeoutError():
            return f"{name} was not ready within {within_s:.3g} seconds."
        case FileNotFoundError():
            return "The server's command was not found: check `command` and `cwd`."
        case PermissionError():
            return "The server's command cannot be executed: check its permissions."
        case MCPError() as mcp_error if mcp_error.code == CONNECTION_CLOSED and server.url is None:
            return "The server's process ended before it was ready."
        case MCPError() as mcp_error if mcp_error.code in UNREACHABLE:
            return f"{name} could not be reached: {sanitize(mcp_error.message, server)}"
        case MCPError() as mcp_error if message := _unreadable_message(mcp_error, server):
            return message
        case MCPError() as mcp_error:
            return f"The server refused the connection: {sanitize(mcp_error.message, server)}"
        case ValidationError():
            return "The server's handshake or list of tools does not follow the MCP specification."
        case other:
            return f"The connection failed: {type(other).__name__}."


async def source_reply(answer: CallToolResult, server: McpServer, within_s: float) -> SourceReply:
    """The passages in a tool's answer, or the error that it reports. TimeoutError if they take too long to read."""
    if answer.is_error:
        message = f"The server's tool reports an error: {sanitize(' '.join(texts(answer)), server)}"
        return failed(server.name, message, fault=False)
    try:
        passages = await extract(answer, server, within_s)
    except AnabranchError as error:
        return failed(server.name, error.message, fault=False)
    return SourceReply(path=server.name, status=Status.SUCCESS, passages=passages)


def call_error(error: BaseException, server: McpServer, lost: str) -> SourceReply:
    """The reply for a failed call; `lost` says why the connection ended, if it has."""
    match _root(error):
        case MCPError() as mcp_error if mcp_error.code in UNREACHABLE:
            # Servers also use these codes for their own failures.
            return failed(server.name, lost or f"The call failed: {sanitize(mcp_error.message, server)}")
        case MCPError() as mcp_error if message := _unreadable_message(mcp_error, server):
            return failed(server.name, message)
        case MCPError() as mcp_error:
            message = f"The server refused the call: {sanitize(mcp_error.message, server)}"
            return failed(server.name, message, fault=mcp_error.code not in REQUEST_ERRORS)
        case ValidationError():
            return failed(server.name, "The server's reply does not follow the MCP specification.")
        case AnabranchError() as known:
            return failed(
                server.name, known.message, fault=not isinstance(known, UpstreamFailure) or known.failure_kind.fault
            )
        case other:
            return failed(server.name, lost or f"The call failed: {type(other).__name__}.")


def is_misconfigured(error: BaseException) -> bool:
    """Whether the operator must change the configuration. The output of the server's process is then unrelated."""
    return isinstance(_root(error), NoTool)


def _unreadable_message(error: MCPError, server: McpServer) -> str:
    """The message for an HTTP reply that is not an MCP message. The SDK's message is many lines of parser output."""
    if server.url is not None and error.code == PARSE_ERROR and (found := PARSE_FAILED.match(error.message)):
        if "validation error" in found[1]:
            return "The server's reply is not JSON, or not an MCP message: check `url`."
        return f"The server's reply cannot be read: {sanitize(found[1], server)}"
    if server.url is not None and error.code == INVALID_REQUEST and (found := WRONG_CONTENT_TYPE.match(error.message)):
        kind = f"of type {found[1]}" if found[1] else "of unknown type"
        return f"The server's reply is {kind}, which is not an MCP message: check `url`."
    return ""


def sanitize(text: str, server: McpServer) -> str:
    """Text of a server as one short line without secrets of its configuration."""
    line = quoted(text, Secrets(of_server(server)))
    return line if line.endswith((".", "!", "?", "\u2026")) else f"{line or 'no message'}."


def _root(error: BaseException) -> BaseException:
    """The first exception in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
