"""The stages of the pipeline in order: each has a file of its own."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from anabranch.domain.contracts import Clock, Directory, Emit, RunInThread, Telemetry
from anabranch.domain.errors import (
    GenerationFailed,
    InvalidQuestion,
    RetrievalTimedOut,
)
from anabranch.domain.events import (
    AnswerEvent,
    PromptComposed,
    RetrievalFinished,
    RetrievalStarted,
    Token,
)
from anabranch.domain.model import (
    Answer,
    Citation,
    Context,
    Endpoint,
    Fallback,
    Ground,
    Passage,
    Prompt,
    Question,
    SourceConflict,
    SourceReply,
    Status,
    Timings,
    Until,
)
from anabranch.pipeline.cite import cite, is_short
from anabranch.pipeline.generate import FAILED, Generated, generate
from anabranch.pipeline.ground import ground, refusal, similarity
from anabranch.pipeline.merge import Merged, Merging
from anabranch.pipeline.prompt import Compaction, compose
from anabranch.pipeline.prompt_injection import checked_answer, marked
from anabranch.pipeline.retrieve import fan_out, route
from anabranch.pipeline.rewrite import Rewritten, rewrite

if TYPE_CHECKING:
    from anabranch.evidence.judge import Judge
    from anabranch.pipeline.explain import PipelineNotes
    from anabranch.pipeline.verify import Verified, Verifier, Verifying


def observed(
    emit: Emit, telemetry: Telemetry, context: Context, observe: Callable[[AnswerEvent], None] = lambda _: None
) -> Emit:
    async def emit_observed(event: AnswerEvent) -> None:
        telemetry.happened(event, context)
        observe(event)
        await emit(event)

    return emit_observed


def _found(
    question: Question, rewritten: Rewritten, replies: tuple[SourceReply, ...], merged: Merged, basis: Ground
) -> Answer:
    """The answer before anything is written."""
    return Answer(
        text="",
        ground=basis,
        replies=replies,
        passages=merged.passages,
        rewritten=rewritten.text if rewritten.text != question.text else None,
        variants=rewritten.variants,
        distinct=merged.distinct,
        compared=merged.complete,
    )


def _with_verdicts(answer: Answer, verified: "Verified", conflicts: tuple[SourceConflict, ...]) -> Answer:
    return msgspec.structs.replace(
        answer,
        sentences=verified.sentences,
        faithfulness=verified.faithfulness,
        unfaithful=verified.unfaithful,
        left_out=verified.left_out,
        conflicts=conflicts,
    )


def _notes(question: Question) -> "PipelineNotes":
    from anabranch.pipeline.explain import PipelineNotes  # noqa: PLC0415  few questions need it

    return PipelineNotes(question)


# The share of the remaining time that rewriting may take.
REWRITE_SHARE = 0.2
# And the share that judging the evidence may take.
EVIDENCE_SHARE = 0.25


class StageWatch:
    """Measures the stages of one answer. Without a clock it measures nothing: a recorded run must read the clock as
    often as the release that recorded it."""

    def __init__(self, clock: Clock | None, observe: Callable[[AnswerEvent], None]) -> None:
        self._clock = clock
        self._observe = observe
        self._began = self._last = clock.monotonic() if clock is not None else 0.0
        self._measured: dict[str, int] = {}
        self._waits = clock is not None

    def ended(self, stage: str | None = None) -> None:
        """The time since the last stage belongs to this one; to none without a name."""
        if self._clock is not None:
            now = self._clock.monotonic()
            if stage is not None:
                self._measured[stage] = round((now - self._last) * 1000)
            self._last = now

    def read(self, event: AnswerEvent) -> None:
        if self._waits and isinstance(event, Token):
            self._waits = False
            if self._clock is not None:
                self._measured["first_token_ms"] = round((self._clock.monotonic() - self._began) * 1000)
        self._observe(event)

    def timings(self, **known: int) -> Timings:
        return Timings(**known, **self._measured)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    retrieval_timeout_s: float
    generation_timeout_s: float
    context_tokens: int
    query_context_tokens: int = 4_000
    rewrite_timeout_s: float = 10.0


class Pipeline:
    """The Answerer: rewrite if the question asks for it, route, fan out, merge, guard, prompt, generate, cite."""

    def __init__(
        self,
        *,
        directory: Directory,
        clock: Clock,
        telemetry: Telemetry,
        limits: Limits,
        compaction: Compaction | None = None,
        judge: "Callable[[], Judge] | None" = None,
        verifier: "Callable[[], Verifier] | None" = None,
        measured: bool = False,
        run: RunInThread = asyncio.to_thread,
    ) -> None:
        self._run = run
        self._stage_clock = clock if measured else None
        self._verifier = verifier
        self._compaction = compaction
        self._directory = directory
        self._judge = judge
        self._clock = clock
        self._telemetry = telemetry
        self._limits = limits

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        began = self._clock.monotonic()
        notes = _notes(question) if question.explain else None
        merging = Merging(question, notes)
        watch = StageWatch(self._stage_clock, merging.read)
        emit = observed(emit, self._telemetry, context, watch.read)
        rewritten = await self._rewritten(question, context, began)
        replies = await self._retrieved(question, rewritten, context, emit)
        retrieval_ms = self._since_ms(began)
        found = sum(len(reply.passages) for reply in replies)
        await emit(RetrievalFinished(passages=found, time_ms=retrieval_ms))
        watch.ended()

        merged = await self._merged(question, merging, replies, context, began, notes, watch)
        passages = merged.passages
        basis = ground(replies, passages, question.threshold if question.until is Until.GENERATE else None)
        answer = _found(question, rewritten, replies, merged, basis)
        if question.profile.timeout_fails and replies and all(reply.status is Status.TIMEOUT for reply in replies):
            raise RetrievalTimedOut("None of the sources answered in time.")
        if question.until is Until.MERGE:
            return self._timed(answer, began, watch.timings(retrieval_ms=retrieval_ms), notes)
        if basis is Ground.WEAK or (question.refuse and basis is not Ground.DOCUMENTS):
            text, timings = refusal(basis, replies, question.language), watch.timings(retrieval_ms=retrieval_ms)
            await emit(Token(text=text))
            answer = msgspec.structs.replace(answer, text=text, refused=True)
            return self._timed(answer, began, timings, notes)
        if question.model is None:
            raise InvalidQuestion("No model is named, and none is configured.")

        prompt = await self._composed(question, question.model, passages, basis, context, notes)
        watch.ended("prompt_ms")
        written, verified = await self._written(question, question.model, prompt, context, emit, watch)
        answer = await self._with_text(answer, prompt, written, verified, context)
        timings = watch.timings(retrieval_ms=retrieval_ms, generation_ms=written.time_ms)
        return self._timed(answer, began, timings, notes)

    async def _with_text(
        self, answer: Answer, prompt: Prompt, written: Generated, verified: "Verified | None", context: Context
    ) -> Answer:
        """The answer with what the model has written, and its citations."""
        refused = written.abstained
        if verified is not None:
            text, citations, refused = verified.text, verified.citations, refused or verified.withheld
            answer = _with_verdicts(answer, verified, () if refused else prompt.conflicts)
        else:
            with self._telemetry.span("cite", context):
                text = written.text
                # A refusal names a document, whose title may look like a mark.
                citations = () if refused else written.citations or await self._cited(text, prompt.passages)
        return msgspec.structs.replace(
            answer,
            text=text,
            passages=prompt.passages,
            unused=prompt.unused,
            citations=citations,
            usage=written.usage,
            finish_reason=written.finish_reason,
            model=written.model,
            fallback=written.fallback,
            prompt_version=prompt.version,
            omitted=prompt.omitted,
            refused=refused,
            support=written.support,
            removed_links=written.removed_links,
        )

    async def _cited(self, text: str, passages: Sequence[Passage]) -> tuple[Citation, ...]:
        return cite(text, passages) if is_short(text, passages) else await self._run(cite, text, passages)

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
        budget_s, setting = self._retrieval_budget(question, context, self._clock.monotonic())
        with self._telemetry.span("retrieve", context, **{"anabranch.sources": len(routes)}) as span:
            return await fan_out(routes, span.context, emit, self._clock, self._telemetry, budget_s, setting)

    async def _merged(
        self,
        question: Question,
        merging: Merging,
        replies: tuple[SourceReply, ...],
        context: Context,
        began: float,
        notes: "PipelineNotes | None",
        watch: StageWatch,
    ) -> Merged:
        """The passages of all replies, best first; those that seem to give orders say so."""
        if notes is not None:
            notes.returned(replies)
        with self._telemetry.span("merge", context):
            merged = await merging.merged(replies, self._merging_budget_s(question, context, began))
        watch.ended("merge_ms")
        passages = await self._ranked(question, merged.passages, context, notes)
        watch.ended("evidence_ms")
        return merged._replace(passages=await marked(passages, self._run) if question.profile.defence else passages)

    async def _ranked(
        self, question: Question, passages: tuple[Passage, ...], context: Context, notes: "PipelineNotes | None"
    ) -> tuple[Passage, ...]:
        """By evidence, if the question asks for it. More were looked for than it wants: the best are kept."""
        most = question.top_k * len(question.sources) if question.evidence != "off" else len(passages)
        if self._judge is None or question.evidence == "off" or not passages:
            if notes is not None:
                notes.not_judged(passages, most)
            return passages[:most]
        from anabranch.evidence.ranking import ranked_by_evidence  # noqa: PLC0415  chat does not need it

        noted = (lambda _: None) if notes is None else partial(notes.judged, passages)
        with self._telemetry.span("evidence", context):
            left_s = (context.deadline - self._clock.monotonic()) * EVIDENCE_SHARE
            ranked = await ranked_by_evidence(self._judge(), question.text, passages, left_s, noted)
        if notes is not None:
            notes.ranked_by_evidence(ranked, most)
        return ranked[:most]

    async def _conflicts(
        self, question: Question, passages: tuple[Passage, ...], context: Context
    ) -> tuple[SourceConflict, ...]:
        """Where the passages contradict each other on what is asked."""
        if self._verifier is None or len(passages) < 2:
            return ()
        with self._telemetry.span("conflicts", context):
            left_s = (context.deadline - self._clock.monotonic()) * EVIDENCE_SHARE
            return await self._verifier().conflicts(question.text, passages, left_s, self._crashed(context))

    def _crashed(self, context: Context) -> Callable[[Exception], None]:
        return lambda error: self._telemetry.crashed(error, context)

    async def _composed(
        self,
        question: Question,
        model: Endpoint,
        passages: tuple[Passage, ...],
        basis: Ground,
        context: Context,
        notes: "PipelineNotes | None",
    ) -> Prompt:
        documents = question.profile.prompt == "documents"
        budget = self._limits.context_tokens if documents else self._limits.query_context_tokens
        # The operator's models get excerpts. One that quotes, or that the caller has named, gets whole passages.
        compaction = self._compaction if model.operator and model.kind != "extractive" else None
        conflicts = await self._conflicts(question, passages, context) if question.verify else ()
        with self._telemetry.span("prompt", context):
            prompt = await compose(question, passages, basis, budget, compaction, context.boundary, conflicts)
        if notes is not None:
            notes.composed(passages, prompt, budget, compaction)
        return prompt

    async def _written(
        self, question: Question, model: Endpoint, prompt: Prompt, context: Context, emit: Emit, watch: StageWatch
    ) -> "tuple[Generated, Verified | None]":
        """What the model writes, with each sentence checked as soon as it is complete, if the question asks for it."""
        if not question.verify or self._verifier is None:
            return await self._generated(question, model, prompt, context, emit), None
        await emit(PromptComposed(passages=prompt.passages))
        strict = question.answer_policy == "strict"
        verifying = self._verifier().verifying(
            prompt.passages,
            emit,
            strict=strict,
            streaming=context.streaming,
            deadline=context.deadline,
            language=question.language,
            crashed=self._crashed(context),
            conflicts=prompt.conflicts,
            markdown=checked_answer(prompt) if strict and prompt.defence else None,
        )
        async with verifying:
            written = await self._generated(question, model, prompt, context, verifying.emit, verifying)
            watch.ended()
            with self._telemetry.span("verify", context):
                verified = await verifying.finish()
            watch.ended("verification_ms")
            return written, verified

    async def _generated(
        self,
        question: Question,
        model: Endpoint,
        prompt: Prompt,
        context: Context,
        emit: Emit,
        verifying: "Verifying | None" = None,
    ) -> Generated:
        """What the model writes, or the question's fallback, if the model fails before its first token. Without
        passages the fallback has nothing to write."""
        began = self._clock.monotonic()
        try:
            return await self._written_by(model, prompt, context, emit, verifying=verifying)
        except GenerationFailed as error:
            if error.started or question.fallback is None or not prompt.passages:
                raise
            why = Fallback(failed=model.path, reason=error.reason, message=error.message.removeprefix(FAILED))
        written = await self._written_by(question.fallback, prompt, context, emit, why, verifying=verifying)
        return written._replace(time_ms=self._since_ms(began))

    async def _written_by(
        self,
        model: Endpoint,
        prompt: Prompt,
        context: Context,
        emit: Emit,
        fallback: Fallback | None = None,
        *,
        verifying: "Verifying | None",
    ) -> Generated:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": model.kind,
            "gen_ai.request.model": model.slug,
            "gen_ai.request.max_tokens": prompt.max_tokens,
            "gen_ai.request.temperature": prompt.temperature,
        }
        with self._telemetry.span("generate", context, **attributes) as span:
            generator, timeout_s = self._directory.generator(model), self._limits.generation_timeout_s
            written = await generate(
                generator, model.path, prompt, span.context, emit, self._clock, timeout_s, fallback, verifying
            )
            if written.usage is not None:
                span.set("gen_ai.usage.input_tokens", written.usage.prompt_tokens)
                span.set("gen_ai.usage.output_tokens", written.usage.completion_tokens)
            if written.finish_reason is not None:
                span.set("gen_ai.response.finish_reasons", (written.finish_reason,))
            return written

    def _retrieval_budget(self, question: Question, context: Context, now: float) -> tuple[float, str]:
        """The seconds for the sources, and the setting that bounds them; if a model still has to answer, they have at
        most half of what is left."""
        own, setting = self._limits.retrieval_timeout_s, "AGGREGATOR_RETRIEVAL_TIMEOUT"
        left = (context.deadline - now) * (0.5 if question.until is Until.GENERATE else 0.9)
        if question.patience_s is not None:
            own, setting, left = question.patience_s, "aggregator.totalTimeoutSecs", context.deadline - now
        return (own, setting) if own <= left else (left, "AGGREGATOR_TOTAL_TIMEOUT")

    def _merging_budget_s(self, question: Question, context: Context, began: float) -> float:
        ends = context.deadline if question.patience_s is None else began + question.patience_s
        return min(ends, context.deadline) - self._clock.monotonic()

    def _timed(self, answer: Answer, began: float, timings: Timings, notes: "PipelineNotes | None") -> Answer:
        timings = msgspec.structs.replace(timings, total_ms=self._since_ms(began))
        if notes is not None:
            explanation = notes.ended(answer, similarity(answer.passages))
            answer = msgspec.structs.replace(answer, explanation=explanation)
        return msgspec.structs.replace(answer, timings=timings)

    def _since_ms(self, began: float) -> int:
        return round((self._clock.monotonic() - began) * 1000)
