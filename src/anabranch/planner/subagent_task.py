"""One subagent's part of a step: its circuit breaker, its span, and the task that calls it and retries."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from contextvars import copy_context
from urllib.parse import urlsplit

import msgspec

from anabranch.domain.contracts import Span, Subagent
from anabranch.domain.errors import (
    AnabranchError,
    DeadlineExceeded,
    FailureKind,
    GenerationTimedOut,
    InternalError,
    InvalidQuestion,
    RetrievalTimedOut,
    StreamFull,
    UpstreamError,
    UpstreamFailure,
    UpstreamTimedOut,
)
from anabranch.domain.model import Context
from anabranch.domain.signals import SubagentEnded
from anabranch.domain.steps import Directive, Expected, Fragment, Receipt, Trace
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand, checked_fragment, plain
from anabranch.planner.services import Alarm, PlannerServices
from anabranch.planner.step import FINAL

# A timer may fire this much early.
TIMER_GRAIN_S = 0.05
TIMED_OUT = (UpstreamTimedOut, RetrievalTimedOut, GenerationTimedOut, DeadlineExceeded)
FAILED_HERE = "It failed on our side."
# Which end of a subagent counts as a success for its breaker.
BREAKER_OUTCOMES = {"success": True, "error": False, "timeout": False}

Execute = Callable[[StepCommand], Awaitable[Receipt]]


class SubagentTask:
    """`refused` says why the subagent is not called at all. `execute` applies a command to the step. `broke` is called
    for an end of the task that nothing inside could catch."""

    def __init__(
        self, expected: Expected, subagent: Subagent | None, trace: Trace, context: Context, services: PlannerServices
    ) -> None:
        self.expected = expected
        self.subagent = subagent
        self.trace_searched = False
        self.context = msgspec.structs.replace(context, traceparent=trace.traceparent, tracestate=trace.tracestate)
        self._services = services
        self._breaker = services.breakers(_upstream(expected, context))
        self._turn = 0 if subagent is None else self._breaker.enter()
        self._open = True
        self._started_at = services.time.now()
        self._task: asyncio.Task[None] | None = None
        self._alarm: Alarm | None = None
        # A span may be entered here and left in another task, and must not enclose anything else meanwhile.
        self._variables = copy_context()
        self._wait_span, self._span = self._enter_span()

    @property
    def called_here(self) -> bool:
        return self.expected.url is not None or self.expected.input is not None

    @property
    def refused(self) -> str | None:
        if self.subagent is None:
            return "It is switched off."
        return None if self._turn else "It has failed too often recently; its circuit breaker is open."

    def start(self, directive: Directive, execute: Execute, broke: Callable[[], None]) -> asyncio.Task[None]:
        self._started_at = self._services.time.now()

        def ended(task: asyncio.Task[None]) -> None:
            if self._alarm is not None:
                self._alarm.cancel()
            if not task.cancelled() and task.exception() is not None:
                broke()

        call = self._run(directive, self._span.context, execute)
        self._task = asyncio.get_running_loop().create_task(call, context=self._variables.copy())
        self._task.add_done_callback(ended)
        return self._task

    def cancel(self) -> None:
        """Cancel the call, and again as long as it does not end."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._services.time.later(self._services.timing.cancel_again_s, self.cancel)

    def close(self, status: str, latency_ms: int) -> None:
        if not self._open:
            return
        self._open = False
        good = BREAKER_OUTCOMES.get(status)
        if self._turn:
            self._breaker.leave(self._turn, good)
        self._services.telemetry.noted(SubagentEnded(subagent=self.expected.key, status=status, latency_ms=latency_ms))
        self._span.set("status", status)
        if good is False:
            self._span.set("error.type", status)
        self._variables.run(self._wait_span.__exit__, None, None, None)

    def reopen(self, attempt: int) -> None:
        """Another attempt was pushed after the end of one. It was not called, so the breaker only counts it."""
        if not self._open:
            self._open = True
            self._turn = self._breaker.enter()
            self._wait_span, self._span = self._enter_span()
        with self._retry_span(self.context, attempt):
            pass

    def _enter_span(self) -> tuple[AbstractContextManager[Span], Span]:
        span = self._services.telemetry.span("aggregation.wait", self.context, subagent=self.expected.key)
        return span, self._variables.run(span.__enter__)

    def _retry_span(self, context: Context, attempt: int) -> AbstractContextManager[Span]:
        key = self.expected.key
        return self._services.telemetry.span("aggregation.retry", context, subagent=key, attempt=attempt)

    async def _run(self, directive: Directive, context: Context, execute: Execute) -> None:
        """Call the subagent; retry after a temporary failure."""
        time, attempt = self._services.time, 1
        while (error := await self._call(directive, context, execute, attempt)) is not None:
            reason = plain(error.message)
            wait_s = self._retry_in_s(error, attempt, context)
            if wait_s is None:
                # The step's own time-out may be noticed a moment early here. The step reports it.
                if not (isinstance(error, TIMED_OUT) and time.now() >= context.deadline - TIMER_GRAIN_S):
                    await execute(commands.fail(self.expected, attempt, reason, time.now()))
                return
            attempt += 1
            with self._retry_span(context, attempt):
                await time.pause(wait_s)
            if not _applied(await execute(commands.retry(self.expected, attempt, reason, time.now()))):
                return

    async def _call(
        self, directive: Directive, context: Context, execute: Execute, attempt: int
    ) -> AnabranchError | None:
        """The error, or None if this attempt is complete."""
        assert self.subagent is not None, "a subagent that is switched off is not started"
        try:
            async with aclosing(self.subagent.work(self.expected, directive, context)) as fragments:
                async for fragment in fragments:
                    if not await self._deliver(_checked(fragment), execute, attempt):
                        return None
        except AnabranchError as error:
            return error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return InternalError("It was cancelled from within.")
        except Exception as error:  # noqa: BLE001  the task's boundary: one subagent's bug costs only that subagent
            self._services.telemetry.crashed(error, context)
            return InternalError(FAILED_HERE)
        return UpstreamError("It ended without a result.", FailureKind.UNUSABLE)

    async def _deliver(self, fragment: Fragment, execute: Execute, attempt: int) -> bool:
        """Whether the step wants more of this attempt."""
        now = self._services.time.now()
        latency_ms = round((now - self._started_at) * 1000)
        try:
            receipt = await execute(commands.deliver(self.expected, fragment, attempt, latency_ms, now))
        except StreamFull:  # A part is skipped; for an end the writer has done the command's `instead`.
            receipt = Receipt(status="in_progress")
        return fragment.status not in FINAL and _applied(receipt) and receipt.status == "in_progress"

    def _retry_in_s(self, error: AnabranchError, attempt: int, context: Context) -> float | None:
        """None if a retry cannot help or would be too late."""
        if (
            attempt > self._services.limits.retries
            or not isinstance(error, UpstreamFailure)
            or not error.failure_kind.temporary
        ):
            return None
        backoff_s = self._services.timing.first_retry_s * 2.0 ** (attempt - 1) * (0.5 + random.random() / 2)  # noqa: S311
        wait_s = backoff_s if error.wait_s is None else error.wait_s
        return wait_s if self._services.time.now() + wait_s < context.deadline else None


def _applied(receipt: Receipt) -> bool:
    """A duplicate counts as applied: the log has the entry from an earlier write whose reply was lost."""
    return receipt.ignored in (None, "duplicate")


def _checked(fragment: object) -> Fragment:
    try:
        return checked_fragment(fragment)
    except InvalidQuestion as error:
        raise UpstreamError("It sent a fragment that cannot be used.", FailureKind.UNUSABLE) from error


def _upstream(expected: Expected, context: Context) -> str:
    """The name of the circuit breaker: per caller, subagent and address, so that one caller's failures do not count for
    another. Of an address only what may be logged."""
    identity = f"user:{context.user_id}" if context.user_id is not None else "operator"
    names = [identity, expected.key]
    if expected.url is not None:
        try:
            parts = urlsplit(expected.url)
            names.append(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
        except ValueError:
            names.append("")
    return msgspec.json.encode(names).decode()
