"""Spec 5's question: POST /v1/query, answered as JSON or as server-sent events by one Run."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from anabranch.app import Anabranch
from anabranch.app.endpoint_resolver import COLLECTIONS, EXTRACTIVE
from anabranch.app.query_log import LogEntry
from anabranch.app.questions import Options, SearchScope
from anabranch.app.resumable_answers import Frame
from anabranch.domain.errors import Forbidden, InvalidQuestion
from anabranch.domain.eventlog import one_line
from anabranch.domain.events import Answered, AnswerEvent, Failed, RetrievalStarted, SourceReplied, Token
from anabranch.domain.model import Answer, Endpoint, Filters, Ground, Message, Status
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.asgi import header, wants_fresh
from anabranch.entrypoints.http.citations import (
    AnswerJson,
    CitationView,
    SourceStatus,
    SourceView,
    citations,
    sentence_by_sentence,
    sources,
    statuses,
)
from anabranch.entrypoints.http.errors import KNOWLEDGE, KnowledgeError, SearchUnavailable, knowledge_error
from anabranch.entrypoints.http.knowledge_wire import KnowledgeWire
from anabranch.entrypoints.http.operations import Call, EventStream, Operation, Reply
from anabranch.entrypoints.http.run_stream import AnswerInfo, AnswerStreams, whole
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import new_id

if TYPE_CHECKING:  # it imports numpy
    from anabranch.knowledge.knowledge import Knowledge

SURFACE = "query"
LONGEST = 10_000
TURNS = 5
NOT_YOURS = "Only the operator may name configured sources here; leave out `sources` to ask the collections."
QUERY_SCHEMA = {"minLength": 1, "maxLength": LONGEST, "pattern": r"\S"}

Scalar = str | int | float | bool
Text = Annotated[str, Meta(min_length=1, max_length=500)]
ELSEWHERE = "Configured sources and MCP servers, by name. Without `collections`, only these are asked"
Sources = Annotated[list[Text], Meta(max_length=100, description=ELSEWHERE)]


class DateRange(KnowledgeWire, frozen=True, kw_only=True):
    """Days, inclusive, compared with the document's `created_date` (or `date`), else with the day it was ingested."""

    start: date | None = None
    end: date | None = None


class FiltersForm(KnowledgeWire, frozen=True, kw_only=True):
    date_range: DateRange | None = None
    metadata: Annotated[dict[str, Scalar], Meta(max_length=50)] | None = None
    tags: Annotated[list[Text], Meta(max_length=50)] | None = None


class QuerySettings(KnowledgeWire, frozen=True, kw_only=True):
    top_k: Annotated[int, Meta(ge=1)] | None = None
    rerank: bool | None = None
    include_sources: bool | None = None
    response_format: Literal["text", "json"] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class QueryRequest(KnowledgeWire, frozen=True, kw_only=True):
    """A question to the collections that the caller may read."""

    query: Annotated[str, Meta(extra_json_schema=QUERY_SCHEMA)]
    conversation_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    collections: Annotated[list[Text], Meta(max_length=100, description="Ids or names; all without any")] | None = None
    sources: Sources | None = None
    filters: FiltersForm | None = None
    settings: QuerySettings | None = None


class QueryUsage(KnowledgeWire, frozen=True, kw_only=True):
    """0 if the model did not report it."""

    input_tokens: int
    output_tokens: int
    model: str


class QueryDone(KnowledgeWire, frozen=True, kw_only=True):
    """The end of a stream: everything but the text and the sources."""

    query_id: str
    conversation_id: str
    citations: list[CitationView]
    usage: QueryUsage
    latency_ms: int
    refused: bool
    rewritten_query: str | None
    finish_reason: str | None
    answer_json: AnswerJson | UnsetType = UNSET
    source_status: list[SourceStatus] | UnsetType = UNSET


class QueryResponse(KnowledgeWire, frozen=True, kw_only=True):
    """The whole answer."""

    query_id: str
    answer: str
    sources: list[SourceView] | UnsetType = UNSET
    conversation_id: str
    citations: list[CitationView]
    usage: QueryUsage
    latency_ms: int
    refused: bool
    rewritten_query: str | None
    finish_reason: str | None
    answer_json: AnswerJson | UnsetType = UNSET
    source_status: list[SourceStatus] | UnsetType = UNSET


