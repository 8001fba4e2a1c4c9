"""Streams as the settings want them: the log, the planner's steps, and the answers that can be taken up again."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.outbound import COLLECTOR_REPLY_BYTES, outbound_for
from anabranch.app.planner import Planner
from anabranch.app.policies import Policies
from anabranch.app.resumable_answers import ResumableAnswers
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Breadcrumbs, Clock, Emit, EventLog, Outbound, Sessions, Telemetry
from anabranch.domain.errors import AnabranchError, UpstreamError, UpstreamTimedOut
from anabranch.domain.events import TERMINAL
from anabranch.domain.model import Answer, Context, Endpoint, Question
from anabranch.eventlog.memory import MemoryLog, MemorySessions
from anabranch.eventlog.reader import StreamReaders
from anabranch.knowledge.model import Caller
from anabranch.pipeline.run import Run
from anabranch.planner.coordinator import Coordinator
from anabranch.planner.traces import TelemetryContextStore
from anabranch.subagents.documentation import Chosen, DocumentationSubagent
from anabranch.subagents.registry import SubagentRegistry
from anabranch.telemetry.breadcrumbs import BreadcrumbFanout, BreadcrumbFile, NoBreadcrumbs

if TYPE_CHECKING:  # most have no Redis
    from anabranch.redis.client import Redis
    from anabranch.redis.rpc import WorkerRpc

NOTICE_S = 10.0
JSON = {"Content-Type": "application/json"}
TEND_EVERY_S = 5.0


class EventStreams:
    """What outlives a request. There is neither where no worker could find another's streams."""

    def __init__(self, planner: Planner | None = None, recordings: ResumableAnswers | None = None) -> None:
        self.planner = planner
        self.recordings = recordings

    async def drain(self, grace_s: float) -> None:
        """Give steps some time, then end them: their work ends with this process."""
        if self.planner is not None:
            await self.planner.drain(grace_s)

    async def settled(self) -> None:
        """Every Run is over: its end is written, too."""
        if self.recordings is not None:
            await self.recordings.settled()


class StreamStores(NamedTuple):
    """Where streams are kept, and by whom."""

    worker: str
    log: EventLog
    sessions: Sessions
    post: "WorkerRpc | None"
    tend: Callable[[], None]


@asynccontextmanager
async def event_streams(
    settings: Settings,
    policies: Policies,
    *,
    outbound: Outbound,
    rooms: KnowledgeOpener,
    documentation: Question,
    start: Callable[[Question, Context], Run],
    clock: Clock,
    telemetry: Telemetry,
) -> AsyncIterator[EventStreams]:
    if not settings.streams_kept:
        yield EventStreams()
        return
    subagent = DocumentationSubagent(
        RunAnswerer(start),
        clock,
        template=documentation,
        max_top_k=settings.max_top_k,
        chosen=_chosen(rooms),
    )
    roster = SubagentRegistry(
        documentation=subagent, outbound=outbound, clock=clock, enabled=settings.planner_subagents
    )
    async with _stores(settings, policies.redis, clock) as kept, _breadcrumbs(settings, telemetry) as crumbs:
        coordinator = Coordinator(
            log=kept.log,
            subagents=roster,
            breakers=lambda name: policies.resilience.breaker(_named(name), "subagent"),
            clock=clock,
            telemetry=telemetry,
            crumbs=crumbs,
            traces=TelemetryContextStore(policies.cache, settings.stream_ttl),
            notify=_callback_sender(outbound),
            timeout_s=settings.planner_timeout,
            retries=settings.planner_retries,
            max_steps=settings.planner_steps,
            lease_s=settings.stream_lease,
            ttl_s=settings.stream_ttl,
        )
        readers = StreamReaders(telemetry)
        planner = _planner(settings, kept, coordinator, readers)
        recordings = ResumableAnswers(
            kept.log,
            telemetry=telemetry,
            lease_s=settings.stream_lease,
            max_events=settings.stream_events,
            max_bytes=settings.stream_bytes,
            readers=readers,
        )
        async with _maintained(kept, planner):
            yield EventStreams(planner, recordings)


def _planner(settings: Settings, kept: StreamStores, coordinator: Coordinator, readers: StreamReaders) -> Planner:
    planner = Planner(
        log=kept.log,
        sessions=kept.sessions,
        coordinator=coordinator,
        worker=kept.worker,
        post=kept.post,
        ttl_s=settings.stream_ttl,
        client_bytes=settings.stream_client_bytes,
        readers=readers,
        streaming=settings.planner_streaming,
    )
    if kept.post is not None:
        kept.post.start(planner.letter)
    return planner


