"""Who holds a part of what callers share."""

from collections.abc import Mapping
from contextvars import ContextVar

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
