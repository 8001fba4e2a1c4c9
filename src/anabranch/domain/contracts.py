"""The contracts between the parts: source, generator, embedder, directory, telemetry, event log, clock."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeVar

from anabranch.domain.eventlog import Entry, Page
from anabranch.domain.events import AnswerEvent, SubagentStatus
from anabranch.domain.model import (
    Allowance,
    Answer,
    Calibration,
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
from anabranch.domain.shares import ReplyMemory
from anabranch.domain.signals import Signal
from anabranch.domain.steps import Breadcrumb, Directive, Expected, Fragment

T = TypeVar("T")


class RunInThread(Protocol):
    """Runs `work` in a thread, as `asyncio.to_thread` does."""

    async def __call__(self, work: Callable[..., T], /, *args: Any) -> T: ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)


Attribute = str | int | float | bool | tuple[str, ...]
Emit = Callable[[AnswerEvent], Awaitable[None]]


class Answerer(Protocol):
    """Answers a question: emits events, and returns the answer that they fold to."""

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer: ...


class Source(Protocol):
    """Returns passages for a query. An expected failure is data in the reply, never an exception."""

    async def search(self, query: Query, context: Context) -> SourceReply: ...


class Generator(Protocol):
    """A language model. It always streams: one that cannot yields one delta. A failure is a GenerationFailed."""

    def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]: ...


class Subagent(Protocol):
    """An adapter for one kind of subagent. `convert` converts a pushed payload, or raises InvalidQuestion. `work` calls
    the subagent and yields its results, the last one a `success`. A failure is an AnabranchError; an UpstreamFailure
    says whether a retry can help."""

    def convert(self, payload: bytes, status: SubagentStatus) -> Fragment: ...

    def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]: ...


class Subagents(Protocol):
    """Finds the implementation of a subagent; None if it is disabled."""

    def find(self, expected: Expected) -> Subagent | None: ...


class Turns(Protocol):
    """A circuit breaker. A call takes a permit with `enter` (0 is a refusal) and returns it with `leave`."""

    def enter(self) -> int: ...

    def leave(self, permit: int, good: bool | None) -> None: ...


class Breadcrumbs(Protocol):
    """A sink for breadcrumbs. It never delays or fails its caller."""

    def drop(self, crumb: Breadcrumb) -> None: ...


class Embedder(Protocol):
    """Embeds texts as vectors of one length. `window` is the number of tokens that it reads of a text, `calibration`
    what the cosines of its vectors mean."""

    @property
    def name(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    @property
    def window(self) -> int: ...

    @property
    def calibration(self) -> Calibration: ...

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        """The start and end of each token, in characters."""

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]: ...


class Reranker(Protocol):
    """Scores passages for a query, in their order; higher is better."""

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]: ...


class EventLog(Protocol):
    """Streams of ordered entries, each written by one owner at a time. Raises NotFound for an unknown stream, and
    StreamUnavailable if the log cannot be reached."""

    async def open(self, stream: str, *, identity: str, about: bytes = b"") -> str:
        """Create a stream and return the token with which its owner appends. Conflict if the name is taken. `identity`
        may read it; `about` is metadata for its readers."""

    async def append(self, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        """Append all entries, in order, and renew the lease (also without entries). Returns the sequence of each, or 0
        for one that changes nothing: its revision is not above the last under its key. LeaseLost if the stream has
        another owner, or has ended; StreamFull if there is no room, and then none is written."""

    async def read(self, stream: str, after: int, limit: int) -> Page: ...

    def watch(self, stream: str) -> AbstractAsyncContextManager["Watch"]: ...

    async def end_abandoned(self, stream: str, last: Entry) -> bool:
        """End a stream whose owner's lease has expired; False if it has not, or if the stream has ended."""


class Watch(Protocol):
    """Waits for new entries of a stream."""

    async def changed(self) -> None:
        """Return when there may be new entries since the last call (or since the watch began)."""


class Sessions(Protocol):
    """Ownership of planner sessions: the first identity to claim one owns it until `ttl_s` after its last claim."""

    async def claim(self, session: str, identity: str, ttl_s: float) -> bool: ...


class Cache(Protocol):
    """Bytes with a time to live. A failure of the cache is a miss."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None: ...


class Limiter(Protocol):
    """A rate limit that holds in any window, also for concurrent callers."""

    async def admit(self, key: str, limit: int | None = None) -> Allowance:
        """Count a call, against a limit of its own if one is given."""

    def used(self, key: str) -> int:
        """The calls of this key that this process has admitted and that still count."""


class Directory(Protocol):
    """Turns endpoints into sources and models."""

    def source(self, endpoint: Endpoint) -> Source: ...

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        """Without `retried` for optional calls, which must not use up the retry budget of the answer."""


class Span(Protocol):
    """A trace span; `context` is the context for work inside it."""

    @property
    def context(self) -> Context: ...

    def set(self, name: str, value: Attribute) -> None: ...


class Telemetry(Protocol):
    """Receives events, errors and signals; it never delays or fails its caller."""

    def asked(self, question: Question, context: Context) -> None: ...

    def happened(self, event: AnswerEvent, context: Context) -> None: ...

    def crashed(self, error: BaseException, context: Context) -> None: ...

    def noted(self, signal: Signal) -> None: ...

    def span(self, name: str, context: Context, **attributes: str | int | float) -> AbstractContextManager[Span]: ...


class Clock(Protocol):
    def monotonic(self) -> float: ...


class Exchange(Protocol):
    """An upstream's reply: its head has arrived, its body is read on demand, within the size limits."""

    @property
    def status(self) -> int: ...

    @property
    def content_type(self) -> str: ...

    def header(self, name: str) -> str:
        """The value of a header; empty if there is none."""

    async def read(self, memory: ReplyMemory | None = None) -> bytes:
        """The whole body, counted in `memory` as it arrives."""

    def chunks(self, *, endless: bool = False) -> AsyncIterator[bytes]:
        """`endless` is for long-lived streams: the size limit does not apply to the whole, and the caller limits the
        parts."""


class Outbound(Protocol):
    """The HTTP client for all outbound requests. `operator`: the operator configured this origin; others are guarded:
    the address must be public or on the allow-list, and with `public_only` it must be public. Every failure is an
    UpstreamError; leaving the context closes the connection if the reply was not read."""

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
