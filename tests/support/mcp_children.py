"""Child processes for tests of the stdio transport: small scripts, their output, and whether they are alive."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp.client._transport import ReadStream, WriteStream
from mcp.shared.message import SessionMessage

from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.services import McpTiming
from anabranch.sources.mcp.stdio_transport import stdio_transport

BIN = Path(sys.executable).parent
NODE_BIN = BIN.parent / "node" / "node_modules" / ".bin"
ENV = {"PATH": f"{BIN}:{NODE_BIN}:{os.environ['PATH']}"}
MAX_LINE = 1_000_000

TELLS_PID = "import os, sys, time, signal; print('pid', os.getpid(), file=sys.stderr, flush=True)\n"

# Speaks just enough of the old era, and its `perish` ends it in the middle of a call.
MINI = (
    TELLS_PID
    + """
import json
def reply(asked):
    match asked["method"]:
        case "initialize":
            version = asked["params"]["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "mini", "version": "1"}}
        case "tools/list":
            return {"tools": [{"name": "perish", "inputSchema": {"type": "object"}}]}
        case "tools/call":
            os._exit(3)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = reply(asked)
        said = {"result": result} if result else {"error": {"code": -32601, "message": "What?"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)
"""
)

# A grandchild in a session of its own, whose parent has gone: nothing ties it to us but its descent.
DAEMON = """
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print('pid', os.getpid(), file=sys.stderr, flush=True)
    time.sleep(600)
"""


class Child:
    """A child that was started, and what it wrote beside its messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.read: ReadStream[SessionMessage | Exception]
        self.write: WriteStream[SessionMessage]

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("pid ")]

    async def pid(self, index: int = 0) -> int:
        await until(lambda: len(self.pids) > index)
        return self.pids[index]

    async def receive(self) -> Any:
        async with asyncio.timeout(10):
            return await self.read.receive()


def scripted(code: str, **given: Any) -> McpServer:
    return McpServer(name="child", command=sys.executable, args=("-c", code), **given)


@asynccontextmanager
async def child(
    code: str | McpServer, max_line: int = MAX_LINE, timing: McpTiming | None = None
) -> AsyncIterator[Child]:
    started = Child()
    server = scripted(TELLS_PID + code) if isinstance(code, str) else code
    lines = started.lines.append
    async with stdio_transport(server, max_line=max_line, on_output=lines, timing=timing or McpTiming()) as streams:
        started.read, started.write = streams
        yield started


def lives(pid: int) -> bool:
    """A zombie lives no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  other processes announce nothing
            await asyncio.sleep(0.005)
