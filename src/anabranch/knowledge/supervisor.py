"""The supervisor: the process that holds the indexer lock runs the indexer as a child and restarts it."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

# Inherited file descriptors have low numbers.
MAX_INHERITED = 64
ELECTION_S = 0.5
RESTART_S = 1.0
STOP_S = 20.0


@contextlib.asynccontextmanager
async def supervised(
    folder: Path, command: Sequence[str], first_line: bytes, died: Callable[[int], None]
) -> AsyncIterator[None]:
    """Run the command while this process has the indexer lock. The child inherits the lock, so there is never a second
    indexer, even if the parent is killed: the child runs until its standard input ends."""
    task = asyncio.create_task(_supervise(folder / "indexer.lock", command, first_line, died))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _supervise(lock: Path, command: Sequence[str], first_line: bytes, died: Callable[[int], None]) -> None:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _locked(descriptor):  # noqa: ASYNC110  flock has no notification
            await asyncio.sleep(ELECTION_S)
        while True:
            died(await _run_child(descriptor, command, first_line))
            await asyncio.sleep(RESTART_S)
    finally:
        os.close(descriptor)


async def _run_child(descriptor: int, command: Sequence[str], first_line: bytes) -> int:
    _disable_inheritance()
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        pass_fds=(descriptor,),
        start_new_session=True,  # Ctrl-C goes to the parent only, which stops the child
    )
    assert child.stdin is not None
    try:
        # The child may be killed before it reads; uvloop raises RuntimeError for that.
        with contextlib.suppress(ConnectionError, RuntimeError):
            child.stdin.write(first_line)
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
