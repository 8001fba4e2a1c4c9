"""The values of the pipeline: questions, contexts, passages, answers."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, dataclass_transform, get_args

import msgspec

from anabranch.domain.errors import GenerationReason
from anabranch.domain.explanation import Explanation
from anabranch.domain.ranking import Breakdown, Ranking


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, slotted, keyword-only record."""


class Until(StrEnum):
    """The last stage of a question."""

    MERGE = "merge"
    GENERATE = "generate"


class Status(StrEnum):
    """The outcome of querying a source."""

    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    PAYMENT_FAILED = "payment_failed"
    ACCESS_DENIED = "access_denied"
    POLICY_VIOLATION = "policy_violation"
    RATE_LIMITED = "rate_limited"
    SKIPPED = "skipped"


class Ground(StrEnum):
    """What an answer can be based on."""

    DOCUMENTS = "documents"
    NO_SOURCES = "no_sources"
    ALL_FAILED = "all_failed"
    NOTHING_FOUND = "nothing_found"
    WEAK = "weak"


# A collection is searched in this process; an MCP server's slug is its name; an extractive model quotes sentences of
# the documents.
EndpointKind = Literal["space", "openai", "collection", "mcp", "extractive"]


# What the address of a collection begins with, where it is named beside sources and models.
COLLECTION_ADDRESS = "collection:"
# Characters of a question. Where a longer one is allowed (chat), what looks for evidence reads its beginning.
MAX_QUERY = 10_000


class Endpoint(Value):
    """The address of a source or a model. `operator`: the operator configured it, so it is trusted; `public_only`: its
    caller may not reach the private addresses on the allow-list; `alternate` is a second address of the same source for
    hedging and failover."""

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


ChunkType = Literal["paragraph", "heading", "code", "table", "list"]


class Filters(Value):
    """Filters on documents. `collections` None is all; dates are ISO 8601 days, inclusive, compared with the document's
    date, else with the day it was ingested. `chunk_types` selects chunks, of any type if it is empty."""

    collections: tuple[str, ...] | None = None
    start: str | None = None
    end: str | None = None
    metadata: Mapping[str, str | int | float | bool] = {}
    tags: tuple[str, ...] = ()
    chunk_types: tuple[ChunkType, ...] = ()


class Profile(Value):
    """How a kind of question is merged and put to a model. `name` identifies it in caches and logs. `merge` orders
    passages by their scores or by their ranks; `prompt` is a list of documents or of numbered passages; `marks` are
    the citation marks of quoted sentences: numbers of passages, or names of sources where no list of numbers follows.
    Of passages that are more similar than `near_duplicates`, only the best is kept; None keeps all that are not equal.
    With `timeout_fails` the question fails when every source times out. With `defence` documents are data, not orders:
    the prompt has boundaries that no document can write, and links that no source has do not reach the answer."""

    name: str
    merge: Literal["similarity", "rank"]
    prompt: Literal["documents", "numbered"]
    prompt_version: str
    marks: Literal["numbers", "sources"] = "numbers"
    near_duplicates: float | None = None
    timeout_fails: bool = False
    defence: bool = False


# docs/search.md says why: below it, texts of the same form that say other things are too similar.
NEAR_DUPLICATES = 0.95
CHAT = Profile(name="chat", merge="similarity", prompt="documents", prompt_version="chat-1", marks="sources")
# Spec 1 fixes the structure of chat's prompt, so chat has the defence only on request.
DEFENDED_CHAT = msgspec.structs.replace(CHAT, prompt_version="chat-2", defence=True)
# The library and the command line: as chat, but their answers list passages by number.
ASK = msgspec.structs.replace(DEFENDED_CHAT, name="ask", marks="numbers")
# A published collection returns every copy: its reply has no place to name those that are left out.
PUBLISHED = Profile(name="query", merge="rank", prompt="numbered", prompt_version="query-2")
QUERY = msgspec.structs.replace(PUBLISHED, near_duplicates=NEAR_DUPLICATES, defence=True)
# Spec 4's surface is the only one that has an error for a search that took too long.
RAG = msgspec.structs.replace(QUERY, name="rag", timeout_fails=True)
AGGREGATE = Profile(name="aggregate", merge="rank", prompt="numbered", prompt_version="query-2")


