"""The answer cache: the same question, over the same documents, with the same permissions, is answered once."""

import asyncio
import copy
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple

import msgspec

from anabranch.domain.contracts import Answerer, Cache, Clock, Emit, Telemetry
from anabranch.domain.errors import OUT_OF_TIME, DeadlineExceeded
from anabranch.domain.events import AnswerEvent, SourceReplied, unfold
from anabranch.domain.model import (
    CHAT,
    Answer,
    CheckedSentence,
    Citation,
    Context,
    Ground,
    Question,
    Status,
    Timings,
    Until,
)
from anabranch.domain.signals import AnswerShared, CacheLookup
from anabranch.policies.cache import lookup
from anabranch.text.normal_forms import normal_form

# The finish reasons of complete answers; one without a reason may have been cut off.
COMPLETE = ("stop", "end_turn", "eos")
# A question joins a running answer only if that has at least this share of the question's remaining time.
MIN_TIME_SHARE = 0.5

KEYS = "rag:qa:*"

encode = msgspec.json.Encoder(order="deterministic").encode
decode = msgspec.json.Decoder(Answer).decode

Look = Callable[[Question, Context], Awaitable[str | None]]


class Identity(NamedTuple):
    """The cache key of a question. `seen` identifies the documents that the caller may find."""

    key: str
    seen: str


class CachedAnswerer:
    """An Answerer that caches complete, grounded answers from collections, and lets equal questions that run at once
    share one answer. `look` identifies what the caller may find; if it gives None, nothing is cached. `settings` are
    those that the answer depends on. `withholds`: a verified answer is another one if it is streamed, because it may be
    withheld otherwise."""

    def __init__(
        self,
        inner: Answerer,
        *,
        cache: Cache,
        ttl_s: float,
        look: Look,
        settings: tuple[str, ...],
        clock: Clock,
        telemetry: Telemetry,
        withholds: bool = False,
    ) -> None:
        self._inner = inner
        self._cache = cache
        self._ttl_s = ttl_s
        self._look = look
        self._settings = settings
        self._withholds = withholds
        self._clock = clock
        self._telemetry = telemetry
        self._running: dict[str, SharedRun] = {}

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        identity = await self._identity(question, context)
        if identity is None:
            return await self._inner.answer(question, context, emit)
        run = None if question.fresh else self._running.get(identity.key)
        if run is not None and self._joinable(run, question, context):
            self._telemetry.noted(AnswerShared())
        else:
            run = self._start(identity, question, context)
        try:
            return await run.follow(emit, context)
        except NotShareable:
            return await self._inner.answer(question, context, emit)

    async def _identity(self, question: Question, context: Context) -> Identity | None:
        """None if the answer is not cached: it has other sources than collections, or a model that the caller named;
        the question asks for the explanation of its own run; or it is one of chat, which brings tokens, and these are
        removed from the answer."""
        if question.profile.name == CHAT.name:
            return None
        model = question.model
        local = question.sources and all(source.kind == "collection" for source in question.sources)
        if not local or question.until is not Until.GENERATE or model is None or not model.operator or question.explain:
            return None
        seen = await self._look(question, context)
        if seen is None:
            return None
        plain = msgspec.structs.replace(question, text=normalized(question.text), sources=(), model=None, fresh=False)
        collections = tuple(source.slug for source in question.sources)
        version = question.profile.prompt_version
        recipe: dict[str, object] = {"prompt_version": version, "settings": self._settings}
        if self._withholds and question.verify:
            recipe["streaming"] = context.streaming
        try:
            parts = encode((plain, collections, msgspec.structs.replace(model, token=None), recipe, seen))
        except UnicodeEncodeError:  # half of a surrogate pair, from a command line
            return None
        return Identity(f"rag:qa:{hashlib.blake2b(parts, digest_size=20).hexdigest()}:{version}", seen)

    def _joinable(self, run: "SharedRun", question: Question, context: Context) -> bool:
        """Whether a running answer has enough time left for this question, and its errors may name the same address."""
        now = self._clock.monotonic()
        assert question.model is not None, "a question without a model has no identity"
        return (
            not run.task.cancelling()
            and run.leader.deadline - now >= (context.deadline - now) * MIN_TIME_SHARE
            and run.leader.may_know_address(question.model) == context.may_know_address(question.model)
        )

    def _start(self, identity: Identity, question: Question, context: Context) -> "SharedRun":
        run = SharedRun(identity.seen, context, lambda run: self._run(run, identity, question, context))
        run.task.add_done_callback(lambda task: self._ended(identity.key, task))
        if not question.fresh:
            self._running[identity.key] = run
        return run

    def _ended(self, key: str, task: "asyncio.Task[Answer]") -> None:
        if key in self._running and self._running[key].task is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it; the followers raise it

    async def _run(self, run: "SharedRun", identity: Identity, question: Question, context: Context) -> Answer:
        began = self._clock.monotonic()
        known = None if question.fresh else await self._cached(identity)
        if known is not None:
            total_ms = round((self._clock.monotonic() - began) * 1000)
            known = msgspec.structs.replace(known, cached=True, timings=Timings(total_ms=total_ms))
            for event in unfold(known)[:-1]:  # the Run itself emits the last one
                await run.record(event)
            return known
        answer = await self._within_deadline(question, context, run)
        if _cacheable(answer, identity.seen):
            await self._cache.put(identity.key, encode(answer), self._ttl_s)
        return answer

    async def _within_deadline(self, question: Question, context: Context, run: "SharedRun") -> Answer:
        """Enforces the deadline: the Run of the first caller may be gone."""
        limit = asyncio.timeout(context.deadline - self._clock.monotonic())
        try:
            async with limit:
                return await self._inner.answer(question, context, run.record)
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded(OUT_OF_TIME) from None
            raise

    async def _cached(self, identity: Identity) -> Answer | None:
        known = await lookup(self._cache, identity.key, decode, lambda answer: _cacheable(answer, identity.seen))
        self._telemetry.noted(CacheLookup(cache="answer", hit=known is not None))
        return known


