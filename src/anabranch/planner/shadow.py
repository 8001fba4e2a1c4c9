"""Shadow mode: compares a step's results with the legacy answer and reports where they differ, never the values."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice, zip_longest
from typing import Any, Literal

import msgspec

from anabranch.domain.contracts import Subagent
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Value
from anabranch.domain.signals import ShadowCompared
from anabranch.planner.services import Alarm, PlannerServices

MAX_DIFFERENCES = 50
MAX_PATH = 200


class Difference(Value, gc=False):
    """`missing` is only in the legacy answer, `extra` only in the step's result. The path is a JSON pointer that begins
    with the result key."""

    path: str
    kind: Literal["missing", "extra", "different"]

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


def differences(legacy: Mapping[str, msgspec.Raw], results: Mapping[str, msgspec.Raw]) -> tuple[Difference, ...]:
    """The first differences, in the order of their paths."""
    keys = sorted({*legacy, *results})
    found = (difference for key in keys for difference in _under(key, legacy.get(key), results.get(key)))
    return tuple(islice(found, MAX_DIFFERENCES))


def _under(key: str, old: msgspec.Raw | None, new: msgspec.Raw | None) -> Iterator[Difference]:
    path = _below("", key)
    if old is not None and new is not None and bytes(old) == bytes(new):
        return
    try:
        pair = [ABSENT if one is None else msgspec.json.decode(one) for one in (old, new)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        yield Difference(path=path, kind="different")
        return
    yield from _between(path, *pair)


def _between(path: str, old: Any, new: Any) -> Iterator[Difference]:
    """Depth first and without recursion, since the sender decides the depth."""
    todo: list[tuple[str, Any, Any]] = [(path, old, new)]
    while todo:
        at, left, right = todo.pop()
        if isinstance(left, dict) and isinstance(right, dict):
            below = sorted({*left, *right}, reverse=True)
            todo += [(_below(at, key), left.get(key, ABSENT), right.get(key, ABSENT)) for key in below]
        elif isinstance(left, list) and isinstance(right, list):
            pairs = list(enumerate(zip_longest(left, right, fillvalue=ABSENT)))
            todo += [(_below(at, str(index)), *pair) for index, pair in reversed(pairs)]
        elif left is ABSENT or right is ABSENT:
            yield Difference(path=at, kind="missing" if right is ABSENT else "extra")
        elif isinstance(left, bool) != isinstance(right, bool) or left != right:
            yield Difference(path=at, kind="different")


# None is a JSON value.
ABSENT = object()


def _below(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"[:MAX_PATH]


MAX_BYTES = 64 * 1024 * 1024


class Shadow(Value):
    """The results of an ended step that waits for its legacy answer."""

    session_id: str
    plan_step_id: str
    status: str
    results: Mapping[str, msgspec.Raw]
    subagents: Mapping[str, Subagent] = {}

    @property
    def size(self) -> int:
        return 1024 + sum(len(bytes(payload)) for payload in self.results.values())


class Shadows:
    """Ended steps that wait for their legacy answer, up to 64 MiB; the oldest are dropped first."""

    def __init__(self, services: PlannerServices) -> None:
        self._services = services
        self._kept: OrderedDict[str, tuple[Shadow, Alarm]] = OrderedDict()
        self._bytes = 0

    def __contains__(self, stream: str) -> bool:
        return stream in self._kept

    def keep(self, stream: str, shadow: Shadow) -> None:
        self.drop(stream)
        self._kept[stream] = shadow, self._services.time.later(self._services.limits.ttl_s, lambda: self.drop(stream))
        self._bytes += shadow.size
        while self._bytes > MAX_BYTES:
            self.drop(next(iter(self._kept)))

    def find(self, stream: str) -> Shadow | None:
        return self._kept[stream][0] if stream in self._kept else None

    def drop(self, stream: str) -> None:
        if stream in self._kept:
            shadow, alarm = self._kept.pop(stream)
            self._bytes -= shadow.size
            alarm.cancel()

    def clear(self) -> None:
        for stream in list(self._kept):
            self.drop(stream)

    async def compare(self, shadow: Shadow, legacy: Mapping[str, msgspec.Raw]) -> None:
        """Result by result, so that the event loop is not blocked for all of them."""
        found: list[Difference] = []
        for key in sorted({*legacy, *shadow.results}):
            if len(found) < MAX_DIFFERENCES:
                results = {key: shadow.results[key]} if key in shadow.results else {}
                found += _fewest(key, legacy.get(key), results, shadow.subagents.get(key))
                await asyncio.sleep(0)
        self._services.telemetry.noted(
            ShadowCompared(
                session_id=shadow.session_id,
                plan_step_id=shadow.plan_step_id,
                equal=not found,
                differences=tuple(map(str, found[:MAX_DIFFERENCES])),
            )
        )


def _fewest(
    key: str, old: msgspec.Raw | None, results: Mapping[str, msgspec.Raw], subagent: Subagent | None
) -> tuple[Difference, ...]:
    """The legacy answer may have the form that subagents push, or the one of the stream."""
    found = differences({} if old is None else {key: old}, results)
    if found and old is not None and subagent is not None:
        with suppress(AnabranchError):
            found = min(found, differences({key: subagent.convert(bytes(old), "success").payload}, results), key=len)
    return found
