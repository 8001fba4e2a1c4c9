"""Resilient calls: circuit breakers around sources, models and other servers; retries of models; hedged sources."""

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import TypeVar

import msgspec

from anabranch.domain.contracts import Clock, Exchange, Generator, Source, Telemetry
from anabranch.domain.errors import GenerationFailed, ModelNotCalled, UpstreamError, UpstreamFailure
from anabranch.domain.model import Context, Delta, Endpoint, Prompt, Query, SourceReply, Status, Usage
from anabranch.domain.shares import waits_for_own
from anabranch.domain.signals import Hedged, Retried, TokensUsed
from anabranch.network import redaction, syft_wire
from anabranch.policies.breaker import Breaker, Policy, Role, Upstream, UpstreamCall, Upstreams

T = TypeVar("T")
E = TypeVar("E", bound=UpstreamFailure)

FIRST_WAIT_S = 1.0
# A time-out is a cancellation at the deadline; the clock of the event loop may be this much behind.
SLACK_S = 0.05
# Embedding and reranking calls belong to whichever question is being answered, and have no deadline.
NO_CONTEXT = Context(correlation_id="", deadline=math.inf)

Sleep = Callable[[float], Awaitable[None]]
Random = Callable[[], float]


class ResilientSource:
    """A Source that is not called while its circuit is open. It is never retried."""

    __slots__ = ("_inner", "_path", "_telemetry", "upstream")

    def __init__(self, inner: Source, upstream: Upstream, path: str, telemetry: Telemetry) -> None:
        self.upstream = upstream
        self._inner = inner
        self._path = path
        self._telemetry = telemetry

    async def search(self, query: Query, context: Context) -> SourceReply:
        upstream = self.upstream
        call = UpstreamCall(upstream)
        if not call:
            return SourceReply(path=self._path, status=Status.SKIPPED, error=f"The source {upstream.breaker.refusal}.")
        with call:
            try:
                with self._telemetry.span("upstream", context, **upstream.labels) as span:
                    reply = await self._inner.search(query, span.context)
            except asyncio.CancelledError:
                call.good = False if timed_out(context, upstream.clock) else None
                raise
            if reply.fault or reply.status is Status.SUCCESS:
                call.good = not reply.fault
            return redaction.reply_of(reply)


class HedgedSource:
    """A Source with an alternate. The alternate is called when the first fails or its circuit is open, and beside the
    first when that is slower than usual. The first good reply counts; without one, the first source's reply."""

    def __init__(self, first: ResilientSource, second: ResilientSource, telemetry: Telemetry) -> None:
        self._first = first
        self._second = second
        self._clock = first.upstream.clock
        self._telemetry = telemetry

    async def search(self, query: Query, context: Context) -> SourceReply:
        upstream = self._first.upstream
        upstream.budget.called(self._clock.monotonic())
        slow_s = upstream.slow_s
        if slow_s is not None:
            return await self._race(query, context, slow_s)
        return await self._or_alternate(await self._timed(query, context), query, context)

    async def _timed(self, query: Query, context: Context) -> SourceReply:
        began = self._clock.monotonic()
        reply = await self._first.search(query, context)
        if reply.status is Status.SUCCESS:
            self._first.upstream.latencies.append(self._clock.monotonic() - began)
        return reply

    async def _or_alternate(self, reply: SourceReply, query: Query, context: Context) -> SourceReply:
        """The first's reply, or the alternate's if the first failed and the alternate did not."""
        if not (reply.fault or reply.status is Status.SKIPPED):
            return reply
        return self._better(reply, await self._second.search(query, context))

    async def _race(self, query: Query, context: Context, slow_s: float) -> SourceReply:
        first = asyncio.create_task(self._timed(query, context))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=slow_s)
            if first.done() or not self._first.upstream.budget.take(self._clock.monotonic()):
                return await self._or_alternate(await first, query, context)
            second = asyncio.create_task(self._second.search(query, context))
            tasks.append(second)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if second.done() and not first.done() and second.result().status is Status.SUCCESS:
                self._note(won=True)
                return second.result()
            reply = await first
            if reply.status is Status.SUCCESS:
                self._note(won=False)
                return reply
            return self._better(reply, await second)
        finally:
            # The loser's connection is closed before this returns.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _better(self, reply: SourceReply, other: SourceReply) -> SourceReply:
        won = other.status is Status.SUCCESS
        if other.status is not Status.SKIPPED:
            self._note(won=won)
        return other if won else reply

    def _note(self, *, won: bool) -> None:
        self._telemetry.noted(Hedged(upstream=self._first.upstream.name, won=won))