# `rank` orders passages of all sources by how well they answer the question; `off` keeps the order of the search.
EvidenceUse = Annotated[
    Literal["rank", "off"],
    msgspec.Meta(
        description="`rank` orders the passages of all sources by how well they answer the question, as the evidence "
        "model judges it; `off` keeps the order of the search"
    ),
]


AnswerPolicy = Annotated[
    Literal["all", "strict"],
    msgspec.Meta(
        description="`strict` checks each sentence before it is sent, and leaves out those that no source supports; "
        "the answer says how many. `all` sends what the model writes as it comes."
    ),
]


# What a request may ask of a model.
MaxTokens = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]


class Question(Value):
    """A question with its sources, model and options. `refuse` answers with a refusal, without a model, when nothing
    was found; `threshold` also when the passages are, on average, less similar than that. `rewrite` lets the model
    rewrite the question before the search; `diversity` is the λ of maximal marginal relevance (1 is relevance alone,
    None disables it). `language` is that of our own messages, `answer_in` that of the model's answer. `fresh` bypasses
    the answer cache. `fallback` is the model that answers if `model` fails before its first token. `ranking` belongs to
    the profile `aggregate`; `patience_s` is the time for the sources, if not that of the settings. `explain`: the
    stages note what they did to each passage. `verify`: each sentence of the answer is checked against the
    passages. `stop`: the answer ends before the first of these texts."""

    text: str
    sources: tuple[Endpoint, ...] = ()
    model: Endpoint | None = None
    history: tuple[Message, ...] = ()
    top_k: int = 5
    similarity_threshold: float = 0.5
    max_tokens: MaxTokens = 1024
    temperature: Temperature = 0.7
    system_prompt: str | None = None
    until: Until = Until.GENERATE
    profile: Profile = CHAT
    refuse: bool = False
    filters: Filters = Filters()
    rerank: bool = True
    rewrite: bool = False
    diversity: float | None = None
    threshold: float | None = None
    language: str | None = None
    answer_in: str | None = None
    fresh: bool = False
    fallback: Endpoint | None = None
    ranking: Ranking | None = None
    patience_s: float | None = None
    evidence: EvidenceUse = "off"
    explain: bool = False
    verify: bool = False
    answer_policy: AnswerPolicy = "all"
    stop: tuple[str, ...] = ()


class Context(Value):
    """What varies per request: caller, surface, tokens, deadline (monotonic) and trace. An `operator` may read every
    collection; `collections` are those (by key) to which an API key is restricted. `credential` identifies the secret
    of the request's key, `bearer` is the token itself, which is never forwarded.
    `hops` counts the aggregators that the question has passed. `streaming`: the caller reads the answer as it comes.
    `local_operator`: the operator asks on this machine, without a key; set only where that makes a difference.
    `boundary` is that of the prompt of a recorded run; without one, a prompt has its own random letters."""

    correlation_id: str
    deadline: float
    surface: str = "library"
    user_id: str | None = None
    groups: tuple[str, ...] = ()
    operator: bool = False
    collections: tuple[int, ...] | None = None
    credential: str | None = None
    address: str | None = None
    tokens: Mapping[str, str] = {}
    transactions: Mapping[str, str] = {}
    bearer: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    hops: int = 0
    streaming: bool = False
    local_operator: bool = False
    boundary: str = ""

    def until(self, deadline: float) -> "Context":
        """The same with an earlier deadline, if it is one."""
        return msgspec.structs.replace(self, deadline=deadline) if deadline < self.deadline else self

    def may_know_address(self, endpoint: Endpoint) -> bool:
        """Whether an error may name the endpoint's address: the request named it, or the caller is the operator."""
        return not endpoint.operator or self.operator or self.local_operator

    @property
    def trace_id(self) -> str:
        """The trace id of the request, else its correlation id."""
        return self.traceparent[3:35] if self.traceparent else self.correlation_id

    def __repr__(self) -> str:
        return f"Context({self.correlation_id!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("correlation_id", self.correlation_id)]


