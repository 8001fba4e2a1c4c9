"""The bytes of an HTTP exchange: reading a body within a cap, sending JSON, streaming events."""

import asyncio
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]

BODY_S = 30.0
PIECE_BYTES = 64 * 1024
PIECE_S = 30.0
JSON = (b"content-type", b"application/json")
EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
)


class TooLarge(Exception):
    """The request's body is over the cap."""


async def read_body(receive: Receive, max_bytes: int, within_s: float = BODY_S) -> bytes | None:
    """The whole body; None if the client left before it was through. A client that dawdles is a TimeoutError."""
    async with asyncio.timeout(within_s):
        return await _read(receive, max_bytes)


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise TooLarge
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send_body(send, body, more=False)


async def send_body(send: Send, body: bytes, *, more: bool, within_s: float = PIECE_S) -> None:
    """Send in pieces, each of which the client must take in time: one that does not read cannot make us hold much."""
    for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
        async with asyncio.timeout(within_s):
            await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})
    sent = max(0, (len(body) - 1) // PIECE_BYTES) * PIECE_BYTES
    await send({"type": "http.response.body", "body": body[sent:] if sent else body, "more_body": more})


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name (in lower case)."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def wants_fresh(scope: Scope) -> bool:
    """Whether the caller wants no remembered answer."""
    return "no-cache" in (header(scope, b"cache-control") or "").lower()