class ResilientGenerator:
    """A Generator that is retried while it has produced nothing and the failure is transient, within the deadline and
    the upstream's retry budget. It is not called while its circuit is open."""

    __slots__ = ("_inner", "_random", "_retries", "_sleep", "_telemetry", "_upstream")

    def __init__(
        self,
        inner: Generator,
        upstream: Upstream,
        telemetry: Telemetry,
        *,
        retries: int,
        sleep: Sleep = asyncio.sleep,
        random: Random = random.random,
    ) -> None:
        self._inner = inner
        self._upstream = upstream
        self._telemetry = telemetry
        self._retries = retries
        self._sleep = sleep
        self._random = random

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        upstream = self._upstream
        started = False
        usage: Usage | None = None
        secrets = redaction.in_content()
        for attempt in range(self._retries + 1):
            call = UpstreamCall(upstream, counted=attempt == 0)
            if not call:
                raise ModelNotCalled(f"The model {upstream.breaker.refusal}.")
            with call:
                try:
                    with self._telemetry.span("upstream", context, **upstream.labels) as span:
                        async with aclosing(self._inner.generate(prompt, span.context)) as deltas:
                            async for delta in deltas:
                                if not started and (delta.text or delta.usage or delta.finish_reason):
                                    started = True
                                    call.answered()
                                usage = delta.usage or usage
                                yield redaction.delta_of(delta, secrets) if secrets else delta
                except GenerationFailed as error:
                    call.good = False if error.failure_kind.fault else None
                    failure = error
                except asyncio.CancelledError:
                    # A model that is still producing at the deadline was asked for too much; it is not broken.
                    call.good = False if not started and timed_out(context, upstream.clock) else None
                    raise
                else:
                    call.good = True
                    return
                finally:
                    if usage is not None:
                        self._telemetry.noted(TokensUsed(model=upstream.name, usage=usage))
            wait_s = None if started or attempt == self._retries else self._wait_s(failure, attempt, context)
            if wait_s is None:
                raise failure
            self._telemetry.noted(Retried(upstream=upstream.name))
            await self._sleep(wait_s)

    def _wait_s(self, error: GenerationFailed, attempt: int, context: Context) -> float | None:
        """Seconds until the retry; None if a retry cannot help, comes after the deadline or is over the budget."""
        if not error.failure_kind.temporary or self._upstream.breaker.blocked:
            return None
        wait_s = error.wait_s if error.wait_s is not None else backoff_s(FIRST_WAIT_S, attempt, self._random)
        now = self._upstream.clock.monotonic()
        if wait_s >= context.deadline - now or not self._upstream.budget.take(now):
            return None
        return wait_s


class GuardedCalls:
    """Calls of one server, such as for embeddings or reranking, under its circuit breaker and retry budget."""

    def __init__(self, upstream: Upstream, telemetry: Telemetry) -> None:
        self._upstream = upstream
        self._telemetry = telemetry

    async def call(self, call: Callable[[], Awaitable[T]], *, first: bool) -> T:
        """The call's result. Raises UpstreamError if the call fails or the circuit is open."""
        guarded = UpstreamCall(self._upstream, counted=first)
        if not guarded:
            raise UpstreamError(f"It {self._upstream.breaker.refusal}.")
        with guarded:
            try:
                with self._telemetry.span("upstream", NO_CONTEXT, **self._upstream.labels):
                    result = await call()
            except UpstreamError as error:
                guarded.good = False if error.failure_kind.fault else None
                raise
            guarded.good = True
            return result

    def take_retry(self) -> bool:
        """Whether a retry is allowed; if so, it is counted."""
        if self._upstream.breaker.blocked or not self._upstream.budget.take(self._upstream.clock.monotonic()):
            return False
        self._telemetry.noted(Retried(upstream=self._upstream.name))
        return True


class Resilience:
    """The upstreams of this process, and the decorators that apply their breakers, budgets and latencies."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        telemetry: Telemetry,
        *,
        sleep: Sleep = asyncio.sleep,
        random: Random = random.random,
    ) -> None:
        self._retries = policy.model_retries
        self._telemetry = telemetry
        self._sleep = sleep
        self._random = random
        self.upstreams = Upstreams(policy, clock, telemetry)

    def source(self, endpoint: Endpoint, make: Callable[[Endpoint], Source]) -> Source:
        """A source under its breaker, hedged if it has an alternate; `make` constructs the source of an endpoint."""
        first = self._source(endpoint, make)
        if endpoint.alternate is None:
            return first
        other = msgspec.structs.replace(endpoint, url=endpoint.alternate, alternate=None)
        return HedgedSource(first, self._source(other, make, " (alternate)"), self._telemetry)

    def _source(self, endpoint: Endpoint, make: Callable[[Endpoint], Source], suffix: str = "") -> ResilientSource:
        return ResilientSource(make(endpoint), self.upstreams.of(endpoint, suffix), endpoint.path, self._telemetry)

    def guard(self, endpoint: Endpoint, role: Role) -> GuardedCalls:
        return GuardedCalls(self.upstreams.of(endpoint, f" ({role})", role), self._telemetry)

    def breaker(self, subagent: Endpoint) -> Breaker:
        """The breaker alone, for a caller that retries by itself."""
        return self.upstreams.of(subagent, " (subagent)", "subagent").breaker

    def generator(self, endpoint: Endpoint, inner: Generator, *, retried: bool = True) -> Generator:
        return ResilientGenerator(
            inner,
            self.upstreams.of(endpoint, role="model"),
            self._telemetry,
            retries=self._retries if retried else 0,
            sleep=self._sleep,
            random=self._random,
        )


def timed_out(context: Context, clock: Clock) -> bool:
    """Whether a cancelled call has run out of time; otherwise its caller has disconnected, or it was never made."""
    return clock.monotonic() >= context.deadline - SLACK_S and not waits_for_own.get()


def backoff_s(first_s: float, attempt: int, random: Random = random.random) -> float:
    """Exponential backoff with jitter: between half and all of twice the time before."""
    return first_s * 2.0**attempt * (0.5 + random() / 2)


async def refused(exchange: Exchange, kind: type[E], hint: str | None = None) -> E:
    """The error for a reply with a status other than 2xx, and what to do about it."""
    _, sentence = await syft_wire.refusal(exchange)
    return kind(
        syft_wire.with_hint(sentence, hint),
        syft_wire.failure_kind(exchange.status),
        retry_after_s(exchange.header("Retry-After")),
        upstream_status=exchange.status,
    )


def retry_after_s(header: str, now: Callable[[], float] = time.time) -> float | None:
    """Seconds to wait by a Retry-After header, which holds seconds or a date; None if it cannot be read."""
    value = header.strip()
    if value.isascii() and value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now())
    except (ValueError, OverflowError):
        return None
