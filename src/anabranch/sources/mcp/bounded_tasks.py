"""Tasks with a time limit that may outlast it, but are still awaited at the end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Longer than it takes to end any child process.
CANCEL_AGAIN_S = 5.0


class BoundedTasks:
    """The SDK takes seconds to end a call if the server does not read its cancellation. The caller does not wait for
    that; `wait_done` does."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run_within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work; TimeoutError if it takes longer."""
        task = asyncio.create_task(work)
        self.watch(task)
        try:
            await asyncio.wait({task}, timeout=max(0.0, seconds))
        finally:
            task.cancel()
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise ConnectionError("The call was cancelled.")
        return task.result()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Keep the task until it is done."""
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

    async def wait_done(self) -> None:
        """Wait until all tasks are done."""
        await cancel_until_done(*self._running)


async def cancel_until_done(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks until they are done: the SDK may swallow a cancellation at the end of a connection."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
