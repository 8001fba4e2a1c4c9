"""Calls to real MCP servers through the pool: results, failures, and their effect on other calls."""

import asyncio
import io
import json
import socket
import sys
import time

import msgspec
import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.mcp import MAX_HOPS, McpServer
from anabranch.domain.model import Query, Status
from anabranch.sources.mcp.services import McpTiming
from anabranch.telemetry.log import LoggedEvents, configured_log
from support.mcp_pool_fixtures import ask, context, health, pooled, server, until

pytestmark = pytest.mark.xdist_group("mcp")


async def test_pool_uses_one_connection_per_server_in_both_protocols() -> None:
    async with pooled(server("new", results=5), server("old", old=True, form="json"), server("off")) as pool:
        before = {one.name: one.state for one in pool.health()}
        assert before == {"new": "idle", "old": "idle", "off": "idle"}
        new, old = await asyncio.gather(ask(pool, "new", "river gauge", 2), ask(pool, "old", "river gauge"))
        assert [passage.text[:26] for passage in new.passages] == [
            "new on <river gauge>, no. ",
            "new on <river gauge>, no. ",
        ]
        assert new.passages[0].url == "https://new.example/1"
        assert all(passage.score == 1.0 for passage in new.passages), "both words of the question are there"
        assert len(old.passages) == 3
        assert {passage.source for passage in old.passages} == {"old"}
        await ask(pool, "new", "again")
        eras = {one.name: (one.state, one.protocol, one.reconnects, one.calls) for one in pool.health()}
        assert eras == {
            "new": ("ready", "2026-07-28", 0, 2),
            "old": ("ready", "2025-11-25", 0, 1),
            "off": ("idle", None, 0, 0),
        }
        told = health(pool, "new")
        assert (told.tool, told.query_argument, told.implementation) == ("search", "query", "new 1.0")
        assert told.chosen
        assert told.error is None
        # Both say that their tool has another name now, each in the way of its era.
        await asyncio.gather(ask(pool, "new", "rename it"), ask(pool, "old", "rename it"))
        await until(lambda: [one.tool for one in pool.health()] == ["find", "find", None])
        again = await asyncio.gather(ask(pool, "new", "x"), ask(pool, "old", "x"))
        assert [reply.status for reply in again] == [Status.SUCCESS, Status.SUCCESS]
        assert [one.reconnects for one in pool.health()] == [0, 0, 0]


async def test_a_tool_without_a_question_argument_is_called_with_fixed_arguments_and_a_template() -> None:
    takes = {"repo_path": {"type": "string"}, "grep": {"type": "string"}, "since": {"type": "string"}}
    log = server("log", tool="git_log", takes=takes, results=1)
    fixed = msgspec.structs.replace(log, tool="git_log", arguments={"repo_path": "/srv"})
    template = msgspec.structs.replace(
        log, name="grep", tool="git_log", arguments={"repo_path": "/srv", "grep": "fix: {query}"}
    )
    async with pooled(fixed, template) as pool:
        replies = [await ask(pool, name, 'the "weir"') for name in ("log", "grep")]
        told = [(one.tool, one.query_argument) for one in pool.health()]
    sent = [reply.passages[0].text.partition("<")[2].partition(">")[0] for reply in replies]
    assert [json.loads(text) for text in sent] == [
        {"repo_path": "/srv"},
        {"repo_path": "/srv", "grep": 'fix: the "weir"'},
    ]
    assert told == [("git_log", None), ("git_log", "grep")]


SECRET = "sesame-open-please"


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


async def test_a_failed_call_does_not_affect_other_calls(written: io.StringIO) -> None:
    log = configured_log(Settings(log_level="DEBUG"), written)
    lib = server("lib", env={"LIBRARY_TOKEN": SECRET}, results=1)
    async with pooled(lib, telemetry=LoggedEvents(log)) as pool:
        assert (await ask(pool, "lib", "warm")).status is Status.SUCCESS
        error, refusal, garbage, misfit, asked = await asyncio.gather(
            *(ask(pool, "lib", f"{SECRET} {word}") for word in ("error", "refuse", "garbage", "misfit", "ask"))
        )
        assert (error.status, error.fault) == (Status.ERROR, False)
        assert error.error == "The server's tool reports an error: No shelf for '[removed] error'."
        assert (refusal.status, refusal.fault) == (Status.ERROR, True)
        assert refusal.error == "The server refused the call: The library is closed."
        assert garbage.passages[0].text.startswith(f"lib on <{SECRET} garbage>")
        assert misfit.passages, "what breaks the server's own schema is still an answer"
        assert (asked.status, asked.fault) == (Status.ERROR, False)
        assert "more input" in (asked.error or "")

        hanging = asyncio.create_task(ask(pool, "lib", "hang here"))
        many = await asyncio.gather(*(ask(pool, "lib", f"query {number}") for number in range(50)))
        for number, reply in enumerate(many):
            assert reply.passages[0].text.startswith(f"lib on <query {number}>")
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        # The server dies in the middle of two calls: both end at once, and the next one is answered by its successor.
        began = time.monotonic()
        caught, fatal = await asyncio.gather(ask(pool, "lib", "hang on"), ask(pool, "lib", "die now"))
        assert time.monotonic() - began < 5
        for reply in (caught, fatal):
            assert (reply.status, reply.fault) == (Status.ERROR, True)
            assert reply.error == "The server's process ended with status 3."
        assert (await ask(pool, "lib", "back")).passages[0].text.startswith("lib on <back>")
        told = health(pool, "lib")
        assert (told.reconnects, told.failures, told.error) == (1, 5, None)
        assert SECRET not in repr((pool.health(), error, lib))
    log.flush()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line["event"] for line in lines if "server" in line] == [
        "mcp_server_ready",
        "mcp_server_lost",
        "mcp_server_ready",
    ]
    assert SECRET not in written.getvalue()
    assert "closed" not in written.getvalue(), "nor anything else that a server said"


