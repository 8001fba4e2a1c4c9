"""What the rooms promise each other."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from anabranch.domain.events import AnswerEvent, StepEvent
from anabranch.domain.model import (
    Allowance,
    Answer,
    Context,
    Delta,
    Embedding,
    Endpoint,
    Passage,
    Prompt,
    Query,
    Question,
    SourceReply,
)
from anabranch.domain.signals import Signal

Attribute = str | int | float | bool | tuple[str, ...]
Emit = Callable[[AnswerEvent], Awaitable[None]]


class Answerer(Protocol):
    """Takes a question down the river, emitting what happens, and returns the answer that the events fold to."""

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer: ...


class Source(Protocol):
    """Where passages come from. An expected failure is data in the reply, never an exception."""

    async def search(self, query: Query, context: Context) -> SourceReply: ...


class Generator(Protocol):
    """Who writes. Always a stream: one that cannot stream yields one delta. A failure is a GenerationFailed."""

    def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]: ...


class Subagent(Protocol):
    """One of a planner's helpers: takes its part of a step and yields what becomes of it."""

    def work(self, payload: bytes, context: Context) -> AsyncIterator[StepEvent]: ...


class Embedder(Protocol):
    """Texts to vectors of one length. `window` is how many tokens of a text it takes in."""

    @property
    def name(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    @property
    def window(self) -> int: ...

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        """Where each token of the text begins and ends, in characters."""
        ...

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]: ...


class Reranker(Protocol):
    """A score for each passage, in their order; higher is better."""

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]: ...


class EventLog(Protocol):
    """What happened on a stream, in one order. Appending the same key and revision again changes nothing."""

    async def append(self, stream: str, key: str, revision: int, event: bytes) -> int: ...

    async def read(self, stream: str, after: int, limit: int) -> Sequence[tuple[int, bytes]]: ...


class Cache(Protocol):
    """Bytes for a while. A cache that fails is a miss."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None: ...


class Limiter(Protocol):
    """Never more than the limit in any window, however many ask at once."""

    async def admit(self, key: str) -> Allowance: ...


class Directory(Protocol):
    """Turns the endpoints that a question names into what can be asked."""

    def source(self, endpoint: Endpoint) -> Source: ...

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        """Not `retried` is for what the question can do without: it must not use up what the answer may need."""
        ...


class TokenCounter(Protocol):
    """How much of a model's window each text takes; it must not hold up the event loop."""

    async def count(self, texts: Sequence[str]) -> Sequence[int]: ...


class Span(Protocol):
    """A piece of work that is being timed; `context` is the one to go on with inside it."""

    @property
    def context(self) -> Context: ...

    def set(self, name: str, value: Attribute) -> None: ...


class Telemetry(Protocol):
    """Is told what happens; it never slows or fails what it watches."""

    def asked(self, question: Question, context: Context) -> None: ...

    def happened(self, event: AnswerEvent, context: Context) -> None: ...

    def crashed(self, error: BaseException, context: Context) -> None: ...

    def noted(self, signal: Signal) -> None: ...

    def span(self, name: str, context: Context, **attributes: str | int | float) -> AbstractContextManager[Span]: ...


class Clock(Protocol):
    def monotonic(self) -> float: ...


class Exchange(Protocol):
    """An upstream's reply: its head is here, its body comes as it is read, within the caps."""

    @property
    def status(self) -> int: ...

    @property
    def content_type(self) -> str: ...

    @property
    def retry_after(self) -> str: ...

    async def read(self) -> bytes: ...

    def chunks(self) -> AsyncIterator[bytes]: ...


class Outbound(Protocol):
    """The one way out. `operator` says that the operator configured this origin; anything else is guarded.
    Every failure is an UpstreamError; leaving the context closes the connection if the reply was not read."""

    def request(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None, operator: bool = False
    ) -> AbstractAsyncContextManager[Exchange]: ...
