"""What is known of each upstream: its breaker, what may be asked of it again, and how quick it is."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from anabranch.domain.contracts import Clock, Telemetry
from anabranch.domain.model import Endpoint, Value
from anabranch.domain.signals import BreakerMoved, BreakerState
from anabranch.runtime.breaker import Breaker, Rolling
from anabranch.runtime.settings import Settings

# Callers of the chat surface can name any address, and each is remembered; those asked last stay.
MOST = 1_000
# One whose address is longer than this is asked like any other, but not remembered.
LONGEST = 1_000
# An upstream shows while it is in trouble, and for as many windows after it was last asked.
SHOWN_WINDOWS = 3
# So few are always allowed, or a lone question could never be asked again.
ALWAYS = 2
LATENCIES = 100
FEWEST_LATENCIES = 20
SLOW = 0.95
# A stranger may give an address any name, also one of the operator's.
STRANGERS = " (named in a request)"
Role = Literal["source", "model", "embeddings", "reranker", "subagent"]
WORSE: Mapping[BreakerState, int] = {"closed": 0, "half_open": 1, "open": 2}


class Key(NamedTuple):
    """What is one upstream: an address, a slug, and by whom, for what and in which dialect it is asked."""

    operator: bool
    public_only: bool
    role: Role
    kind: str
    url: str
    slug: str


class Policy(Value, gc=False):
    """When an upstream is left alone, and how often it may be asked again."""

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


class Budget:
    """Keeps what is asked again to a share of what is asked, within any window, so that it cannot become the load."""

    __slots__ = ("_calls", "_share", "_spent", "_window_s")

    def __init__(self, share: float, window_s: float) -> None:
        self._share = share
        self._window_s = window_s
        self._calls = Rolling(window_s)
        self._spent: deque[float] = deque()

    def called(self, now: float) -> None:
        self._calls.add(now)

    def take(self, now: float) -> bool:
        """Whether one more may be asked again; if so, it is spent."""
        self._calls.roll(now)
        spent = self._spent
        while spent and spent[0] <= now - self._window_s:
            spent.popleft()
        if len(spent) + 1 > max(ALWAYS, self._share * self._calls.total):
            return False
        spent.append(now)
        return True


class Latencies:
    """How long the last good replies took."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LATENCIES)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def slow_s(self) -> float | None:
        """Past this it is slower than usual (the 95th percentile); None while too few are known."""
        if len(self._last) < FEWEST_LATENCIES:
            return None
        return sorted(self._last)[math.ceil(SLOW * len(self._last)) - 1]


class Upstream:
    """One endpoint at one address, whoever asks it."""

    __slots__ = ("breaker", "budget", "busy", "labels", "latencies", "name", "used")

    def __init__(self, name: str, host: str, policy: Policy, clock: Clock, telemetry: Telemetry) -> None:
        self.name = name
        self.labels: Mapping[str, str] = {"server.address": host, "anabranch.upstream": name}
        self.budget = Budget(policy.retry_budget, policy.window_s)
        self.latencies = Latencies()
        self.used = 0.0
        self.busy = 0
        self.breaker = Breaker(
            name,
            window_s=policy.window_s,
            min_calls=policy.min_calls,
            rate=policy.rate,
            pause_s=policy.pause_s,
            clock=clock,
            telemetry=telemetry,
        )


class Upstreams:
    """Every upstream that was asked lately."""

    def __init__(self, policy: Policy, clock: Clock, telemetry: Telemetry, *, most: int = MOST) -> None:
        self._policy = policy
        self._clock = clock
        self._telemetry = telemetry
        self._most = most
        # Apart, so that those whom strangers name cannot push out those that the operator relies on.
        self._vouched: OrderedDict[Key, Upstream] = OrderedDict()
        self._named: OrderedDict[Key, Upstream] = OrderedDict()

    def of(self, endpoint: Endpoint, suffix: str = "", role: Role = "source") -> Upstream:
        """What is known of an endpoint's upstream; `suffix` tells its name from that of another of the same path. What
        strangers find out by asking an address in their own way says nothing about the operator's way of asking it; and
        what others know of a private address must not show to those who may not reach it."""
        key = Key(endpoint.operator, endpoint.public_only, role, endpoint.kind, endpoint.url, endpoint.slug)
        known = self._vouched if endpoint.operator else self._named
        found = known.get(key)
        if found is not None:
            known.move_to_end(key)
        else:
            name = endpoint.path + suffix + ("" if endpoint.operator else STRANGERS)
            found = Upstream(name, _host(endpoint.url), self._policy, self._clock, self._telemetry)
            if len(endpoint.url) + len(name) <= LONGEST:
                known[key] = found
                if len(known) > self._most:
                    self._forget(known, next(iter(known)))
        found.used = self._clock.monotonic()
        return found

    def since(self, then: float) -> list[tuple[Key, Upstream]]:
        """Those that were asked since then."""
        return [(key, upstream) for key, upstream in self._all() if upstream.used > then]

    def tend(self) -> None:
        """Forget those that nobody has asked for long: what they were like then says nothing any more."""
        before = self._clock.monotonic() - SHOWN_WINDOWS * self._policy.window_s - self._policy.pause_s
        for known in (self._vouched, self._named):
            for key in [key for key, upstream in known.items() if upstream.used < before and not upstream.busy]:
                self._forget(known, key)

    def _forget(self, known: "OrderedDict[Key, Upstream]", key: Key) -> None:
        upstream = known.pop(key)
        if upstream.breaker.state != "closed":
            self._telemetry.noted(BreakerMoved(upstream=upstream.name, state="closed"))

    def _all(self) -> Iterator[tuple[Key, Upstream]]:
        return chain(self._vouched.items(), self._named.items())

    def states(self) -> Mapping[str, BreakerState]:
        """How the breakers stand, by name; where two upstreams have the same name, the worse of them."""
        since = self._clock.monotonic() - SHOWN_WINDOWS * self._policy.window_s
        shown: dict[str, BreakerState] = {}
        for _, upstream in self._all():
            state = upstream.breaker.state
            if (state != "closed" or upstream.used > since) and WORSE[state] >= WORSE[shown.get(upstream.name, state)]:
                shown[upstream.name] = state
        return shown

    def __len__(self) -> int:
        return len(self._vouched) + len(self._named)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
