"""The process guard ends every process of an MCP server, whichever process dies first."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anabranch
from support.mcp_children import DAEMON, TELLS_PID, child, lives, until

# Deaf to the end of its input and to whoever asks, with a daemon.
FAMILY = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DAEMON + "time.sleep(600)\n"
# One of us: holds the family's connection open until it is killed.
HOLDER = """
import asyncio, functools, sys
from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.services import McpTiming
from anabranch.sources.mcp.stdio_transport import stdio_transport
async def main():
    server = McpServer(name="family", command=sys.executable, args=("-c", sys.argv[1]))
    heard = functools.partial(print, flush=True)
    async with stdio_transport(server, max_line=1000, on_output=heard, timing=McpTiming()):
        await asyncio.Event().wait()
asyncio.run(main())
"""


@asynccontextmanager
async def holder() -> AsyncIterator[tuple[asyncio.subprocess.Process, list[int]]]:
    """A process that holds a family of two, and the pids of those."""
    path = str(Path(anabranch.__file__).parent.parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HOLDER,
        TELLS_PID + FAMILY,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            said = [await process.stdout.readline() for _ in range(2)]
        yield process, [int(line.split()[1]) for line in said]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


async def test_mcp_server_processes_end_when_we_are_killed() -> None:
    async with holder() as (process, family):
        leash = parent(family[0])
        assert all(map(lives, [leash, *family]))
        process.kill()
        await until(lambda: not any(map(lives, [leash, *family])), within_s=5)


async def test_ctrl_c_does_not_reach_mcp_server_processes() -> None:
    """Children have a session of their own, so that a Ctrl-C reaches them only through us."""
    async with child(FAMILY) as started:
        pid = await started.pid(1)
        leash = parent(started.pids[0])
        assert os.getsid(leash) == leash
        assert len({os.getsid(one) for one in (0, leash, started.pids[0], pid)}) == 4
        os.kill(leash, signal.SIGINT)
        assert "was ended by SIGKILL" in str(await started.receive())
        assert not any(map(lives, started.pids))


async def test_killing_the_process_guard_ends_the_server() -> None:
    async with child(FAMILY.replace(DAEMON, "")) as started:
        pid = await started.pid()
        os.kill(parent(pid), signal.SIGKILL)
        assert "was ended by SIGKILL" in str(await started.receive())
        await until(lambda: not lives(pid), within_s=5)


async def test_killing_the_process_guard_ends_grandchildren() -> None:
    """As with `sh -c`; it is ended when the connection is left."""
    fork = "if not os.fork():\n    print('pid', os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(600)"
    async with child(fork) as started:
        await started.pid(1)
        os.kill(parent(started.pids[0]), signal.SIGKILL)
        await until(lambda: not lives(started.pids[0]), within_s=5)
    await until(lambda: not any(map(lives, started.pids)), within_s=5)


async def test_an_ended_server_leaves_no_processes() -> None:
    async with child(DAEMON + "else:\n    time.sleep(0.1)") as started:
        assert "status 0" in str(await started.receive())
        await until(lambda: not any(map(lives, started.pids)), within_s=5)
    assert len(started.pids) == 2


async def test_a_server_that_keeps_forking_is_ended() -> None:
    """Thirty-two, all but one with a session of their own."""
    breeds = "for _ in range(5): os.fork()\nif os.getpgrp() != os.getpid(): os.setsid()\n"
    async with child(breeds + TELLS_PID + "time.sleep(600)") as started:
        await started.pid(32)
        os.kill(parent(started.pids[0]), signal.SIGTERM)
        assert "was ended by SIGTERM" in str(await started.receive())
        await until(lambda: not any(map(lives, started.pids)), within_s=5)
