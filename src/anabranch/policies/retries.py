"""Asking a model again: which failures may pass, how long to wait, and when it is no use."""

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import TypeVar

from anabranch.domain.contracts import Clock, Generator, Telemetry
from anabranch.domain.errors import GenerationFailed, UpstreamError
from anabranch.domain.model import Context, Delta, Prompt, Usage
from anabranch.domain.signals import Retried, Spent
from anabranch.network import redaction
from anabranch.policies.upstreams import Upstream

FIRST_WAIT_S = 1.0
# A time-out is seen as a cancellation at the deadline; an event loop's own clock may be this much behind.
SLACK_S = 0.05

Sleep = Callable[[float], Awaitable[None]]
Chance = Callable[[], float]


class ResilientGenerator:
    """A Generator that is asked again while it has said nothing and the failure may pass, inside the deadline and the
    upstream's budget; one that fails too often is not asked at all."""

    __slots__ = ("_chance", "_clock", "_inner", "_retries", "_sleep", "_telemetry", "_upstream")

    def __init__(
        self,
        inner: Generator,
        upstream: Upstream,
        *,
        retries: int,
        clock: Clock,
        telemetry: Telemetry,
        sleep: Sleep = asyncio.sleep,
        chance: Chance = random.random,
    ) -> None:
        self._inner = inner
        self._upstream = upstream
        self._retries = retries
        self._clock = clock
        self._telemetry = telemetry
        self._sleep = sleep
        self._chance = chance

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        breaker = self._upstream.breaker
        said = False
        usage: Usage | None = None
        secrets = redaction.in_content()
        for attempt in range(self._retries + 1):
            turn = self._turn(attempt)
            good: bool | None = None
            self._upstream.busy += 1
            try:
                with self._telemetry.span("upstream", context, **self._upstream.labels) as span:
                    async with aclosing(self._inner.generate(prompt, span.context)) as deltas:
                        async for delta in deltas:
                            if not said and (delta.text or delta.usage or delta.finish_reason):
                                said = True
                                turn = breaker.answered(turn)
                            usage = delta.usage or usage
                            yield redaction.delta_of(delta, secrets) if secrets else delta
            except GenerationFailed as error:
                good = False if error.trouble.fault else None
                failure = error
            except asyncio.CancelledError:
                # One that goes on speaking past its time was asked for too much, and is not broken.
                good = False if not said and timed_out(context, self._clock) else None
                raise
            else:
                good = True
                return
            finally:
                breaker.leave(turn, good)
                self._upstream.busy -= 1
                self._upstream.used = self._clock.monotonic()
                if usage is not None:
                    self._telemetry.noted(Spent(model=self._upstream.name, usage=usage))
            wait_s = None if said or attempt == self._retries else self._wait_s(failure, attempt, context)
            if wait_s is None:
                raise failure
            self._telemetry.noted(Retried(upstream=self._upstream.name))
            await self._sleep(wait_s)

    def _turn(self, attempt: int) -> int:
        turn = self._upstream.breaker.enter()
        if not turn:
            raise GenerationFailed(f"The model has failed too often lately and {self._upstream.breaker.patience}.")
        if attempt == 0:
            self._upstream.budget.called(self._clock.monotonic())
        return turn

    def _wait_s(self, error: GenerationFailed, attempt: int, context: Context) -> float | None:
        """How long to wait before it is asked again; None if that cannot help, would be too late, or too much."""
        if not error.trouble.may_pass or self._upstream.breaker.blocked:
            return None
        wait_s = error.wait_s if error.wait_s is not None else backed_off_s(FIRST_WAIT_S, attempt, self._chance)
        now = self._clock.monotonic()
        if wait_s >= context.deadline - now or not self._upstream.budget.take(now):
            return None
        return wait_s


def timed_out(context: Context, clock: Clock) -> bool:
    """Whether a call that is being cancelled has run out of time; else whoever asked has gone."""
    return clock.monotonic() >= context.deadline - SLACK_S


def backed_off_s(first_s: float, attempt: int, chance: Chance = random.random) -> float:
    """Twice as long each time, and never at the same moment as everybody else."""
    return first_s * 2.0**attempt * (0.5 + chance() / 2)


def asked_s(retry_after: str, now: Callable[[], float] = time.time) -> float | None:
    """How long a Retry-After header asks to wait, given in seconds or as a date; None if it says nothing usable."""
    asked = retry_after.strip()
    if asked.isascii() and asked.isdecimal():
        return float(asked)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - now())
    except (ValueError, OverflowError):
        return None


T = TypeVar("T")

# Such calls belong to whichever question is being worked on here, and have no time of their own.
ANYBODY = Context(correlation_id="", deadline=math.inf)


class GuardedCalls:
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
