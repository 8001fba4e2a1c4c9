"""The composition root: constructs every part of a running Anabranch from its settings."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from anabranch.app.aggregator import Aggregator
from anabranch.app.background import background
from anabranch.app.caller_limits import CallerLimits
from anabranch.app.endpoint_catalog import AddedSourcesStore, EndpointCatalog, SourcesInFile, SourcesInRecords
from anabranch.app.endpoint_resolver import EndpointDirectory, EndpointResolver
from anabranch.app.erasure import ErasurePass, ErasureStore, erase_memory
from anabranch.app.event_streams import EventStreams, Timing, event_streams
from anabranch.app.key_use import KeyUse
from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.mcp_servers import McpServers
from anabranch.app.policies import Policies
from anabranch.app.publishing import Publishing
from anabranch.app.query_log import QueryLog
from anabranch.app.questions import Questions
from anabranch.app.readiness import Readiness
from anabranch.app.recording_folder import RecordingFolder
from anabranch.app.records import folder_of
from anabranch.app.refusals import Refusals
from anabranch.app.revocations import Revocations
from anabranch.app.runs import Runs
from anabranch.app.source_check import SourceCheck
from anabranch.app.source_listing import SourceListing
from anabranch.app.startup import outbound_for
from anabranch.configuration.added_sources import AddedSourcesFile
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Clock, Directory, Outbound, RunInThread, SystemClock, Telemetry
from anabranch.domain.evidence import ClaimChecker, Evidence
from anabranch.domain.model import UncheckedReason
from anabranch.knowledge.durable_files import replace_file
from anabranch.models.factory import claims_for, evidence_for, verifier_for
from anabranch.network.hub import HubClient
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.prompt import Compaction
from anabranch.policies.observed_calls import Observer

if TYPE_CHECKING:
    from anabranch.app.recording import RunRecorder
    from anabranch.evidence.judge import Judge
    from anabranch.network.hub_tokens import HubTokens
    from anabranch.pipeline.verify import Verifier


def build_pipeline(
    settings: Settings,
    directory: Directory,
    clock: Clock,
    telemetry: Telemetry,
    evidence: Evidence | None = None,
    judge: "Callable[[], Judge] | None" = None,
    claims: ClaimChecker | None = None,
    *,
    run: RunInThread = asyncio.to_thread,
    measured: bool = False,
) -> Pipeline:
    """The pipeline, which reads long texts with `run`; `measured`: the stages of answers are timed, which needs more
    readings of the clock than recordings have."""
    return Pipeline(
        directory=directory,
        clock=clock,
        telemetry=telemetry,
        limits=Limits(
            retrieval_timeout_s=settings.retrieval_timeout,
            generation_timeout_s=settings.generation_timeout,
            context_tokens=settings.max_context_tokens,
            query_context_tokens=settings.query_context_tokens,
        ),
        compaction=_compaction(settings, evidence, run),
        judge=judge,
        verifier=cache(partial(_verifier, settings, claims, clock, run)) if claims is not None else None,
        measured=measured,
        run=run,
    )


def _verifier(settings: Settings, claims: ClaimChecker, clock: Clock, run: RunInThread) -> "Verifier":
    from anabranch.pipeline.verify import Verifier  # noqa: PLC0415  chat does not need it

    reason: UncheckedReason = "off" if settings.verify == "off" else "unavailable"
    return Verifier(claims, clock, minimum=settings.min_faithfulness, reason=reason, run=run)


def judge_for(settings: Settings, evidence: Evidence, run: RunInThread = asyncio.to_thread) -> "Callable[[], Judge]":
    """The judge, which is constructed when it is first needed."""
    return cache(partial(_judge, settings, evidence, run))


def _judge(settings: Settings, evidence: Evidence, run: RunInThread) -> "Judge":
    from anabranch.evidence.judge import Judge  # noqa: PLC0415  most commands do not answer

    return Judge(evidence, settings.evidence_passages, run)


def _compaction(settings: Settings, evidence: Evidence | None, run: RunInThread) -> Compaction | None:
    if settings.context == "full":
        return None
    from anabranch.pipeline.compact import Compactor  # noqa: PLC0415  most processes do not need it

    return Compaction(settings.compact_tokens, Compactor(evidence, settings.evidence_passages, run).choose)


class Role(NamedTuple):
    """What a process does with its Anabranch besides answering; the arguments of `Anabranch.open`."""

    indexing: bool
    indexer_died: Callable[[int], None]
    streaming: bool
    surface: str
    log_queries: bool
    timing: Timing
    index_damaged: Callable[[str], None]


class Parts(NamedTuple):
    runs: Runs
    recorded: "Callable[[RunRecorder], Answerer]"
    telemetry: Telemetry
    questions: Questions
    aggregator: Aggregator
    query_log: QueryLog
    knowledge: KnowledgeOpener
    publishing: Publishing
    hub_tokens: "Callable[[], HubTokens]"
    revocations: Revocations
    key_use: KeyUse
    refusals: Refusals
    streams: EventStreams
    limits: CallerLimits
    readiness: Readiness
    servers: McpServers
    catalog: EndpointCatalog
    listing: SourceListing
    source_check: SourceCheck
    timing: Timing


@asynccontextmanager
async def wired(settings: Settings, telemetry: Telemetry, role: Role) -> AsyncIterator[Parts]:
    """All parts, connected to each other, and closed in reverse order."""
    clock = SystemClock()
    policies = Policies(settings, clock, telemetry)
    async with AsyncExitStack() as leaving:
        outbound = await leaving.enter_async_context(outbound_for(settings))
        if role.streaming:
            outbound.load()
        leaving.push_async_callback(policies.close)
        knowledge = _knowledge(settings, outbound, policies, role)
        leaving.push_async_callback(knowledge.close)
        resilience, run = policies.resilience, policies.computing.run
        configured = _configured(settings, outbound, policies, knowledge, clock, telemetry, role)
        servers, catalog = await leaving.enter_async_context(configured)
        evidence = await leaving.enter_async_context(evidence_for(settings, clock, telemetry, run))
        judge = judge_for(settings, evidence, run) if evidence is not None else None
        observer = partial(Observer, clock=clock, telemetry=telemetry)
        asked = (knowledge.existing, resilience, servers.source, observer)
        endpoints = partial(EndpointDirectory, settings, outbound, *asked)
        external = verifier_for(settings, outbound, clock, telemetry, resilience, run)
        claims = await leaving.enter_async_context(claims_for(settings, clock, telemetry, external, run))
        directory = endpoints(judge)
        pipeline = build_pipeline(
            settings, directory, clock, telemetry, evidence, judge, claims, run=run, measured=True
        )
        names = EndpointResolver(settings, knowledge, HubClient(settings.syfthub_url, outbound), catalog, servers)
        questions = Questions(settings, names, clock, role.surface)
        keeps = role.log_queries and settings.query_log_days > 0
        query_log = QueryLog(knowledge, telemetry, enabled=keeps, counting=role.log_queries)
        revocations, key_use, refusals = await leaving.enter_async_context(_watched(knowledge, role.timing))
        answerer = policies.cached(pipeline, knowledge)
        recorded = partial(_recorded, settings, endpoints, clock, telemetry, evidence, claims, run)
        recordings = _recordings(settings, recorded, telemetry, knowledge, role)
        runs = Runs(settings, answerer, policies, query_log, revocations, telemetry, recordings)
        await leaving.enter_async_context(background(*policies.tasks()))
        kept = _streams(settings, policies, outbound, knowledge, questions, runs, clock, telemetry, role)
        streams = await leaving.enter_async_context(kept)
        erasing = erase_memory(knowledge, _in_memory(policies, streams), role.timing.erasures_every_s)
        await leaving.enter_async_context(background(erasing))
        yield Parts(
            runs=runs,
            recorded=recorded,
            telemetry=telemetry,
            questions=questions,
            aggregator=Aggregator(servers, runs.begin, clock),
            query_log=query_log,
            knowledge=knowledge,
            publishing=Publishing(settings, knowledge, directory, pipeline, clock, telemetry),
            hub_tokens=cache(partial(_hub_tokens, settings, outbound, clock)),
            revocations=revocations,
            key_use=key_use,
            refusals=refusals,
            streams=streams,
            limits=_limits(policies, streams, knowledge),
            readiness=Readiness(knowledge, folder_of(settings)),
            servers=servers,
            catalog=catalog,
            listing=SourceListing(catalog, servers, knowledge, resilience.upstreams, questions.model),
            source_check=SourceCheck(settings, outbound, clock),
            timing=role.timing,
        )


@asynccontextmanager
async def _watched(knowledge: KnowledgeOpener, timing: Timing) -> AsyncIterator[tuple[Revocations, KeyUse, Refusals]]:
    """What happens to the keys of callers, and to their requests."""
    revocations = Revocations(lambda: _credentials(knowledge), every_s=timing.keys_every_s)
    key_use = KeyUse(lambda moments: _keys_used(knowledge, moments), every_s=timing.key_use_every_s)
    refusals = Refusals(knowledge, timing.refusals_every_s)
    async with AsyncExitStack() as leaving:
        for one in (revocations, key_use, refusals):
            leaving.push_async_callback(one.close)
        yield revocations, key_use, refusals


@asynccontextmanager
async def _configured(
    settings: Settings,
    outbound: Outbound,
    policies: Policies,
    knowledge: KnowledgeOpener,
    clock: Clock,
    telemetry: Telemetry,
    role: Role,
) -> AsyncIterator[tuple[McpServers, EndpointCatalog]]:
    """The MCP servers, and all that is configured; a server notices what other workers add."""
    servers = McpServers(settings, outbound=outbound, resilience=policies.resilience, clock=clock, telemetry=telemetry)
    store: AddedSourcesStore = (
        SourcesInFile(AddedSourcesFile(folder_of(settings), replace_file), knowledge.recorded)
        if settings.database_url is None
        else SourcesInRecords(knowledge)
    )
    catalog = EndpointCatalog(settings, servers, store, telemetry)
    try:
        await catalog.refresh()
        async with background(*((catalog.watch(role.timing.sources_every_s),) if role.streaming else ())):
            yield servers, catalog
    finally:
        catalog.close()
        await servers.close()


@asynccontextmanager
async def _streams(
    settings: Settings,
    policies: Policies,
    outbound: Outbound,
    knowledge: KnowledgeOpener,
    questions: Questions,
    runs: Runs,
    clock: Clock,
    telemetry: Telemetry,
    role: Role,
) -> AsyncIterator[EventStreams]:
    """Planner steps and resumable answers, where they are kept."""
    if not role.streaming:
        yield EventStreams()
        return
    kept = event_streams(
        settings,
        policies,
        outbound=outbound,
        knowledge=knowledge,
        documentation=questions.documentation(),
        start=runs.start,
        clock=clock,
        telemetry=telemetry,
        timing=role.timing,
    )
    async with kept as streams:
        yield streams


def _in_memory(policies: Policies, streams: EventStreams) -> tuple[ErasureStore, ...]:
    """What this process has in memory that has to be erased. Results of the evidence model are numbers, and the index
    drops what is deleted by itself."""

    async def cached(_: ErasurePass) -> int:
        return policies.forget_cached()

    async def steps(now: ErasurePass) -> int:
        return await streams.erase_steps(now.erased.documents)

    async def kept(now: ErasurePass) -> int:
        return streams.forget_ended(max(0.0, now.at - now.settled_at))

    return (
        ErasureStore("planner steps", steps),
        ErasureStore("caches in memory", cached),
        ErasureStore("streams in memory", kept),
    )


def _knowledge(settings: Settings, outbound: Outbound, policies: Policies, role: Role) -> KnowledgeOpener:
    return KnowledgeOpener(
        settings,
        outbound,
        indexing=role.indexing,
        serving=role.streaming,
        cached=policies.embedder,
        resilience=policies.resilience,
        run=policies.computing.run,
        died=role.indexer_died,
        damaged=role.index_damaged,
    )


def _recorded(
    settings: Settings,
    endpoints: "Callable[[Callable[[], Judge] | None], Directory]",
    clock: Clock,
    telemetry: Telemetry,
    evidence: Evidence | None,
    claims: ClaimChecker,
    run: RunInThread,
    recorder: "RunRecorder",
) -> Answerer:
    """A pipeline for one Run that is recorded: the same parts, each in the wrapper of its contract. It has no cache."""
    heard = recorder.evidence(evidence) if evidence is not None else None
    judge = judge_for(settings, heard, run) if heard is not None else None
    return build_pipeline(
        settings,
        recorder.directory(endpoints(judge)),
        recorder.clock(clock),
        recorder.telemetry(telemetry),
        heard,
        judge,
        recorder.claims(claims),
        run=run,
    )


def _recordings(
    settings: Settings,
    recorded: "Callable[[RunRecorder], Answerer]",
    telemetry: Telemetry,
    knowledge: KnowledgeOpener,
    role: Role,
) -> RecordingFolder | None:
    """Where a server keeps its runs, if it does."""
    if settings.recordings_dir is None or not role.streaming:
        return None

    async def erased(documents: Collection[str], moment: float) -> bool:
        opened = await knowledge.existing()
        return opened is not None and await opened.erased_since(documents, moment)

    return RecordingFolder(settings, Path(settings.recordings_dir), recorded, telemetry, erased)


def _limits(policies: Policies, streams: EventStreams, knowledge: KnowledgeOpener) -> CallerLimits:
    counts = {"stream_bytes": streams.bytes_held_by, "changes": policies.rate_limits.changes}
    return CallerLimits(policies.limits, policies.shares, counts, partial(_in_records, knowledge))


async def _in_records(knowledge: KnowledgeOpener, owner: str) -> Mapping[str, float]:
    opened = await knowledge.existing()
    return {} if opened is None else await opened.held(owner)


async def _credentials(knowledge: KnowledgeOpener) -> set[str]:
    return await (await knowledge()).credentials()


async def _keys_used(knowledge: KnowledgeOpener, moments: Mapping[str, float]) -> None:
    await (await knowledge()).api_keys_used(moments)


def _hub_tokens(settings: Settings, outbound: Outbound, clock: Clock) -> "HubTokens":
    from anabranch.network.hub_tokens import HubTokens  # noqa: PLC0415  it loads a cryptography library

    return HubTokens(settings.syfthub_url, outbound, clock, settings.syfthub_jwks_cache_ttl)
