"""The pool of MCP servers: one keeper for each server connects, restarts and calls it."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from anabranch.domain.mcp import MAX_HOPS, McpServer, ServerHealth, ServerState
from anabranch.domain.model import Context, Passage, Query, SourceReply, Status
from anabranch.domain.signals import McpServerStateChanged
from anabranch.sources.mcp.services import EXPIRED, PoolServices, TrackedTasks, cancel_until_done, failed, located
from anabranch.text.support import MAX_READ, Wording, share

if TYPE_CHECKING:
    from anabranch.sources.mcp.connection import McpConnection

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
# Changes of these fields need no new connection.
IN_PLACE = ("result_path", "reputation", "description")
IN_A_CIRCLE = "The question has passed through too many aggregators: some of them ask each other in a circle."


async def load_sdk() -> None:
    """Import the MCP SDK, in a thread: it takes a second. The SDK comes first, as a whole: importing parts of it from
    two threads at once breaks it."""
    if not hasattr(sys.modules.get("anabranch.sources.mcp.connection"), "McpConnection"):  # or another task imports it
        for needed in ("mcp", "anabranch.sources.mcp.connection"):
            await asyncio.to_thread(import_module, needed)


def reconnect_delays(random: Callable[[], float]) -> Iterator[float]:
    """Reconnect backoff: no delay at first, then exponentially longer ones. Jitter of a quarter either way: servers
    that failed together should not be retried together."""
    delay_s = 0.0
    while True:
        yield delay_s * (0.75 + random() / 2)
        delay_s = min(LONGEST_DELAY_S, delay_s * 2 or FIRST_DELAY_S)


class ServerKeeper:
    """One server: `start` connects it, `retire` closes it after its calls in flight."""

    def __init__(self, server: McpServer, services: PoolServices, timeout_s: float) -> None:
        self.server = server
        self.timeout_s = timeout_s
        self.settled = asyncio.Event()
        self._services = services
        self._timing = services.timing
        self.state: ServerState = "idle" if server.enabled else "disabled"
        self._state_changed = asyncio.Event()
        self._error: str | None = None
        self._last_output = ""
        self._task: asyncio.Task[None] | None = None
        self._connection: McpConnection | None = None
        self._last_connection: McpConnection | None = None
        self._is_retired = False
        self._calls_in_flight = 0
        self._tasks = TrackedTasks()
        self._mode = "auto"
        self._calls = self._failures = self._connects = 0
        self._latency_ms: int | None = None

    def start(self) -> None:
        if self.accepts_calls and not self.is_started:
            self._set_state("connecting")
            self._task = asyncio.create_task(self._run(), name=f"mcp {self.server.name}")
            self._tasks.watch(self._task)

    @property
    def is_started(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def accepts_calls(self) -> bool:
        return self.server.enabled and not self._is_retired

    def health(self) -> ServerHealth:
        known, error = self._last_connection, self._error
        if error and self._last_output and self.state == "failed":
            error = f"{error} Its last output: {self._last_output}"
        return ServerHealth(
            name=self.server.name,
            state=self.state,
            transport="stdio" if self.server.url is None else "http",
            protocol=known.protocol if known else None,
            implementation=known.implementation if known else None,
            tool=known.choice.tool if known else None,
            query_argument=known.choice.query_argument if known else None,
            chosen=known.choice.why if known else None,
            error=error,
            calls=self._calls,
            failures=self._failures,
            latency_ms=self._latency_ms,
            reconnects=max(0, self._connects - 1),
            description=self.server.description,
        )

    async def search(self, query: Query, context: Context) -> SourceReply:
        self.start()
        clock = self._services.clock
        began = clock.monotonic()
        ends = min(began + self.timeout_s, context.deadline)
        self._calls += 1
        self._calls_in_flight += 1
        try:
            # A server does not process a call of an expired session, so the call can be repeated.
            reply = await self._call(query, context, ends) or await self._call(query, context, ends)
        finally:
            self._calls_in_flight -= 1
            self._stop_if_idle()
        if reply is None:
            reply = failed(self.server.name, "The server's sessions expire as soon as they are created.")
        self._latency_ms = round((clock.monotonic() - began) * 1000)
        self._failures += reply.status is not Status.SUCCESS
        if self.state == "ready":
            self._error = reply.error
        return reply

    async def _call(self, query: Query, context: Context, ends: float) -> SourceReply | None:
        """One call; None if the session has expired."""
        now = self._services.clock.monotonic
        setting = " (aggregator.serverTimeoutSecs)" if ends < context.deadline else ""
        within = f"within {ends - now():.3g} seconds{setting}."
        try:
            connection = await self._wait_ready(ends)
        except TimeoutError:
            return failed(self.server.name, f"The server was not ready {within}", Status.TIMEOUT)
        if connection is None:
            return failed(self.server.name, self._error or "The server is not connected.")
        from anabranch.sources.mcp.connection import source_reply  # noqa: PLC0415  the SDK, which `_run` has loaded

        try:
            answer = await self._tasks.run_within(ends - now(), connection.call(query, context))
        except TimeoutError:
            connection.count_unanswered()
            return failed(self.server.name, f"The server did not answer {within}", Status.TIMEOUT)
        except asyncio.CancelledError:
            if now() >= ends - self._timing.deadline_tolerance_s:
                connection.count_unanswered()
            raise
        except Exception as error:  # noqa: BLE001  any exception of the SDK is a failure of the server
            return connection.call_failed(error)
        try:
            return await source_reply(answer, self.server, ends - now())
        except TimeoutError:
            return failed(
                self.server.name, f"The server sent a reply that took too long to read {within}", Status.TIMEOUT
            )

    async def _wait_ready(self, ends: float) -> "McpConnection | None":
        """Wait for the connection; None if it could not be made."""
        while True:
            connection = self._connection
            if connection is not None and not connection.ended.is_set():
                return connection
            if self.state in ("failed", "idle", "disabled"):
                return None
            async with asyncio.timeout(max(0.0, ends - self._services.clock.monotonic())):
                await self._state_changed.wait()

    async def _run(self) -> None:
        clock, delays = self._services.clock, reconnect_delays(self._services.random)
        try:
            await load_sdk()
            while True:
                began, before = clock.monotonic(), self._connects
                reason = await self._connect()
                _raise_if_cancelled()
                was_ready = self._connects > before
                was_long = clock.monotonic() - began >= self._timing.stable_s
                # A call noticed that the session has expired, and waits for the new one.
                if was_ready and (was_long or reason == EXPIRED):
                    delays = reconnect_delays(self._services.random)
                wait_s = next(delays)
                self._error = reason
                # An immediate retry, perhaps with the legacy protocol, comes before the state `failed`.
                if wait_s or (was_long and not was_ready):
                    # What a server writes after its first call may contain the question.
                    self._set_state("failed", reason, "" if was_ready else self._last_output)
                    if wait_s:
                        await self._services.sleep(wait_s)
                    reason = ""
                self._set_state("connecting", reason)
        finally:
            self.settled.set()
            self._set_state("idle")

    async def _connect(self) -> str:
        """Make one connection and keep it until it ends. Returns why it ended."""
        from anabranch.sources.mcp import connection as sdk  # noqa: PLC0415

        def record_output(line: str) -> None:
            if line.strip():
                self._last_output = sdk.sanitize(line, self.server)

        self._last_output = ""
        ready: McpConnection | None = None
        try:
            async with (
                asyncio.timeout(self._connect_s) as limit,
                sdk.connected(self.server, self._services, self._mode, record_output) as ready,
            ):
                limit.reschedule(None)
                self._connection = self._last_connection = ready
                self._mode = ready.mode
                self._connects += 1
                self._error = None
                self._set_state("ready")
                _raise_if_cancelled()
                try:
                    await self._watch(ready)
                finally:
                    self._connection = None
                    limit.reschedule(asyncio.get_running_loop().time() + self._timing.disconnect_s)
        except Exception as error:  # noqa: BLE001  the task's boundary: it is reported, and retried
            if sdk.is_misconfigured(error):
                # The output of its process is unrelated.
                self._last_output = ""
            if ready is None:
                # Some servers of the legacy protocol exit at the first message of the modern one.
                self._mode = "legacy" if self._mode == "auto" else "auto"
            if ready is None or not ready.reason:
                return sdk.connection_error(error, self.server, self._connect_s)
        return ready.reason

    @property
    def _connect_s(self) -> float:
        timing = self._timing
        return timing.connect_s if self.server.url is None else max(timing.connect_url_s, self.timeout_s)

    async def _watch(self, connection: "McpConnection") -> None:
        while not connection.ended.is_set():
            await connection.wakeup.wait()
            connection.wakeup.clear()
            if connection.tools_changed:
                await self._tasks.run_within(self._timing.connect_s, connection.find_tool())
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timing.relist_s):
                        await connection.ended.wait()
            if connection.is_silent:
                with suppress(TimeoutError):
                    await self._tasks.run_within(self._timing.probe_s, connection.probe())
                if connection.is_silent:
                    connection.end("The server stopped answering.")

    def _set_state(self, state: ServerState, reason: str = "", last_output: str = "") -> None:
        if state == self.state:
            return
        self.state = state
        self._state_changed.set()
        self._state_changed = asyncio.Event()
        if state in ("ready", "failed"):
            self.settled.set()
        if not self._is_retired:
            self._services.telemetry.noted(
                McpServerStateChanged(server=self.server.name, state=state, reason=reason, last_words=last_output)
            )

    def retire(self) -> None:
        """Accept no new calls, and close after those in flight."""
        self._is_retired = True
        self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._is_retired and not self._calls_in_flight and self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no task of it is left."""
        if self._task is not None:
            await asyncio.wait({self._task})
        await self._tasks.cancel_all()

    async def close(self) -> None:
        """Close now, even with calls in flight."""
        self._is_retired = True
        if self._task is not None:
            await cancel_until_done(self._task)
        await self.wait_closed()
        if self.state != "disabled":
            self._set_state("idle")


