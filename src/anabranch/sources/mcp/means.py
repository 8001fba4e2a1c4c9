"""What the keepers of all servers share, and how long each waits before it tries again."""

from collections.abc import Awaitable, Callable

from anabranch.domain.contracts import Clock, Outbound, Telemetry
from anabranch.domain.model import Value

FIRST_S, LONGEST_S = 0.5, 30.0


class Means(Value):
    """What all members share."""

    outbound: Outbound
    clock: Clock
    telemetry: Telemetry
    max_reply_bytes: int
    sleep: Callable[[float], Awaitable[None]]
    chance: Callable[[], float]


class Waits:
    """None at first, then ever longer ones."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._usual_s = 0.0

    def next_s(self) -> float:
        """A quarter more or less: those who have failed together should not come back together."""
        wait_s = self._usual_s * (0.75 + self._chance() / 2)
        self._usual_s = min(LONGEST_S, self._usual_s * 2 or FIRST_S)
        return wait_s
