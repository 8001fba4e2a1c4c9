"""Tests a source, an MCP server or a model with one real call, past the circuit breakers and the history."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Generator, Outbound
from anabranch.domain.errors import GenerationFailed, GenerationTimedOut
from anabranch.domain.mcp import McpServer, ServerHealth
from anabranch.domain.model import (
    Context,
    Endpoint,
    Message,
    Passage,
    Prompt,
    Query,
    Question,
    SourceReply,
    Status,
    Value,
)
from anabranch.models.remote import OpenAIModel, SpaceModel
from anabranch.network import redaction
from anabranch.sources.mcp.pool import Pool
from anabranch.sources.mcp.services import PoolServices
from anabranch.sources.space import SpaceSource
from anabranch.telemetry.log import SilentTelemetry, new_correlation_id

QUESTION = "What is this source about?"
INSTRUCTION = "Answer with one short sentence: are you ready?"
MAX_S = 10.0
# An adapter that ends by itself has the better message.
SLACK_S = 0.2
MAX_PASSAGES = 3
MAX_TEXT = 300
MAX_TOKENS = 60


class CheckedPassage(Value):
    """A passage as an answer would use it, shortened."""

    title: str
    text: str
    score: float


class SourceCheckResult(Value):
    """How a test call went; `error` says what went wrong. A source or an MCP server has returned `passages` (at most
    3), a model `text`. `tool` is the tool of an MCP server, and `tool_chosen` says how it was selected."""

    ok: bool
    status: Status
    latency_ms: int
    error: str | None = None
    passages: tuple[CheckedPassage, ...] = ()
    text: str | None = None
    tool: str | None = None
    tool_chosen: str | None = None


class SourceCheck:
    """What it returns is mapped like an answer's passages and text, and holds no secrets."""

    def __init__(self, settings: Settings, outbound: Outbound, clock: Clock) -> None:
        self._outbound = outbound
        self._clock = clock
        self._source_s = min(settings.retrieval_timeout, MAX_S)
        self._model_s = min(settings.generation_timeout, MAX_S)
        self._streaming = settings.model_streaming_enabled
        self._services = PoolServices(
            outbound=outbound, clock=clock, telemetry=SilentTelemetry(), max_reply_bytes=settings.max_reply_bytes
        )

    async def source(self, endpoint: Endpoint, question: str | None) -> SourceCheckResult:
        query = _query(question)

        async def search(context: Context) -> SourceCheckResult:
            reply = await SpaceSource(endpoint, self._outbound).search(query, context)
            return self._searched(redaction.reply_of(reply), context, self._source_s)

        return await self._within(self._source_s, endpoint, search)

    async def model(self, endpoint: Endpoint, question: str | None) -> SourceCheckResult:
        async def generate(context: Context) -> SourceCheckResult:
            model: Generator = (
                OpenAIModel(endpoint, self._outbound)
                if endpoint.kind == "openai"
                else SpaceModel(endpoint, self._outbound, streaming=self._streaming)
            )
            try:
                text = await _written(model, question or INSTRUCTION, context)
            except GenerationFailed as error:
                status = Status.TIMEOUT if isinstance(error, GenerationTimedOut) else Status.ERROR
                return self._failed(status, redaction.removed(error.message), context, self._model_s)
            if not text:
                return self._failed(Status.ERROR, "The model's reply holds no answer.", context, self._model_s)
            latency_ms = self._since(context, self._model_s)
            return SourceCheckResult(ok=True, status=Status.SUCCESS, latency_ms=latency_ms, text=text)

        return await self._within(self._model_s, endpoint, generate)

    async def server(self, server: McpServer, question: str | None) -> SourceCheckResult:
        query, owner = _query(question), object()
        server = msgspec.structs.replace(server, enabled=True)
        pool = Pool({server.name: server}, self._services, self._source_s)

        async def search(context: Context) -> SourceCheckResult:
            reply = await pool.source(server.name).search(query, context)
            [health] = pool.health()
            return _with_tool(self._searched(redaction.reply_of(reply), context, self._source_s), health)

        redaction.learn(owner, redaction.of_server(server, certain=True))
        try:
            return await self._within(self._source_s, Endpoint(slug=server.name, kind="mcp"), search)
        finally:
            await pool.close()
            redaction.forget(owner)

    async def _within(
        self,
        seconds: float,
        endpoint: Endpoint,
        call: Callable[[Context], Awaitable[SourceCheckResult]],
    ) -> SourceCheckResult:
        """The result of a call in a task of its own, which knows the endpoint's token as a secret."""
        context = Context(
            correlation_id=new_correlation_id(), deadline=self._clock.monotonic() + seconds, operator=True
        )

        async def run() -> SourceCheckResult:
            redaction.learn_tokens(Question(text="", sources=(endpoint,)), context)
            return await call(context)

        try:
            async with asyncio.timeout(seconds + SLACK_S):
                return await asyncio.create_task(run())
        except TimeoutError:
            late = f"It did not answer within {seconds:.3g} seconds."
            return self._failed(Status.TIMEOUT, late, context, seconds)

    def _searched(self, reply: SourceReply, context: Context, seconds: float) -> SourceCheckResult:
        latency_ms = self._since(context, seconds)
        if reply.status is not Status.SUCCESS:
            return SourceCheckResult(ok=False, status=reply.status, latency_ms=latency_ms, error=reply.error)
        shown = tuple(map(_shown, reply.passages[:MAX_PASSAGES]))
        return SourceCheckResult(ok=True, status=reply.status, latency_ms=latency_ms, passages=shown)

    def _failed(self, status: Status, error: str, context: Context, seconds: float) -> SourceCheckResult:
        return SourceCheckResult(ok=False, status=status, latency_ms=self._since(context, seconds), error=error)

    def _since(self, context: Context, seconds: float) -> int:
        return round((self._clock.monotonic() - context.deadline + seconds) * 1000)


def _query(question: str | None) -> Query:
    return Query(text=question or QUESTION, limit=MAX_PASSAGES, similarity_threshold=0.0)


async def _written(model: Generator, text: str, context: Context) -> str:
    """The beginning of what a model writes."""
    prompt = Prompt(
        question=text,
        messages=(Message(role="user", content=text),),
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        passages=(),
        version="test",
    )
    async with aclosing(model.generate(prompt, context)) as deltas:
        parts = [delta.text async for delta in deltas]
    return _shortened(redaction.content_of("".join(parts)).strip())


def _shown(passage: Passage) -> CheckedPassage:
    return CheckedPassage(title=_shortened(passage.title), text=_shortened(passage.text), score=round(passage.score, 4))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _with_tool(result: SourceCheckResult, health: ServerHealth) -> SourceCheckResult:
    return msgspec.structs.replace(result, tool=health.tool, tool_chosen=health.chosen)
