"""One step in progress: the state machine, its writer, its subagents and its deadlines."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
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
from anabranch.domain.signals import Stepped
from anabranch.domain.steps import Cancel, Command, Decision, Expected, Fragment, Progress, Push, Receipt
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand, check_metrics, checked_fragment, checked_payload
from anabranch.planner.encoder import StepEncoder
from anabranch.planner.services import Alarm, PlannerServices, step_trace, within
from anabranch.planner.step import Applied, Step
from anabranch.planner.step_writer import OpenedStep, StepWriter
from anabranch.planner.subagent_task import FAILED_HERE, SubagentTask


class StepRunner:
    """`over` is called once, when the step has ended or this worker no longer owns it; `spawned` with every task."""

    def __init__(
        self,
        opened: OpenedStep,
        services: PlannerServices,
        *,
        over: Callable[["StepRunner"], None],
        spawned: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.stream = opened.stream
        self.directive = directive = opened.directive
        self.context = context = opened.context
        self.legacy = directive.legacy
        self.results: dict[str, msgspec.Raw] = {}
        self._services = services
        self._over = over
        self._spawned = spawned
        self._running = True
        self._begun: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._began = services.time.now()
        self.step = Step(directive, now=self._began, timeout_s=services.limits.timeout_s)
        self._alarm: Alarm | None = None
        self._alarm_at = math.inf
        self._trace = step_trace(context, (one.trace for one in directive.expected if one.trace is not None))
        self._traces = {one.result_key: within(one.trace, context) for one in directive.expected if one.trace}
        self._keys = Counter(one.key for one in directive.expected)
        self._tasks: dict[str, SubagentTask] = {}
        self._create_tasks()
        encoder = StepEncoder(directive, services, self._trace, self._traces)
        self._writer = StepWriter(
            opened, self.step, encoder, services, spawned=spawned, settled=self._settled, lost=self.stop
        )

    @property
    def subagents(self) -> dict[str, Subagent]:
        return {key: task.subagent for key, task in self._tasks.items() if task.subagent is not None}

    @property
    def shadow(self) -> bool:
        return self.directive.shadow or self.directive.legacy is not None

    async def begin(self) -> None:
        """Returns when the start event is written. If it cannot be, the step ends as failed."""
        refused = {key: task.refused for key, task in self._tasks.items() if task.refused is not None}
        here = [key for key, task in self._tasks.items() if key not in refused and task.called_here]
        command = commands.begun(here, refused, self._now())
        command.reply = self._begun
        self._begun.add_done_callback(self._fail_unless_begun)
        self._writer.put(command)
        # The caller may be cancelled; the step continues.
        await asyncio.shield(self._begun)

    async def store_traces(self) -> None:
        ids = self.directive.session_id, self.directive.plan_step_id
        traces = {self._name(one): self._traces.get(one.result_key, self._trace) for one in self.directive.expected}
        await asyncio.gather(*(self._services.traces.put(*ids, name, trace) for name, trace in traces.items()))

    async def take(self, command: Command) -> Receipt:
        await self._wait_until_begun()
        match command:
            case Push():
                return await self._push(command)
            case Progress():
                if self.shadow and command.legacy is not None:
                    self.legacy = command.legacy
                said = msgspec.structs.replace(command, payload=checked_payload(command.payload))
                return await self.execute(commands.progressed(said, self._now()))
            case Decision():
                return await self.execute(commands.decided(command, self._now()))
            case Cancel():
                return await self.execute(commands.ended("cancelled", command.reason, self._now(), asked=True))
            case _:
                assert_never(command)

    async def _wait_until_begun(self) -> None:
        """A step whose start could not be written accepts no commands. Only its end is still to come."""
        if not self._begun.done():
            await asyncio.wait([self._begun])
        if self._begun.cancelled() or self._begun.exception() is not None:
            raise StreamUnavailable("The step could not be started; it is about to end.")

    def lose(self, reason: str) -> None:
        self._writer.put(commands.ended("worker_lost", reason, self._now()))

    def stop(self) -> None:
        """Stop without writing anything."""
        if self._running:
            self._running = False
            self._writer.close()
            self._leave()

    async def _push(self, push: Push) -> Receipt:
        task = self._named(push)
        if task.subagent is None:  # switched off: there is no adapter for its payload
            fragment = Fragment(status=push.status)
        else:
            fragment = checked_fragment(task.subagent.taken(bytes(push.payload), push.status))
        metrics: Mapping[str, float] = fragment.metrics
        if push.metrics:
            metrics = {**fragment.metrics, **push.metrics}
            check_metrics(metrics)
        if push.trace is None:
            await self._find_stored_trace(task)
        trace = within(push.trace, self.context) if push.trace is not None else None
        return await self.execute(commands.pushed(push, task.expected, fragment, metrics, trace, self._now()))

    def _create_tasks(self) -> None:
        for expected in self.directive.expected:
            key = expected.result_key
            trace = self._traces.get(key, self._trace)
            context = msgspec.structs.replace(self.context, deadline=self.step.part(key).deadline)
            try:
                subagent = self._services.subagents.find(expected)
                self._tasks[key] = SubagentTask(expected, subagent, trace, context, self._services)
            except Exception:
                for task in self._tasks.values():
                    task.close("cancelled", 0)
                raise

    def _named(self, push: Push) -> SubagentTask:
        tasks = [task for task in self._tasks.values() if task.expected.key == push.name]
        if not tasks and push.name in self._tasks:
            tasks = [self._tasks[push.name]]
        if not tasks:
            raise NotFound(f"The step expects no subagent {push.name!r}.")
        if push.result_key is not None:
            tasks = [task for task in tasks if task.expected.result_key == push.result_key]
        if len(tasks) != 1:
            raise InvalidQuestion("The result key is not one of this subagent's, or it has several and none is named.")
        return tasks[0]

    def _name(self, expected: Expected) -> str:
        """The name of its trace in the store: its key, unless several subagents have the same one."""
        return expected.key if self._keys[expected.key] == 1 else expected.result_key

    async def _find_stored_trace(self, task: SubagentTask) -> None:
        """The envelope named no trace, but the store may have one. It is read once."""
        if task.expected.result_key in self._traces or task.trace_searched:
            return
        task.trace_searched = True
        ids = self.directive.session_id, self.directive.plan_step_id
        if (found := await self._services.traces.get(*ids, self._name(task.expected))) is not None:
            self._traces.setdefault(task.expected.result_key, within(found, self.context))

    async def execute(self, command: StepCommand) -> Receipt:
        """The receipt of a command, once its effect is certain."""
        command.reply = asyncio.get_running_loop().create_future()
        self._writer.put(command)
        return await command.reply

    def _fail_unless_begun(self, begun: "asyncio.Future[Receipt]") -> None:
        error = None if begun.cancelled() else begun.exception()
        if error is not None and self._running:
            reason = error.message if isinstance(error, AnabranchError) else InternalError.code
            self._writer.put(commands.ended("failed", reason, self._now()))

    def _settled(self, command: StepCommand, applied: Applied) -> None:
        if applied.ignored is None and command.trace is not None and command.result_key is not None:
            self._traces[command.result_key] = command.trace
        for event in applied.events:
            self._happened(event, command)
        self._arm(self._now())

    def _happened(self, event: StepEvent, command: StepCommand) -> None:
        match event:
            case SubagentStarted():
                task = self._tasks[event.result_key]
                if task.called_here and not command.result_key:
                    self._start(task)
            case SubagentResult():
                if self.shadow and event.status in ("success", "partial"):
                    self.results[event.result_key] = event.payload
            case SubagentCompleted():
                self._close(event.result_key, event.status, event.latency_ms, cancel=command.asked)
            case SubagentTimedOut():
                self._close(event.result_key, "timeout", event.deadline_ms)
            case SubagentDegraded():
                self._close(event.result_key, "degraded", 0)
            case SubagentRetried():
                self._again(self._tasks[event.result_key], event.attempt, pushed=command.asked)
            case StepCompleted():
                self._finish(event)
            case _:
                pass

    def _start(self, task: SubagentTask) -> None:
        self._spawned(task.start(self.directive, self.execute, lambda: self._broke(task)))

    def _broke(self, task: SubagentTask) -> None:
        """The task ended with an error that nothing in it could catch."""
        if self._running:
            attempt = self.step.part(task.expected.result_key).attempt
            self._writer.put(commands.failed(task.expected, attempt, FAILED_HERE, self._now()))

    def _close(self, result_key: str, status: str, latency_ms: int, *, cancel: bool = True) -> None:
        task = self._tasks[result_key]
        task.close(status, latency_ms)
        if cancel:  # else the task has reported its end itself, and is about to return
            task.cancel()

    def _again(self, task: SubagentTask, attempt: int, *, pushed: bool) -> None:
        if not pushed:
            return
        task.cancel()
        task.reopen()
        with self._services.telemetry.span(
            "aggregation.retry", task.context, subagent=task.expected.key, attempt=attempt
        ):
            pass

    def _finish(self, end: StepCompleted) -> None:
        if self._running:
            self._running = False
            self._services.telemetry.noted(Stepped(status=end.status, latency_ms=self._since_ms()))
            self._leave()

    def _leave(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for task in self._tasks.values():
            task.close("cancelled", self._since_ms())
            task.cancel()
        self._over(self)

    def _arm(self, now: float, earliest: float = 0.0) -> None:
        """Set the alarm to the next deadline, or to the next renewal of the lease."""
        at = max(earliest, min(self.step.due(), self._writer.written_at + self._services.limits.lease_s / 3))
        if not self._running or (self._alarm is not None and self._alarm_at <= at):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._services.time.later(max(0.0, at - now), self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._alarm = None
        now = self._now()
        if self.step.due() <= now:
            self._writer.put(commands.expired(now))
        elif self._writer.written_at + self._services.limits.lease_s / 3 <= now:
            self._writer.put(commands.renewed())
        else:
            self._arm(now, now + 0.001)
            return
        self._arm(now, now + min(self._services.timing.recheck_s, self._services.limits.lease_s / 3))

    def _now(self) -> float:
        return self._services.time.now()

    def _since_ms(self) -> int:
        return round((self._now() - self._began) * 1000)
