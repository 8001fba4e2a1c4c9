"""Where a subagent that works here hands in what it has, and learns whether more is wanted."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from contextvars import copy_context
from urllib.parse import urlsplit

import msgspec

from anabranch.domain.contracts import Breadcrumbs, Clock, EventLog, Span, Subagent, Subagents, Telemetry, Turns
from anabranch.domain.errors import (
    AnabranchError,
    DeadlineExceeded,
    Elsewhere,
    GenerationTimedOut,
    InternalError,
    InvalidQuestion,
    RetrievalTimedOut,
    StreamFull,
    Trouble,
    UpstreamError,
    UpstreamTimedOut,
)
from anabranch.domain.model import Context, Value
from anabranch.domain.signals import Subagented
from anabranch.domain.steps import Directive, Expected, Fragment, Receipt, Trace
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand, plain, sound_fragment
from anabranch.planner.step_writer import Alarm, Later
from anabranch.planner.traces import TelemetryContextStore

# What a log says it has already it has got from here, when nobody could tell.
COUNTS = (None, "duplicate")


class SubagentSink:
    """One subagent's; `done` carries an action out and says what became of it."""

    __slots__ = ("_began", "_clock", "_done", "_expected")

    def __init__(self, expected: Expected, done: Callable[[StepCommand], Awaitable[Receipt]], clock: Clock) -> None:
        self._expected = expected
        self._done = done
        self._clock = clock
        self._began = clock.monotonic()

    async def brought(self, fragment: Fragment, attempt: int) -> bool:
        """False says that nobody wants more of this attempt."""
        now = self._clock.monotonic()
        latency_ms = round((now - self._began) * 1000)
        goes_on = fragment.status not in ("success", "error")
        try:
            receipt = await self._done(commands.brought(self._expected, fragment, attempt, latency_ms, now))
        except StreamFull:
            return goes_on  # a part is passed over, and of an end the writer has made something else
        return goes_on and receipt.ignored in COUNTS and receipt.status == "in_progress"

    async def retried(self, attempt: int, reason: str) -> bool:
        receipt = await self._done(commands.retried(self._expected, attempt, reason, self._clock.monotonic()))
        return receipt.ignored in COUNTS

    async def failed(self, attempt: int, error: str) -> None:
        await self._done(commands.failed(self._expected, attempt, error, self._clock.monotonic()))


RETRY_FIRST_WAIT_S = 0.5
GRAIN_S = 0.05
RAN_OUT = (UpstreamTimedOut, RetrievalTimedOut, GenerationTimedOut, DeadlineExceeded)

Chance = Callable[[], float]


class SubagentTask:
    """One subagent's part of a step, to be run as a task and cancelled when nobody waits for it any more."""

    def __init__(
        self,
        subagent: Subagent,
        expected: Expected,
        directive: Directive,
        context: Context,
        desk: SubagentSink,
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
            wait_s = RETRY_FIRST_WAIT_S * 2.0 ** (attempt - 1) * (0.5 + self._chance() / 2)
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


SWITCHED_OFF = "It is switched off."
CIRCUIT_OPEN = "It has failed too often of late and is left alone for a while."
BREAKER_RECHECK_S = 1.0
GOOD = {"success": True, "error": False, "timeout": False}


class PlannerServices(Value):
    """What every step needs of the rest of the house."""

    log: EventLog
    subagents: Subagents
    breakers: Callable[[str], Turns]
    clock: Clock
    telemetry: Telemetry
    crumbs: Breadcrumbs
    traces: TelemetryContextStore
    later: Later
    wall: Callable[[], float]
    timeout_s: float
    retries: int
    lease_s: float


class SubagentSlot:
    """`refused` says why the subagent is not asked at all."""

    def __init__(
        self, expected: Expected, subagent: Subagent | None, trace: Trace, context: Context, tools: PlannerServices
    ) -> None:
        self.expected = expected
        self.subagent = subagent
        self.looked = False
        self.context = msgspec.structs.replace(context, traceparent=trace.traceparent, tracestate=trace.tracestate)
        self._tools = tools
        self._turns = tools.breakers(_upstream(expected, context))
        self._turn = 0 if subagent is None else self._turns.enter()
        self._open = True
        self._task: asyncio.Task[None] | None = None
        self._alarm: Alarm | None = None
        # A span may be entered here and left in another task, and must not enclose anything else meanwhile.
        self._variables = copy_context()
        self._waited, self._span = self._waiting()

    @property
    def works_here(self) -> bool:
        return self.expected.url is not None or self.expected.input is not None

    @property
    def refused(self) -> str | None:
        if self.subagent is None:
            return SWITCHED_OFF
        return None if self._turn else CIRCUIT_OPEN

    def start(self, directive: Directive, desk: SubagentSink, broke: Callable[[], None]) -> asyncio.Task[None]:
        """Put it to work. `broke` hears of an end that nothing within could catch."""
        assert self.subagent is not None, "one that is switched off does not start"
        tools = self._tools
        work = SubagentTask(
            self.subagent,
            self.expected,
            directive,
            self._span.context,
            desk,
            retries=tools.retries,
            clock=tools.clock,
            telemetry=tools.telemetry,
            later=tools.later,
        )

        def ended(task: asyncio.Task[None]) -> None:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            if not task.cancelled() and task.exception() is not None:
                broke()

        self._task = asyncio.get_running_loop().create_task(work.run(), context=self._variables.copy())
        self._task.add_done_callback(ended)
        return self._task

    def dismiss(self) -> None:
        """Nobody waits for its work any more. One who does not listen is told again."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._tools.later(BREAKER_RECHECK_S, self.dismiss)

    def close(self, status: str, latency_ms: int) -> None:
        if not self._open:
            return
        self._open = False
        if self._turn:
            self._turns.leave(self._turn, GOOD.get(status))
            self._turn = 0
        signal = Subagented(subagent=self.expected.key, status=status, latency_ms=latency_ms)
        self._tools.telemetry.noted(signal)
        self._span.set("status", status)
        if GOOD.get(status) is False:
            self._span.set("error.type", status)
        self._variables.run(self._waited.__exit__, None, None, None)

    def reopen(self) -> None:
        """Another attempt came after the end of one. It was not asked for, so that the breaker only watches."""
        if not self._open:
            self._open = True
            self._turn = self._turns.enter()
            self._waited, self._span = self._waiting()

    def _waiting(self) -> tuple[AbstractContextManager[Span], Span]:
        waited = self._tools.telemetry.span("aggregation.wait", self.context, subagent=self.expected.key)
        return waited, self._variables.run(waited.__enter__)


def _upstream(expected: Expected, context: Context) -> str:
    """Whose breaker it is: nobody's failures count for anybody else. Of an address only what may be logged."""
    identity = f"user:{context.user_id}" if context.user_id is not None else "operator"
    names = [identity, expected.key]
    if expected.url is not None:
        try:
            parts = urlsplit(expected.url)
            names.append(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
        except ValueError:
            names.append("")
    return msgspec.json.encode(names).decode()
