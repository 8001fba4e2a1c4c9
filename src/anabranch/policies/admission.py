"""Admission control: how many questions run at once, how many wait, and which are rejected."""

import asyncio
import random
from collections import deque
from typing import NoReturn

from anabranch.domain.contracts import Answerer, Emit, Telemetry
from anabranch.domain.errors import Overloaded
from anabranch.domain.model import Answer, Context, Question
from anabranch.domain.signals import Load, Rejected

RETRY_AFTER_S = 1
# A rejection costs little, but clients that retry at once can make it the main load. So a rejection is delayed, longer
# the more are pending, within a bound and with jitter.
DELAY_EACH_S = 0.0004
MAX_DELAY_S = 0.02
FULL = "The server is at its limit of concurrent questions (AGGREGATOR_MAX_RUNNING); ask again in a moment."


class AdmissionSlot:
    """A question's place, in the queue or among the running ones. Its holder must call `leave` in either state."""

    __slots__ = ("_gate", "_turn")

    def __init__(self, gate: "AdmissionGate", turn: "asyncio.Future[None] | None") -> None:
        self._gate: AdmissionGate | None = gate
        self._turn = turn

    def admitted(self, inner: Answerer) -> Answerer:
        """The Answerer, which waits for the slot first, if that is not free yet."""
        return inner if self._turn is None else AdmittedAnswerer(inner, self)

    async def turn(self) -> None:
        """Wait until the question may run."""
        if self._turn is not None:
            await self._turn

    def leave(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.release(self._turn)


class AdmissionGate:
    """At most `running` questions at once and at most `waiting` in a queue, first in, first out. Further ones are
    rejected."""

    def __init__(self, running: int, waiting: int, telemetry: Telemetry) -> None:
        self._max_running = running
        self._max_waiting = waiting
        self._telemetry = telemetry
        self._delayed = 0
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    async def check(self, surface: str) -> None:
        """Reject a request before any work is done for it."""
        if self._full:
            await self._delay()
            self._reject(surface)

    def enter(self, surface: str) -> AdmissionSlot:
        if self._full:
            self._reject(surface)
        turn = None
        if self._running < self._max_running:
            self._running += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
        self._report_load()
        return AdmissionSlot(self, turn)

    @property
    def _full(self) -> bool:
        return self._running >= self._max_running and len(self._queue) >= self._max_waiting

    def _reject(self, surface: str) -> NoReturn:
        self._telemetry.noted(Rejected(surface=surface, code=Overloaded.code))
        raise Overloaded(FULL, retry_after_s=RETRY_AFTER_S)

    async def _delay(self) -> None:
        self._delayed += 1
        try:
            jitter = random.uniform(0.7, 1.3)  # noqa: S311  no secret
            await asyncio.sleep(min(MAX_DELAY_S, DELAY_EACH_S * self._delayed) * jitter)
        finally:
            self._delayed -= 1

    def release(self, turn: "asyncio.Future[None] | None") -> None:
        """Free a place, and run the next question. One that was just cancelled leaves at once, which admits the one
        after it."""
        if turn is not None and turn in self._queue:
            self._queue.remove(turn)
        elif self._queue:
            admitted = self._queue.popleft()
            if not admitted.done():
                admitted.set_result(None)
        else:
            self._running -= 1
        self._report_load()

    def _report_load(self) -> None:
        self._telemetry.noted(Load(running=self._running, waiting=len(self._queue)))


class AdmittedAnswerer:
    """An Answerer that waits for its admission slot."""

    def __init__(self, inner: Answerer, slot: AdmissionSlot) -> None:
        self._inner = inner
        self._slot = slot

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        await self._slot.turn()
        return await self._inner.answer(question, context, emit)
