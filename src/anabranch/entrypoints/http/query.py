"""Questions to the collections: what /v1/query and /rag/stream share, and spec 5's POST /v1/query, answered as JSON or
as server-sent events by one Run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from io import SEEK_END, StringIO
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from anabranch.app.anabranch import Anabranch
from anabranch.app.endpoint_resolver import COLLECTIONS, EXTRACTIVE
from anabranch.app.query_log import LogEntry
from anabranch.app.questions import Options, SearchScope
from anabranch.app.resumable_answers import Frame
from anabranch.domain.errors import Forbidden, InvalidQuestion
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    FellBack,
    GenerationStarted,
    PromptComposed,
    RetrievalFinished,
    RetrievalStarted,
    SentenceChecked,
    SourceReplied,
    Token,
)
from anabranch.domain.explanation import ExplainWanted, Explanation
from anabranch.domain.model import (
    Answer,
    CheckedSentence,
    ChunkType,
    Citation,
    Duplicate,
    Endpoint,
    EvidenceUse,
    Fallback,
    Filters,
    Ground,
    MaxTokens,
    Message,
    Passage,
    Scores,
    SourceReply,
    Status,
    Usage,
    Value,
)
from anabranch.domain.sentences import SentenceView, place_of, sentence_view
from anabranch.entrypoints.answer_json import AnswerJson, sentence_by_sentence
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import KNOWLEDGE, KnowledgeError, SearchUnavailable, knowledge_error
from anabranch.entrypoints.http.operations import Call, EventStream, Operation, Reply, header
from anabranch.entrypoints.http.streams import AnswerInfo, AnswerSurface, event_frame, whole
from anabranch.entrypoints.verification import VerificationView, VerifiedRequest, verification
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import made_at, new_id
from anabranch.knowledge.records.queries import MAX_TURNS
from anabranch.pipeline.run import Run

MAX_QUERY = 10_000
SEARCH_FAILED = "The search failed."

CHUNK_TYPES: tuple[ChunkType, ...] = get_args(ChunkType)
Text = Annotated[str, Meta(min_length=1, max_length=500)]
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
    metadata: Annotated[dict[str, str | int | float | bool], Meta(max_length=50)] | None = None
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
    collections: Annotated[list[Text], Meta(max_length=100, description="Ids or names; all without any")] | None = None
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
    `chunk_index` is the number of the chunk in its document, from 0, and `created_at` the time when it was stored. A
    passage of another source has no collection, type, index and time; its `chunk_id` identifies its text, and its
    offsets are those in that text. `also_in` names its near-duplicates, which are left out: at
    most 20; `also_in_count` is the number of all. `evidence` is the probability that it answers the question, null if
    the evidence model did not read it. `suspected_instructions` are sentences that look like instructions to a model
    (decoded, in lower case). `text` is the whole text as it was found, with `include_text` in the request."""

    chunk_id: str
    document_id: str
    title: str
    content_snippet: str
    score: float
    citation_index: int | None
    source: str
    collection: str
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
    one belongs there, at the end of the sentence."""

    citation_index: int
    chunk_id: str
    document_id: str
    start_char: int
    end_char: int
    quoted_text: str
    answer_start: int
    answer_end: int


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


@dataclass
class SingleSource:
    """Reads the events of an answer: a single source that fails is an error; if there are several, the others
    answer."""

    _single: bool = False

    def failure(self, event: AnswerEvent) -> str | None:
        match event:
            case RetrievalStarted(sources=endpoints):
                self._single = len(endpoints) == 1
            case SourceReplied(reply=reply) if self._single and reply.status is not Status.SUCCESS:
                return reply.error or SEARCH_FAILED
        return None


async def whole_or_failed(run: Run, call: Call[Any]) -> Answer:
    """The answer; if its single source has failed, that is the error."""
    answer = await whole(run, call.receive)
    if answer.ground is Ground.ALL_FAILED and len(answer.replies) == 1:
        raise SearchUnavailable(answer.replies[0].error or SEARCH_FAILED)
    return answer


@dataclass
class QueryRenderer:
    """Renders the answer to one question, whole or event by event, with the same content. A single source that fails is
    an error; if there are several, the others answer."""

    query_id: str = ""
    conversation_id: str = ""
    model: str = ""
    settings: QuerySettings = field(default_factory=QuerySettings)
    # Sources other than collections are asked.
    with_status: bool = False
    _started: bool = False
    _failed: bool = False
    _single: SingleSource = field(default_factory=SingleSource)
    # What a sentence refers to: the passages in the prompt, and the answer so far.
    _passages: tuple[Passage, ...] = ()
    _text: StringIO = field(default_factory=StringIO)

    def response(self, answer: Answer) -> bytes:
        done = msgspec.structs.asdict(self.done(answer))
        return msgspec.json.encode(QueryResponse(answer=answer.text, sources=self._sources(answer), **done))

    def frame(self, event: AnswerEvent) -> bytes:
        """One event as SSE; empty for events that spec 5 does not have, and after an error. With `progress`, the events
        before the first token are there too."""
        if self._failed:
            return b""
        before = self._progress(event) if self.settings.progress else b""
        if (failure := self._single.failure(event)) is not None:
            self._failed = True
            return before + event_frame(b"error", knowledge_error("service_unavailable", failure, {}))
        return before + self._answering(event)

    def _progress(self, event: AnswerEvent) -> bytes:
        """The events that only a client gets that wants to see the progress."""
        before = b""
        if not self._started:
            self._started = True
            ids = QueryStarted(query_id=self.query_id, conversation_id=self.conversation_id)
            before = event_frame(b"started", ids) if self.query_id else b""
        match event:
            case RetrievalStarted(sources=paths):
                return before + event_frame(b"retrieval", QueryRetrieval(sources=paths))
            case SourceReplied(index=index, reply=reply):
                told = QuerySource(index=index, **msgspec.structs.asdict(_status(reply)))
                return before + event_frame(b"source", told)
            case RetrievalFinished(passages=found, time_ms=time_ms):
                return before + event_frame(b"retrieved", QueryRetrieved(passages=found, time_ms=time_ms))
            case GenerationStarted(model=model):
                return before + event_frame(b"generating", QueryGenerating(model=model))
            case _:
                return before

    def _answering(self, event: AnswerEvent) -> bytes:
        match event:
            case Token():
                self._text.write(event.text)
                return event_frame(b"token", QueryToken(text=event.text))
            case SentenceChecked(index=index, sentence=checked):
                view = sentence_view(checked, self._said(checked), self._passages)
                return event_frame(b"sentence", QuerySentence(index=index, sentence=view))
            case PromptComposed(passages=passages):
                self._passages = passages
                return b""
            case FellBack(model=model, fallback=why):
                return event_frame(b"fallback", QueryFallback(model=model, **msgspec.structs.asdict(why)))
            case Answered(answer=answer):
                found = self._sources(answer)
                before = event_frame(b"sources", QuerySources(sources=found)) if found is not UNSET else b""
                return before + event_frame(b"done", self.done(answer))
            case Failed():
                return event_frame(b"error", knowledge_error(event.code, event.message, event.details))
            case _:
                return b""

    def _said(self, sentence: CheckedSentence) -> str:
        self._text.seek(sentence.start)
        said = self._text.read(sentence.end - sentence.start)
        self._text.seek(0, SEEK_END)
        return said

    def _sources(self, answer: Answer) -> list[SourceView] | UnsetType:
        return (
            UNSET
            if self.settings.include_sources is False
            else sources(answer, with_text=self.settings.include_text is True)
        )

    def done(self, answer: Answer) -> QueryDone:
        """Everything but the text and the sources."""
        usage = answer.usage or Usage()
        return QueryDone(
            query_id=self.query_id,
            conversation_id=self.conversation_id,
            citations=citations(answer),
            usage=QueryUsage(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                model=answer.model or self.model,
            ),
            latency_ms=answer.timings.total_ms,
            timings=TimingsView(**msgspec.structs.asdict(answer.timings)),
            refused=answer.refused,
            rewritten_query=answer.rewritten,
            finish_reason=answer.finish_reason,
            support=answer.support,
            removed_links=answer.removed_links,
            fallback=answer.fallback or UNSET,
            answer_json=sentence_by_sentence(answer) if self.settings.response_format == "json" else UNSET,
            source_status=statuses(answer) if self.with_status else UNSET,
            explanation=answer.explanation or UNSET,
            **verification(answer),
        )


class InvalidKnowledgeQuery(InvalidQuestion):
    code = "invalid_query"


class QuerySurface(AnswerSurface):
    """Answers questions from the collections and from configured sources."""

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                "POST",
                "/v1/query",
                "query",
                "Ask the collections",
                self._query,
                KNOWLEDGE,
                request_type=QueryRequest,
                response_types=(QueryResponse,),
                stream=STREAM,
                resumable=True,
                errors=(429,),
                identify=self.access.caller,
                surface="query",
                admission=True,
            )
        ]

    async def _query(self, call: Call[QueryRequest]) -> Reply | None:
        request, anabranch = call.request, self.anabranch
        if not request.query.strip() or len(request.query) > MAX_QUERY:
            raise InvalidKnowledgeQuery(f"query must have 1 to {MAX_QUERY:,} characters.")
        settings = request.settings or QuerySettings()
        model = self._model(call)
        search, entry = await search_scope(anabranch, self.access, call, request, request.conversation_id)
        history = await self._history(call.caller, request.conversation_id, model)
        options = Options(
            top_k=settings.top_k,
            max_tokens=settings.max_tokens,
            rerank=settings.rerank is not False,
            fresh=wants_fresh(call),
            evidence=settings.evidence,
            fallback=settings.fallback,
            explain=request.explain,
            verify=request.verify,
            answer_policy=request.answer_policy or "all",
        )
        renderer = QueryRenderer(
            query_id=entry.query_id,
            conversation_id=entry.conversation or "",
            model=model.path,
            settings=settings,
            with_status=bool(request.sources) or settings.progress is True,
        )
        question = anabranch.questions.query(request.query, search, history, options, model)
        streaming = "text/event-stream" in (header(call.scope, b"accept") or "").lower()
        context = self.access.context(call, streaming=streaming)
        run = call.attach(*await anabranch.begin(question, context, entry=entry))
        if streaming:
            await self.streams.send(call, run, renderer.frame, context, dialect="query")
            return None
        return Reply(renderer.response(await whole_or_failed(run, call)))

    def _model(self, call: Call[QueryRequest]) -> Endpoint:
        """The model by its name, for callers who may use it; that of the settings without one."""
        if (name := call.request.model) is None:
            return self.anabranch.model
        may_use = self.access.may_use_configured(call.scope, call.caller)
        return self.anabranch.questions.named_model(name, configured=may_use)

    async def _history(self, caller: Caller, conversation: str | None, model: Endpoint) -> tuple[Message, ...]:
        """The last turns, for a model that can read them."""
        if conversation is None or model.kind == EXTRACTIVE.kind:
            return ()
        return await earlier_turns(self.anabranch, caller, conversation)


async def earlier_turns(
    anabranch: Anabranch, caller: Caller, conversation: str, last: str | None = None
) -> tuple[Message, ...]:
    """The last turns of a conversation of the caller's own, up to the one with the id `last`, if it is given."""
    await anabranch.query_log.settled()  # the previous turn may not be written yet
    knowledge = await anabranch.knowledge()
    return tuple(
        message
        for turn in await knowledge.turns(caller, conversation, MAX_TURNS, last)
        for message in (
            Message(role="user", content=turn.question),
            Message(role="assistant", content=turn.answer),
        )
    )


