"""What this process knows of each upstream: circuit breaker, retry budget and latencies."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from anabranch.domain.contracts import Clock, Telemetry
from anabranch.domain.model import Endpoint
from anabranch.domain.signals import BreakerMoved, BreakerState
from anabranch.policies.breaker import Breaker, Policy, Rolling

# Callers of the chat surface can name any URL. Only so many upstreams are kept; the least recently used go first.
MAX_UPSTREAMS = 1_000
# An upstream whose URL and name are longer than this is called, but nothing is kept of it.
MAX_KEY = 1_000
# A closed breaker is shown for as many windows after its upstream was last called.
SHOWN_WINDOWS = 3
# Retries that are always allowed: the share of a single question would be less than one.
MIN_RETRIES = 2
LATENCIES = 100
MIN_LATENCIES = 20
SLOW = 0.95
# A caller may give a URL any name, also one of the operator's.
UNTRUSTED = " (named in a request)"
Role = Literal["source", "model", "embeddings", "reranker", "subagent"]
SEVERITY: Mapping[BreakerState, int] = {"closed": 0, "half_open": 1, "open": 2}


class UpstreamKey(NamedTuple):
    """What makes two endpoints the same upstream."""

    operator: bool
    public_only: bool
    role: Role
    kind: str
    url: str
    slug: str


class RetryBudget:
    """Keeps retries to a share of the calls within any window, so that retries never become the load."""

    __slots__ = ("_calls", "_share", "_spent", "_window_s")

    def __init__(self, share: float, window_s: float) -> None:
        self._share = share
        self._window_s = window_s
        self._calls = Rolling(window_s)
        self._spent: deque[float] = deque()

    def called(self, now: float) -> None:
        self._calls.add(now)

    def take(self, now: float) -> bool:
        """Spend one retry; False if the share is used up."""
        self._calls.roll(now)
        spent = self._spent
        while spent and spent[0] <= now - self._window_s:
            spent.popleft()
        if len(spent) + 1 > max(MIN_RETRIES, self._share * self._calls.total):
            return False
        spent.append(now)
        return True


class Latencies:
    """The durations of the last good replies."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LATENCIES)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def slow_s(self) -> float | None:
        """The 95th percentile; None while fewer than MIN_LATENCIES are known."""
        if len(self._last) < MIN_LATENCIES:
            return None
        return sorted(self._last)[math.ceil(SLOW * len(self._last)) - 1]


class Upstream:
    """The state of one upstream, shared by all calls of it."""

    __slots__ = ("breaker", "budget", "busy", "clock", "labels", "latencies", "name", "used")

    def __init__(self, name: str, host: str, policy: Policy, clock: Clock, telemetry: Telemetry) -> None:
        self.name = name
        self.labels: Mapping[str, str] = {"server.address": host, "anabranch.upstream": name}
        self.breaker = Breaker(name, policy, clock, telemetry)
        self.budget = RetryBudget(policy.retry_budget, policy.window_s)
        self.latencies = Latencies()
        self.clock = clock
        self.used = 0.0
        self.busy = 0


class UpstreamCall:
    """One call of an upstream under its breaker. False if the circuit is open; `good` is the outcome to record."""

    __slots__ = ("_permit", "_upstream", "good")

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._permit = upstream.breaker.enter()
        self.good: bool | None = None

    def __bool__(self) -> bool:
        return self._permit != 0

    def __enter__(self) -> "UpstreamCall":
        self._upstream.busy += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._upstream.breaker.leave(self._permit, self.good)
        self._upstream.busy -= 1
        self._upstream.used = self._upstream.clock.monotonic()

    def answered(self) -> None:
        self._permit = self._upstream.breaker.answered(self._permit)


class Upstreams:
    """Every upstream that was called recently."""

    def __init__(
        self, policy: Policy, clock: Clock, telemetry: Telemetry, *, max_upstreams: int = MAX_UPSTREAMS
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._telemetry = telemetry
        self._max_upstreams = max_upstreams
        # Apart, so that upstreams named in requests cannot evict those that the operator configured.
        self._configured: OrderedDict[UpstreamKey, Upstream] = OrderedDict()
        self._requested: OrderedDict[UpstreamKey, Upstream] = OrderedDict()

    def of(self, endpoint: Endpoint, suffix: str = "", role: Role = "source") -> Upstream:
        """The upstream of an endpoint; `suffix` keeps its name apart from others of the same path. Calls of callers say
        nothing about the operator's calls of the same URL: their tokens differ. The state of a private address is not
        shown to callers who may not reach it."""
        key = UpstreamKey(endpoint.operator, endpoint.public_only, role, endpoint.kind, endpoint.url, endpoint.slug)
        known = self._configured if endpoint.operator else self._requested
        found = known.get(key)
        if found is not None:
            known.move_to_end(key)
        else:
            name = endpoint.path + suffix + ("" if endpoint.operator else UNTRUSTED)
            found = Upstream(name, _host(endpoint.url), self._policy, self._clock, self._telemetry)
            if len(endpoint.url) + len(name) <= MAX_KEY:
                known[key] = found
                if len(known) > self._max_upstreams:
                    self._drop(known, next(iter(known)))
        found.used = self._clock.monotonic()
        return found

    def since(self, then: float) -> list[tuple[UpstreamKey, Upstream]]:
        """The upstreams that were called since then."""
        return [(key, upstream) for key, upstream in self._all() if upstream.used > then]

    def tend(self) -> None:
        """Drop upstreams that were not called for long."""
        before = self._clock.monotonic() - SHOWN_WINDOWS * self._policy.window_s - self._policy.pause_s
        for known in (self._configured, self._requested):
            for key in [key for key, upstream in known.items() if upstream.used < before and not upstream.busy]:
                self._drop(known, key)

    def _drop(self, known: "OrderedDict[UpstreamKey, Upstream]", key: UpstreamKey) -> None:
        upstream = known.pop(key)
        if upstream.breaker.state != "closed":
            self._telemetry.noted(BreakerMoved(upstream=upstream.name, state="closed"))

    def _all(self) -> Iterator[tuple[UpstreamKey, Upstream]]:
        return chain(self._configured.items(), self._requested.items())

    def states(self) -> Mapping[str, BreakerState]:
        """Breaker states by name; of two upstreams with the same name, the worse."""
        since = self._clock.monotonic() - SHOWN_WINDOWS * self._policy.window_s
        shown: dict[str, BreakerState] = {}
        for _, upstream in self._all():
            state = upstream.breaker.state
            if (state != "closed" or upstream.used > since) and SEVERITY[state] >= SEVERITY[
                shown.get(upstream.name, state)
            ]:
                shown[upstream.name] = state
        return shown

    def __len__(self) -> int:
        return len(self._configured) + len(self._requested)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
