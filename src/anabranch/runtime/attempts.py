"""A plain call to an upstream, behind its breaker and within its budget."""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from anabranch.domain.contracts import Clock, Telemetry
from anabranch.domain.errors import UpstreamError
from anabranch.domain.model import Context
from anabranch.domain.signals import Retried
from anabranch.runtime.upstreams import Upstream

T = TypeVar("T")

# Such calls belong to whichever question is being worked on here, and have no time of their own.
ANYBODY = Context(correlation_id="", deadline=math.inf)


class Attempts:
    """One for each upstream that is called so: an embedding server, a reranker."""

    def __init__(self, upstream: Upstream, clock: Clock, telemetry: Telemetry) -> None:
        self._upstream = upstream
        self._clock = clock
        self._telemetry = telemetry

    async def made(self, call: Callable[[], Awaitable[T]], *, first: bool) -> T:
        """The call's result; a failure is an UpstreamError, and so is an upstream that is being left alone."""
        breaker = self._upstream.breaker
        turn = breaker.enter()
        if not turn:
            raise UpstreamError(f"It has failed too often lately and {breaker.patience}.")
        if first:
            self._upstream.budget.called(self._clock.monotonic())
        good: bool | None = None
        self._upstream.busy += 1
        try:
            with self._telemetry.span("upstream", ANYBODY, **self._upstream.labels):
                result = await call()
        except UpstreamError as error:
            good = False if error.trouble.fault else None
            raise
        else:
            good = True
            return result
        finally:
            breaker.leave(turn, good)
            self._upstream.busy -= 1
            self._upstream.used = self._clock.monotonic()

    def again(self) -> bool:
        """Whether it may be asked once more."""
        if self._upstream.breaker.blocked or not self._upstream.budget.take(self._clock.monotonic()):
            return False
        self._telemetry.noted(Retried(upstream=self._upstream.name))
        return True