def _raise_if_cancelled() -> None:
    """The SDK swallows a cancellation that arrives together with the end of a connection."""
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError


class McpSource:
    """Searches the server that has the name at the time of the call. Results keep the server's order."""

    def __init__(self, name: str, find: Callable[[str], ServerKeeper | None]) -> None:
        self._name = name
        self._find = find

    async def search(self, query: Query, context: Context) -> SourceReply:
        keeper = self._find(self._name)
        if keeper is None:
            return failed(self._name, "There is no MCP server with this name.", fault=False)
        if not keeper.accepts_calls:
            return failed(self._name, "This MCP server is disabled.", fault=False)
        if context.hops > MAX_HOPS:
            return failed(self._name, IN_A_CIRCLE, fault=False)
        await load_sdk()  # the server's time does not include ours
        reply = await keeper.search(query, context)
        if reply.error and not (context.operator or context.local_operator):
            reply = msgspec.structs.replace(reply, error=reply.error.replace(located(keeper.server), ""))
        if query.raw or not reply.passages:
            return reply
        wording = Wording(query.text)
        passages = tuple(_scored(passage, wording) for passage in reply.passages[: query.limit])
        return msgspec.structs.replace(reply, passages=passages)


def _scored(passage: Passage, wording: Wording) -> Passage:
    """A result without a score gets the share of the question's words that it contains."""
    if passage.score > 0:
        return passage
    found = wording.within(f"{passage.title}\n{passage.text[:MAX_READ]}")
    return msgspec.structs.replace(passage, score=share(found, wording.words))