class QueryToken(KnowledgeWire, frozen=True, kw_only=True):
    text: str


class QuerySources(KnowledgeWire, frozen=True, kw_only=True):
    sources: list[SourceView]


EVENTS: Mapping[str, type[msgspec.Struct]] = {
    "token": QueryToken,
    "sources": QuerySources,
    "done": QueryDone,
    "error": KnowledgeError,
}

encode = msgspec.json.Encoder().encode


class QueryForm:
    """Renders the answer to one question, whole or event by event, with the same content. A single source that fails is
    an error; if there are several, the others answer. `elsewhere`: sources other than collections are asked."""

    def __init__(
        self,
        *,
        query_id: str,
        conversation_id: str,
        model: str,
        include_sources: bool,
        response_format: str,
        elsewhere: bool = False,
    ) -> None:
        self._query_id = query_id
        self._conversation_id = conversation_id
        self._model = model
        self._include_sources = include_sources
        self._as_json = response_format == "json"
        self._elsewhere = elsewhere
        self._failed = self._alone = False

    def response(self, answer: Answer) -> bytes:
        done = msgspec.structs.asdict(self._done(answer))
        found = sources(answer) if self._include_sources else UNSET
        return encode(QueryResponse(answer=answer.text, sources=found, **done))

    def frame(self, event: AnswerEvent) -> bytes:
        """One event as SSE; empty for events that spec 5 does not have, and after an error."""
        if self._failed:
            return b""
        match event:
            case Token():
                return _frame(b"token", QueryToken(text=event.text))
            case RetrievalStarted(sources=asked):
                self._alone = len(asked) == 1
                return b""
            case SourceReplied(reply=reply) if self._alone and reply.status is not Status.SUCCESS:
                self._failed = True
                return _frame(b"error", knowledge_error("service_unavailable", reply.error or "The search failed.", {}))
            case Answered(answer=answer):
                found = _frame(b"sources", QuerySources(sources=sources(answer))) if self._include_sources else b""
                return found + _frame(b"done", self._done(answer))
            case Failed():
                return _frame(b"error", knowledge_error(event.code, event.message, event.details))
            case _:
                return b""

    def _done(self, answer: Answer) -> QueryDone:
        usage = answer.usage
        return QueryDone(
            query_id=self._query_id,
            conversation_id=self._conversation_id,
            citations=citations(answer),
            usage=QueryUsage(
                input_tokens=usage.prompt_tokens if usage else 0,
                output_tokens=usage.completion_tokens if usage else 0,
                model=answer.model or self._model,
            ),
            latency_ms=answer.timings.total_ms,
            refused=answer.refused,
            rewritten_query=answer.rewritten,
            finish_reason=answer.finish_reason,
            answer_json=sentence_by_sentence(answer) if self._as_json else UNSET,
            source_status=statuses(answer) if self._elsewhere else UNSET,
        )


STREAM = EventStream(
    "QueryEvent",
    "With `Accept: text/event-stream` server-sent events: `token` for each part of the answer, `sources` (unless "
    "`include_sources` is false), and at the end `done`; on any failure, one `error`. Each event has one `data:` line "
    "of JSON, of the type under its name here. A comment line may come at any time.",
    EVENTS,
)


class InvalidKnowledgeQuery(InvalidQuestion):
    code = "invalid_query"


