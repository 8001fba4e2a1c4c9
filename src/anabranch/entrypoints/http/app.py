"""The ASGI application: every surface, assembled."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from importlib.metadata import version
from importlib.resources import files
from multiprocessing import parent_process
from types import FrameType
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.reloading import Reloading
from anabranch.app.revocations import EVERY_S
from anabranch.app.watching import watched
from anabranch.domain.contracts import Telemetry
from anabranch.entrypoints.hangup import on_hangup
from anabranch.entrypoints.http import openapi
from anabranch.entrypoints.http.allowances import EXPOSED
from anabranch.entrypoints.http.chat import ChatSurface
from anabranch.entrypoints.http.edge import Edge
from anabranch.entrypoints.http.endpoints import EndpointSurface
from anabranch.entrypoints.http.knowledge import KnowledgeSurface
from anabranch.entrypoints.http.knowledge_errors import KnowledgeDialect
from anabranch.entrypoints.http.ledger import Ledger
from anabranch.entrypoints.http.mcp import McpSurface
from anabranch.entrypoints.http.metrics import MetricsSurface
from anabranch.entrypoints.http.planner import PlannerSurface
from anabranch.entrypoints.http.query import QuerySurface
from anabranch.entrypoints.http.rag import RagSurface
from anabranch.entrypoints.http.streams import StreamSurface
from anabranch.entrypoints.http.tailing import Closing
from anabranch.runtime.lines import Log
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.settings import Settings, load
from anabranch.runtime.telemetry import configured_log, flush

# Surfaces that hold data: a web page of another origin may use them only if that origin is named.
HOLDING_DATA = ("/v1/", "/rag/", "/metrics", "/api/v1/endpoints", "/planner/", "/mcp")
# But a page that has asked the chat surface may take up its answer again: it has the id, which nobody can guess.
KNOWN_BY_ID = "/v1/streams/"
# The client of streams, for web pages.
MODULES = ("stream.js", "connection.js")


class Handler(Protocol):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Service:
    """The application together with the Anabranch behind it, which lives as long as the server does."""

    def __init__(self, settings: Settings, log: Log, *, keys_every_s: float = EVERY_S) -> None:
        self._keys_every_s = keys_every_s
        self._settings = settings
        self._log = log
        self._anabranch: Anabranch | None = None
        self._chat: ChatSurface | None = None
        self._endpoints: EndpointSurface | None = None
        self._rag: RagSurface | None = None
        self._metrics: MetricsSurface | None = None
        self._mcp: McpSurface | None = None
        self._knowledge: ASGIApp | None = None
        self._draining: asyncio.Task[None] | None = None
        self._closing, self._closed = Closing(), Closing()
        self._planner: PlannerSurface | None = None
        self._healthy = {"status": "healthy", "service": "anabranch", "version": version("anabranch")}
        self._description = msgspec.json.encode(openapi.describe(settings))
        self._router = Router(self._routes(), redirect_slashes=False, lifespan=self._lifespan)
        inner = Edge(self._dispatch, log)
        self._app = _shared(inner, settings.cors_origins, ["GET", "POST"])
        named = [origin for origin in settings.cors_origins if origin != "*"]
        self._holding_data = _shared(inner, named, ["GET", "POST", "PATCH", "DELETE"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises what it cannot route, and the edge answers in our own form
        path = scope.get("path", "")
        app = self._holding_data if path.startswith(HOLDING_DATA) and not path.startswith(KNOWN_BY_ID) else self._app
        await app(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Spec 5's dialect has errors of its own, also for what cannot be routed."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            assert self._knowledge is not None
            await self._knowledge(scope, receive, send)
        elif scope.get("path", "").startswith("/planner/"):
            assert self._planner is not None
            await self._planner(scope, receive, send)
        elif scope["type"] == "websocket":
            raise HTTPException(404)
        else:
            await self._router(scope, receive, send)

    def _drain(self) -> None:
        assert self._anabranch is not None
        self._closing.set()
        self._draining = asyncio.create_task(self._drained(self._anabranch))

    async def _drained(self, anabranch: Anabranch) -> None:
        await anabranch.drain(self._settings.drain_timeout)
        self._closed.set()

    def _routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route("/api/v1/chat", _Asgi(self._complete), methods=["POST"]),
            Route("/api/v1/chat/stream", _Asgi(self._stream), methods=["POST"]),
            Route("/api/v1/endpoints/{slug}/query", _Asgi(self._endpoint), methods=["POST"]),
            Route("/api/v1/endpoints/{owner}/{slug}/query", _Asgi(self._endpoint), methods=["POST"]),
            Route("/rag/stream", _Asgi(self._rag_stream), methods=["POST"]),
            Route("/mcp", _Asgi(self._tools), methods=["POST"]),
            Route("/metrics", _Asgi(self._measured), methods=["GET"]),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/openapi.json", self._openapi),
            *(Route(f"/web/{name}", _module) for name in MODULES),
        ]
        if self._settings.debug:
            routes.append(Route("/docs", _docs))
        return routes

    @asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        metrics = Metrics(self._settings)
        async with watched(self._settings, self._log, metrics) as telemetry, self._opened(telemetry) as anabranch:
            self._anabranch = anabranch
            self._metrics = MetricsSurface(anabranch, metrics)
            self._mcp = McpSurface(anabranch, self._log)
            self._chat = ChatSurface(anabranch)
            self._endpoints = EndpointSurface(anabranch)
            self._planner = PlannerSurface(anabranch, self._closing, self._closed)
            ledger = Ledger(self._log)
            query = Route("/v1/query", _Asgi(QuerySurface(anabranch, ledger)), methods=["POST"])
            self._rag = RagSurface(anabranch, ledger)
            streams = Route("/v1/streams/{stream}", _Asgi(StreamSurface(anabranch, self._closing)), methods=["GET"])
            routes = [*KnowledgeSurface(anabranch, ledger, self._closing).routes(), query, streams]
            self._knowledge = KnowledgeDialect(Router(routes, redirect_slashes=False), self._log)
            await anabranch.warm()
            reloading = Reloading(self._settings, anabranch.reconfigure, self._log)
            with _on_exit(self._drain):
                async with on_hangup(reloading.again):
                    yield
            # The server waits for its connections only; what nobody listens to at the moment has its time, too.
            await (self._draining or anabranch.drain(0))
            await self._mcp.close()
            await ledger.settled()
        flush(self._log)

    def _opened(self, telemetry: Telemetry) -> AbstractAsyncContextManager[Anabranch]:
        return Anabranch.open(
            settings=self._settings,
            telemetry=telemetry,
            indexing=True,
            streaming=True,
            keys_every_s=self._keys_every_s,
            indexer_died=lambda status: self._log.warning("indexer_died", status=status),
        )

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._metrics is not None
        await self._metrics(scope, receive, send)

    async def _tools(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._mcp is not None
        await self._mcp(scope, receive, send)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._chat is not None
        await self._chat.complete(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._chat is not None
        await self._chat.stream(scope, receive, send)

    async def _rag_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._rag is not None
        await self._rag(scope, receive, send)

    async def _endpoint(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._endpoints is not None
        await self._endpoints.query(scope, receive, send)

    async def _health(self, _request: Request) -> Response:
        return _json(self._healthy)

    async def _ready(self, _request: Request) -> Response:
        if self._anabranch is None or self._anabranch.draining:
            return _json({"status": "draining"}, 503)
        return _json({"status": "ready"})

    async def _openapi(self, _request: Request) -> Response:
        return Response(self._description, media_type="application/json")


class _Asgi:
    """Tells the router that a handler speaks ASGI itself."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


