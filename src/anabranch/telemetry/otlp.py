"""Traces, breadcrumbs and the audit log over OTLP, sent in background tasks: a slow or unreachable collector delays
nothing."""

import asyncio
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from importlib.metadata import version
from types import TracebackType
from typing import Generic, TypeVar
from urllib.parse import unquote

import msgspec
from opentelemetry.context import Context as TraceContext
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs, SeverityNumber
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditRecord
from anabranch.domain.contracts import Attribute, Outbound, Telemetry
from anabranch.domain.errors import Cancelled, ConfigurationError, UpstreamError
from anabranch.domain.model import Context, Value
from anabranch.domain.steps import Breadcrumb
from anabranch.telemetry.breadcrumbs import MAX_QUEUED, LostBreadcrumbs
from anabranch.telemetry.log import Log, audit_fields

T = TypeVar("T")

MAX_QUEUED_SPANS = 2_048
SPANS_PER_BATCH = 256
CRUMBS_PER_BATCH = 512
TRACES, LOGS = "/v1/traces", "/v1/logs"
AUDIT_EVENT = "anabranch.audit"
MAX_TEXT = 256
ABOUT = {"service.name": "anabranch", "service.version": version("anabranch")}
ERROR_TYPE = "error.type"
OPERATION, MODEL = "gen_ai.operation.name", "gen_ai.request.model"
KINDS = {"question": SpanKind.SERVER, "upstream": SpanKind.CLIENT, "generate": SpanKind.CLIENT}
# All of them, since the SDK reads the others from the environment.
LIMITS = SpanLimits(
    max_attributes=64,
    max_events=8,
    max_links=8,
    max_span_attributes=64,
    max_event_attributes=8,
    max_link_attributes=8,
    max_attribute_length=256,
    max_span_attribute_length=256,
)

enclosing: ContextVar[Span | None] = ContextVar("enclosing_span", default=None)


class OtlpTiming(Value):
    """Seconds between two batches, for one attempt to send one, and for the last ones at the end."""

    interval_s: float = 1.0
    attempt_s: float = 5.0
    close_s: float = 2.0


class OtlpClient:
    """Posts messages to a collector, each at most twice."""

    def __init__(
        self, outbound: Outbound, endpoint: str, path: str, headers: Mapping[str, str], attempt_s: float
    ) -> None:
        self._outbound = outbound
        self._url = endpoint.rstrip("/").removesuffix(TRACES).removesuffix(LOGS) + path
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._attempt_s = attempt_s

    async def send(self, encode: Callable[[], bytes]) -> str:
        """Why the collector has not accepted the message; empty if it has."""
        try:
            # Encoding takes milliseconds: not on the event loop.
            body = await asyncio.to_thread(encode)
            return await self._post(body) and await self._post(body)
        except Exception as error:  # noqa: BLE001  a task boundary: the next batch may be sent
            return f"The batch cannot be sent ({type(error).__name__})."

    async def _post(self, body: bytes) -> str:
        call = self._outbound.request("POST", self._url, headers=self._headers, body=body, operator=True)
        try:
            async with asyncio.timeout(self._attempt_s), call as exchange:
                await exchange.read()
                return "" if exchange.status < 300 else f"The collector answered {exchange.status}."
        except UpstreamError as error:
            return error.message
        except TimeoutError:
            return f"The collector did not answer within {self._attempt_s:g} seconds."


class BatchSender(Generic[T]):
    """A bounded queue, and the task that hands its items to `send` in batches. Items that do not fit and batches that
    were not sent are counted as `dropped`."""

    def __init__(
        self,
        send: Callable[[Sequence[T]], Awaitable[bool]],
        dropped: Callable[[int], None],
        *,
        max_queued: int,
        per_batch: int,
        timing: OtlpTiming,
    ) -> None:
        self._send = send
        self._dropped = dropped
        self._max_queued = max_queued
        self._per_batch = per_batch
        self._timing = timing
        self._queue: deque[T] = deque()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def add(self, item: T) -> None:
        if len(self._queue) < self._max_queued:
            self._queue.append(item)
        else:
            self._dropped(1)

    async def close(self) -> None:
        """Send what is queued, within `close_s`."""
        self._closing.set()
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.close_s):
                    await self._task
            self._task = None
        if self._queue:
            self._dropped(len(self._queue))
            self._queue.clear()

    async def _run(self) -> None:
        closing = False
        while not closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.interval_s):
                    closing = await self._closing.wait()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(self._per_batch, len(self._queue)))]
                sent = False
                try:
                    sent = await self._send(batch)
                finally:
                    if not sent:
                        self._dropped(len(batch))


