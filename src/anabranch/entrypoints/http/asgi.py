"""The bytes of an HTTP exchange: reads a body within a cap, sends JSON and streamed bytes."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from anabranch.domain.errors import AnabranchError

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


class RequestTooLarge(AnabranchError):
    code = "request_too_large"


class RequestTimedOut(AnabranchError):
    code = "request_timeout"


class ClientGone(Exception):
    """The client disconnected before its request was complete: no response is sent."""


async def read_body(receive: Receive, max_bytes: int, within_s: float = BODY_S) -> bytes:
    """The whole body, or the error that says why it could not be read."""
    try:
        async with asyncio.timeout(within_s):
            parts = [part async for part in body_parts(receive, max_bytes)]
    except TimeoutError:
        raise RequestTimedOut("The request took too long to arrive.") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def body_parts(receive: Receive, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body as it arrives, at most `max_bytes` of it."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > max_bytes:
            raise RequestTooLarge(f"The request is larger than {max_bytes:,} bytes.", limit=max_bytes)
        yield part


async def send_response(send: Send, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send_body(send, body, more=False)


async def send_empty(send: Send, status: int, headers: Headers = ()) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_body(send: Send, body: bytes, *, more: bool, within_s: float = PIECE_S) -> None:
    """Sends in pieces with a time limit for each, so that a client that does not read cannot hold much memory."""
    for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
        async with asyncio.timeout(within_s):
            await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})
    sent = max(0, (len(body) - 1) // PIECE_BYTES) * PIECE_BYTES
    await send({"type": "http.response.body", "body": body[sent:] if sent else body, "more_body": more})


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name (in lower case)."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def wants_fresh(scope: Scope) -> bool:
    """Whether the caller refuses a cached answer."""
    return "no-cache" in (header(scope, b"cache-control") or "").lower()


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value is nested deeper than that."""
    level = [value]
    for _ in range(levels + 1):
        containers = [one for one in level if isinstance(one, Mapping | list)]
        level = [inner for one in containers for inner in (one.values() if isinstance(one, Mapping) else one)]
        if not level:
            return False
    return True
