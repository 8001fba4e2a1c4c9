"""Starting and stopping the processes that are measured, and reading what they used."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
import psutil

ROOT = Path(__file__).parents[1]
START_LIMIT_S = 30.0
STOP_LIMIT_S = 3.0

ANABRANCH_ENV = {"AGGREGATOR_ENDPOINT_ALLOWLIST": "127.0.0.0/8", "AGGREGATOR_LOG_FORMAT": "json"}
ANABRANCH = Path(sys.executable).parent / "anabranch"
COMMANDS: dict[str, Callable[[int], list[str]]] = {
    "anabranch": lambda port: anabranch(ANABRANCH, port),
    "floor": lambda port: [sys.executable, "-m", "benchmarks.floor", "--port", str(port)],
    "classic": lambda port: [sys.executable, "-m", "benchmarks.classic", "--port", str(port)],
}
UPSTREAM = [sys.executable, "-m", "anabranch.testing", "--port", "0"]


class ServerError(Exception):
    """A process did not start, or died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running process, listening at `authority` (host:port)."""

    name: str
    authority: str
    process: psutil.Process

    @property
    def url(self) -> str:
        return f"http://{self.authority}"

    def cpu_s(self) -> float:
        """User and system time of the process and its children so far."""
        times = [process.cpu_times() for process in self._family()]
        return sum(each.user + each.system for each in times)

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._family())

    def _family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def on_terminate_as_on_interrupt() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that every started process is stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def anabranch(executable: Path, port: int) -> list[str]:
    return [str(executable), "serve", "--host", "127.0.0.1", "--port", str(port)]


@contextmanager
def serving(name: str, env: Mapping[str, str] | None = None, executable: Path | None = None) -> Iterator[Server]:
    """One of the servers that are compared, ready for requests; `executable` is the `anabranch` of another commit."""
    port = _free_port()
    command = COMMANDS[name](port) if executable is None else anabranch(executable, port)
    with _running(name, command, {**ANABRANCH_ENV, **(env or {})}) as (process, log):
        server = Server(name=name, authority=f"127.0.0.1:{port}", process=process)
        _wait_until(lambda: _healthy(server), name, process, log)
        yield server


@contextmanager
def upstream(*options: str) -> Iterator[Server]:
    """Sources source-1 … source-10 and the model scribe in one process."""
    with _running("upstream", [*UPSTREAM, *options], {}) as (process, log):
        _wait_until(lambda: _announced_url(log) is not None, "upstream", process, log)
        authority = urlsplit(_announced_url(log) or "").netloc
        yield Server(name="upstream", authority=authority, process=process)


@contextmanager
def _running(name: str, command: Sequence[str], env: Mapping[str, str]) -> Iterator[tuple[psutil.Popen, Path]]:
    with TemporaryDirectory(prefix="anabranch-bench-") as folder:
        log = Path(folder) / f"{name}.log"
        with log.open("wb") as output:
            process = psutil.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            _stop(process)


def _stop(process: psutil.Popen) -> None:
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_LIMIT_S)
        for each in alive:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(alive, timeout=STOP_LIMIT_S)


def _wait_until(ready: Callable[[], bool], name: str, process: psutil.Popen, log: Path) -> None:
    give_up_at = time.monotonic() + START_LIMIT_S
    while not ready():
        died = process.poll() is not None
        if died or time.monotonic() > give_up_at:
            what = "ended" if died else f"was not ready within {START_LIMIT_S:.0f} s"
            raise ServerError(f"{name} {what}; the end of its output:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _healthy(server: Server) -> bool:
    try:
        with urlopen(f"{server.url}/health", timeout=1) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def _announced_url(log: Path) -> str | None:
    for line in log.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=dict[str, str]).get("url")
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
