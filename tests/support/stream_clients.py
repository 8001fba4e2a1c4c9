"""Clients by lot, with the reference client's parser and cursor: cut in mid byte, slow, late, forgetful, in pages."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from anabranch.client import events
from anabranch.client.connection import MAX_EVENT_BYTES
from anabranch.client.planner import StepCursor
from anabranch.network.sse import Frame, FrameParser
from support.stream_entries import Line, ask, scope_of
from support.stream_history import FINAL, Beat, History, Joined, Reset

if TYPE_CHECKING:
    from support.stream_simulation import Simulation

NOWHERE = 2**40 + 7
MOST_EVENTS = 5


class Following:
    """One client of a step's stream, over SSE or a WebSocket, until the end."""

    def __init__(self, simulation: "Simulation", step: str, name: str) -> None:
        self._simulation = simulation
        self._chance = chance = simulation.chance
        self._step = step
        self._transport = chance.choice(("sse", "sse", "ws"))
        self._cuts = chance.choice((0, 0, 0.3, 0.8))
        self._slow = chance.choice((0, 0.02, 0.1, 0.2))
        self._forgets = chance.choice((0, 0, 0.2))
        self._cursor = StepCursor(NOWHERE if chance.random() < 0.05 else 0)
        self._history = History(f"{name} ({self._transport})")
        self._batches = 0
        self._was_cut = False

    async def follow(self) -> History:
        await asyncio.sleep(self._chance.choice((0, 0, 1, 10, 60)))
        while not self._cursor.over:
            await self._connected()
            await asyncio.sleep(self._chance.choice((0, 0.1, 3)))
            if self._chance.random() < self._forgets and not self._cursor.over:
                self._forget()
        if self._chance.random() < 0.3:
            await self._come_back()
        self._history.finished = True
        return self._history

    def _line(self) -> Line:
        cursor = str(self._cursor.sequence)
        path = f"/planner/sessions/s/steps/{self._step}/{'ws' if self._transport == 'ws' else 'stream'}"
        in_header = self._transport == "sse" and self._chance.random() < 0.5
        headers = {"last-event-id": cursor} if self._cursor.sequence and in_header else {}
        if self._cursor.sequence and not headers:
            path += f"?last_event_id={cursor}"
        scope = scope_of("WS" if self._transport == "ws" else "GET", path, headers)
        return Line(self._simulation.app, scope, room=self._chance.choice((100, 1_000, 20_000)))

    async def _connected(self) -> None:
        """One connection, however it ends."""
        line = self._line()
        status = await line.open()
        self._simulation.figures[f"stream {status}"] += 1
        if status != 200:
            if status not in (404, 503):
                self._complain(f"status {status} with cursor {self._cursor.sequence}")
            await line.close()
            return
        if not self._cursor.sequence:
            self._history.applied.append(Joined(self._simulation.head(self._step)))
        self._batches, self._was_cut = 0, False
        left = self._chance.randrange(3_000) if self._chance.random() < self._cuts else None
        frames = self._messages(line, left) if self._transport == "ws" else self._frames(line, left)
        async for frame in frames:
            if self._cursor.over:
                self._complain(f"something came after the end: {frame}")
            self._take(frame)
        await line.close()
        if not self._was_cut and not self._cursor.over:
            self._simulation.figures["let go"] += 1
        if line.close_code == 1000 and not self._cursor.over and not self._was_cut:
            self._complain("it was closed as if it were over")

    async def _frames(self, line: Line, left: int | None) -> AsyncGenerator[Frame]:
        """Bytes in whatever pieces, until the line is cut or has ended."""
        parser = FrameParser(MAX_EVENT_BYTES)
        while piece := await line.read():
            while piece:
                await self._dawdle()
                size = self._chance.choice((1, 7, 100, 10_000))
                if left is not None:
                    size = min(size, left)
                    left -= size
                for frame in parser.feed(piece[:size]):
                    yield frame
                piece = piece[size:]
                if left == 0:
                    self._cut()
                    return

    async def _messages(self, line: Line, left: int | None) -> AsyncGenerator[Frame]:
        while message := await line.read():
            await self._dawdle()
            if left is not None:
                left -= len(message)
                if left < 0:
                    self._cut()
                    return
            yield Frame(event="message", data=message.decode())

    def _cut(self) -> None:
        self._was_cut = True
        self._simulation.figures["cuts"] += 1

    async def _dawdle(self) -> None:
        if self._chance.random() < self._slow:
            self._simulation.figures["pauses"] += 1
            for _ in range(self._chance.choice((1, 50))):
                await asyncio.sleep(0)
            await asyncio.sleep(self._chance.choice((0, 0.5, 5, 45)))

    def _take(self, frame: Frame) -> None:
        said = json.loads(frame.data)
        if said["type"] == "heartbeat":
            self._history.applied.append(Beat(said["sequence"]))
            self._simulation.figures["heartbeats"] += 1
        if said["type"] == "event_batch":
            self._check_batch(frame, said)
        elif frame.id is not None:
            self._complain(f"a {said['type']} has an id")
        for each in self._cursor.advance(frame):
            reset = isinstance(each, events.Reset)
            self._history.applied.append(Reset(each.sequence) if reset else msgspec.to_builtins(each))

    def _check_batch(self, frame: Frame, said: dict[str, Any]) -> None:
        numbers = [event["sequence"] for event in said["events"]]
        self._batches += 1
        if said["batch_sequence"] != self._batches or not 1 <= len(numbers) <= MOST_EVENTS:
            self._complain(f"batch {said['batch_sequence']} of {len(numbers)} is no {self._batches}")
        if self._transport == "sse" and frame.id != str(numbers[-1]):
            self._complain(f"the id is {frame.id}, the last event {numbers[-1]}")
        if numbers[0] <= self._cursor.sequence or numbers != sorted(set(numbers)):
            self._complain(f"at {self._cursor.sequence}, {numbers} was sent")

    def _forget(self) -> None:
        """It was restarted, and remembers what it had written down some time ago."""
        applied = self._history.applied
        since = max((at for at, each in enumerate(applied) if isinstance(each, Reset)), default=-1) + 1
        kept = self._chance.randrange(since, len(applied) + 1) if applied[since:] else len(applied)
        del applied[kept:]
        numbers = [each["sequence"] for each in applied[since:] if isinstance(each, dict)]
        self._cursor = StepCursor(numbers[-1] if numbers else 0)
        self._simulation.figures["restarts"] += 1

    async def _come_back(self) -> None:
        """After the end, there is nothing more."""
        for _ in range(20):
            line = self._line()
            status = await line.open()
            rest = await line.read()
            await line.close()
            if status == 503 or (self._transport == "ws" and line.close_code == 1013):
                continue
            over = (200, 1000) if self._transport == "ws" else (204, 0)
            if (status, line.close_code) != over or rest:
                self._complain(f"after the end: {status}, {line.close_code}, {rest!r}")
            return

    def _complain(self, what: str) -> None:
        self._simulation.complaints.append(f"{self._history.name}: {what}")


async def page_through(simulation: "Simulation", step: str, name: str) -> History:
    """One that reads by pages until the end."""
    history = History(name)
    chance = simulation.chance
    after, ended = 0, False
    while not ended:
        limit = chance.choice((1, 3, 100))
        path = f"/planner/sessions/s/steps/{step}/events?after={after}&limit={limit}"
        status, page = await ask(simulation.app, "GET", path)
        if status != 200:
            await asyncio.sleep(chance.choice((0.1, 1, 8)))
            continue
        if page["reset"]:
            history.applied.append(Reset(simulation.head(step)))
        elif not after:
            history.applied.append(Joined(simulation.head(step)))
        history.applied += page["events"]
        after = page["next_cursor"]
        ended = bool(page["events"]) and page["events"][-1]["type"] == FINAL
        if not page["has_more"] and not ended:
            await asyncio.sleep(chance.choice((0.1, 1, 8)))
    history.finished = True
    return history
