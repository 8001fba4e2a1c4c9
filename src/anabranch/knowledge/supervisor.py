"""The supervisor: the process that holds the indexer lock runs the indexer as a child and restarts it."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

# Inherited file descriptors have low numbers.
MAX_INHERITED = 64
ELECTION_S = 0.5
RESTART_S = 1.0
STOP_S = 20.0


class Supervisor:
    """The child inherits the lock, so there is never a second indexer, even if the parent is killed: the child runs
    until its standard input ends."""

    def __init__(
        self, folder: Path, command: Sequence[str], greeting: bytes, *, died: Callable[[int], None] = lambda _: None
    ) -> None:
        self._lock = folder / "indexer.lock"
        self._command = command
        self._greeting = greeting
        self._died = died
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Supervisor":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _locked(descriptor):  # noqa: ASYNC110  flock has no notification
                await asyncio.sleep(ELECTION_S)
            while True:
                self._died(await self._child(descriptor))
                await asyncio.sleep(RESTART_S)
        finally:
            os.close(descriptor)

    async def _child(self, descriptor: int) -> int:
        _disable_inheritance()
        child = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
            start_new_session=True,  # Ctrl-C goes to the parent only, which stops the child
        )
        assert child.stdin is not None
        try:
            # The child may be killed before it reads; uvloop raises RuntimeError for that.
            with contextlib.suppress(ConnectionError, RuntimeError):
                child.stdin.write(self._greeting)
                await child.stdin.drain()
            return await child.wait()
        finally:
            child.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                try:
                    async with asyncio.timeout(STOP_S):
                        await child.wait()
                except TimeoutError:
                    child.kill()
                    await child.wait()


def _disable_inheritance() -> None:
    """A worker inherits the listening socket as inheritable, so its children would get it too. They would keep it open
    while the server stops, and new connections would hang instead of being refused."""
    for descriptor in range(3, MAX_INHERITED):
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
