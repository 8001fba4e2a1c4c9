"""What a simulated run is played with: a log, subagents, breakers and a house, each with its moods."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from anabranch.app.caller_limits import CallerLimits
from anabranch.app.event_streams import Timing
from anabranch.app.planner import Planner
from anabranch.app.revocations import Revocations
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import Actor
from anabranch.domain.contracts import Watch
from anabranch.domain.errors import FailureKind, StreamUnavailable, UpstreamError
from anabranch.domain.eventlog import Entry, Page
from anabranch.domain.events import SubagentStatus
from anabranch.domain.model import Context
from anabranch.domain.shares import Limit
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.eventlog.memory import MemoryLog
from anabranch.planner.encoder import raw
from anabranch.policies.shares import Share
from anabranch.subagents.kinds import SafetySubagent
from anabranch.subagents.payloads import CardSubagent

PATIENCE_S = 3_600.0
LIMITS = (
    Limit(name="stream_readers", description="streams that are read at once"),
    Limit(name="response_bytes", description="large replies and responses at once"),
)


class ShakyLog:
    """A log that now and then is out of reach, before anything was written or read."""

    def __init__(self, log: MemoryLog, chance: random.Random, often: float) -> None:
        self._log = log
        self._chance = chance
        self._often = often

    def _shake(self) -> None:
        if self._chance.random() < self._often:
            raise StreamUnavailable("as drawn")

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        return await self._log.open(stream, identity=identity, about=about)

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        for _ in range(self._chance.choice((0, 0, 1, 5))):
            await asyncio.sleep(0)
        self._shake()
        return await self._log.append(stream, token, entries)

    async def read(self, stream: str, after: int, limit: int) -> Page:
        self._shake()
        return await self._log.read(stream, after, limit)

    def watch(self, stream: str) -> AbstractAsyncContextManager[Watch]:
        return self._log.watch(stream)

    async def end_abandoned(self, stream: str, last: Entry) -> bool:
        return await self._log.end_abandoned(stream, last)


class Worker(CardSubagent):
    """One that works here, at its leisure, and fails sometimes."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:
        for number in range(self._chance.randrange(8)):
            await asyncio.sleep(self._chance.choice((0, 0.05, 2)))
            if self._chance.random() < 0.1:
                raise UpstreamError("as drawn", FailureKind.DOWN)
            yield self._fragment("partial", number)
        yield self._fragment(self._chance.choice(("success", "success", "error")), 100)

    def _fragment(self, status: SubagentStatus, number: int) -> Fragment:
        return Fragment(status=status, payload=raw({"number": number}))


class Troupe:
    """The subagents that there are; `off` is switched off."""

    def __init__(self, chance: random.Random) -> None:
        self._here = Worker(chance)

    def find(self, expected: Expected) -> Worker | CardSubagent | SafetySubagent | None:
        if expected.key == "off":
            return None
        if expected.key == "safety":
            return SafetySubagent()
        return self._here if expected.input is not None else CardSubagent()


class Turnstile:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def enter(self) -> int:
        return int(self._chance.random() > 0.03)

    def leave(self, turn: int, good: bool | None) -> None:
        pass


async def _nothing(_: str) -> dict[str, float]:
    return {}


async def _no_keys() -> set[str]:
    return set()


class House:
    """As much of an Anabranch as the planner's surface asks for."""

    def __init__(self, settings: Settings, planner: Planner) -> None:
        self.settings = settings
        self.planner = planner
        self.revocations = Revocations(_no_keys)
        self.refusals: Counter[str] = Counter()
        self.runs = self
        self.limits = CallerLimits({}, {limit.name: Share(limit) for limit in LIMITS}, {}, _nothing)
        self.timing = Timing()

    def rejected(self, surface: str, code: str) -> None:
        self.refusals[code] += 1

    def refused(self, by: Actor, operation: str, code: str) -> None:
        """There is no audit log."""

    def context(self, **given: Any) -> Context:
        return Context(deadline=asyncio.get_running_loop().time() + PATIENCE_S, **given)
