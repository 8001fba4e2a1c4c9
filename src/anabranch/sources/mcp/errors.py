"""What went wrong with an MCP server, in a sentence. It knows the SDK's errors, so it is loaded late."""

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

from anabranch.domain.errors import AnabranchError, Elsewhere
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import SourceReply, Status
from anabranch.network.redaction import Secrets, of_server, quoted
from anabranch.sources.mcp.tool_selection import NoTool

# These speak of what was asked, not of the state that the server is in.
OF_THE_REQUEST = frozenset(
    {
        INVALID_PARAMS,
        INVALID_REQUEST,
        METHOD_NOT_FOUND,
        MISSING_REQUIRED_CLIENT_CAPABILITY,
        URL_ELICITATION_REQUIRED,
    }
)
UNREACHED = frozenset({CONNECTION_CLOSED, REQUEST_TIMEOUT})
# What the SDK itself says.
EXPIRED, CLOSED = "Session terminated", "Connection closed"
UNPARSED = re.compile(r"Failed to parse (?:JSON response|SSE message): (.*)")
UNTYPED = re.compile(r"Unexpected content type: ([\w.+/-]{0,100})")


def connecting(error: BaseException, server: McpServer, within_s: float) -> str:
    """Why a connection could not be made, or was given up."""
    match _root(error):
        case AnabranchError() as ours:
            return ours.message
        case TimeoutError():
            return f"The server was not ready within {within_s:.3g} seconds."
        case FileNotFoundError():
            return "The server's command was not found: check `command` and `cwd`."
        case PermissionError():
            return "The server's command may not be run: check its permissions."
        case MCPError() as theirs if theirs.code == CONNECTION_CLOSED and server.url is None:
            return "The server's process ended before it was ready."
        case MCPError() as theirs if theirs.code in UNREACHED:
            return f"The server could not be reached: {spoken(theirs.message, server)}"
        case MCPError() as theirs if words := _unread(theirs, server):
            return words
        case MCPError() as theirs:
            return f"The server refused the connection: {spoken(theirs.message, server)}"
        case ValidationError():
            return "The server's greeting or its list of tools does not have the form that MCP prescribes."
        case other:
            return f"The connection failed: {type(other).__name__}."


def calling(error: BaseException, server: McpServer, lost: str) -> SourceReply:
    """A call that got no answer; `lost` says why the connection ended, if it has."""
    match _root(error):
        case MCPError() as theirs if theirs.code in UNREACHED:
            # Servers use these codes for failures of their own, too.
            return failed(server, lost or f"The call failed: {spoken(theirs.message, server)}", fault=True)
        case MCPError() as theirs if words := _unread(theirs, server):
            return failed(server, words, fault=True)
        case MCPError() as theirs:
            words = f"The server refused the call: {spoken(theirs.message, server)}"
            return failed(server, words, fault=theirs.code not in OF_THE_REQUEST)
        case ValidationError():
            return failed(server, "The server's reply does not have the form that MCP prescribes.", fault=True)
        case Elsewhere() as ours:
            return failed(server, ours.message, fault=ours.trouble.fault)
        case AnabranchError() as ours:
            return failed(server, ours.message, fault=True)
        case other:
            return failed(server, lost or f"The call failed: {type(other).__name__}.", fault=True)


def refused(result: CallToolResult, server: McpServer) -> SourceReply:
    """The tool ran, and says that it could not do it."""
    said = " ".join(part.text for part in result.content if isinstance(part, TextContent))
    return failed(server, f"The server's tool reports an error: {spoken(said, server)}", fault=False)


def failed(server: McpServer, words: str, *, fault: bool) -> SourceReply:
    return SourceReply(path=server.name, status=Status.ERROR, error=words, fault=fault)


def misconfigured(error: BaseException) -> bool:
    """Whether the operator must change something first: what the server's process wrote then has nothing to do with
    it."""
    return isinstance(_root(error), NoTool)


def expired(error: BaseException, server: McpServer) -> bool:
    """Whether the server has forgotten the session, and so has not looked at the call."""
    if server.url is None or not isinstance(error, MCPError):
        return False
    return error.code == INVALID_REQUEST and error.message == EXPIRED


def closed(error: BaseException, server: McpServer) -> bool:
    """Whether the SDK has found a child's wire cut, whoever else has noticed."""
    return server.url is None and isinstance(error, MCPError) and error.message == CLOSED


def unreached(error: BaseException, server: McpServer) -> bool:
    return server.url is not None and isinstance(error, MCPError) and error.code in UNREACHED


def _unread(error: MCPError, server: McpServer) -> str:
    """How a reply over HTTP is put that was no message at all. The SDK adds what its parser says, in many lines."""
    if server.url is not None and error.code == PARSE_ERROR and (found := UNPARSED.match(error.message)):
        if "validation error" in found[1]:
            return "The server's reply is not JSON, or no message of MCP: check `url`."
        return f"The server's reply cannot be read: {spoken(found[1], server)}"
    if server.url is not None and error.code == INVALID_REQUEST and (found := UNTYPED.match(error.message)):
        kind = f"of the type {found[1]}" if found[1] else "of no type"
        return f"The server's reply is {kind}, and no message of MCP: check `url`."
    return ""


def spoken(text: str, server: McpServer) -> str:
    """A server's own words: one short line, without what it was given in confidence."""
    line = quoted(text, Secrets(of_server(server)))
    return line if line.endswith((".", "!", "?", "…")) else f"{line or 'it does not say which'}."


def _root(error: BaseException) -> BaseException:
    """The first that went wrong: task groups wrap what they were ended by."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
