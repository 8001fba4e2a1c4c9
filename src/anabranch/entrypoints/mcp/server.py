"""The MCP server: the tools under MCP's own names, for whichever transport."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
)

from anabranch.app import Anabranch
from anabranch.domain.mcp import HOPS
from anabranch.entrypoints.mcp.question_tools import McpCaller
from anabranch.entrypoints.mcp.tools import Tools
from anabranch.telemetry.log import Log

Request = ServerRequestContext[Any, Any]


class _Server(Server[Any]):
    """One whose instructions are those of the moment: the configuration may be read again."""

    def __init__(self, tools: Tools, *given: Any, **more: Any) -> None:
        self._tools = tools
        super().__init__(*given, **more)

    @property
    def instructions(self) -> str:
        return self._tools.instructions

    @instructions.setter
    def instructions(self, _: str | None) -> None:
        """The SDK's own are none."""


def server(anabranch: Anabranch, log: Log, asker: Callable[[Request], McpCaller]) -> Server[Any]:
    """`asker` says who has sent a request."""
    tools = Tools(anabranch, log)

    async def list_tools(request: Request, _params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=list(tools.listed(vouched=asker(request).vouched)))

    async def call_tool(request: Request, params: CallToolRequestParams) -> CallToolResult:
        progress = request.session.report_progress
        result = await tools.call(params.name, params.arguments or {}, _further(asker(request), params), progress)
        if result is None:
            raise MCPError(code=INVALID_PARAMS, message=f"Unknown tool: {params.name[:100]}")
        return result

    return _Server(
        tools,
        "anabranch",
        version=version("anabranch"),
        title="Anabranch",
        get_tool_input_schema=tools.input_schema,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _further(asker: McpCaller, params: CallToolRequestParams) -> McpCaller:
    """Another Anabranch says how far the question has come."""
    hops = (params.meta or {}).get(HOPS)
    if not isinstance(hops, int) or not 0 < hops < 100:
        return asker
    return asker._replace(context=msgspec.structs.replace(asker.context, hops=int(hops)))
