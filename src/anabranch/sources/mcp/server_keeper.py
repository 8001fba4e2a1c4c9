"""What the keepers of all servers share, and how long each waits before it tries again."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from anabranch.domain.contracts import Clock, Outbound, Telemetry
from anabranch.domain.errors import AnabranchError
from anabranch.domain.mcp import McpServer, ServerHealth, ServerState
from anabranch.domain.model import Context, Query, SourceReply, Status, Value
from anabranch.domain.signals import ServerMoved
from anabranch.sources.mcp.bounded_tasks import BoundedTasks, ended

if TYPE_CHECKING:
    from anabranch.sources.mcp.connection import McpConnection

FIRST_S, LONGEST_S = 0.5, 30.0


class PoolServices(Value):
    """What all members share."""

    outbound: Outbound
    clock: Clock
    telemetry: Telemetry
    max_reply_bytes: int
    sleep: Callable[[float], Awaitable[None]]
    chance: Callable[[], float]


class ReconnectDelays:
    """None at first, then ever longer ones."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._usual_s = 0.0

    def next_s(self) -> float:
        """A quarter more or less: those who have failed together should not come back together."""
        wait_s = self._usual_s * (0.75 + self._chance() / 2)
        self._usual_s = min(LONGEST_S, self._usual_s * 2 or FIRST_S)
        return wait_s


CONNECT_S = 30.0
LEAVE_S = 15.0
# A connection that has stood for so long was a good one: what is lost then is made again at once.
STEADY_S = 10.0
# So many calls in a row without a word from the server, and it is asked whether it is there at all, for so long.
SILENCES = 3
PROBE_S = 2.0
# A server that changes its tools all the time is looked at so often.
RELIST_S = 1.0
LOST = "The connection to the server was lost."
EXPIRED = "The server's session expired."
# Two timers for one deadline: whichever rings first, the server was too slow.
NEARLY_S = 0.05


