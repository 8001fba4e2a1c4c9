"""A running Anabranch, put together from its settings."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from anabranch.app.aggregating import Aggregating, Heard
from anabranch.app.parts import Parts, parts
from anabranch.app.revocations import EVERY_S
from anabranch.domain.aggregates import AggregatedResponse, AggregatorQuery
from anabranch.domain.contracts import Answerer, Telemetry
from anabranch.domain.errors import (
    InvalidQuestion,
    Overloaded,
    RateLimited,
    ShuttingDown,
    Unauthorized,
)
from anabranch.domain.events import AnswerEvent
from anabranch.domain.model import Allowance, Answer, Context, Endpoint, Message, Question, Until
from anabranch.domain.servers import Aggregation, McpServer, ServerHealth
from anabranch.domain.signals import Rejected
from anabranch.knowledge.model import Identified
from anabranch.knowledge.records import keys
from anabranch.pipeline.run import Run
from anabranch.runtime import redaction
from anabranch.runtime.correlation import new_correlation_id
from anabranch.runtime.gate import InTurn, Place
from anabranch.runtime.settings import Settings, load
from anabranch.runtime.telemetry import Silent

CLOSING = "The server is shutting down; ask again in a moment."


class Begun(NamedTuple):
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
        self.revocations = parts.revocations
        self._answerer = parts.answerer
        self._asking = parts.asking
        self._servers = parts.servers
        self._aggregating = Aggregating(parts.servers, self._begun, parts.clock)
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
        keys_every_s: float = EVERY_S,
    ) -> AsyncIterator["Anabranch"]:
        """An Anabranch from the environment and a configuration file, or from settings made by hand. With `indexing` it
        also takes in documents that wait, unless another process on this data folder does; `indexer_died` is told the
        exit status of one that did not last. With `streaming` it keeps planner steps and resumable answers. Every
        `keys_every_s` seconds it looks whether an API key with a question under way was revoked."""
        settings = settings or load(file=Path(config) if config is not None else None)
        async with parts(
            settings,
            telemetry or Silent(),
            start=lambda question, context: opened.start(question, context),  # noqa: PLW0108  there soon
            indexing=indexing,
            indexer_died=indexer_died,
            streaming=streaming,
            keys_every_s=keys_every_s,
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
        if token.startswith(keys.PREFIX) and self.knowledge.exists:
            room = await self.knowledge()
            key = await room.database.read(lambda db: keys.find(db, token))
            if key is not None:
                return Identified(
                    user=key.user, groups=key.groups, operator=key.operator, key=key.id, audiences=tuple(audiences)
                )
        raise Unauthorized("The API key is not known, or was revoked.")

    def context(
        self,
        *,
        correlation_id: str | None = None,
        surface: str = "library",
        address: str | None = None,
        user_id: str | None = None,
        groups: tuple[str, ...] = (),
        operator: bool = False,
        key: str | None = None,
        tokens: Mapping[str, str] | None = None,
        transactions: Mapping[str, str] | None = None,
        bearer: str | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> Context:
        """A context that begins now and ends with the total time-out."""
        return Context(
            correlation_id=correlation_id or new_correlation_id(),
            deadline=self._clock.monotonic() + self.settings.total_timeout,
            surface=surface,
            address=address,
            user_id=user_id,
            groups=groups,
            operator=operator,
            key=key,
            tokens=tokens or {},
            transactions=transactions or {},
            bearer=bearer,
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

    async def begin(self, question: Question, context: Context, answerer: Answerer | None = None) -> Begun:
        """Begin a Run for a caller whose questions are counted; it ends if their key is revoked. Attach to it before
        the loop turns again."""
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
        return Begun(self._started(question, context, answerer, place, context.key), allowance)

    async def _begun(self, question: Question, context: Context) -> Run:
        return (await self.begin(question, context)).run

    def start(self, question: Question, context: Context, answerer: Answerer | None = None) -> Run:
        """Begin a Run. Attach to it (`listen`, `value`) before the loop turns again."""
        self._admit(question)
        return self._started(question, context, answerer, self._place(context))

    def _place(self, context: Context) -> Place:
        if self.draining:
            raise ShuttingDown(CLOSING)
        return self._policies.gate.enter(context.surface)

    def _started(
        self, question: Question, context: Context, answerer: Answerer | None, place: Place, key: str | None = None
    ) -> Run:
        def ended(run: Run) -> None:
            place.leave()
            self._forget(run)
            if key is not None:
                self.revocations.discard(key, run.stop)

        run = Run(InTurn(answerer or self._answerer, place), question, context, self._telemetry, ended=ended)
        if key is not None:
            self.revocations.add(key, run.stop)
        self._runs.add(run)
        self._idle.clear()
        redaction.asked(question, context)
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
        asked = await self._asking.question(question, sources, model, history, tokens, top_k, until)
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
        asked = await self._asking.question(question, sources, model, history, tokens, top_k, until)
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
        return self._asking.configured(names)

    async def drain(self, grace_s: float) -> None:
        """Take no new question, give the running ones some time, then end the rest with an error they can show."""
        self.draining = True
        await asyncio.gather(self._drained(grace_s), self._streams.drain(grace_s))
        await self._streams.settled()

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
        return self._asking.model

    def rewrites(self, model: Endpoint) -> bool:
        """Whether questions are put in other words before they are searched for: only a model that writes can."""
        return self._asking.rewrites(model)
