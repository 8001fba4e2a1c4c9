"""One step in progress: the state machine, its writer, its subagents and its deadlines."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
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
from anabranch.domain.steps import Cancel, Command, Decision, Expected, Fragment, Progress, Push, Receipt, Trace
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand, check_metrics, checked_fragment, checked_payload
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
        self._started: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._started_at = services.time.now()
        self.step = Step(directive, now=self._started_at, timeout_s=services.limits.timeout_s)
        self._alarm: Alarm | None = None
        self._alarm_at = math.inf
        self._trace = step_trace(context, (one.trace for one in directive.expected if one.trace is not None))
        self._traces = {one.result_key: within(one.trace, context) for one in directive.expected if one.trace}
        self._keys = Counter(one.key for one in directive.expected)
        self._tasks: dict[str, SubagentTask] = {}
        self._create_tasks()
        self._writer = StepWriter(
            opened,
            self.step,
            services,
            trace_of=self._trace_of,
            spawned=spawned,
            settled=self._settled,
            lost=self.stop,
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
        called = [key for key, task in self._tasks.items() if key not in refused and task.called_here]
        command = commands.begin(called, refused, self._now())
        command.reply = self._started
        self._started.add_done_callback(self._fail_unless_started)
        self._writer.put(command)
        # The caller may be cancelled; the step continues.
        await asyncio.shield(self._started)

    async def store_traces(self) -> None:
        ids = self.directive.session_id, self.directive.plan_step_id
        traces = {self._name(one): self._trace_of(one.result_key) for one in self.directive.expected}
        await asyncio.gather(*(self._services.traces.put(*ids, name, trace) for name, trace in traces.items()))

    async def handle(self, command: Command) -> Receipt:
        """A step whose start could not be written accepts no commands. Only its end is still to come."""
        if not self._started.done():
            await asyncio.wait([self._started])
        if self._started.cancelled() or self._started.exception() is not None:
            raise StreamUnavailable("The step could not be started; it is about to end.")
        match command:
            case Push():
                return await self._push(command)
            case Progress():
                if self.shadow and command.legacy is not None:
                    self.legacy = command.legacy
                command = msgspec.structs.replace(command, payload=checked_payload(command.payload))
                return await self.execute(commands.progress(command, self._now()))
            case Decision():
                return await self.execute(commands.decide(command, self._now()))
            case Cancel():
                return await self.execute(commands.end("cancelled", command.reason, self._now(), awaited=True))
            case _:
                assert_never(command)

    def lose(self, reason: str) -> None:
        self._writer.put(commands.end("worker_lost", reason, self._now()))

    def stop(self) -> None:
        """Stop without writing anything."""
        self._writer.close()
        self._leave()

    async def _push(self, push: Push) -> Receipt:
        task = self._named(push)
        if task.subagent is None:  # switched off: there is no adapter for its payload
            fragment = Fragment(status=push.status)
        else:
            fragment = checked_fragment(task.subagent.taken(bytes(push.payload), push.status))
        metrics = {**fragment.metrics, **push.metrics}
        check_metrics(metrics)
        if push.trace is None:
            await self._find_stored_trace(task)
        trace = within(push.trace, self.context) if push.trace is not None else None
        return await self.execute(commands.push(push, task.expected, fragment, metrics, trace, self._now()))

    def _create_tasks(self) -> None:
        for expected in self.directive.expected:
            key = expected.result_key
            context = msgspec.structs.replace(self.context, deadline=self.step.part(key).deadline)
            try:
                subagent = self._services.subagents.find(expected)
                self._tasks[key] = SubagentTask(expected, subagent, self._trace_of(key), context, self._services)
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

    def _trace_of(self, result_key: str | None) -> Trace:
        return self._traces.get(result_key or "", self._trace)

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

    def _fail_unless_started(self, started: "asyncio.Future[Receipt]") -> None:
        error = None if started.cancelled() else started.exception()
        if error is not None and self._running:
            reason = error.message if isinstance(error, AnabranchError) else InternalError.code
            self._writer.put(commands.end("failed", reason, self._now()))

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
                    self._spawned(task.start(self.directive, self.execute, partial(self._fail_task, task)))
            case SubagentResult():
                if self.shadow and event.status in ("success", "partial"):
                    self.results[event.result_key] = event.payload
            case SubagentCompleted():
                self._close(event.result_key, event.status, event.latency_ms, cancel=command.awaited)
            case SubagentTimedOut():
                self._close(event.result_key, "timeout", event.deadline_ms)
            case SubagentDegraded():
                self._close(event.result_key, "degraded", 0)
            case SubagentRetried() if command.awaited:  # a push began the attempt
                task = self._tasks[event.result_key]
                task.cancel()
                task.reopen(event.attempt)
            case StepCompleted() if self._running:
                self._services.telemetry.noted(Stepped(status=event.status, latency_ms=self._since_ms()))
                self._leave()
            case _:
                pass

    def _fail_task(self, task: SubagentTask) -> None:
        """The task ended with an error that nothing in it could catch."""
        if self._running:
            attempt = self.step.part(task.expected.result_key).attempt
            self._writer.put(commands.fail(task.expected, attempt, FAILED_HERE, self._now()))

    def _close(self, result_key: str, status: str, latency_ms: int, *, cancel: bool = True) -> None:
        task = self._tasks[result_key]
        task.close(status, latency_ms)
        if cancel:  # else the task has reported its end itself, and is about to return
            task.cancel()

    def _leave(self) -> None:
        if not self._running:
            return
        self._running = False
        if self._alarm is not None:
            self._alarm.cancel()
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
            self._writer.put(commands.expire(now))
        elif self._writer.written_at + self._services.limits.lease_s / 3 <= now:
            self._writer.put(commands.renew())
        else:
            self._arm(now, now + 0.001)
            return
        self._arm(now, now + min(self._services.timing.recheck_s, self._services.limits.lease_s / 3))

    def _now(self) -> float:
        return self._services.time.now()

    def _since_ms(self) -> int:
        return round((self._now() - self._started_at) * 1000)
