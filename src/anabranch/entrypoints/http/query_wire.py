"""The types of questions to the collections, and of the answers and events of POST /v1/query."""

from datetime import date, datetime
from typing import Annotated, Any, Literal, get_args

from msgspec import UNSET, Meta, UnsetType

from anabranch.domain.explanation import ExplainWanted, Explanation
from anabranch.domain.model import (
    MAX_QUERY,
    ChunkType,
    Duplicate,
    EvidenceUse,
    Fallback,
    MaxTokens,
    Scores,
    Status,
    Value,
)
from anabranch.domain.sentences import SentenceView
from anabranch.entrypoints.answer_json import AnswerJson
from anabranch.entrypoints.http.errors import KnowledgeError
from anabranch.entrypoints.http.operations import EventStream
from anabranch.entrypoints.verification import VerificationView, VerifiedRequest

CHUNK_TYPES: tuple[ChunkType, ...] = get_args(ChunkType)
Text = Annotated[str, Meta(min_length=1, max_length=500)]
MetadataName = Annotated[str, Meta(max_length=500)]
MetadataValue = Annotated[str, Meta(max_length=2_000)]
# Checked by `_chunk_types`, whose message lists the types.
ChunkTypeName = Annotated[str, Meta(extra_json_schema={"enum": list(CHUNK_TYPES)})]


# Shared by all surfaces whose requests name it.
FallbackWanted = Annotated[
    bool,
    Meta(
        description="Whether the documents are quoted if the model fails before its first token; left out, the setting "
        "AGGREGATOR_MODEL_FALLBACK decides"
    ),
]


class DateRange(Value):
    """Days, inclusive, compared with the document's `created_date` (or `date`), else with the day it was ingested."""

    start: date | None = None
    end: date | None = None


class FiltersForm(Value):
    date_range: DateRange | None = None
    metadata: Annotated[dict[MetadataName, MetadataValue | int | float | bool], Meta(max_length=50)] | None = None
    tags: Annotated[list[Text], Meta(max_length=50)] | None = None
    chunk_type: (
        Annotated[
            ChunkTypeName | Annotated[list[ChunkTypeName], Meta(max_length=50)],
            Meta(description="Only chunks of this type, or of one of these types; an empty list means all"),
        ]
        | None
    ) = None


class CollectionQuestion(VerifiedRequest, kw_only=True):
    """A question to the collections that the caller may read, and to configured sources. The length of `query` is
    checked by each dialect, for its own message."""

    query: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_QUERY, "pattern": r"\S"})]
    collections: (
        Annotated[list[Text], Meta(max_length=100, description="Ids, names or addresses; all without any")] | None
    ) = None
    sources: (
        Annotated[
            list[Text],
            Meta(
                max_length=100,
                description="Configured sources and MCP servers, by name: without `collections`, only these are asked. "
                "Or `all`: all that the caller may use, beside the collections",
            ),
        ]
        | Literal["all"]
        | None
    ) = None
    filters: FiltersForm | None = None
    explain: ExplainWanted = False


class QuerySettings(Value):
    top_k: Annotated[int, Meta(ge=1)] | None = None
    rerank: bool | None = None
    include_sources: bool | None = None
    response_format: Literal["text", "json"] | None = None
    max_tokens: MaxTokens | None = None
    evidence: EvidenceUse | None = None
    fallback: FallbackWanted | None = None
    progress: (
        Annotated[
            bool,
            Meta(description="The stream also has `started`, `retrieval`, `source`, `retrieved` and `generating`"),
        ]
        | None
    ) = None
    include_text: Annotated[bool, Meta(description="Each source has its whole text")] | None = None


class QueryRequest(CollectionQuestion):
    """A question to the collections that the caller may read."""

    conversation_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    settings: QuerySettings | None = None
    model: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=500,
                description="The name of a configured model, or `extractive`; left out, the model of the settings",
            ),
        ]
        | None
    ) = None


class SourceView(Value):
    """A passage that was found, in order of citation numbers, then of rank. `citation_index` is its number in the
    answer's marks; null if it did not fit into the prompt. `score` is the similarity of meaning, from 0 to 1.
    `chunk_index` is the number of the chunk in its document, from 0, and `created_at` the time when it was stored.
    `owner` is the user that owns the collection, null for the operator. A passage of another source has no collection,
    type, index and time; its `chunk_id` identifies its text, and its offsets are those in that text. `also_in` names
    its near-duplicates, which are left out: at most 20; `also_in_count` is the number of all. `evidence` is the
    probability that it answers the question, null if the evidence model did not read it. `suspected_instructions` are
    sentences that look like instructions to a model (decoded, in lower case). `text` is the whole text as it was found,
    with `include_text` in the request."""

    chunk_id: str
    document_id: str
    title: str
    content_snippet: str
    score: float
    citation_index: int | None
    source: str
    collection: str
    owner: str | None
    chunk_index: int | None
    created_at: datetime | None
    page: int | None
    section_title: str | None
    headers: tuple[str, ...]
    start_char: int
    end_char: int
    url: str | None
    metadata: dict[str, Any]
    scores: Scores
    chunk_type: ChunkType | None
    also_in: tuple[Duplicate, ...]
    also_in_count: int
    evidence: float | None
    suspected_instructions: tuple[str, ...]
    text: str | UnsetType = UNSET


