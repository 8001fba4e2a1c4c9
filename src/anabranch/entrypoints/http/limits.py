"""GET /v1/limits: what the caller may hold, and holds now."""

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from anabranch.app.anabranch import Anabranch
from anabranch.app.caller_limits import LimitUsage
from anabranch.domain.model import Value
from anabranch.domain.shares import claimant
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.operations import Call, Operation
from anabranch.entrypoints.http.v1_operations import operation


class LimitView(Value):
    name: str
    description: str
    unit: Annotated[str, Meta(description="`bytes`, or empty for a number of things")]
    allowed: Annotated[int | None, Meta(description="null where only all callers together have a limit")]
    used: Annotated[int, Meta(description="What this caller holds now, or stores")]
    waiting: Annotated[int, Meta(description="Requests of this caller that wait for their turn")]
    window_s: Annotated[float | None, Meta(description="It counts what the caller does within so many seconds")]
    setting: Annotated[str, Meta(description="The setting that changes it")]


class RateLimitView(Value):
    surface: str
    limit: Annotated[int, Meta(description="Questions in each window")]
    window_s: float


class LimitList(Value):
    limits: list[LimitView]
    rate_limits: list[RateLimitView]


@dataclass(frozen=True)
class LimitsSurface:
    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        return [
            operation(
                *("GET", "/v1/limits", "list_limits", "Your limits, and what you use of them", self._limits, LimitList),
                scope=None,
                identify=self.access.caller,
            )
        ]

    async def _limits(self, call: Call[None]) -> LimitList:
        settings = self.anabranch.settings
        owner = call.caller.owner if call.caller.rights.collections is None else None
        rated = settings.rate_limit_surfaces if settings.rate_limit else ()
        return LimitList(
            limits=[_view(one) for one in await self.anabranch.limits.of(claimant.get(), owner)],
            rate_limits=[
                RateLimitView(surface=one, limit=settings.rate_limit, window_s=settings.rate_limit_window)
                for one in rated
            ],
        )


def _view(one: LimitUsage) -> LimitView:
    limit = one.limit
    return LimitView(
        name=limit.name,
        description=limit.description,
        unit=limit.unit,
        allowed=None if one.allowed is None else round(one.allowed),
        used=round(one.used.held),
        waiting=one.used.waiting,
        window_s=limit.window_s or None,
        setting=limit.setting if one.allowed is not None else limit.total_setting,
    )
