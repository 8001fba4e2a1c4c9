"""Notes each call of a source or a model of the operator, with its latency and its error."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from anabranch.domain.contracts import Clock, Generator, Source, Telemetry
from anabranch.domain.errors import GenerationFailed, ModelNotCalled
from anabranch.domain.model import Context, Delta, Endpoint, Prompt, Query, SourceReply, Status
from anabranch.domain.signals import EndpointCalled, EndpointRole
from anabranch.policies.resilience import timed_out

LATE = "It did not answer in time."


class Observer:
    """Notes calls to one endpoint. A call that a circuit breaker refuses, or whose caller disconnects, is none."""

    __slots__ = ("_clock", "_endpoint", "_role", "_telemetry")

    def __init__(self, role: EndpointRole, endpoint: Endpoint, clock: Clock, telemetry: Telemetry) -> None:
        self._role = role
        self._endpoint = endpoint
        self._clock = clock
        self._telemetry = telemetry

    def now(self) -> float:
        return self._clock.monotonic()

    def note(self, began: float, error: str | None = None) -> None:
        latency_ms = (self._clock.monotonic() - began) * 1000
        self._telemetry.noted(
            EndpointCalled(role=self._role, endpoint=self._endpoint, latency_ms=latency_ms, error=error)
        )

    def note_cancelled(self, began: float, context: Context) -> None:
        if timed_out(context, self._clock):
            self.note(began, LATE)


class ObservedSource:
    __slots__ = ("_inner", "_observer")

    def __init__(self, inner: Source, observer: Observer) -> None:
        self._inner = inner
        self._observer = observer

    async def search(self, query: Query, context: Context) -> SourceReply:
        began = self._observer.now()
        try:
            reply = await self._inner.search(query, context)
        except asyncio.CancelledError:
            self._observer.note_cancelled(began, context)
            raise
        if reply.status is not Status.SKIPPED:
            failed = reply.status is not Status.SUCCESS
            self._observer.note(began, (reply.error or f"It replied: {reply.status.value}.") if failed else None)
        return reply


class ObservedGenerator:
    __slots__ = ("_inner", "_observer")

    def __init__(self, inner: Generator, observer: Observer) -> None:
        self._inner = inner
        self._observer = observer

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        began = self._observer.now()
        try:
            async with aclosing(self._inner.generate(prompt, context)) as deltas:
                async for delta in deltas:
                    yield delta
        except ModelNotCalled:
            raise
        except GenerationFailed as error:
            self._observer.note(began, error.message)
            raise
        except asyncio.CancelledError:
            self._observer.note_cancelled(began, context)
            raise
        self._observer.note(began)
