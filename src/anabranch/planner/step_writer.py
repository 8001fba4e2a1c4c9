"""The one who writes a step down: everything in the order in which it came, as much at once as there is."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from typing import Protocol

from anabranch.domain.contracts import Clock, EventLog, Telemetry
from anabranch.domain.errors import AnabranchError, InternalError, LeaseLost, NotFound, StreamFull, StreamUnavailable
from anabranch.domain.eventlog import epoch
from anabranch.domain.model import Context
from anabranch.domain.signals import Ignored
from anabranch.domain.steps import Receipt
from anabranch.planner.commands import StepCommand
from anabranch.planner.encoder import EncodedEvents, StepEncoder
from anabranch.planner.step import Applied, Marked, Step

MOST_ACTIONS = 100
MOST_BYTES = 1024 * 1024
AGAIN_S = 0.2


class Alarm(Protocol):
    """What rings once, unless it is told not to."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Alarm]


def later(seconds: float, call: Callable[[], None]) -> Alarm:
    return asyncio.get_running_loop().call_later(seconds, call)


class WriteBatch:
    """What one action made of the step: the lines to write, and those for which there is no room."""

    __slots__ = ("action", "applied", "dropped", "lines")

    def __init__(self, action: StepCommand, applied: Applied, lines: list[EncodedEvents]) -> None:
        self.action = action
        self.applied = applied
        self.lines = lines
        self.dropped: list[EncodedEvents] = []
        if action.bare:
            self.lines = [line for line in lines if line.entry.final]
            self.dropped = [line for line in lines if not line.entry.final]