class RunAnswerer:
    """An Answerer whose every question is a Run of its own: counted, bounded and told like any other."""

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
async def _stores(settings: Settings, redis: "Redis | None", clock: Clock) -> AsyncIterator[StreamStores]:
    worker = secrets.token_hex(8)
    if redis is None or settings.redis_url is None:
        log = MemoryLog(
            clock=clock,
            worker=worker,
            ttl_s=settings.stream_ttl,
            lease_s=settings.stream_lease,
            max_events=settings.stream_events,
            max_bytes=settings.stream_bytes,
            memory_bytes=settings.stream_memory,
        )
        sessions = MemorySessions(clock)

        def tend() -> None:
            log.tend()
            sessions.tend()

        yield StreamStores(worker, log, sessions, None, tend)
        return
    from anabranch.eventlog.redis.log import RedisLog  # noqa: PLC0415
    from anabranch.planner.sessions import RedisSessions  # noqa: PLC0415
    from anabranch.redis.rpc import WorkerRpc  # noqa: PLC0415

    post = WorkerRpc(settings.redis_url, redis, worker=worker, clock=clock)
    shared = RedisLog(
        redis,
        post,
        worker=worker,
        clock=clock,
        ttl_s=settings.stream_ttl,
        lease_s=settings.stream_lease,
        max_events=settings.stream_events,
        max_bytes=settings.stream_bytes,
        memory_bytes=settings.stream_memory,
    )
    shared.start()
    try:
        yield StreamStores(worker, shared, RedisSessions(redis), post, shared.tend)
    finally:
        await shared.close()
        await post.close()


@asynccontextmanager
async def _breadcrumbs(settings: Settings, telemetry: Telemetry) -> AsyncIterator[Breadcrumbs]:
    """The analytics sinks. Crumbs leave by connections of their own: a collector that hangs holds up nothing else."""
    async with AsyncExitStack() as leaving:
        sinks: list[Breadcrumbs] = []
        if settings.analytics_file is not None:
            lines = BreadcrumbFile(_path(settings.analytics_file), telemetry)
            lines.start()
            leaving.push_async_callback(lines.close)
            sinks.append(lines)
        if settings.analytics_otlp and settings.otlp_endpoint is not None:
            from anabranch.telemetry.otlp_events import OtlpBreadcrumbs  # noqa: PLC0415  most have no collector
            from anabranch.telemetry.traces import headers  # noqa: PLC0415

            outbound = await leaving.enter_async_context(outbound_for(settings, COLLECTOR_REPLY_BYTES))
            given = headers(settings.otlp_headers) if settings.otlp_headers else {}
            logs = OtlpBreadcrumbs(outbound, settings.otlp_endpoint, given, telemetry)
            logs.start()
            leaving.push_async_callback(logs.close)
            sinks.append(logs)
        yield BreadcrumbFanout(*sinks) if sinks else NoBreadcrumbs()


@asynccontextmanager
async def _maintained(kept: StreamStores, planner: Planner) -> AsyncIterator[None]:
    async def tending() -> None:
        while True:
            await asyncio.sleep(TEND_EVERY_S)
            kept.tend()
            with suppress(AnabranchError):  # while Redis is gone
                await planner.tend()

    task = asyncio.create_task(tending())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _named(name: str) -> Endpoint:
    """A subagent as an upstream: told apart by all of its name, shown by its key alone."""
    _, key, *_ = msgspec.json.decode(name, type=list[str])
    return Endpoint(slug=key, url=name)


def _chosen(rooms: KnowledgeOpener) -> Chosen:
    async def chosen(names: Sequence[str], context: Context) -> tuple[str, ...]:
        room = await rooms()
        return tuple(one.id for one in await room.chosen(Caller.of(context), list(names)))

    return chosen


def _callback_sender(outbound: Outbound) -> Callable[[str, bytes], Awaitable[None]]:
    async def notify(url: str, body: bytes) -> None:
        """Tell an orchestrator, whose address came with a request: it is guarded like any other."""
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(NOTICE_S), outbound.request("POST", url, headers=headers, body=body) as reply:
                await reply.read()
        except TimeoutError as late:
            raise UpstreamTimedOut("The callback was not answered in time.") from late
        if not 200 <= reply.status < 300:
            raise UpstreamError(f"The callback was answered with HTTP {reply.status}.")

    return notify
