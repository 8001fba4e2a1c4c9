"""The values that flow down the river."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, dataclass_transform

import msgspec

from anabranch.domain.ranking import Breakdown, Ranking


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, slotted, keyword-only record."""


class Until(StrEnum):
    """How far down the river a question goes."""

    MERGE = "merge"
    GENERATE = "generate"


class Status(StrEnum):
    """How a source's part of a question ended."""

    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    PAYMENT_FAILED = "payment_failed"
    ACCESS_DENIED = "access_denied"
    POLICY_VIOLATION = "policy_violation"
    RATE_LIMITED = "rate_limited"
    SKIPPED = "skipped"


class Ground(StrEnum):
    """What an answer can stand on."""

    DOCUMENTS = "documents"
    NO_SOURCES = "no_sources"
    ALL_FAILED = "all_failed"
    NOTHING_FOUND = "nothing_found"
    WEAK = "weak"


# A collection is asked in this process, an MCP server over the connection that is kept to it (its slug is its name); an
# extractive model answers in the documents' own sentences.
EndpointKind = Literal["space", "openai", "collection", "mcp", "extractive"]


class Endpoint(Value):
    """Where a source or a model is reached. `operator` marks one that the operator configured and so vouches for,
    `public_only` one that a caller named who may not reach the private addresses on the operator's allow-list.
    `alternate` is a second address of the same source, asked when the first is slow or down."""

    slug: str
    url: str = ""
    name: str = ""
    owner: str | None = None
    tenant: str | None = None
    kind: EndpointKind = "space"
    query: str | None = None
    operator: bool = False
    public_only: bool = False
    token: str | None = None
    alternate: str | None = None

    @property
    def path(self) -> str:
        return f"{self.owner}/{self.slug}" if self.owner else self.slug

    def __repr__(self) -> str:
        return f"Endpoint({self.path!r}, kind={self.kind!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("path", self.path)]


class Message(Value):
    role: Literal["system", "user", "assistant"]
    content: str


class Filters(Value):
    """What a document must be to be found at all. `collections` None is every one; dates are ISO 8601 days, inclusive,
    compared with the document's own date, else with the day it was ingested."""

    collections: tuple[str, ...] | None = None
    start: str | None = None
    end: str | None = None
    metadata: Mapping[str, str | int | float | bool] = {}
    tags: tuple[str, ...] = ()


class Question(Value):
    """What is asked, of whom, and how far to go. `refuse` answers in words, without a model, when nothing was found;
    `threshold` does so too when what was found is, on average, less similar than that. `rewrite` lets the model put the
    question in other words before it is searched for; `diversity` is the λ of maximal marginal relevance (1 is
    relevance alone, None does without). `language` is that of our own messages, `answer_in` the one that the model must
    write in. `fresh` takes no remembered answer. `ranking` goes with the profile `aggregate`; `patience_s` is how long
    the sources may take, where that is not for the settings to say."""

    text: str
    sources: tuple[Endpoint, ...] = ()
    model: Endpoint | None = None
    history: tuple[Message, ...] = ()
    top_k: int = 5
    similarity_threshold: float = 0.5
    max_tokens: int = 1024
    temperature: float = 0.7
    system_prompt: str | None = None
    until: Until = Until.GENERATE
    profile: str = "chat"
    refuse: bool = False
    filters: Filters = Filters()
    rerank: bool = True
    rewrite: bool = False
    diversity: float | None = None
    threshold: float | None = None
    language: str | None = None
    answer_in: str | None = None
    fresh: bool = False
    ranking: Ranking | None = None
    patience_s: float | None = None


class Context(Value):
    """What varies per request: who asks and where, with which tokens, until when (`deadline` is monotonic), under which
    trace. An `operator` owns the machine or its key: nothing in its collections is hidden from them. `key` is the id of
    the API key that the request came with, `bearer` the token itself, which nobody else is sent. `hops` counts the
    aggregators that a question has come through."""

    correlation_id: str
    deadline: float
    surface: str = "library"
    user_id: str | None = None
    groups: tuple[str, ...] = ()
    operator: bool = False
    key: str | None = None
    address: str | None = None
    tokens: Mapping[str, str] = {}
    transactions: Mapping[str, str] = {}
    bearer: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    hops: int = 0

    @property
    def trace_id(self) -> str:
        """That of the trace that the request came with or that was begun for it, else the correlation id."""
        return self.traceparent[3:35] if self.traceparent else self.correlation_id

    def __repr__(self) -> str:
        return f"Context({self.correlation_id!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("correlation_id", self.correlation_id)]


