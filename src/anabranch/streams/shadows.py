"""Steps in shadow mode that have ended and wait for the old way's answer, for a while and within bounds."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from anabranch.domain.contracts import Subagent, Telemetry
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Value
from anabranch.domain.signals import Compared
from anabranch.streams.shadow import MOST, Difference, differences
from anabranch.streams.writer import Alarm, Later

MAX_BYTES = 64 * 1024 * 1024


class Shadow(Value):
    """What a comparison needs."""

    session_id: str
    plan_step_id: str
    status: str
    results: Mapping[str, msgspec.Raw]
    subagents: Mapping[str, Subagent] = {}

    @property
    def size(self) -> int:
        return 1024 + sum(len(bytes(payload)) for payload in self.results.values())


class Shadows:
    """The oldest go first when there are too many."""

    def __init__(self, *, telemetry: Telemetry, ttl_s: float, later: Later) -> None:
        self._telemetry = telemetry
        self._ttl_s = ttl_s
        self._later = later
        self._kept: OrderedDict[str, tuple[Shadow, Alarm]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, stream: str) -> bool:
        return stream in self._kept

    def keep(self, stream: str, shadow: Shadow) -> None:
        self.drop(stream)
        self._kept[stream] = shadow, self._later(self._ttl_s, lambda: self.drop(stream))
        self._bytes += shadow.size
        while self._bytes > MAX_BYTES:
            self.drop(next(iter(self._kept)))

    def find(self, stream: str) -> Shadow | None:
        kept = self._kept.get(stream)
        return None if kept is None else kept[0]

    def drop(self, stream: str) -> None:
        kept = self._kept.pop(stream, None)
        if kept is not None:
            self._bytes -= kept[0].size
            kept[1].cancel()

    def clear(self) -> None:
        for stream in list(self._kept):
            self.drop(stream)

    async def compare(self, shadow: Shadow, legacy: Mapping[str, msgspec.Raw]) -> None:
        """Result by result, so that nobody else has to wait for all of them."""
        found: list[str] = []
        for key in sorted({*legacy, *shadow.results}):
            if len(found) < MOST:
                other = {key: shadow.results[key]} if key in shadow.results else {}
                found += [str(each) for each in _fewest(key, legacy.get(key), other, shadow.subagents.get(key))]
                await asyncio.sleep(0)
        told = tuple(found[:MOST])
        self._telemetry.noted(
            Compared(session_id=shadow.session_id, plan_step_id=shadow.plan_step_id, equal=not told, differences=told)
        )


def _fewest(
    key: str, old: msgspec.Raw | None, results: Mapping[str, msgspec.Raw], subagent: Subagent | None
) -> tuple[Difference, ...]:
    """The old way may have its answer in the form in which subagents push, or in the one that the stream has."""
    if old is None:
        return differences({}, results)
    found = differences({key: old}, results)
    if found and subagent is not None:
        with suppress(AnabranchError):
            found = min(found, differences({key: subagent.taken(bytes(old), "success").payload}, results), key=len)
    return found