class StepWriter:
    """Owns the step: nobody else changes it, and it is changed only while nothing is under way to the log, so that what
    could not be written can be undone. `settled` hears what has come to count, `lost` that the stream is not ours any
    more; after that nothing is written."""

    def __init__(
        self,
        stream: str,
        token: str,
        step: Step,
        scribe: StepEncoder,
        *,
        log: EventLog,
        clock: Clock,
        telemetry: Telemetry,
        context: Context,
        variables: Variables,
        lease_s: float,
        later: Later,
        spawned: Callable[[asyncio.Task[None]], None],
        settled: Callable[[StepCommand, Applied], None],
        moved: Callable[[int], None],
        lost: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._token = token
        self._step = step
        self._scribe = scribe
        self._log = log
        self._clock = clock
        self._telemetry = telemetry
        self._context = context
        self._variables = variables
        self._lease_s = lease_s
        self._later = later
        self._spawned = spawned
        self._settled = settled
        self._moved = moved
        self._lost = lost
        self._inbox: deque[StepCommand] = deque()
        self._task: asyncio.Task[None] | None = None
        self._alarm: Alarm | None = None
        self._closed = False
        self._epoch: int | None = None
        self._alone = 0
        self._at_hand: list[StepCommand] = []
        self.written_at = clock.monotonic()

    def put(self, action: StepCommand) -> None:
        if self._closed:
            action.refuse(_gone())
            return
        self._inbox.append(action)
        self._wake()

    def close(self) -> None:
        """Write nothing more; whoever still waits is told."""
        self._closed = True
        self._unset()
        while self._inbox:
            self._inbox.popleft().refuse(_gone())

    def _wake(self) -> None:
        if self._task is None and self._inbox and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), context=self._variables)
            self._spawned(self._task)

    async def _run(self) -> None:
        try:
            while self._inbox and not self._closed:
                many = min(len(self._inbox), 1 if self._alone else MOST_ACTIONS)
                self._alone = max(0, self._alone - 1)
                self._at_hand = [self._inbox.popleft() for _ in range(many)]
                if not await self._commit(self._at_hand):
                    break
        except Exception as error:  # noqa: BLE001  the task's boundary: what cannot be written is not ours to keep
            self._telemetry.crashed(error, self._context)
            self._inbox.extendleft(self._at_hand)
            self._give_up()
        finally:
            self._at_hand = []
            self._task = None

    async def _commit(self, actions: list[StepCommand]) -> bool:
        """False if the log was out of reach: then somebody will try again."""
        mark = self._step.marked()
        groups: list[WriteBatch] = []
        size = 0
        for at, action in enumerate(actions):
            if size >= MOST_BYTES:
                self._put_back(actions[at:])
                break
            try:
                groups.append(self._applied(action))
            except Exception as error:  # noqa: BLE001  what cannot be applied or written down is refused, alone
                self._step.back_to(mark)
                self._put_back([*actions[:at], *actions[at + 1 :]])
                self._spoilt(action, error)
                return True
            size += sum(len(line.entry.body) for line in groups[-1].lines)
        if any(group.lines or group.action.renews for group in groups):
            return await self._written(groups, mark)
        for group in groups:
            self._settle(group, ())
        return True

    def _applied(self, action: StepCommand) -> WriteBatch:
        applied = action.apply(self._step)
        return WriteBatch(action, applied, [self._scribe.line(event, action) for event in applied.events])

    def _spoilt(self, action: StepCommand, error: Exception) -> None:
        if not isinstance(error, AnabranchError):
            self._telemetry.crashed(error, self._context)
            error = InternalError("This could not be written down.")
        action.refuse(error)

    async def _written(self, groups: list[WriteBatch], mark: Marked) -> bool:
        actions = [group.action for group in groups]
        entries = [line.entry for group in groups for line in group.lines]
        try:
            with self._telemetry.span("aggregation.emit", self._context, events=len(entries)):
                sequences = await self._log.append(self._stream, self._token, entries)
        except (LeaseLost, NotFound):
            self._step.back_to(mark)
            self._put_back(actions)
            self._give_up()
            return False
        except StreamFull as error:
            self._step.back_to(mark)
            return self._full(actions, error)
        except Exception as error:  # noqa: BLE001  whatever a log fails with, it has not said that it has them
            self._step.back_to(mark)
            self._out_of_reach(actions, error)
            return False
        self.written_at = self._clock.monotonic()
        self._unset()
        places = iter(sequences)
        for group in groups:
            self._settle(group, [next(places) for _ in group.lines])
        self._watch(sequences)
        return True

    def _full(self, actions: list[StepCommand], error: StreamFull) -> bool:
        """There is no room for all of them. Each is tried by itself; then it has to go without."""
        if len(actions) > 1:
            self._alone = len(actions)
            self._put_back(actions)
            return True
        (action,) = actions
        if action.bare:  # an end always has room; a log that says otherwise is as good as out of reach
            self._out_of_reach(actions, error)
            return False
        if action.forced:
            action.bare = True
            self._put_back(actions)
            return True
        self._pass_over(action, error.code)
        action.refuse(error)
        if action.instead is not None:
            self._put_back([action.instead])
        return True

    def _put_back(self, actions: Sequence[StepCommand]) -> None:
        self._inbox.extendleft(reversed(actions))

    def _out_of_reach(self, actions: list[StepCommand], error: Exception) -> None:
        if not isinstance(error, AnabranchError):
            self._telemetry.crashed(error, self._context)
        told = error if isinstance(error, StreamUnavailable) else StreamUnavailable("The stream cannot be written to.")
        for action in actions:
            if action.asked or not action.keeps:
                action.refuse(told)
        self._put_back([action for action in actions if action.keeps])
        if self._clock.monotonic() - self.written_at >= self._lease_s:
            self._give_up()  # whoever looks takes us for dead, and ends it
        elif self._inbox and self._alarm is None:
            self._alarm = self._later(AGAIN_S, self._again)

    def _unset(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _again(self) -> None:
        self._alarm = None
        self._wake()

    def _settle(self, group: WriteBatch, sequences: Sequence[int]) -> None:
        action, ignored = group.action, group.applied.ignored
        place = max(sequences, default=0)
        for line, sequence in zip(group.lines, sequences, strict=True):
            self._scribe.tell(line, sequence, None if sequence else "duplicate")
            if isinstance(line.event, action.answers):
                place = sequence
                ignored = ignored if sequence else "duplicate"
        for line in group.dropped:
            self._scribe.tell(line, 0, StreamFull.code)
        if ignored is not None:
            self._pass_over(action, ignored)
        self._settled(action, group.applied)
        action.answer(Receipt(sequence=0 if ignored else place, ignored=ignored, status=self._step.status))

    def _pass_over(self, action: StepCommand, why: str) -> None:
        self._scribe.pass_over(action, why)
        self._telemetry.noted(Ignored(reason=why))

    def _watch(self, sequences: Sequence[int]) -> None:
        """The log may have gone on in another epoch."""
        latest = epoch(max(sequences, default=0))
        if not any(sequences) or latest == self._epoch:
            return
        known, self._epoch = self._epoch, latest
        if known is not None and self._step.end is None:
            self._moved(latest)

    def _give_up(self) -> None:
        self.close()
        self._lost()


def _gone() -> LeaseLost:
    return LeaseLost("The step is not held here any more.")
