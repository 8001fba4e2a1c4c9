"""The server's Telemetry: log, metrics and, with a collector, traces."""

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Attribute, Clock, SystemClock
from anabranch.domain.events import AnswerEvent, Token
from anabranch.domain.model import Context, Question
from anabranch.domain.signals import Signal
from anabranch.telemetry.log import Log, LoggedEvents, NullSpan
from anabranch.telemetry.metrics import Metrics

if TYPE_CHECKING:  # OpenTelemetry loads only where there is a collector
    from anabranch.telemetry.otlp import Traced, Traces


CALL = "upstream"


class Timed:
    """A span that is measured for the metrics."""

    __slots__ = ("_began", "_now", "_observe", "context")

    def __init__(self, observe: Callable[[float], None], now: Callable[[], float], context: Context) -> None:
        self._observe = observe
        self._now = now
        self.context = context

    def __enter__(self) -> "Timed":
        self._began = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self._observe((self._now() - self._began) * 1000)

    def set(self, name: str, value: Attribute) -> None: ...


class TimedAndTraced:
    """A span that is measured for the metrics and sent to the collector."""

    __slots__ = ("_timed", "_traced", "context")

    def __init__(self, timed: Timed, traced: "Traced") -> None:
        self._timed = timed
        self._traced = traced
        self.context = traced.context

    def __enter__(self) -> "TimedAndTraced":
        self._timed.__enter__()
        self._traced.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._traced.__exit__(kind, error, tb)
        self._timed.__exit__()

    def set(self, name: str, value: Attribute) -> None:
        self._traced.set(name, value)


Spans: TypeAlias = "Timed | TimedAndTraced | Traced | NullSpan"


class CombinedTelemetry:
    """Passes every event to log, metrics and traces. An error in them is logged once and fails no question."""

    def __init__(
        self,
        log: Log,
        metrics: Metrics,
        settings: Settings,
        traces: "Traces | None" = None,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._log = log
        self._lines = LoggedEvents(log, queries=settings.log_queries, clock=clock)
        self._metrics = metrics
        self._stages = metrics.stages
        self._traces = traces
        self._now = clock.monotonic
        self._failed = False

    def asked(self, question: Question, context: Context) -> None:
        try:
            self._metrics.asked(context.surface)
            self._lines.asked(question, context)
        except Exception as error:  # noqa: BLE001  the contract: telemetry never fails what it watches
            self._fail(error)

    def happened(self, event: AnswerEvent, context: Context) -> None:
        if isinstance(event, Token):
            return
        try:
            self._metrics.happened(event, context.surface)
            self._lines.happened(event, context)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def crashed(self, error: BaseException, context: Context) -> None:
        self._lines.crashed(error, context)

    def noted(self, signal: Signal) -> None:
        try:
            self._metrics.noted(signal)
            self._lines.noted(signal)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def span(self, name: str, context: Context, **attributes: str | int | float) -> "Spans":
        try:
            if name == CALL:  # calls to upstreams have metrics of their own
                return NullSpan(context) if self._traces is None else self._traces.span(name, context, attributes)
            timed = Timed(self._stages[name], self._now, context)
            if self._traces is None:
                return timed
            return TimedAndTraced(timed, self._traces.span(name, context, attributes))
        except Exception as error:  # noqa: BLE001
            self._fail(error)
            return NullSpan(context)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._log.error("telemetry_failed", exc_info=error)