class Query(Value):
    """What one source is asked. `raw` takes all that it returns as it is: others will rank it."""

    text: str
    limit: int
    similarity_threshold: float
    filters: Filters = Filters()
    rerank: bool = True
    variants: tuple[str, ...] = ()
    hypothetical: str | None = None
    diversity: float | None = None
    raw: bool = False


class Scores(Value, gc=False):
    """How a chunk came to its place; None is a score that it does not have."""

    dense: float | None = None
    sparse: float | None = None
    fused: float | None = None
    rerank: float | None = None


class Place(Value):
    """Where a passage stands in a collection: `start` and `end` are character offsets in the document's content."""

    chunk_id: str
    collection: str
    start: int
    end: int
    tokens: int
    page: int | None = None
    headers: tuple[str, ...] = ()
    url: str | None = None
    metadata: Mapping[str, Any] = {}
    scores: Scores = Scores()


class Passage(Value):
    """A piece of a source's material, as it returned it. `date` is when that was written or last changed, in seconds
    since 1970; `breakdown` is how it came to its score, where a ranking of ours gave it."""

    source: str
    title: str
    text: str
    score: float
    document_id: str | None = None
    place: Place | None = None
    url: str | None = None
    date: float | None = None
    breakdown: Breakdown | None = None


class SourceReply(Value):
    """What a source said. `seen` stands for all that it could have found for this caller at that moment, where it can
    tell: two replies with the same one looked at the same documents. `fault` says that the upstream failed, and not
    what was asked of it."""

    path: str
    status: Status
    passages: tuple[Passage, ...] = ()
    error: str | None = None
    latency_ms: int = 0
    seen: str | None = None
    fault: bool = False


class Prompt(Value):
    """What a model is asked; `passages` are the ones that found room in it."""

    question: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float
    passages: tuple[Passage, ...]
    version: str
    omitted: int = 0
    language: str | None = None


class Usage(Value, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Delta(Value, gc=False):
    """What a generator yields: a piece of text, and with one of them the usage and why it ended, if they are known."""

    text: str
    usage: Usage | None = None
    finish_reason: str | None = None


class Allowance(Value, gc=False):
    """What a limiter says: `wait_s` 0 is admitted, anything else is how long to wait. `remaining` calls are left now;
    after `reset_s` all of them are there again."""

    limit: int
    remaining: int
    reset_s: float
    wait_s: float = 0.0


class Embedding(Value, gc=False):
    """A text as its embedder sees it: one vector of unit length (float32), and, where the embedder knows them, the sign
    bits of its tokens' vectors, one row of dimensions / 8 bytes for each token that carries meaning."""

    vector: bytes
    tokens: bytes = b""


class Citation(Value, gc=False):
    """A mark in the answer (`start`, `end`) and the words behind it: `passage` indexes `Answer.passages`,
    `passage_start` and `passage_end` are character offsets in that passage's text."""

    start: int
    end: int
    source: str
    passage: int
    passage_start: int
    passage_end: int


class Timings(Value, gc=False):
    retrieval_ms: int = 0
    generation_ms: int = 0
    total_ms: int = 0


class Answer(Value):
    """The whole answer; `passages` are those that the model saw, best first. `distinct` is how many there were without
    those that repeat others, where they were counted; `compared` says that all were compared for that."""

    text: str
    ground: Ground
    replies: tuple[SourceReply, ...] = ()
    passages: tuple[Passage, ...] = ()
    citations: tuple[Citation, ...] = ()
    timings: Timings = Timings()
    usage: Usage | None = None
    finish_reason: str | None = None
    model: str | None = None
    prompt_version: str | None = None
    omitted: int = 0
    refused: bool = False
    cached: bool = False
    rewritten: str | None = None
    variants: tuple[str, ...] = ()
    distinct: int | None = None
    compared: bool = True
