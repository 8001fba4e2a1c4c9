"""The three tools: what each is for, what it takes, and what becomes of a call."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from mcp_types import CallToolResult, TextContent, Tool, ToolAnnotations

from anabranch.app import Anabranch
from anabranch.domain.aggregates import AggregatedResponse, AggregatorError, AggregatorQuery, InvalidQuery
from anabranch.domain.errors import AnabranchError, Forbidden
from anabranch.domain.model import SourceReply
from anabranch.domain.servers import ServerHealth
from anabranch.entrypoints.mcp import texts
from anabranch.entrypoints.mcp.asking import ask, configured, named, search
from anabranch.entrypoints.mcp.calls import Asker, Progress, told
from anabranch.entrypoints.mcp.schemas import (
    MOST_PASSAGES,
    AggregateArguments,
    AskArguments,
    AskResponse,
    InvalidArgument,
    SearchArguments,
    SearchResponse,
    described,
    input_schema,
    output_schema,
    read,
)
from anabranch.runtime.lines import Log

SHOWN = 200
MAX_ABOUT = 200
OUR_FAULT = "Something went wrong on our side; the log has the details under the correlation id {correlation_id}."
NOT_YOURS = "Only the operator may use what is configured here; `search` and `ask` have the collections."
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
(refused: true) and says what is missing, which is a result and not an error. By default it reads every collection; \
name `sources` to use others. Use {others} for the material itself. It may take some seconds."""
SOURCES = "Answer from these, by name: collections, {names}. Left out or empty: every collection."
INSTRUCTIONS = """\
Anabranch asks many sources at once and shows its evidence. `ask` for a cited answer, `search` for passages from the \
document collections{aggregate}. They only read."""


class Handler(Protocol):
    async def __call__(self, arguments: Mapping[str, Any], asker: Asker, progress: Progress) -> CallToolResult: ...