class CitationView(Value):
    """The quoted text of a citation mark: `start_char` and `end_char` are offsets in the document's content,
    `answer_start` and `answer_end` those of the mark in the answer. They are equal if the answer has no mark for it:
    one belongs there, at the end of the sentence. `page` is where the quoted text begins."""

    citation_index: int
    chunk_id: str
    document_id: str
    start_char: int
    end_char: int
    quoted_text: str
    answer_start: int
    answer_end: int
    page: int | None


class SourceStatus(Value):
    """The outcome of one source."""

    source: str
    status: Status
    latency_ms: int
    results: int
    error: str | None


AnswerSupport = Annotated[
    float, Meta(description="The probability that the passages answer the question, of an answer that quotes them")
]


ExplanationView = Annotated[
    Explanation,
    Meta(
        description="How each stage ranked each passage, and why others were left out; only with `explain` in the "
        "request"
    ),
]


RemovedLinks = Annotated[
    tuple[str, ...],
    Meta(description="Addresses of links in the answer that occur in no source: they became text; at most 100"),
]


class TimingsView(Value):
    """How long the stages took, in milliseconds. `prompt_ms` includes the search for instructions and contradictions in
    the passages; `verification_ms` is the rest of the checks after the model's last word. `first_token_ms` counts from
    the start, and is null if nothing was generated for this question. A cached answer has only `total_ms`."""

    retrieval_ms: int
    merge_ms: int
    evidence_ms: int
    prompt_ms: int
    first_token_ms: int | None
    generation_ms: int
    verification_ms: int
    total_ms: int


class QueryUsage(Value):
    """0 if the model did not report it."""

    input_tokens: int
    output_tokens: int
    model: str


class QueryDone(VerificationView, kw_only=True):
    """The end of a stream: everything but the text and the sources."""

    query_id: str
    conversation_id: str
    citations: list[CitationView]
    usage: QueryUsage
    latency_ms: int
    timings: TimingsView
    refused: bool
    rewritten_query: str | None
    finish_reason: str | None
    support: AnswerSupport | None
    removed_links: RemovedLinks
    fallback: (
        Annotated[
            Fallback, Meta(description="The model that failed, and why; `usage.model` is the one that answered instead")
        ]
        | UnsetType
    ) = UNSET
    answer_json: AnswerJson | UnsetType = UNSET
    source_status: list[SourceStatus] | UnsetType = UNSET
    explanation: ExplanationView | UnsetType = UNSET


class QueryResponse(QueryDone, kw_only=True):
    """The whole answer."""

    answer: str
    sources: list[SourceView] | UnsetType = UNSET


class QueryToken(Value):
    text: str


class QuerySentence(Value):
    """A sentence of the answer, as soon as it is complete and was checked; `index` counts from 0."""

    index: int
    sentence: SentenceView


class QueryFallback(Fallback, kw_only=True):
    """The model has failed, and `model` answers instead."""

    model: str


class QuerySources(Value):
    sources: list[SourceView]


class QueryStarted(Value):
    """The ids of the question, before anything else is known."""

    query_id: str
    conversation_id: str


class QueryRetrieval(Value):
    """The sources that are asked, in the order of the question."""

    sources: tuple[str, ...]


class QuerySource(SourceStatus, kw_only=True):
    """A source has replied or failed; `index` is its place in the list of sources, from 0."""

    index: int


class QueryRetrieved(Value):
    """All sources have replied: so many passages, after so long."""

    passages: int
    time_ms: int


class QueryGenerating(Value):
    """The model begins to write."""

    model: str


STREAM = EventStream(
    "QueryEvent",
    "With `Accept: text/event-stream` server-sent events: `token` for each part of the answer, `sources` (unless "
    "`include_sources` is false), and at the end `done`; on any failure, one `error`. If the model fails before its "
    "first token and the documents are quoted instead, `fallback` comes first. If the answer is verified, `sentence` "
    "comes as soon as a sentence was checked, and `done` has them all. Each event has one `data:` line of JSON, of the "
    "type under its name here. A comment line may come at any time. With `settings.progress`, `started` comes "
    "first; then `retrieval`, a `source` for each reply as it arrives, `retrieved`, and `generating` before the first "
    "token.",
    {
        "started": QueryStarted,
        "retrieval": QueryRetrieval,
        "source": QuerySource,
        "retrieved": QueryRetrieved,
        "generating": QueryGenerating,
        "fallback": QueryFallback,
        "token": QueryToken,
        "sentence": QuerySentence,
        "sources": QuerySources,
        "done": QueryDone,
        "error": KnowledgeError,
    },
)
