"""One run against real servers: steps, those who feed them and those who follow them, while things happen by lot."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from anabranch.client import Pace, PlannerClient, PlannerEvent
from anabranch.client.planner import Transport
from anabranch.domain.errors import AnabranchError
from support.stream_history import FINAL, Event, History, Reset, Told, faults
from support.worker_fleet import CALM_S, Fleet

PACE = Pace(first_s=0.05, most_s=0.4, patience_s=25.0, heartbeat_s=0.5, connect_s=5.0)
PATIENCE_S = 45.0
# How many parts of a result there are at least, and at most.
ENOUGH, MOST = 5, 200
GOES_ON = ("success", "partial_failure", "failed")
SHAKING = {"blink", "freeze", "reboot", "restart"}
LOSING = {"worker", "pause"}
CUT = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass
class Outing:
    """`troubles` are what happens to the fleet meanwhile, one after the other."""

    fleet: Fleet
    seed: int
    troubles: list[str]
    told: list[Told] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.session_id = f"run {self.seed}"
        self.over = asyncio.Event()
        self.steps = ["p", "q"] if self.chance.random() < 0.3 else ["p"]

    async def run(self) -> list[str]:
        """Everything that cannot be."""
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.http:
            patience = asyncio.timeout(PATIENCE_S)
            try:
                async with patience:
                    return await self._run()
            except TimeoutError:
                if not patience.expired():
                    raise
                return [*self.wrong, f"somebody waited for {PATIENCE_S} s"]

    async def _run(self) -> list[str]:
        chance = self.chance
        await self._begin("p", "q" if len(self.steps) > 1 else None)
        clients = [self._follow("p", number) for number in range(chance.choice((2, 3, 4)))]
        producing = [self._produce("p", key) for key in ("a", "b")]
        seen, _ = await asyncio.gather(
            asyncio.gather(*clients), asyncio.gather(self._step_by_step(), self._suffer(), *producing)
        )
        return await self._checked(seen)

    async def _step_by_step(self) -> None:
        """What the planner does itself: it has its say, may end the step, and begins the next one."""
        chance = self.chance
        for number in range(chance.choice((0, 5))):
            await asyncio.sleep(chance.uniform(0, 0.4))
            await self._posted(f"{self._path('p')}/progress", {"payload": {"number": number}})
        match chance.randrange(10):
            case 0:
                await self._posted(f"{self._path('p')}/safety", {"decision": "block"})
            case 1:
                await self._posted(self._path("p"), method="DELETE")
        if len(self.steps) > 1:
            await self._begin("q", None)
            await asyncio.gather(*(self._produce("q", key) for key in ("a", "b")))

    async def _suffer(self) -> None:
        shaken = False
        for kind in self.troubles:
            await asyncio.sleep(self.chance.uniform(0.05, 0.5))
            if kind in LOSING and shaken:  # what it wrote alone, and nobody else has, would be lost with it
                await asyncio.sleep(CALM_S)
            await self.fleet.trouble(kind, self.chance)
            shaken = shaken or kind in SHAKING
        self.over.set()

    def _path(self, step: str) -> str:
        return f"/planner/sessions/{self.session_id}/steps/{step}"

    async def _begin(self, step: str, following: str | None) -> None:
        expected = [{"key": key, "deadline_ms": 30_000} for key in ("a", "b")]
        envelope = {"plan_step_id": step, "expected_subagents": expected, "next_step_id": following}
        path = f"/planner/sessions/{self.session_id}/steps"
        status, reply = await self._posted(path, envelope)
        if status not in (200, 201):
            self.wrong.append(f"{step} was not begun: {status} {reply}")

    async def _posted(
        self, path: str, body: object = None, method: str = "POST", told: Told | None = None
    ) -> tuple[int, Any]:
        """Sent until there is an answer that says what became of it."""
        while True:
            url = self.chance.choice([*self.fleet.urls, *(proxy.url for proxy in self.fleet.proxies)]) + path
            try:
                async with self.http.request(method, url, json=body) as response:
                    reply = await response.json()
                    if response.status < 500:
                        return response.status, reply
            except CUT:
                pass
            self.figures["sent again"] += 1
            if told is not None:
                told.unsure = True
            await asyncio.sleep(self.chance.uniform(0.05, 0.2))

    async def _produce(self, step: str, key: str) -> None:
        """Parts of a result, now and then twice or in the wrong order, as long as things happen, and then all of it."""
        chance = self.chance
        attempts = chance.choice((1, 1, 2))
        for attempt in range(1, attempts + 1):
            number = 1
            for _ in range(MOST):
                number = max(1, number + chance.choice((1, 1, 1, 1, 0, 2, -1)))
                await self._push(step, key, attempt, number, "partial")
                await asyncio.sleep(chance.choice((0, 0, 0.05, 0.2)))
                if number >= ENOUGH and (self.over.is_set() or attempt < attempts):
                    break
        await self._push(step, key, attempts, 2 * MOST, "success")

    async def _push(self, step: str, key: str, attempt: int, number: int, status: str) -> None:
        mark = f"{self.seed}/{step}/{key}/{attempt}/{number}"
        told = next((one for one in self.told if one.mark == mark), None)
        if told is None:
            told = Told(step, key, (attempt, number), mark)
            self.told.append(told)
        payload = {"mark": mark, "text": "é" * 50}
        body = {"status": status, "payload": payload, "attempt": attempt, "revision": number}
        code, reply = await self._posted(f"{self._path(step)}/subagents/{key}/events", body, told=told)
        self.figures[f"push {code}"] += 1
        if code == 202:
            told.accepted.append(reply["sequence"])
        elif code == 200:
            told.ignored.append(reply["reason"])
        else:
            self.wrong.append(f"{mark}: {code} {reply}")

    async def _follow(self, step: str, number: int) -> History:
        chance = self.chance
        transport: Transport = chance.choice(("sse", "ws"))
        proxied = number == 0 or chance.random() < 0.7
        url = chance.choice([proxy.url for proxy in self.fleet.proxies] if proxied else self.fleet.urls)
        history = History(f"{self.seed}, client {number} ({transport})")
        await asyncio.sleep(chance.choice((0, 0, 0.3, 1)))
        try:
            async with PlannerClient(url, pace=PACE) as client:
                async for said in client.follow(self.session_id, step, transport=transport):
                    if isinstance(said, PlannerEvent):
                        history.applied.append(msgspec.to_builtins(said))
                    else:
                        history.applied.append(Reset(said.sequence))
        except AnabranchError as error:
            self.wrong.append(f"{history.name}: {error!r} at {len(history.applied)}")
        else:
            history.finished = True
        return history

    async def _checked(self, seen: list[History]) -> list[str]:
        own: dict[str, list[Event]] = {}
        for step in self.steps:
            own[step] = await self._truth(step, self.fleet.urls[0])
        again = [
            History(f"{self.seed}, again {url}", [*await self._truth("p", url)], True) for url in self.fleet.urls * 2
        ]
        whole = self._whole(own)
        # What one worker alone had may be lost with it; Redis loses nothing that it was given.
        shaken = not SHAKING.isdisjoint(self.troubles)
        self.wrong += faults(seen, whole)
        self.wrong += faults(again, own["p"])
        for step, events in own.items():
            status = events[-1]["content"]["status"]
            told = [one for one in self.told if one.plan_step_id == step]
            self.wrong += faults([], events, told, losses=shaken and status == "worker_lost")
            if status == "worker_lost" and LOSING.isdisjoint(self.troubles):
                self.wrong.append(f"{self.seed}: {step} ended as worker_lost, and no worker was")
            self.figures[status] += 1
            self.figures["events"] += len(events)
        self.figures["applied"] += sum(len(history.applied) for history in seen)
        self.figures["resets"] += sum(history.resets for history in seen)
        self.figures["clients"] += len(seen)
        return self.wrong

    def _whole(self, own: dict[str, list[Event]]) -> list[Event]:
        final = own["p"][-1]
        named = final["content"]["payload"].get("next_step_id")
        if named != "q" or final["content"]["status"] not in GOES_ON:
            return own["p"]
        return [*own["p"], *({**event, "sequence": event["sequence"] + final["sequence"]} for event in own["q"])]

    async def _truth(self, step: str, url: str) -> list[Event]:
        """The whole log, once it has ended."""
        while True:
            with suppress(*CUT):
                async with self.http.get(f"{url}{self._path(step)}/events?limit=1000") as response:
                    page = await response.json()
                if response.status == 200 and page["events"] and page["events"][-1]["type"] == FINAL:
                    events: list[Event] = page["events"]
                    return events
                if response.status not in (200, 503):
                    self.wrong.append(f"{self.seed}: reading {step} at the end: {response.status} {page}")
            await asyncio.sleep(0.1)
