"""The breaker: an upstream that fails too often is left alone for a while, then tried with a single call."""

import math

from anabranch.domain.contracts import Clock, Telemetry
from anabranch.domain.signals import BreakerMoved, BreakerState

BUCKETS = 10


class Rolling:
    """How many there were within the last window, by tenths of it: up to a tenth of the window is forgotten early."""

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
        """Forget what is too old by now."""
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
    """Opens at a rate of failures, refuses for a pause, then lets one call through: its outcome closes or opens again.

    A call takes a turn with `enter` and gives it back with `leave`. Each change of state makes the turns that were
    taken before it worthless, so that a call from before the pause cannot be taken for the one that tries."""

    __slots__ = (
        "_calls",
        "_clock",
        "_failures",
        "_min_calls",
        "_name",
        "_pause_s",
        "_rate",
        "_telemetry",
        "_trying",
        "_turn",
        "state",
        "until",
    )

    def __init__(
        self,
        name: str,
        *,
        window_s: float,
        min_calls: int,
        rate: float,
        pause_s: float,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._name = name
        self._min_calls = min_calls
        self._rate = rate
        self._pause_s = pause_s
        self._clock = clock
        self._telemetry = telemetry
        self._calls = Rolling(window_s)
        self._failures = Rolling(window_s)
        self._turn = 1
        self.until = 0.0
        self._trying = False
        self.state: BreakerState = "closed"

    def enter(self) -> int:
        """A turn, or 0: the upstream is left alone at the moment."""
        if self.state == "closed":
            return self._turn
        if self.state == "open":
            if self._clock.monotonic() < self.until:
                return 0
            self._move("half_open")
        if self._trying:
            return 0
        self._trying = True
        return self._turn

    def answered(self, turn: int) -> int:
        """The upstream has begun to answer well: that is enough to close, however long the rest takes. Gives the turn
        to leave with."""
        if turn == self._turn and self.state == "half_open":
            self._close()
            return self._turn
        return turn

    def leave(self, turn: int, good: bool | None) -> None:
        """How the call ended; None says nothing about the upstream, and so lets the next one try."""
        if turn != self._turn:
            return
        if self.state == "half_open":
            self._trying = False
            if good is not None:
                self._close() if good else self._open()
        elif good is not None:
            now = self._clock.monotonic()
            self._calls.add(now)
            if not good:
                self._failures.add(now)
                calls = self._calls.total
                if calls >= self._min_calls and self._failures.total / calls >= self._rate:
                    self._open()

    @property
    def blocked(self) -> bool:
        """Whether a call would be refused just now."""
        if self.state == "open":
            return self._clock.monotonic() < self.until
        return self._trying

    @property
    def patience(self) -> str:
        """For how long it is left alone, in words that end a sentence."""
        left_s = math.ceil(self.until - self._clock.monotonic())
        if self.state != "open" or left_s <= 0:
            return "is left alone until the call that tries it is over"
        return f"is left alone for {left_s} more second{'' if left_s == 1 else 's'}"

    @property
    def left_s(self) -> float:
        """For how many more seconds it is left alone."""
        return max(0.0, self.until - self._clock.monotonic()) if self.state == "open" else 0.0

    def leave_alone(self, seconds: float) -> None:
        """Somebody else has found that it fails; for no longer than if it had been found here."""
        self.until = self._clock.monotonic() + min(seconds, self._pause_s)
        self._move("open")

    def _open(self) -> None:
        self.until = self._clock.monotonic() + self._pause_s
        self._move("open")

    def _close(self) -> None:
        self._calls.clear()
        self._failures.clear()
        self._move("closed")

    def _move(self, state: BreakerState) -> None:
        self._turn += 1
        self._trying = False
        self.state = state
        self._telemetry.noted(BreakerMoved(upstream=self._name, state=state))
