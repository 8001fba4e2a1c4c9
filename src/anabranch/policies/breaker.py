"""Circuit breakers and concurrency limits of the upstreams, and their state shared between workers through Redis."""

import asyncio
import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Telemetry
from anabranch.domain.model import Endpoint, Value
from anabranch.domain.signals import BreakerState, BreakerStateChanged
from anabranch.redis.client import Redis, RedisGone

BUCKETS = 10


class Policy(Value, gc=False):
    """When a circuit opens and for how long, and how often a call is retried."""

    window_s: float = 30.0
    min_calls: int = 10
    rate: float = 0.5
    pause_s: float = 10.0
    model_retries: int = 2
    retry_budget: float = 0.2

    @classmethod
    def of(cls, settings: Settings) -> "Policy":
        return cls(
            window_s=settings.breaker_window,
            min_calls=settings.breaker_calls,
            rate=settings.breaker_rate,
            pause_s=settings.breaker_pause,
            model_retries=settings.model_retries,
            retry_budget=settings.retry_budget,
        )


class Rolling:
    """A count over the last window, in buckets of a tenth: up to a tenth of the window is dropped early."""

    def __init__(self, window_s: float) -> None:
        self._per_s = BUCKETS / window_s
        self._counts = [0] * BUCKETS
        self._buckets = 0
        self.total = 0

    def add(self, now: float) -> None:
        self.roll(now)
        self._counts[self._buckets % BUCKETS] += 1
        self.total += 1

    def roll(self, now: float) -> None:
        """Drop the buckets that have left the window."""
        bucket = int(now * self._per_s)
        if bucket == self._buckets:
            return
        for stale in range(max(self._buckets, bucket - BUCKETS) + 1, bucket + 1):
            self.total -= self._counts[stale % BUCKETS]
            self._counts[stale % BUCKETS] = 0
        self._buckets = bucket

    def clear(self) -> None:
        self._counts = [0] * BUCKETS
        self.total = 0


class Breaker:
    """Circuit breaker: opens at a rate of failures, refuses calls for a pause, then lets one trial call through, whose
    outcome closes or opens it.

    A call takes a permit with `enter` and returns it with `leave`. Each change of state invalidates earlier permits, so
    that a call from before the pause does not count as the trial."""

    def __init__(self, name: str, policy: Policy, clock: Clock, telemetry: Telemetry) -> None:
        self._name = name
        self._policy = policy
        self._clock = clock
        self._telemetry = telemetry
        self._calls = Rolling(policy.window_s)
        self._failures = Rolling(policy.window_s)
        self._permit = 1
        self._trying = False
        self.until = 0.0
        self.state: BreakerState = "closed"

    def enter(self) -> int:
        """A permit, or 0 if the circuit is open."""
        if self.state == "closed":
            return self._permit
        if self.blocked:
            return 0
        if self.state == "open":
            self._move("half_open")
        self._trying = True
        return self._permit

    def answered(self, permit: int) -> int:
        """A good reply has begun, which closes a half-open circuit. Returns the permit to leave with."""
        if permit == self._permit and self.state == "half_open":
            self._close()
            return self._permit
        return permit

    def leave(self, permit: int, good: bool | None) -> None:
        """Record the outcome of a call; None says nothing about the upstream."""
        if permit != self._permit:
            return
        if self.state == "half_open":
            self._trying = False
            if good is not None:
                self._close() if good else self.open()
        elif good is not None:
            now = self._clock.monotonic()
            self._calls.add(now)
            if not good:
                self._failures.add(now)
                rate = self._failures.total / self._calls.total
                if self._calls.total >= self._policy.min_calls and rate >= self._policy.rate:
                    self.open()

    @property
    def blocked(self) -> bool:
        """Whether a call would be refused now."""
        return self.open_s > 0 if self.state == "open" else self._trying

    @property
    def open_s(self) -> float:
        """For how many more seconds the circuit is open."""
        return max(0.0, self.until - self._clock.monotonic()) if self.state == "open" else 0.0

    @property
    def refusal(self) -> str:
        """Why a call is refused, as the end of a sentence."""
        left_s = math.ceil(self.open_s)
        if not left_s:
            return "has failed too often: its circuit is half open until the trial call ends"
        return f"has failed too often: its circuit is open for {left_s} more second{'' if left_s == 1 else 's'}"

    def open(self, seconds: float = math.inf) -> None:
        """Open the circuit for the configured pause, or less."""
        self.until = self._clock.monotonic() + min(seconds, self._policy.pause_s)
        self._move("open")

    def _close(self) -> None:
        self._calls.clear()
        self._failures.clear()
        self._move("closed")

    def _move(self, state: BreakerState) -> None:
        self._permit += 1
        self._trying = False
        self.state = state
        self._telemetry.noted(BreakerStateChanged(upstream=self._name, state=state))


# Callers of the chat surface can name any URL. Only so many upstreams are kept; the least recently used go first.
MAX_UPSTREAMS = 1_000
# An upstream whose URL and name are longer than this is called, but nothing is kept of it.
MAX_KEY = 1_000
# A closed breaker is listed for as many windows after its upstream was last called.
LISTED_WINDOWS = 3
# Retries that are always allowed: the share of a single question would be less than one.
MIN_RETRIES = 2
LATENCIES = 100
MIN_LATENCIES = 20
SLOW = 0.95
# A caller may give a URL any name, also one of the operator's.
UNTRUSTED = " (named in a request)"
Role = Literal["source", "model", "embeddings", "reranker", "verifier", "subagent"]
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
        while self._spent and self._spent[0] <= now - self._window_s:
            self._spent.popleft()
        allowed = len(self._spent) + 1 <= max(MIN_RETRIES, self._share * self._calls.total)
        if allowed:
            self._spent.append(now)
        return allowed