class QuerySurface:
    """Answers questions from the collections and from configured sources."""

    def __init__(self, anabranch: Anabranch, access: Access, streams: AnswerStreams) -> None:
        self._anabranch = anabranch
        self._access = access
        self._streams = streams

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                method="POST",
                path="/v1/query",
                name="query",
                summary="Ask the collections",
                dialect=KNOWLEDGE,
                handler=self._query,
                takes=QueryRequest,
                gives=(QueryResponse,),
                stream=STREAM,
                resumable=True,
                errors=(429,),
                who=self._access.caller,
                surface=SURFACE,
                admission=True,
            )
        ]

    async def _query(self, call: Call[QueryRequest]) -> Reply | None:
        asked, scope, anabranch = call.asked, call.scope, self._anabranch
        if not asked.query.strip() or len(asked.query) > LONGEST:
            raise InvalidKnowledgeQuery(f"query must have 1 to {LONGEST:,} characters.")
        filters = filters_of(asked.filters)
        knowledge = await anabranch.knowledge()
        elsewhere = named(anabranch, self._access.vouched(scope, call.caller), asked.sources)
        search, keys = await scope_of(knowledge, call.caller, asked.collections, elsewhere, filters)
        settings = asked.settings or QuerySettings()
        options = Options(
            top_k=settings.top_k,
            max_tokens=settings.max_tokens,
            rerank=settings.rerank is not False,
            fresh=wants_fresh(scope),
        )
        history = await self._history(knowledge, call.caller, asked.conversation_id)
        question = anabranch.questions.query(asked.query, search, history, options)
        conversation = asked.conversation_id or new_id()
        entry = LogEntry(conversation=conversation, collections=keys)
        form = QueryForm(
            query_id=entry.query_id,
            conversation_id=conversation,
            model=anabranch.model.path,
            include_sources=settings.include_sources is not False,
            response_format=settings.response_format or "text",
            elsewhere=bool(elsewhere),
        )
        context = self._access.context(scope, call.caller, SURFACE)
        run = call.begun(*await anabranch.begin(question, context, entry=entry))
        if "text/event-stream" in (header(scope, b"accept") or "").lower():
            info = AnswerInfo(dialect="query", correlation_id=context.correlation_id)
            await self._streams.send(call, run, form.frame, info, context)
            return None
        answer = await whole(run, call.receive)
        if answer.ground is Ground.ALL_FAILED and len(answer.replies) == 1:
            raise SearchUnavailable(answer.replies[0].error or "The search failed.")
        return Reply(form.response(answer))

    async def _history(self, knowledge: "Knowledge", caller: Caller, conversation: str | None) -> tuple[Message, ...]:
        """The last turns, for a model that can read them."""
        if conversation is None or self._anabranch.model.kind == EXTRACTIVE.kind:
            return ()
        await self._anabranch.query_log.settled()  # the previous turn may not be written yet
        turns = await knowledge.turns(caller, conversation, TURNS)
        return tuple(
            message
            for turn in turns
            for message in (
                Message(role="user", content=turn.question),
                Message(role="assistant", content=turn.answer),
            )
        )


def filters_of(form: FiltersForm | None) -> Filters:
    form = form or FiltersForm()
    days = form.date_range or DateRange()
    if days.start is not None and days.end is not None and days.start > days.end:
        raise InvalidQuestion("filters.date_range ends before it starts.")
    return Filters(
        start=days.start.isoformat() if days.start is not None else None,
        end=days.end.isoformat() if days.end is not None else None,
        metadata=form.metadata or {},
        tags=tuple(form.tags or ()),
    )


def named(anabranch: Anabranch, vouched: bool, names: Sequence[str] | None) -> tuple[Endpoint, ...]:
    """The configured sources with these names, for callers who may use them."""
    if not names:
        return ()
    if not vouched:
        raise Forbidden(NOT_YOURS)
    return anabranch.configured(names)


async def scope_of(
    knowledge: "Knowledge",
    caller: Caller,
    collections: Sequence[str] | None,
    elsewhere: tuple[Endpoint, ...],
    filters: Filters,
) -> tuple[SearchScope, tuple[int, ...] | None]:
    """The search scope of a request, and the keys of the collections that it names. Without sources and collections,
    every collection that the caller may see."""
    if not collections:
        return SearchScope(sources=elsewhere or (COLLECTIONS,), filters=filters), () if elsewhere else None
    chosen = await knowledge.chosen(caller, collections)
    filters = msgspec.structs.replace(filters, collections=tuple(one.id for one in chosen))
    return SearchScope(sources=(COLLECTIONS, *elsewhere), filters=filters), tuple(one.key for one in chosen)


def lost_query(_info: AnswerInfo) -> Frame:
    """Renders the end of an answer whose worker has stopped."""
    return QueryForm(query_id="", conversation_id="", model="", include_sources=False, response_format="text").frame


def _frame(name: bytes, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, one_line(encode(data)))
