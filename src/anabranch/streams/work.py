"""A subagent at work here: asked, asked again while that can help, and never believed to keep its contract."""

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing

from anabranch.domain.contracts import Clock, Subagent, Telemetry
from anabranch.domain.errors import (
    AnabranchError,
    DeadlineExceeded,
    Elsewhere,
    GenerationTimedOut,
    InternalError,
    InvalidQuestion,
    RetrievalTimedOut,
    Trouble,
    UpstreamError,
    UpstreamTimedOut,
)
from anabranch.domain.model import Context
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.streams.actions import plain, sound_fragment
from anabranch.streams.desk import Desk
from anabranch.streams.writer import Later

FIRST_WAIT_S = 0.5
GRAIN_S = 0.05
RAN_OUT = (UpstreamTimedOut, RetrievalTimedOut, GenerationTimedOut, DeadlineExceeded)

Chance = Callable[[], float]


class Work:
    """One subagent's part of a step, to be run as a task and cancelled when nobody waits for it any more."""

    def __init__(
        self,
        subagent: Subagent,
        expected: Expected,
        directive: Directive,
        context: Context,
        desk: Desk,
        *,
        retries: int,
        clock: Clock,
        telemetry: Telemetry,
        later: Later,
        chance: Chance = random.random,
    ) -> None:
        self._subagent = subagent
        self._expected = expected
        self._directive = directive
        self._context = context
        self._desk = desk
        self._retries = retries
        self._clock = clock
        self._telemetry = telemetry
        self._later = later
        self._chance = chance

    async def run(self) -> None:
        attempt = 1
        while (error := await self._tried(attempt)) is not None:
            reason = plain(error.message)
            wait_s = self._wait_s(error, attempt)
            if wait_s is None:
                if not self._ran_out(error):
                    await self._desk.failed(attempt, reason)
                return
            attempt += 1
            labels: dict[str, str | int] = {"subagent": self._expected.key, "attempt": attempt}
            with self._telemetry.span("aggregation.retry", self._context, **labels):
                await pause(wait_s, self._later)
            if not await self._desk.retried(attempt, reason):
                return

    async def _tried(self, attempt: int) -> AnabranchError | None:
        """What went wrong, or None if this was the last word."""
        try:
            async with aclosing(self._subagent.work(self._expected, self._directive, self._context)) as fragments:
                async for fragment in fragments:
                    if not await self._desk.brought(_checked(fragment), attempt):
                        return None
        except AnabranchError as error:
            return error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return InternalError("It was given up from within.")
        except Exception as error:  # noqa: BLE001  the task's boundary: one subagent's bug costs only that subagent
            self._telemetry.crashed(error, self._context)
            return InternalError("It failed on our side.")
        return UpstreamError("It ended without a result.", Trouble.UNUSABLE)

    def _ran_out(self, error: AnabranchError) -> bool:
        """Whether that is the step's own time-out, noticed a moment early: timers have a grain. The step says so."""
        return isinstance(error, RAN_OUT) and self._clock.monotonic() >= self._context.deadline - GRAIN_S

    def _wait_s(self, error: AnabranchError, attempt: int) -> float | None:
        """How long to wait before it is asked again; None if that cannot help or would be too late."""
        if attempt > self._retries or not isinstance(error, Elsewhere) or not error.trouble.may_pass:
            return None
        wait_s = error.wait_s
        if wait_s is None:
            wait_s = FIRST_WAIT_S * 2.0 ** (attempt - 1) * (0.5 + self._chance() / 2)
        return wait_s if self._clock.monotonic() + wait_s < self._context.deadline else None


def _checked(fragment: object) -> Fragment:
    try:
        return sound_fragment(fragment)
    except InvalidQuestion as error:
        raise UpstreamError("It brought something that cannot be used.", Trouble.UNUSABLE) from error


async def pause(seconds: float, later: Later) -> None:
    over = asyncio.get_running_loop().create_future()
    alarm = later(seconds, lambda: None if over.done() else over.set_result(None))
    try:
        await over
    finally:
        alarm.cancel()
