"""What every step of this worker shares: services, limits, clocks and timing."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from anabranch.domain.contracts import Breadcrumbs, Clock, EventLog, Subagents, Telemetry, Turns
from anabranch.domain.model import Value
from anabranch.planner.traces import TelemetryContextStore


class Alarm(Protocol):
    """A timer that fires once unless it is cancelled."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Alarm]
# Sends a callback to an orchestrator's URL; raises an AnabranchError if that fails.
Notify = Callable[[str, bytes], Awaitable[None]]


def later(seconds: float, call: Callable[[], None]) -> Alarm:
    return asyncio.get_running_loop().call_later(seconds, call)


class PlannerTime(Value):
    """A monotonic clock, the time of day, and timers."""

    clock: Clock
    wall: Callable[[], float] = time.time
    later: Later = later

    def now(self) -> float:
        return self.clock.monotonic()

    async def pause(self, seconds: float) -> None:
        over = asyncio.get_running_loop().create_future()
        alarm = self.later(seconds, lambda: None if over.done() else over.set_result(None))
        try:
            await over
        finally:
            alarm.cancel()


class PlannerTiming(Value):
    """Waits: before a failed write is tried again, before an expired deadline is checked again, before a subagent or a
    callback is tried for the second time, before a task that ignores its cancellation is cancelled again, and at
    shutdown for the last events and for cancelled tasks."""

    rewrite_s: float = 0.2
    recheck_s: float = 1.0
    first_retry_s: float = 0.5
    first_callback_s: float = 0.5
    cancel_again_s: float = 1.0
    last_events_s: float = 2.0
    cleanup_s: float = 1.0


class StepLimits(Value):
    """`timeout_s`: time of a subagent without a deadline of its own. `retries`: of a subagent that is called here.
    `max_steps`: steps in progress in this worker. `lease_s` and `ttl_s`: as in the event log."""

    timeout_s: float
    retries: int
    max_steps: int
    lease_s: float
    ttl_s: float = 1800.0


class PlannerServices(Value):
    log: EventLog
    subagents: Subagents
    breakers: Callable[[str], Turns]
    telemetry: Telemetry
    crumbs: Breadcrumbs
    traces: TelemetryContextStore
    notify: Notify
    limits: StepLimits
    time: PlannerTime
    timing: PlannerTiming = PlannerTiming()
