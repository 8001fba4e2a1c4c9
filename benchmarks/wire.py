"""A keep-alive HTTP/1.1 POST client on bare asyncio protocols, for the floor server and the load generator."""

import asyncio
import re
from typing import NamedTuple, cast

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
MAX_IDLE_S = 2.0
"""Servers close idle connections after some seconds; an older one could be closed while we write to it."""


class WireError(Exception):
    """The peer hung up, or answered with something this client does not read."""


class Reply(NamedTuple):
    status: int
    body: bytes


def post_head(authority: str, path: str, *headers: str) -> bytes:
    """Everything of a request that does not depend on its body."""
    lines = (f"POST {path} HTTP/1.1", f"Host: {authority}", "Content-Type: application/json", *headers)
    return ("\r\n".join(lines) + "\r\nContent-Length: ").encode()


def post(head: bytes, body: bytes) -> bytes:
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)


class Connection(asyncio.Protocol):
    """One connection, one request at a time; returns itself to `idle` when its reply is complete."""

    def __init__(self, idle: "list[Connection]") -> None:
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._received = b""
        self._body_at = 0
        self._end_at = 0
        self.idle_since = 0.0

    def send(self, request: bytes) -> asyncio.Future[Reply]:
        reply = self._loop.create_future()
        if self._transport is None:
            reply.set_exception(WireError("the connection was closed before the request"))
            return reply
        self._reply = reply
        self._transport.write(request)
        return reply

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        if not self._end_at and not self._read_head(received):
            self._received = received
            return
        if len(received) < self._end_at:
            self._received = received
            return
        reply, self._reply = self._reply, None
        answer = Reply(int(received[9:12]), received[self._body_at : self._end_at])
        self._received, self._end_at = b"", 0
        self.idle_since = self._loop.time()
        self._idle.append(self)
        if reply is not None and not reply.done():
            reply.set_result(answer)

    def _read_head(self, received: bytes) -> bool:
        head_end = received.find(b"\r\n\r\n")
        if head_end < 0:
            return False
        length = CONTENT_LENGTH.search(received, 0, head_end)
        if length is None:
            self._fail(f"a reply without Content-Length: {received[:head_end]!r}")
            self.close()
            return False
        self._body_at = head_end + 4
        self._end_at = self._body_at + int(length[1])
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self in self._idle:
            self._idle.remove(self)
        self._fail(f"the peer hung up ({exc})")

    def _fail(self, reason: str) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(WireError(reason))
        self._reply = None


class Pool:
    """The connections to one authority: as many as there are requests at once."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._idle: list[Connection] = []
        self._loop = asyncio.get_running_loop()

    async def send(self, request: bytes) -> asyncio.Future[Reply]:
        """Write the request now; the reply is awaited later, so that several can be under way without tasks."""
        idle = self._idle
        if idle and idle[-1].idle_since + MAX_IDLE_S < self._loop.time():
            self.close()
        connection = idle.pop() if idle else await connect(self._authority, idle)
        return connection.send(request)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


async def connect(authority: str, idle: list[Connection]) -> Connection:
    host, _, port = authority.partition(":")
    _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(idle), host, int(port))
    return connection