class OtlpBreadcrumbs:
    """Sends breadcrumbs to a collector as log records."""

    def __init__(
        self,
        outbound: Outbound,
        endpoint: str,
        headers: Mapping[str, str],
        telemetry: Telemetry,
        timing: OtlpTiming = OtlpTiming(),
    ) -> None:
        self._client = OtlpClient(outbound, endpoint, LOGS, headers, timing.attempt_s)
        self._lost = LostBreadcrumbs(telemetry)
        self._sender = BatchSender[Breadcrumb](
            self._send, self._lost.add, max_queued=MAX_QUEUED, per_batch=CRUMBS_PER_BATCH, timing=timing
        )
        self.start = self._sender.start
        self.drop = self._sender.add

    async def close(self) -> None:
        await self._sender.close()
        self._lost.close()

    async def _send(self, batch: Sequence[Breadcrumb]) -> bool:
        return not await self._client.send(lambda: encode_crumbs(batch).SerializeToString())


class Traced:
    """An open span. A cancellation ends it without an error status."""

    __slots__ = ("_ended", "_outer", "_span", "context")

    def __init__(self, span: Span, context: Context, ended: Callable[[], None]) -> None:
        self._span = span
        self._ended = ended
        self._outer: Span | None = None
        self.context = context

    def __enter__(self) -> "Traced":
        self._outer = enclosing.get()
        enclosing.set(self._span)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Not by a token of the variable: a generator may be closed in another task than the one that opened the span.
        enclosing.set(self._outer)
        if kind is not None and error is not None:
            cancelled = issubclass(kind, asyncio.CancelledError | GeneratorExit)
            # Only the kind of error: its message may quote an upstream.
            self.set(ERROR_TYPE, Cancelled.code if cancelled else getattr(error, "code", kind.__name__))
        self._span.end()
        self._ended()

    def set(self, name: str, value: Attribute) -> None:
        if name == ERROR_TYPE and value == Cancelled.code:
            name, value = "anabranch.cancelled", True
        self._span.set_attribute(name, value)
        if name == ERROR_TYPE:
            self._span.set_status(StatusCode.ERROR)


class Traces(SpanProcessor):
    """Starts spans, and sends ended ones to a collector."""

    def __init__(
        self,
        settings: Settings,
        outbound: Outbound,
        log: Log,
        dropped: Callable[[float], None] = lambda _: None,
        timing: OtlpTiming = OtlpTiming(),
    ) -> None:
        assert settings.otlp_endpoint is not None, "traces need a collector"
        self._client = OtlpClient(
            outbound, settings.otlp_endpoint, TRACES, headers(settings.otlp_headers or ""), timing.attempt_s
        )
        self._sender = BatchSender[ReadableSpan](
            self._send, dropped, max_queued=MAX_QUEUED_SPANS, per_batch=SPANS_PER_BATCH, timing=timing
        )
        self._log = log
        self._failing = False
        self._propagator = TraceContextTextMapPropagator()
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.trace_share)),
            resource=Resource(ABOUT),
            shutdown_on_exit=False,
            span_limits=LIMITS,
            meter_provider=NoOpMeterProvider(),
        )
        provider.add_span_processor(self)
        self.start = self._sender.start
        self.close = self._sender.close
        with warnings.catch_warnings():  # the SDK installs a warning filter
            self._tracer = provider.get_tracer("anabranch", version("anabranch"))

    def on_end(self, span: ReadableSpan) -> None:
        self._sender.add(span)

    def span(
        self,
        name: str,
        context: Context,
        attributes: Mapping[str, str | int | float],
        ended: Callable[[], None] = lambda: None,
    ) -> Traced:
        """A span inside the enclosing one of this task, else inside the caller's, else the first of its trace."""
        outer = enclosing.get()
        parent = self._caller_span(context) if outer is None else set_span_in_context(outer, TraceContext())
        kind = KINDS.get(name, SpanKind.INTERNAL)
        if OPERATION in attributes:  # the name that the semantic conventions give to a call of a model
            name = f"{attributes[OPERATION]} {attributes[MODEL]}"
        span = self._tracer.start_span(name, parent, kind, attributes, record_exception=False)
        return Traced(span, _child_context(span.get_span_context(), context), ended)

    def _caller_span(self, context: Context) -> TraceContext:
        if context.traceparent is None:
            return TraceContext()
        return self._propagator.extract(
            {"traceparent": context.traceparent, "tracestate": context.tracestate or ""}, TraceContext()
        )

    async def _send(self, batch: Sequence[ReadableSpan]) -> bool:
        reason = await self._client.send(lambda: encode_spans(batch).SerializeToString())
        if reason and not self._failing:
            self._log.warning("traces_lost", reason=reason)
        elif self._failing and not reason:
            self._log.info("traces_back")
        self._failing = bool(reason)
        return not reason


