"""Remembering: the same question, to the same documents, for the same rights, is answered once."""

import asyncio
import copy
import hashlib
import unicodedata
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from anabranch.domain.contracts import Answerer, Cache, Clock, Emit, Telemetry
from anabranch.domain.errors import DeadlineExceeded
from anabranch.domain.events import AnswerEvent, SourceReplied, unfold
from anabranch.domain.model import Answer, Citation, Context, Ground, Question, Status, Timings, Until, Value
from anabranch.domain.signals import CacheLooked, Joined

# What a finished answer says at its end; one that says nothing may have been cut off.
WHOLE = ("stop", "end_turn", "eos")
# Who comes to an answer that is under way must not inherit too little time.
TIME_SHARE = 0.5

encode = msgspec.json.Encoder(order="deterministic").encode
decode = msgspec.json.Decoder(Answer).decode

Look = Callable[[Question, Context], Awaitable[str | None]]


class Recipe(Value):
    """What an answer depends on besides its question: the prompt's version, and whatever of the settings has a say."""

    prompt_version: str
    settings: tuple[str, ...] = ()


class Identity(NamedTuple):
    """What makes two questions the same. `seen` stands for the documents that the caller may find."""

    key: str
    seen: str


class CacheRequest(NamedTuple):
    user: str | None
    groups: tuple[str, ...]
    operator: bool

    @classmethod
    def of(cls, context: Context) -> "CacheRequest":
        return cls(context.user_id, context.groups, context.operator)


