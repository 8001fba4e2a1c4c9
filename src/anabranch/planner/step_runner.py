"""One step in progress: its writer, which applies commands and writes the events; its subagents; its deadlines."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import assert_never

import msgspec

from anabranch.domain.contracts import Subagent
from anabranch.domain.errors import (
    AnabranchError,
    InternalError,
    InvalidQuestion,
    LeaseLost,
    NotFound,
    StreamFull,
    StreamUnavailable,
)
from anabranch.domain.eventlog import epoch
from anabranch.domain.events import (
    PlanStepCompleted,
    SafetyDecided,
    StepEvent,
    SubagentCompleted,
    SubagentDegraded,
    SubagentResult,
    SubagentRetried,
    SubagentStarted,
    SubagentTimedOut,
)
from anabranch.domain.model import Context, Value
from anabranch.domain.signals import EventIgnored, StepEnded
from anabranch.domain.steps import (
    Breadcrumb,
    Cancel,
    Command,
    Decision,
    Directive,
    Expected,
    Fragment,
    Progress,
    Push,
    Receipt,
    Trace,
)
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand, check_metrics, checked_fragment, checked_payload
from anabranch.planner.encoder import EVENT_TYPES, EncodedEvent, encode, stamp
from anabranch.planner.services import Alarm, PlannerServices, step_trace, within
from anabranch.planner.step import Applied, Step, StepState
from anabranch.planner.subagent_task import FAILED_HERE, SubagentTask

MAX_COMMANDS = 100
MAX_BYTES = 1024 * 1024
NOT_HELD = "The step is not held here any more."


class OpenedStep(Value):
    """A step and its stream in the log, which `token` may write."""

    stream: str
    token: str
    directive: Directive
    context: Context


class WriteBatch(Value):
    """What one command did to the step. Of a command that is `bare` only the end is written."""

    command: StepCommand
    applied: Applied
    encoded: list[EncodedEvent]

    @property
    def written(self) -> list[EncodedEvent]:
        return [each for each in self.encoded if each.entry.final] if self.command.bare else self.encoded


class StepWriter:
    """The only one to change the step, and only while no write is in progress, so that what could not be written can be
    undone. `trace_of` returns the trace of a result key, or else of the step. `on_applied` is called with commands that
    took effect, `on_lost` when this worker no longer owns the stream; after that nothing is written."""

    def __init__(
        self,
        opened: OpenedStep,
        step: Step,
        services: PlannerServices,
        *,
        trace_of: Callable[[str | None], Trace],
        on_task: Callable[[asyncio.Task[None]], None],
        on_applied: Callable[[StepCommand, Applied], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._opened = opened
        self._step = step
        self._services = services
        self._trace_of = trace_of
        self._on_task = on_task
        self._on_applied = on_applied
        self._on_lost = on_lost
        self._variables = copy_context()
        self._inbox: deque[StepCommand] = deque()
        self._task: asyncio.Task[None] | None = None
        self._alarm: Alarm | None = None
        self._closed = False
        self._epoch: int | None = None
        self._alone = 0
        self._current: list[StepCommand] = []
        self.written_at = services.time.now()

    def put(self, command: StepCommand) -> None:
        if self._closed:
            command.resolve(LeaseLost(NOT_HELD))
            return
        self._inbox.append(command)
        self._wake()

    def close(self) -> None:
        """Write nothing more; commands that still wait get LeaseLost."""
        self._closed = True
        self._cancel_alarm()
        while self._inbox:
            self._inbox.popleft().resolve(LeaseLost(NOT_HELD))

    def _wake(self) -> None:
        if self._task is None and self._inbox and not self._closed:
            self._cancel_alarm()
            self._task = asyncio.get_running_loop().create_task(self._run(), context=self._variables)
            self._on_task(self._task)

    async def _run(self) -> None:
        try:
            while self._inbox and not self._closed:
                count = min(len(self._inbox), 1 if self._alone else MAX_COMMANDS)
                self._alone = max(0, self._alone - 1)
                self._current = [self._inbox.popleft() for _ in range(count)]
                if not await self._commit(self._current):
                    break
        except Exception as error:  # noqa: BLE001  the task's boundary: a step that cannot be written is given up
            self._services.telemetry.crashed(error, self._opened.context)
            self._inbox.extendleft(self._current)
            self._give_up()
        finally:
            self._current = []
            self._task = None

    async def _commit(self, todo: list[StepCommand]) -> bool:
        """False if the log was unreachable: then an alarm is set."""
        before = self._step.state
        batches: list[WriteBatch] = []
        size = 0
        for at, command in enumerate(todo):
            if size >= MAX_BYTES:
                self._put_back(todo[at:])
                break
            try:
                applied = command.apply(self._step)
                encoded = [self._encode(event, command) for event in applied.events]
            except Exception as error:  # noqa: BLE001  only the command that cannot be applied or encoded is refused
                self._step.state = before
                self._put_back([*todo[:at], *todo[at + 1 :]])
                if isinstance(error, AnabranchError):
                    command.resolve(error)
                else:
                    self._services.telemetry.crashed(error, self._opened.context)
                    command.resolve(InternalError("This could not be written."))
                return True
            batches.append(WriteBatch(command=command, applied=applied, encoded=encoded))
            size += sum(len(each.entry.body) for each in batches[-1].written)
        if any(batch.written or batch.command.renews for batch in batches):
            return await self._write(batches, before)
        for batch in batches:
            self._settle(batch, ())
        return True

    def _encode(self, event: StepEvent, command: StepCommand) -> EncodedEvent:
        result_key: str | None = getattr(event, "result_key", None)
        own = result_key is not None and result_key == command.result_key
        measured = own and isinstance(event, SubagentResult)
        if isinstance(event, SafetyDecided) and event.subagent is not None:
            result_key, own = command.result_key, True
        return encode(
            event,
            session_id=self._opened.directive.session_id,
            plan_step_id=self._opened.directive.plan_step_id,
            at=self._services.time.wall(),
            trace=command.trace if own and command.trace is not None else self._trace_of(result_key),
            latency_ms=command.latency_ms if measured else None,
            metrics=command.metrics if measured else None,
        )

    async def _write(self, batches: list[WriteBatch], before: StepState) -> bool:
        todo = [batch.command for batch in batches]
        entries = [each.entry for batch in batches for each in batch.written]
        try:
            with self._services.telemetry.span("aggregation.emit", self._opened.context, events=len(entries)):
                sequences = await self._services.log.append(self._opened.stream, self._opened.token, entries)
        except Exception as error:  # noqa: BLE001  whatever the error, the log has not acknowledged the entries
            self._step.state = before
            if isinstance(error, StreamFull):
                return self._full(todo, error)
            if isinstance(error, LeaseLost | NotFound):
                self._put_back(todo)
                self._give_up()
            else:
                self._unreachable(todo, error)
            return False
        self.written_at = self._services.time.now()
        places = iter(sequences)
        for batch in batches:
            self._settle(batch, [next(places) for _ in batch.written])
        self._check_epoch(sequences)
        return True

    def _full(self, todo: list[StepCommand], error: StreamFull) -> bool:
        """There is no room for all of them. Each is tried alone, and then without its events if it is forced."""
        command = todo[0]
        if len(todo) > 1:
            self._alone = len(todo)
            self._put_back(todo)
        elif command.bare:  # An end always has room. A log that says otherwise counts as unreachable.
            self._unreachable(todo, error)
            return False
        elif command.forced:
            command.bare = True
            self._put_back(todo)
        else:
            self._ignore(command, error.code)
            command.resolve(error)
            self._put_back([] if command.instead is None else [command.instead])
        return True

    def _put_back(self, todo: Sequence[StepCommand]) -> None:
        self._inbox.extendleft(reversed(todo))

    def _unreachable(self, todo: list[StepCommand], error: Exception) -> None:
        if not isinstance(error, AnabranchError):
            self._services.telemetry.crashed(error, self._opened.context)
        if not isinstance(error, StreamUnavailable):
            error = StreamUnavailable("The stream cannot be written to.")
        for command in todo:
            if command.awaited or not command.keeps:
                command.resolve(error)
        self._put_back([command for command in todo if command.keeps])
        if self._services.time.now() - self.written_at >= self._services.limits.lease_s:
            self._give_up()  # The lease has expired: readers end the stream.
        elif self._inbox and self._alarm is None:
            self._alarm = self._services.time.later(self._services.timing.rewrite_s, self._wake)

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _settle(self, batch: WriteBatch, sequences: Sequence[int]) -> None:
        command, ignored = batch.command, batch.applied.ignored
        place = max(sequences, default=0)
        for each, sequence in zip(batch.written, sequences, strict=True):
            self._record(each, command, sequence, None if sequence else "duplicate")
            if isinstance(each.event, command.answers):
                place = sequence
                ignored = ignored if sequence else "duplicate"
        for each in batch.encoded:
            if command.bare and not each.entry.final:
                self._record(each, command, 0, StreamFull.code)
        if ignored is not None:
            self._ignore(command, ignored)
        self._on_applied(command, batch.applied)
        command.resolve(Receipt(sequence=0 if ignored else place, ignored=ignored, status=self._step.status))

    def _record(self, encoded: EncodedEvent, command: StepCommand, sequence: int, ignored: str | None) -> None:
        event, record = encoded.event, encoded.record
        own = record.content.result_key is not None and record.content.result_key == command.result_key
        self._services.crumbs.drop(
            Breadcrumb(
                session_id=record.session_id,
                plan_step_id=record.plan_step_id,
                type=record.type,
                timestamp=record.timestamp,
                sequence=sequence,
                subagent=getattr(event, "subagent", None),
                result_key=record.content.result_key,
                status=record.content.status,
                revision=record.content.revision,
                retry_count=max(0, getattr(event, "attempt", command.attempt if own else 1) - 1),
                latency_ms=getattr(event, "latency_ms", record.telemetry.latency_ms),
                trace_id=record.telemetry.trace_id,
                ignored=ignored,
            )
        )

    def _ignore(self, command: StepCommand, reason: str) -> None:
        """Record a command that had no effect."""
        trace = command.trace or self._trace_of(command.result_key)
        self._services.crumbs.drop(
            Breadcrumb(
                session_id=self._opened.directive.session_id,
                plan_step_id=self._opened.directive.plan_step_id,
                type=EVENT_TYPES[command.answers],
                timestamp=stamp(self._services.time.wall()),
                subagent=command.expected.key if command.expected is not None else None,
                result_key=command.result_key,
                status=command.status,
                retry_count=max(0, command.attempt - 1),
                latency_ms=command.latency_ms,
                trace_id=trace.trace_id,
                ignored=reason,
            )
        )
        self._services.telemetry.noted(EventIgnored(reason=reason))

    def _check_epoch(self, sequences: Sequence[int]) -> None:
        """Tell readers that the log continues in another epoch."""
        latest = epoch(max(sequences, default=0))
        if not any(sequences) or latest == self._epoch:
            return
        known, self._epoch = self._epoch, latest
        if known is not None and self._step.end is None:
            self.put(commands.detach(latest))

    def _give_up(self) -> None:
        self.close()
        self._on_lost()


class StepRunner:
    """`on_end` is called once, when the step has ended or this worker no longer owns it; `on_task` with every task."""

    def __init__(
        self,
        opened: OpenedStep,
        services: PlannerServices,
        *,
        on_end: Callable[["StepRunner"], None],
        on_task: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.stream = opened.stream
        self.directive = directive = opened.directive
        self.context = context = opened.context
        self.legacy = directive.legacy
        self.results: dict[str, msgspec.Raw] = {}
        self._services = services
        self._on_end = on_end
        self._on_task = on_task
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
            on_task=on_task,
            on_applied=self._on_applied,
            on_lost=self.stop,
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

    def end_as_lost(self) -> None:
        reason = "The worker was shut down before the step had ended."
        self._writer.put(commands.end("worker_lost", reason, self._now()))

    async def end_erased(self, reason: str) -> None:
        await self.execute(commands.end("failed", reason, self._now(), awaited=True))

    def stop(self) -> None:
        """Stop without writing anything."""
        self._writer.close()
        self._end()

    async def _push(self, push: Push) -> Receipt:
        task = self._find_task(push)
        fragment = Fragment(status=push.status)
        if task.subagent is not None:  # else it is switched off: there is no adapter for its payload
            fragment = checked_fragment(task.subagent.convert(bytes(push.payload), push.status))
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

    def _find_task(self, push: Push) -> SubagentTask:
        tasks = [task for task in self._tasks.values() if task.expected.key == push.name]
        tasks = tasks or [task for task in self._tasks.values() if task.expected.result_key == push.name]
        if not tasks:
            raise NotFound(f"The step expects no subagent {push.name!r}.")
        tasks = [task for task in tasks if push.result_key in (None, task.expected.result_key)]
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

    def _on_applied(self, command: StepCommand, applied: Applied) -> None:
        if applied.ignored is None and command.trace is not None and command.result_key is not None:
            self._traces[command.result_key] = command.trace
        for event in applied.events:
            self._on_event(event, command)
        self._set_alarm(self._now())

    def _on_event(self, event: StepEvent, command: StepCommand) -> None:
        match event:
            case SubagentStarted():
                task = self._tasks[event.result_key]
                if task.called_here and not command.result_key:
                    self._on_task(task.start(self.directive, self.execute, partial(self._fail_task, task)))
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
            case PlanStepCompleted() if self._running:
                self._services.telemetry.noted(StepEnded(status=event.status, latency_ms=self._since_ms()))
                self._end()
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

    def _end(self) -> None:
        if not self._running:
            return
        self._running = False
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks.values():
            task.close("cancelled", self._since_ms())
            task.cancel()
        self._on_end(self)

    def _set_alarm(self, now: float, earliest: float = 0.0) -> None:
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
        wait_s = min(self._services.timing.recheck_s, self._services.limits.lease_s / 3)
        if self.step.due() <= now:
            self._writer.put(commands.expire(now))
        elif self._writer.written_at + self._services.limits.lease_s / 3 <= now:
            self._writer.put(commands.renew())
        else:
            wait_s = 0.001
        self._set_alarm(now, now + wait_s)

    def _now(self) -> float:
        return self._services.time.now()

    def _since_ms(self) -> int:
        return round((self._now() - self._started_at) * 1000)