async def test_a_hanging_server_times_out_and_is_restarted() -> None:
    async with pooled(server("lib"), timing=McpTiming(probe_s=0.2)) as pool:
        assert (await ask(pool, "lib", "warm")).status is Status.SUCCESS
        pool.update({"lib": server("lib")}, 0.3)
        # Calls that hang in a server that is otherwise well: it is asked whether it is there, and it is.
        late = await asyncio.gather(*(ask(pool, "lib", "hang") for _ in range(4)))
        assert {(one.status, one.fault, one.error) for one in late} == {
            (Status.TIMEOUT, True, "The server did not answer within 0.3 seconds (aggregator.serverTimeoutSecs).")
        }
        assert (await ask(pool, "lib", "well")).status is Status.SUCCESS
        assert health(pool, "lib").reconnects == 0
        frozen = await asyncio.gather(ask(pool, "lib", "freeze"), *(ask(pool, "lib", "x") for _ in range(3)))
        assert {one.status for one in frozen} == {Status.TIMEOUT}
        await until(lambda: health(pool, "lib").reconnects == 1)
        pool.update({"lib": server("lib")}, 5.0)
        assert (await ask(pool, "lib", "anew")).status is Status.SUCCESS


async def test_a_url_that_never_answers_has_less_time_than_a_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        one = McpServer(name="silent", url=f"{address}/mcp?key=sesame-open-please")
        async with pooled(one, timeout_s=0.1, timing=McpTiming(connect_url_s=0.3)) as pool:
            pool.warm()
            await pool.settled()
            found = health(pool, "silent")
    assert (found.state, found.error) == ("failed", f"The server at {address} was not ready within 0.3 seconds.")


async def test_an_unresponsive_server_delays_neither_calls_nor_close() -> None:
    deaf = McpServer(name="deaf", command="sleep", args=("600",))
    async with pooled(deaf, timeout_s=0.3) as pool:
        began = time.monotonic()
        reply = await ask(pool, "deaf", "anybody?")
        said = "The server was not ready within 0.3 seconds (aggregator.serverTimeoutSecs)."
        assert (reply.status, reply.error) == (Status.TIMEOUT, said)
        assert time.monotonic() - began < 1.0
        early = Query(text="?", limit=1, similarity_threshold=0)
        reply = await pool.source("deaf").search(early, context(0.1))
        assert reply.status is Status.TIMEOUT
        assert health(pool, "deaf").state == "connecting"


async def test_a_missing_server_fails_at_once_and_is_retried_with_backoff() -> None:
    waits: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 10:
            enough.set()
            await asyncio.Event().wait()

    nothing = McpServer(name="none", command="no-such-command-anywhere")
    off = McpServer(name="off", command="no-such-command-anywhere", enabled=False)
    async with pooled(nothing, off, sleep=sleep, random=lambda: 0.5) as pool:
        pool.warm()
        await pool.settled()
        await enough.wait()
        assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
        reply = await ask(pool, "none", "?")
        assert (reply.status, reply.fault) == (Status.ERROR, True)
        assert "no-such-command-anywhere" in (reply.error or "")
        assert (health(pool, "none").state, health(pool, "off").state) == ("failed", "disabled")
        # A new configuration is worth another try, also of what has not changed.
        waits.clear()
        pool.update({"none": nothing, "off": off}, 1.0)
        await until(lambda: waits[:2] == [0.5, 1.0])
        assert (await ask(pool, "off", "?")).error == "This MCP server is disabled."
        assert (await ask(pool, "who", "?")).error == "There is no MCP server with this name."


STRICT = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if not greeted and asked["method"] != "initialize":
        sys.exit("the first message must be initialize")
    greeted = True
    answers = {
        "initialize": {
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}
        },
        "tools/list": {"tools": [{"name": "search", "inputSchema": {"type": "object", "properties": {"q": {}}}}]},
        "tools/call": {"content": [{"type": "text", "text": "The strict one has it."}]},
    }
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers[asked["method"]]}), flush=True)
"""


async def test_a_server_that_exits_at_the_modern_handshake_gets_the_legacy_one() -> None:
    strict = McpServer(name="strict", command=sys.executable, args=("-S", "-c", f"greeted = False\n{STRICT}"))
    async with pooled(strict) as pool:
        reply = await ask(pool, "strict", "anything")
        assert [passage.text for passage in reply.passages] == ["The strict one has it."]
        assert health(pool, "strict").protocol == "2025-06-18"


async def test_aggregators_in_a_circle_stop_at_the_hop_limit() -> None:
    async with pooled(server("one")) as pool:
        far = msgspec.structs.replace(context(), hops=MAX_HOPS + 1)
        reply = await pool.source("one").search(Query(text="Why?", limit=1, similarity_threshold=0), far)
    assert "in a circle" in (reply.error or "")