class Upstream:
    """The state of one upstream, shared by all calls of it. `latencies` are those of the last good replies."""

    def __init__(self, name: str, host: str, policy: Policy, clock: Clock, telemetry: Telemetry) -> None:
        self.name = name
        self.labels: Mapping[str, str] = {"server.address": host, "anabranch.upstream": name}
        self.breaker = Breaker(name, policy, clock, telemetry)
        self.budget = RetryBudget(policy.retry_budget, policy.window_s)
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.clock = clock
        self.used = 0.0
        self.busy = 0

    @property
    def slow_s(self) -> float | None:
        """The 95th percentile of the latencies; None while fewer than MIN_LATENCIES are known."""
        if len(self.latencies) < MIN_LATENCIES:
            return None
        return sorted(self.latencies)[math.ceil(SLOW * len(self.latencies)) - 1]


class UpstreamCall:
    """One call of an upstream under its breaker. False if the circuit is open; `good` is the outcome to record. A
    `counted` call adds to the retry budget."""

    __slots__ = ("_permit", "_upstream", "good")

    def __init__(self, upstream: Upstream, *, counted: bool = False) -> None:
        self._upstream = upstream
        self._permit = upstream.breaker.enter()
        self.good: bool | None = None
        if counted and self._permit:
            upstream.budget.called(upstream.clock.monotonic())

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
        visible to callers who may not reach it."""
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

    def state(self, endpoint: Endpoint, role: Role) -> BreakerState:
        """The state of an endpoint's circuit; closed if it was not called recently."""
        key = UpstreamKey(endpoint.operator, endpoint.public_only, role, endpoint.kind, endpoint.url, endpoint.slug)
        found = (self._configured if endpoint.operator else self._requested).get(key)
        return "closed" if found is None else found.breaker.state

    def since(self, then: float) -> list[tuple[UpstreamKey, Upstream]]:
        """The upstreams that were called since then."""
        return [(key, upstream) for key, upstream in self._all() if upstream.used > then]

    def drop_unused(self) -> None:
        """Drop upstreams that were not called for long."""
        before = self._clock.monotonic() - LISTED_WINDOWS * self._policy.window_s - self._policy.pause_s
        for known in (self._configured, self._requested):
            for key in [key for key, upstream in known.items() if upstream.used < before and not upstream.busy]:
                self._drop(known, key)

    def _drop(self, known: "OrderedDict[UpstreamKey, Upstream]", key: UpstreamKey) -> None:
        upstream = known.pop(key)
        if upstream.breaker.state != "closed":
            self._telemetry.noted(BreakerStateChanged(upstream=upstream.name, state="closed"))

    def _all(self) -> Iterator[tuple[UpstreamKey, Upstream]]:
        return chain(self._configured.items(), self._requested.items())

    def states(self) -> Mapping[str, BreakerState]:
        """Breaker states by name; of two upstreams with the same name, the worse."""
        since = self._clock.monotonic() - LISTED_WINDOWS * self._policy.window_s
        states: dict[str, BreakerState] = {}
        for _, upstream in self._all():
            state = upstream.breaker.state
            if state != "closed" or upstream.used > since:
                states[upstream.name] = max(state, states.get(upstream.name, state), key=SEVERITY.__getitem__)
        return states


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


EVERY_S = 1.0
# Circuits of upstreams that were not called here for so long are not exchanged.
RECENT_S = 30.0


class SharedBreakers:
    """Once a second, publishes the circuits that opened here and opens those that opened in other workers, for as long
    as they are open there. Each worker makes its own trial call."""

    def __init__(self, redis: Redis, upstreams: Upstreams, clock: Clock) -> None:
        self._redis = redis
        self._upstreams = upstreams
        self._clock = clock
        self._published: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            with suppress(RedisGone):
                await self.exchange()

    async def exchange(self) -> None:
        now = self._clock.monotonic()
        self._published = {key: until for key, until in self._published.items() if until > now}
        if not self._redis.reachable:
            return
        await self._redis.execute("PING")  # so that an outage of Redis is noticed without questions, too
        recent = self._upstreams.since(now - RECENT_S)
        await asyncio.gather(*(self._exchange(_key(key), upstream) for key, upstream in recent))

    async def _exchange(self, key: str, upstream: Upstream) -> None:
        breaker = upstream.breaker
        if breaker.open_s > 0:
            if self._published.get(key, 0.0) < breaker.until:
                self._published[key] = breaker.until
                await self._redis.execute("SET", key, upstream.name, "PX", max(1, int(breaker.open_s * 1000)))
        elif breaker.state == "closed":
            left_ms = await self._redis.execute("PTTL", key)
            if isinstance(left_ms, int) and left_ms > 0:
                breaker.open(left_ms / 1000)
                self._published[key] = breaker.until  # the other workers know it: do not publish it again


def _key(upstream: UpstreamKey) -> str:
    return f"breaker:{hashlib.blake2b(repr(upstream).encode(errors='replace'), digest_size=16).hexdigest()}"
