"""The circuit breaker of an upstream: it opens at an error rate over a window, and closes after a successful probe."""

import math

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Telemetry
from anabranch.domain.model import Value
from anabranch.domain.signals import BreakerMoved, BreakerState

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

    __slots__ = ("_buckets", "_counts", "_per_s", "total")

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

    __slots__ = (
        "_calls",
        "_clock",
        "_failures",
        "_name",
        "_permit",
        "_policy",
        "_telemetry",
        "_trying",
        "state",
        "until",
    )

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
                calls = self._calls.total
                if calls >= self._policy.min_calls and self._failures.total / calls >= self._policy.rate:
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
        self._telemetry.noted(BreakerMoved(upstream=self._name, state=state))
