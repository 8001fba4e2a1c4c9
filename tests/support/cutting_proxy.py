"""A TCP proxy that cuts and stalls connections when it is told to, as networks do when they are not."""

import asyncio
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

PIECE_BYTES = 16384


class Link:
    """One client's connection and the one behind it. Nothing comes back through it unless it is `flowing`."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.flowing = asyncio.Event()

    def abort(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()
        self.flowing.set()


class CuttingProxy:
    """Stands before a server. `cut()` ends every connection at once and without a word; `stall()` lets nothing through
    to clients until `resume()`. With `cut_after`, each new connection is cut by itself when that many bytes have come
    back through it, in the middle of whatever is being said; when the numbers are used up, nothing more is cut."""

    def __init__(self, server_url: str, *, cut_after: Iterable[int] = ()) -> None:
        parts = urlsplit(server_url)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._cut_after: Iterator[int] = iter(cut_after)
        self._links: set[Link] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._linked = asyncio.Event()
        self._stalled = False
        self._closing = False
        self.accepted = 0
        self.cuts = 0

    async def __aenter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accept, sock=self._socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await no_more_accepted(self._socket)
        self._server.close()
        self._closing = True
        for link in self._links:
            link.abort()
        await asyncio.gather(*self._serving)
        await turns()  # in which the server learns of the last ones

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def connections(self) -> int:
        return len(self._links)

    def cut(self) -> int:
        """How many there were to cut."""
        self.cuts += (count := len(self._links))
        for link in self._links:
            link.abort()
        return count

    def stall(self) -> None:
        self._stalled = True
        for link in self._links:
            link.flowing.clear()

    def resume(self) -> None:
        self._stalled = False
        for link in self._links:
            link.flowing.set()

    async def wait_for_connection(self, timeout_s: float = 10.0) -> None:
        """Until somebody is connected through here."""
        async with asyncio.timeout(timeout_s):
            await self._linked.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self.accepted += 1
        left = next(self._cut_after, None)
        try:
            with suppress(OSError):
                theirs, server = await asyncio.open_connection(*self._upstream)
                await self._linked_through(Link(writer, server), reader, theirs, left)
        finally:
            writer.transport.abort()
            self._serving.discard(task)

    async def _linked_through(
        self, link: Link, asked: asyncio.StreamReader, said: asyncio.StreamReader, left: int | None
    ) -> None:
        self._links.add(link)
        self._linked.set()
        if not self._stalled:
            link.flowing.set()
        if self._closing:
            link.abort()
        asking = asyncio.create_task(self._ask(asked, link))
        try:
            await self._say(said, link, left)
        finally:
            link.abort()
            await asking
            self._links.discard(link)
            if not self._links:
                self._linked.clear()

    async def _ask(self, asked: asyncio.StreamReader, link: Link) -> None:
        """What the client says, to the server; when it hangs up, so do we."""
        with suppress(OSError):
            while piece := await asked.read(PIECE_BYTES):
                link.server.write(piece)
                await link.server.drain()
        link.abort()

    async def _say(self, said: asyncio.StreamReader, link: Link, left: int | None) -> None:
        """What the server says, to the client."""
        while piece := await said.read(PIECE_BYTES):
            await link.flowing.wait()
            if left is not None and len(piece) >= left:
                link.client.write(piece[:left])
                self.cuts += 1
                return
            left = None if left is None else left - len(piece)
            link.client.write(piece)
            await link.client.drain()
        # What is still to be sent goes out before the end does.
        await link.flowing.wait()
        link.client.close()
        await link.client.wait_closed()


async def no_more_accepted(listening: socket.socket) -> None:
    """Before a server is closed: asyncio leaves a connection open that was accepted at that very moment, and Node opens
    one of its own accord whenever another was aborted."""
    asyncio.get_running_loop().remove_reader(listening.fileno())
    await turns()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
