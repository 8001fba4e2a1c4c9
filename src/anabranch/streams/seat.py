"""One subagent's place in a running step: its breaker's turn, its span and its task."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from urllib.parse import urlsplit

import msgspec

from anabranch.domain.contracts import Breadcrumbs, Clock, EventLog, Span, Subagent, Subagents, Telemetry, Turns
from anabranch.domain.model import Context, Value
from anabranch.domain.signals import Subagented
from anabranch.domain.steps import Directive, Expected, Trace
from anabranch.streams.desk import Desk
from anabranch.streams.traces import TelemetryContextStore
from anabranch.streams.work import Work
from anabranch.streams.writer import Alarm, Later

SWITCHED_OFF = "It is switched off."
LEFT_ALONE = "It has failed too often of late and is left alone for a while."
AGAIN_S = 1.0
GOOD = {"success": True, "error": False, "timeout": False}


class Tools(Value):
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


class Seat:
    """`refused` says why the subagent is not asked at all."""

    def __init__(
        self, expected: Expected, subagent: Subagent | None, trace: Trace, context: Context, tools: Tools
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
        return None if self._turn else LEFT_ALONE

    def start(self, directive: Directive, desk: Desk, broke: Callable[[], None]) -> asyncio.Task[None]:
        """Put it to work. `broke` hears of an end that nothing within could catch."""
        assert self.subagent is not None, "one that is switched off does not start"
        tools = self._tools
        work = Work(
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
            self._alarm = self._tools.later(AGAIN_S, self.dismiss)

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
