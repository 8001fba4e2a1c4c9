"""What a caller may hold of everything that callers share, and what it holds now."""

import math
from collections.abc import Awaitable, Callable, Mapping

from anabranch.domain.model import Value
from anabranch.domain.shares import Claimant, Limit
from anabranch.policies.shares import Share, ShareUsage


class LimitUsage(Value):
    """A limit of one caller. `allowed` is None where only all callers together have one."""

    limit: Limit
    allowed: float | None
    used: ShareUsage


class CallerLimits:
    """The limits of the settings, with what callers hold by them. `in_records` counts what
    an owner has there."""

    def __init__(
        self,
        limits: Mapping[str, Limit],
        shares: Mapping[str, Share],
        stream_bytes: Callable[[Claimant], int],
        in_records: Callable[[str], Awaitable[Mapping[str, float]]],
    ) -> None:
        self.shares = shares
        self._limits = limits
        self._stream_bytes = stream_bytes
        self._in_records = in_records

    async def of(self, caller: Claimant, owner: str) -> list[LimitUsage]:
        """The limits of a caller, and of the owner of what it sends."""
        counted = {**await self._in_records(owner), "stream_bytes": self._stream_bytes(caller)}
        return [self._usage(limit, caller, counted) for limit in self._limits.values()]

    def _usage(self, limit: Limit, caller: Claimant, counted: Mapping[str, float]) -> LimitUsage:
        share, allowed = self.shares.get(limit.name), limit.of(caller)
        used = share.usage(caller) if share is not None else ShareUsage(held=counted.get(limit.name, 0), waiting=0)
        return LimitUsage(limit=limit, allowed=None if math.isinf(allowed) else min(allowed, limit.total), used=used)
