"""Applies commands to a step and writes its events to the log, in order, as many at once as there are."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context

from anabranch.domain.errors import AnabranchError, InternalError, LeaseLost, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import epoch
from anabranch.domain.events import SafetyDecided, StepEvent, SubagentResult
from anabranch.domain.model import Context, Value
from anabranch.domain.signals import Ignored
from anabranch.domain.steps import Breadcrumb, Directive, Receipt, Trace
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand
from anabranch.planner.encoder import EVENT_TYPES, EncodedEvent, encode, stamp
from anabranch.planner.services import Alarm, PlannerServices
from anabranch.planner.step import Applied, Step, StepState

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
    undone. `trace_of` returns the trace of a result key, or else of the step. `settled` is called with what has taken
    effect, `lost` when this worker no longer owns the stream; after that nothing is written."""

    def __init__(
        self,
        opened: OpenedStep,
        step: Step,
        services: PlannerServices,
        *,
        trace_of: Callable[[str | None], Trace],
        spawned: Callable[[asyncio.Task[None]], None],
        settled: Callable[[StepCommand, Applied], None],
        lost: Callable[[], None],
    ) -> None:
        self._opened = opened
        self._step = step
        self._services = services
        self._trace_of = trace_of
        self._spawned = spawned
        self._settled = settled
        self._lost = lost
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
            self._task = asyncio.get_running_loop().create_task(self._run(), context=self._variables)
            self._spawned(self._task)

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
                self._refuse(command, error)
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

    def _refuse(self, command: StepCommand, error: Exception) -> None:
        if not isinstance(error, AnabranchError):
            self._services.telemetry.crashed(error, self._opened.context)
            error = InternalError("This could not be written.")
        command.resolve(error)

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
        self._cancel_alarm()
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
            self._alarm = self._services.time.later(self._services.timing.rewrite_s, self._rewrite)

    def _rewrite(self) -> None:
        self._alarm = None
        self._wake()

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
        self._settled(command, batch.applied)
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
        self._services.telemetry.noted(Ignored(reason=reason))

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
        self._lost()
