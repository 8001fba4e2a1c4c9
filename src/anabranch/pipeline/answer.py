"""The stages of the pipeline in order. Route, fan-out, guard and generation are here; rewrite, merge, prompt and
cite have files of their own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple, assert_never

import msgspec

from anabranch.domain.contracts import Clock, Directory, Emit, Generator, Source, Telemetry
from anabranch.domain.errors import (
    EmptyReply,
    GenerationFailed,
    GenerationTimedOut,
    InvalidQuestion,
    RetrievalTimedOut,
)
from anabranch.domain.events import (
    AnswerEvent,
    FellBack,
    GenerationStarted,
    PromptComposed,
    RetrievalFinished,
    RetrievalStarted,
    SourceReplied,
    Token,
)
from anabranch.domain.model import (
    Answer,
    Citation,
    Context,
    Delta,
    Endpoint,
    Fallback,
    Ground,
    Passage,
    Prompt,
    Query,
    Question,
    SourceConflict,
    SourceReply,
    Status,
    Timings,
    Until,
    Usage,
)
from anabranch.pipeline.cite import cite, cited
from anabranch.pipeline.merge import Merged, Merging
from anabranch.pipeline.prompt import Compaction, compose
from anabranch.pipeline.prompt_injection import checked_answer, checked_deltas, marked
from anabranch.pipeline.rewrite import Rewritten, rewrite
from anabranch.pipeline.stop import STOPPED, stopped
from anabranch.text.messages import message

if TYPE_CHECKING:
    from anabranch.evidence.judge import Judge
    from anabranch.pipeline.explain import PipelineNotes
    from anabranch.pipeline.verify import Verified, Verifier, Verifying
    from anabranch.text.safe_markdown import SafeMarkdown


def observed(
    emit: Emit, telemetry: Telemetry, context: Context, observe: Callable[[AnswerEvent], None] = lambda _: None
) -> Emit:
    async def emit_observed(event: AnswerEvent) -> None:
        telemetry.happened(event, context)
        observe(event)
        await emit(event)

    return emit_observed


NO_VARIANTS: tuple[str, ...] = ()
EVIDENCE_DEPTH = 20


class SourceQuery(NamedTuple):
    path: str
    source: Source
    query: Query


def route(
    question: Question,
    directory: Directory,
    text: str | None = None,
    variants: tuple[str, ...] = NO_VARIANTS,
    hypothetical: str | None = None,
) -> tuple[SourceQuery, ...]:
    return tuple(
        SourceQuery(
            path=endpoint.path,
            source=directory.source(endpoint),
            query=Query(
                text=endpoint.query or text or question.text,
                limit=_depth(question, endpoint),
                similarity_threshold=question.similarity_threshold,
                filters=question.filters,
                rerank=question.rerank,
                variants=variants,
                hypothetical=hypothetical,
                diversity=question.diversity,
                raw=question.ranking is not None,
                near_duplicates=question.profile.near_duplicates,
                complete=question.evidence == "rank",
                explain=question.explain,
            ),
        )
        for endpoint in question.sources
    )


def _depth(question: Question, endpoint: Endpoint) -> int:
    """How many passages to ask for. Evidence is looked for further down in collections, which are searched here."""
    deeper = question.evidence == "rank" and endpoint.kind == "collection"
    return max(question.top_k, EVIDENCE_DEPTH) if deeper else question.top_k


async def fan_out(
    queries: Sequence[tuple[str, Source, Query]],
    context: Context,
    emit: Emit,
    clock: Clock,
    telemetry: Telemetry,
    budget_s: float,
    setting: str,
) -> tuple[SourceReply, ...]:
    """The replies in the order of the queries; each is emitted as it arrives, at the latest after `budget_s`, which
    `setting` sets."""
    own = _until(context, clock.monotonic() + budget_s)
    searching: dict[int, asyncio.Task[SourceReply]] = {}
    late = SourceReply(
        path="", status=Status.TIMEOUT, error=f"The source did not answer within {budget_s:.3g} seconds ({setting})."
    )

    async def ask(index: int, path: str, source: Source, query: Query) -> SourceReply:
        began = clock.monotonic()
        try:
            reply = await source.search(query, own)
        except TimeoutError:
            reply = msgspec.structs.replace(late, path=path)
        except asyncio.CancelledError:
            # Of all that is cancelled, `end` has taken these out; but the whole question may be cancelled as well.
            if index in searching or tasks[index].uncancel():
                raise
            reply = msgspec.structs.replace(late, path=path)
        except Exception as error:  # noqa: BLE001  task boundary: one source's bug fails only that source
            telemetry.crashed(error, context)
            reply = SourceReply(path=path, status=Status.ERROR, error="Querying this source failed on our side.")
        searching.pop(index, None)
        reply = msgspec.structs.replace(reply, latency_ms=round((clock.monotonic() - began) * 1000))
        await emit(SourceReplied(index=index, reply=reply))
        return reply

    def end() -> None:
        for index in tuple(searching):
            searching.pop(index).cancel()

    # One timer for all: a time-out for each would cost as much as another source.
    ending = asyncio.get_running_loop().call_later(budget_s, end)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(index, *query)) for index, query in enumerate(queries)]
            searching.update(enumerate(tasks))
    finally:
        ending.cancel()
    return tuple(task.result() for task in tasks)


# The mean is over the best passages only: sources without relevant passages must not lower it.
BEST = 5


def ground(replies: Sequence[SourceReply], passages: Sequence[Passage], threshold: float | None = None) -> Ground:
    """What an answer can be based on; with a threshold, passages must be that similar to the question on average."""
    if passages:
        weak = threshold is not None and similarity(passages) < threshold
        return Ground.WEAK if weak else Ground.DOCUMENTS
    if all(reply.empty for reply in replies):
        return Ground.NO_SOURCES
    if all(reply.status is not Status.SUCCESS for reply in replies):
        return Ground.ALL_FAILED
    return Ground.NOTHING_FOUND


def similarity(passages: Sequence[Passage]) -> float:
    """The mean of the best scores, each weighted by itself, which the threshold is compared with. The weights keep
    unrelated passages of a small collection from lowering the mean."""
    best = nlargest(BEST, (passage.score for passage in passages))
    return sum(score * score for score in best) / (sum(best) or 1.0)


def refusal(missing: Ground, replies: Sequence[SourceReply], language: str | None = None) -> str:
    """The text of a refusal, which says what is missing."""
    count = len(replies)
    answered = sum(reply.status is Status.SUCCESS for reply in replies)
    match missing:
        case Ground.NO_SOURCES:
            return message("refusal_no_documents" if replies else "refusal_no_sources", language)
        case Ground.ALL_FAILED:
            return message("refusal_failed_one" if count == 1 else "refusal_failed_all", language, count=count)
        case Ground.WEAK:
            return message("refusal_weak", language)
        case Ground.NOTHING_FOUND | Ground.DOCUMENTS if count == 1:
            return message("refusal_nothing_one", language)
        case Ground.NOTHING_FOUND | Ground.DOCUMENTS:
            key = "refusal_nothing_all" if answered == count else "refusal_nothing_some"
            return message(key, language, answered=answered, count=count)
        case _:
            assert_never(missing)


class Generated(NamedTuple):
    """What `model` has written, and why it was that one, if another one should have."""

    text: str
    usage: Usage | None
    finish_reason: str | None
    time_ms: int
    model: str
    fallback: Fallback | None = None
    citations: tuple[Citation, ...] = ()
    support: float | None = None
    abstained: bool = False
    removed_links: tuple[str, ...] = ()


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


FAILED = "Model generation failed: "


async def generate(
    generator: Generator,
    model: str,
    prompt: Prompt,
    context: Context,
    emit: Emit,
    clock: Clock,
    timeout_s: float,
    fallback: Fallback | None = None,
    verifying: "Verifying | None" = None,
) -> Generated:
    """What the model writes; with `fallback` it replaces one that has failed. `verifying` learns what is quoted."""
    await emit(GenerationStarted(model=model) if fallback is None else FellBack(model=model, fallback=fallback))
    began = clock.monotonic()
    text: list[str] = []
    blank: list[str] = []
    usage: Usage | None = None
    finish_reason: str | None = None
    support: float | None = None
    abstained = False
    citations: list[Citation] = []
    checked = checked_answer(prompt) if prompt.defence else None
    limit = nullcontext() if context.deadline - began <= timeout_s else asyncio.timeout(timeout_s)
    context = _until(context, began + timeout_s)
    try:
        # Not the Run's own deadline: that one ends the question, with its own error.
        async with limit, aclosing(generator.generate(prompt, context)) as deltas:
            async for delta in _shown(deltas, prompt, checked):
                usage = delta.usage or usage
                finish_reason = delta.finish_reason or finish_reason
                support = round(delta.support, 4) if delta.support is not None else support
                abstained = abstained or delta.abstained
                if delta.quotes:
                    citations += cited(delta, sum(map(len, text)), prompt.passages)
                if verifying is not None:
                    verifying.learn(delta)
                blank.append(delta.text)
                # White space before the first word is no answer yet.
                if delta.text if text else delta.text.strip():
                    text.append("".join(blank))
                    blank.clear()
                    await emit(Token(text=text[-1]))
            if not text and not (prompt.stop and finish_reason == STOPPED):
                raise _empty(finish_reason)
    except TimeoutError:
        late = f"the model did not finish within {timeout_s:.3g} seconds (AGGREGATOR_GENERATION_TIMEOUT)."
        raise _reported(GenerationTimedOut(late), model, _since(began, clock), started=bool(text)) from None
    except GenerationFailed as error:
        raise _reported(error, model, _since(began, clock), started=bool(text)) from error
    return Generated(
        text="".join(text),
        usage=usage,
        finish_reason=finish_reason,
        time_ms=_since(began, clock),
        model=model,
        fallback=fallback,
        citations=tuple(citations),
        support=support,
        abstained=abstained,
        removed_links=checked.removed if checked is not None else (),
    )


def _shown(deltas: AsyncIterator[Delta], prompt: Prompt, checked: "SafeMarkdown | None") -> AsyncIterator[Delta]:
    """What a model writes as the answer shows it."""
    if prompt.stop:
        deltas = stopped(deltas, prompt.stop)
    return deltas if checked is None else checked_deltas(deltas, checked)


def _empty(finish_reason: str | None) -> EmptyReply:
    ended = f" (it ended with {finish_reason})" if finish_reason not in (None, "stop") else ""
    return EmptyReply(f"The model's reply holds no answer{ended}.")


def _reported(error: GenerationFailed, model: str, latency_ms: int, *, started: bool) -> GenerationFailed:
    """The error as callers get it. It does not keep the kind of the failure: the model has been retried already."""
    details = {**error.details, "model_path": model, "latency_ms": latency_ms}
    reported = type(error)(f"{FAILED}{error.message}", **details)
    reported.known_reason, reported.started = error.reason, started
    return reported


def _until(context: Context, deadline: float) -> Context:
    return msgspec.structs.replace(context, deadline=deadline) if deadline < context.deadline else context


def _since(began: float, clock: Clock) -> int:
    return round((clock.monotonic() - began) * 1000)


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
    ) -> None:
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
        answer = self._with_text(answer, prompt, written, verified, context)
        timings = watch.timings(retrieval_ms=retrieval_ms, generation_ms=written.time_ms)
        return self._timed(answer, began, timings, notes)

    def _with_text(
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
                citations = () if refused else written.citations or cite(text, prompt.passages)
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
        return merged._replace(passages=await marked(passages) if question.profile.defence else passages)

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
        return written._replace(time_ms=_since(began, self._clock))

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
