"""Real MCP servers as children, of both eras, under both event loops."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, TextContent

from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.stdio_transport import stdio_transport
from support.mcp_children import ENV, MINI, TELLS_PID, child, lives, scripted, until

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def run(loop: Loop, test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test)


def connected(server: McpServer, heard: Callable[[str], None] = lambda _: None, **given: Any) -> Client:
    return Client(stdio_transport(server, max_line=1_000_000, on_output=heard), mode="auto", **given)


@LOOPS
def test_stdio_server_of_the_legacy_protocol(loop: Loop, tmp_path: Any) -> None:
    async def test() -> None:
        heard: list[str] = []
        kept = {"MEMORY_FILE_PATH": str(tmp_path / "memory.json")}
        async with connected(McpServer(name="m", command="mcp-server-memory", env=ENV | kept), heard.append) as client:
            assert client.protocol_version == "2025-11-25"
            entity = {"name": "Ouse", "entityType": "river", "observations": ["It runs through York — café."]}
            await client.call_tool("create_entities", {"entities": [entity]})
            found = await asyncio.gather(*(client.call_tool("search_nodes", {"query": "york"}) for _ in range(8)))
            texts = {one.content[0].text for one in found if isinstance(one.content[0], TextContent)}
            assert len(texts) == 1
            assert "York — café." in texts.pop()
            await until(lambda: heard)
            left_at = time.monotonic()
        assert time.monotonic() - left_at < 2.0
        assert heard == ["Knowledge Graph MCP Server running on stdio"]

    run(loop, test())


@LOOPS
def test_stdio_server_of_the_modern_protocol(loop: Loop) -> None:
    async def test() -> None:
        async with connected(McpServer(name="t", command="mcp-server-time", env=ENV)) as client:
            assert client.protocol_version == "2026-07-28"
            found = await client.call_tool("get_current_time", {"timezone": "Europe/London"})
            assert not found.is_error

    run(loop, test())


@LOOPS
def test_stdio_server_that_dies_during_a_call(loop: Loop) -> None:
    async def test() -> None:
        told: list[Any] = []

        async def noticed(message: Any) -> None:
            told.append(message)

        async with connected(scripted(MINI), message_handler=noticed) as client:
            with pytest.raises(MCPError) as failed:
                await client.call_tool("perish", {}, read_timeout_seconds=10)
            assert failed.value.code == CONNECTION_CLOSED
            await until(lambda: told)
            assert str(told[0]) == "The server's process ended with status 3."
            assert told[0].failure_kind is FailureKind.DOWN

    run(loop, test())


@LOOPS
def test_stdio_server_inherits_no_secrets_or_descriptors(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our environment nor what we have open, nor our session, nor the signals that Python ignores."""
    monkeypatch.setenv("AGGREGATOR_SECRET", "hush")
    ours, theirs = os.pipe()
    os.set_inheritable(ours, True)
    tells = """
print('fds', *os.listdir('/dev/fd'), file=sys.stderr)
print('env', *sorted(os.environ), file=sys.stderr)
print('session', os.getsid(0) == os.getpid(), file=sys.stderr)
print('pipe', open('/proc/self/status').read().split('SigIgn:')[1].split()[0], file=sys.stderr, flush=True)
sys.stdin.read()
"""

    async def test() -> None:
        async with child(scripted(TELLS_PID + tells, env={"OWN": "1"})) as started:
            await until(lambda: len(started.lines) == 5)
        said = {line.split()[0]: line.split()[1:] for line in started.lines}
        assert set(said["fds"]) <= {"0", "1", "2", "3"}  # the last is that of the listing
        assert "OWN" in said["env"]
        assert "PATH" in said["env"]
        assert "AGGREGATOR_SECRET" not in said["env"]
        assert said["session"] == ["True"]
        python_ignores = {signal.SIGPIPE, signal.SIGXFSZ}
        ignored = int(said["pipe"][0], 16) & 0x7FFF_FFFF  # above are those that only threads have
        assert ignored == sum(1 << (number - 1) for number in python_ignores)  # its own again

    try:
        run(loop, test())
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        (McpServer(name="x", command="no-such-command", args=("s3cret",)), "no-such-command could not be run: it was"),
        (
            McpServer(name="x", command="/dev/null", args=("s3cret",)),
            "/dev/null could not be run: it is not",
        ),
        (McpServer(name="x", command="nul\0", args=("s3cret",)), "could not be run: Invalid argument"),
        (McpServer(name="x", command=sys.executable, cwd="/no/such"), "working directory, /no/such, does not exist"),
    ],
    ids=["not there", "no program", "no string", "no folder"],
)
async def test_commands_that_cannot_be_started_are_explained(server: McpServer, sentence: str) -> None:
    with pytest.raises(UpstreamError, match=sentence) as failed:
        async with connected(server):
            pass
    assert "s3cret" not in str(failed.value)
    assert failed.value.failure_kind is FailureKind.UNUSABLE


async def test_stdio_server_runs_in_its_working_directory(tmp_path: Any) -> None:
    where = scripted("import os, sys; print(os.getcwd(), file=sys.stderr)", cwd=str(tmp_path))
    async with child(where) as started:
        assert "status 0" in str(await started.receive())
    assert started.lines == [str(tmp_path.resolve())]


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_cancelling_still_ends_the_server_process(way: str) -> None:
    import anyio  # noqa: PLC0415

    async def used(scope: anyio.CancelScope) -> None:
        with scope:
            async with child("for line in sys.stdin: pass\ntime.sleep(0.2)") as started:
                pids.set_result(await started.pid())
                await asyncio.Event().wait()

    pids: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    scope = anyio.CancelScope()
    task = asyncio.create_task(used(scope))
    pid = await pids
    if way == "native":
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # and once more, in the middle of the stop
    else:
        scope.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.done()
    assert not lives(pid)
