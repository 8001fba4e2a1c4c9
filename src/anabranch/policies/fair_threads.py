"""A thread pool that callers share fairly: they take turns, however much work each of them has."""

import asyncio
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from anabranch.domain.errors import ShuttingDown
from anabranch.domain.shares import Limit
from anabranch.policies.shares import Held, Share

T = TypeVar("T")

# The niceness of threads that compute. On a busy machine they get a third of the processor time of the event loop and
# of the threads that read the records: another caller's requests wait half as long.
COMPUTING_NICENESS = 5


class FairThreads:
    """As many threads as the limit's total. A call waits until it is its caller's turn; a caller with hundreds of calls
    delays another one by a call or two. It has the signature of `asyncio.to_thread`."""

    def __init__(self, limit: Limit, niceness: int = 0) -> None:
        self.share = Share(limit)
        self._pool = ThreadPoolExecutor(
            int(limit.total), thread_name_prefix=limit.name, initializer=_lower_priority, initargs=(niceness,)
        )

    @classmethod
    def of(cls, threads: int, name: str) -> "FairThreads":
        return cls(Limit(name=name, description="calls at once", total=threads, queued=math.inf))

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """The result of `work`, which may still run after a cancellation: until then the thread counts as in use."""
        held = self.share.enter()
        try:
            await held.turn()
            running = self._pool.submit(copy_context().run, work, *args)
        except BaseException as error:
            held.leave()
            if isinstance(error, RuntimeError):  # of a pool that is closed
                raise ShuttingDown("The server is shutting down; ask again in a moment.") from error
            raise
        loop = asyncio.get_running_loop()
        running.add_done_callback(lambda done: _freed(done, held, loop))
        return await asyncio.wrap_future(running)

    def close(self, *, wait: bool = True) -> None:
        """End the threads, after the work that they are doing."""
        self._pool.shutdown(wait=wait)


def _lower_priority(niceness: int) -> None:
    if niceness and sys.platform == "linux":  # where it is the priority of the thread, not of the process
        with suppress(OSError):
            os.nice(niceness)


def _freed(_done: "Future[T]", held: Held, loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(held.leave)
