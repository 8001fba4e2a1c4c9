"""The gate: how many questions are answered at once, how many wait for their turn, and who is turned away."""

import asyncio
import random
from collections import deque
from typing import NoReturn

from anabranch.domain.contracts import Answerer, Emit, Telemetry
from anabranch.domain.errors import Overloaded
from anabranch.domain.model import Answer, Context, Question
from anabranch.domain.signals import Load, Rejected

RETRY_AFTER_S = 1
# To turn somebody away costs little, but those who come back at once can make it the main work. The more are being
# turned away, the longer it takes, within bounds and not at the same moment for all: what was admitted keeps its pace.
HELD_EACH_S = 0.0004
HELD_MOST_S = 0.02
SPREAD = (0.7, 1.3)
FULL = "More questions are being answered here than can be taken on; ask again in a moment."


class AdmissionSlot:
    """A question's place: first in the queue, if there is one, then among those that are being answered. Whoever got it
    must leave it, in either state."""

    __slots__ = ("_gate", "_turn")

    def __init__(self, gate: "AdmissionGate", turn: "asyncio.Future[None] | None") -> None:
        self._gate: AdmissionGate | None = gate
        self._turn = turn

    async def turn(self) -> None:
        """Wait until it is this question's turn."""
        if self._turn is not None:
            await self._turn

    def leave(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.left(self._turn)


class AdmissionGate:
    """At most `running` questions at once and at most `waiting` behind them, first come, first served. The one too many
    is told so at once: what was admitted keeps its pace."""

    def __init__(self, running: int, waiting: int, telemetry: Telemetry) -> None:
        self._most_running = running
        self._most_waiting = waiting
        self._telemetry = telemetry
        self._held = 0
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    async def check(self, surface: str) -> None:
        """Turn somebody away before anything was spent on them."""
        if self._full:
            await self._pace()
            self._turn_away(surface)

    def enter(self, surface: str) -> AdmissionSlot:
        if self._full:
            self._turn_away(surface)
        turn = None
        if self._running < self._most_running:
            self._running += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
        self._tell()
        return AdmissionSlot(self, turn)

    @property
    def _full(self) -> bool:
        return self._running >= self._most_running and len(self._queue) >= self._most_waiting

    def _turn_away(self, surface: str) -> NoReturn:
        self._telemetry.noted(Rejected(surface=surface, code=Overloaded.code))
        raise Overloaded(FULL, retry_after_s=RETRY_AFTER_S)

    async def _pace(self) -> None:
        self._held += 1
        try:
            held_s = min(HELD_MOST_S, HELD_EACH_S * self._held)
            await asyncio.sleep(held_s * random.uniform(*SPREAD))  # noqa: S311  no secret
        finally:
            self._held -= 1

    def left(self, turn: "asyncio.Future[None] | None") -> None:
        if turn is not None and turn in self._queue:
            self._queue.remove(turn)
        else:
            self._running -= 1
            self._let_in()
        self._tell()

    def _let_in(self) -> None:
        """The next one's turn. One that was just cancelled is about to leave, and the one after it comes in then."""
        if self._queue:
            turn = self._queue.popleft()
            self._running += 1
            if not turn.done():
                turn.set_result(None)

    def _tell(self) -> None:
        self._telemetry.noted(Load(running=self._running, waiting=len(self._queue)))


class AdmittedAnswerer:
    """An Answerer that begins when its place says so."""

    def __init__(self, inner: Answerer, place: AdmissionSlot) -> None:
        self._inner = inner
        self._place = place

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        await self._place.turn()
        return await self._inner.answer(question, context, emit)