class Query(Value):
    """The query for one source. `raw` returns its results as they are, for a later ranking; `near_duplicates` is that
    of the profile; `complete` asks for passages that end where a list or code ends; `explain` asks a source that
    searches here what its stages did."""

    text: str
    limit: int
    similarity_threshold: float
    filters: Filters = Filters()
    rerank: bool = True
    variants: tuple[str, ...] = ()
    hypothetical: str | None = None
    diversity: float | None = None
    raw: bool = False
    near_duplicates: float | None = None
    complete: bool = False
    explain: bool = False


class Scores(Value, gc=False):
    """The scores of a chunk by stage; None if a stage gave none."""

    dense: float | None = None
    sparse: float | None = None
    fused: float | None = None
    rerank: float | None = None


class Place(Value):
    """The location of a passage in a collection of an owner: `start` and `end` are character offsets in the
    document's content, `index` is the number of its chunk in the document, from 0; `added` characters at its end
    complete the chunk. `page` is the one on which it begins; `later_pages` are the others, each with the offset at
    which it begins."""

    chunk_id: str
    collection: str
    start: int
    end: int
    tokens: int
    index: int | None = None
    page: int | None = None
    headers: tuple[str, ...] = ()
    url: str | None = None
    metadata: Mapping[str, Any] = {}
    scores: Scores = Scores()
    chunk_type: ChunkType | None = None
    added: int = 0
    later_pages: tuple[tuple[int, int], ...] = ()
    owner: str | None = None

    def page_at(self, offset: int) -> int | None:
        """The page of an offset in the document's content."""
        return next((page for start, page in reversed(self.later_pages) if start <= offset), self.page)


class Duplicate(Value, gc=False):
    """A passage that was left out because one that ranks higher says the same. `similarity` is 1 for equal texts."""

    title: str
    source: str
    similarity: float
    document_id: str | None = None
    chunk_id: str | None = None
    url: str | None = None


# So many near-duplicates of a passage are shown.
MAX_ALSO_IN = 20


class Passage(Value):
    """A piece of text that a source returned. `date` is its last change, in seconds since 1970; `breakdown` has the
    parts of its score, if a `Ranking` gave it; `also_in` names the near-duplicates that were left out.
    `suspected_instructions` are sentences of it that seem to give orders to a model, as one reads them."""

    source: str
    title: str
    text: str
    score: float
    document_id: str | None = None
    place: Place | None = None
    url: str | None = None
    date: float | None = None
    breakdown: Breakdown | None = None
    also_in: tuple[Duplicate, ...] = ()
    evidence: float | None = None
    suspected_instructions: tuple[str, ...] = ()

    @property
    def shown_duplicates(self) -> dict[str, Any]:
        """`also_in` as responses have it: a limited number, and the number of all."""
        return {"also_in": self.also_in[:MAX_ALSO_IN], "also_in_count": len(self.also_in)}


class SourceReply(Value):
    """A source's reply. `seen` identifies the documents that were visible to this caller, if the source knows: replies
    with equal values searched the same documents. `fault`: the upstream failed, not the request. `empty`: there is no
    document at all that this caller could have found. `distinct`: the source has left out near-duplicates itself.
    `explanation` is what its own stages did, if the query asks for it."""

    path: str
    status: Status
    passages: tuple[Passage, ...] = ()
    error: str | None = None
    latency_ms: int = 0
    seen: str | None = None
    fault: bool = False
    empty: bool = False
    distinct: bool = False
    explanation: Explanation | None = None


