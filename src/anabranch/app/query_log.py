"""The query log: every question that is answered is recorded once, from whatever surface it came."""

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from anabranch.app.endpoint_resolver import EXTRACTIVE
from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.domain.contracts import Answerer, Emit, Telemetry
from anabranch.domain.errors import AnabranchError, Cancelled, Conflict, InternalError, NotFound
from anabranch.domain.model import Answer, Context, Ground, Passage, Question, Until, Usage, Value
from anabranch.domain.sentences import sentence_views
from anabranch.domain.signals import AnswerRated, QuestionNotRecorded
from anabranch.knowledge.model import EVERYTHING, Caller, Rating
from anabranch.knowledge.records import queries
from anabranch.knowledge.records.database import StoreFailed, new_id

if TYPE_CHECKING:  # it loads numpy
    from anabranch.knowledge.knowledge import Knowledge

CHAT_SURFACE = "chat"
LOOK_EVERY_S = 1.0
# Of an entry with more, the beginning is kept. (A turn of a conversation may have as much on every API that has them.)
MAX_TEXT = 100_000
MAX_PATH = 500
MAX_CITATIONS = 1_000
MAX_SENTENCES = 2_000
# What may wait to be written, in characters: of one user, and of all.
MAX_WAITING_OF_USER = 4_000_000
MAX_WAITING = 16_000_000
ENTRY_SIZE = 2_000
SENTENCE_SIZE = 200
TOO_MANY = "Too much of the query log waits to be written"
OFF = "Questions are not kept here (AGGREGATOR_QUERY_LOG_DAYS is 0)"


class LogEntry(Value):
    """What a surface knows of a question's record before the answer. `collections` are keys; None: derived from the
    question when the record is written. `earlier` are the passages on which the turns in the question's history rest. A
    question with a `transaction` is recorded before its answer is sent."""

    query_id: str = msgspec.field(default_factory=new_id)
    conversation: str | None = None
    collections: tuple[int, ...] | None = None
    earlier: frozenset[queries.FoundAt] = frozenset()
    endpoint: str | None = None
    transaction: str | None = None


class QueryLog:
    """Writes records in the background, in the order in which the questions end, into the data folder if there is one.
    What no longer fits into the queue is not recorded: answers do not wait for it.
    If it is not `enabled`, only payments are recorded, without the question and the answer, and, if it is `counting`,
    the number of questions to each collection."""

    def __init__(self, knowledge: KnowledgeOpener, telemetry: Telemetry, *, enabled: bool, counting: bool) -> None:
        self.enabled = enabled
        self._counting = counting
        self._exists = False
        self._next_look = 0.0
        self._knowledge = knowledge
        self._telemetry = telemetry
        self._writes: dict[asyncio.Task[None], str] = {}
        self._waiting = Counter[str]()
        self._all_waiting = 0

    @property
    def active(self) -> bool:
        """Whether there are records to write to. If another process creates the data folder, this one notices within
        LOOK_EVERY_S: looking for the file with every question is slow."""
        if not self._counting or self._exists:
            return self._exists
        now = time.monotonic()
        if self._knowledge.is_open or now >= self._next_look:
            self._exists, self._next_look = self._knowledge.exists, now + LOOK_EVERY_S
        return self._exists

    def logged(self, inner: Answerer, question: Question, entry: LogEntry | None) -> Answerer:
        """The Answerer, recorded where there is something to record, and something to record it in."""
        is_paid = entry is not None and entry.transaction is not None
        if is_paid or (self.active and (self.enabled or _searches(question, entry))):
            return Logged(inner, self, entry or LogEntry())
        return inner

    def write(self, record: queries.QueryRecord, question: Question, context: Context) -> None:
        user, size = record.user, _size(record)
        if self._waiting[user] + size > MAX_WAITING_OF_USER or self._all_waiting + size > MAX_WAITING:
            self._telemetry.noted(QuestionNotRecorded(reason=TOO_MANY))
            return

        def done(task: asyncio.Task[None]) -> None:
            del self._writes[task]
            self._hold(user, -size)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, StoreFailed):
                self._telemetry.noted(QuestionNotRecorded(reason=error.message))
            elif error is not None:
                self._telemetry.crashed(error, context)

        # What waits keeps neither a long question nor the tokens of its request.
        context = msgspec.structs.replace(context, tokens={}, transactions={})
        task = asyncio.create_task(self.record(record, _named(question), context))
        self._writes[task] = user
        self._hold(user, size)
        task.add_done_callback(done)

    def _hold(self, user: str, size: int) -> None:
        self._all_waiting += size
        self._waiting[user] += size
        if not self._waiting[user]:
            del self._waiting[user]

    async def settled(self, caller: Caller | None = None) -> None:
        """Wait until every question that has ended is recorded, or has failed to be; with a caller who is no operator,
        each of its own."""
        mine = None if caller is None or caller.operator else queries.asker(caller)
        if writes := [task for task, user in self._writes.items() if mine in (None, user)]:
            await asyncio.wait(writes)

    async def record(self, record: queries.QueryRecord, named: tuple[str, ...] | None, context: Context) -> None:
        """Record a question to the collections of these names; None: to all that its caller may see."""
        knowledge = await self._knowledge()
        if record.collections is None:
            keys = await _searched(knowledge, named, Caller.of(context))
            record = msgspec.structs.replace(record, collections=keys)
        await knowledge.record(record)

    async def rate(self, caller: Caller, query: str, rating: Rating, comment: str | None) -> bool:
        """Record feedback on a question of the caller's own; False if there is none of that id."""
        await self.settled(caller)  # the question may have been answered just now
        rated = await (await self._knowledge()).rate(caller, query, rating, comment)
        if rated is not None and rated.first:
            self._telemetry.noted(AnswerRated(surface=rated.surface or "other", rating=rating))
        return rated is not None


