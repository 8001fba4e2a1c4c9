"""Builds the event log, the planner and resumable answers from the settings."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from anabranch.app.background import background
from anabranch.app.key_use import EVERY_S as USED_EVERY_S
from anabranch.app.knowledge_opener import REFUSED_S, KnowledgeOpener
from anabranch.app.planner import Planner, StreamStores
from anabranch.app.policies import Policies
from anabranch.app.resumable_answers import ResumableAnswers
from anabranch.app.revocations import EVERY_S
from anabranch.app.startup import COLLECTOR_REPLY_BYTES, outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Breadcrumbs, Clock, Emit, Outbound, Telemetry
from anabranch.domain.errors import AnabranchError, UpstreamError, UpstreamTimedOut
from anabranch.domain.eventlog import LogLimits
from anabranch.domain.events import TERMINAL
from anabranch.domain.model import Answer, Context, Endpoint, Question, Value
from anabranch.domain.shares import Claimant
from anabranch.eventlog.memory import MemoryLog
from anabranch.eventlog.reader import StreamReaders
from anabranch.eventlog.redis.store import RedisLogTiming
from anabranch.knowledge.model import Caller
from anabranch.pipeline.run import Run
from anabranch.planner.coordinator import Coordinator, StepDocuments
from anabranch.planner.services import (
    MemorySessions,
    PlannerServices,
    PlannerTime,
    PlannerTiming,
    RedisSessions,
    StepLimits,
    TelemetryContextStore,
)
from anabranch.subagents.documentation import DocumentationSubagent
from anabranch.subagents.kinds import SubagentRegistry
from anabranch.telemetry.breadcrumbs import BreadcrumbFanout, BreadcrumbFile

if TYPE_CHECKING:  # most have no collector
    from anabranch.telemetry.otlp import OtlpBreadcrumbs


class EventStreams(Value):
    """What outlives a request. Both are None where no worker could find another's streams. `forget_ended` drops the
    streams in this process that ended at least so many seconds ago, and returns how many."""

    planner: Planner | None = None
    recordings: ResumableAnswers | None = None
    bytes_held_by: Callable[[Claimant], int] = lambda _: 0
    forget_ended: Callable[[float], int] = lambda _: 0

    async def drain(self, grace_s: float) -> None:
        """Wait for steps in progress for `grace_s`, then end them."""
        if self.planner is not None:
            await self.planner.drain(grace_s)

    async def erase_steps(self, documents: Collection[str]) -> int:
        """End and drop the planner steps of this process for which one of these was found; returns how many."""
        return 0 if self.planner is None else await self.planner.erase(documents)

    async def settled(self) -> None:
        """Wait until the end of every recorded Run is written."""
        if self.recordings is not None:
            await self.recordings.settled()


class Timing(Value):
    """Intervals that no setting changes: of the planner, the log in Redis, callbacks, the checks for revoked keys, for
    sources that another worker has added and for what was erased, and the writing of when keys were used and of what
    was refused. `retry_ms` is when a disconnected client reconnects: a range, as clients lost together must not return
    together."""

    planner: PlannerTiming = PlannerTiming()
    log: RedisLogTiming = RedisLogTiming()
    callback_timeout_s: float = 10.0
    tend_every_s: float = 5.0
    keys_every_s: float = EVERY_S
    key_use_every_s: float = USED_EVERY_S
    sources_every_s: float = 2.0
    erasures_every_s: float = 2.0
    refusals_every_s: float = REFUSED_S
    retry_ms: tuple[int, int] = (1_000, 3_000)


@asynccontextmanager
async def event_streams(
    settings: Settings,
    policies: Policies,
    *,
    outbound: Outbound,
    knowledge: KnowledgeOpener,
    documentation: Question,
    start: Callable[[Question, Context], Run],
    clock: Clock,
    telemetry: Telemetry,
    timing: Timing,
) -> AsyncIterator[EventStreams]:
    if not settings.streams_kept:
        yield EventStreams()
        return
    documents = StepDocuments(settings.stream_ttl)
    subagent = DocumentationSubagent(
        RunAnswerer(start),
        clock,
        template=documentation,
        max_top_k=settings.max_top_k,
        chosen=partial(_chosen, knowledge),
        found=documents.add,
    )
    roster = SubagentRegistry(
        documentation=subagent, outbound=outbound, clock=clock, enabled=settings.planner_subagents
    )
    stores, breadcrumbs = _stores(settings, policies, clock, timing), _breadcrumbs(settings, telemetry)
    async with stores as (kept, tend), breadcrumbs as crumbs:
        services = _services(settings, policies, outbound, kept, roster, crumbs, telemetry, clock, timing)
        readers = StreamReaders(telemetry)
        planner = Planner(
            kept,
            Coordinator(services),
            ttl_s=settings.stream_ttl,
            client_bytes=settings.stream_client_bytes,
            readers=readers,
            documents=documents,
            streaming=settings.planner_streaming,
        )
        if kept.rpc is not None:
            kept.rpc.start(planner.handle)
        recordings = ResumableAnswers(
            kept.log,
            telemetry=telemetry,
            lease_s=settings.stream_lease,
            max_events=settings.stream_events,
            max_bytes=settings.stream_bytes,
            readers=readers,
        )
        async with background(_tend(tend, planner, timing.tend_every_s)):
            yield EventStreams(
                planner=planner,
                recordings=recordings,
                bytes_held_by=kept.bytes_held_by,
                forget_ended=kept.forget_ended,
            )


def _services(
    settings: Settings,
    policies: Policies,
    outbound: Outbound,
    kept: StreamStores,
    subagents: SubagentRegistry,
    crumbs: Breadcrumbs,
    telemetry: Telemetry,
    clock: Clock,
    timing: Timing,
) -> PlannerServices:
    return PlannerServices(
        log=kept.log,
        subagents=subagents,
        breakers=lambda name: policies.resilience.breaker(_named(name)),
        telemetry=telemetry,
        crumbs=crumbs,
        traces=TelemetryContextStore(policies.cache, settings.stream_ttl),
        notify=partial(_send_callback, outbound, timing.callback_timeout_s),
        limits=StepLimits(
            timeout_s=settings.planner_timeout,
            retries=settings.planner_retries,
            lease_s=settings.stream_lease,
            ttl_s=settings.stream_ttl,
        ),
        steps=policies.shares["steps"],
        time=PlannerTime(clock=clock),
        timing=timing.planner,
    )


class RunAnswerer:
    """An Answerer that starts a Run for every question, so that it is counted, bounded and logged like any other."""

    def __init__(self, start: Callable[[Question, Context], Run]) -> None:
        self._start = start

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        run = self._start(question, context)
        async with run.listen() as listener:
            async for event in listener:
                if not isinstance(event, TERMINAL):
                    await emit(event)
            return await run.value()


@asynccontextmanager
async def _stores(
    settings: Settings, policies: Policies, clock: Clock, timing: Timing
) -> AsyncIterator[tuple[StreamStores, Callable[[], None]]]:
    redis, worker = policies.redis, secrets.token_hex(8)
    limits = LogLimits(
        ttl_s=settings.stream_ttl,
        lease_s=settings.stream_lease,
        max_events=settings.stream_events,
        max_bytes=settings.stream_bytes,
        memory_bytes=settings.stream_memory,
        of_caller=policies.limits["stream_bytes"],
    )
    if redis is None or settings.redis_url is None:
        log = MemoryLog(clock=clock, worker=worker, limits=limits)
        sessions = MemorySessions(clock)

        def tend() -> None:
            log.tend()
            sessions.tend()

        yield StreamStores(worker, log, sessions, None, log.streams.held_by, log.forget_ended, log.forget), tend
        return
    from anabranch.eventlog.redis.log import RedisLog  # noqa: PLC0415
    from anabranch.redis.rpc import WorkerRpc  # noqa: PLC0415

    rpc = WorkerRpc(settings.redis_url, redis, worker=worker, clock=clock)
    shared = RedisLog(redis, rpc, worker=worker, clock=clock, limits=limits, timing=timing.log)
    shared.start()
    try:
        held_by, forgetting = shared.streams.held_by, (shared.forget_ended, shared.forget)
        yield StreamStores(worker, shared, RedisSessions(redis), rpc, held_by, *forgetting), shared.tend
    finally:
        await shared.close()
        await rpc.close()


@asynccontextmanager
async def _breadcrumbs(settings: Settings, telemetry: Telemetry) -> AsyncIterator[Breadcrumbs]:
    """The analytics sinks. They have connections of their own, so that a slow collector delays nothing else."""
    async with AsyncExitStack() as leaving:
        sinks: list[BreadcrumbFile | OtlpBreadcrumbs] = []
        if settings.analytics_file is not None:
            sinks.append(BreadcrumbFile(_path(settings.analytics_file), telemetry))
        if settings.analytics_otlp and settings.otlp_endpoint is not None:
            from anabranch.telemetry import otlp  # noqa: PLC0415  most have no collector

            outbound = await leaving.enter_async_context(outbound_for(settings, COLLECTOR_REPLY_BYTES))
            given = otlp.headers(settings.otlp_headers) if settings.otlp_headers else {}
            sinks.append(otlp.OtlpBreadcrumbs(outbound, settings.otlp_endpoint, given, telemetry))
        for sink in sinks:
            sink.start()
            leaving.push_async_callback(sink.close)
        yield BreadcrumbFanout(*sinks)


async def _tend(tend: Callable[[], None], planner: Planner, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        tend()
        with suppress(AnabranchError):  # while Redis is unreachable
            await planner.tend()


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _named(name: str) -> Endpoint:
    """A subagent as an upstream: identified by its full name, shown by its key."""
    _, key, *_ = msgspec.json.decode(name, type=list[str])
    return Endpoint(slug=key, url=name)


async def _chosen(knowledge: KnowledgeOpener, names: Sequence[str], context: Context) -> tuple[str, ...]:
    return tuple(one.id for one in await (await knowledge()).chosen(Caller.of(context), list(names)))


async def _send_callback(outbound: Outbound, timeout_s: float, url: str, body: bytes) -> None:
    """The URL came with a request: the address guard applies to it."""
    headers = {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(timeout_s), outbound.request("POST", url, headers=headers, body=body) as reply:
            await reply.read()
    except TimeoutError as late:
        raise UpstreamTimedOut("The callback was not answered in time.") from late
    if not 200 <= reply.status < 300:
        raise UpstreamError(f"The callback was answered with HTTP {reply.status}.")
