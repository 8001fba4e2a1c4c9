"""Malformed HTTP replies of MCP servers: truncated, broken, or not MCP messages."""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web as aiohttp_web
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import UpstreamError
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Context, Passage, Query, SourceReply
from anabranch.sources.mcp import connection as mcp_connection
from anabranch.sources.mcp.connection import McpConnection, connected
from anabranch.sources.mcp.framing import SurrogateRepair
from anabranch.sources.mcp.results.extraction import passages
from anabranch.sources.mcp.services import PoolServices
from anabranch.sources.mcp.tool_selection import NoTool
from anabranch.testing import Recorder
from support.mcp_http_servers import answer, listening, outbound

Reply = Callable[[Any], aiohttp_web.StreamResponse]
TOOL = {"name": "search", "inputSchema": {"type": "object", "properties": {"query": {"type": "string"}}}}
QUERY = Query(text="tea", limit=5, similarity_threshold=0.0)
CUT = '"cut emoji \\ud83d"'


def plain(body: str, content_type: str = "application/json") -> aiohttp_web.Response:
    return aiohttp_web.Response(text=body, content_type=content_type)


def message(asked: Any, result: str) -> str:
    return f'{{"jsonrpc": "2.0", "id": {json.dumps(asked["id"])}, "result": {result}}}'


def event(data: str) -> aiohttp_web.Response:
    return plain(f"event: message\r\ndata: {data}\r\n\r\n", "text/event-stream")


@asynccontextmanager
async def asked(reply: Reply, *, era: str = "old", greeting: Reply | None = None) -> AsyncIterator[McpConnection]:
    """A connection to a server that answers calls like that, and its greeting too, if there is one."""

    async def respond(request: aiohttp_web.Request) -> aiohttp_web.StreamResponse:
        if request.method != "POST":
            return aiohttp_web.Response(status=405)
        said = await request.json()
        info = {"name": "s", "version": "1"}
        match said["method"]:
            case "server/discover" if era == "new":
                versions = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "serverInfo": info}
                return answer(said, {"resultType": "complete", "ttlMs": 0, "cacheScope": "public", **versions})
            case "server/discover" | "initialize" if greeting is not None:
                return greeting(said)
            case "server/discover":
                return answer(said, error={"code": -32601, "message": "What?"})
            case "initialize":
                version = said["params"]["protocolVersion"]
                return answer(said, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
            case "tools/list":
                return answer(said, {"tools": [TOOL], "resultType": "complete", "ttlMs": 0, "cacheScope": "public"})
            case "tools/call":
                return reply(said)
        return aiohttp_web.Response(status=202)

    async with listening({"/mcp": respond}) as origin, outbound() as way_out:
        server = McpServer(name="s", url=f"{origin}/mcp")
        services = PoolServices(outbound=way_out, clock=SystemClock(), telemetry=Recorder(), max_reply_bytes=100_000)
        async with connected(server, services, "auto", print) as connection:
            yield connection


async def found(connection: McpConnection) -> tuple[Passage, ...]:
    context = Context(correlation_id="test", deadline=time.monotonic() + 60)
    return passages(await connection.call(QUERY, context), SERVER)


SERVER = McpServer(name="s", url="http://s.example/mcp")


@pytest.mark.parametrize("way", [plain, event], ids=["json", "events"])
async def test_a_lone_surrogate_over_http_is_replaced(way: Callable[[str], aiohttp_web.Response]) -> None:
    def reply(said: Any) -> aiohttp_web.StreamResponse:
        return way(message(said, f'{{"content": [{{"type": "text", "text": {CUT}}}]}}'))

    async with asked(reply) as connection:
        (passage,) = await found(connection)
    assert passage.text == "cut emoji \ufffd"


BLOCKS: list[Any] = [{"type": "hologram", "text": "no"}, {"type": "text", "text": "kept"}, {"type": "text"}, 7, None]
NOTED = {"type": "text", "text": "kept", "annotations": {"priority": "high"}, "_meta": 5}


@pytest.mark.parametrize("era", ["old", "new"])
@pytest.mark.parametrize(
    "result",
    [
        {"structuredContent": {"results": ["kept"]}},
        {"content": None, "structuredContent": {"results": ["kept"]}},
        {"content": [], "structuredContent": ["kept"]},
        {"content": [], "structuredContent": "kept"},
        {"content": BLOCKS},
        {"content": [NOTED]},
        {"content": [{"type": "text", "text": "kept"}], "isError": "no", "resultType": 5, "_meta": []},
    ],
    ids=["no-content", "null", "list", "word", "blocks", "notes", "rest"],
)
async def test_replies_that_violate_the_protocol_are_read_as_far_as_possible(era: str, result: Any) -> None:
    async with asked(lambda said: answer(said, result), era=era) as connection:
        assert connection.protocol == ("2026-07-28" if era == "new" else "2025-11-25")
        assert [passage.text for passage in await found(connection)] == ["kept"]


async def failure(reply: Reply) -> SourceReply:
    async with asked(reply) as connection:
        with pytest.raises(Exception) as failed:  # noqa: PT011
            await found(connection)
        reply_of_failure = connection.call_failed(failed.value)
    assert reply_of_failure is not None
    return reply_of_failure


NO_JSON = "The server's reply is not JSON, or not an MCP message: check `url`."


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (lambda _: plain("<html>Log in</html>"), NO_JSON),
        (lambda _: plain('{"answer": 42}'), NO_JSON),
        (lambda _: plain(""), NO_JSON),
        (lambda _: event("no JSON"), NO_JSON),
        (
            lambda _: plain("<html>Log in</html>", "text/html"),
            "The server's reply is of type text/html, which is not an MCP message: check `url`.",
        ),
        (
            lambda said: answer(said, {"content": [{"type": "text", "text": "x" * 100_000}]}),
            "The server's reply cannot be read: The reply is larger than 100,000 bytes (AGGREGATOR_MAX_REPLY_BYTES).",
        ),
        (
            lambda said: answer(said, error={"code": -32700, "message": "Failed, I have."}),
            "The server refused the call: Failed, I have.",
        ),
        (lambda said: answer(said, {"a": 1}), "The server's reply does not follow the MCP specification."),
    ],
    ids=["page", "other", "empty", "event", "type", "large", "theirs", "form"],
)
async def test_an_http_reply_that_is_not_mcp_is_explained(reply: Reply, sentence: str) -> None:
    told = await failure(reply)
    assert told.error == sentence
    assert told.fault