async def search_scope(
    anabranch: Anabranch, access: Access, call: Call[Any], request: CollectionQuestion, conversation: str | None = None
) -> tuple[SearchScope, LogEntry]:
    """What a CollectionQuestion searches, and its entry in the query log. Without sources and collections, every
    collection that the caller may see; configured sources are for callers who may use them."""
    filters = _filters(request.filters or FiltersForm())
    may_use = bool(request.sources) and access.may_use_configured(call.scope, call.caller)
    keys: tuple[int, ...] | None = None
    if request.sources == "all" or not request.sources:
        endpoints = anabranch.questions.every(request.query, collections=True, sources=may_use)
    elif may_use:
        endpoints = anabranch.configured(request.sources)
        keys = None if COLLECTIONS in endpoints else ()
    else:
        raise Forbidden(
            "Only the operator may name configured sources here; leave out `sources` to ask the collections."
        )
    if request.collections:
        chosen = await (await anabranch.knowledge()).chosen(call.caller, request.collections)
        filters = msgspec.structs.replace(filters, collections=tuple(one.id for one in chosen))
        endpoints = (COLLECTIONS, *(one for one in endpoints if one != COLLECTIONS))
        keys = tuple(one.key for one in chosen)
    entry = LogEntry(conversation=conversation or new_id(), collections=keys)
    return SearchScope(sources=endpoints, filters=filters), entry


