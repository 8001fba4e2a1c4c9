"""Every failure of an upstream, on demand."""

import asyncio
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import cache
from itertools import chain, repeat
from typing import Never

import msgspec
from aiohttp import web

from anabranch.domain.model import EndpointKind
from anabranch.testing.model import Form, open_stream, stream_error, word

MIB = 1024 * 1024
BOMB_BYTES = 65 * MIB
TRICKLE_S = 0.05


class Failure(StrEnum):
    """A value is also the slug of its failure in a `Space(everything=True)`."""

    HANG = "hang"
    STATUS_401 = "status-401"
    STATUS_402 = "status-402"
    STATUS_403 = "status-403"
    STATUS_404 = "status-404"
    STATUS_429 = "status-429"
    STATUS_500 = "status-500"
    STATUS_503 = "status-503"
    ACCESS_DENIED = "access-denied"
    RATE_LIMITED = "rate-limited"
    POLICY_VIOLATION = "policy-violation"
    HTML = "html"
    HTML_500 = "html-500"
    BAD_JSON = "bad-json"
    WRONG_SHAPE = "wrong-shape"
    INVALID_UTF8 = "invalid-utf8"
    RESET = "reset"
    CUT = "cut"
    HUGE = "huge"
    BOMB = "bomb"
    TRICKLE = "trickle"
    REDIRECT = "redirect"
    STREAM_BREAK = "stream-break"
    STREAM_ERROR = "stream-error"
    STREAM_ENDLESS_LINE = "stream-endless-line"


class DroppedConnectionError(ConnectionError):
    """The Space itself ended the connection; the client did not."""


class Failing(msgspec.Struct, frozen=True, kw_only=True):
    failure: Failure
    form: Form = "summary"
    size_bytes: int = 32 * MIB
    location: str = "/"
    retry_after_s: int = 1
    body: bytes | None = None
    token: None = None

    async def answer(self, request: web.BaseRequest, body: bytes, dialect: EndpointKind) -> web.StreamResponse:  # noqa: ARG002
        if self.failure not in _PLAIN:
            fault = msgspec.structs.replace(self, form="openai") if dialect == "openai" else self
            return await _ACTS[self.failure](fault, request)
        status, content_type, content = _PLAIN[self.failure]
        more = {429: {"Retry-After": str(self.retry_after_s)}, 307: {"Location": self.location}}.get(status, {})
        return web.Response(
            status=status,
            headers={"Content-Type": content_type, **more},
            body=content if self.body is None else self.body,
        )


_JSON = "application/json"


def _refusal(outcome: str) -> tuple[int, str, bytes]:
    metadata = {"outcome": outcome, "entries": []}
    return 403, _JSON, msgspec.json.encode({"detail": "The policy refused it", "policy_metadata": metadata})


# Around a text: a valid reply of a model and of a source.
_HEAD, _TAIL = b'{"summary":{"message":{"role":"assistant","content":"', b'"}},"references":{"documents":[]}}'
_PAGE = b"<!DOCTYPE html><html><head><title>Oops</title></head><body><h1>Something went wrong</h1></body></html>"
_PLAIN: dict[Failure, tuple[int, str, bytes]] = {
    Failure.STATUS_401: (401, _JSON, b'{"detail":"Not authenticated"}'),
    Failure.STATUS_402: (402, _JSON, b'{"detail":"Payment required"}'),
    Failure.STATUS_403: (403, _JSON, b'{"detail":"Forbidden"}'),
    Failure.STATUS_404: (404, _JSON, b'{"detail":"Endpoint not found"}'),
    Failure.STATUS_429: (429, _JSON, b'{"detail":"Too many requests"}'),
    Failure.STATUS_500: (500, _JSON, b'{"detail":"Internal server error"}'),
    Failure.STATUS_503: (503, _JSON, b'{"detail":"Service unavailable"}'),
    Failure.ACCESS_DENIED: _refusal("access_denied"),
    Failure.RATE_LIMITED: _refusal("rate_limited"),
    Failure.POLICY_VIOLATION: _refusal("policy_violation"),
    Failure.HTML: (200, "text/html; charset=utf-8", _PAGE),
    Failure.HTML_500: (500, "text/html; charset=utf-8", _PAGE),
    Failure.BAD_JSON: (200, _JSON, b'{"summary": null, "references": {"documents": ['),
    Failure.WRONG_SHAPE: (200, _JSON, b'{"data":[{"text":"Another protocol"}],"count":1}'),
    Failure.INVALID_UTF8: (
        200,
        _JSON,
        b'{"summary":{"message":{"content":"\xff\xfe"}},"references":{"documents":'
        b'[{"content":"\xff\xfe","metadata":{"title":"\xc3\x28"},"similarity_score":0.9}]}}',
    ),
    Failure.REDIRECT: (307, "text/plain", b""),
}


