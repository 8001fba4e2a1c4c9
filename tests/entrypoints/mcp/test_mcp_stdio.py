"""`anabranch mcp` as a client starts it: over standard input and output, in both eras, and how it ends."""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import yaml
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.subscriptions import ToolsListChanged

from anabranch.domain.mcp import HOPS
from support.mcp_pool_fixtures import LIBRARIAN
from support.mcp_tool_client import ERAS, STUB

pytestmark = pytest.mark.xdist_group("mcp-stdio")

PATIENCE_S = 30
REMOTE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "rojo=1"}
INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}


def configured(folder: Path, *names: str) -> Path:
    """Servers that answer at once, unless they are called slow."""
    file = folder / "anabranch.yaml"
    seconds = {name: "60" if name == "slow" else "0" for name in names}
    servers = {name: {"command": sys.executable, "args": [str(STUB), name, seconds[name]]} for name in names}
    file.write_text(yaml.safe_dump({"mcpServers": servers}, sort_keys=False), encoding="utf-8")
    return file


def variables(folder: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AGGREGATOR_")}
    return {**inherited, "AGGREGATOR_DATA_DIR": str(folder / "data"), **more}


class Wire:
    """A client that writes what it likes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def send(self, *lines: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(line + b"\n" for line in lines))
        await self.process.stdin.drain()

    async def call(self, number: int, method: str, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        await self.send(json.dumps(message).encode())

    async def heard(self) -> Any:
        """Whatever comes on standard output must be a message."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self.process.stdout.readline())

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@asynccontextmanager
async def wire(file: Path, **more: str) -> AsyncIterator[Wire]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "anabranch", "mcp", "--config", str(file)),
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        env=variables(file.parent, **more),
    )
    try:
        yield Wire(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("mode", ERAS)
async def test_mcp_stdio_client_uses_the_tools(tmp_path: Path, mode: Literal["legacy", "auto"]) -> None:
    file = configured(tmp_path, "rivers")
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "anabranch", "mcp", "--config", str(file)], env=variables(tmp_path)
    )
    heard = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total))

    async with Client(stdio_client(command), mode=mode) as tools:
        listed = [tool.name for tool in (await tools.list_tools()).tools]
        found = await tools.call_tool("aggregate", {"query_text": "anabranch"}, progress_callback=progress)
        nothing = await tools.call_tool("search", {"query": "anything"})
        refused = await tools.call_tool("ask", {"question": "Anything?"})
    assert listed == ["aggregate", "search", "ask"]
    assert found.structured_content["metadata"]["servers_succeeded"] == 1
    assert heard == [(1, 1)]
    assert nothing.structured_content["results"] == []
    assert "anabranch ingest" in nothing.structured_content["hint"]
    assert refused.structured_content["refused"]
    assert [source["name"] for source in refused.structured_content["sources"]] == ["rivers"]


async def test_mcp_stdio_answers_malformed_lines_with_errors(tmp_path: Path) -> None:
    async with wire(configured(tmp_path), AGGREGATOR_MAX_REQUEST_BYTES="1000") as client:
        await client.call(1, "initialize", **INITIALIZE)
        assert (await client.heard())["result"]["serverInfo"]["name"] == "anabranch"
        await client.send(b"", b"{nonsense", b"\xff\xfe", b"[" * 100_000, b'{"id": 7}', b"x" * 1_000_000)
        codes = [(said["id"], said["error"]["code"]) for said in [await client.heard() for _ in range(5)]]
        assert codes == [(None, -32700), (None, -32700), (None, -32600), (7, -32600), (None, -32600)]
        await client.call(2, "ping")
        assert await client.heard() == {"jsonrpc": "2.0", "id": 2, "result": {}}
        assert client.process.stdin is not None
        client.process.stdin.close()
        assert await client.ended() == 0