def _child_context(span: SpanContext, context: Context) -> Context:
    """The context for upstream calls inside the span."""
    if not span.is_valid:
        return context
    return msgspec.structs.replace(
        context,
        traceparent=f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}",
        tracestate=span.trace_state.to_header() or None,
    )


def encode_crumbs(batch: Sequence[Breadcrumb]) -> ExportLogsServiceRequest:
    return _request([_record(crumb) for crumb in batch])


def encode_audit(batch: Sequence[AuditRecord]) -> ExportLogsServiceRequest:
    return _request([_audit_record(one) for one in batch])


def _request(records: Sequence[LogRecord]) -> ExportLogsServiceRequest:
    logs = ScopeLogs(
        scope=InstrumentationScope(name="anabranch", version=ABOUT["service.version"]), log_records=records
    )
    resource = resource_pb2.Resource(attributes=[_attribute(name, value) for name, value in ABOUT.items()])
    return ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=resource, scope_logs=[logs])])


def _record(crumb: Breadcrumb) -> LogRecord:
    fields = {name: value for name, value in msgspec.structs.asdict(crumb).items() if value not in (None, "")}
    return LogRecord(
        time_unix_nano=_nanoseconds(fields.pop("timestamp", "")),
        severity_number=SeverityNumber.SEVERITY_NUMBER_INFO,
        severity_text="INFO",
        event_name=f"anabranch.{crumb.type}",
        body=AnyValue(string_value=crumb.type),
        attributes=[_attribute(f"anabranch.{name}", value) for name, value in fields.items()],
        trace_id=_trace_id(fields.pop("trace_id", "")),
    )


def _audit_record(record: AuditRecord) -> LogRecord:
    fields = {name: value for name, value in audit_fields(record).items() if value not in (None, "")}
    return LogRecord(
        time_unix_nano=round(record.at.timestamp() * 1_000_000) * 1_000,
        severity_number=SeverityNumber.SEVERITY_NUMBER_INFO,
        severity_text="INFO",
        event_name=AUDIT_EVENT,
        body=AnyValue(string_value=record.action),
        attributes=[_attribute(f"anabranch.audit.{name}", value) for name, value in fields.items()],
    )


def _attribute(name: str, value: str | int) -> KeyValue:
    return KeyValue(
        key=name,
        value=AnyValue(string_value=value[:MAX_TEXT]) if isinstance(value, str) else AnyValue(int_value=value),
    )


def _nanoseconds(timestamp: str) -> int:
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000) * 1_000_000
    except (ValueError, OverflowError):
        return 0


def _trace_id(given: str) -> bytes:
    try:
        found = bytes.fromhex(given)
    except ValueError:
        return b""
    return found if len(found) == 16 else b""


def headers(text: str) -> dict[str, str]:
    """The headers of AGGREGATOR_OTLP_HEADERS."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError("AGGREGATOR_OTLP_HEADERS takes headers as name=value,name=value.")
        found[name.strip()] = unquote(value.strip())
    return found
