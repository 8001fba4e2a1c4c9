"""Asking a source: not while it fails too often, and at its alternate when it is slow or down."""

import asyncio

from anabranch.domain.contracts import Clock, Source, Telemetry
from anabranch.domain.model import Context, Query, SourceReply, Status
from anabranch.domain.signals import Hedged
from anabranch.network import redaction
from anabranch.policies.retries import timed_out
from anabranch.policies.upstreams import Upstream


class ResilientSource:
    """A Source that is not asked while its upstream fails too often. It is never asked twice."""

    __slots__ = ("_clock", "_inner", "_path", "_telemetry", "upstream")

    def __init__(self, inner: Source, upstream: Upstream, path: str, *, clock: Clock, telemetry: Telemetry) -> None:
        self.upstream = upstream
        self._inner = inner
        self._path = path
        self._clock = clock
        self._telemetry = telemetry

    async def search(self, query: Query, context: Context) -> SourceReply:
        upstream = self.upstream
        turn = upstream.breaker.enter()
        if not turn:
            why = f"The source has failed too often lately and {upstream.breaker.patience}."
            return SourceReply(path=self._path, status=Status.SKIPPED, error=why)
        good: bool | None = None
        upstream.busy += 1
        try:
            with self._telemetry.span("upstream", context, **upstream.labels) as span:
                reply = await self._inner.search(query, span.context)
        except asyncio.CancelledError:
            good = False if timed_out(context, self._clock) else None
            raise
        else:
            if reply.status is Status.SUCCESS:
                good = True
            elif reply.fault:
                good = False
            return redaction.reply_of(reply)
        finally:
            upstream.breaker.leave(turn, good)
            upstream.busy -= 1


class HedgedSource:
    """A Source with an alternate, which is asked at once when the first fails or is left alone, and beside it when the
    first is slower than usual. The first good reply counts; with none, the first's."""

    def __init__(self, first: ResilientSource, second: ResilientSource, *, clock: Clock, telemetry: Telemetry) -> None:
        self._first = first
        self._second = second
        self._clock = clock
        self._telemetry = telemetry

    async def search(self, query: Query, context: Context) -> SourceReply:
        upstream = self._first.upstream
        upstream.budget.called(self._clock.monotonic())
        slow_s = upstream.latencies.slow_s
        if slow_s is not None:
            return await self._raced(query, context, slow_s)
        return await self._instead(await self._timed(query, context), query, context)

    async def _timed(self, query: Query, context: Context) -> SourceReply:
        began = self._clock.monotonic()
        reply = await self._first.search(query, context)
        if reply.status is Status.SUCCESS:
            self._first.upstream.latencies.add(self._clock.monotonic() - began)
        return reply

    async def _instead(self, reply: SourceReply, query: Query, context: Context) -> SourceReply:
        """The first's reply, unless that is a failure of its own: then the alternate's, if it is good."""
        if not (reply.fault or reply.status is Status.SKIPPED):
            return reply
        return self._better(reply, await self._second.search(query, context))

    async def _raced(self, query: Query, context: Context, slow_s: float) -> SourceReply:
        first = asyncio.create_task(self._timed(query, context))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=slow_s)
            if first.done():
                return await self._instead(first.result(), query, context)
            if not self._first.upstream.budget.take(self._clock.monotonic()):
                return await self._instead(await first, query, context)
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
            # Whoever lost is not only left: its connection is closed before this returns.
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