class ServerKeeper:
    """One server: `begin` lets it connect, `retire` lets it go once nobody waits for it any more."""

    def __init__(self, server: McpServer, means: PoolServices, timeout_s: float) -> None:
        self.server = server
        self.timeout_s = timeout_s
        self.settled = asyncio.Event()
        self._means = means
        self._state: ServerState = "idle" if server.enabled else "disabled"
        self._turn = asyncio.Event()
        self._error: str | None = None
        self._last_words = ""
        self._keeper: asyncio.Task[None] | None = None
        self._connection: McpConnection | None = None
        self._known: McpConnection | None = None
        self._going = False
        self._waiting = 0
        self._errands = BoundedTasks()
        self._mode = "auto"
        self._calls = self._failures = self._connects = 0
        self._latency_ms: int | None = None

    def begin(self) -> None:
        if self.server.enabled and not self.begun and not self._going:
            self._move("connecting")
            self._keeper = asyncio.create_task(self._keep(), name=f"mcp {self.server.name}")
            self._errands.watch(self._keeper)

    @property
    def begun(self) -> bool:
        return self._keeper is not None and not self._keeper.done()

    @property
    def has_failed(self) -> bool:
        return self._state == "failed"

    def health(self) -> ServerHealth:
        known = self._known
        error = self._error
        if error and self._last_words and self._state == "failed":
            error = f"{error} Its last words: {self._last_words}"
        return ServerHealth(
            name=self.server.name,
            state=self._state,
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
        self.begin()
        clock = self._means.clock
        began = clock.monotonic()
        ends = min(began + self.timeout_s, context.deadline)
        self._calls += 1
        self._waiting += 1
        try:
            # A session that has expired costs the call nothing but time: it was not looked at.
            reply = await self._asked(query, context, ends) or await self._asked(query, context, ends)
        finally:
            self._waiting -= 1
            self._leave_if_done()
        if reply is None:
            reply = self._failed("The server forgets its sessions as soon as they are made.")
        self._latency_ms = round((clock.monotonic() - began) * 1000)
        self._failures += reply.status is not Status.SUCCESS
        if self._state == "ready":
            self._error = reply.error
        return reply

    async def _asked(self, query: Query, context: Context, ends: float) -> SourceReply | None:
        """One call; None is a session that has expired."""
        server, clock = self.server, self._means.clock
        budget_s = ends - clock.monotonic()
        try:
            connection = await self._ready(ends)
        except TimeoutError:
            return self._late("was not ready", budget_s)
        if connection is None:
            return self._failed(self._error or "The server is not connected.")
        from anabranch.sources.mcp import errors  # noqa: PLC0415  they need the SDK; the keeper has loaded it
        from anabranch.sources.mcp.results import extraction  # noqa: PLC0415  they need the SDK; the keeper has loaded it

        try:
            answer = await self._errands.within(ends - clock.monotonic(), connection.ask(server, query, context))
        except TimeoutError:
            self._silence(connection)
            return self._late("did not answer", budget_s)
        except asyncio.CancelledError:
            if clock.monotonic() >= ends - NEARLY_S:
                self._silence(connection)
            raise
        except Exception as error:  # noqa: BLE001  whatever the SDK raises is the server's failure
            return self._troubled(error, connection)
        if answer.is_error:
            return errors.refused(answer, server)
        try:
            passages = await extraction.found(answer, server, ends - clock.monotonic())
        except TimeoutError:
            return self._late("has answered more than could be read", budget_s)
        except AnabranchError as error:
            return SourceReply(path=server.name, status=Status.ERROR, error=error.message)
        return SourceReply(path=server.name, status=Status.SUCCESS, passages=passages)

    def _troubled(self, error: Exception, connection: "McpConnection") -> SourceReply | None:
        from anabranch.sources.mcp import errors  # noqa: PLC0415

        if errors.expired(error, self.server):
            connection.end(EXPIRED)
        if connection.reason == EXPIRED:
            return None
        if errors.closed(error, self.server):
            connection.end(LOST)
        elif errors.unreached(error, self.server):
            self._silence(connection)
        return errors.calling(error, self.server, connection.reason)

    async def _ready(self, ends: float) -> "McpConnection | None":
        """The connection, if need be when it has been made; None if it could not be."""
        while True:
            connection = self._connection
            if connection is not None and not connection.ended.is_set():
                return connection
            if self._state in ("failed", "idle", "disabled"):
                return None
            async with asyncio.timeout(max(0.0, ends - self._means.clock.monotonic())):
                await self._turn.wait()

    def _silence(self, connection: "McpConnection") -> None:
        connection.silences += 1
        if connection.silences >= SILENCES:
            connection.stir()

    def _late(self, what: str, budget_s: float) -> SourceReply:
        words = f"The server {what} within {budget_s:.3g} seconds."
        return SourceReply(path=self.server.name, status=Status.TIMEOUT, error=words, fault=True)

    def _failed(self, words: str) -> SourceReply:
        return SourceReply(path=self.server.name, status=Status.ERROR, error=words, fault=True)

    async def _keep(self) -> None:
        clock, waits = self._means.clock, ReconnectDelays(self._means.chance)
        try:
            # A second of work that need not hold up the loop; the SDK first, as one whole: of what another thread has
            # loaded in part, only the whole waits for the rest.
            for needed in ("mcp", "anabranch.sources.mcp.connection"):
                await asyncio.to_thread(import_module, needed)
            while True:
                began, before = clock.monotonic(), self._connects
                reason = await self._lived()
                _go_if_told()
                was_ready = self._connects > before
                was_long = clock.monotonic() - began >= STEADY_S
                # That a session has expired is noticed by a call, and for that call it is made anew.
                if was_ready and (was_long or reason == EXPIRED):
                    waits = ReconnectDelays(self._means.chance)
                wait_s = waits.next_s()
                self._error = reason
                # Tried again at once, and perhaps in the way of the old era, it has not failed yet.
                if wait_s or (was_long and not was_ready):
                    # What it says once it has been asked may have the question in it.
                    self._move("failed", reason, "" if was_ready else self._last_words)
                    if wait_s:
                        await self._means.sleep(wait_s)
                    reason = ""
                self._move("connecting", reason)
        finally:
            self.settled.set()
            self._move("idle")

    async def _lived(self) -> str:
        """One connection from its beginning to its end, and why it ended."""
        from anabranch.sources.mcp import connection, errors  # noqa: PLC0415

        means, loop = self._means, asyncio.get_running_loop()
        self._last_words = ""
        ready: McpConnection | None = None
        try:
            async with (
                asyncio.timeout(CONNECT_S) as limit,
                connection.connected(
                    self.server,
                    means.outbound,
                    mode=self._mode,
                    max_reply_bytes=means.max_reply_bytes,
                    heard=self._overheard,
                ) as ready,
            ):
                limit.reschedule(None)
                self._connection = self._known = ready
                self._mode = ready.mode
                self._connects += 1
                self._error = None
                self._move("ready")
                _go_if_told()
                try:
                    await self._watch(ready)
                finally:
                    self._connection = None
                    limit.reschedule(loop.time() + LEAVE_S)
        except Exception as error:  # noqa: BLE001  the task's boundary: it is told, and tried again
            if errors.misconfigured(error):
                # What its process wrote has nothing to do with it.
                self._last_words = ""
            if ready is None:
                # Some servers of the old era end when they are greeted in the way of the new one.
                self._mode = "legacy" if self._mode == "auto" else "auto"
            if ready is None or not ready.reason:
                return errors.connecting(error, self.server, CONNECT_S)
        return ready.reason

    async def _watch(self, connection: "McpConnection") -> None:
        while not connection.ended.is_set():
            await connection.stirred.wait()
            connection.stirred.clear()
            if connection.changed:
                await self._errands.within(CONNECT_S, connection.find_tool(self.server))
                with suppress(TimeoutError):
                    async with asyncio.timeout(RELIST_S):
                        await connection.ended.wait()
            if connection.silences >= SILENCES and not await self._speaks(connection):
                connection.end("The server stopped answering.")

    async def _speaks(self, connection: "McpConnection") -> bool:
        with suppress(TimeoutError):
            await self._errands.within(PROBE_S, connection.speaks())
        return connection.silences < SILENCES

    def _overheard(self, line: str) -> None:
        from anabranch.sources.mcp.errors import spoken  # noqa: PLC0415

        if line.strip():
            self._last_words = spoken(line, self.server)

    def _move(self, state: ServerState, reason: str = "", last_words: str = "") -> None:
        if state == self._state:
            return
        self._state = state
        self._turn.set()
        self._turn = asyncio.Event()
        if state in ("ready", "failed"):
            self.settled.set()
        if not self._going:
            moved = ServerMoved(server=self.server.name, state=state, reason=reason, last_words=last_words)
            self._means.telemetry.noted(moved)

    def retire(self) -> None:
        """Take no new calls, and go when those in flight are through."""
        self._going = True
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._going and not self._waiting and self._keeper is not None:
            self._keeper.cancel()

    async def gone(self) -> None:
        """Come back when nothing is left of it."""
        if self._keeper is not None:
            await asyncio.wait({self._keeper})
        await self._errands.gone()

    async def close(self) -> None:
        """Go now, whoever waits."""
        self._going = True
        if self._keeper is not None:
            await ended(self._keeper)
        await self.gone()
        if self._state != "disabled":
            self._move("idle")


def _go_if_told() -> None:
    """A cancellation that comes together with the end of a connection, the SDK takes for that."""
    if (keeper := asyncio.current_task()) is not None and keeper.cancelling():
        raise asyncio.CancelledError
