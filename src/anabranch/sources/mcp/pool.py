"""MCP servers as sources: the pool keeps one connection per configured server."""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from anabranch.domain.mcp import MAX_HOPS, McpServer, ServerHealth
from anabranch.domain.model import Context, Passage, Query, SourceReply, Status
from anabranch.domain.signals import ServerMoved
from anabranch.sources.mcp.server_keeper import ServerKeeper
from anabranch.sources.mcp.services import McpTiming, PoolServices
from anabranch.text.support import MAX_READ, Wording, share

__all__ = ["McpSource", "McpTiming", "Pool", "PoolServices"]

# Changes of these fields need no new connection.
IN_PLACE = ("result_path", "reputation", "description")


class McpSource:
    """Searches the server that has the name at the time of the call. Results keep the server's order."""

    def __init__(self, name: str, find: Callable[[str], ServerKeeper | None]) -> None:
        self._name = name
        self._find = find

    async def search(self, query: Query, context: Context) -> SourceReply:
        keeper = self._find(self._name)
        error = None
        if keeper is None:
            error = "There is no MCP server with this name."
        elif not keeper.accepts_calls:
            error = "This MCP server is disabled."
        elif context.hops > MAX_HOPS:
            error = "The question has passed through too many aggregators: some of them ask each other in a circle."
        if keeper is None or error:
            return SourceReply(path=self._name, status=Status.ERROR, error=error)
        reply = await keeper.search(query, context)
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
        """Start to connect to every enabled server."""
        self._is_warm = True
        for keeper in self._keepers.values():
            keeper.start()

    def update(self, servers: Mapping[str, McpServer], call_timeout_s: float) -> None:
        """Replace the configuration. An unchanged server keeps its connection, unless it has failed: then it is retried
        at once. A removed or changed server is closed when its calls in flight have ended."""
        before, self._keepers = self._keepers, {}
        for name, server in servers.items():
            kept = before.get(name)
            if kept is not None and not kept.has_failed and _is_same(kept.server, server):
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
                self._services.telemetry.noted(ServerMoved(server=name, state="idle"))
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
        keepers = [*self._keepers.values(), *self._closing.values()]
        await asyncio.gather(*(keeper.close() for keeper in keepers), *self._closing)


def _is_same(one: McpServer, other: McpServer) -> bool:
    kept = {name: getattr(other, name) for name in IN_PLACE}
    return msgspec.structs.replace(one, **kept) == other