async def test_a_handshake_reply_that_is_not_mcp_is_explained() -> None:
    def page(_: Any) -> aiohttp_web.Response:
        return plain("<html>Log in</html>", "text/html")

    with pytest.raises(Exception) as failed:  # noqa: PT011
        async with asked(page, greeting=page):
            pass
    sentence = mcp_connection.connection_error(failed.value, SERVER, 30.0)
    assert sentence == "The server's reply is of type text/html, which is not an MCP message: check `url`."


def test_only_tool_selection_errors_count_as_misconfiguration() -> None:
    """For such failures nobody looks for reasons in what the server's process has written."""
    assert mcp_connection.is_misconfigured(ExceptionGroup("tasks", [NoTool("None of its tools takes a question.")]))
    assert not mcp_connection.is_misconfigured(ExceptionGroup("tasks", [UpstreamError("The server's process ended.")]))
    assert not mcp_connection.is_misconfigured(TimeoutError())


@given(st.text(), st.integers(1, 9))
@example("\U0001f600", 3)
@example('\\ud83d \\" \\\\', 1)
def test_surrogate_repair_leaves_valid_text_unchanged(words: str, size: int) -> None:
    written = (json.dumps([words.encode(errors="replace").decode()]) + "\r\n").encode() * 3
    mending = SurrogateRepair(10_000)
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    assert b"".join([*map(mending.feed, pieces), mending.rest()]) == written


def test_surrogate_repair_does_not_buffer_endless_lines() -> None:
    mending = SurrogateRepair(100)
    passed = [mending.feed(b"\\" * 60) for _ in range(1_000)]
    assert sum(map(len, passed)) >= 59_900
