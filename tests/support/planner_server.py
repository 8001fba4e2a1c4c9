"""A coordinator with everything around it in memory, and time that passes only when told to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec

from anabranch.domain.contracts import Subagent, Watch
from anabranch.domain.eventlog import Entry, LogLimits, Page
from anabranch.domain.model import Context
from anabranch.domain.shares import Limit
from anabranch.domain.steps import Command, Directive, Expected, Push, Receipt
from anabranch.eventlog.memory import MemoryLog
from anabranch.planner.coordinator import Coordinator
from anabranch.planner.services import PlannerServices, PlannerTime, StepLimits, TelemetryContextStore
from anabranch.policies.cache import MemoryCache
from anabranch.policies.shares import Share
from anabranch.testing import Crumbs, FakeSubagent, FakeSubagents, ManualAlarms, ManualClock, Recorder

STREAM = "step:1:s:p"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-31c8b63d42d203f9-01"


class FaultyLog:
    """A log that fails at its appends as told: with an error instead, or although it has written (`late`)."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.faults: list[Exception | None] = []
        self.endless: Callable[[Sequence[Entry]], Exception | None] = lambda _: None
        self.late = False
        self.appends = 0
        self.epoch = 0

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        return await self.log.open(stream, identity=identity, about=about)

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        self.appends += 1
        await asyncio.sleep(0)
        fault = self.faults.pop(0) if self.faults else self.endless(entries)
        if fault is not None and not self.late:
            raise fault
        sequences = await self.log.append(stream, token, entries)
        if fault is not None:
            raise fault
        return [sequence and sequence + self.epoch * 2**32 for sequence in sequences]

    async def read(self, stream: str, after: int, limit: int) -> Page:
        return await self.log.read(stream, after, limit)

    def watch(self, stream: str) -> AbstractAsyncContextManager[Watch]:
        return self.log.watch(stream)

    async def end_abandoned(self, stream: str, last: Entry) -> bool:
        return await self.log.end_abandoned(stream, last)


class FakeTurns:
    def __init__(self) -> None:
        self.refuses = False
        self.entered = 0
        self.left: list[bool | None] = []

    def enter(self) -> int:
        self.entered += not self.refuses
        return 0 if self.refuses else 1

    def leave(self, turn: int, good: bool | None) -> None:
        assert turn == 1
        self.left.append(good)


class Workbench:
    def __init__(
        self,
        subagents: Mapping[str, Subagent] | None = None,
        *,
        max_bytes: int = 10_000_000,
        steps: int = 100,
        **more: Any,
    ) -> None:
        self.clock = ManualClock(1000.0)
        self.alarms = ManualAlarms(self.clock)
        self.memory = MemoryLog(clock=self.clock, worker="w", limits=LogLimits(lease_s=15, max_bytes=max_bytes))
        self.log = self.faults = FaultyLog(self.memory)
        self.crumbs = Crumbs()
        self.telemetry = Recorder()
        self.turns: dict[str, FakeTurns] = {}
        self.notices: list[tuple[str, dict[str, Any]]] = []
        self.notice_errors: list[Exception] = []
        self.cache = MemoryCache(1_000_000, self.clock)
        self.traces = TelemetryContextStore(self.cache, 1800)
        times: dict[str, Any] = {name: more.pop(name) for name in ("clock", "later", "wall") if name in more}
        usual: dict[str, Any] = {"clock": self.clock, "later": self.alarms.later, "wall": lambda: 1_700_000_000.5}
        limits: dict[str, Any] = {"timeout_s": 30.0, "retries": 2, "lease_s": 15.0, **more}
        services = PlannerServices(
            log=self.log,
            subagents=FakeSubagents({"docs": FakeSubagent(), "rows": FakeSubagent(), **(subagents or {})}),
            breakers=lambda name: self.turns.setdefault(name, FakeTurns()),
            telemetry=self.telemetry,
            crumbs=self.crumbs,
            traces=self.traces,
            notify=self.notify,
            limits=StepLimits(**limits),
            steps=Share(Limit(name="steps", description="planner steps in progress", total=steps)),
            time=PlannerTime(**{**usual, **times}),
        )
        self.coordinator = Coordinator(services)

    @property
    def idle(self) -> bool:
        """No step, no task and no shadow is left."""
        coordinator = self.coordinator
        return not (coordinator._steps or coordinator._tasks or coordinator._shadows._kept)

    async def notify(self, url: str, body: bytes) -> None:
        if self.notice_errors:
            raise self.notice_errors.pop(0)
        self.notices.append((url, msgspec.json.decode(body)))

    async def begin(
        self, *expected: Expected, stream: str = STREAM, context: Context | None = None, **more: Any
    ) -> str:
        directive = Directive(session_id="s", plan_step_id="p", expected=expected, **more)
        token = await self.log.open(stream, identity="user:ada")
        context = context or Context(correlation_id="c", deadline=2000.0, user_id="ada", traceparent=TRACEPARENT)
        await self.coordinator.begin(stream, token, directive, context)
        return token

    async def take(self, command: Command, stream: str = STREAM) -> Receipt:
        return await self.coordinator.execute(stream, command)

    async def push(self, name: str, status: Any, payload: object = None, **more: Any) -> Receipt:
        raw = msgspec.Raw(msgspec.json.encode({} if payload is None else payload))
        return await self.take(Push(name=name, status=status, payload=raw, **more))

    async def until(self, condition: Callable[[], object]) -> None:
        """The loop turns until it is so."""
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came")

    async def advance(self, seconds: float) -> None:
        """Time passes in small steps, and everybody gets to act in between."""
        for _ in range(20):
            self.alarms.advance(seconds / 20)
            for _ in range(5):
                await asyncio.sleep(0)

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Time passes by itself meanwhile, a hundredth of a second whenever everybody has had a turn."""

        async def tick() -> None:
            while True:
                self.alarms.advance(0.01)
                await asyncio.sleep(0)

        task = asyncio.create_task(tick())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def ended(self) -> list[dict[str, Any]]:
        """All events, once nothing is left of the step."""
        await self.until(lambda: self.idle)
        assert self.alarms.pending == 0
        assert all(span.ended for span in self.telemetry.spans)
        assert all(len(turns.left) == turns.entered for turns in self.turns.values())
        events = await self.events()
        assert [event["type"] for event in events].count("plan_step_completed") == 1
        assert events[-1]["type"] == "plan_step_completed"
        return events

    async def events(self, stream: str = STREAM) -> list[dict[str, Any]]:
        page = await self.memory.read(stream, 0, 100_000)
        assert not page.more
        assert all(entry.final == (entry is page.entries[-1] and page.ended) for entry in page.entries)
        return list(self._decoded(page))

    def _decoded(self, page: Page) -> Iterator[dict[str, Any]]:
        for entry in page.entries:
            assert b"\n" not in entry.body
            yield {"sequence": entry.sequence, **msgspec.json.decode(entry.body)}


def expects(key: str, **more: Any) -> Expected:
    return Expected(key=key, result_key=f"{key}_result", **more)


def here(key: str, **more: Any) -> Expected:
    return expects(key, input=msgspec.Raw(b"{}"), **more)


def told(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["type"], event["content"]["status"]) for event in events]
