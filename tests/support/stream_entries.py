"""Connections to the planner's surface within one process: ASGI on one side, on the other bytes that can be cut."""

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Scope

# What a socket and its peer's take before whoever writes has to wait.
ROOM_BYTES = 4_096


class Line:
    """One request on a connection of its own. `took` is how much the client gets before the line is cut; what was sent
    beyond that is lost."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes = b"", *, room: int = ROOM_BYTES) -> None:
        self.status = 0
        self.close_code = 0
        self._app = app
        self._scope = scope
        self._room = room
        self._inbox: list[Message] = (
            [{"type": "websocket.connect"}]
            if scope["type"] == "websocket"
            else [{"type": "http.request", "body": body, "more_body": False}]
        )
        self._pieces: list[bytes] = []
        self._size = 0
        self._changed = asyncio.Condition()
        self._gone = False
        self._ended = False
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> int:
        """The status: 200 for what was accepted."""
        self._serving = asyncio.create_task(self._serve())
        async with self._changed:
            await self._changed.wait_for(lambda: self.status or self._ended)
        return self.status

    async def read(self) -> bytes:
        """The next piece as it was sent; nothing at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pieces or self._ended)
            if not self._pieces:
                return b""
            piece = self._pieces.pop(0)
            self._size -= len(piece)
            self._changed.notify_all()
            return piece

    async def close(self) -> None:
        """From the client's side, without a word."""
        async with self._changed:
            self._gone = True
            self._changed.notify_all()
        assert self._serving is not None
        await self._serving

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            async with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def _receive(self) -> Message:
        if self._inbox:
            return self._inbox.pop(0)
        async with self._changed:
            await self._changed.wait_for(lambda: self._gone)
        return {"type": "websocket.disconnect" if self._scope["type"] == "websocket" else "http.disconnect"}

    async def _send(self, message: Message) -> None:
        async with self._changed:
            match message["type"]:
                case "http.response.start" | "websocket.http.response.start":
                    self.status = message["status"]
                case "websocket.accept":
                    self.status = 200
                case "http.response.body" | "websocket.http.response.body":
                    await self._put(message.get("body", b""))
                case "websocket.send":
                    await self._put(message["text"].encode())
                case "websocket.close":
                    self.close_code = message["code"]
            self._changed.notify_all()

    async def _put(self, piece: bytes) -> None:
        """As uvicorn does: whoever writes waits while there is too much to send, and writes to nobody in peace."""
        if not piece or self._gone:
            return
        self._pieces.append(piece)
        self._size += len(piece)
        self._changed.notify_all()
        await self._changed.wait_for(lambda: self._size <= self._room or self._gone)


def scope_of(method: str, address: str, headers: Mapping[str, str] | None = None) -> Scope:
    """From somebody at this machine."""
    parts = urlsplit(address)
    sent = {"host": "localhost", **(headers or {})}
    return {
        "type": "websocket" if method == "WS" else "http",
        "method": method,
        "path": parts.path,
        "raw_path": quote(parts.path, safe="/%").encode(),
        "query_string": parts.query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
        "client": ("127.0.0.1", 1),
        "http_version": "1.1",
        "correlation_id": "simulated",
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }


async def ask(app: ASGIApp, method: str, address: str, body: object = None) -> tuple[int, Any]:
    """One request and its reply."""
    line = Line(app, scope_of(method, address), b"" if body is None else msgspec.json.encode(body))
    status = await line.open()
    reply = b""
    while piece := await line.read():
        reply += piece
    await line.close()
    return status, msgspec.json.decode(reply) if reply else None
