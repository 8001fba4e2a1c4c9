"""Seeded histories of a coordinator under every fault at once: one end, in order, and nothing left behind."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from anabranch.domain.errors import FailureKind, LeaseLost, NotFound, StreamFull, StreamUnavailable, UpstreamError
from anabranch.domain.eventlog import Entry
from anabranch.domain.signals import StepEnded
from anabranch.domain.steps import Cancel, Decision, Fragment, Progress, Push, Receipt
from anabranch.testing import FakeSubagent
from support.planner_server import STREAM, Workbench, expects, here

KEYS = ("docs", "rows", "voice", "safety")
STATUSES: tuple[Any, ...] = ("pending", "in_progress", "partial", "success", "error")


def script(chance: random.Random) -> list[object]:
    lines: list[object] = []
    for _ in range(chance.randrange(5)):
        payload = msgspec.Raw(msgspec.json.encode({"x": "y" * chance.randrange(200)}))
        lines.append(Fragment(status=chance.choice(STATUSES), payload=payload))
    last: list[object] = [
        Fragment(status="success"),
        UpstreamError("down", FailureKind.DOWN),
        UpstreamError("no"),
        ValueError("a bug"),
        asyncio.CancelledError(),
        "garbage",
        asyncio.Event(),
        Fragment(status="success", verdict="warn"),
    ]
    return [*lines, chance.choice(last)]


def command(chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.9:
        return Push(
            name=chance.choice(KEYS),
            status=chance.choice(STATUSES),
            payload=msgspec.Raw(b'{"n":%d}' % chance.randrange(9)),
            attempt=chance.choice((None, None, 1, 1, 1, 2, 3)),
            revision=chance.choice((None, *range(8))),
        )
    if kind < 0.96:
        return Progress(next_step_id=chance.choice((None, "q")))
    if kind < 0.99:
        return Decision(decision=chance.choice(("allow", "warn", "block")))
    return Cancel()


class Faults:
    """What a log does now and then; never twice in a row for long, or the lease would be gone."""

    def __init__(self, chance: random.Random, lossy: bool) -> None:
        self._chance = chance
        self._lossy = lossy

    def __call__(self, entries: Sequence[Entry]) -> Exception | None:
        kind = self._chance.random()
        if kind < 0.15:
            return StreamUnavailable("gone")
        if kind < 0.25 and entries and not (len(entries) == 1 and entries[0].final):
            return StreamFull("no room")
        if kind < 0.28:
            return OSError("a bug")
        if kind < 0.29 and self._lossy:
            return LeaseLost("another has it")
        return None


async def history(seed: int) -> None:
    chance = random.Random(seed)
    subagents = {key: FakeSubagent(script(chance), script(chance), stubborn=chance.randrange(2)) for key in KEYS}
    bench = Workbench(subagents)
    lossy = chance.random() < 0.2
    expected = [chance.choice((here, expects))(key, deadline_ms=chance.choice((200, 2000, None))) for key in KEYS]
    await bench.begin(*expected, shadow=chance.random() < 0.2, callback_url="https://planner.example/cb")
    bench.log.endless = Faults(chance, lossy)
    bench.log.late = chance.random() < 0.3

    async def caller() -> list[tuple[Any, Receipt | str]]:
        heard: list[tuple[Any, Receipt | str]] = []
        for _ in range(chance.randrange(1, 12)):
            sent = command(chance)
            try:
                heard.append((sent, await bench.take(sent)))
            except (StreamUnavailable, StreamFull, LeaseLost, NotFound) as error:
                heard.append((sent, error.code))
            await asyncio.sleep(0)
        return heard

    async with bench.ticking():
        everything = await asyncio.gather(*(caller() for _ in range(chance.randrange(1, 6))))
        if chance.random() < 0.2:
            await bench.coordinator.drain(0)
        await bench.until(lambda: not len(bench.coordinator._steps))
        bench.coordinator._shadows.clear()
        await bench.until(lambda: bench.idle)
    assert bench.alarms.pending == 0
    assert all(span.ended for span in bench.telemetry.spans)
    assert all(len(turns.left) == turns.entered for turns in bench.turns.values())
    await checked(bench, [each for heard in everything for each in heard], lossy)


async def checked(bench: Workbench, heard: list[tuple[Any, Receipt | str]], lossy: bool) -> None:
    events = await bench.events()
    ends = [event for event in events if event["type"] == "plan_step_completed"]
    stepped = [signal for signal in bench.telemetry.signals if isinstance(signal, StepEnded)]
    if not lossy:
        assert len(ends) == 1
        assert len(stepped) == 1 or bench.log.late
    assert len(ends) <= 1
    assert not ends or events[-1] is ends[0]
    completed = [event["sequence"] for event in events if event["type"] == "step_completed"]
    # A full stream has room for the end only.
    assert completed in ([], [events[-1]["sequence"] - 1])
    assert not completed or events[-1]["content"] == events[-2]["content"]
    latest: dict[tuple[str, str | None], int] = {}
    for event in events:
        key = event["type"], event["content"]["result_key"]
        assert event["content"]["revision"] > latest.get(key, 0)
        latest[key] = event["content"]["revision"]
    by_place = {event["sequence"]: event for event in events}
    for sent, receipt in heard:
        if isinstance(sent, Push) and isinstance(receipt, Receipt):
            if receipt.ignored is None:  # what was acknowledged is there
                event = by_place[receipt.sequence]["content"]
                assert event["payload"] == msgspec.json.decode(sent.payload)
                assert event["status"] == sent.status
            else:
                assert receipt.sequence == 0


@pytest.mark.parametrize("block", range(4))
async def test_random_commands_and_faults_leave_one_end_and_no_tasks(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        try:
            await history(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.soak
async def test_a_thousand_random_runs_leave_one_end_and_no_tasks() -> None:
    for seed in range(1000, 2000):
        try:
            await history(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


async def test_hundreds_of_steps_free_their_memory() -> None:
    bench = Workbench({"docs": FakeSubagent([Fragment(status="success")])})
    for n in range(300):
        stream = f"{STREAM}{n}"
        await bench.begin(here("docs"), expects("rows"), stream=stream)
        await bench.take(Push(name="rows", status="success"), stream)
    await bench.until(lambda: bench.idle)
    assert bench.alarms.pending == 0
    assert len(bench.memory.streams) == 300
    bench.clock.advance(1801)
    bench.memory.tend()
    assert len(bench.memory.streams) == 0
