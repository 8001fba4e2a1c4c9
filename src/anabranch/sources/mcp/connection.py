"""What a tool replied, read block by block: what does not have its form is passed over, and does not cost the rest."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, cast

from mcp.client.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import (
    HEADER_MISMATCH,
    AudioContent,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    Implementation,
    RequestParamsMeta,
    ResourceLink,
    TextContent,
    Tool,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import Trouble, UpstreamError
from anabranch.domain.mcp import HOPS, McpServer
from anabranch.domain.model import Context, Query
from anabranch.sources.mcp.bounded_tasks import ended
from anabranch.sources.mcp.http_transport import web
from anabranch.sources.mcp.stdio_transport import stdio
from anabranch.sources.mcp.tool_selection import ToolChoice, arguments, choose
from anabranch.sources.mcp.transport_tap import SealedTransport, TappedTransport
from anabranch.telemetry.log import label

MAX_BLOCKS = 5_000
BLOCKS: Mapping[str, type[ContentBlock]] = {
    "text": TextContent,
    "image": ImageContent,
    "audio": AudioContent,
    "resource_link": ResourceLink,
    "resource": EmbeddedResource,
}


def salvaged(reply: Mapping[str, Any]) -> CallToolResult:
    if reply.get("resultType") == "input_required":
        raise UpstreamError("The server asks for more input, which a search cannot give it.", Trouble.REQUEST)
    if reply.keys().isdisjoint(("content", "structuredContent", "isError")):
        raise UpstreamError("The server's reply does not have the form that MCP prescribes.", Trouble.UNUSABLE)
    given = reply.get("content")
    blocks = given[:MAX_BLOCKS] if isinstance(given, list) else ()
    return CallToolResult(
        content=[block for one in blocks if (block := _block(one)) is not None],
        structured_content=reply.get("structuredContent"),
        is_error=reply.get("isError") is True,
    )


def _block(given: Any) -> ContentBlock | None:
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    model = BLOCKS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return None
    bare = {name: value for name, value in given.items() if name not in ("annotations", "_meta")}
    for tried in (given, bare):
        try:
            return model.model_validate(tried, by_name=False)
        except ValidationError:
            continue
    return None


MAX_PAGES = 20
MAX_TOOLS = 500


class McpConnection:
    """A server that answers. `ended` is set once it does so no more, or should not be asked any more, and `reason` says
    why. `silences` counts the calls in a row that ran out of time while it said nothing at all."""

    def __init__(self) -> None:
        self.client: Client
        self.choice: ToolChoice
        self.ended = asyncio.Event()
        self.stirred = asyncio.Event()
        self.reason = ""
        self.protocol = ""
        self.implementation: str | None = None
        self.changed = False
        self.silences = 0

    def greeted(self) -> None:
        self.protocol = self.client.protocol_version
        info = self.client.server_info
        self.implementation = label(f"{info.name} {info.version}".strip()) if info else None

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()
            self.stirred.set()

    def heard(self) -> None:
        self.silences = 0

    def stir(self) -> None:
        """Something is to be looked into."""
        self.stirred.set()

    async def noticed(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.changed = True
            self.stir()

    @property
    def mode(self) -> str:
        """How to greet the server the next time."""
        return "auto" if self.protocol in MODERN_PROTOCOL_VERSIONS else "legacy"

    async def find_tool(self, server: McpServer) -> None:
        """Choose again, from what the server has now."""
        self.changed = False
        # In a thread: schemas are a stranger's, and may take long to read.
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

    async def speaks(self) -> None:
        """Come back when the server has answered something, whatever it is."""
        with suppress(MCPError):
            await self.client.list_tools()

    async def ask(self, server: McpServer, query: Query, context: Context) -> CallToolResult:
        """What the tool replies. It is taken as it is: a server that breaks its own output schema, or MCP's, has still
        found something."""
        whole = query.text.encode(errors="replace").decode()
        given = arguments(self.choice, server, whole, query.limit)
        request = CallToolRequest(
            params=CallToolRequestParams(name=self.choice.tool, arguments=given, _meta=_trace(context))
        )
        try:
            answer = await self.client.session.send_request(request, CallToolResult)
        except MCPError as error:
            if error.code != HEADER_MISMATCH or self.protocol not in MODERN_PROTOCOL_VERSIONS:
                raise
            # The tool's schema has changed since it was listed, and with it what the request's headers must say.
            await self.find_tool(server)
            answer = await self.client.session.send_request(request, CallToolResult)
        sealed = answer.structured_content
        assert isinstance(sealed, SealedTransport), "every reply to a call is"
        return salvaged(sealed.reply)

    async def follow(self) -> None:
        """Servers of the new era tell of changed tools only those who have asked to be told."""
        tools = self.client.server_capabilities.tools
        if self.protocol not in MODERN_PROTOCOL_VERSIONS or tools is None or not tools.list_changed:
            return
        with suppress(MCPError, SubscriptionLost, TimeoutError):
            async with self.client.listen(tools_list_changed=True) as news:
                async for _ in news:
                    self.changed = True
                    self.stir()


@asynccontextmanager
async def connected(
    server: McpServer, outbound: Outbound, *, mode: str, max_reply_bytes: int, heard: Callable[[str], None]
) -> AsyncIterator[McpConnection]:
    """A server that has been greeted and whose tool has been found. To be entered and left by one task. `mode` is how
    it is greeted: as servers of either era (`auto`) or only as those of the old one (`legacy`)."""
    connection = McpConnection()
    lost = "The server's process ended." if server.url is None else "The connection to the server was lost."
    by_url = server.url is not None
    transport = (
        web(server, outbound, max_event=max_reply_bytes)
        if by_url
        else stdio(server, max_line=max_reply_bytes, heard=heard)
    )
    connection.client = Client(
        TappedTransport(transport, connection.heard, lambda why: connection.end(why or lost)),
        client_info=Implementation(name="anabranch", version=version("anabranch")),
        message_handler=connection.noticed,
        mode=mode,
        cache=None,
    )
    try:
        async with connection.client:
            connection.greeted()
            await connection.find_tool(server)
            following = asyncio.create_task(connection.follow())
            try:
                yield connection
            finally:
                await ended(following)
    except Exception as error:
        if connection.reason:
            raise UpstreamError(connection.reason, Trouble.DOWN) from error
        raise


def _trace(context: Context) -> RequestParamsMeta:
    carried = {"traceparent": context.traceparent, "tracestate": context.tracestate, HOPS: context.hops + 1}
    return cast("RequestParamsMeta", {name: value for name, value in carried.items() if value})
