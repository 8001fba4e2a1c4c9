"""What a caller may hold of everything that callers share, and what it holds now."""

import math
from collections.abc import Callable, Mapping

from anabranch.domain.model import Value
from anabranch.domain.shares import Claimant, Limit
from anabranch.policies.shares import Share, ShareUsage


class LimitUsage(Value):
    """A limit of one caller. `allowed` is None where only all callers together have one."""

    limit: Limit
    allowed: float | None
    used: ShareUsage


class CallerLimits:
    """The limits of the settings, with what callers hold by them."""

    def __init__(
        self, limits: Mapping[str, Limit], shares: Mapping[str, Share], stream_bytes: Callable[[Claimant], int]
    ) -> None:
        self.shares = shares
        self._limits = limits
        self._stream_bytes = stream_bytes

    def of(self, caller: Claimant) -> list[LimitUsage]:
        return [self._usage(limit, caller) for limit in self._limits.values()]

    def _usage(self, limit: Limit, caller: Claimant) -> LimitUsage:
        share, allowed = self.shares.get(limit.name), limit.of(caller)
        used = share.usage(caller) if share is not None else ShareUsage(held=self._stream_bytes(caller), waiting=0)
        return LimitUsage(limit=limit, allowed=None if math.isinf(allowed) else min(allowed, limit.total), used=used)
