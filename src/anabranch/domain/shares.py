"""Limits on what callers share, and who holds a part of it."""

import math
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

from anabranch.domain.model import Value


class Claimant(Value):
    """A caller as the limits of shared resources know it: the user of its key or token, else its address. An `operator`
    has a larger share. A `known` one has presented a key or token, or is on this machine. `limits` are those of its
    key, by name."""

    name: str
    operator: bool = False
    known: bool = True
    limits: Mapping[str, float] = {}

    @property
    def weight(self) -> float:
        """What its limits are multiplied by."""
        return OPERATOR_WEIGHT if self.operator else 1.0


OPERATOR_WEIGHT = 4.0
# The callers on this machine without a key, and what runs without a request.
LOCAL = Claimant(name="local", operator=True)

# The caller of the request that runs now; tasks that a request starts inherit it.
claimant: ContextVar[Claimant] = ContextVar("claimant", default=LOCAL)
# Whether the current task waits for earlier requests of its own caller: what it wants to call has not been asked.
waits_for_own: ContextVar[bool] = ContextVar("waits_for_own", default=False)


class Holding(Protocol):
    """Units of a resource that a request holds, or waits for, until `leave`."""

    def leave(self) -> None: ...


class Resource(Protocol):
    """What callers share, each within its limit."""

    def enter(self, units: float = 1.0, caller: Claimant | None = None) -> Holding:
        """Hold units, or wait for them; LimitReached if the caller has its share, Overloaded if all is in use."""
        ...


class ReplyMemory(Protocol):
    """What the current request holds of the replies of its sources and its model."""

    def join(self) -> None: ...

    def leave(self) -> None: ...

    def fits(self, count: int) -> bool:
        """Count bytes of a reply if they are too few to wait for."""
        ...

    async def add(self, count: int) -> None:
        """Count bytes of a reply, after waiting for one's turn; LimitReached or Overloaded if there is no room."""
        ...


# Nothing is counted outside a request.
reply_memory: ContextVar[ReplyMemory | None] = ContextVar("reply_memory", default=None)


class Limit(Value):
    """What one caller may hold at once (`each`, times its weight), and what all may hold together (`total`). `waiting`
    requests of one caller may wait until it holds less, and `queued` requests of all until all hold less. Of the total,
    `reserved` is for callers that are known. A caller with more than `ready` gets more only while the process keeps up.
    With `window_s` it counts what a caller does within that time. `setting` changes `each`, `total_setting` the
    total."""

    name: str
    description: str
    unit: str = ""
    each: float = math.inf
    total: float = math.inf
    waiting: float = 0
    queued: float = 0
    reserved: float = 0
    ready: float = math.inf
    window_s: float = 0
    setting: str = ""
    total_setting: str = ""

    def of(self, caller: Claimant) -> float:
        """What this caller may hold: as its key says, else its share."""
        return caller.limits.get(self.name, self.each * caller.weight)
