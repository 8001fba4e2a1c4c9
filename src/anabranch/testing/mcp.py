"""`python -m anabranch.testing.mcp`: a real MCP server over stdio whose results and failures a scenario defines."""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import mcp_types as types
import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ToolsListChanged

Form = Literal["structured", "json", "text", "links"]
Mishap = Literal["hang", "freeze", "die", "error", "refuse", "garbage", "misfit", "ask", "rename"]

SCHEMA = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "What to search for."},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    },
    "required": ["query"],
}
FOUND = {"type": "object", "properties": {"results": {"type": "array"}}, "required": ["results"]}
WORDS = ("river", "delta", "channel", "gauge", "levee", "meander", "basin", "weir", "current", "bank", "flood")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """How the server behaves. `results` are the results, or how many to generate from the query. A query that contains
    a word of `mishaps` (or any query, for the word `*`) fails in that way. `old` supports only the protocol of 2025,
    `deaf` never answers, `late_ms` is how long it takes to start, `stubborn` keeps running after the end of its input
    and after SIGTERM. `timed` adds to each title how long the call took in the server. `takes` are the properties of
    the tool's arguments, in place of a query and a limit; the query is then all arguments as JSON. With `traced` the
    text of each result is the call's metadata as JSON."""

    name: str = "testing"
    tool: str = "search"
    results: int | tuple[Mapping[str, Any], ...] = 3
    form: Form = "structured"
    delay_ms: float = 0.0
    late_ms: float = 0.0
    mishaps: Mapping[str, Mishap] = {}
    old: bool = False
    deaf: bool = False
    stubborn: bool = False
    timed: bool = False
    takes: Mapping[str, Any] | None = None
    traced: bool = False


class ScenarioServer:
    """Answers as the scenario defines. The same query always has the same results."""

    def __init__(self, scenario: Scenario, output: int) -> None:
        self._scenario = scenario
        self._output = output
        self._tool = scenario.tool
        self._subscriptions = InMemorySubscriptionBus()
        self.server: Server[Any] = Server(
            scenario.name,
            version="1.0",
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_subscriptions_listen=ListenHandler(self._subscriptions),
        )

    async def list_tools(
        self,
        context: ServerRequestContext[Any],  # noqa: ARG002
        params: types.PaginatedRequestParams | None,  # noqa: ARG002
    ) -> types.ListToolsResult:
        takes = self._scenario.takes
        tool = types.Tool(
            name=self._tool,
            description="Search the library for what a query asks.",
            input_schema=SCHEMA if takes is None else {"type": "object", "properties": takes, "required": [*takes][:1]},
            output_schema=FOUND if self._scenario.form == "structured" else None,
        )
        return types.ListToolsResult(tools=[tool])

    async def call_tool(
        self, context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        began = time.perf_counter()
        arguments = {"query": "", "limit": 100, **(params.arguments or {})}
        query = str(arguments["query"])
        if self._scenario.takes is not None:
            query = json.dumps(params.arguments, sort_keys=True)
        if params.name != self._tool:
            raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name}")
        failure = await self._mishap(query, context)
        if failure is not None:
            return failure
        await asyncio.sleep(self._scenario.delay_ms / 1000)
        took_ms = (time.perf_counter() - began) * 1000
        return self._found(query, int(arguments["limit"] or 100), took_ms, params.meta or {})

    async def _mishap(
        self, query: str, context: ServerRequestContext[Any]
    ) -> types.CallToolResult | types.InputRequiredResult | None:
        mishaps = self._scenario.mishaps
        match next((mishaps[word] for word in (*query.split(), "*") if word in mishaps), None):
            case "hang":
                await asyncio.Event().wait()
            case "freeze":
                time.sleep(3_600)  # noqa: ASYNC251  blocking the loop is the failure
            case "die":
                os._exit(3)
            case "garbage":
                os.write(self._output, b'{"jsonrpc": "2.0", "id": \xff\xfe not even JSON\n')
            case "error":
                return types.CallToolResult(content=[types.TextContent(text=f"No shelf for {query!r}.")], is_error=True)
            case "refuse":
                raise MCPError(types.INTERNAL_ERROR, "The library is closed.")
            case "misfit":
                text = types.TextContent(text=f"{self._scenario.name} has something on {query}")
                return types.CallToolResult(content=[text], structured_content={"odd": 1})
            case "ask":
                floor = {"type": "object", "properties": {"floor": {"type": "string"}}}
                request = types.ElicitRequest(
                    params=types.ElicitRequestFormParams(message="Which floor?", requested_schema=floor)
                )
                return types.InputRequiredResult(input_requests={"floor": request})
            case "rename":
                self._tool = "find" if self._tool == "search" else "search"
                await self._subscriptions.publish(ToolsListChanged())
                await context.session.send_tool_list_changed()
            case None:
                pass
        return None

    def _found(self, query: str, limit: int, took_ms: float, meta: Mapping[str, Any]) -> types.CallToolResult:
        scenario = self._scenario
        if isinstance(scenario.results, int):
            results = [_result(scenario.name, query, number) for number in range(scenario.results)][:limit]
        else:
            results = [{**result} for result in scenario.results[:limit]]
        if scenario.timed:
            results = [{**one, "title": f"{one.get('title', '')} took {took_ms:.3f} ms"} for one in results]
        if scenario.traced:
            results = [{**one, "text": json.dumps(dict(meta), default=str)} for one in results]
        match scenario.form:
            case "structured":
                text = types.TextContent(text=json.dumps({"results": results}))
                return types.CallToolResult(content=[text], structured_content={"results": results})
            case "json":
                return types.CallToolResult(content=[types.TextContent(text=json.dumps(results))])
            case "text":
                return types.CallToolResult(content=[types.TextContent(text=str(one["text"])) for one in results])
            case "links":
                links = [
                    types.ResourceLink(name=one["title"], uri=one["url"], description=one["text"]) for one in results
                ]
                return types.CallToolResult(content=list(links))


def _result(name: str, query: str, number: int) -> dict[str, Any]:
    """Generated from the query alone, so that a test can check which query it belongs to."""
    rest = " ".join(WORDS[(number * 5 + step * 7 + len(query)) % len(WORDS)] for step in range(12))
    return {
        "title": f"{name} {number + 1}",
        "text": f"{name} on <{query}>, no. {number + 1}: {rest}.",
        "url": f"https://{name}.example/{number + 1}",
        "date": f"2026-{number % 12 + 1:02}-01",
    }


async def serve(scenario: Scenario) -> None:
    if scenario.deaf:
        await asyncio.Event().wait()
    # The SDK moves the real output to another descriptor; writes to 1 then go to stderr.
    server = ScenarioServer(scenario, output=os.dup(1)).server
    options = server.create_initialization_options(NotificationOptions(tools_changed=True))
    async with stdio_server() as (read, write):
        if scenario.old:
            await serve_loop(server, read, write, lifespan_state={}, init_options=options)
        else:
            await server.run(read, write, options)
    if scenario.stubborn:
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m anabranch.testing.mcp", description=__doc__)
    parser.add_argument("--scenario", default="{}", help="a JSON object; see Scenario for its fields")
    scenario = msgspec.json.decode(parser.parse_args().scenario, type=Scenario)
    if scenario.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(scenario.late_ms / 1000)
    sys.stderr.write(f"{scenario.name} started\n")
    asyncio.run(serve(scenario))


if __name__ == "__main__":
    main()
