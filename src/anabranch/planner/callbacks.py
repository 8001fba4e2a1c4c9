"""Callbacks: notify an orchestrator, at the URL that it gave, that a step was blocked."""

import msgspec

from anabranch.domain.errors import AnabranchError
from anabranch.domain.events import StepCompleted
from anabranch.domain.model import Context
from anabranch.domain.steps import Breadcrumb, Directive
from anabranch.planner.encoder import stamp
from anabranch.planner.services import PlannerServices

TRIES = 3


class Callbacks:
    def __init__(self, services: PlannerServices) -> None:
        self._services = services

    async def send(self, directive: Directive, end: StepCompleted, context: Context) -> None:
        """Tries up to three times, and records a breadcrumb of the result."""
        assert directive.callback_url is not None, "only a step with a callback URL has a callback"
        body = msgspec.json.encode(
            {
                "type": "safety",
                "session_id": directive.session_id,
                "plan_step_id": directive.plan_step_id,
                "decision": "block",
                "reason": end.reason or "",
                "status": end.status,
                "subagents": end.outcomes,
                "timestamp": stamp(self._services.time.wall()),
            }
        )
        for attempt in range(TRIES):
            if attempt:
                await self._services.time.pause(self._services.timing.first_callback_s * 2.0 ** (attempt - 1))
            if await self._sent(directive.callback_url, body, context):
                self._record(directive, "success", attempt)
                return
        self._record(directive, "error", TRIES - 1)

    async def _sent(self, url: str, body: bytes, context: Context) -> bool:
        try:
            await self._services.notify(url, body)
        except AnabranchError:
            return False
        except Exception as error:  # noqa: BLE001  the task's boundary: a callback that fails is tried again
            self._services.telemetry.crashed(error, context)
            return False
        return True

    def _record(self, directive: Directive, status: str, retries: int) -> None:
        self._services.crumbs.drop(
            Breadcrumb(
                session_id=directive.session_id,
                plan_step_id=directive.plan_step_id,
                type="callback",
                timestamp=stamp(self._services.time.wall()),
                status=status,
                retry_count=retries,
            )
        )