class CachedAnswerer:
    """An Answerer that keeps whole, well-founded answers from collections for a while, and lets those who ask the same
    at the same time share one answer. `look` tells what the caller may find; without it, nothing is remembered."""

    def __init__(
        self,
        inner: Answerer,
        *,
        cache: Cache,
        ttl_s: float,
        look: Look,
        recipe: Callable[[Question], Recipe],
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._inner = inner
        self._cache = cache
        self._ttl_s = ttl_s
        self._look = look
        self._recipe = recipe
        self._clock = clock
        self._telemetry = telemetry
        self._flights: dict[str, SharedRun] = {}

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        identity = await self._identity(question, context)
        if identity is None:
            return await self._inner.answer(question, context, emit)
        flight = None if question.fresh else self._flights.get(identity.key)
        if flight is not None and self._in_time(flight, context):
            self._telemetry.noted(Joined())
        else:
            flight = self._depart(identity, question, context)
        try:
            return await flight.follow(emit, CacheRequest.of(context))
        except LeaderLost:
            return await self._inner.answer(question, context, emit)

    async def _identity(self, question: Question, context: Context) -> Identity | None:
        """None for what is not remembered: answers that come from elsewhere, or from a model that a caller named."""
        model = question.model
        ours = question.sources and all(source.kind == "collection" for source in question.sources)
        if not ours or question.until is not Until.GENERATE or model is None or not model.operator:
            return None
        seen = await self._look(question, context)
        if seen is None:
            return None
        asked = msgspec.structs.replace(question, text=normalized(question.text), sources=(), model=None, fresh=False)
        where = tuple(source.slug for source in question.sources)
        recipe = self._recipe(question)
        try:
            parts = encode((asked, where, msgspec.structs.replace(model, token=None), recipe, seen))
        except UnicodeEncodeError:  # half of a surrogate pair, from a command line
            return None
        return Identity(f"rag:qa:{hashlib.blake2b(parts, digest_size=20).hexdigest()}:{recipe.prompt_version}", seen)

    def _in_time(self, flight: "SharedRun", context: Context) -> bool:
        """Whether there is enough time left in an answer that is under way for one more to wait for it."""
        now = self._clock.monotonic()
        return not flight.abandoned and flight.deadline - now >= (context.deadline - now) * TIME_SHARE

    def _depart(self, identity: Identity, question: Question, context: Context) -> "SharedRun":
        flight = SharedRun(identity.seen, CacheRequest.of(context), context.deadline)
        flight.task = asyncio.create_task(self._fly(flight, identity, question, context))
        flight.task.add_done_callback(lambda task: self._arrived(identity.key, task))
        if not question.fresh:
            self._flights[identity.key] = flight
        return flight

    def _arrived(self, key: str, task: "asyncio.Task[Answer]") -> None:
        if key in self._flights and self._flights[key].task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # its followers, if there are any left, raise it

    async def _fly(self, flight: "SharedRun", identity: Identity, question: Question, context: Context) -> Answer:
        try:
            began = self._clock.monotonic()
            known = None if question.fresh else await self._known(identity.key, identity.seen)
            if known is not None:
                total_ms = round((self._clock.monotonic() - began) * 1000)
                known = msgspec.structs.replace(known, cached=True, timings=Timings(total_ms=total_ms))
                for event in unfold(known)[:-1]:  # its end is the Run's to tell
                    await flight.record(event)
                return known
            answer = await self._in_its_time(question, context, flight)
            if _worth_keeping(answer, identity.seen):
                await self._cache.put(identity.key, encode(answer), self._ttl_s)
            return answer
        finally:
            flight.over()

    async def _in_its_time(self, question: Question, context: Context, flight: "SharedRun") -> Answer:
        """Whoever came first may have left, and their Run no longer ends it."""
        limit = asyncio.timeout(context.deadline - self._clock.monotonic())
        try:
            async with limit:
                return await self._inner.answer(question, context, flight.record)
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded("The question's total time ran out before the answer was complete.") from None
            raise

    async def _known(self, key: str, seen: str) -> Answer | None:
        """What is in the cache, if it is what we would have put there: others may be able to write there."""
        stored = await self._cache.get(key)
        try:
            known = decode(stored) if stored is not None else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            known = None
        if known is not None and not _worth_keeping(known, seen):
            known = None
        self._telemetry.noted(CacheLooked(cache="answer", hit=known is not None))
        return known


class LeaderLost(Exception):
    """The shared answer was found among other documents than this caller may see."""


class SharedRun:
    """One answer under way, and all who wait for it. It ends when the last of them leaves."""

    def __init__(self, seen: str, leader: CacheRequest, deadline: float) -> None:
        self.task: asyncio.Task[Answer] | None = None
        self.deadline = deadline
        self._seen = seen
        self._leader = leader
        self._events: list[AnswerEvent] = []
        self._followers = 0
        self._joined = 0
        self.abandoned = False
        self._changed = asyncio.Event()
        self._is_over = False

    async def record(self, event: AnswerEvent) -> None:
        self._events.append(event)
        self._wake()

    def over(self) -> None:
        self._is_over = True
        self._wake()

    async def follow(self, emit: Emit, asker: CacheRequest) -> Answer:
        """Everything from the beginning, then as it comes."""
        assert self.task is not None
        first, self._joined = not self._joined, self._joined + 1
        self._followers += 1
        try:
            await self._relay(emit, asker)
            return await self._outcome(first=first)
        finally:
            self._followers -= 1
            if not self._followers:
                self.abandoned = True
                self.task.cancel()

    async def _relay(self, emit: Emit, asker: CacheRequest) -> None:
        at = 0
        while True:
            changed = self._changed
            while at < len(self._events):
                event = self._events[at]
                if asker != self._leader and isinstance(event, SourceReplied) and event.reply.seen != self._seen:
                    raise LeaderLost
                await emit(event)
                at += 1
            if self._is_over and at == len(self._events):
                return
            if changed is self._changed:
                await changed.wait()

    async def _outcome(self, *, first: bool) -> Answer:
        assert self.task is not None
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise asyncio.CancelledError
        if (error := self.task.exception()) is not None:
            raise copy.copy(error) from error  # its own for each: a traceback grows wherever it is raised
        answer = self.task.result()
        return answer if first or answer.cached else msgspec.structs.replace(answer, cached=True)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def normalized(text: str) -> str:
    """How a question is told from another: not by its spaces, nor by how its accents are written."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _worth_keeping(answer: Answer, seen: str) -> bool:
    """Nothing partial, failed or refused; and nothing that was found among other documents than the key stands for."""
    return (
        bool(answer.text)
        and not answer.refused
        and answer.finish_reason in WHOLE
        and answer.ground is Ground.DOCUMENTS
        and bool(answer.replies)
        and all(reply.status is Status.SUCCESS and reply.seen == seen for reply in answer.replies)
        and all(_within(citation, answer) for citation in answer.citations)
    )


def _within(citation: Citation, answer: Answer) -> bool:
    return (
        0 <= citation.start <= citation.end <= len(answer.text)
        and 0 <= citation.passage < len(answer.passages)
        and 0 <= citation.passage_start <= citation.passage_end <= len(answer.passages[citation.passage].text)
    )
