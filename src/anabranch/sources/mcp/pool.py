"""An MCP server as a source like any other."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from anabranch.domain.contracts import Clock, Outbound, Telemetry
from anabranch.domain.mcp import MAX_HOPS, McpServer, ServerHealth
from anabranch.domain.model import Context, Passage, Query, SourceReply, Status
from anabranch.domain.signals import ServerMoved
from anabranch.sources.mcp.server_keeper import PoolServices, ServerKeeper
from anabranch.text.support import MAX_READ, Wording, share

Asked = Callable[[str, Query, Context], Awaitable[SourceReply]]


class McpSource:
    """Asks one server by name, and gives what it found in the server's own order."""

    def __init__(self, name: str, ask: Asked) -> None:
        self._name = name
        self._ask = ask

    async def search(self, query: Query, context: Context) -> SourceReply:
        reply = await self._ask(self._name, query, context)
        if query.raw or not reply.passages:
            return reply
        wording = Wording(query.text)
        passages = tuple(_scored(passage, wording) for passage in reply.passages[: query.limit])
        return msgspec.structs.replace(reply, passages=passages)


def _scored(passage: Passage, wording: Wording) -> Passage:
    """Where the server does not say how good a result is, the share of the question's words in it stands for it."""
    if passage.score > 0:
        return passage
    found = wording.within(f"{passage.title}\n{passage.text[:MAX_READ]}")
    return msgspec.structs.replace(passage, score=share(found, wording.words))


# For this long one that was removed is there for calls that had chosen it before they began to ask it.
LATE_S = 0.25
# What may change without the connection being made anew.
IN_PLACE = ("result_path", "reputation", "description")


class Pool:
    """One for all questions. Nothing is connected before somebody asks, or `warm` says so."""

    def __init__(
        self,
        servers: Mapping[str, McpServer],
        *,
        outbound: Outbound,
        clock: Clock,
        telemetry: Telemetry,
        call_timeout_s: float,
        max_reply_bytes: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._means = PoolServices(
            outbound=outbound,
            clock=clock,
            telemetry=telemetry,
            max_reply_bytes=max_reply_bytes,
            sleep=sleep,
            chance=chance,
        )
        self._members = {name: ServerKeeper(server, self._means, call_timeout_s) for name, server in servers.items()}
        self._leaving: dict[asyncio.Task[None], ServerKeeper] = {}
        self._late: dict[str, ServerKeeper] = {}
        self._is_warm = False
        self._is_closed = False

    def warm(self) -> None:
        """Begin to connect to every server that is switched on."""
        self._is_warm = True
        for member in self._members.values():
            member.begin()

    def update(self, servers: Mapping[str, McpServer], call_timeout_s: float) -> None:
        """Servers that stay as they are keep their connection, unless they have none, and then are tried again at once;
        one that is gone or has changed is closed when its calls in flight are through; new ones connect."""
        before, self._members = self._members, {}
        for name, server in servers.items():
            kept = before.get(name)
            if kept is not None and not kept.has_failed and _is_same(kept.server, server):
                del before[name]
                kept.server, kept.timeout_s = server, call_timeout_s
                self._members[name] = kept
            else:
                self._members[name] = ServerKeeper(server, self._means, call_timeout_s)
        for name, member in before.items():
            if name not in servers and member.server.enabled:
                self._late[name] = member
            else:
                member.retire()
            if name not in servers or not servers[name].enabled:
                self._means.telemetry.noted(ServerMoved(server=name, state="idle"))
            leaving = asyncio.create_task(self._left(name, member))
            self._leaving[leaving] = member
            leaving.add_done_callback(self._leaving.pop)
        if self._is_warm:
            self.warm()

    async def _left(self, name: str, member: ServerKeeper) -> None:
        if self._late.get(name) is member:
            await asyncio.sleep(LATE_S)
            if self._late.get(name) is member:
                del self._late[name]
            member.retire()
        await member.gone()

    def source(self, name: str) -> McpSource:
        """The server of that name as a source, whichever it is when it is asked."""
        return McpSource(name, self.search)

    async def search(self, name: str, query: Query, context: Context) -> SourceReply:
        member = self._members.get(name) or self._late.get(name)
        if member is None or not member.server.enabled or self._is_closed:
            why = "There is no MCP server of this name." if member is None else "This MCP server is switched off."
            return SourceReply(path=name, status=Status.ERROR, error=why)
        if context.hops > MAX_HOPS:
            why = "The question has come through too many aggregators: some of them ask each other in a circle."
            return SourceReply(path=name, status=Status.ERROR, error=why)
        return await member.search(query, context)

    def health(self) -> tuple[ServerHealth, ...]:
        return tuple(member.health() for member in self._members.values())

    async def settled(self) -> None:
        """Until each that was begun has been ready or has failed once."""
        for member in list(self._members.values()):
            if member.begun:
                await member.settled.wait()

    async def close(self) -> None:
        """Every child has gone when this returns."""
        self._is_closed = True
        members = [*self._members.values(), *self._leaving.values()]
        await asyncio.gather(*(member.close() for member in members), *self._leaving)


def _is_same(one: McpServer, other: McpServer) -> bool:
    kept = {name: getattr(other, name) for name in IN_PLACE}
    return msgspec.structs.replace(one, **kept) == other
