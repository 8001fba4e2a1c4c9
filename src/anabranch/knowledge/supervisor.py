"""The supervisor: whoever gets the data folder's lock runs the indexer as a child, and starts it again if it dies."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

# What a process is given when it starts has low numbers.
GIVEN = 64
ELECTION_S = 0.5
RESTART_S = 1.0
STOP_S = 20.0


class Supervisor:
    """The lock is inherited by the child, so that there is never a second one, not even when a parent is killed: the
    child lives until its standard input ends."""

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
            while not _locked(descriptor):  # noqa: ASYNC110  nobody tells when a lock becomes free
                await asyncio.sleep(ELECTION_S)
            while True:
                self._died(await self._child(descriptor))
                await asyncio.sleep(RESTART_S)
        finally:
            os.close(descriptor)

    async def _child(self, descriptor: int) -> int:
        _keep_to_ourselves()
        child = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
            start_new_session=True,  # a Ctrl-C in the terminal is for the parent, who then ends the child in order
        )
        assert child.stdin is not None
        try:
            # One that was killed before it could read: uvloop has an error of its own for that.
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


def _keep_to_ourselves() -> None:
    """A worker was given the port that it serves in a way that its own children would get it, too. They would hold it
    open while the server stops, and whoever came then would wait instead of being refused."""
    for descriptor in range(3, GIVEN):
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
