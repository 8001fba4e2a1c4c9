"""Error messages for failed connections and calls. It imports the SDK, so it is loaded late."""

import re

from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    URL_ELICITATION_REQUIRED,
    CallToolResult,
    TextContent,
)
from pydantic import ValidationError

from anabranch.domain.errors import AnabranchError, UpstreamFailure
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import SourceReply, Status
from anabranch.network.redaction import Secrets, of_server, quoted
from anabranch.sources.mcp.tool_selection import NoTool

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
EXPIRED, CLOSED = "Session terminated", "Connection closed"
PARSE_FAILED = re.compile(r"Failed to parse (?:JSON response|SSE message): (.*)")
WRONG_CONTENT_TYPE = re.compile(r"Unexpected content type: ([\w.+/-]{0,100})")


def connection_error(error: BaseException, server: McpServer, within_s: float) -> str:
    """Why a connection failed."""
    match _root(error):
        case AnabranchError() as ours:
            return ours.message
        case TimeoutError():
            return f"The server was not ready within {within_s:.3g} seconds."
        case FileNotFoundError():
            return "The server's command was not found: check `command` and `cwd`."
        case PermissionError():
            return "The server's command cannot be executed: check its permissions."
        case MCPError() as theirs if theirs.code == CONNECTION_CLOSED and server.url is None:
            return "The server's process ended before it was ready."
        case MCPError() as theirs if theirs.code in UNREACHABLE:
            return f"The server could not be reached: {sanitize(theirs.message, server)}"
        case MCPError() as theirs if message := _unreadable_message(theirs, server):
            return message
        case MCPError() as theirs:
            return f"The server refused the connection: {sanitize(theirs.message, server)}"
        case ValidationError():
            return "The server's handshake or list of tools does not follow the MCP specification."
        case other:
            return f"The connection failed: {type(other).__name__}."


def call_error(error: BaseException, server: McpServer, lost: str) -> SourceReply:
    """The reply for a failed call; `lost` says why the connection ended, if it has."""
    match _root(error):
        case MCPError() as theirs if theirs.code in UNREACHABLE:
            # Servers also use these codes for their own failures.
            return failed(server, lost or f"The call failed: {sanitize(theirs.message, server)}", fault=True)
        case MCPError() as theirs if message := _unreadable_message(theirs, server):
            return failed(server, message, fault=True)
        case MCPError() as theirs:
            message = f"The server refused the call: {sanitize(theirs.message, server)}"
            return failed(server, message, fault=theirs.code not in REQUEST_ERRORS)
        case ValidationError():
            return failed(server, "The server's reply does not follow the MCP specification.", fault=True)
        case UpstreamFailure() as ours:
            return failed(server, ours.message, fault=ours.failure_kind.fault)
        case AnabranchError() as ours:
            return failed(server, ours.message, fault=True)
        case other:
            return failed(server, lost or f"The call failed: {type(other).__name__}.", fault=True)


def tool_error(result: CallToolResult, server: McpServer) -> SourceReply:
    """The reply for a tool that reports an error."""
    text = " ".join(part.text for part in result.content if isinstance(part, TextContent))
    return failed(server, f"The server's tool reports an error: {sanitize(text, server)}", fault=False)


def failed(server: McpServer, message: str, *, fault: bool) -> SourceReply:
    return SourceReply(path=server.name, status=Status.ERROR, error=message, fault=fault)


def is_misconfigured(error: BaseException) -> bool:
    """Whether the operator must change the configuration. The output of the server's process is then unrelated."""
    return isinstance(_root(error), NoTool)


def is_expired(error: BaseException, server: McpServer) -> bool:
    """Whether the session has expired, so that the server has not processed the call."""
    if server.url is None or not isinstance(error, MCPError):
        return False
    return error.code == INVALID_REQUEST and error.message == EXPIRED


def is_closed(error: BaseException, server: McpServer) -> bool:
    """Whether the SDK reports that the connection to a child process is closed."""
    return server.url is None and isinstance(error, MCPError) and error.message == CLOSED


def is_unreachable(error: BaseException, server: McpServer) -> bool:
    return server.url is not None and isinstance(error, MCPError) and error.code in UNREACHABLE


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