class Tools:
    def __init__(self, anabranch: Anabranch, log: Log) -> None:
        self._anabranch = anabranch
        self._log = log
        most = anabranch.settings.max_top_k
        limit, top_k = min(MOST_PASSAGES, most), anabranch.settings.default_top_k
        self._inputs = {
            "aggregate": input_schema(AggregateArguments),
            "search": input_schema(SearchArguments, limit={"maximum": limit, "default": min(10, limit)}),
            "ask": input_schema(AskArguments, top_k={"maximum": most, "default": top_k}),
        }
        self._outputs = {
            "aggregate": output_schema(AggregatedResponse),
            "search": output_schema(SearchResponse),
            "ask": output_schema(AskResponse),
        }
        self._handlers: Mapping[str, Handler] = {
            "aggregate": self._aggregate,
            "search": self._search,
            "ask": self._ask,
        }

    def listed(self, *, vouched: bool) -> Sequence[Tool]:
        """Those that the caller can use now, as a model chooses by."""
        servers = self._servers() if vouched else ()
        limit = self._inputs["search"]["properties"]["limit"]["maximum"]
        search = self._tool("search", "Search the documents", SEARCH.format(most=limit), world=False)
        others = "`search` or `aggregate`" if servers else "`search`"
        ask = self._tool("ask", "Get a cited answer", ASK.format(others=others), world=True)
        if vouched and (names := configured(self._anabranch)):
            ask.input_schema = described(ask.input_schema, sources=SOURCES.format(names=named(names)))
        if not servers:
            return [search, ask]
        about = AGGREGATE.format(servers=", ".join(map(_introduced, servers)))
        return [self._tool("aggregate", "Search all MCP servers", about, world=True), search, ask]

    @property
    def instructions(self) -> str:
        """What to use which tool for, of those that there are at the moment."""
        aggregate = ", `aggregate` for ranked results from all connected MCP servers" if self._servers() else ""
        return INSTRUCTIONS.format(aggregate=aggregate)

    def _servers(self) -> Sequence[ServerHealth]:
        """Those that `aggregate` asks, if it is switched on."""
        on = [one for one in self._anabranch.servers() if one.state != "disabled"]
        return on if self._anabranch.aggregator_enabled else ()

    def input_schema(self, name: str) -> Mapping[str, Any] | None:
        return self._inputs.get(name)

    async def call(
        self, name: str, arguments: Mapping[str, Any], asker: Asker, progress: Progress
    ) -> CallToolResult | None:
        """What the tool says, its errors included; None if there is no such tool."""
        handler = self._handlers.get(name)
        if handler is None:
            return None
        try:
            return await handler(arguments, asker, progress)
        except AggregatorError as error:
            return _failed(error.name, error.message, error.fields)
        except AnabranchError as error:
            unsaid = {name: value for name, value in error.details.items() if str(value) not in error.message}
            return _failed(error.code, error.message, error.details, unsaid)
        except Exception as error:  # noqa: BLE001  the caller is told, and the log has it
            correlation_id = asker.context.correlation_id
            self._log.error("unexpected_error", correlation_id=correlation_id, tool=name, exc_info=error)
            why = OUR_FAULT.format(correlation_id=correlation_id)
            return _failed("internal_error", why, {"correlation_id": correlation_id})

    async def _aggregate(self, arguments: Mapping[str, Any], asker: Asker, progress: Progress) -> CallToolResult:
        if not asker.vouched:
            raise Forbidden(NOT_YOURS)
        try:
            asked = read(AggregateArguments, self._inputs["aggregate"], arguments)
        except InvalidArgument as error:
            shown = str(arguments.get("query_text", ""))[:SHOWN].encode(errors="replace").decode()
            raise InvalidQuery(error.message, query=shown, reason=error.message) from None

        async def heard(reply: SourceReply, done: int, total: int) -> None:
            await progress(done, total, told(reply.path, reply))

        query = AggregatorQuery(
            query_text=asked.query_text,
            max_results=asked.max_results or None,
            servers=None if asked.servers is msgspec.UNSET else tuple(asked.servers),
            request_id=asked.request_id or None,
        )
        response = await self._anabranch.aggregate(query, asker.context, heard)
        return _result(response, texts.aggregated(response))

    async def _search(self, arguments: Mapping[str, Any], asker: Asker, progress: Progress) -> CallToolResult:  # noqa: ARG002
        schema = self._inputs["search"]
        asked = read(SearchArguments, schema, arguments)
        limit = asked.limit or schema["properties"]["limit"]["default"]
        response = await search(self._anabranch, asked.query, asked.collections or (), limit, asker)
        return _result(response, texts.found(response))

    async def _ask(self, arguments: Mapping[str, Any], asker: Asker, progress: Progress) -> CallToolResult:
        schema = self._inputs["ask"]
        asked = read(AskArguments, schema, arguments)
        top_k = asked.top_k or schema["properties"]["top_k"]["default"]
        response = await ask(self._anabranch, asked.question, asked.sources or (), top_k, asker, progress)
        return _result(response, texts.answered(response))

    def _tool(self, name: str, title: str, description: str, *, world: bool) -> Tool:
        hints = ToolAnnotations(title=title, read_only_hint=True, idempotent_hint=True, open_world_hint=world)
        return Tool(
            name=name,
            title=title,
            description=description,
            input_schema=self._inputs[name],
            output_schema=self._outputs[name],
            annotations=hints,
        )


def _result(response: msgspec.Struct, text: str) -> CallToolResult:
    """Structured for programs. The text is not the same JSON again, as the protocol suggests for clients that know no
    structured content: those hand it to a model, which reads this in a tenth of the tokens."""
    content = [TextContent(type="text", text=text)]
    return CallToolResult(content=list(content), structured_content=msgspec.to_builtins(response))


def _introduced(server: ServerHealth) -> str:
    """In the operator's words, and never in the server's own."""
    about = texts.one_line(server.description or "")
    shown = about if len(about) <= MAX_ABOUT else about[: MAX_ABOUT - 1].rstrip() + "…"
    return f"{server.name} ({shown})" if shown else server.name


def _failed(
    name: str, message: str, fields: Mapping[str, Any], unsaid: Mapping[str, Any] | None = None
) -> CallToolResult:
    """`unsaid` is what the sentence does not say, and the text is to."""
    said = {"error": name, "message": message, **fields}
    text = f"{name}: {message}{f' {msgspec.json.encode(unsaid).decode()}' if unsaid else ''}"
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=said, is_error=True)
