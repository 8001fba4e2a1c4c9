"""Spec 2's AggregationCoordinator: the steps that this worker holds, from their beginning to their one end."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

from anabranch.domain.contracts import Breadcrumbs, Clock, EventLog, Subagents, Telemetry, Turns
from anabranch.domain.errors import Conflict, NotFound, Overloaded, ShuttingDown
from anabranch.domain.model import Context
from anabranch.domain.signals import Ignored
from anabranch.domain.steps import Command, Decision, Directive, Progress, Receipt
from anabranch.planner.callbacks import Callbacks, Notify
from anabranch.planner.encoder import stamp, too_late
from anabranch.planner.shadow import Shadow, Shadows
from anabranch.planner.step_runner import StepRunner
from anabranch.planner.step_writer import Later
from anabranch.planner.step_writer import later as on_the_loop
from anabranch.planner.subagent_task import PlannerServices
from anabranch.planner.traces import TelemetryContextStore

# What is left to write when the grace is over, and what tasks that were cancelled get to clear up.
LAST_WORDS_S = 2.0
CLEARING_S = 1.0
LOST = "The worker was shut down before the step had ended."


class Coordinator:
    """Holds a step only while it goes on. What it has written can be read from the log for as long as that keeps it;
    of a step in shadow mode it also keeps what the comparison needs, until `ttl_s`."""

    def __init__(
        self,
        *,
        log: EventLog,
        subagents: Subagents,
        breakers: Callable[[str], Turns],
        clock: Clock,
        telemetry: Telemetry,
        crumbs: Breadcrumbs,
        traces: TelemetryContextStore,
        notify: Notify,
        timeout_s: float,
        retries: int,
        max_steps: int,
        lease_s: float,
        ttl_s: float = 1800.0,
        wall: Callable[[], float] = time.time,
        later: Later = on_the_loop,
    ) -> None:
        self._tools = PlannerServices(
            log=log,
            subagents=subagents,
            breakers=breakers,
            clock=clock,
            telemetry=telemetry,
            crumbs=crumbs,
            traces=traces,
            later=later,
            wall=wall,
            timeout_s=timeout_s,
            retries=retries,
            lease_s=lease_s,
        )
        self._max_steps = max_steps
        self._notices = Callbacks(notify, crumbs=crumbs, telemetry=telemetry, wall=wall, later=later)
        self._shadows = Shadows(telemetry=telemetry, ttl_s=ttl_s, later=later)
        self._courses: dict[str, StepRunner] = {}
        self._coming: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def __len__(self) -> int:
        """How many steps go on here."""
        return len(self._courses)

    @property
    def empty(self) -> bool:
        """Nothing is left of any step: no task, nothing kept."""
        return not (self._courses or self._tasks or self._shadows)

    def admit(self) -> None:
        """Whether another step can be taken on."""
        self._still_takes()
        if len(self._courses) + len(self._coming) >= self._max_steps:
            raise Overloaded(f"There are {self._max_steps} steps under way, which is as many as may be.")

    @contextmanager
    def place(self, stream: str) -> Iterator[None]:
        """A place for a step, from before its stream is opened: one for whom there is none must leave no stream behind,
        which would be taken for a step that goes on."""
        self.admit()
        self._coming.add(stream)
        try:
            yield
        finally:
            self._coming.discard(stream)

    async def begin(self, stream: str, token: str, directive: Directive, context: Context) -> None:
        """Back when its beginning is written."""
        self._still_takes()
        if stream in self._courses:
            raise Conflict("The step is under way already.")
        self._coming.discard(stream)
        course = StepRunner(stream, token, directive, context, self._tools, over=self._over, spawned=self._spawned)
        self._courses[stream] = course
        self._idle.clear()
        self._spawn(course.store_traces())
        await course.begin()

    def _still_takes(self) -> None:
        if self._draining:
            raise ShuttingDown("The service is shutting down; no new step is taken.")

    def holds(self, stream: str) -> bool:
        return stream in self._courses or stream in self._shadows

    async def take(self, stream: str, command: Command) -> Receipt:
        """What became of it. NotFound if the step is not held here; LeaseLost if it ceases to be meanwhile."""
        if (course := self._courses.get(stream)) is not None:
            return await course.take(command)
        if (shadow := self._shadows.find(stream)) is None:
            raise NotFound("The step is not held here.")
        if isinstance(command, Progress) and command.legacy is not None:
            self._shadows.drop(stream)
            self._spawn(self._shadows.compare(shadow, command.legacy))
            return Receipt(status=shadow.status)
        self.pass_over(shadow.session_id, shadow.plan_step_id, command)
        return Receipt(ignored="ended", status=shadow.status)

    def pass_over(self, session_id: str, plan_step_id: str, command: Command) -> None:
        """Something was sent to a step that has ended: it is recorded, whoever held that step, and not delivered."""
        self._tools.crumbs.drop(too_late(session_id, plan_step_id, command, stamp(self._tools.wall())))
        self._tools.telemetry.noted(Ignored(reason="ended"))

    async def apply_safety_decision(self, stream: str, decision: str, reason: str = "") -> Receipt:
        return await self.take(stream, Decision(decision=decision, reason=reason))

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; give what goes on that time, then end it: its work is lost with this worker."""
        self._draining = True
        await self._settles(grace_s)
        for course in list(self._courses.values()):
            course.lose(LOST)
        await self._settles(LAST_WORDS_S)
        for course in list(self._courses.values()):
            course.stop()
        self._shadows.clear()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLEARING_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLEARING_S)

    async def _settles(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass

    def _over(self, course: StepRunner) -> None:
        self._courses.pop(course.stream, None)
        if not self._courses:
            self._idle.set()
        directive, end = course.directive, course.step.end
        if end is None:
            return
        if end.status == "blocked" and directive.callback_url is not None:
            self._spawn(self._notices.send(directive, end, course.context))
        if course.shadow:
            ids = {"session_id": directive.session_id, "plan_step_id": directive.plan_step_id}
            shadow = Shadow(**ids, status=end.status, results=course.results, subagents=course.subagents)
            if course.legacy is not None:
                self._spawn(self._shadows.compare(shadow, course.legacy))
            elif not self._draining:
                self._shadows.keep(course.stream, shadow)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._spawned(asyncio.get_running_loop().create_task(work))

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
