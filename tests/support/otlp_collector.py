"""A small, real collector of traces: OTLP over HTTP, decoded; it answers, refuses or hangs as a test wishes."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from anabranch.testing.http_server import HttpServer

PATIENCE_S = 10


class Received(NamedTuple):
    """A span as the collector sees it; `parent` is empty for the first of a trace."""

    name: str
    trace: str
    id: str
    parent: str
    kind: str
    error: bool
    attributes: Mapping[str, object]
    state: str


class Collector(HttpServer):
    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        self.resource: dict[str, object] = {}
        self.refuse = 0
        self.hang = False
        super().__init__(self._respond)
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Received:
        (found,) = self.named(name)
        return found

    def inside(self, outer: Received) -> list[Received]:
        return [span for span in self.spans if span.parent == outer.id]

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        self.requests.append((request.path, dict(request.headers), body))
        self._changed.set()
        if self.hang:
            await asyncio.Event().wait()
        if self.refuse:
            self.refuse -= 1
            return web.Response(status=503)
        self.collect(body)
        self._changed.set()
        return web.Response(body=b"", headers={"Content-Type": "application/x-protobuf"})

    def collect(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.of(of_resource.resource)
            self.spans += [_received(span) for scope in of_resource.scope_spans for span in scope.spans]

    def of(self, resource: Resource) -> None:
        self.resource = {pair.key: pair.value.string_value for pair in resource.attributes}


def _received(span: Span) -> Received:
    values = {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "") for pair in span.attributes}
    return Received(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        error=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=values,
        state=span.trace_state,
    )