class Logged:
    """An Answerer that records its question with surface, settings and outcome."""

    def __init__(self, inner: Answerer, log: QueryLog, entry: LogEntry) -> None:
        self._inner = inner
        self._log = log
        self._entry = entry

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        began = time.monotonic()
        try:
            answer = await self._inner.answer(question, context, emit)
        except BaseException as error:
            self._failed(_code(error), question, context, round((time.monotonic() - began) * 1000))
            raise
        if answer.ground is Ground.ALL_FAILED and (answer.refused or not answer.text):
            self._failed(Ground.ALL_FAILED, question, context, answer.timings.total_ms)
            return answer
        record = self._record(question, context, answer)
        if self._entry.transaction is not None:
            await self._log.record(record, _named(question), context)
        else:
            self._log.write(record, question, context)
        return answer

    def _failed(self, outcome: str, question: Question, context: Context, time_ms: int) -> None:
        """A question without an answer: no response, no payment, no place in a conversation."""
        if self._log.enabled and self._log.active:
            record = msgspec.structs.replace(
                self._asked(question, context), outcome=outcome, transaction_token=None, latency_ms=time_ms
            )
            self._log.write(record, question, context)

    def _asked(self, question: Question, context: Context) -> queries.QueryRecord:
        entry = self._entry
        return queries.QueryRecord(
            id=entry.query_id,
            user=queries.asker(Caller.of(context)),
            original=_beginning(question.text) if self._keeps_text(context) else "",
            collections=entry.collections,
            top_k=question.top_k,
            conversation=entry.conversation,
            earlier=entry.earlier,
            filters=question.filters,
            endpoint=entry.endpoint,
            transaction_token=entry.transaction,
            surface=context.surface,
            settings={**settings_of(question), "streaming": context.streaming},
            key_collections=context.collections,
            key_groups=None if context.operator else context.groups,
            kept=self._log.enabled or entry.transaction is not None,
        )

    def _record(self, question: Question, context: Context, answer: Answer) -> queries.QueryRecord:
        keeps_text = self._keeps_text(context)
        # A cached answer was paid for the first time.
        usage = Usage() if answer.cached else answer.usage or Usage()
        scores = [answer.passages[index].score for index in {citation.passage for citation in answer.citations}]
        writer = question.model if answer.fallback is None else question.fallback
        verbatim = writer is not None and writer.kind == EXTRACTIVE.kind and not answer.refused
        asked = self._asked(question, context)
        return msgspec.structs.replace(
            asked,
            settings={**asked.settings, **_fallback(answer), **_support(answer)},
            answer=_beginning(answer.text) if keeps_text else "",
            refused=answer.refused,
            outcome="refused" if answer.refused else "answered",
            model=None if answer.model is None else answer.model[:MAX_PATH],
            found=tuple(_as_found(one) for reply in answer.replies for one in reply.passages) if keeps_text else (),
            quotes=_quotes(answer) if keeps_text else (),
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            retrieval_ms=answer.timings.retrieval_ms,
            latency_ms=answer.timings.total_ms,
            rewritten=answer.rewritten if keeps_text else None,
            variants=answer.variants if keeps_text else (),
            # Quoted sentences are faithful, also if they were not checked.
            faithfulness=1.0 if verbatim and question.until is Until.GENERATE else answer.faithfulness,
            verdicts=answer.verdicts if answer.sentences else None,
            sentences=sentence_views(answer) if keeps_text and _keeps_sentences(answer) else (),
            relevance=sum(scores) / len(scores) if scores else None,
        )

    def _keeps_text(self, context: Context) -> bool:
        """Not where the log is off and only the payment is recorded, and not of a guest of the open chat surface."""
        guest = context.user_id is None and not context.operator
        return self._log.enabled and not (guest and context.surface == CHAT_SURFACE)