def _filters(form: FiltersForm) -> Filters:
    days = form.date_range or DateRange()
    if days.start is not None and days.end is not None and days.start > days.end:
        raise InvalidQuestion("filters.date_range ends before it starts.")
    return Filters(
        start=days.start.isoformat() if days.start is not None else None,
        end=days.end.isoformat() if days.end is not None else None,
        metadata=form.metadata or {},
        tags=tuple(form.tags or ()),
        chunk_types=_chunk_types(form.chunk_type),
    )


def _chunk_types(given: str | list[str] | None) -> tuple[ChunkType, ...]:
    names = [given] if isinstance(given, str) else given or []
    for name in names:
        if name not in CHUNK_TYPES:
            raise InvalidQuestion(
                f"filters.chunk_type takes {', '.join(CHUNK_TYPES)}, or a list of these, not {name[:50]!r}."
            )
    return tuple(one for one in CHUNK_TYPES if one in names)


def wants_fresh(call: Call[Any]) -> bool:
    """Whether the caller refuses a cached answer."""
    return "no-cache" in (header(call.scope, b"cache-control") or "").lower()


def lost_query(_info: AnswerInfo) -> Frame:
    """Renders the end of an answer whose worker has stopped."""
    return QueryRenderer().frame


def sources(answer: Answer, *, with_text: bool = False) -> list[SourceView]:
    """Every passage that was found, without near-duplicates: first those in the prompt, by number, then the rest by
    rank. Each is shown as it was found, also if the prompt has only a part of it; `with_text` whole."""
    found = {place_of(passage).chunk_id: passage for reply in answer.replies for passage in reply.passages}
    merged = (*answer.passages, *answer.unused)
    listed = {place_of(passage).chunk_id for passage in merged}
    listed.update(copy.chunk_id for passage in merged for copy in passage.also_in if copy.chunk_id is not None)
    # What better chunks of the same document have already is in no prompt.
    covered = [passage for key, passage in found.items() if passage.place is not None and key not in listed]
    count = len(answer.passages)
    return [
        _source(passage, number if number <= count else None, found, with_text)
        for number, passage in enumerate((*merged, *covered), 1)
    ]


