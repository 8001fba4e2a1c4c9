"""The order of the pipeline's stages."""

import msgspec

from anabranch.domain.contracts import Clock, Directory, Emit, Telemetry, TokenCounter
from anabranch.domain.errors import InvalidQuestion, RetrievalTimedOut
from anabranch.domain.events import RetrievalFinished, RetrievalStarted, Token
from anabranch.domain.model import (
    Answer,
    Context,
    Endpoint,
    Ground,
    Passage,
    Prompt,
    Question,
    SourceReply,
    Status,
    Timings,
    Until,
)
from anabranch.pipeline.cite import cite
from anabranch.pipeline.emitting import observed
from anabranch.pipeline.fanout import fan_out
from anabranch.pipeline.generate import Generated, generate
from anabranch.pipeline.guard import ground, refusal
from anabranch.pipeline.merge import Merging
from anabranch.pipeline.prompt import compose
from anabranch.pipeline.rewrite import Rewritten, rewrite
from anabranch.pipeline.route import route

ABSTAINED = "abstained"
# The share of the remaining time that rewriting may take.
REWRITE_SHARE = 0.2


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    retrieval_timeout_s: float
    generation_timeout_s: float
    context_tokens: int
    query_context_tokens: int = 4_000
    rewrite_timeout_s: float = 10.0


class Pipeline:
    """The Answerer: rewrite if the question asks for it, route, fan out, merge, guard, prompt, generate, cite."""

    def __init__(
        self, *, directory: Directory, counter: TokenCounter, clock: Clock, telemetry: Telemetry, limits: Limits
    ) -> None:
        self._directory = directory
        self._counter = counter
        self._clock = clock
        self._telemetry = telemetry
        self._limits = limits

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        began = self._clock.monotonic()
        merging = Merging(question)
        emit = observed(emit, self._telemetry, context, merging.read)
        rewritten = await self._rewritten(question, context, began)
        replies = await self._retrieved(question, rewritten, context, emit)
        retrieval_ms = self._since_ms(began)
        found = sum(len(reply.passages) for reply in replies)
        await emit(RetrievalFinished(passages=found, time_ms=retrieval_ms))

        with self._telemetry.span("merge", context):
            merged = await merging.merged(replies, self._merging_budget_s(question, context, began))
        passages = merged.passages
        basis = ground(replies, passages, question.threshold if question.until is Until.GENERATE else None)
        answer = Answer(
            text="",
            ground=basis,
            replies=replies,
            passages=passages,
            rewritten=rewritten.text if rewritten.text != question.text else None,
            variants=rewritten.variants,
            distinct=merged.distinct,
            compared=merged.complete,
        )
        if question.profile.timeout_fails and replies and all(reply.status is Status.TIMEOUT for reply in replies):
            raise RetrievalTimedOut("None of the sources answered in time.")
        if question.until is Until.MERGE:
            return self._timed(answer, began, retrieval_ms)
        if basis is Ground.WEAK or (question.refuse and basis is not Ground.DOCUMENTS):
            text = refusal(basis, replies, question.language)
            await emit(Token(text=text))
            return self._timed(msgspec.structs.replace(answer, text=text, refused=True), began, retrieval_ms)
        if question.model is None:
            raise InvalidQuestion("No model is named, and none is configured.")

        prompt = await self._composed(question, passages, basis, context)
        written = await self._generated(question.model, prompt, context, emit)
        with self._telemetry.span("cite", context):
            citations = cite(written.text, prompt.passages)
        answer = msgspec.structs.replace(
            answer,
            text=written.text,
            passages=prompt.passages,
            citations=citations,
            usage=written.usage,
            finish_reason=written.finish_reason,
            model=question.model.path,
            prompt_version=prompt.version,
            omitted=prompt.omitted,
            refused=written.finish_reason == ABSTAINED,
        )
        return self._timed(answer, began, retrieval_ms, written.time_ms)

    async def _rewritten(self, question: Question, context: Context, now: float) -> Rewritten:
        if not question.rewrite or question.model is None:
            return Rewritten(question.text)
        budget_s = min(self._limits.rewrite_timeout_s, (context.deadline - now) * REWRITE_SHARE)
        generator = self._directory.generator(question.model, retried=False)
        with self._telemetry.span("rewrite", context) as span:
            return await rewrite(question.text, question.history, generator, span.context, budget_s)

    async def _retrieved(
        self, question: Question, rewritten: Rewritten, context: Context, emit: Emit
    ) -> tuple[SourceReply, ...]:
        routes = route(question, self._directory, *rewritten)
        await emit(RetrievalStarted(sources=tuple(one.path for one in routes)))
        budget_s = self._retrieval_budget_s(question, context, self._clock.monotonic())
        with self._telemetry.span("retrieve", context, **{"anabranch.sources": len(routes)}) as span:
            return await fan_out(routes, span.context, emit, self._clock, self._telemetry, budget_s)

    async def _composed(
        self, question: Question, passages: tuple[Passage, ...], basis: Ground, context: Context
    ) -> Prompt:
        documents = question.profile.prompt == "documents"
        budget = self._limits.context_tokens if documents else self._limits.query_context_tokens
        with self._telemetry.span("prompt", context):
            return await compose(question, passages, basis, self._counter, budget)

    async def _generated(self, model: Endpoint, prompt: Prompt, context: Context, emit: Emit) -> Generated:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": model.kind,
            "gen_ai.request.model": model.slug,
            "gen_ai.request.max_tokens": prompt.max_tokens,
            "gen_ai.request.temperature": prompt.temperature,
        }
        with self._telemetry.span("generate", context, **attributes) as span:
            generator, timeout_s = self._directory.generator(model), self._limits.generation_timeout_s
            written = await generate(generator, model.path, prompt, span.context, emit, self._clock, timeout_s)
            if written.usage is not None:
                span.set("gen_ai.usage.input_tokens", written.usage.prompt_tokens)
                span.set("gen_ai.usage.output_tokens", written.usage.completion_tokens)
            if written.finish_reason is not None:
                span.set("gen_ai.response.finish_reasons", (written.finish_reason,))
            return written

    def _retrieval_budget_s(self, question: Question, context: Context, now: float) -> float:
        """The time for the sources; if a model still has to answer, at most half of what is left."""
        left = context.deadline - now
        if question.patience_s is not None:
            return min(question.patience_s, left)
        return min(self._limits.retrieval_timeout_s, left * (0.5 if question.until is Until.GENERATE else 0.9))

    def _merging_budget_s(self, question: Question, context: Context, began: float) -> float:
        ends = context.deadline if question.patience_s is None else began + question.patience_s
        return min(ends, context.deadline) - self._clock.monotonic()

    def _timed(self, answer: Answer, began: float, retrieval_ms: int, generation_ms: int = 0) -> Answer:
        timings = Timings(retrieval_ms=retrieval_ms, generation_ms=generation_ms, total_ms=self._since_ms(began))
        return msgspec.structs.replace(answer, timings=timings)

    def _since_ms(self, began: float) -> int:
        return round((self._clock.monotonic() - began) * 1000)
