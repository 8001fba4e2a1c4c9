"""Subagents that push by lot: twice, in the wrong order, again with another attempt, too late, and in heaps."""

import asyncio
from typing import TYPE_CHECKING, Any

from support.stream_entries import ask
from support.stream_history import Told

if TYPE_CHECKING:
    from support.stream_simulation import Simulation

STATUSES = ("partial", "partial", "partial", "pending", "in_progress")
AGAIN = 50
ENOUGH = 6


class Producer:
    """One subagent. It keeps what it was told."""

    def __init__(self, simulation: "Simulation", step: str, expected: dict[str, Any], envelope: dict[str, Any]) -> None:
        self._simulation = simulation
        self._chance = simulation.chance
        self._step = step
        self._key: str = expected["key"]
        self._result_key: str = expected.get("result_key", expected["key"])
        self._path = f"/planner/sessions/s/steps/{step}/subagents/{self._key}/events"
        # Whoever says nothing of revisions cannot send anything twice, nor in another order.
        self._counts = self._chance.random() < 0.8
        self._ended = 0

    async def produce(self) -> None:
        chance = self._chance
        await asyncio.sleep(chance.choice((0, 0, 1, 6)))
        sends = self._drawn()
        while sends and self._ended < ENOUGH:
            several = chance.choice((1, 1, 1, 1, 6))
            now, sends = sends[:several], sends[several:]
            await asyncio.sleep(chance.choice((0, 0, 0, 0.01, 0.5, 1.5)))
            if len(now) == 1:
                await self._send(*now[0])
            else:
                await self._send_all(now)

    def _drawn(self) -> list[tuple[Told, dict[str, Any]]]:
        chance = self._chance
        sends: list[tuple[Told, dict[str, Any]]] = []
        for attempt in range(1, chance.choice((1, 1, 1, 2, 4)) + 1):
            count = 40 if self._key == "long" else chance.choice((0, 1, 5, 30))
            for number in range(count + 1):
                status = chance.choice(STATUSES) if number < count else self._last(attempt)
                sends.append(self._fragment(attempt, number + 1, status))
        if not self._counts:
            return sends
        for _ in range(chance.choice((0, 2, 8))):  # twice
            at = chance.randrange(len(sends))
            sends.insert(min(at + chance.randrange(1, 8), len(sends)), sends[at])
        for _ in range(chance.choice((0, 0, 3, 8))):  # in the wrong order
            at = chance.randrange(len(sends))
            other = min(at + chance.randrange(4), len(sends) - 1)
            sends[at], sends[other] = sends[other], sends[at]
        return sends

    def _last(self, attempt: int) -> str:
        ends = (
            ("success", "success", "error") if self._key == "long" or attempt > 2 else ("success", "error", "partial")
        )
        return self._chance.choice(ends)

    def _fragment(self, attempt: int, number: int, status: str) -> tuple[Told, dict[str, Any]]:
        mark = f"{self._step}/{self._result_key}/{attempt}/{number}"
        told = Told(self._step, self._result_key, (attempt, number), mark)
        self._simulation.told.append(told)
        payload: dict[str, Any] = {"mark": mark, "text": "é" * self._chance.choice((0, 10, 10, 300))}
        if self._key == "safety":
            payload["decision"] = self._chance.choice(("allow", *("allow",) * 20, "warn", "block", "perhaps"))
        body = {"status": status, "payload": payload, "attempt": attempt}
        if self._counts:
            body["revision"] = number
        return told, body

    async def _send(self, told: Told, body: dict[str, Any]) -> None:
        for _ in range(AGAIN):
            status, reply = await ask(self._simulation.app, "POST", self._path, body)
            self._simulation.figures[f"push {status}"] += 1
            if status in (200, 202):
                self._heard(told, reply)
                return
            if status == 503:
                told.unsure = True
            if status == 413 or (status == 503 and not self._counts):
                return
            assert status in (404, 503), reply
            await asyncio.sleep(self._chance.choice((0.1, 2)))  # it is not there yet, or out of reach

    async def _send_all(self, sends: list[tuple[Told, dict[str, Any]]]) -> None:
        status, reply = await ask(self._simulation.app, "POST", self._path, [body for _, body in sends])
        if status in (200, 202):
            for (told, _), receipt in zip(sends, reply["results"], strict=True):
                if "error" not in receipt:
                    self._heard(told, receipt)
            return
        for told, body in sends:
            told.unsure = True
            if self._counts:
                await self._send(told, body)

    def _heard(self, told: Told, reply: dict[str, Any]) -> None:
        if reply["accepted"]:
            told.accepted.append(reply["sequence"])
        else:
            told.ignored.append(reply["reason"])
            self._ended += reply["reason"] == "ended"
            self._simulation.figures[f"push {reply['reason']}"] += 1
