"""The MCP server: its three tools (aggregate, search, ask), for any transport."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from anyio import BrokenResourceError, ClosedResourceError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.session import ServerSession
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from anabranch.app.anabranch import Anabranch
from anabranch.app.refusals import is_refused_access
from anabranch.domain.audit import acting
from anabranch.domain.errors import AnabranchError, Forbidden
from anabranch.domain.mcp import HOPS, AggregatedResponse, AggregatorError, AggregatorQuery, InvalidQuery, ServerHealth
from anabranch.domain.model import SourceReply
from anabranch.domain.rights import EVERY_GRANT, Grants, Scope
from anabranch.entrypoints.http.access import valid_trace
from anabranch.entrypoints.mcp import schemas
from anabranch.entrypoints.mcp.question_tools import McpCaller, Progress, ask, configured, named, progress_text, search
from anabranch.entrypoints.mcp.schemas import (
    MOST_PASSAGES,
    AggregateArguments,
    AskArguments,
    AskResponse,
    InvalidArgument,
    SearchArguments,
    SearchResponse,
    input_schema,
    output_schema,
    refined,
    validate,
)
from anabranch.knowledge.model import Caller
from anabranch.telemetry.log import Log

Request = ServerRequestContext[Any, Any]
# More hops than this are no count of aggregators.
MAX_COUNTED = 100
MAX_DESCRIPTION = 200
AGGREGATE = """\
Search many MCP servers at once: every server that fits is asked in parallel, and you get one ranked list without \
near-duplicates, each result with its server, title, url, date and score. Use it in place of calling those servers \
one by one, whenever the answer may lie in any of them or you do not know in which. It returns results to read, not \
an answer. A server that fails or is slow is reported in the metadata and does not fail the call. Servers: {servers}."""
SEARCH = """\
Search the collections of documents that are kept here, by meaning and by wording, and get passages to read: text, \
title, collection, document id, character offsets and score, best first. Use it when you want to read the evidence \
yourself or need several passages; use `ask` when you want a finished answer. At most {most} passages."""
ASK = """\
Ask a question and get a finished answer in which each sentence cites the words that support it (source, title, url, \
document id, offsets, the quoted words). It answers only from what it finds: with no evidence it refuses \
(refused: true) and says what is missing, which is a result and not an error. By default it asks everything that you \
may use; name `sources` to ask only some. Use {others} for the material itself. It may take some seconds."""
SOURCES = (
    "Answer from these, by name: collections, {names}. Left out or empty: all of them, MCP servers by their rules."
)
INSTRUCTIONS = """\
Anabranch asks many sources at once and shows its evidence. `ask` for a cited answer, `search` for passages from the \
document collections{aggregate}. They only read."""


class ToolHandler(NamedTuple):
    """What a tool does, and the scope that an API key needs for it."""

    scope: Scope
    call: Callable[[Mapping[str, Any], McpCaller, Progress], Awaitable[CallToolResult]]


class Tools:
    def __init__(self, anabranch: Anabranch, log: Log) -> None:
        self._anabranch = anabranch
        self._log = log
        most = anabranch.settings.max_top_k
        limit = min(MOST_PASSAGES, most)
        self.inputs = {
            "aggregate": input_schema(AggregateArguments),
            "search": refined(input_schema(SearchArguments), limit={"maximum": limit, "default": min(10, limit)}),
            "ask": refined(
                input_schema(AskArguments), top_k={"maximum": most, "default": anabranch.settings.default_top_k}
            ),
        }
        self._handlers: Mapping[str, ToolHandler] = {
            "aggregate": ToolHandler("ask", self._aggregate),
            "search": ToolHandler("ask", self._search),
            "ask": ToolHandler("ask", self._ask),
        }

    def listed(self, caller: Caller, grants: Grants) -> Sequence[Tool]:
        """The tools that the caller can use now, with descriptions for a model to choose by."""
        return [one for one in self._all(grants) if self._handlers[one.name].scope in caller.rights.scopes]

    def _all(self, grants: Grants) -> Sequence[Tool]:
        servers = self._servers(grants)
        limit = self.inputs["search"]["properties"]["limit"]["maximum"]
        search = self._tool("search", "Search the documents", SEARCH.format(most=limit), SearchResponse, world=False)
        others = "`search` or `aggregate`" if servers else "`search`"
        ask = self._tool("ask", "Get a cited answer", ASK.format(others=others), AskResponse, world=True)
        if names := configured(self._anabranch, grants):
            ask.input_schema = refined(ask.input_schema, sources={"description": SOURCES.format(names=named(names))})
        if not servers:
            return [search, ask]
        about = AGGREGATE.format(servers=", ".join(map(_server_entry, servers)))
        return [self._tool("aggregate", "Search all MCP servers", about, AggregatedResponse, world=True), search, ask]

    @property
    def instructions(self) -> str:
        """Which tool to use for what, of the tools available now."""
        aggregate = (
            ", `aggregate` for ranked results from all connected MCP servers" if self._servers(EVERY_GRANT) else ""
        )
        return INSTRUCTIONS.format(aggregate=aggregate)

    def _servers(self, grants: Grants) -> Sequence[ServerHealth]:
        """The servers that `aggregate` searches, if it is enabled."""
        on = [one for one in self._anabranch.servers() if one.state != "disabled" and grants.server(one.name)]
        return on if self._anabranch.aggregator_enabled else ()

    async def call(
        self, name: str, arguments: Mapping[str, Any], caller: McpCaller, progress: Progress
    ) -> CallToolResult:
        """The tool's result or error."""
        handler = self._handlers.get(name)
        if handler is None:
            raise MCPError(code=INVALID_PARAMS, message=f"Unknown tool: {name[:100]}")
        try:
            caller.identity.rights.require(handler.scope)
            return await handler.call(arguments, caller, progress)
        except AggregatorError as error:
            return _failed(error.name, error.message, error.fields)
        except AnabranchError as error:
            if is_refused_access(error):
                self._anabranch.refused(acting.get()(), f"mcp_{name}", error.code)
            missing = {name: value for name, value in error.details.items() if str(value) not in error.message}
            return _failed(error.code, error.message, error.details, missing)
        except Exception as error:  # noqa: BLE001  the caller gets an error, and the log has the details
            correlation_id = caller.context.correlation_id
            self._log.error("unexpected_error", correlation_id=correlation_id, tool=name, exc_info=error)
            why = f"Internal error; the log has the details under the correlation id {correlation_id}."
            return _failed("internal_error", why, {"correlation_id": correlation_id})

    async def _aggregate(self, arguments: Mapping[str, Any], caller: McpCaller, progress: Progress) -> CallToolResult:
        if not caller.grants.names:
            raise Forbidden(
                "Only the operator may use the configured MCP servers, and callers whose key was granted some; "
                "`search` and `ask` are for the collections."
            )
        try:
            values = validate(AggregateArguments, self.inputs["aggregate"], arguments)
        except InvalidArgument as error:
            query_text = str(arguments.get("query_text", ""))[:200].encode(errors="replace").decode()
            raise InvalidQuery(error.message, query=query_text, reason=error.message) from None

        async def report(reply: SourceReply, done: int, total: int) -> None:
            await progress(done, total, progress_text(reply.path, reply))

        query = msgspec.convert(msgspec.to_builtins(values), AggregatorQuery)
        response = await self._anabranch.aggregate(query, caller.context, report, grants=caller.grants)
        return _result(response, schemas.aggregated(response))

    async def _search(self, arguments: Mapping[str, Any], caller: McpCaller, progress: Progress) -> CallToolResult:  # noqa: ARG002
        schema = self.inputs["search"]
        values = validate(SearchArguments, schema, arguments)
        limit = values.limit or schema["properties"]["limit"]["default"]
        response = await search(self._anabranch, values.query, values.collections or (), limit, caller)
        return _result(response, schemas.found(response))

    async def _ask(self, arguments: Mapping[str, Any], caller: McpCaller, progress: Progress) -> CallToolResult:
        schema = self.inputs["ask"]
        values = validate(AskArguments, schema, arguments)
        top_k = values.top_k or schema["properties"]["top_k"]["default"]
        response = await ask(self._anabranch, values, top_k, caller, progress)
        return _result(response, schemas.answered(response))

    def _tool(self, name: str, title: str, description: str, kind: type[msgspec.Struct], *, world: bool) -> Tool:
        return Tool(
            name=name,
            title=title,
            description=description,
            input_schema=self.inputs[name],
            output_schema=output_schema(kind),
            annotations=ToolAnnotations(title=title, read_only_hint=True, idempotent_hint=True, open_world_hint=world),
        )