class NotShareable(Exception):
    """The shared answer searched other documents than this caller may see."""


class SharedRun:
    """One running answer and its followers. It is cancelled when the last of them leaves. `leader` is the context of
    the first one."""

    def __init__(
        self, seen: str, leader: Context, start: "Callable[[SharedRun], Coroutine[None, None, Answer]]"
    ) -> None:
        self.leader = leader
        self._seen = seen
        self._events: list[AnswerEvent] = []
        self._followers = 0
        self._joined = 0
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(start(self))
        self.task.add_done_callback(lambda _: self._wake())

    async def record(self, event: AnswerEvent) -> None:
        self._events.append(event)
        self._wake()

    async def follow(self, emit: Emit, context: Context) -> Answer:
        """Relay all events from the first on."""
        first, self._joined = not self._joined, self._joined + 1
        self._followers += 1
        try:
            await self._relay(emit, same_caller=_permissions(context) == _permissions(self.leader))
            return await self._outcome(first=first)
        finally:
            self._followers -= 1
            if not self._followers:
                self.task.cancel()

    async def _relay(self, emit: Emit, *, same_caller: bool) -> None:
        at = 0
        while True:
            changed = self._changed
            while at < len(self._events):
                event = self._events[at]
                if not same_caller and isinstance(event, SourceReplied) and event.reply.seen != self._seen:
                    raise NotShareable
                await emit(event)
                at += 1
            if self.task.done() and at == len(self._events):
                return
            if changed is self._changed:
                await changed.wait()

    async def _outcome(self, *, first: bool) -> Answer:
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise asyncio.CancelledError
        if (error := self.task.exception()) is not None:
            raise copy.copy(error) from error  # a copy for each: a traceback grows wherever the error is raised
        answer = self.task.result()
        return answer if first or answer.cached else msgspec.structs.replace(answer, cached=True)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _permissions(context: Context) -> tuple[str | None, tuple[str, ...], bool, tuple[int, ...] | None]:
    return context.user_id, context.groups, context.operator, context.collections


def normalized(text: str) -> str:
    """The question for the key: NFC, and runs of white space as one space."""
    return " ".join(normal_form(text, "NFC").split())


def _cacheable(answer: Answer, seen: str) -> bool:
    """Complete, grounded, not refused, written by the model of the key, and found among the documents that it names."""
    return (
        bool(answer.text)
        and not answer.refused
        and answer.fallback is None
        and answer.finish_reason in COMPLETE
        and answer.ground is Ground.DOCUMENTS
        and bool(answer.replies)
        and all(reply.status is Status.SUCCESS and reply.seen == seen for reply in answer.replies)
        and all(_within(citation, answer) for citation in answer.citations)
        and all(_sentence_within(sentence, answer) for sentence in answer.sentences)
        and all(
            _stands(side.passage, side.start, side.end, answer)
            for conflict in answer.conflicts
            for side in (conflict.claim, conflict.against)
        )
    )


def _within(citation: Citation, answer: Answer) -> bool:
    return 0 <= citation.start <= citation.end <= len(answer.text) and _stands(
        citation.passage, citation.passage_start, citation.passage_end, answer
    )


def _sentence_within(sentence: CheckedSentence, answer: Answer) -> bool:
    spans = ((sentence.start, sentence.end), *sentence.doubted)
    return all(0 <= start <= end <= len(answer.text) for start, end in spans) and all(
        _stands(quote.passage, quote.start, quote.end, answer) for quote in sentence.quotes
    )


def _stands(passage: int, start: int, end: int, answer: Answer) -> bool:
    """Whether there is such a passage, with these characters."""
    return 0 <= passage < len(answer.passages) and 0 <= start <= end <= len(answer.passages[passage].text)