class Pool:
    """One connection per server, shared by all questions. A server is connected at its first call, or by `warm`."""

    def __init__(self, servers: Mapping[str, McpServer], services: PoolServices, call_timeout_s: float) -> None:
        self._services = services
        self._keepers = {name: ServerKeeper(server, services, call_timeout_s) for name, server in servers.items()}
        self._removed: dict[str, ServerKeeper] = {}
        self._closing: dict[asyncio.Task[None], ServerKeeper] = {}
        self._is_warm = False

    def warm(self) -> None:
        """Start to connect to every enabled server, and to those that are configured later."""
        self._is_warm = True
        for keeper in self._keepers.values():
            keeper.start()

    def update(self, servers: Mapping[str, McpServer], call_timeout_s: float, *, retry_failed: bool = True) -> None:
        """Replace the configuration. An unchanged server keeps its connection. One that has failed is retried at once
        with `retry_failed`, else when its waiting time is over. A removed or changed server is closed when its calls
        in flight have ended."""
        before, self._keepers = self._keepers, {}
        for name, server in servers.items():
            kept = before.get(name)
            retried = retry_failed and kept is not None and kept.state == "failed"
            if kept is not None and not retried and _is_same(kept.server, server):
                del before[name]
                kept.server, kept.timeout_s = server, call_timeout_s
                self._keepers[name] = kept
            else:
                self._keepers[name] = ServerKeeper(server, self._services, call_timeout_s)
        for name, keeper in before.items():
            if name not in servers and keeper.server.enabled:
                self._removed[name] = keeper
            else:
                keeper.retire()
            if name not in servers or not servers[name].enabled:
                self._services.telemetry.noted(McpServerStateChanged(server=name, state="idle"))
            closing = asyncio.create_task(self._close_removed(name, keeper))
            self._closing[closing] = keeper
            closing.add_done_callback(self._closing.pop)
        if self._is_warm:
            self.warm()

    async def _close_removed(self, name: str, keeper: ServerKeeper) -> None:
        if self._removed.get(name) is keeper:
            await asyncio.sleep(self._services.timing.removal_s)
            if self._removed.get(name) is keeper:
                del self._removed[name]
            keeper.retire()
        await keeper.wait_closed()

    def source(self, name: str) -> McpSource:
        return McpSource(name, lambda name: self._keepers.get(name) or self._removed.get(name))

    def health(self) -> tuple[ServerHealth, ...]:
        return tuple(keeper.health() for keeper in self._keepers.values())

    async def settled(self) -> None:
        """Wait until each started server has become ready or has failed once."""
        for keeper in list(self._keepers.values()):
            if keeper.is_started:
                await keeper.settled.wait()

    async def close(self) -> None:
        """When this returns, every child process has ended."""
        closing = [keeper.close() for keeper in (*self._keepers.values(), *self._closing.values())]
        await asyncio.gather(*closing, *self._closing)


def _is_same(one: McpServer, other: McpServer) -> bool:
    return msgspec.structs.replace(one, **{name: getattr(other, name) for name in IN_PLACE}) == other