def settings_of(question: Question) -> dict[str, Any]:
    """What shaped the answer besides the text: no address, and nothing that could be a secret."""
    return {
        "profile": question.profile.name,
        "until": question.until,
        "sources": [source.path[:MAX_PATH] for source in question.sources],
        "model": question.model.path[:MAX_PATH] if question.model is not None else None,
        "similarity_threshold": question.similarity_threshold,
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "rerank": question.rerank,
        "rewrite": question.rewrite,
        "diversity": question.diversity,
        "threshold": question.threshold,
        "language": question.language,
        "evidence": question.evidence,
    }


def _fallback(answer: Answer) -> dict[str, str]:
    """Which model has failed, and why. Not the message: it may name an address that readers of the log may not know."""
    if answer.fallback is None:
        return {}
    return {"fallback_from": answer.fallback.failed, "fallback_reason": answer.fallback.reason}


def _support(answer: Answer) -> dict[str, float]:
    return {} if answer.support is None else {"support": answer.support}


def _beginning(text: str) -> str:
    """The text, or the beginning of a long one with a note of its length."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} … [the query log keeps {MAX_TEXT:,} of {len(text):,} characters]"


def _keeps_sentences(answer: Answer) -> bool:
    return len(answer.sentences) <= MAX_SENTENCES and len(answer.text) <= MAX_TEXT


def _as_found(passage: Passage) -> Passage:
    """What an entry keeps of a passage that was found; its text is in the records, or not ours."""
    return msgspec.structs.replace(passage, text="", also_in=(), suspected_instructions=())


def _size(record: queries.QueryRecord) -> int:
    """About how many characters an entry holds until it is written."""
    texts = (record.original, record.answer or "", *(one.quoted_text for one in record.quotes))
    return ENTRY_SIZE + sum(map(len, texts)) + SENTENCE_SIZE * (len(record.sentences) + len(record.found))


def _quotes(answer: Answer) -> tuple[queries.LoggedCitation, ...]:
    cited = ((one, answer.passages[one.passage]) for one in answer.citations[:MAX_CITATIONS])
    return tuple(
        queries.LoggedCitation(
            citation_index=one.passage + 1,
            chunk_id=passage.place.chunk_id,
            document_id=passage.document_id or "",
            quoted_text=passage.text[one.passage_start : one.passage_end],
            start_char=passage.place.start + one.passage_start,
            end_char=passage.place.start + one.passage_end,
        )
        for one, passage in cited
        if passage.place is not None
    )


def _code(error: BaseException) -> str:
    if isinstance(error, AnabranchError):
        return error.code
    return Cancelled.code if isinstance(error, asyncio.CancelledError) else InternalError.code


def _searches(question: Question, entry: LogEntry | None) -> bool:
    """Whether a question goes to collections."""
    keys = None if entry is None else entry.collections
    return bool(keys) or (keys is None and any(source.kind == "collection" for source in question.sources))


def _named(question: Question) -> tuple[str, ...] | None:
    """The names of the collections that a question went to; None: all that its caller may see."""
    names = tuple(source.slug for source in question.sources if source.kind == "collection")
    return question.filters.collections if EVERYTHING in names else names


async def _searched(knowledge: "Knowledge", named: tuple[str, ...] | None, caller: Caller) -> tuple[int, ...]:
    """The keys of these collections."""
    if named == ():
        return ()
    try:
        return tuple(one.key for one in await knowledge.chosen(caller, named))
    except (NotFound, Conflict):  # deleted meanwhile, or the source says that the name is ambiguous
        return ()
