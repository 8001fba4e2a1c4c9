"""Writes a step's events to the log, in order, as many at once as there are."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context

from anabranch.domain.errors import AnabranchError, InternalError, LeaseLost, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import epoch
from anabranch.domain.model import Context, Value
from anabranch.domain.signals import Ignored
from anabranch.domain.steps import Directive, Receipt
from anabranch.planner import commands
from anabranch.planner.commands import StepCommand
from anabranch.planner.encoder import EncodedEvent, StepEncoder
from anabranch.planner.services import Alarm, PlannerServices
from anabranch.planner.step import Applied, Step, StepState

MAX_COMMANDS = 100
MAX_BYTES = 1024 * 1024


class OpenedStep(Value):
    """A step and its stream in the log, which `token` may write."""

    stream: str
    token: str
    directive: Directive
    context: Context


class WriteBatch(Value):
    """What one command did to the step: the events to write, and those that the stream has no room for."""

    command: StepCommand
    applied: Applied
    events: list[EncodedEvent]
    dropped: list[EncodedEvent]


class StepWriter:
    """The only one to change the step, and only while no write is in progress, so that what could not be written can be
    undone. `settled` is called with what has taken effect, `lost` when this worker no longer owns the stream; after
    that nothing is written."""

    def __init__(
        self,
        opened: OpenedStep,
        step: Step,
        encoder: StepEncoder,
        services: PlannerServices,
        *,
        spawned: Callable[[asyncio.Task[None]], None],
        settled: Callable[[StepCommand, Applied], None],
        lost: Callable[[], None],
    ) -> None:
        self._opened = opened
        self._step = step
        self._encoder = encoder
        self._services = services
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
            command.refuse(_not_held())
            return
        self._inbox.append(command)
        self._wake()

    def close(self) -> None:
        """Write nothing more; commands that still wait get LeaseLost."""
        self._closed = True
        self._cancel_alarm()
        while self._inbox:
            self._inbox.popleft().refuse(_not_held())

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
                batches.append(self._apply(command))
            except Exception as error:  # noqa: BLE001  only the command that cannot be applied or encoded is refused
                self._step.state = before
                self._put_back([*todo[:at], *todo[at + 1 :]])
                self._refuse(command, error)
                return True
            size += sum(len(each.entry.body) for each in batches[-1].events)
        if any(batch.events or batch.command.renews for batch in batches):
            return await self._write(batches, before)
        for batch in batches:
            self._settle(batch, ())
        return True

    def _apply(self, command: StepCommand) -> WriteBatch:
        applied = command.apply(self._step)
        events = [self._encoder.encode(event, command) for event in applied.events]
        kept = [each for each in events if each.entry.final] if command.bare else events
        dropped = [each for each in events if not each.entry.final] if command.bare else []
        return WriteBatch(command=command, applied=applied, events=kept, dropped=dropped)

    def _refuse(self, command: StepCommand, error: Exception) -> None:
        if not isinstance(error, AnabranchError):
            self._services.telemetry.crashed(error, self._opened.context)
            error = InternalError("This could not be written.")
        command.refuse(error)

    async def _write(self, batches: list[WriteBatch], before: StepState) -> bool:
        todo = [batch.command for batch in batches]
        entries = [each.entry for batch in batches for each in batch.events]
        try:
            with self._services.telemetry.span("aggregation.emit", self._opened.context, events=len(entries)):
                sequences = await self._services.log.append(self._opened.stream, self._opened.token, entries)
        except (LeaseLost, NotFound):
            self._step.state = before
            self._put_back(todo)
            self._give_up()
            return False
        except StreamFull as error:
            self._step.state = before
            return self._full(todo, error)
        except Exception as error:  # noqa: BLE001  whatever the error, the log has not acknowledged the entries
            self._step.state = before
            self._unreachable(todo, error)
            return False
        self.written_at = self._services.time.now()
        self._cancel_alarm()
        places = iter(sequences)
        for batch in batches:
            self._settle(batch, [next(places) for _ in batch.events])
        self._check_epoch(sequences)
        return True

    def _full(self, todo: list[StepCommand], error: StreamFull) -> bool:
        """There is no room for all of them. Each is tried alone, and then without its events if it is forced."""
        if len(todo) > 1:
            self._alone = len(todo)
            self._put_back(todo)
            return True
        (command,) = todo
        if command.bare:  # An end always has room. A log that says otherwise counts as unreachable.
            self._unreachable(todo, error)
            return False
        if command.forced:
            command.bare = True
            self._put_back(todo)
            return True
        self._ignore(command, error.code)
        command.refuse(error)
        if command.instead is not None:
            self._put_back([command.instead])
        return True

    def _put_back(self, todo: Sequence[StepCommand]) -> None:
        self._inbox.extendleft(reversed(todo))

    def _unreachable(self, todo: list[StepCommand], error: Exception) -> None:
        if not isinstance(error, AnabranchError):
            self._services.telemetry.crashed(error, self._opened.context)
        if not isinstance(error, StreamUnavailable):
            error = StreamUnavailable("The stream cannot be written to.")
        for command in todo:
            if command.asked or not command.keeps:
                command.refuse(error)
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
        for each, sequence in zip(batch.events, sequences, strict=True):
            self._encoder.record(each, command, sequence, None if sequence else "duplicate")
            if isinstance(each.event, command.answers):
                place = sequence
                ignored = ignored if sequence else "duplicate"
        for each in batch.dropped:
            self._encoder.record(each, command, 0, StreamFull.code)
        if ignored is not None:
            self._ignore(command, ignored)
        self._settled(command, batch.applied)
        command.answer(Receipt(sequence=0 if ignored else place, ignored=ignored, status=self._step.status))

    def _ignore(self, command: StepCommand, reason: str) -> None:
        self._encoder.record_ignored(command, reason)
        self._services.telemetry.noted(Ignored(reason=reason))

    def _check_epoch(self, sequences: Sequence[int]) -> None:
        """Tell readers that the log continues in another epoch."""
        latest = epoch(max(sequences, default=0))
        if not any(sequences) or latest == self._epoch:
            return
        known, self._epoch = self._epoch, latest
        if known is not None and self._step.end is None:
            self.put(commands.detached(latest))

    def _give_up(self) -> None:
        self.close()
        self._lost()


def _not_held() -> LeaseLost:
    return LeaseLost("The step is not held here any more.")