def create() -> Service:
    """What the server's workers call: the environment has everything."""
    _end_with_the_parent()
    settings = load()
    service = Service(settings, configured_log(settings))
    # What is there now stays for good: the collector need not look at all of it again and again.
    gc.collect()
    gc.freeze()
    return service


def _end_with_the_parent() -> None:
    """A worker whose parent was killed would go on for ever, and so would the MCP servers that it has started."""
    parent = parent_process()
    if parent is not None:

        def wait() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="parent", daemon=True).start()


@contextmanager
def _on_exit(drain: Callable[[], None]) -> Iterator[None]:
    """Begin to drain at the signal that makes the server stop: it tells the application only when all is over."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    servers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, stack: FrameType | None) -> None:
        loop.call_soon_threadsafe(drain)
        servers_own = servers[signal.Signals(number)]
        if callable(servers_own):
            servers_own(number, stack)

    for number in servers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, own in servers.items():
            signal.signal(number, own)


def _shared(app: ASGIApp, origins: Sequence[str], methods: Sequence[str]) -> ASGIApp:
    """The app, for web pages of these origins too."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=methods,
        allow_headers=["*"],
        expose_headers=["X-Correlation-ID", *EXPOSED],
    )


def _json(content: dict[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _module(request: Request) -> Response:
    text = files("anabranch.web").joinpath(request.url.path.rpartition("/")[2]).read_bytes()
    return Response(text, media_type="text/javascript", headers={"Cache-Control": "no-cache"})


async def _docs(_request: Request) -> Response:
    return HTMLResponse(files("anabranch.web").joinpath("docs.html").read_text(encoding="utf-8"))
