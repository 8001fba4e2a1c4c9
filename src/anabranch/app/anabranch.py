"""The public face of a running Anabranch."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from anabranch.app.aggregator import OnReply
from anabranch.app.event_streams import Timing
from anabranch.app.wiring import Parts, Role, wired
from anabranch.configuration.settings import Settings, load
from anabranch.domain.audit import AuditEntry
from anabranch.domain.contracts import Telemetry
from anabranch.domain.errors import Unauthorized
from anabranch.domain.events import AnswerEvent
from anabranch.domain.mcp import AggregatedResponse, Aggregation, AggregatorQuery, McpServer, ServerHealth
from anabranch.domain.model import Answer, AnswerPolicy, Context, Endpoint, Message, Question, Until
from anabranch.domain.rights import EVERY_GRANT, Grants
from anabranch.knowledge.model import Identified
from anabranch.knowledge.records import keys
from anabranch.pipeline.run import Run
from anabranch.telemetry.log import SilentTelemetry

UNKNOWN_KEY = "The API key is not known, was revoked, or has expired."


class Anabranch:
    """A running Anabranch: ask it, stream from it, or start Runs on it. Get one with `Anabranch.open()`."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self.settings = settings
        self.planner = parts.streams.planner
        self.recordings = parts.streams.recordings
        self.knowledge = parts.knowledge
        self.publishing = parts.publishing
        self.questions = parts.questions
        self.query_log = parts.query_log
        self.runs = parts.runs
        self.limits = parts.limits
        self.revocations = parts.revocations
        self.readiness = parts.readiness
        self.refused = parts.refusals.add
        self.timing = parts.timing
        self.catalog = parts.catalog
        self.listing = parts.listing
        self.source_check = parts.source_check
        self.context = parts.questions.context
        self.configured = parts.questions.configured
        self.model = parts.questions.model
        self.begin = parts.runs.begin
        self.start = parts.runs.start
        self._parts = parts

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
        timing: Timing = Timing(),
        index_damaged: Callable[[str], None] = lambda _: None,
    ) -> AsyncIterator["Anabranch"]:
        """An Anabranch from the environment and a configuration file, or from `settings`. With `indexing` it also runs
        the indexer, unless another process on this data folder does; `indexer_died` gets the exit status of one that
        crashed. With `streaming` it keeps planner steps and resumable answers. With `log_queries` it records questions
        in the query log, if there is a data folder and AGGREGATOR_QUERY_LOG_DAYS is not 0; `surface` is the surface
        that `ask`, `stream` and `aggregate` are recorded under. `timing` holds the intervals that no setting
        changes. `index_damaged` gets the name of each part of the index that is found damaged."""
        settings = settings or load(file=Path(config) if config is not None else None)
        role = Role(indexing, indexer_died, streaming, surface, log_queries, timing, index_damaged)
        async with wired(settings, telemetry or SilentTelemetry(), role) as parts:
            opened = cls(settings, parts)
            try:
                if indexing and parts.knowledge.exists:
                    await parts.knowledge()
                yield opened
            finally:
                await opened.drain(grace_s=0)

    async def identify(self, token: str, audiences: Collection[str]) -> Identified:
        """The caller of a bearer token: an API key of ours, or a hub token for one of the audiences."""
        if token.count(".") == 2:
            bearer = await self._parts.hub_tokens().verify(token, audiences)
            return Identified(user=bearer.user, groups=bearer.groups, audiences=bearer.audiences)
        if token.startswith(keys.PREFIX) and self.knowledge.exists:
            key = await (await self.knowledge()).api_key(token)
            if key is not None:
                self._parts.key_use.note(key.id)
                return Identified(
                    user=key.user,
                    groups=key.groups,
                    operator=key.operator,
                    rights=key.rights,
                    key=key.id,
                    credential=keys.credential_of(token),
                    audiences=tuple(audiences),
                )
        raise Unauthorized(UNKNOWN_KEY)

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
        fallback: bool | None = None,
        explain: bool = False,
        verify: bool | None = None,
        answer_policy: AnswerPolicy = "all",
        record: Path | str | None = None,
    ) -> Answer:
        """The whole answer. Sources and models are named as in the configuration, as `owner/slug` on the hub, or as
        `URL/slug`; without sources, every collection, every configured source and every MCP server is asked, of the
        servers those that the routing rules select (docs/asking.md). `fallback` says whether the documents are quoted
        if the model fails before its first token; None is as AGGREGATOR_MODEL_FALLBACK says. With `explain`, the
        answer's `explanation` has each passage's way to the prompt (docs/explain.md). `verify` says whether its
        sentences are checked against the passages; None is as AGGREGATOR_VERIFY says. With the `answer_policy`
        `strict`, sentences that no source supports are left out (docs/evidence.md). With `record`, the run is recorded
        in that file, without secrets (docs/recording.md); RecordingError if that fails."""
        asked = await self.questions.library(
            question, sources, model, history, tokens, top_k, until, fallback,
            explain=explain, verify=verify, answer_policy=answer_policy,
        )  # fmt: skip
        async with self._started(asked, self.context(tokens=tokens, operator=True), record) as run:
            return await run.value()

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
        fallback: bool | None = None,
        explain: bool = False,
        verify: bool | None = None,
        answer_policy: AnswerPolicy = "all",
        record: Path | str | None = None,
        streaming: bool = True,
    ) -> AsyncIterator[AsyncIterator[AnswerEvent]]:
        """The same, event by event. Leaving the block ends the question and everything it started; one that
        is left before its last event is not recorded. Without `streaming`, an answer below
        AGGREGATOR_MIN_FAITHFULNESS is withheld, as by `ask`; with it, the answer says that it is."""
        asked = await self.questions.library(
            question, sources, model, history, tokens, top_k, until, fallback,
            explain=explain, verify=verify, answer_policy=answer_policy,
        )  # fmt: skip
        context = self.context(tokens=tokens, operator=True, streaming=streaming)
        async with self._started(asked, context, record) as run, run.listen() as listener:
            yield aiter(listener)

    @asynccontextmanager
    async def _started(self, asked: Question, context: Context, record: Path | str | None) -> AsyncIterator[Run]:
        if record is None:
            yield self.start(asked, context)
            return
        from anabranch.app.recording import RunRecorder, recording_target  # noqa: PLC0415  most runs are not recorded

        target = await asyncio.to_thread(recording_target, Path(record))
        recorder = RunRecorder(self.settings)
        watched = recorder.telemetry(self._parts.telemetry)
        try:
            yield self.start(asked, context, self._parts.recorded(recorder), telemetry=watched)
        finally:
            if recorder.finished:
                await recorder.save(target)

    async def aggregate(
        self,
        query: str | AggregatorQuery,
        context: Context | None = None,
        heard: OnReply | None = None,
        *,
        servers: Sequence[str] | None = None,
        max_results: int | None = None,
        grants: Grants = EVERY_GRANT,
    ) -> AggregatedResponse:
        """Results of the MCP servers, ranked and deduplicated. `servers` are names; without them the routing rules
        choose. `heard` is called for each server's reply. Servers that are not among the `grants` do not exist for the
        caller. Fails with one of the AggregatorErrors."""
        asked = query
        if isinstance(asked, str):
            named = None if servers is None else tuple(servers)
            asked = AggregatorQuery(query_text=asked, max_results=max_results, servers=named)
        return await self._parts.aggregator.aggregate(asked, context or self.context(operator=True), heard, grants)

    @property
    def aggregator_enabled(self) -> bool:
        return self._parts.servers.aggregation.enabled

    async def warm(self) -> None:
        """Start to connect to the MCP servers, so that the first question finds them ready."""
        self._parts.servers.pool.warm()

    async def record(self, entry: AuditEntry) -> None:
        """Add to the audit log what changes nothing in the records, if there are records."""
        await self.knowledge.recorded(entry, lambda: None)

    async def reconfigure(self, servers: Mapping[str, McpServer], aggregation: Aggregation) -> None:
        """Use these MCP servers of the file, besides those added over the API, and these aggregation settings from now
        on. Running calls end as they began."""
        self._parts.catalog.reconfigure(servers, aggregation)

    def servers(self) -> tuple[ServerHealth, ...]:
        """The health of the MCP servers, in the order of their configuration."""
        return self._parts.servers.health()

    async def servers_settled(self) -> None:
        """Wait until each MCP server has become ready, or has failed once."""
        await self._parts.servers.pool.settled()

    async def drain(self, grace_s: float) -> None:
        """Take no new question, give the running ones some time, then end the rest with an error."""
        await asyncio.gather(self.runs.drain(grace_s), self._parts.streams.drain(grace_s))
        await self._parts.streams.settled()
        await self.query_log.settled()
