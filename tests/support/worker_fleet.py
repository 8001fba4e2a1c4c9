"""Servers that share a Redis, each behind a proxy that can cut it off, and what can happen to all of them."""

import asyncio
import os
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import psutil

from support.cutting_proxy import CuttingProxy
from support.server_process import READY, Program, serving
from support.valkey_server import Valkey, running_valkey, until

LEASE_S = 1.0
VARIABLES = {
    "AGGREGATOR_STREAM_LEASE": str(LEASE_S),
    "AGGREGATOR_HEARTBEAT_INTERVAL": "0.5",
}
# So that a restarted Redis has what it had.
ON_DISK = ("--appendonly", "yes", "--appendfsync", "always")
CALM_S = LEASE_S + 0.5
# That Redis is gone is a warning, and expected.
COMPLAINT = re.compile(r'"level":"(?:error|critical)"|Traceback|never retrieved|never awaited|was destroyed')


class Fleet:
    """`urls` are those of the servers themselves; `proxies` stand before them."""

    def __init__(self, valkey: Valkey, programs: list[Program], proxies: list[CuttingProxy], *, on_disk: bool) -> None:
        self.valkey = valkey
        self.programs = programs
        self.proxies = proxies
        self.on_disk = on_disk
        self._started = sum(READY in line for line in self._lines)
        self.figures: Counter[str] = Counter()

    @property
    def urls(self) -> list[str]:
        return [program.url for program in self.programs]

    @property
    def complaints(self) -> list[str]:
        """What the servers say went wrong within them."""
        return [line for line in self._lines if COMPLAINT.search(line)]

    async def freeze(self, seconds: float) -> None:
        self.valkey.freeze()
        await asyncio.sleep(seconds)
        self.valkey.thaw()

    async def restart(self, seconds: float) -> None:
        """Once all workers listen: one that starts together with Redis knows nothing of what is being brought back."""
        await self.all_there()
        self.valkey.kill()
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.valkey.start)

    async def all_there(self) -> None:
        await until(lambda: sum(READY in line for line in self._lines) >= self._started)

    @property
    def _lines(self) -> Iterator[str]:
        return (line for program in self.programs for line in program.lines)

    def cut(self) -> None:
        for proxy in self.proxies:
            self.figures["cut connections"] += proxy.cut()

    async def stall(self, seconds: float) -> None:
        for proxy in self.proxies:
            proxy.stall()
        await asyncio.sleep(seconds)
        for proxy in self.proxies:
            proxy.resume()

    @property
    def workers(self) -> list[psutil.Process]:
        found = []
        for program in self.programs:
            for child in psutil.Process(program.pid).children():
                with suppress(psutil.NoSuchProcess):
                    found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
        return found

    async def kill_worker(self, chance: random.Random) -> None:
        """Without a word. Its supervisor starts another."""
        await self.all_there()
        os.kill(chance.choice(self.workers).pid, signal.SIGKILL)
        self._started += 1

    async def pause_worker(self, chance: random.Random, seconds: float) -> None:
        """For longer than its lease, maybe. It wakes up and knows of nothing."""
        pids = [worker.pid for worker in self.workers] or [program.pid for program in self.programs]
        paused = psutil.Process(chance.choice(pids))
        paused.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            paused.resume()

    async def trouble(self, kind: str, chance: random.Random) -> None:
        self.figures[kind] += 1
        match kind:
            case "cut":
                self.cut()
            case "stall":
                await self.stall(chance.uniform(0.1, 1))
            case "blink":
                await self.freeze(0.3)
            case "freeze":
                await self.freeze(chance.choice((0.3, 0.3, 0.6, 0.6, 1.2, 3.0)))
            case "reboot":
                await self.restart(0.0)
            case "restart":
                await self.restart(chance.choice((0.0, 0.3, 1.5)))
            case "pause":
                await self.pause_worker(chance, chance.choice((0.5, 1.2, 2.5)))
            case "worker":
                await self.kill_worker(chance)


def _drawn(seed: int) -> Iterator[int]:
    """After how many bytes each connection is cut by itself; every third one is not."""
    chance = random.Random(seed)
    while True:
        yield chance.choice((chance.randrange(1_000), chance.randrange(10_000), 2**40))


@asynccontextmanager
async def fleet(home: Path, *, workers: tuple[int, ...], on_disk: bool = False) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as leaving:
        valkey = leaving.enter_context(running_valkey(home, *(ON_DISK if on_disk else ())))
        variables = {**VARIABLES, "AGGREGATOR_REDIS_URL": valkey.url}
        programs = [
            await leaving.enter_async_context(serving(home=home, workers=count, variables=variables))
            for count in workers
        ]
        proxies = [
            await leaving.enter_async_context(CuttingProxy(program.url, cut_after=_drawn(number)))
            for number, program in enumerate(programs)
        ]
        made = Fleet(valkey, programs, proxies, on_disk=on_disk)
        try:
            yield made
        finally:
            with suppress(ProcessLookupError, AssertionError):
                valkey.thaw()
