"""Labels of metrics: so many names have their own, however many strangers make up."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from anabranch.runtime.telemetry import label

T = TypeVar("T")

MAX_NAMES = 100
OTHER = "other"


class Children(dict[str, T], Generic[T]):
    """What is kept for each name. Names come from strangers' requests, and each costs memory here and in Prometheus: so
    many have their own, first come, and all others share one. Those known beforehand have theirs in any case."""

    def __init__(self, make: Callable[[str], T], known: Iterable[str] = ()) -> None:
        super().__init__()
        self._make = make
        self._left = MAX_NAMES
        self._others: T | None = None
        for name in known:
            self[label(name)] = make(label(name))

    def __missing__(self, name: str) -> T:
        short = label(name)
        if short != name:
            return self[short]
        if self._left:
            self._left -= 1
            self[name] = made = self._make(name)
            return made
        if self._others is None:
            self._others = self._make(OTHER)
        return self._others
