"""A real HTTP server on a free port that detects a client's disconnect at once, and stops at once."""

import ssl
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec
from aiohttp import web

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    """Use it as `async with`; `open_connections` counts the clients that are connected."""

    def __init__(
        self, handle: Handle, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._handle = handle
        self._host = host
        self._port = port
        self._tls = tls
        self._runner: web.ServerRunner | None = None
        self._is_closing = False

    @property
    def url(self) -> str:
        if self._runner is None:
            raise RuntimeError("the server has not been started: use it as `async with`")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self._port}"

    @property
    def open_connections(self) -> int:
        server = self._runner.server if self._runner else None
        return len(server.connections) if server else 0

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handle(request)
        except ConnectionError:
            # aiohttp would log the exception. A response to a closed connection is discarded.
            if request.transport is not None:
                request.transport.close()
            return web.Response()

    async def __aenter__(self) -> Self:
        server = web.Server(self._serve, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls, backlog=1024)
        await site.start()
        self._port = site.port
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is None:
            return
        self._is_closing = True
        for site in self._runner.sites:
            await site.stop()
        for connection in self._runner.server.connections if self._runner.server else ():
            # close() would wait until the client has read what is in the buffer.
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()


def json(body: object, status: int = 200, **headers: str) -> web.Response:
    """A JSON response; bytes are already encoded."""
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, headers={"Content-Type": "application/json", **headers})


def bearer(request: web.BaseRequest) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None
