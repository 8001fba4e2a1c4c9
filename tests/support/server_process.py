"""The server as its own process: started, watched by its log, and never left behind."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 15
READY = "Application startup complete."


class Program:
    """A running `anabranch serve`. Its lines are kept as they come; `log` has those that are JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._read = asyncio.create_task(self._keep_lines())
        self._more = asyncio.Event()
        self.lines: list[str] = []

    async def _keep_lines(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.lines.append(line.decode().rstrip("\n"))
            self._more.set()
        self._more.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def host(self) -> str:
        return str(self._started["host"])

    @property
    def port(self) -> int:
        return int(self._started["port"])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def _started(self) -> dict[str, Any]:
        return next(line for line in self.log if line["event"] == "server_started")

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for the log to fulfil a condition; an end of the process before that is a failure."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                assert not self._read.done(), self.text
                self._more.clear()
                await self._more.wait()

    async def logged(self, event: str, times: int = 1) -> None:
        await self.until(lambda: sum(line["event"] == event for line in self.log) >= times)

    async def listens(self) -> None:
        """Wait until a connection can be made: the log says that the server has started a moment before that."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(self.host, self.port)
                except ConnectionRefusedError:
                    await asyncio.sleep(0.005)
                else:
                    writer.close()
                    return

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self, within_s: float = PATIENCE_S) -> int:
        """The exit status, after the last line has been read."""
        async with asyncio.timeout(within_s):
            code = await self._process.wait()
            await self._read
        return code

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.pid)
        return [own, *own.children(recursive=True)]

    async def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        # To its end, or the pipe is left to whichever test runs when the garbage is collected.
        await asyncio.wait([self._read], timeout=PATIENCE_S)
        self._read.cancel()


@asynccontextmanager
async def started(
    *arguments: str, home: Path, variables: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
) -> AsyncIterator[Program]:
    """`anabranch serve …` in an empty folder, in a process group of its own, which is killed at the end. A `wrapper` is
    a command that replaces itself with the one that follows it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AGGREGATOR_")}
    # Whoever runs the tests may have collections of their own.
    usual = {
        "AGGREGATOR_ENDPOINT_ALLOWLIST": "127.0.0.0/8",
        "AGGREGATOR_DATA_DIR": str(home / "data"),
        "AGGREGATOR_SHUTDOWN_DELAY": "0",
    }
    process = await asyncio.create_subprocess_exec(
        *(*wrapper, sys.executable, "-m", "anabranch", "serve", *arguments),
        env={**inherited, **usual, **(variables or {})},
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    program = Program(process)
    try:
        yield program
    finally:
        await program.close()


@asynccontextmanager
async def serving(
    *arguments: str,
    home: Path,
    workers: int = 1,
    variables: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> AsyncIterator[Program]:
    """The same on a free port of the loopback, once every worker is ready."""
    fixed = ("--host", "127.0.0.1", "--port", "0", "--workers", str(workers))
    async with started(*fixed, *arguments, home=home, variables=variables, wrapper=wrapper) as program:
        await program.logged(READY, times=workers)
        await program.listens()
        yield program
