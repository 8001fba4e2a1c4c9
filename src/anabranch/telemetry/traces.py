"""Traces: OpenTelemetry spans, and how they reach a collector without ever holding up what they watch."""

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from importlib.metadata import version
from types import TracebackType
from urllib.parse import unquote

import msgspec
from opentelemetry.context import Context as TraceContext
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Attribute, Outbound
from anabranch.domain.errors import Cancelled, ConfigurationError, UpstreamError
from anabranch.domain.model import Context
from anabranch.telemetry.log import Log

MAX_WAITING = 2_048
BATCH = 256
EVERY_S = 1.0
EXPORT_S = 5.0
CLOSE_S = 2.0
PATH = "/v1/traces"
ERROR_TYPE = "error.type"
CANCELLED = "anabranch.cancelled"
OPERATION, MODEL = "gen_ai.operation.name", "gen_ai.request.model"
KINDS = {"question": SpanKind.SERVER, "upstream": SpanKind.CLIENT, "generate": SpanKind.CLIENT}
# Every one is named, or the SDK looks for it in the environment.
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


class Traced:
    """A span under way. It ends well, in an error, or cut off, which is no error: nobody waited for it any more."""

    __slots__ = ("_before", "_span", "context")

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self._before: Span | None = None
        self.context = context

    def __enter__(self) -> "Traced":
        self._before = enclosing.get()
        enclosing.set(self._span)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Not by the variable's token: a generator may be closed in another task than the one that opened the span.
        enclosing.set(self._before)
        if kind is not None and error is not None:
            cut_off = issubclass(kind, asyncio.CancelledError | GeneratorExit)
            # The kind of error alone: its words may be a stranger's.
            self.set(ERROR_TYPE, Cancelled.code if cut_off else getattr(error, "code", kind.__name__))
        self._span.end()

    def set(self, name: str, value: Attribute) -> None:
        if name == ERROR_TYPE and value == Cancelled.code:
            self._span.set_attribute(CANCELLED, True)
            return
        self._span.set_attribute(name, value)
        if name == ERROR_TYPE:
            self._span.set_status(StatusCode.ERROR)


class Traces:
    """Spans, and the task that sends them on. A collector that is slow or gone costs spans, never time."""

    def __init__(
        self,
        settings: Settings,
        outbound: Outbound,
        log: Log,
        dropped: Callable[[float], None] = lambda _: None,
    ) -> None:
        assert settings.otlp_endpoint is not None, "traces need a collector"
        endpoint = settings.otlp_endpoint.rstrip("/")
        self._url = endpoint if endpoint.endswith(PATH) else endpoint + PATH
        self._headers = {**headers(settings.otlp_headers or ""), "Content-Type": "application/x-protobuf"}
        self._outbound = outbound
        self._log = log
        self._dropped = dropped
        self._lost = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waiting = Waiting(dropped)
        self._propagator = TraceContextTextMapPropagator()
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.trace_share)),
            resource=Resource({"service.name": "anabranch", "service.version": version("anabranch")}),
            shutdown_on_exit=False,
            span_limits=LIMITS,
            meter_provider=NoOpMeterProvider(),
        )
        provider.add_span_processor(self._waiting)
        with warnings.catch_warnings():  # the SDK would leave a filter of its own behind
            self._tracer = provider.get_tracer("anabranch", version("anabranch"))

    def span(self, name: str, context: Context, attributes: Mapping[str, str | int | float]) -> Traced:
        """A span inside the one that encloses it here, else inside the caller's, else the first of its trace."""
        outer = enclosing.get()
        parent = self._callers(context) if outer is None else set_span_in_context(outer, TraceContext())
        kind = KINDS.get(name, SpanKind.INTERNAL)
        if OPERATION in attributes:  # the conventions' name for a call to a model
            name = f"{attributes[OPERATION]} {attributes[MODEL]}"
        span = self._tracer.start_span(name, parent, kind, attributes, record_exception=False)
        return Traced(span, _carried(span.get_span_context(), context))

    def _callers(self, context: Context) -> TraceContext:
        if context.traceparent is None:
            return TraceContext()
        sent = {"traceparent": context.traceparent, "tracestate": context.tracestate or ""}
        return self._propagator.extract(sent, TraceContext())

    async def start(self) -> None:
        self._task = asyncio.create_task(self._send_on())

    async def close(self) -> None:
        """Send what waits, as far as a moment allows."""
        self._closing.set()
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._task
            self._task = None
        if self._waiting.spans:
            self._dropped(len(self._waiting.spans))
            self._waiting.spans.clear()

    async def _send_on(self) -> None:
        closing = False
        while not closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    closing = await self._closing.wait()
            while self._waiting.spans:
                await self._send_batch()

    async def _send_batch(self) -> None:
        spans = self._waiting.spans
        batch = [spans.popleft() for _ in range(min(BATCH, len(spans)))]
        try:
            # Encoding takes milliseconds, in which nobody's answer should have to wait.
            body = await asyncio.to_thread(lambda: encode_spans(batch).SerializeToString())
            reason = await self._sent(body) and await self._sent(body)
        except asyncio.CancelledError:
            self._dropped(len(batch))
            raise
        except Exception as error:  # noqa: BLE001  the task's boundary: one batch that cannot be sent is not the end
            reason = f"The spans cannot be sent ({type(error).__name__})."
        if reason:
            self._dropped(len(batch))
        if reason and not self._lost:
            self._log.warning("traces_lost", reason=reason)
        elif self._lost and not reason:
            self._log.info("traces_back")
        self._lost = bool(reason)

    async def _sent(self, body: bytes) -> str:
        """Why the collector does not have them; empty if it does."""
        call = self._outbound.request("POST", self._url, headers=self._headers, body=body, operator=True)
        try:
            async with asyncio.timeout(EXPORT_S), call as exchange:
                await exchange.read()
                return "" if exchange.status < 300 else f"The collector answered {exchange.status}."
        except UpstreamError as error:
            return error.message
        except TimeoutError:
            return f"The collector did not answer within {EXPORT_S:g} seconds."


class Waiting(SpanProcessor):
    """Ended spans that wait to be sent; beyond the bound they are dropped."""

    def __init__(self, dropped: Callable[[float], None]) -> None:
        self.spans: deque[ReadableSpan] = deque()
        self._dropped = dropped

    def on_start(self, span: SdkSpan, parent_context: TraceContext | None = None) -> None: ...

    def on_end(self, span: ReadableSpan) -> None:
        if len(self.spans) < MAX_WAITING:
            self.spans.append(span)
        else:
            self._dropped(1)


def _carried(span: SpanContext, context: Context) -> Context:
    """The context to go on with: whoever is asked inside the span continues from it."""
    if not span.is_valid:
        return context
    return msgspec.structs.replace(
        context,
        traceparent=f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}",
        tracestate=span.trace_state.to_header() or None,
    )


def headers(text: str) -> dict[str, str]:
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError("AGGREGATOR_OTLP_HEADERS takes headers as name=value,name=value.")
        found[name.strip()] = unquote(value.strip())
    return found
