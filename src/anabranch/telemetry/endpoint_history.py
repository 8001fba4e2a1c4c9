"""The last hour of calls to the operator's sources and models, per minute, in the memory of this process."""

import math
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable

from anabranch.domain.model import Endpoint, Value
from anabranch.domain.signals import EndpointCalled, EndpointRole

MINUTES = 60
# More endpoints than this are not kept; the least recently called go first.
MAX_ENDPOINTS = 500
# Of a busy minute, as many latencies are kept; the latest replace the earliest.
LATENCIES = 32
MAX_ERROR = 500

Key = tuple[EndpointRole, str, str, str]


class MinuteOfCalls(Value, gc=False):
    """The calls of one minute: `minute` is its start, in seconds since 1970. Percentiles are of at most the last 32
    calls."""

    minute: int
    calls: int
    errors: int
    p50_ms: int
    p95_ms: int


class CallHistory(Value):
    """What is known of one endpoint: its minutes with calls, oldest first, and its last call and error, in seconds
    since 1970."""

    minutes: tuple[MinuteOfCalls, ...] = ()
    last_used: float | None = None
    last_error: str | None = None
    last_error_at: float | None = None

    @property
    def calls(self) -> int:
        return sum(minute.calls for minute in self.minutes)

    @property
    def errors(self) -> int:
        return sum(minute.errors for minute in self.minutes)


class MinuteCounts:
    __slots__ = ("calls", "errors", "latencies", "minute")

    def __init__(self, minute: int) -> None:
        self.minute = minute
        self.calls = 0
        self.errors = 0
        self.latencies = array("f")

    def add(self, latency_ms: float, *, failed: bool) -> None:
        if self.calls < LATENCIES:
            self.latencies.append(latency_ms)
        else:
            self.latencies[self.calls % LATENCIES] = latency_ms
        self.calls += 1
        self.errors += failed

    def summary(self) -> MinuteOfCalls:
        ordered = sorted(self.latencies)
        p50, p95 = (round(ordered[math.ceil(share * len(ordered)) - 1]) for share in (0.5, 0.95))
        return MinuteOfCalls(minute=self.minute * 60, calls=self.calls, errors=self.errors, p50_ms=p50, p95_ms=p95)


class EndpointCalls:
    __slots__ = ("error", "error_at", "minutes", "used")

    def __init__(self) -> None:
        self.minutes: deque[MinuteCounts] = deque(maxlen=MINUTES)
        self.used = 0.0
        self.error: str | None = None
        self.error_at: float | None = None


class EndpointHistory:
    """Counts the calls of each endpoint. Its size is bounded: endpoints, minutes and latencies are."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._endpoints: OrderedDict[Key, EndpointCalls] = OrderedDict()

    def called(self, signal: EndpointCalled) -> None:
        now, key = self._now(), _key(signal.role, signal.endpoint)
        known = self._endpoints.get(key)
        if known is None:
            known = self._endpoints[key] = EndpointCalls()
            if len(self._endpoints) > MAX_ENDPOINTS:
                self._endpoints.popitem(last=False)
        else:
            self._endpoints.move_to_end(key)
        minute = int(now // 60)
        if not known.minutes or known.minutes[-1].minute != minute:
            known.minutes.append(MinuteCounts(minute))
        known.minutes[-1].add(signal.latency_ms, failed=signal.error is not None)
        known.used = now
        if signal.error is not None:
            known.error, known.error_at = signal.error[:MAX_ERROR], now

    def of(self, role: EndpointRole, endpoint: Endpoint) -> CallHistory:
        known = self._endpoints.get(_key(role, endpoint))
        if known is None:
            return CallHistory()
        oldest = int(self._now() // 60) - MINUTES + 1
        return CallHistory(
            minutes=tuple(minute.summary() for minute in known.minutes if minute.minute >= oldest),
            last_used=known.used,
            last_error=known.error,
            last_error_at=known.error_at,
        )


def _key(role: EndpointRole, endpoint: Endpoint) -> Key:
    return role, endpoint.kind, endpoint.url, endpoint.slug