async def _hang(_: Failing, __: web.BaseRequest) -> Never:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("this future never resolves")


async def _reset(_: Failing, request: web.BaseRequest) -> Never:
    if request.transport is not None:
        request.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        request.transport.abort()
    raise DroppedConnectionError


async def _cut(_: Failing, request: web.BaseRequest) -> Never:
    body = _HEAD + b"A sentence of which only a half arrives." + _TAIL
    response = await open_stream(request, {"Content-Type": _JSON, "Content-Length": str(len(body))})
    await response.write(body[: len(body) // 2])
    raise DroppedConnectionError


async def _huge(fault: Failing, request: web.BaseRequest) -> web.StreamResponse:
    response = await open_stream(request, {"Content-Type": _JSON})
    for piece in chain([_HEAD], repeat(b"x" * 65536, fault.size_bytes // 65536 + 1), [_TAIL]):
        await response.write(piece)
    return response


async def _bomb(_: Failing, __: web.BaseRequest) -> web.StreamResponse:
    headers = {"Content-Type": _JSON, "Content-Encoding": "gzip"}
    return web.Response(body=await asyncio.to_thread(_bomb_body), headers=headers)


@cache
def _bomb_body() -> bytes:
    gzip = zlib.compressobj(wbits=31)
    pieces = [gzip.compress(piece) for piece in (_HEAD, *repeat(b"x" * MIB, BOMB_BYTES // MIB), _TAIL)]
    return b"".join((*pieces, gzip.flush()))


async def _trickle(_: Failing, request: web.BaseRequest) -> Never:
    response = await open_stream(request, {"Content-Type": _JSON})
    while True:
        await response.write(b" ")
        await asyncio.sleep(TRICKLE_S)


async def _stream_break(fault: Failing, request: web.BaseRequest) -> Never:
    response = await open_stream(request)
    await response.write(word(fault.form, "Two ") + word(fault.form, "words "))
    raise DroppedConnectionError


async def _stream_error(fault: Failing, request: web.BaseRequest) -> web.StreamResponse:
    response = await open_stream(request)
    await response.write(word(fault.form, "One ") + stream_error(fault.form, "the model broke"))
    return response


async def _stream_endless_line(_: Failing, request: web.BaseRequest) -> Never:
    response = await open_stream(request)
    await response.write(b'data: {"content": "')
    while True:
        await response.write(b"x" * 16384)
        await asyncio.sleep(0)


_ACTS: dict[Failure, Callable[[Failing, web.BaseRequest], Awaitable[web.StreamResponse]]] = {
    Failure.HANG: _hang,
    Failure.RESET: _reset,
    Failure.CUT: _cut,
    Failure.HUGE: _huge,
    Failure.BOMB: _bomb,
    Failure.TRICKLE: _trickle,
    Failure.STREAM_BREAK: _stream_break,
    Failure.STREAM_ERROR: _stream_error,
    Failure.STREAM_ENDLESS_LINE: _stream_endless_line,
}
