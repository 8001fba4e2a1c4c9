"""Fakes around planner steps: subagents that follow a script, and time that rings only when told to."""

# ruff: noqa: ARG002

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import cast

import msgspec

from anabranch.domain.contracts import Subagent
from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.events import SafetyVerdict, SubagentStatus
from anabranch.domain.model import Context
from anabranch.domain.steps import Breadcrumb, Directive, Expected, Fragment
from anabranch.testing.fakes import ManualClock

JUDGED: dict[str, SafetyVerdict] = {"allow": "allow", "warn": "warn"}


class FakeSubagent:
    """Does what its script says, attempt by attempt (the last one serves for all that follow): yields what it finds
    there, raises exceptions, waits for events. `stubborn` is for how many cancellations it only shrugs. What is pushed
    it takes as it is; if it `judges`, a payload's `decision` is its verdict."""

    def __init__(self, *attempts: Sequence[object], judges: bool = False, stubborn: int = 0) -> None:
        self.contexts: list[Context] = []
        self.closed = 0
        self._attempts = attempts or ((),)
        self._judges = judges
        self._stubborn = stubborn

    def taken(self, payload: bytes, status: SubagentStatus) -> Fragment:
        fragment = Fragment(status=status, payload=msgspec.Raw(payload))
        if not self._judges:
            return fragment
        try:
            said = msgspec.json.decode(payload, type=dict[str, str])
        except msgspec.MsgspecError as error:
            raise InvalidQuestion("A verdict needs a decision.") from error
        verdict = JUDGED.get(said.get("decision", ""), "block")
        return msgspec.structs.replace(fragment, verdict=verdict, reason=said.get("reason", ""))

    async def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:
        script = self._attempts[min(len(self.contexts), len(self._attempts) - 1)]
        self.contexts.append(context)
        try:
            for line in script:
                if isinstance(line, BaseException):
                    raise line
                if isinstance(line, asyncio.Event):
                    await self._wait(line)
                else:
                    yield cast("Fragment", line)  # a script may hold anything: some subagents do
        finally:
            self.closed += 1

    async def _wait(self, event: asyncio.Event) -> None:
        while True:
            try:
                await event.wait()
            except asyncio.CancelledError:
                if not self._stubborn:
                    raise
                self._stubborn -= 1
            else:
                return


class FakeSubagents:
    """Finds them by key; what is not there is switched off."""

    def __init__(self, subagents: Mapping[str, Subagent]) -> None:
        self._subagents = subagents

    def find(self, expected: Expected) -> Subagent | None:
        return self._subagents.get(expected.key)


class Crumbs:
    """Breadcrumbs that are kept."""

    def __init__(self) -> None:
        self.dropped: list[Breadcrumb] = []

    def drop(self, crumb: Breadcrumb) -> None:
        self.dropped.append(crumb)


class ManualAlarm:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class ManualAlarms:
    """Alarms that ring when the clock is advanced here, each at its time."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._count = itertools.count()
        self._set: list[tuple[float, int, ManualAlarm]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> ManualAlarm:
        alarm = ManualAlarm(self._clock.monotonic() + seconds, call)
        heapq.heappush(self._set, (alarm.at, next(self._count), alarm))
        return alarm

    @property
    def pending(self) -> int:
        return sum(alarm.call is not None for _, _, alarm in self._set)

    def advance(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while self._set and self._set[0][0] <= until:
            at, _, alarm = heapq.heappop(self._set)
            self._clock.advance(max(0.0, at - self._clock.monotonic()))
            if alarm.call is not None:
                alarm.call()
        self._clock.advance(until - self._clock.monotonic())