@pytest.mark.parametrize("how", ["end", "SIGTERM"])
async def test_mcp_stdio_ends_with_its_mcp_servers(tmp_path: Path, how: str) -> None:
    file = configured(tmp_path, "slow")
    async with wire(file) as client:
        await client.call(1, "initialize", **INITIALIZE)
        await client.heard()
        token = {"progressToken": 1}
        await client.call(2, "tools/call", name="ask", arguments={"question": "x?", "sources": ["slow"]}, _meta=token)
        own = psutil.Process(client.process.pid)
        async with asyncio.timeout(PATIENCE_S):
            while not any(str(STUB) in " ".join(child.cmdline()) for child in own.children(recursive=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        children = own.children(recursive=True)
        if how == "end":
            assert client.process.stdin is not None
            client.process.stdin.close()
        else:
            client.process.send_signal(signal.Signals[how])
        assert await client.ended() == 0
        gone, alive = psutil.wait_procs(children, timeout=5)
    assert gone
    assert not alive


async def test_mcp_stdio_cancellation_ends_the_run(tmp_path: Path) -> None:
    file = configured(tmp_path, "slow", "rivers")
    async with wire(file, AGGREGATOR_MAX_RUNNING="1") as client:
        await client.call(1, "initialize", **INITIALIZE)
        await client.heard()
        call = {"name": "ask", "arguments": {"question": "Anything?", "sources": ["slow"]}}
        await client.call(2, "tools/call", **call)
        await client.call(3, "tools/call", **call)
        turned_away = await client.heard()
        assert turned_away["result"]["structuredContent"]["error"] == "overloaded"
        running = 5 - turned_away["id"]
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": running}}
        await client.send(json.dumps(cancel).encode())
        async with asyncio.timeout(PATIENCE_S):
            for number in itertools.count(4):  # until its place is free
                asked = {"question": "What is an anabranch?", "sources": ["rivers"]}
                await client.call(number, "tools/call", name="ask", arguments=asked)
                while (said := await client.heard())["id"] != number:
                    pass
                if "answer" in said["result"]["structuredContent"]:
                    break


async def test_mcp_stdio_reloads_the_configuration_on_sighup_and_announces_changed_tools(tmp_path: Path) -> None:
    file = configured(tmp_path, "rivers")
    async with wire(file) as client:
        await client.call(1, "initialize", **INITIALIZE)
        assert (await client.heard())["result"]["capabilities"]["tools"]["listChanged"] is True
        await client.send(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
        await client.call(2, "tools/list")
        assert "rivers" in (await client.heard())["result"]["tools"][0]["description"]
        configured(tmp_path, "rivers", "lakes")
        client.process.send_signal(signal.SIGHUP)
        assert (await client.heard())["method"] == "notifications/tools/list_changed"
        await client.call(3, "tools/list")
        assert "rivers, lakes" in (await client.heard())["result"]["tools"][0]["description"]
        client.process.send_signal(signal.SIGHUP)  # changes nothing, and nothing is announced
        configured(tmp_path)
        client.process.send_signal(signal.SIGHUP)
        assert (await client.heard())["method"] == "notifications/tools/list_changed"
        await client.call(4, "tools/list")
        assert [tool["name"] for tool in (await client.heard())["result"]["tools"]] == ["search", "ask"]
        client.process.send_signal(signal.SIGINT)
        assert await client.ended() == 0


async def test_mcp_stdio_client_of_the_modern_protocol_subscribes_to_changed_tools(tmp_path: Path) -> None:
    file = configured(tmp_path, "rivers")
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "anabranch", "mcp", "--config", str(file)], env=variables(tmp_path)
    )
    own = psutil.Process()
    before = {child.pid for child in own.children()}
    async with asyncio.timeout(PATIENCE_S), Client(stdio_client(command), mode="auto") as tools:
        capability = tools.server_capabilities.tools
        assert capability is not None
        assert capability.list_changed
        async with tools.listen(tools_list_changed=True) as changes:
            (program,) = (child for child in own.children() if child.pid not in before)
            configured(tmp_path)
            program.send_signal(signal.SIGHUP)
            assert isinstance(await anext(aiter(changes)), ToolsListChanged)
        assert [tool.name for tool in (await tools.list_tools()).tools] == ["search", "ask"]


@pytest.mark.parametrize("mode", ERAS)
async def test_a_tool_call_over_stdio_continues_the_trace_and_the_hops_of_its_caller(
    tmp_path: Path, mode: Literal["legacy", "auto"]
) -> None:
    scenario = json.dumps({"name": "lib", "results": 1, "traced": True})
    lib = {"command": sys.executable, "args": ["-P", LIBRARIAN, "--scenario", scenario]}
    file = tmp_path / "anabranch.yaml"
    slow = {"serverTimeoutSecs": 30, "totalTimeoutSecs": 30}  # a busy machine starts the server slowly
    file.write_text(yaml.safe_dump({"mcpServers": {"lib": lib}, "aggregator": slow}), encoding="utf-8")
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "anabranch", "mcp", "--config", str(file)], env=variables(tmp_path)
    )
    meta: Any = {**REMOTE, HOPS: 2}
    async with Client(stdio_client(command), mode=mode) as tools:
        result = await tools.call_tool("aggregate", {"query_text": "rivers"}, meta=meta)
    (found,) = result.structured_content["results"]
    received = json.loads(found["server_result"]["content"]["text"])
    assert {name: received[name] for name in (*REMOTE, HOPS)} == {**REMOTE, HOPS: 3}
