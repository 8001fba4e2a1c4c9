"""The river itself, as the settings want it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, assert_never

from anabranch.app.endpoint_resolver import EndpointResolver
from anabranch.app.event_streams import EventStreams, event_streams
from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.mcp_servers import McpServers
from anabranch.app.policies import Policies
from anabranch.app.publishing import Publishing
from anabranch.app.query_log import QueryLog
from anabranch.app.questions import Questions
from anabranch.configuration.settings import Settings
from anabranch.domain.clock import SystemClock
from anabranch.domain.contracts import Answerer, Clock, Directory, Generator, Outbound, Source, Telemetry
from anabranch.domain.model import Context, Endpoint, Question
from anabranch.models.openai import OpenAIModel
from anabranch.models.space import SpaceModel
from anabranch.network.addresses import AddressGuard
from anabranch.network.hub import HubClient
from anabranch.network.hub_tokens import HubTokens
from anabranch.network.outbound import AiohttpOutbound
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.run import Run
from anabranch.policies.resilience import Resilience
from anabranch.sources.collection import CollectionSource
from anabranch.sources.space import SpaceSource
from anabranch.text.token_estimate import EstimatedTokens

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge


def build_pipeline(settings: Settings, directory: Directory, clock: Clock, telemetry: Telemetry) -> Pipeline:
    return Pipeline(
        directory=directory,
        counter=EstimatedTokens(),
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


class Parts(NamedTuple):
    answerer: Answerer
    rooms: KnowledgeOpener
    publishing: Publishing
    questions: Questions
    query_log: QueryLog
    surface: str
    policies: Policies
    hub_tokens: HubTokens
    streams: EventStreams
    servers: McpServers
    clock: Clock
    telemetry: Telemetry


@asynccontextmanager
async def parts(
    settings: Settings,
    telemetry: Telemetry,
    *,
    start: Callable[[Question, Context], Run],
    indexing: bool,
    indexer_died: Callable[[int], None],
    streaming: bool,
    surface: str,
    log_queries: bool,
) -> AsyncIterator[Parts]:
    """All of them, wired to each other, and closed in good order; `start` begins a Run."""
    clock = SystemClock()
    policies = Policies(settings, clock, telemetry)
    outbound = _outbound(settings)
    rooms = KnowledgeOpener(
        settings,
        outbound,
        indexing=indexing,
        remembered=policies.embedder,
        resilience=policies.resilience,
        died=indexer_died,
    )
    servers = McpServers(settings, outbound=outbound, resilience=policies.resilience, clock=clock, telemetry=telemetry)
    directory = EndpointDirectory(
        outbound, rooms, policies.resilience, servers.source, model_streaming=settings.model_streaming_enabled
    )
    pipeline = build_pipeline(settings, directory, clock, telemetry)
    names = EndpointResolver(settings, rooms, HubClient(settings.syfthub_url, outbound), servers.endpoints)
    questions = Questions(settings, names)
    async with AsyncExitStack() as leaving:
        for close in (outbound.close, policies.close, rooms.close, servers.close):
            leaving.push_async_callback(close)
        policies.start()
        keeping = event_streams(
            settings,
            policies,
            outbound=outbound,
            rooms=rooms,
            documentation=questions.documentation(),
            start=start,
            clock=clock,
            telemetry=telemetry,
        )
        kept = await leaving.enter_async_context(keeping) if streaming else EventStreams()
        yield Parts(
            answerer=policies.remembered(pipeline, rooms),
            rooms=rooms,
            publishing=Publishing(settings, rooms, directory, pipeline, clock, telemetry),
            questions=questions,
            query_log=QueryLog(rooms, telemetry, enabled=log_queries and settings.query_log_days > 0),
            surface=surface,
            policies=policies,
            hub_tokens=HubTokens(settings.syfthub_url, outbound, clock, settings.syfthub_jwks_cache_ttl),
            streams=kept,
            servers=servers,
            clock=clock,
            telemetry=telemetry,
        )


def _outbound(settings: Settings) -> AiohttpOutbound:
    return AiohttpOutbound(
        guard=AddressGuard(settings.allowed_networks),
        allowed_origins=settings.allowed_origins,
        max_reply_bytes=settings.max_reply_bytes,
    )
