"""A planner, its subagents and its clients in one process, by lot: who does what when is drawn from one seed."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from anabranch.app.anabranch import Anabranch
from anabranch.app.planner import Planner, StreamStores
from anabranch.configuration.settings import Settings
from anabranch.domain.eventlog import LogLimits
from anabranch.domain.shares import Limit
from anabranch.domain.steps import stream_of
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.operations import RequestLoop
from anabranch.entrypoints.http.planner import PlannerSurface
from anabranch.entrypoints.http.streams import ShutdownEvent
from anabranch.eventlog.memory import MemoryLog
from anabranch.planner.coordinator import Coordinator
from anabranch.planner.services import MemorySessions, PlannerServices, PlannerTime, StepLimits, TelemetryContextStore
from anabranch.policies.cache import MemoryCache
from anabranch.policies.shares import Share
from anabranch.telemetry.log import configured_log
from anabranch.testing import Crumbs, Recorder
from support.manual_time import TimelessLoop, run
from support.simulation_stage import PATIENCE_S, House, ShakyLog, Troupe, Turnstile
from support.stream_clients import Following, page_through
from support.stream_entries import ask
from support.stream_history import FINAL, Event, History, Told, faults
from support.stream_producers import Producer

LEASE_S = 10.0
GOES_ON = ("success", "partial_failure", "failed")


@dataclass
class Drawn:
    """What a seed has drawn for a run."""

    max_events: int
    max_bytes: int
    client_bytes: int
    heartbeat_s: float
    shaky: float
    drain_after_s: float | None
    next_step: bool
    named_later: bool

    @classmethod
    def by(cls, chance: random.Random) -> "Drawn":
        small = chance.random() < 0.45
        return cls(
            max_events=chance.choice((14, 20, 30)) if small else 20_000,
            max_bytes=chance.choice((5_000, 9_000, 2**24)) if small else 2**24,
            client_bytes=chance.choice((200, 600, 1_500, 4_000, 2**20)),
            heartbeat_s=chance.choice((0.2, 3.0, 15.0)),
            shaky=chance.choice((0, 0, 0, 0.03)),
            drain_after_s=chance.uniform(0, 10) if chance.random() < 0.05 else None,
            next_step=not small and chance.random() < 0.35,
            named_later=chance.random() < 0.5,
        )


@dataclass
class Outcome:
    seed: int
    faults: list[str]
    figures: Counter[str] = field(default_factory=Counter)


class Simulation:
    def __init__(self, seed: int, loop: TimelessLoop) -> None:
        self.chance = chance = random.Random(seed)
        self.drawn = drawn = Drawn.by(chance)
        self.told: list[Told] = []
        self.figures: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.telemetry = Recorder()
        self.memory = MemoryLog(
            clock=loop,
            worker="here",
            limits=LogLimits(lease_s=LEASE_S, max_events=drawn.max_events, max_bytes=drawn.max_bytes),
        )
        self.log = ShakyLog(self.memory, chance, drawn.shaky)
        services = PlannerServices(
            log=self.log,
            subagents=Troupe(chance),
            breakers=lambda _: Turnstile(chance),
            telemetry=self.telemetry,
            crumbs=Crumbs(),
            traces=TelemetryContextStore(MemoryCache(100_000, loop), 1_800.0),
            notify=self._notify,
            limits=StepLimits(timeout_s=30.0, retries=2, lease_s=LEASE_S),
            steps=Share(Limit(name="steps", description="planner steps in progress", total=10)),
            time=PlannerTime(clock=loop, wall=lambda: 1_700_000_000 + loop.time()),
        )
        self.coordinator = Coordinator(services)
        self.planner = Planner(
            StreamStores("here", self.log, MemorySessions(loop)),
            self.coordinator,
            ttl_s=1_800.0,
            client_bytes=drawn.client_bytes,
            streaming=True,
        )
        settings = Settings(heartbeat_interval=drawn.heartbeat_s)
        house = cast("Anabranch", House(settings, self.planner))
        access = Access(house)
        surface = PlannerSurface(house, access, ShutdownEvent(), ShutdownEvent())
        self.app = RequestLoop(house, surface.operations(), configured_log(settings), access.claimant, access.actor)

    async def _notify(self, url: str, body: bytes) -> None:
        self.figures["notices"] += 1

    def head(self, step: str) -> int:
        """How far a step's log is."""
        known = self.memory._known(stream_of("s", step))
        return known.tape.head if known is not None else 0

    async def played(self) -> list[str]:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._played()
        except TimeoutError:
            return ["somebody waited for an hour"]

    async def _played(self) -> list[str]:
        chance = self.chance
        steps = ["p", "q"] if self.drawn.next_step else ["p"]
        envelopes = {step: self._envelope(step) for step in steps}
        clients: list[Coroutine[Any, Any, History]] = []
        for step in steps:
            clients += [Following(self, step, f"{step}{number}").follow() for number in range(chance.randrange(1, 5))]
        pagers = [page_through(self, step, f"{step} in pages") for step in steps]
        acting = [self._plan(step, envelopes[step]) for step in steps]
        producing = [
            Producer(self, step, expected, envelopes[step]).produce()
            for step in steps
            for expected in envelopes[step]["expected_subagents"]
            if "input" not in expected
        ]
        draining = [self._drain()] if self.drawn.drain_after_s is not None else []
        seen, paged, _ = await asyncio.gather(
            asyncio.gather(*clients), asyncio.gather(*pagers), asyncio.gather(*acting, *producing, *draining)
        )
        return await self._checked(steps, seen, paged)

    async def _checked(self, steps: list[str], seen: list[History], paged: list[History]) -> list[str]:
        wrong = list(self.complaints)
        own = {step: await self._truth(step) for step in steps}
        for step, pages in zip(steps, paged, strict=True):
            whole = self._whole(step, own)
            everybody = [history for history in seen if history.name.startswith(step)]
            told = [one for one in self.told if one.plan_step_id == step]
            wrong += faults(everybody, whole, told if whole is own[step] else ())
            wrong += faults([pages], own[step], told)
            self.figures["events"] += len(own[step])
            known = {number for history in everybody for number in history.numbers}
            self.figures["left out"] += sum(len(known) - len(history.numbers) for history in everybody)
            self.figures[own[step][-1]["content"]["status"]] += 1
            self.figures["applied"] += sum(len(history.applied) for history in (*everybody, pages))
            self.figures["resets"] += sum(history.resets for history in (*everybody, pages))
        wrong += [repr(error) for error in self.telemetry.crashes]
        await self.planner.drain(0)
        for _ in range(20):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return [*wrong, *(f"left behind: {task!r}" for task in left)]

    async def _truth(self, step: str) -> list[Event]:
        """The whole log, as a client gets it in pages."""
        return [each for each in (await page_through(self, step, "the log")).applied if isinstance(each, dict)]

    def _whole(self, step: str, own: dict[str, list[Event]]) -> list[Event]:
        """What is to be read at a step's address: its own events, and those of the step in which it goes on."""
        final = own[step][-1]
        assert final["type"] == FINAL
        named = final["content"]["payload"].get("next_step_id")
        if step == "q" or named != "q" or final["content"]["status"] not in GOES_ON:
            return own[step]
        return [*own[step], *({**event, "sequence": event["sequence"] + final["sequence"]} for event in own["q"])]

    def _envelope(self, step: str) -> dict[str, Any]:
        chance = self.chance
        keys = chance.sample(("a", "b", "c", "here", "off", "safety"), chance.choice((1, 2, 3, 4)))
        if chance.random() < 0.7:
            keys.append("long")
        expected: list[dict[str, Any]] = []
        for key in keys:
            one: dict[str, Any] = {"key": key}
            if chance.random() < 0.5:
                one["result_key"] = f"{key}-result"
            if key == "here":
                one["input"] = {}
            if chance.random() < 0.2:
                one["deadline_ms"] = chance.choice((1, 300, 2_000, 20_000))
            one["required"] = chance.random() < 0.2
            expected.append(one)
        envelope: dict[str, Any] = {"plan_step_id": step, "expected_subagents": expected}
        if self.drawn.next_step and step == "p" and not self.drawn.named_later:
            envelope["next_step_id"] = "q"
        return envelope

    async def _plan(self, step: str, envelope: dict[str, Any]) -> None:
        """What the planner itself does: it hands the step over, maybe twice, and has its say."""
        chance, path = self.chance, f"/planner/sessions/s/steps/{step}"
        await asyncio.sleep(chance.choice((0, 0.3, 5)) if step == "p" else chance.choice((0, 3, 12)))
        while (await ask(self.app, "POST", "/planner/sessions/s/steps", envelope))[0] == 503:
            self.figures["503 for a step"] += 1
            if self.coordinator._draining:
                self.coordinator._draining = False  # another worker takes it
            await asyncio.sleep(1)
        if self.drawn.next_step and step == "p" and self.drawn.named_later:
            await ask(self.app, "POST", f"{path}/progress", {"next_step_id": "q"})
        for _ in range(chance.choice((0, 2, 40, 80))):
            await asyncio.sleep(chance.choice((0, 0, 0.2)))
            match chance.randrange(200):
                case 0:
                    await ask(self.app, "POST", "/planner/sessions/s/steps", envelope)
                case 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8:
                    await ask(self.app, "POST", f"{path}/safety", {"decision": chance.choice(("allow", "warn"))})
                case 9:
                    await ask(self.app, "POST", f"{path}/safety", {"decision": "block", "reason": "as drawn"})
                case 10:
                    await ask(self.app, "DELETE", path)
                case _:
                    said = {"payload": {"text": "x" * chance.randrange(200)}}
                    if (await ask(self.app, "POST", f"{path}/progress", said))[0] == 200:
                        return  # it has ended

    async def _drain(self) -> None:
        assert self.drawn.drain_after_s is not None
        await asyncio.sleep(self.drawn.drain_after_s)
        self.figures["drains"] += 1
        await self.planner.drain(1.0)


def simulated(seed: int) -> Outcome:
    """One run. The same seed draws the same again."""

    async def played(loop: TimelessLoop) -> Outcome:
        simulation = Simulation(seed, loop)
        found = await simulation.played()
        return Outcome(seed, found, simulation.figures)

    return run(played)
