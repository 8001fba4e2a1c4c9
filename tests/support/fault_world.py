"""The real servers of a fault scenario, with their Redis, sources, models and clients; and what can happen to them."""

import asyncio
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from anabranch.testing import Space
from support.cutting_proxy import CuttingProxy
from support.fault_clients import Asking, Clients, HistoryFile
from support.fault_sources import Upstreams
from support.metrics_scrape import scrape
from support.server_process import Program, serving
from support.valkey_server import Valkey, running_valkey
from support.worker_fleet import COMPLAINT

CLOCK_SOURCE = Path(__file__).with_name("stepped_clock.c")
SAMPLE_S = 0.25
LEASE_S = 2.0
# Clients have addresses of their own behind a proxy, and may name the sources of this machine.
VARIABLES = {
    "AGGREGATOR_TRUSTED_PROXIES": "127.0.0.1",
    "AGGREGATOR_ENDPOINT_ALLOWLIST_PUBLIC": "true",
    "AGGREGATOR_METRICS_PUBLIC": "true",
    "AGGREGATOR_RETRIEVAL_TIMEOUT": "2",
    "AGGREGATOR_GENERATION_TIMEOUT": "20",
    "AGGREGATOR_STREAM_LEASE": str(LEASE_S),
    "AGGREGATOR_HEARTBEAT_INTERVAL": "1",
    "AGGREGATOR_MODEL_RETRIES": "0",
}


class SteppedClock:
    """The wall clock of processes that are started with `variables`; others keep theirs."""

    def __init__(self, folder: Path) -> None:
        self._seconds = folder / "clock"
        self._library = folder / "stepped_clock.so"
        self.step(0)
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(CLOCK_SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "STEPPED_CLOCK": str(self._seconds)}

    def step(self, seconds: int) -> None:
        # In place: the processes have mapped the file.
        with self._seconds.open("r+b" if self._seconds.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))


class World:
    def __init__(
        self,
        history: HistoryFile,
        clients: Clients,
        upstreams: Upstreams,
        programs: Sequence[Program],
        *,
        valkey: Valkey | None,
        proxy: CuttingProxy | None,
        clock: SteppedClock | None,
    ) -> None:
        self.history = history
        self.clients = clients
        self.upstreams = upstreams
        self.programs = programs
        self._valkey = valkey
        self._proxy = proxy
        self._clock = clock

    @property
    def space(self) -> Space:
        return self.upstreams.space

    @property
    def valkey(self) -> Valkey:
        assert self._valkey is not None
        return self._valkey

    @property
    def redis_proxy(self) -> CuttingProxy:
        assert self._proxy is not None
        return self._proxy

    @property
    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.programs[0].pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def asking(self, *slugs: str, model: str | None = "writer", **more: Any) -> Asking:
        """A question to the good source and others."""
        sources = [self.upstreams.ref(slug) for slug in ("docs", *slugs)]
        return Asking(sources, None if model is None else self.upstreams.writer(model), **more)

    async def metric(self, name: str, at: int = 0, **labels: str) -> float:
        read = await scrape(self.clients.http, self.programs[at].url)
        return sum(sample.value for sample in read.all(name, **labels))

    def step_clock(self, seconds: int) -> None:
        assert self._clock is not None
        self.history.fault(f"clock stepped by {seconds} s")
        self._clock.step(seconds)

    @contextmanager
    def frozen(self, process: psutil.Process) -> Iterator[None]:
        self.history.fault(f"process {process.pid} stopped")
        process.suspend()
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()
            self.history.fault(f"process {process.pid} continued")

    def kill(self, process: psutil.Process) -> None:
        self.history.fault(f"process {process.pid} killed")
        os.kill(process.pid, signal.SIGKILL)

    async def watch_memory(self) -> None:
        while True:
            used = 0
            for program in self.programs:
                with suppress(psutil.NoSuchProcess):
                    for process in program.family():
                        with suppress(psutil.NoSuchProcess):
                            used += process.memory_info().rss
            self.history.record("memory", bytes=used)
            await asyncio.sleep(SAMPLE_S)

    def close(self, folder: Path) -> None:
        """Keep the logs, and count in them what is no warning."""
        lines = [line for program in self.programs for line in program.lines]
        (folder / "servers.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.history.fact("errors_in_the_log", sum(COMPLAINT.search(line) is not None for line in lines))


def tiny_disk(folder: Path, megabytes: int) -> tuple[str, ...]:
    """A wrapper that gives the server a small disk of its own in that folder, which ends with the server."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={megabytes}m tmpfs "{folder}" && exec "$@"'
    return ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")


def cannot_mount() -> str | None:
    """Why there can be no small disk here."""
    command = ("unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        return "no small disk can be mounted in a namespace of its own (unshare, mount)"
    return None


def cannot_compile() -> str | None:
    """Why no clock can be stepped here."""
    return None if shutil.which("cc") is not None else "there is no C compiler for the stepped clock (cc)"


@asynccontextmanager
async def world(
    folder: Path,
    *,
    servers: int = 1,
    workers: int = 1,
    redis: bool | Sequence[str] = False,
    proxied: bool = False,
    stepped: bool = False,
    wrapper: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[World]:
    """Servers that are ready and warm, on one data folder for each. With `redis` they share one, with those options,
    and reach it through a proxy if it is `proxied`. Settings are variables in small letters."""
    history = HistoryFile(folder / "history.jsonl")
    async with AsyncExitStack() as leaving:
        leaving.callback(history.close)
        clock = SteppedClock(folder) if stepped else None
        given = {f"AGGREGATOR_{name.upper()}": str(value) for name, value in (settings or {}).items()}
        variables = {**VARIABLES, **(clock.variables if clock else {}), **given}
        valkey: Valkey | None = None
        proxy: CuttingProxy | None = None
        if redis is not False:
            options = () if redis is True else redis
            changed = clock.variables if clock else None
            valkey = leaving.enter_context(running_valkey(folder, *options, variables=changed))
            variables["AGGREGATOR_REDIS_URL"] = valkey.url
        if proxied and valkey is not None:
            proxy = await leaving.enter_async_context(CuttingProxy(valkey.url))
            variables["AGGREGATOR_REDIS_URL"] = proxy.url.replace("http", "redis")
        upstreams = Upstreams(await leaving.enter_async_context(Space(everything=True)), history)
        upstreams.model("writer", words=8, every_s=0.01)
        upstreams.model("slow-writer", words=30, every_s=0.1)
        homes = [folder / f"server-{number}" for number in range(servers)]
        for home in homes:
            home.mkdir()
        starting = (serving(home=home, workers=workers, variables=variables, wrapper=wrapper) for home in homes)
        programs = await asyncio.gather(*map(leaving.enter_async_context, starting))
        clients = await leaving.enter_async_context(Clients(history, [program.url for program in programs]))
        made = World(history, clients, upstreams, programs, valkey=valkey, proxy=proxy, clock=clock)
        leaving.callback(made.close, folder)
        await clients.many(made.asking(group="warm-up", resumable=redis is not False), 4 * servers * workers)
        watching = asyncio.create_task(made.watch_memory())
        leaving.callback(watching.cancel)
        yield made
