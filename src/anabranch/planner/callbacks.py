"""Telling an orchestrator that a step was blocked, at the address that it gave, without anybody waiting for it."""

from collections.abc import Awaitable, Callable

import msgspec

from anabranch.domain.contracts import Breadcrumbs, Telemetry
from anabranch.domain.errors import AnabranchError
from anabranch.domain.events import StepCompleted
from anabranch.domain.model import Context
from anabranch.domain.steps import Breadcrumb, Directive
from anabranch.planner.encoder import stamp
from anabranch.planner.step_writer import Later
from anabranch.planner.subagent_task import pause

TRIES = 3
CALLBACK_FIRST_WAIT_S = 0.5

Notify = Callable[[str, bytes], Awaitable[None]]


class Callbacks:
    def __init__(
        self, notify: Notify, *, crumbs: Breadcrumbs, telemetry: Telemetry, wall: Callable[[], float], later: Later
    ) -> None:
        self._notify = notify
        self._crumbs = crumbs
        self._telemetry = telemetry
        self._wall = wall
        self._later = later

    async def send(self, directive: Directive, end: StepCompleted, context: Context) -> None:
        """Up to three times; a breadcrumb says how it went."""
        assert directive.callback_url is not None, "somebody must have asked to be told"
        body = msgspec.json.encode(
            {
                "type": "safety",
                "session_id": directive.session_id,
                "plan_step_id": directive.plan_step_id,
                "decision": "block",
                "reason": end.reason or "",
                "status": end.status,
                "subagents": end.outcomes,
                "timestamp": stamp(self._wall()),
            }
        )
        for attempt in range(TRIES):
            if attempt:
                await pause(CALLBACK_FIRST_WAIT_S * 2.0 ** (attempt - 1), self._later)
            if await self._sent(directive.callback_url, body, context):
                self._tell(directive, "success", attempt)
                return
        self._tell(directive, "error", TRIES - 1)

    async def _sent(self, url: str, body: bytes, context: Context) -> bool:
        try:
            await self._notify(url, body)
        except AnabranchError:
            return False
        except Exception as error:  # noqa: BLE001  the task's boundary: a notice that fails is tried again
            self._telemetry.crashed(error, context)
            return False
        return True

    def _tell(self, directive: Directive, status: str, retries: int) -> None:
        self._crumbs.drop(
            Breadcrumb(
                session_id=directive.session_id,
                plan_step_id=directive.plan_step_id,
                type="callback",
                timestamp=stamp(self._wall()),
                status=status,
                retry_count=retries,
            )
        )
