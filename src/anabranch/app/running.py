"""A running Anabranch, put together from its settings."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from anabranch.app.adapters import Adapters
from anabranch.app.knowledge import Rooms
from anabranch.app.publishing import Publishing
from anabranch.domain.contracts import Answerer, Clock, Telemetry
from anabranch.domain.errors import InvalidQuestion, ShuttingDown, Unauthorized, UpstreamError
from anabranch.domain.events import AnswerEvent
from anabranch.domain.model import Answer, Context, Endpoint, Message, Question, Until
from anabranch.knowledge.model import EVERYTHING, Caller, Identified
from anabranch.knowledge.records import keys
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.run import Run
from anabranch.runtime.addresses import AddressGuard
from anabranch.runtime.clock import SystemClock
from anabranch.runtime.correlation import new_correlation_id
from anabranch.runtime.hub import Hub
from anabranch.runtime.hubtokens import HubTokens
from anabranch.runtime.outbound import AiohttpOutbound, parse
from anabranch.runtime.settings import Settings, load
from anabranch.runtime.telemetry import Silent
from anabranch.runtime.tokens import EstimatedTokens

# The model that needs no service: it answers in the documents' own sentences.
EXTRACTIVE = Endpoint(slug="extractive", kind="extractive", operator=True)
COLLECTIONS = Endpoint(slug=EVERYTHING, kind="collection", operator=True)


class Anabranch:
    """A running Anabranch: ask it, stream from it, or start Runs on it. Get one with `Anabranch.open()`."""

    def __init__(
        self,
        *,
        settings: Settings,
        answerer: Answerer,
        rooms: Rooms,
        publishing: Publishing,
        hub: Hub,
        hub_tokens: HubTokens,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self.settings = settings
        self.knowledge = rooms
        self.publishing = publishing
        self._answerer = answerer
        self._hub = hub
        self._hub_tokens = hub_tokens
        self._clock = clock
        self._telemetry = telemetry
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
    ) -> AsyncIterator["Anabranch"]:
        """An Anabranch from the environment and a configuration file, or from settings made by hand. With `indexing` it
        also takes in documents that wait, unless another process on this data folder does; `indexer_died` is told the
        exit status of one that did not last."""
        settings = settings or load(file=Path(config) if config is not None else None)
        telemetry = telemetry or Silent()
        clock = SystemClock()
        outbound = AiohttpOutbound(
            guard=AddressGuard(settings.allowed_networks),
            allowed_origins=settings.allowed_origins,
            max_reply_bytes=settings.max_reply_bytes,
        )
        rooms = Rooms(settings, outbound, indexing=indexing, died=indexer_died)
        directory = Adapters(outbound, rooms, model_streaming=settings.model_streaming_enabled)
        pipeline = Pipeline(
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
        hub = Hub(settings.syfthub_url, outbound)
        opened = cls(
            settings=settings,
            answerer=pipeline,
            rooms=rooms,
            publishing=Publishing(settings, rooms, directory, pipeline, clock),
            hub=hub,
            hub_tokens=HubTokens(settings.syfthub_url, outbound, clock, settings.syfthub_jwks_cache_ttl),
            clock=clock,
            telemetry=telemetry,
        )
        try:
            if indexing and rooms.exists:
                await rooms()
            yield opened
        finally:
            await opened.drain(grace_s=0)
            await rooms.close()
            await outbound.close()

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
            address=address,
            user_id=user_id,
            groups=groups,
            operator=operator,
            tokens=tokens or {},
            transactions=transactions or {},
            traceparent=traceparent,
            tracestate=tracestate,
        )

    def start(self, question: Question, context: Context, answerer: Answerer | None = None) -> Run:
        """Begin a Run. Attach to it (`listen`, `value`) before the loop turns again."""
        if self.draining:
            raise ShuttingDown("The server is shutting down; ask again in a moment.")
        self._admit(question)
        run = Run(answerer or self._answerer, question, context, self._telemetry, ended=self._forget)
        self._runs.add(run)
        self._idle.clear()
        return run.start()

    def _admit(self, question: Question) -> None:
        """The limits, the same for every surface."""
        if not question.text.strip():
            raise InvalidQuestion("The prompt is empty: ask something.")
        asked, most = len(question.sources), self.settings.max_data_sources
        if asked > most:
            raise InvalidQuestion(f"The question names {asked} sources; at most {most} can be asked at once.")
        if not 1 <= question.top_k <= self.settings.max_top_k:
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
        `URL/slug`; without sources, every configured one and every collection is asked."""
        asked, context = await self._prepared(question, sources, model, history, tokens, top_k, until)
        return await self.start(asked, context).value()

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
        asked, context = await self._prepared(question, sources, model, history, tokens, top_k, until)
        run = self.start(asked, context)
        async with run.listen() as listener:
            yield aiter(listener)

    async def drain(self, grace_s: float) -> None:
        """Take no new question, give the running ones some time, then end the rest with an error they can show."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for run in tuple(self._runs):
                run.stop(ShuttingDown("The server is shutting down; ask again in a moment."))
        await self._idle.wait()

    def _forget(self, run: Run) -> None:
        self._runs.discard(run)
        if not self._runs:
            self._idle.set()

    async def _prepared(
        self,
        question: str,
        sources: Sequence[str | Endpoint] | None,
        model: str | Endpoint | None,
        history: Sequence[Message],
        tokens: Mapping[str, str] | None,
        top_k: int | None,
        until: Until,
    ) -> tuple[Question, Context]:
        known = tokens or {}
        if sources is None:
            chosen = [*self.settings.sources.values(), *([COLLECTIONS] if await self._collections() else [])]
        else:
            chosen = [await self._resolved(name, await self._sources(name), known) for name in sources]
        models = {EXTRACTIVE.slug: EXTRACTIVE, **self.settings.models}
        writer = self.model if model is None else await self._resolved(model, models, known)
        asked = Question(
            text=question,
            sources=_told_apart(chosen),
            model=writer,
            history=tuple(history),
            top_k=self.settings.default_top_k if top_k is None else top_k,
            # Among our own, the ranking decides; what others hold to be worth sending is up to a threshold.
            similarity_threshold=0.0 if chosen and all(one.kind == "collection" for one in chosen) else 0.5,
            until=until,
            refuse=True,
            rewrite=self.rewrites(writer) and any(endpoint.kind == "collection" for endpoint in chosen),
        )
        return asked, self.context(tokens=tokens, operator=True)

    @property
    def model(self) -> Endpoint:
        """Who writes when nobody is named."""
        return self.settings.default_model or EXTRACTIVE

    def rewrites(self, model: Endpoint) -> bool:
        """Whether questions are put in other words before they are searched for: only a model that writes can."""
        return self.settings.query_rewriting and model.kind != "extractive"

    async def _sources(self, name: str | Endpoint) -> Mapping[str, Endpoint]:
        """What a name can mean without asking the hub: what is configured, and a collection."""
        if not isinstance(name, str) or name in self.settings.sources:
            return self.settings.sources
        ours = {one: Endpoint(slug=one, kind="collection") for one in await self._collections()}
        return {**ours, **self.settings.sources}

    async def _collections(self) -> list[str]:
        if not self.knowledge.exists:
            return []
        room = await self.knowledge()
        return [one.collection.name for one in await room.collections(Caller(operator=True))]

    async def _resolved(
        self, name: str | Endpoint, configured: Mapping[str, Endpoint], tokens: Mapping[str, str]
    ) -> Endpoint:
        """A configured name, `URL/slug` (the person who types it vouches for it), or `owner/slug` on the hub."""
        if isinstance(name, Endpoint):
            return name
        if name in configured:
            return configured[name]
        if "://" in name:
            owner, _, address = name.partition("@") if "@" in name.partition("://")[0] else ("", "", name)
            url, _, slug = address.rstrip("/").rpartition("/")
            if not slug or url.endswith(":/"):
                raise InvalidQuestion(f"{name!r} names no endpoint: write URL/slug.")
            try:
                parse(url)
            except UpstreamError as error:
                raise InvalidQuestion(f"{name!r} cannot be asked. {error.message}") from None
            return Endpoint(slug=slug, url=url, owner=owner or None, operator=True)
        if name.count("/") == 1:
            found = await self._hub.find(name)
            guest = None if found.owner in tokens else await self._hub.guest_token(found.owner or "")
            return msgspec.structs.replace(found, token=guest)
        names = ", ".join(configured) or "none"
        raise InvalidQuestion(f"{name!r} is neither a configured name ({names}), nor owner/slug, nor URL/slug.")


def _told_apart(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Where two without an owner have the same slug, their hosts tell them apart in answers and citations."""
    count = Counter(endpoint.path for endpoint in endpoints)
    return tuple(
        msgspec.structs.replace(endpoint, owner=endpoint.url.partition("://")[2])
        if count[endpoint.path] > 1 and endpoint.owner is None
        else endpoint
        for endpoint in endpoints
    )