def _result(response: msgspec.Struct, text: str) -> CallToolResult:
    """Structured content for programs, and text for models. The text is not a copy of the JSON, although the protocol
    suggests that: clients pass it to a model, and this text has a tenth of the tokens."""
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=msgspec.to_builtins(response)
    )


def _server_entry(server: ServerHealth) -> str:
    """The operator's description, never the server's own."""
    description = schemas.one_line(server.description or "")
    shown = description if len(description) <= MAX_DESCRIPTION else description[: MAX_DESCRIPTION - 1].rstrip() + "…"
    return f"{server.name} ({shown})" if shown else server.name


def _failed(
    name: str, message: str, fields: Mapping[str, Any], missing: Mapping[str, Any] | None = None
) -> CallToolResult:
    """`missing` are details that the message does not contain; they are added to the text."""
    content = {"error": name, "message": message, **fields}
    text = f"{name}: {message}{f' {msgspec.json.encode(missing).decode()}' if missing else ''}"
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=content, is_error=True)


class _Server(Server[Any]):
    """Its instructions follow the current configuration, which can be reloaded."""

    def __init__(self, tools: Tools, *args: Any, **options: Any) -> None:
        self._tools = tools
        super().__init__(*args, **options)

    @property
    def instructions(self) -> str:
        return self._tools.instructions

    @instructions.setter
    def instructions(self, _: str | None) -> None:
        """Ignored: the SDK sets None."""