class QuotedSpan(Value, gc=False):
    """Characters of a passage's text."""

    passage: int
    start: int
    end: int


# In what two documents differ.
ConflictKind = Literal["number", "date", "name", "negation", "other"]


class SourceConflict(Value, gc=False):
    """Words of two documents that contradict each other on what was asked, with the probability that they do. `claim`
    is in the passage that ranks higher."""

    claim: QuotedSpan
    against: QuotedSpan
    kind: ConflictKind
    probability: float


class Prompt(Value):
    """The prompt for a model; `passages` are those that fit, `unused` are numbered passages that do not. `boundary` are
    the random letters in the lines around its passages, if it has some; `defence` is that of the profile. `conflicts`
    are those between its passages. `stop` is that of the question."""

    question: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float
    passages: tuple[Passage, ...]
    version: str
    unused: tuple[Passage, ...] = ()
    omitted: int = 0
    language: str | None = None
    marks: Literal["numbers", "sources"] = "numbers"
    boundary: str = ""
    defence: bool = False
    conflicts: tuple[SourceConflict, ...] = ()
    stop: tuple[str, ...] = ()


class Usage(Value, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Delta(Value, gc=False):
    """A part of a model's answer. A generator that quotes says which words of the passages it quotes, and the citation
    mark that it writes for them. `support` is the probability that the passages answer the question. `abstained`: the
    text says that they do not; a generator of this process sets it, never the reply of a remote model."""

    text: str
    usage: Usage | None = None
    finish_reason: str | None = None
    abstained: bool = False
    quotes: tuple[QuotedSpan, ...] = ()
    mark: str = ""
    support: float | None = None


class Allowance(Value, gc=False):
    """A rate limiter's decision: `wait_s` 0 is admitted, else the time to wait. `remaining` calls are left; after
    `reset_s` the whole limit is available."""

    limit: int
    remaining: int
    reset_s: float
    wait_s: float = 0.0


class Embedding(Value, gc=False):
    """A text's embedding: one unit vector (float32), and, if the embedder has them, the sign bits of its token vectors,
    one row of dimensions / 8 bytes per token that carries meaning."""

    vector: bytes
    tokens: bytes = b""


class RelevanceCurve(Value, gc=False):
    """The relevance score of a passage is 1 / (1 + exp(-x)) with x = near * cosine + shared * words + bias; `words` is
    the share of the question's words that it has."""

    near: float
    shared: float
    bias: float


class Calibration(Value, gc=False):
    """What an embedder's cosines mean. A topic ends where the cosine of the sentences before and after is below
    `topic_threshold`; `relevance` turns the cosine of a question and a passage into a score from 0 to 1."""

    topic_threshold: float
    relevance: RelevanceCurve


class Citation(Value, gc=False):
    """A citation mark in the answer (`start`, `end`) and the words that support it: `passage` indexes
    `Answer.passages`, `passage_start` and `passage_end` are character offsets in that passage's text."""

    start: int
    end: int
    source: str
    passage: int
    passage_start: int
    passage_end: int


# How far the sources support a sentence of an answer.
Support = Literal["supported", "partly", "unsupported", "contradicted", "unchecked"]
# Why a sentence was not checked: verification is off, there was no time, it or the sources are not English, it claims
# nothing, it is code, or the model that checks is not available.
UncheckedReason = Literal["off", "over_budget", "not_english", "no_claim", "code", "unfinished", "unavailable"]


MarkKind = Literal["written", "corrected", "removed", "added"]
# Why an answer is refused although documents were found: they do not answer, they support too little of what a model
# wrote, or nothing of a strict answer.
WithheldReason = Literal["abstained", "unfaithful", "unsupported"]


class SupportingQuote(Value, gc=False):
    """Words of a passage (`start` and `end` in its text) that a sentence depends on. `support` is the probability that
    they support it."""

    passage: int
    start: int
    end: int
    support: float


class CheckedSentence(Value):
    """A sentence of an answer (`start` and `end` in its text) with what was found about it. Of a contradicted one the
    quotes say something else. `doubted` are the parts of the answer that the quotes do not say. `marks` counts the
    citation marks that the model wrote: `corrected` of them named a passage that does not support it instead of one
    that does, `removed` are wrong and have no right passage; `added` citations had no mark."""

    start: int
    end: int
    verdict: Support
    support: float | None = None
    reason: UncheckedReason | None = None
    quotes: tuple[SupportingQuote, ...] = ()
    doubted: tuple[tuple[int, int], ...] = ()
    marks: int = 0
    corrected: int = 0
    removed: int = 0
    added: int = 0


class Timings(Value, gc=False):
    """How long the stages of an answer took. `prompt_ms` includes the search for instructions and for contradictions in
    the passages; `verification_ms` is what is left of the checks after the model's last word. `first_token_ms` counts
    from the start; None if nothing was generated. A recorded run and a cached answer have only the first three."""

    retrieval_ms: int = 0
    generation_ms: int = 0
    total_ms: int = 0
    merge_ms: int = 0
    evidence_ms: int = 0
    prompt_ms: int = 0
    first_token_ms: int | None = None
    verification_ms: int = 0


class Fallback(Value, gc=False):
    """Why another model answered: `failed` did before its first token. `reason` is stable; `message` is for people, and
    names no address that the caller may not know."""

    failed: str = msgspec.field(name="from")
    reason: GenerationReason
    message: str


class Answer(Value):
    """The whole answer; `passages` are those in the prompt, best first, `unused` those that numbered passages left no
    room for. `model` has written it; `fallback` names the model that should have. `support` is the probability that the
    passages answer the question, of an answer that quotes them. `distinct` counts results without duplicates, for a
    `Ranking`; `compared`: all pairs were compared for that. `explanation` is each passage's way to the prompt, of a
    question that asks for it. `removed_links` are addresses that the model wrote and no source has: in the answer they
    are no links. `sentences` are those of a verified answer, `faithfulness` is the share of them that the sources
    support; `unfaithful`: it is below the minimum of the settings; `left_out` counts the sentences that a strict answer
    does without. `conflicts`: passages contradict each other on what was asked."""

    text: str
    ground: Ground
    replies: tuple[SourceReply, ...] = ()
    passages: tuple[Passage, ...] = ()
    unused: tuple[Passage, ...] = ()
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
    support: float | None = None
    fallback: Fallback | None = None
    explanation: Explanation | None = None
    removed_links: tuple[str, ...] = ()
    sentences: tuple[CheckedSentence, ...] = ()
    faithfulness: float | None = None
    unfaithful: bool = False
    left_out: int = 0
    conflicts: tuple[SourceConflict, ...] = ()

    @property
    def refusal_reason(self) -> str | None:
        """A `WithheldReason`, or the name of the ground if it has no documents; None if there is an answer."""
        if not self.refused:
            return None
        if self.ground is not Ground.DOCUMENTS:
            return self.ground.value
        withheld: WithheldReason = "unfaithful" if self.unfaithful else "unsupported" if self.left_out else "abstained"
        return withheld

    @property
    def verdicts(self) -> dict[str, int]:
        """How many sentences have each verdict; without those that have none."""
        return dict(Counter[str](sentence.verdict for sentence in self.sentences))

    @property
    def marks(self) -> dict[MarkKind, int]:
        """How many citation marks the model wrote, and how many of them were corrected or removed; and how many were
        added."""
        sums: dict[MarkKind, int] = dict.fromkeys(get_args(MarkKind), 0)
        for one in self.sentences:
            sums["written"] += one.marks
            sums["corrected"] += one.corrected
            sums["removed"] += one.removed
            sums["added"] += one.added
        return sums
