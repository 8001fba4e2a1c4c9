"""Threads that judge the inputs of many calls, within limits."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from anabranch.domain.contracts import Clock, RunInThread, SystemClock
from anabranch.domain.evidence import EvidencePage
from anabranch.policies.fair_threads import FairThreads

# The limits of a call: inputs beyond them are not read, and of a long input only the beginning is.
MAX_INPUTS = 64
MAX_CALL_CHARS = 131_072
MAX_INPUT_CHARS = 4_096

T = TypeVar("T")
Pages = tuple[EvidencePage, ...]


class ReaderThreads:
    """A call has at most `threads` inputs read at once, by `run`: without one, in as many threads of its own."""

    def __init__(self, threads: int, name: str, clock: Clock | None = None, run: RunInThread | None = None) -> None:
        self._threads = threads
        self._own = None
        if run is None:
            self._own = FairThreads.of(threads, name)
            run = self._own.run
        self._run = run
        self._clock = clock or SystemClock()

    async def close(self) -> None:
        """End the threads, after the inputs that they are reading."""
        if self._own is not None:
            await asyncio.to_thread(self._own.close)

    async def each(
        self, judge: Callable[[Pages], T], inputs: Sequence[Pages], until: float | None
    ) -> Sequence[T | None]:
        found: list[T | None] = [None] * len(inputs)
        waiting = enumerate(within_limits(inputs))

        def judged(pages: Pages) -> T | None:
            return judge(pages) if until is None or self._clock.monotonic() < until else None

        async def work() -> None:
            for number, pages in waiting:
                found[number] = await self._run(judged, pages)

        await asyncio.gather(*(work() for _ in range(min(self._threads, len(inputs)))))
        return found


def within_limits(inputs: Sequence[Pages]) -> Iterator[Pages]:
    """The first inputs, as many as the limits of a call allow."""
    left = MAX_CALL_CHARS
    for pages in inputs[:MAX_INPUTS]:
        left -= min(MAX_INPUT_CHARS, sum(len(unit.before) + len(unit.text) for page in pages for unit in page.units))
        if left < 0:
            return
        yield pages
