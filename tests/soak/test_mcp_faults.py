"""A thousand aggregates over real MCP servers while somebody kills, stops and hangs them.

To see a run again: all that it does is drawn from its seed, but not when."""

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

import anabranch.testing.mcp
from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.mcp import AggregatedResponse, Aggregation, AggregatorError, AggregatorQuery, McpServer
from anabranch.sources.mcp import process_guard
from anabranch.sources.mcp.services import McpTiming, PoolServices

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LIBRARIAN = anabranch.testing.mcp.__file__
NODE = Path(sys.executable).parent / "node"
MEMORY = Path(sys.executable).parent.parent / "node" / "node_modules" / ".bin" / "mcp-server-memory"
NAMES = ("ada", "bea", "cyd", "dot", "eve")
CALLS, AT_ONCE, SEED = 1_000, 10, 6
CALL_S, TOTAL_S, SLACK_S = 1.0, 1.5, 1.0
# One query in so many makes the server called `eve` hang, freeze or die; the saboteur sees to the others.
MISCHIEF = ("hang", "freeze", "die", "error", "garbage", "refuse")


def servers(folder: Path) -> dict[str, McpServer]:
    found = {}
    for number, name in enumerate(NAMES):
        mishaps = {word: word for word in MISCHIEF} if name == "eve" else {}
        scenario = {"name": name, "old": number % 2 == 0, "results": 4, "delay_ms": 3 * number, "mishaps": mishaps}
        args = ("-P", LIBRARIAN, "--scenario", json.dumps(scenario))
        found[name] = McpServer(name=name, command=sys.executable, args=args)
    file = folder / "memory.jsonl"
    lines = [
        {"type": "entity", "name": f"entity-{number}", "entityType": "topic", "observations": [question(number)]}
        for number in range(CALLS)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    found["memory"] = McpServer(
        name="memory", command=str(NODE), args=(str(MEMORY),), env={"MEMORY_FILE_PATH": str(file)}
    )
    return found


def question(number: int) -> str:
    return f"what is topic {number} of the delta"


def running() -> list[psutil.Process]:
    """The servers, and what holds them on a leash."""
    return psutil.Process().children(recursive=True)


class Saboteur:
    """Takes a process at random and does something to it."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.figures: Counter[str] = Counter()
        self.most = 0

    async def work(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0.1, 1.5))
            there = running()
            self.most = max(self.most, len(there))
            if there:
                with suppress(psutil.Error):
                    await self._harm(self._chance.choice(there))

    async def _harm(self, victim: psutil.Process) -> None:
        is_leash = process_guard.__file__ in victim.cmdline()
        if is_leash:
            victim.kill()
            self.figures["leashes killed"] += 1
        elif self._chance.random() < 0.5:
            victim.kill()
            self.figures["servers killed"] += 1
        else:
            self.figures["servers stopped"] += 1
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._chance.uniform(0.05, 3.0))
            victim.send_signal(signal.SIGCONT)


class Outing:
    def __init__(self, seed: int) -> None:
        self._chance = random.Random(-seed)
        self.figures: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0

    async def ask(self, ab: Anabranch, number: int) -> None:
        text = question(number)
        if self._chance.random() < 0.03:
            text = f"{text} {self._chance.choice(MISCHIEF)}"
        began = time.monotonic()
        if self._chance.random() < 0.03:
            with suppress(TimeoutError, AggregatorError):
                async with asyncio.timeout(self._chance.uniform(0, 0.1)):
                    await ab.aggregate(text)
            self.figures["given up by their caller"] += 1
            return
        try:
            answer = await ab.aggregate(AggregatorQuery(query_text=text, max_results=100))
        except AggregatorError as error:
            self.figures[error.name] += 1
        else:
            self.figures["answered"] += 1
            self._check(answer, text, number)
        took_s = time.monotonic() - began
        self.longest_s = max(self.longest_s, took_s)
        if took_s > TOTAL_S + SLACK_S:
            self.wrong.append(f"{text}: took {took_s:.2f} s")

    def _check(self, answer: AggregatedResponse, text: str, number: int) -> None:
        for report in answer.metadata.servers:
            self.figures[f"server {report.status}"] += 1
        for result in answer.results:
            name, content = result.server_result.server_name, result.server_result.content
            self.figures["results"] += 1
            if name == "memory":
                good = f"topic {number} of" in content.text or f"entity-{number}" in f"{content.title} {content.text}"
            else:
                good = content.text.startswith(f"{name} on <{text}>")
            if not good:
                self.wrong.append(f"{text}: {name} said {content.text[:80]!r}")


async def sent_out(ab: Anabranch, outing: Outing) -> None:
    numbers, chance = iter(range(CALLS)), random.Random(SEED)

    async def worker() -> None:
        for number in numbers:
            await outing.ask(ab, number)
            await asyncio.sleep(chance.uniform(0, 0.5))

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_servers_that_die_stop_and_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # They come back at once, however often they die: what is looked for here is what that leaves behind.
    services = partial(PoolServices, timing=McpTiming(stable_s=0.5))
    monkeypatch.setattr("anabranch.app.mcp_servers.PoolServices", services)
    settings = Settings(
        data_dir=str(tmp_path / "data"),
        mcp_servers=servers(tmp_path),
        aggregation=Aggregation(server_timeout_s=CALL_S, total_timeout_s=TOTAL_S, dedup_threshold=1.0),
        breaker_calls=1_000_000,  # a breaker would spare them
    )
    async with Anabranch.open(settings=settings) as ab:
        await ab.warm()
        await ab.servers_settled()
        await ab.aggregate("warm up")
    tasks, files = asyncio.all_tasks(), descriptors()
    assert running() == []
    outing, saboteur = Outing(SEED), Saboteur(SEED)
    began = time.monotonic()
    async with Anabranch.open(settings=settings) as ab:
        await ab.warm()
        await ab.servers_settled()
        assert [one.state for one in ab.servers()] == ["ready"] * 6, ab.servers()
        harm = [asyncio.create_task(saboteur.work()) for _ in range(2)]
        try:
            await sent_out(ab, outing)
        finally:
            for one in harm:
                one.cancel()
            await asyncio.wait(harm)
        for stopped in running():
            with suppress(psutil.Error):
                stopped.send_signal(signal.SIGCONT)
        health = ab.servers()
    took_s = time.monotonic() - began
    figures = outing.figures + saboteur.figures + Counter({"reconnects": sum(one.reconnects for one in health)})
    sys.stderr.write(
        f"\n{CALLS} aggregates in {took_s:.0f} s, the longest {outing.longest_s:.2f} s, at most {saboteur.most}"
        f" processes at once (seed {SEED}): {dict(sorted(figures.items()))}\n"
    )
    assert not outing.wrong, outing.wrong[:5]
    assert outing.figures["answered"] > 0.9 * CALLS
    assert figures["servers killed"] > 5
    assert figures["servers stopped"] > 5
    assert figures["reconnects"] > 20
    assert running() == [], "no process is left"
    assert asyncio.all_tasks() == tasks, "no task is left"
    assert descriptors() <= files, "no file or socket is left"
