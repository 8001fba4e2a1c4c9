"""What the rooms promise each other."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from anabranch.domain.events import AnswerEvent, SubagentStatus
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
from anabranch.domain.steps import Breadcrumb, Directive, Expected, Fragment
from anabranch.domain.streams import Entry, Page

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
    """One of a planner's helpers. `taken` puts what it pushed into its own form, or raises InvalidQuestion; `work` does
    its part here and yields what becomes of it, the last one a `success`. A failure is an AnabranchError; one that is
    Elsewhere says whether trying again can help."""

    def taken(self, payload: bytes, status: SubagentStatus) -> Fragment: ...

    def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]: ...


class Subagents(Protocol):
    """Who does what. None is one that is switched off."""

    def find(self, expected: Expected) -> Subagent | None: ...


class Turns(Protocol):
    """A breaker, as those see it who ask before they call: a turn of 0 is a refusal."""

    def enter(self) -> int: ...

    def leave(self, turn: int, good: bool | None) -> None: ...


class Breadcrumbs(Protocol):
    """Where breadcrumbs go. It never slows or fails what it is told of."""

    def drop(self, crumb: Breadcrumb) -> None: ...


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
    """What happened on streams, each in one order, written by one owner at a time. Where a stream is not, that is
    NotFound; where the log cannot be reached, StreamUnavailable."""

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        """Begin a stream: the token with which its owner appends. Conflict if there is one of that name. `identity` is
        who may read it, `about` whatever its readers should know."""
        ...

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        """Write all of these, in order, and hold the lease for its time again (also with no entries). The sequence of
        each, or 0 for one that changes nothing: its revision is not above the last under its key. LeaseLost if the
        stream has another owner, or has ended; StreamFull if they have no room, and then none is written."""
        ...

    async def read(self, stream: str, after: int, limit: int) -> Page: ...

    def watch(self, stream: str) -> AbstractAsyncContextManager["Watch"]: ...

    async def bury(self, stream: str, last: Entry) -> bool:
        """End a stream whose owner has let its lease run out; False if it has not, or if the stream has ended."""
        ...


class Watch(Protocol):
    """One who waits for news of a stream."""

    async def changed(self) -> None:
        """Come back when there may be something new since the last time (or since the watch began)."""
        ...


class Sessions(Protocol):
    """Whose a planner's session is: the first one to name it holds it until `ttl_s` after it was last claimed."""

    async def claim(self, session: str, identity: str, ttl_s: float) -> bool: ...


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

    def header(self, name: str) -> str:
        """What that header says, empty if there is none."""
        ...

    async def read(self) -> bytes: ...

    def chunks(self, *, endless: bool = False) -> AsyncIterator[bytes]:
        """`endless` is for a stream that is listened to for as long as it lasts: the caps are not for the whole of it,
        and whoever takes it apart caps the parts."""
        ...


class Outbound(Protocol):
    """The one way out. `operator` says that the operator configured this origin; anything else is guarded: it must be
    public or on the operator's allow-list, and with `public_only` it must be public. Every failure is an UpstreamError;
    leaving the context closes the connection if the reply was not read."""

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        operator: bool = False,
        public_only: bool = False,
    ) -> AbstractAsyncContextManager[Exchange]: ...
