"""What the tests of model servers talk to: a real server that answers as it is told."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound

MAX_REPLY_BYTES = 4 * 1024 * 1024

Answer = Callable[[dict[str, Any]], object]
Said = int | bytes | BaseException | Answer | None


class Served:
    """Says one thing after the other, and the last of them for ever: a status, raw bytes, or what a function makes of
    the request. An exception breaks the connection, and None is silence."""

    def __init__(self, outbound: AiohttpOutbound, *says: Said) -> None:
        self.outbound = outbound
        self.says = list(says)
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.slept: list[float] = []
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if said is None:
            await self.over.wait()
            return web.Response()
        if isinstance(said, BaseException):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(said, int):
            return web.json_response({"error": {"message": "No luck today"}}, status=said)
        if isinstance(said, bytes):
            return web.Response(body=said, content_type="application/json")
        return web.json_response(said(self.asked[-1]))


@asynccontextmanager
async def served(*says: Said) -> AsyncGenerator[Served, None]:
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=MAX_REPLY_BYTES)
    model = Served(outbound, *says)
    app = web.Application(client_max_size=10_000_000)
    app.router.add_post("/{path:.*}", model.answer)
    try:
        async with TestServer(app) as server:
            model.url = f"http://127.0.0.1:{server.port}"
            try:
                yield model
            finally:
                model.over.set()
    finally:
        await outbound.close()
