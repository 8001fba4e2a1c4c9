"""The composition root: constructs every part of a running Anabranch from its settings."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, assert_never

from anabranch.app.aggregator import Aggregator
from anabranch.app.endpoint_resolver import EndpointResolver
from anabranch.app.event_streams import EventStreams, event_streams
from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.mcp_servers import McpServers
from anabranch.app.policies import Policies
from anabranch.app.publishing import Publishing
from anabranch.app.query_log import QueryLog
from anabranch.app.questions import Questions
from anabranch.app.revocations import Revocations
from anabranch.app.runs import Runs
from anabranch.app.startup import outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Directory, Generator, Outbound, Source, SystemClock, Telemetry
from anabranch.domain.model import Endpoint
from anabranch.models.remote import OpenAIModel, SpaceModel
from anabranch.network.hub import HubClient, HubTokens
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.policies.resilience import Resilience
from anabranch.sources.collection import CollectionSource
from anabranch.sources.space import SpaceSource

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge


def build_pipeline(settings: Settings, directory: Directory, clock: Clock, telemetry: Telemetry) -> Pipeline:
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
    )


class EndpointDirectory:
    def __init__(
        self,
        outbound: Outbound,
        knowledge: "Callable[[], Awaitable[Knowledge]]",
        resilience: Resilience,
        servers: Callable[[Endpoint], Source],
        *,
        model_streaming: bool,
    ) -> None:
        self._servers = servers
        self._outbound = outbound
        self._knowledge = knowledge
        self._resilience = resilience
        self._streaming = model_streaming

    def source(self, endpoint: Endpoint) -> Source:
        if endpoint.kind == "collection":
            return CollectionSource(endpoint, self._knowledge)
        return self._resilience.source(endpoint, self._servers if endpoint.kind == "mcp" else self._space)

    def _space(self, endpoint: Endpoint) -> Source:
        return SpaceSource(endpoint, self._outbound)

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        match endpoint.kind:
            case "space":
                model: Generator = SpaceModel(endpoint, self._outbound, streaming=self._streaming)
                return self._resilience.generator(endpoint, model, retried=retried)
            case "openai":
                return self._resilience.generator(endpoint, OpenAIModel(endpoint, self._outbound), retried=retried)
            case "extractive" | "collection" | "mcp":
                from anabranch.models.extractive import Extractive  # noqa: PLC0415

                return Extractive()
            case _:
                assert_never(endpoint.kind)


class Role(NamedTuple):
    """What a process does with its Anabranch besides answering; the arguments of `Anabranch.open`."""

    indexing: bool
    indexer_died: Callable[[int], None]
    streaming: bool
    surface: str
    log_queries: bool
    keys_every_s: float


class Parts(NamedTuple):
    runs: Runs
    questions: Questions
    aggregator: Aggregator
    query_log: QueryLog
    knowledge: KnowledgeOpener
    publishing: Publishing
    hub_tokens: HubTokens
    revocations: Revocations
    streams: EventStreams
    servers: McpServers
    clock: Clock
    surface: str


@asynccontextmanager
async def wired(settings: Settings, telemetry: Telemetry, role: Role) -> AsyncIterator[Parts]:
    """All parts, connected to each other, and closed in reverse order."""
    clock = SystemClock()
    policies = Policies(settings, clock, telemetry)
    async with AsyncExitStack() as leaving:
        outbound = await leaving.enter_async_context(outbound_for(settings))
        leaving.push_async_callback(policies.close)
        knowledge = KnowledgeOpener(
            settings,
            outbound,
            indexing=role.indexing,
            cached=policies.embedder,
            resilience=policies.resilience,
            died=role.indexer_died,
        )
        leaving.push_async_callback(knowledge.close)
        resilience = policies.resilience
        servers = McpServers(settings, outbound=outbound, resilience=resilience, clock=clock, telemetry=telemetry)
        leaving.push_async_callback(servers.close)
        directory = EndpointDirectory(
            outbound, knowledge, resilience, servers.source, model_streaming=settings.model_streaming_enabled
        )
        pipeline = build_pipeline(settings, directory, clock, telemetry)
        names = EndpointResolver(settings, knowledge, HubClient(settings.syfthub_url, outbound), servers.endpoints)
        questions = Questions(settings, names)
        query_log = QueryLog(knowledge, telemetry, enabled=role.log_queries and settings.query_log_days > 0)
        revocations = Revocations(lambda: _valid_keys(knowledge), every_s=role.keys_every_s)
        leaving.push_async_callback(revocations.close)
        answerer = policies.cached(pipeline, knowledge)
        runs = Runs(settings, answerer, policies, query_log, revocations, telemetry)
        policies.start()
        streams = EventStreams()
        if role.streaming:
            kept = event_streams(
                settings,
                policies,
                outbound=outbound,
                rooms=knowledge,
                documentation=questions.documentation(),
                start=runs.start,
                clock=clock,
                telemetry=telemetry,
            )
            streams = await leaving.enter_async_context(kept)
        yield Parts(
            runs=runs,
            questions=questions,
            aggregator=Aggregator(servers, runs.begin, clock),
            query_log=query_log,
            knowledge=knowledge,
            publishing=Publishing(settings, knowledge, directory, pipeline, clock, telemetry),
            hub_tokens=HubTokens(settings.syfthub_url, outbound, clock, settings.syfthub_jwks_cache_ttl),
            revocations=revocations,
            streams=streams,
            servers=servers,
            clock=clock,
            surface=role.surface,
        )


async def _valid_keys(knowledge: KnowledgeOpener) -> set[str]:
    return await (await knowledge()).valid_keys()
