"""A real HTTP server on a port of its own that notices at once when a client goes, and stops at once."""

import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    def __init__(self, handle: Handle, *, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._handle = handle
        self._host = host
        self._port = port
        self._tls = tls
        self._runner: web.ServerRunner | None = None
        self.closing = False

    @property
    def url(self) -> str:
        if self._runner is None:
            raise RuntimeError("the server has not been started: use it as `async with`")
        scheme = "https" if self._tls else "http"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{scheme}://{host}:{self._port}"

    @property
    def connections(self) -> int:
        server = self._runner.server if self._runner else None
        return len(server.connections) if server else 0

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handle(request)
        except ConnectionError:
            # Had it been raised, aiohttp would log it; on a closed connection the response goes nowhere.
            if request.transport is not None:
                request.transport.close()
            return web.Response()

    async def start(self) -> None:
        server = web.Server(self._serve, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls, backlog=1024)
        await site.start()
        self._port = site.port

    async def stop(self) -> None:
        if self._runner is None:
            return
        self.closing = True
        for site in self._runner.sites:
            await site.stop()
        server = self._runner.server
        for connection in server.connections if server else ():
            # A close would wait until the client has read what is still to be sent.
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()


def json(body: bytes, status: int = 200, **headers: str) -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": "application/json", **headers})


def bearer(request: web.BaseRequest) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None
