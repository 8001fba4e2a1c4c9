"""One step on its way: the state machine, its writer, its subagents and its time."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import assert_never

import msgspec

from anabranch.domain.contracts import Subagent
from anabranch.domain.errors import AnabranchError, InternalError, InvalidQuestion, NotFound, StreamUnavailable
from anabranch.domain.events import (
    StepCompleted,
    StepEvent,
    SubagentCompleted,
    SubagentDegraded,
    SubagentResult,
    SubagentRetried,
    SubagentStarted,
    SubagentTimedOut,
)
from anabranch.domain.model import Context
from anabranch.domain.signals import Stepped
from anabranch.domain.steps import Cancel, Command, Decision, Directive, Expected, Fragment, Progress, Push, Receipt
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand, sound, sound_fragment, sound_metrics
from anabranch.planner.encoder import StepEncoder
from anabranch.planner.step import Applied, Step
from anabranch.planner.step_writer import Alarm, StepWriter
from anabranch.planner.subagent_task import PlannerServices, SubagentSink, SubagentSlot
from anabranch.planner.traces import step_trace, within

# How soon to look again after the alarm has rung, if nothing came of it.
SOON_S = 1.0


class StepRunner:
    """`over` is called once, when the step has ended or is not ours any more; `spawned` hears of every task."""

    def __init__(
        self,
        stream: str,
        token: str,
        directive: Directive,
        context: Context,
        tools: PlannerServices,
        *,
        over: Callable[["StepRunner"], None],
        spawned: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.stream = stream
        self.directive = directive
        self.context = context
        self.legacy = directive.legacy
        self.results: dict[str, msgspec.Raw] = {}
        self._tools = tools
        self._over = over
        self._spawned = spawned
        self._running = True
        self._begun: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._began = tools.clock.monotonic()
        self.step = Step(directive, now=self._began, timeout_s=tools.timeout_s)
        self._alarm: Alarm | None = None
        self._rings_at = math.inf
        self._trace = step_trace(context, (one.trace for one in directive.expected if one.trace is not None))
        self._traces = {one.result_key: within(one.trace, context) for one in directive.expected if one.trace}
        self._keys = Counter(one.key for one in directive.expected)
        self._seats: dict[str, SubagentSlot] = {}
        self._sit_down()
        self._writer = StepWriter(
            stream,
            token,
            self.step,
            StepEncoder(directive, trace=self._trace, traces=self._traces, crumbs=tools.crumbs, wall=tools.wall),
            log=tools.log,
            clock=tools.clock,
            telemetry=tools.telemetry,
            context=context,
            variables=copy_context(),
            lease_s=tools.lease_s,
            later=tools.later,
            spawned=spawned,
            settled=self._settled,
            moved=lambda epoch: self._writer.put(commands.apart(epoch)),
            lost=self.stop,
        )

    @property
    def subagents(self) -> dict[str, Subagent]:
        return {key: seat.subagent for key, seat in self._seats.items() if seat.subagent is not None}

    @property
    def shadow(self) -> bool:
        return self.directive.shadow or self.directive.legacy is not None

    async def begin(self) -> None:
        """Back when its beginning is written. If it cannot be, the step ends as failed, once that can be said."""
        refused = {key: seat.refused for key, seat in self._seats.items() if seat.refused is not None}
        here = [key for key, seat in self._seats.items() if key not in refused and seat.works_here]
        action = commands.begun(here, refused, self._now())
        action.reply = self._begun
        self._begun.add_done_callback(self._unless_begun)
        self._writer.put(action)
        # Whoever asked may leave; the step has begun all the same.
        await asyncio.shield(self._begun)

    async def store_traces(self) -> None:
        ids = self.directive.session_id, self.directive.plan_step_id
        traces = {self._name(one): self._traces.get(one.result_key, self._trace) for one in self.directive.expected}
        await asyncio.gather(*(self._tools.traces.put(*ids, name, trace) for name, trace in traces.items()))

    async def take(self, command: Command) -> Receipt:
        await self._has_begun()
        match command:
            case Push():
                return await self._push(command)
            case Progress():
                if self.shadow and command.legacy is not None:
                    self.legacy = command.legacy
                said = msgspec.structs.replace(command, payload=sound(command.payload))
                return await self.done(commands.progressed(said, self._now()))
            case Decision():
                return await self.done(commands.decided(command, self._now()))
            case Cancel():
                return await self.done(commands.ended("cancelled", command.reason, self._now(), asked=True))
            case _:
                assert_never(command)

    async def _has_begun(self) -> None:
        """A step whose beginning could not be written takes nothing: only its end is still to come."""
        if not self._begun.done():
            await asyncio.wait([self._begun])
        if self._begun.cancelled() or self._begun.exception() is not None:
            raise StreamUnavailable("The step could not be begun; it will have ended in a moment.")

    def lose(self, reason: str) -> None:
        self._writer.put(commands.ended("worker_lost", reason, self._now()))

    def stop(self) -> None:
        """Leave everything as it is, and say nothing."""
        if self._running:
            self._running = False
            self._writer.close()
            self._leave()

    async def _push(self, push: Push) -> Receipt:
        seat = self._named(push)
        if seat.subagent is None:  # it is switched off, and so there is nobody to put this into its form
            fragment = Fragment(status=push.status)
        else:
            fragment = sound_fragment(seat.subagent.taken(bytes(push.payload), push.status))
        metrics: Mapping[str, float] = fragment.metrics
        if push.metrics:
            metrics = {**fragment.metrics, **push.metrics}
            sound_metrics(metrics)
        if push.trace is None:
            await self._look_for_trace(seat)
        trace = within(push.trace, self.context) if push.trace is not None else None
        return await self.done(commands.pushed(push, seat.expected, fragment, metrics, trace, self._now()))

    def _sit_down(self) -> None:
        for expected in self.directive.expected:
            key = expected.result_key
            trace = self._traces.get(key, self._trace)
            context = msgspec.structs.replace(self.context, deadline=self.step.part(key).deadline)
            try:
                subagent = self._tools.subagents.find(expected)
                self._seats[key] = SubagentSlot(expected, subagent, trace, context, self._tools)
            except Exception:
                for seat in self._seats.values():
                    seat.close("cancelled", 0)
                raise

    def _named(self, push: Push) -> SubagentSlot:
        seats = [seat for seat in self._seats.values() if seat.expected.key == push.name]
        if not seats and push.name in self._seats:
            seats = [self._seats[push.name]]
        if not seats:
            raise NotFound(f"The step expects no subagent {push.name!r}.")
        if push.result_key is not None:
            seats = [seat for seat in seats if seat.expected.result_key == push.result_key]
        if len(seats) != 1:
            raise InvalidQuestion("The result key is not one of this subagent's, or it has several and none is named.")
        return seats[0]

    def _name(self, expected: Expected) -> str:
        """Under which its trace is kept: its key, unless several have the same."""
        return expected.key if self._keys[expected.key] == 1 else expected.result_key

    async def _look_for_trace(self, seat: SubagentSlot) -> None:
        """The envelope named none; somebody may have stored one. Asked once, and then it is known here."""
        if seat.expected.result_key in self._traces or seat.looked:
            return
        seat.looked = True
        ids = self.directive.session_id, self.directive.plan_step_id
        if (found := await self._tools.traces.get(*ids, self._name(seat.expected))) is not None:
            self._traces.setdefault(seat.expected.result_key, within(found, self.context))

    async def done(self, action: StepCommand) -> Receipt:
        """What became of it, once that is certain."""
        action.reply = asyncio.get_running_loop().create_future()
        self._writer.put(action)
        return await action.reply

    def _unless_begun(self, begun: "asyncio.Future[Receipt]") -> None:
        error = None if begun.cancelled() else begun.exception()
        if error is not None and self._running:
            reason = error.message if isinstance(error, AnabranchError) else InternalError.code
            self._writer.put(commands.ended("failed", reason, self._now()))

    def _settled(self, action: StepCommand, applied: Applied) -> None:
        if applied.ignored is None and action.trace is not None and action.result_key is not None:
            self._traces[action.result_key] = action.trace
        for event in applied.events:
            self._happened(event, action)
        self._arm(self._now())

    def _happened(self, event: StepEvent, action: StepCommand) -> None:
        match event:
            case SubagentStarted():
                seat = self._seats[event.result_key]
                if seat.works_here and not action.result_key:
                    self._start(seat)
            case SubagentResult():
                if self.shadow and event.status in ("success", "partial"):
                    self.results[event.result_key] = event.payload
            case SubagentCompleted():
                self._close(event.result_key, event.status, event.latency_ms, dismiss=action.asked)
            case SubagentTimedOut():
                self._close(event.result_key, "timeout", event.deadline_ms)
            case SubagentDegraded():
                self._close(event.result_key, "degraded", 0)
            case SubagentRetried():
                self._again(self._seats[event.result_key], event.attempt, pushed=action.asked)
            case StepCompleted():
                self._finish(event)
            case _:
                pass

    def _start(self, seat: SubagentSlot) -> None:
        desk = SubagentSink(seat.expected, self.done, self._tools.clock)
        self._spawned(seat.start(self.directive, desk, lambda: self._broke(seat)))

    def _broke(self, seat: SubagentSlot) -> None:
        """Its task is over in a way that nothing in it could catch."""
        if self._running:
            attempt = self.step.part(seat.expected.result_key).attempt
            self._writer.put(commands.failed(seat.expected, attempt, "It failed on our side.", self._now()))

    def _close(self, result_key: str, status: str, latency_ms: int, *, dismiss: bool = True) -> None:
        seat = self._seats[result_key]
        seat.close(status, latency_ms)
        if dismiss:  # else it has said so itself, and is about to leave
            seat.dismiss()

    def _again(self, seat: SubagentSlot, attempt: int, *, pushed: bool) -> None:
        if not pushed:
            return
        seat.dismiss()
        seat.reopen()
        with self._tools.telemetry.span("aggregation.retry", seat.context, subagent=seat.expected.key, attempt=attempt):
            pass

    def _finish(self, end: StepCompleted) -> None:
        if self._running:
            self._running = False
            self._tools.telemetry.noted(Stepped(status=end.status, latency_ms=self._since_ms()))
            self._leave()

    def _leave(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for seat in self._seats.values():
            seat.close("cancelled", self._since_ms())
            seat.dismiss()
        self._over(self)

    def _arm(self, now: float, soonest: float = 0.0) -> None:
        """The alarm rings at the next deadline, or when it is time to hold the lease again."""
        at = max(soonest, min(self.step.due(), self._writer.written_at + self._tools.lease_s / 3))
        if not self._running or (self._alarm is not None and self._rings_at <= at):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._rings_at = at
        self._alarm = self._tools.later(max(0.0, at - now), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = self._now()
        if self.step.due() <= now:
            self._writer.put(commands.expired(now))
        elif self._writer.written_at + self._tools.lease_s / 3 <= now:
            self._writer.put(commands.renewed())
        else:
            self._arm(now, now + 0.001)
            return
        self._arm(now, now + min(SOON_S, self._tools.lease_s / 3))

    def _now(self) -> float:
        return self._tools.clock.monotonic()

    def _since_ms(self) -> int:
        return round((self._now() - self._began) * 1000)
