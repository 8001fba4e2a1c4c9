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
    """The limits of the settings, with what callers hold by them. `counts` counts it for limits without a share,
    `in_records` what an owner has there."""

    def __init__(
        self,
        limits: Mapping[str, Limit],
        shares: Mapping[str, Share],
        counts: Mapping[str, Callable[[Claimant], int]],
        in_records: Callable[[str], Awaitable[Mapping[str, float]]],
    ) -> None:
        self.shares = shares
        self._limits = limits
        self._counts = counts
        self._in_records = in_records

    async def of(self, caller: Claimant, owner: str | None) -> list[LimitUsage]:
        """The limits of a caller, and those on what an owner has in the records; not these without an owner, as for a
        key that must not learn what is in other collections."""
        counted: dict[str, float] = {name: count(caller) for name, count in self._counts.items()}
        if owner is not None:
            absent = dict.fromkeys(self._limits.keys() - self.shares.keys(), 0.0)
            counted = {**absent, **counted, **await self._in_records(owner)}
        shown = self.shares.keys() | counted.keys()
        return [self._usage(limit, caller, counted) for limit in self._limits.values() if limit.name in shown]

    def _usage(self, limit: Limit, caller: Claimant, counted: Mapping[str, float]) -> LimitUsage:
        share, allowed = self.shares.get(limit.name), limit.of(caller)
        used = share.usage(caller) if share is not None else ShareUsage(held=counted.get(limit.name, 0), waiting=0)
        return LimitUsage(limit=limit, allowed=None if math.isinf(allowed) else min(allowed, limit.total), used=used)
