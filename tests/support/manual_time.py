"""An event loop in which waiting takes no time: when everybody waits, it is at once as late as the first one wants."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(Exception):
    """Everybody waits, and nobody for a time: it would be for ever."""


class Leaps(selectors.SelectSelector):
    """Nothing comes from outside, so instead of waiting it says how long it would have waited."""

    def __init__(self, leap: Callable[[float], None]) -> None:
        super().__init__()
        self._leap = leap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck
        if timeout > 0:
            self._leap(timeout)
        return []


class TimelessLoop(asyncio.SelectorEventLoop):
    """Its time is also a Clock's."""

    def __init__(self) -> None:
        self._now = 1_000.0
        super().__init__(Leaps(self._leap))

    def time(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def _leap(self, seconds: float) -> None:
        self._now += seconds


def run(work: Callable[[TimelessLoop], Coroutine[Any, Any, T]]) -> T:
    loop = TimelessLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work(loop))
