"""What all connections of a pool share: clients, time limits, and tasks that are cancelled with them."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from anabranch.domain.contracts import Clock, Outbound, Telemetry
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import SourceReply, Status, Value

T = TypeVar("T")

EXPIRED = "The server's session expired."

# Longer than it takes to end any child process.
CANCEL_AGAIN_S = 5.0


def failed(server: str, error: str, status: Status = Status.ERROR, *, fault: bool = True) -> SourceReply:
    return SourceReply(path=server, status=status, error=error, fault=fault)


class TrackedTasks:
    """The SDK takes seconds to end a call if the server does not read its cancellation. The caller does not wait for
    that; `cancel_all` does."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run_within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work; TimeoutError if it takes longer."""
        task = asyncio.create_task(work)
        self.watch(task)
        try:
            await asyncio.wait({task}, timeout=max(0.0, seconds))
        finally:
            task.cancel()
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise ConnectionError("The call was cancelled.")
        return task.result()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Keep the task until it is done."""
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

    async def cancel_all(self) -> None:
        await cancel_until_done(*self._running)


async def cancel_until_done(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks until they are done: the SDK may swallow a cancellation at the end of a connection."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


def located(server: McpServer) -> str:
    """Where a server at a URL is, for errors: without the path and the query, which may contain a secret."""
    if server.url is None:
        return ""
    parts = urlsplit(server.url)
    return f" at {parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class McpTiming(Value):
    """Time limits of connections to MCP servers, in seconds."""

    # A program may have to be downloaded first. A URL only has to answer; it has no less time than for a call.
    connect_s: float = 30.0
    connect_url_s: float = 10.0
    disconnect_s: float = 15.0
    # A connection that lasted so long was stable: when it is lost, the next attempt is immediate.
    stable_s: float = 10.0
    # How long a server that left `silent_calls` calls in a row unanswered may take to answer a probe.
    probe_s: float = 2.0
    silent_calls: int = 3
    # The least time between two listings of the tools of a server that announces changes.
    relist_s: float = 1.0
    # How long a removed server still answers calls that had selected it.
    removal_s: float = 0.25
    # Two timers watch one deadline. This close to it, a cancelled call counts as timed out.
    deadline_tolerance_s: float = 0.05
    # HTTP: replies of which only the status matters.
    notification_s: float = 5.0
    session_delete_s: float = 1.0
    # HTTP: how long to wait for the last bytes of a stream, so that its connection can be reused.
    last_bytes_s: float = 0.02
    # HTTP: the least time between two GET streams.
    listen_gap_s: float = 0.25
    # stdio: how long a process may take to read a message.
    write_s: float = 5.0


class PoolServices(Value):
    """The clients, clock and limits that all servers of a pool share."""

    outbound: Outbound
    clock: Clock
    telemetry: Telemetry
    max_reply_bytes: int
    timing: McpTiming = McpTiming()
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
