"""Work that is given so much time and then left, but not forgotten."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Longer than any child takes to be ended.
AGAIN_S = 5.0


class BoundedTasks:
    """The SDK takes seconds to give up a call if the server does not even read that it was cancelled: whoever waits for
    the call need not wait for that."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[Any]] = set()

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it in time; TimeoutError if nothing does."""
        task = asyncio.create_task(work)
        self.watch(task)
        try:
            await asyncio.wait({task}, timeout=max(0.0, seconds))
        finally:
            task.cancel()
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise ConnectionError("It was given up.")
        return task.result()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Remember it until it is over."""
        self._under_way.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()

    async def gone(self) -> None:
        """Come back when all of it is over."""
        await ended(*self._under_way)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancelled until they have ended: what the SDK takes for the end of a connection, it does not pass on."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
