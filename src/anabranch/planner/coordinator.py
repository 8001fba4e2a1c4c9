"""Starts, finds and ends the steps of a plan, and delivers their callbacks."""

import asyncio
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress

import msgspec

from anabranch.domain.errors import AnabranchError, Conflict, NotFound, ShuttingDown
from anabranch.domain.events import PlanStepCompleted
from anabranch.domain.model import Context
from anabranch.domain.shares import Holding
from anabranch.domain.signals import EventIgnored
from anabranch.domain.steps import Breadcrumb, Command, Directive, Progress, Receipt, stream_of
from anabranch.planner.encoder import ignored_after_end, stamp
from anabranch.planner.services import PlannerServices
from anabranch.planner.shadow import Shadow, Shadows
from anabranch.planner.step_runner import OpenedStep, StepRunner

TRIES = 3
ERASED = "A document that was found for this step was erased."


class StepDocuments:
    """The documents that were found for the steps of this process, for as long as the steps can be read: `ttl_s` after
    their end."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._found: dict[str, set[str]] = {}
        self._ended: dict[str, float] = {}

    def add(self, directive: Directive, documents: Collection[str]) -> None:
        stream = stream_of(directive.session_id, directive.plan_step_id)
        if documents:
            self._found.setdefault(stream, set()).update(documents)

    def streams(self, documents: Collection[str]) -> list[str]:
        """The streams of the steps for which one of these was found."""
        return [stream for stream, found in self._found.items() if not found.isdisjoint(documents)]

    def drop(self, stream: str) -> None:
        self._found.pop(stream, None)
        self._ended.pop(stream, None)

    def tend(self, running: "Coordinator", now: float) -> None:
        for stream in list(self._found):
            if running.holds(stream):
                self._ended.pop(stream, None)
            elif self._ended.setdefault(stream, now) + self._ttl_s <= now:
                self.drop(stream)


async def send_callback(
    services: PlannerServices, directive: Directive, end: PlanStepCompleted, context: Context
) -> None:
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
            "timestamp": stamp(services.time.wall()),
        }
    )
    attempt, status = 0, "error"
    while status == "error" and attempt < TRIES:
        if attempt:
            await services.time.pause(services.timing.first_callback_s * 2.0 ** (attempt - 1))
        try:
            await services.notify(directive.callback_url, body)
            status = "success"
        except Exception as error:  # noqa: BLE001  the task's boundary: a callback that fails is tried again
            if not isinstance(error, AnabranchError):
                services.telemetry.crashed(error, context)
        attempt += 1
    services.crumbs.drop(
        Breadcrumb(
            session_id=directive.session_id,
            plan_step_id=directive.plan_step_id,
            type="callback",
            timestamp=stamp(services.time.wall()),
            status=status,
            retry_count=attempt - 1,
        )
    )


class Coordinator:
    """Holds a step only while it is in progress. Its events stay readable in the log. The results of a step in shadow
    mode are kept until its legacy answer arrives, for at most `ttl_s`."""

    def __init__(self, services: PlannerServices) -> None:
        self._services = services
        self._shadows = Shadows(services)
        self._steps: dict[str, StepRunner] = {}
        self._held: dict[str, Holding] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @contextmanager
    def reserve(self, stream: str) -> Iterator[None]:
        """Reserve a step before its stream is opened: a step that is refused must leave no stream behind, which would
        look like a step in progress. LimitReached or Overloaded if there are too many."""
        self._require_open()
        held = self._services.steps.enter()
        try:
            yield
        finally:
            if stream in self._steps and stream not in self._held:
                self._held[stream] = held
            else:
                held.leave()

    async def begin(self, stream: str, token: str, directive: Directive, context: Context) -> None:
        """Returns when the start event is written."""
        self._require_open()
        if stream in self._steps:
            raise Conflict("The step is in progress already.")
        opened = OpenedStep(stream=stream, token=token, directive=directive, context=context)
        runner = StepRunner(opened, self._services, on_end=self._step_ended, on_task=self._track)
        self._steps[stream] = runner
        self._idle.clear()
        self._spawn(runner.store_traces())
        await runner.begin()

    def _require_open(self) -> None:
        if self._draining:
            raise ShuttingDown("The server is shutting down; send the step again in a moment.")

    def holds(self, stream: str) -> bool:
        return stream in self._steps or stream in self._shadows

    async def execute(self, stream: str, command: Command) -> Receipt:
        """Apply a command. NotFound if the step is not held here; LeaseLost if this worker loses it meanwhile."""
        if (runner := self._steps.get(stream)) is not None:
            return await runner.handle(command)
        if (shadow := self._shadows.find(stream)) is None:
            raise NotFound("The step is not held here.")
        if isinstance(command, Progress) and command.legacy is not None:
            self._shadows.drop(stream)
            self._spawn(self._shadows.compare(shadow, command.legacy))
            return Receipt(status=shadow.status)
        self.record_ignored(shadow.session_id, shadow.plan_step_id, command)
        return Receipt(ignored="ended", status=shadow.status)

    def record_ignored(self, session_id: str, plan_step_id: str, command: Command) -> None:
        """Record a command that was sent to a step after its end. It has no effect."""
        self._services.crumbs.drop(
            ignored_after_end(session_id, plan_step_id, command, stamp(self._services.time.wall()))
        )
        self._services.telemetry.noted(EventIgnored(reason="ended"))

    async def end_erased(self, stream: str) -> None:
        """End a step, if it is in progress, because a document that was found for it was erased."""
        if (runner := self._steps.get(stream)) is not None:
            with suppress(AnabranchError):  # its stream is dropped, also if its end cannot be written
                await runner.end_erased(ERASED)
        self._shadows.drop(stream)

    async def drain(self, grace_s: float) -> None:
        """Accept no new steps, and end those that are still in progress after `grace_s` as worker_lost."""
        self._draining = True
        await self._wait_idle(grace_s)
        for runner in list(self._steps.values()):
            runner.end_as_lost()
        await self._wait_idle(self._services.timing.last_events_s)
        for runner in list(self._steps.values()):
            runner.stop()
        self._shadows.clear()
        await self._wait_tasks()
        for task in self._tasks:
            task.cancel()
        await self._wait_tasks()

    async def _wait_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def _wait_tasks(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._services.timing.cleanup_s)

    def _step_ended(self, runner: StepRunner) -> None:
        self._steps.pop(runner.stream, None)
        if (held := self._held.pop(runner.stream, None)) is not None:
            held.leave()
        if not self._steps:
            self._idle.set()
        directive, end = runner.directive, runner.step.end
        if end is not None and end.status == "blocked" and directive.callback_url is not None:
            self._spawn(send_callback(self._services, directive, end, runner.context))
        if end is not None and runner.shadow:
            shadow = Shadow(
                session_id=directive.session_id,
                plan_step_id=directive.plan_step_id,
                status=end.status,
                results=runner.results,
                subagents=runner.subagents,
            )
            if runner.legacy is not None:
                self._spawn(self._shadows.compare(shadow, runner.legacy))
            elif not self._draining:
                self._shadows.keep(runner.stream, shadow)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._track(asyncio.get_running_loop().create_task(work))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
