"""A running Anabranch, put together from its settings."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from anabranch.app.aggregator import Aggregator, Heard
from anabranch.app.query_log import LogEntry
from anabranch.app.wiring import Parts, parts
from anabranch.configuration.settings import Settings, load
from anabranch.domain.contracts import Answerer, Telemetry
from anabranch.domain.errors import InvalidQuestion, Overloaded, RateLimited, ShuttingDown, Unauthorized
from anabranch.domain.events import AnswerEvent
from anabranch.domain.mcp import AggregatedResponse, Aggregation, AggregatorQuery, McpServer, ServerHealth
from anabranch.domain.model import Allowance, Answer, Context, Endpoint, Message, Question, Until
from anabranch.domain.signals import Rejected
from anabranch.knowledge.model import Identified
from anabranch.knowledge.records import keys
from anabranch.pipeline.run import Run
from anabranch.policies.admission import AdmissionSlot, AdmittedAnswerer
from anabranch.telemetry.correlation import new_correlation_id
from anabranch.telemetry.log import SilentTelemetry

CLOSING = "The server is shutting down; ask again in a moment."


class StartedRun(NamedTuple):
    """A Run, and what its caller may still ask, where that is limited."""

    run: Run
    allowance: Allowance | None


class Anabranch:
    """A running Anabranch: ask it, stream from it, or start Runs on it. Get one with `Anabranch.open()`."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self.settings = settings
        self.planner = parts.streams.planner
        self.recordings = parts.streams.recordings
        self.knowledge = parts.rooms
        self.publishing = parts.publishing
        self._answerer = parts.answerer
        self.questions = parts.questions
        self.query_log = parts.query_log
        self._surface = parts.surface
        self._servers = parts.servers
        self._aggregating = Aggregator(parts.servers, self._begun, parts.clock)
        self._policies = parts.policies
        self._hub_tokens = parts.hub_tokens
        self._streams = parts.streams
        self._clock = parts.clock
        self._telemetry = parts.telemetry
        self._runs: set[Run] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: Path | str | None = None,
        *,
        settings: Settings | None = None,
        telemetry: Telemetry | None = None,
        indexing: bool = False,
        indexer_died: Callable[[int], None] = lambda _: None,
        streaming: bool = False,
        surface: str = "library",
        log_queries: bool = False,
    ) -> AsyncIterator["Anabranch"]:
        """An Anabranch from the environment and a configuration file, or from settings made by hand. With `indexing` it
        also takes in documents that wait, unless another process on this data folder does; `indexer_died` is told the
        exit status of one that did not last. With `streaming` it keeps planner steps and resumable answers. With
        `log_queries` questions are recorded in the query log of the data folder, if there is one and
        AGGREGATOR_QUERY_LOG_DAYS is not 0; `surface` is where those of `ask`, `stream` and `aggregate` come from."""
        settings = settings or load(file=Path(config) if config is not None else None)
        async with parts(
            settings,
            telemetry or SilentTelemetry(),
            start=lambda question, context: opened.start(question, context),  # noqa: PLW0108  there soon
            indexing=indexing,
            indexer_died=indexer_died,
            streaming=streaming,
            surface=surface,
            log_queries=log_queries,
        ) as made:
            opened = cls(settings, made)
            try:
                if indexing and made.rooms.exists:
                    await made.rooms()
                yield opened
            finally:
                await opened.drain(grace_s=0)

    async def identify(self, token: str, audiences: Collection[str]) -> Identified:
        """Whom a bearer token stands for: an API key of ours, or a token of the hub for one of the audiences."""
        if token.count(".") == 2:
            bearer = await self._hub_tokens.verify(token, audiences)
            return Identified(user=bearer.user, groups=bearer.groups, audiences=bearer.audiences)
        if self.knowledge.exists:
            room = await self.knowledge()
            key = await room.database.read(lambda db: keys.find(db, token))
            if key is not None:
                return Identified(user=key.user, groups=key.groups, operator=key.operator, audiences=tuple(audiences))
        raise Unauthorized("The API key is not known, or was revoked.")

    def context(
        self,
        *,
        correlation_id: str | None = None,
        surface: str | None = None,
        address: str | None = None,
        user_id: str | None = None,
        groups: tuple[str, ...] = (),
        operator: bool = False,
        tokens: Mapping[str, str] | None = None,
        transactions: Mapping[str, str] | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> Context:
        """A context that begins now and ends with the total time-out."""
        return Context(
            correlation_id=correlation_id or new_correlation_id(),
            deadline=self._clock.monotonic() + self.settings.total_timeout,
            surface=surface or self._surface,
            address=address,
            user_id=user_id,
            groups=groups,
            operator=operator,
            tokens=tokens or {},
            transactions=transactions or {},
            traceparent=traceparent,
            tracestate=tracestate,
        )

    async def check(self, surface: str) -> None:
        """Whether a question could be taken on now: surfaces ask before they read one."""
        if self.draining:
            raise ShuttingDown(CLOSING)
        await self._policies.gate.check(surface)

    def turned_away(self, surface: str, code: str) -> None:
        """A request was refused before it became a question. Who asked too often, or too much at once, is counted where
        that was found."""
        if code not in (RateLimited.code, Overloaded.code):
            self._telemetry.noted(Rejected(surface=surface, code=code))

    async def begin(
        self,
        question: Question,
        context: Context,
        answerer: Answerer | None = None,
        entry: LogEntry | None = None,
    ) -> StartedRun:
        """Begin a Run for a caller whose questions are counted; `entry` is its place in the query log. Attach to it
        before the loop turns again."""
        self._admit(question)
        place = self._place(context)
        try:
            allowance = await self._policies.meter(context)
        except BaseException:
            place.leave()
            raise
        if self.draining:  # it has begun meanwhile, and no longer waits for new Runs
            place.leave()
            raise ShuttingDown(CLOSING)
        return StartedRun(self._started(question, context, answerer, entry, place), allowance)

    async def _begun(self, question: Question, context: Context) -> Run:
        return (await self.begin(question, context)).run

    def start(
        self,
        question: Question,
        context: Context,
        answerer: Answerer | None = None,
        entry: LogEntry | None = None,
    ) -> Run:
        """Begin a Run. Attach to it (`listen`, `value`) before the loop turns again."""
        self._admit(question)
        return self._started(question, context, answerer, entry, self._place(context))

    def _place(self, context: Context) -> AdmissionSlot:
        if self.draining:
            raise ShuttingDown(CLOSING)
        return self._policies.gate.enter(context.surface)

    def _started(
        self,
        question: Question,
        context: Context,
        answerer: Answerer | None,
        entry: LogEntry | None,
        place: AdmissionSlot,
    ) -> Run:
        def ended(run: Run) -> None:
            place.leave()
            self._forget(run)

        logged = self.query_log.logged(answerer or self._answerer, entry)
        run = Run(AdmittedAnswerer(logged, place), question, context, self._telemetry, ended=ended)
        self._runs.add(run)
        self._idle.clear()
        return run.start()

    def _admit(self, question: Question) -> None:
        """The limits, the same for every surface."""
        if not question.text.strip():
            raise InvalidQuestion("The prompt is empty: ask something.")
        # How many MCP servers there are is up to the operator, and `aggregate` has a limit of its own on results.
        asked, most = sum(source.kind != "mcp" for source in question.sources), self.settings.max_data_sources
        if asked > most:
            raise InvalidQuestion(f"The question names {asked} sources; at most {most} can be asked at once.")
        if not 1 <= question.top_k <= self.settings.max_top_k and question.ranking is None:
            raise InvalidQuestion(f"top_k is {question.top_k}; it must be from 1 to {self.settings.max_top_k}.")

    async def ask(
        self,
        question: str,
        *,
        sources: Sequence[str | Endpoint] | None = None,
        model: str | Endpoint | None = None,
        history: Sequence[Message] = (),
        tokens: Mapping[str, str] | None = None,
        top_k: int | None = None,
        until: Until = Until.GENERATE,
    ) -> Answer:
        """The whole answer. Sources and models are named as in the configuration, as `owner/slug` on the hub, or as
        `URL/slug`; without sources, every configured one and every collection is asked, but no MCP server."""
        asked = await self.questions.library(question, sources, model, history, tokens, top_k, until)
        return await self.start(asked, self.context(tokens=tokens, operator=True)).value()

    @asynccontextmanager
    async def stream(
        self,
        question: str,
        *,
        sources: Sequence[str | Endpoint] | None = None,
        model: str | Endpoint | None = None,
        history: Sequence[Message] = (),
        tokens: Mapping[str, str] | None = None,
        top_k: int | None = None,
        until: Until = Until.GENERATE,
    ) -> AsyncIterator[AsyncIterator[AnswerEvent]]:
        """The same, event by event as it happens. Leaving the block ends the question and everything it started."""
        asked = await self.questions.library(question, sources, model, history, tokens, top_k, until)
        run = self.start(asked, self.context(tokens=tokens, operator=True))
        async with run.listen() as listener:
            yield aiter(listener)

    async def aggregate(
        self,
        query: str | AggregatorQuery,
        context: Context | None = None,
        heard: Heard | None = None,
        *,
        servers: Sequence[str] | None = None,
        max_results: int | None = None,
    ) -> AggregatedResponse:
        """What the MCP servers have to say to a query: ranked, and without what repeats what others have said.
        `servers` are names, or else those that the rules choose; `heard` is told of each as it is through. Fails with
        one of the AggregatorErrors."""
        asked = query
        if isinstance(asked, str):
            named = None if servers is None else tuple(servers)
            asked = AggregatorQuery(query_text=asked, max_results=max_results, servers=named)
        return await self._aggregating.aggregate(asked, context or self.context(operator=True), heard)

    @property
    def aggregator_enabled(self) -> bool:
        return self._aggregating.enabled

    async def warm(self) -> None:
        """Begin to connect to the MCP servers, so that the first question finds them ready."""
        await self._servers.warm()

    async def reconfigure(self, servers: Mapping[str, McpServer], aggregation: Aggregation) -> None:
        """From now on these MCP servers, and this way to aggregate. What is under way goes on as it began."""
        await self._servers.update(servers, aggregation)

    def servers(self) -> tuple[ServerHealth, ...]:
        """How the MCP servers are doing, in the order of their configuration."""
        return self._servers.health()

    async def servers_settled(self) -> None:
        """Until each MCP server has become ready, or has failed once."""
        await self._servers.settled()

    def configured(self, names: Sequence[str]) -> tuple[Endpoint, ...]:
        """Sources and MCP servers by the names that they have in the configuration."""
        return self.questions.configured(names)

    async def drain(self, grace_s: float) -> None:
        """Take no new question, give the running ones some time, then end the rest with an error they can show."""
        self.draining = True
        await asyncio.gather(self._drained(grace_s), self._streams.drain(grace_s))
        await self._streams.settled()
        await self.query_log.settled()

    async def _drained(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for run in tuple(self._runs):
                run.stop(ShuttingDown(CLOSING))
        await self._idle.wait()

    def _forget(self, run: Run) -> None:
        self._runs.discard(run)
        if not self._runs:
            self._idle.set()

    @property
    def model(self) -> Endpoint:
        """Who writes when nobody is named."""
        return self.questions.model