def _source(merged: Passage, number: int | None, found: Mapping[str, Passage], with_text: bool) -> SourceView:
    passage = found.get(place_of(merged).chunk_id, merged)
    place = place_of(passage)
    return SourceView(
        chunk_id=place.chunk_id,
        document_id=passage.document_id or "",
        title=passage.title,
        content_snippet=passage.text[:200],
        score=passage.score,
        citation_index=number,
        source=passage.source,
        collection=place.collection,
        chunk_index=place.index,
        # The id of a chunk carries the time; another source's is a hash.
        created_at=datetime.fromtimestamp(made, UTC) if (made := made_at(place.chunk_id)) else None,
        page=place.page,
        section_title=place.headers[-1] if place.headers else None,
        headers=place.headers,
        start_char=place.start,
        end_char=place.end,
        url=place.url,
        metadata=dict(place.metadata),
        scores=place.scores,
        chunk_type=place.chunk_type,
        evidence=merged.evidence,
        suspected_instructions=merged.suspected_instructions,
        text=passage.text if with_text else UNSET,
        **merged.shown_duplicates,
    )


def citations(answer: Answer) -> list[CitationView]:
    return [_citation(one, answer.passages[one.passage]) for one in answer.citations]


def _citation(citation: Citation, passage: Passage) -> CitationView:
    place = place_of(passage)
    return CitationView(
        citation_index=citation.passage + 1,
        chunk_id=place.chunk_id,
        document_id=passage.document_id or "",
        start_char=place.start + citation.passage_start,
        end_char=place.start + citation.passage_end,
        quoted_text=passage.text[citation.passage_start : citation.passage_end],
        answer_start=citation.start,
        answer_end=citation.end,
    )


def statuses(answer: Answer) -> list[SourceStatus]:
    return [_status(reply) for reply in answer.replies]


def _status(reply: SourceReply) -> SourceStatus:
    return SourceStatus(
        source=reply.path,
        status=reply.status,
        latency_ms=reply.latency_ms,
        results=len(reply.passages),
        error=reply.error,
    )
