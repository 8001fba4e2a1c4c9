"""The ASGI application: the surfaces and the request loop, for the lifetime of an Anabranch."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import parent_process
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from anabranch.app.anabranch import Anabranch
from anabranch.app.config_reload import ConfigReload
from anabranch.app.event_streams import Timing
from anabranch.app.startup import watched
from anabranch.configuration.settings import Settings, load
from anabranch.entrypoints.http import chat
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.audit import AuditSurface
from anabranch.entrypoints.http.cluster import ClusterSurface
from anabranch.entrypoints.http.endpoints import EndpointSurface
from anabranch.entrypoints.http.erasures import ErasuresSurface
from anabranch.entrypoints.http.errors import EXPOSED
from anabranch.entrypoints.http.keys import KeysSurface
from anabranch.entrypoints.http.knowledge import KnowledgeSurface
from anabranch.entrypoints.http.limits import LimitsSurface
from anabranch.entrypoints.http.mcp import McpSurface
from anabranch.entrypoints.http.openai import OpenAISurface
from anabranch.entrypoints.http.openai_answers import lost_completion, lost_response
from anabranch.entrypoints.http.operations import Operation, RequestLoop
from anabranch.entrypoints.http.ops import OpsSurface
from anabranch.entrypoints.http.page import PageSurface
from anabranch.entrypoints.http.planner import PlannerSurface
from anabranch.entrypoints.http.query import QuerySurface, lost_query
from anabranch.entrypoints.http.query_log import QueryLogSurface
from anabranch.entrypoints.http.rag import RagSurface, lost_rag
from anabranch.entrypoints.http.session import SessionSurface
from anabranch.entrypoints.http.sources import SourcesSurface
from anabranch.entrypoints.http.stop_signals import StopSignals
from anabranch.entrypoints.http.streams import AnswerStreams, ShutdownEvent, Writers
from anabranch.entrypoints.reload_signal import on_hangup
from anabranch.policies.connections import CONNECTIONS, OpenConnections, max_open_files
from anabranch.policies.limits import connection_limit
from anabranch.telemetry.endpoint_history import EndpointHistory
from anabranch.telemetry.log import Log, configured_log
from anabranch.telemetry.metrics import Metrics

# Surfaces that hold data: a web page of another origin may use them only if CORS_ORIGINS names that origin.
HOLDING_DATA = ("/v1/", "/rag/", "/metrics", "/api/v1/endpoints", "/planner/", "/mcp")
# A page that has asked the chat surface may resume its answer: it has the id, which cannot be guessed.
KNOWN_BY_ID = "/v1/streams/"


class Service:
    """The ASGI application: opens an Anabranch at start-up and answers requests until the shutdown."""

    def __init__(self, settings: Settings, log: Log, *, timing: Timing = Timing()) -> None:
        self._timing = timing
        self._settings = settings
        self._log = log
        self._anabranch: Anabranch | None = None
        self._draining: asyncio.Task[None] | None = None
        self._closing, self._closed = ShutdownEvent(), ShutdownEvent()
        self._stopping = StopSignals(settings.shutdown_delay)
        self._lifespan = Router(lifespan=self._serving)
        self.operations: list[Operation[Any]] = []
        self._open: ASGIApp | None = None
        self._holding_data: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        path = scope["path"]
        app = self._holding_data if path.startswith(HOLDING_DATA) and not path.startswith(KNOWN_BY_ID) else self._open
        assert app is not None, "the server starts before it answers"
        await app(scope, receive, send)

    @asynccontextmanager
    async def _serving(self, _app: Any) -> AsyncIterator[dict[str, OpenConnections]]:
        metrics, history = Metrics(self._settings), EndpointHistory()
        async with (
            watched(self._settings, self._log, metrics, history) as telemetry,
            Anabranch.open(
                settings=self._settings,
                telemetry=telemetry,
                indexing=True,
                streaming=True,
                timing=self._timing,
                log_queries=True,
                indexer_died=lambda status: self._log.warning("indexer_died", status=status),
                index_damaged=lambda name: self._log.error("index_damaged", segments=(name,)),
            ) as anabranch,
        ):
            self._anabranch = anabranch
            access = Access(anabranch)
            mcp = McpSurface(anabranch, access, self._log)
            self.operations = self._table(anabranch, access, metrics, history, mcp)
            loop = RequestLoop(anabranch, self.operations, self._log, access.claimant, access.actor)
            origins = self._settings.cors_origins
            self._open = _shared(loop, origins, ["GET", "POST"])
            named = [origin for origin in origins if origin != "*"]
            self._holding_data = _shared(loop, named, ["GET", "POST", "PUT", "PATCH", "DELETE"])
            limit = connection_limit(self._settings, max_open_files())
            await anabranch.warm()
            with self._stopping.handled(self._drain):
                reload = ConfigReload(self._settings, anabranch.reconfigure, self._log, record=anabranch.record)
                async with on_hangup(reload.again):
                    yield {CONNECTIONS: OpenConnections(limit, access.is_shared)}
            # The server waits only for its connections; recorded answers without a listener get their time here.
            await (self._draining or anabranch.drain(0))
            await mcp.close()
        self._log.flush()

    def _table(
        self, anabranch: Anabranch, access: Access, metrics: Metrics, history: EndpointHistory, mcp: McpSurface
    ) -> list[Operation[Any]]:
        """The table of every address that the server answers."""
        writers: Writers = {
            "chat": lambda _: chat.frame,
            "rag": lost_rag,
            "query": lost_query,
            "completion": lost_completion,
            "response": lost_response,
        }
        streams = AnswerStreams(anabranch, access, self._closing, writers)
        surfaces = (
            ("chat", chat.ChatSurface(anabranch, access, streams).operations()),
            ("endpoints", EndpointSurface(anabranch, access).operations()),
            ("query", QuerySurface(anabranch, access, streams).operations()),
            ("rag", RagSurface(anabranch, access, streams).operations()),
            ("openai", OpenAISurface(anabranch, access, streams).operations()),
            ("knowledge", KnowledgeSurface(anabranch, access).operations()),
            ("knowledge", QueryLogSurface(anabranch, access, self._closing).operations()),
            ("knowledge", SourcesSurface(anabranch, access, history).operations()),
            ("knowledge", KeysSurface(anabranch, access).operations()),
            ("knowledge", LimitsSurface(anabranch, access).operations()),
            ("knowledge", ErasuresSurface(anabranch, access).operations()),
            ("knowledge", AuditSurface(anabranch, access).operations()),
            ("knowledge", ClusterSurface(anabranch, access).operations()),
            ("session", SessionSurface(anabranch, access).operations()),
            ("planner", PlannerSurface(anabranch, access, self._closing, self._closed).operations()),
            ("streams", streams.operations()),
            ("mcp", mcp.operations()),
            ("page", PageSurface().operations()),
        )
        off = self._settings.switched_off
        operations = [
            replace(operation, switched_off_by=off.get(name, "")) for name, table in surfaces for operation in table
        ]
        return OpsSurface(anabranch, access, metrics, operations, self._stopping).operations()

    def _drain(self) -> None:
        assert self._anabranch is not None
        self._closing.set()
        self._draining = asyncio.create_task(self._drained(self._anabranch))

    async def _drained(self, anabranch: Anabranch) -> None:
        await anabranch.drain(self._settings.drain_timeout)
        self._closed.set()


# After so many new objects the garbage collector looks for cycles (700 by default). Questions that run hold thousands,
# and leave no cycles: looking less often saves 4% of the CPU of a chat answer.
NEW_OBJECTS = 10_000


def create() -> Service:
    """The factory that each worker calls; the settings are in the environment."""
    _end_with_the_parent()
    settings = load()
    service = Service(settings, configured_log(settings))
    # What exists now stays: the garbage collector need not visit it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    return service


def _end_with_the_parent() -> None:
    """Stops a worker whose parent was killed; it and its MCP servers would run for ever."""
    parent = parent_process()
    if parent is not None:

        def wait() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="parent", daemon=True).start()


def _shared(app: ASGIApp, origins: Sequence[str], methods: Sequence[str]) -> ASGIApp:
    """The app with CORS for these origins."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=methods,
        allow_headers=["*"],
        expose_headers=["X-Correlation-ID", *EXPOSED],
    )
