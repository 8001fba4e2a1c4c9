"""Admission control: how many questions run at once, how many wait, and which are rejected."""

import asyncio
import random

from anabranch.domain.contracts import Answerer, Emit, Telemetry
from anabranch.domain.errors import LimitReached, Overloaded
from anabranch.domain.model import Answer, Context, Question
from anabranch.domain.shares import Claimant, Limit
from anabranch.domain.signals import Load, Rejected
from anabranch.policies.shares import RETRY_AFTER_S, Held, LoopPace, Share

# A rejection costs little, but clients that retry at once can make it the main load. So a rejection is delayed, longer
# the more are pending, within a bound and with jitter.
DELAY_EACH_S = 0.0004
MAX_DELAY_S = 0.02
# Metrics are read every few seconds: each change of the load need not be reported.
REPORT_AFTER_S = 0.05
FULL = "The server is at its limit of concurrent questions (AGGREGATOR_MAX_RUNNING); ask again in a moment."


class AdmissionGate:
    """The share of running questions, with what is reported of it."""

    def __init__(self, limit: Limit, telemetry: Telemetry, pace: LoopPace | None = None) -> None:
        self.share = Share(limit, self._load_changed, pace)
        self._telemetry = telemetry
        self._delayed = 0
        self._reports: asyncio.TimerHandle | None = None

    async def check(self, surface: str) -> None:
        """Reject a request before any work is done for it."""
        if self.share.full:
            await self._delay()
            self._telemetry.noted(Rejected(surface=surface, code=Overloaded.code))
            raise Overloaded(FULL, retry_after_s=RETRY_AFTER_S)

    def enter(self, surface: str, caller: Claimant | None = None) -> Held:
        """A question's place, in the queue or among the running ones."""
        try:
            return self.share.enter(caller=caller)
        except (Overloaded, LimitReached) as error:
            self._telemetry.noted(Rejected(surface=surface, code=error.code))
            raise

    async def _delay(self) -> None:
        self._delayed += 1
        try:
            jitter = random.uniform(0.7, 1.3)  # noqa: S311  no secret
            await asyncio.sleep(min(MAX_DELAY_S, DELAY_EACH_S * self._delayed) * jitter)
        finally:
            self._delayed -= 1

    def _load_changed(self) -> None:
        if self._reports is None:
            self._reports = asyncio.get_running_loop().call_later(REPORT_AFTER_S, self.report_load)

    def report_load(self) -> None:
        """Report how many questions run and wait now; that is done by itself a moment after a change."""
        if self._reports is not None:
            self._reports.cancel()
            self._reports = None
        self._telemetry.noted(Load(running=int(self.share.held), waiting=self.share.waiting))


def admitted(inner: Answerer, slot: Held) -> Answerer:
    """The Answerer, which waits for its slot first, if that is not free yet."""
    return inner if slot.granted else AdmittedAnswerer(inner, slot)


class AdmittedAnswerer:
    """An Answerer that waits for its admission slot."""

    def __init__(self, inner: Answerer, slot: Held) -> None:
        self._inner = inner
        self._slot = slot

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        await self._slot.turn()
        return await self._inner.answer(question, context, emit)
