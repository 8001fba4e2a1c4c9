"""The operator's surface: health, readiness, metrics, the API description, and the files for web pages."""

import asyncio
import gzip
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec
from prometheus_client.exposition import gzip_accepted

from anabranch.app.anabranch import Anabranch
from anabranch.app.readiness import NotReady
from anabranch.domain.model import Value
from anabranch.entrypoints.http import openapi
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import PLAIN
from anabranch.entrypoints.http.operations import Call, Operation, Reply, header, unless_known
from anabranch.entrypoints.http.stop_signals import StopSignals
from anabranch.telemetry.metrics import Metrics

# A thread of its own: metrics are read also while other threads have much to do.
THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
CLIENT = {
    "stream.js": "The JavaScript client, in one file",
    "connection.js": "Parts of the JavaScript client, at the address of an earlier version",
}


class Health(Value, omit_defaults=True):
    status: str
    service: str = ""
    version: str = ""
    reason: NotReady | None = None


class OpsSurface:
    """Operations that hold no data of callers. `operations` are those of the other surfaces."""

    def __init__(
        self,
        anabranch: Anabranch,
        access: Access,
        metrics: Metrics,
        operations: list[Operation[Any]],
        stopping: StopSignals,
    ) -> None:
        self._stopping = stopping
        self._anabranch = anabranch
        self._access = access
        self._metrics = metrics
        self._healthy = Health(status="healthy", service="anabranch", version=version("anabranch"))
        self._operations = [*operations, *self._table()]
        self._description: Reply | None = None

    def operations(self) -> list[Operation[Any]]:
        """The whole table."""
        return self._operations

    def _table(self) -> list[Operation[Any]]:
        at = partial(Operation[Any], method="GET", dialect=PLAIN, scope=None)
        web = [
            at(
                path=f"/web/{name}",
                name=name.replace(".", "_"),
                summary=summary,
                handler=_file(name, "text/javascript; charset=utf-8"),
                media_type="text/javascript",
                response_types=(str,),
            )
            for name, summary in CLIENT.items()
        ]
        if self._anabranch.settings.debug:
            page = _file("docs.html", "text/html; charset=utf-8")
            web.append(at(path="/docs", name="docs", summary="API documentation", handler=page, media_type="text/html"))
        return [
            at(path="/health", name="health", summary="Liveness", handler=self._health, response_types=(Health,)),
            at(
                path="/ready",
                name="ready",
                summary="Whether the server takes questions",
                handler=self._ready,
                response_types=(Health,),
                statuses={200: "Ready.", 503: "Stopping, or not able to work, for a `reason`."},
            ),
            at(
                path="/openapi.json",
                name="openapi",
                summary="This description",
                handler=self._describe,
                response_types=(dict,),
            ),
            at(
                path="/metrics",
                name="metrics",
                summary="Metrics for Prometheus",
                handler=self._expose,
                media_type="text/plain",
                response_types=(str,),
                errors=(401, 403),
                scope=None if self._anabranch.settings.metrics_public else "read",
                # They name the endpoints of every owner.
                identify=None
                if self._anabranch.settings.metrics_public
                else partial(self._access.operator, "the metrics"),
            ),
            *web,
        ]

    async def _health(self, _call: Call[None]) -> Health:
        return self._healthy

    async def _ready(self, _call: Call[None]) -> Reply:
        if self._stopping.received or self._anabranch.runs.draining:
            return Reply(msgspec.json.encode(Health(status="draining")), 503)
        reason = await self._anabranch.readiness.reason()
        status = "ready" if reason is None else "not_ready"
        return Reply(msgspec.json.encode(Health(status=status, reason=reason)), 200 if reason is None else 503)

    async def _describe(self, _call: Call[None]) -> Reply:
        if self._description is None:
            # It takes a tenth of a second: too long for the event loop.
            described = await asyncio.to_thread(openapi.describe, self._operations, self._anabranch.settings)
            self._description = Reply(msgspec.json.encode(described))
        return self._description

    async def _expose(self, call: Call[None]) -> Reply:
        self._anabranch.runs.report_load()
        compressed = gzip_accepted(header(call.scope, b"accept-encoding") or "")
        # Thousands of lines take tens of milliseconds, which would delay every answer.
        accept = header(call.scope, b"accept") or ""
        loop = asyncio.get_running_loop()
        body, media_type = await loop.run_in_executor(THREAD, self._read_metrics, accept, compressed)
        return Reply(
            body,
            200,
            [
                (b"content-type", media_type.encode()),
                (b"cache-control", b"no-store"),
                (b"vary", b"accept, accept-encoding"),
                *([(b"content-encoding", b"gzip")] if compressed else []),
            ],
        )

    def _read_metrics(self, accept: str, compressed: bool) -> tuple[bytes, str]:
        body, media_type = self._metrics.exposition(accept)
        return (gzip.compress(body, 1) if compressed else body), media_type


def _file(name: str, media_type: str) -> Any:
    async def send(call: Call[None]) -> Reply:
        headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
        return unless_known(call, files("anabranch.web").joinpath(name).read_bytes(), headers)

    return send
