"""Questions to the collections: what /v1/query and /rag/stream share, and spec 5's POST /v1/query, answered as JSON or
as server-sent events by one Run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import SEEK_END, StringIO
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

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
from anabranch.domain.model import (
    MAX_QUERY,
    Answer,
    CheckedSentence,
    ChunkType,
    Citation,
    Endpoint,
    Filters,
    Ground,
    Message,
    Passage,
    SourceReply,
    Status,
    Usage,
    Value,
)
from anabranch.domain.rights import NO_GRANT
from anabranch.domain.sentences import place_of, sentence_view
from anabranch.entrypoints.answer_json import sentence_by_sentence
from anabranch.entrypoints.http.access import Access, may_name
from anabranch.entrypoints.http.errors import KNOWLEDGE, SearchUnavailable, knowledge_error
from anabranch.entrypoints.http.operations import Call, Operation, Reply, header
from anabranch.entrypoints.http.query_wire import (
    CHUNK_TYPES,
    STREAM,
    CitationView,
    CollectionQuestion,
    DateRange,
    FiltersForm,
    QueryDone,
    QueryFallback,
    QueryGenerating,
    QueryRequest,
    QueryResponse,
    QueryRetrieval,
    QueryRetrieved,
    QuerySentence,
    QuerySettings,
    QuerySource,
    QuerySources,
    QueryStarted,
    QueryToken,
    QueryUsage,
    SourceStatus,
    SourceView,
    TimingsView,
)
from anabranch.entrypoints.http.streams import AnswerInfo, AnswerSurface, event_frame, whole
from anabranch.entrypoints.verification import verification
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import made_at, new_id
from anabranch.knowledge.records.logged_queries import MAX_TURNS
from anabranch.knowledge.records.queries import FoundAt
from anabranch.pipeline.run import Run

SEARCH_FAILED = "The search failed."


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
            source_status=statuses(answer) if self.with_status or is_partial(answer) else UNSET,
            explanation=answer.explanation or UNSET,
            **verification(answer),
        )


class InvalidKnowledgeQuery(InvalidQuestion):
    code = "invalid_query"


class EarlierTurns(Value):
    """The turns of a conversation that a model reads with a question, and the passages on which they rest."""

    conversation: str | None = None
    messages: tuple[Message, ...] = ()
    passages: frozenset[FoundAt] = frozenset()


NO_EARLIER_TURNS = EarlierTurns()


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
                errors=(409, 429),
                identify=self.access.caller,
                scope="ask",
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
        earlier = await self._earlier(call.caller, request.conversation_id, model)
        search, entry = await search_scope(anabranch, self.access, call, request, earlier)
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
        question = anabranch.questions.query(request.query, search, earlier.messages, options, model)
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
        return self.anabranch.questions.named_model(name, self.access.grants(call.scope, call.caller))

    async def _earlier(self, caller: Caller, conversation: str | None, model: Endpoint) -> EarlierTurns:
        """The last turns, for a model that can read them."""
        if conversation is None or model.kind == EXTRACTIVE.kind:
            return EarlierTurns(conversation=conversation)
        return await earlier_turns(self.anabranch, caller, conversation)


async def earlier_turns(
    anabranch: Anabranch, caller: Caller, conversation: str, last: str | None = None
) -> EarlierTurns:
    """The last turns of a conversation of the caller's own, up to the one with the id `last`, if it is given."""
    await anabranch.query_log.settled(caller)  # the previous turn may not be written yet
    turns = await (await anabranch.knowledge()).turns(caller, conversation, MAX_TURNS, last)
    return EarlierTurns(
        conversation=conversation,
        messages=tuple(
            message
            for turn in turns
            for message in (
                Message(role="user", content=turn.question),
                Message(role="assistant", content=turn.answer),
            )
        ),
        passages=frozenset[FoundAt]().union(*(turn.passages for turn in turns)),
    )


async def search_scope(
    anabranch: Anabranch,
    access: Access,
    call: Call[Any],
    request: CollectionQuestion,
    earlier: EarlierTurns = NO_EARLIER_TURNS,
) -> tuple[SearchScope, LogEntry]:
    """What a CollectionQuestion searches, and its entry in the query log. Without sources and collections, every
    collection that the caller may see; configured sources are for callers who may use them."""
    filters = _filters(request.filters or FiltersForm())
    grants = access.grants(call.scope, call.caller) if request.sources else NO_GRANT
    keys: tuple[int, ...] | None = None
    if request.sources == "all" or not request.sources:
        endpoints = anabranch.questions.every(request.query, collections=True, grants=grants)
    elif may_name(call.caller, grants):
        endpoints = anabranch.configured(request.sources, grants)
        keys = None if COLLECTIONS in endpoints else ()
    else:
        raise Forbidden(
            "Only the operator may name configured sources here, and callers whose key was granted some; leave out "
            "`sources` to ask the collections."
        )
    if request.collections:
        chosen = await (await anabranch.knowledge()).chosen(call.caller, request.collections)
        filters = msgspec.structs.replace(filters, collections=tuple(one.id for one in chosen))
        endpoints = (COLLECTIONS, *(one for one in endpoints if one != COLLECTIONS))
        keys = tuple(one.key for one in chosen)
    entry = LogEntry(conversation=earlier.conversation or new_id(), collections=keys, earlier=earlier.passages)
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
        owner=place.owner,
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
        page=place.page_at(place.start + citation.passage_start),
    )


def is_partial(answer: Answer) -> bool:
    """Whether a source has replied with less than it holds, and says why."""
    return any(reply.status is Status.SUCCESS and reply.error is not None for reply in answer.replies)


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