class ToolChanges:
    """Notifies the client of a lasting connection that the tools have changed. `listen` is for clients of the modern
    protocol, which subscribe; others are notified after they have listed the tools."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self._session: ServerSession | None = None
        self.listen = ListenHandler(self._bus)

    def on_listed(self, session: ServerSession) -> None:
        self._session = session

    async def announce(self) -> None:
        await self._bus.publish(ToolsListChanged())
        if self._session is not None:
            with suppress(BrokenResourceError, ClosedResourceError):  # the client has gone
                await self._session.send_tool_list_changed()


def server(tools: Tools, identify: Callable[[Request], McpCaller], changes: ToolChanges | None = None) -> Server[Any]:
    """`identify` returns the caller of a request. Without `changes` clients are not told that the tools change, and no
    such capability is declared."""

    async def list_tools(request: Request, _params: PaginatedRequestParams | None) -> ListToolsResult:
        caller = identify(request)
        listed = list(tools.listed(caller.identity, caller.grants))
        if changes is not None:
            changes.on_listed(request.session)
        return ListToolsResult(tools=listed)

    async def call_tool(request: Request, params: CallToolRequestParams) -> CallToolResult:
        progress = request.session.report_progress
        return await tools.call(params.name, params.arguments or {}, _traced(identify(request), params), progress)

    return _Server(
        tools,
        "anabranch",
        version=version("anabranch"),
        title="Anabranch",
        get_tool_input_schema=tools.inputs.get,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_subscriptions_listen=None if changes is None else changes.listen,
    )


def _traced(caller: McpCaller, params: CallToolRequestParams) -> McpCaller:
    """The caller with the trace and the number of hops in the call's metadata, where another Anabranch sends them. They
    take precedence over the HTTP headers, which a client may send once for a whole connection."""
    meta, context = params.meta or {}, caller.context
    hops = meta.get(HOPS)
    if isinstance(hops, int) and 0 < hops < MAX_COUNTED:
        context = msgspec.structs.replace(context, hops=int(hops))
    traceparent, tracestate = valid_trace(_text(meta, "traceparent"), _text(meta, "tracestate"))
    if traceparent is not None:
        context = msgspec.structs.replace(context, traceparent=traceparent, tracestate=tracestate)
    return caller._replace(context=context)


def _text(meta: Mapping[str, Any], name: str) -> str:
    found = meta.get(name)
    return found if isinstance(found, str) else ""
