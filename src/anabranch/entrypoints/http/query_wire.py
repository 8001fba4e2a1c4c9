"""What POST /v1/query takes and sends, as spec 5 has it."""

from collections.abc import Mapping
from datetime import date
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.events import Answered, AnswerEvent, Failed, RetrievalStarted, SourceReplied, Token
from anabranch.domain.model import Answer, Filters, Status
from anabranch.domain.streams import one_line
from anabranch.entrypoints.http.evidence import CitationView, SourceStatus, SourceView, citations, sources, statuses
from anabranch.entrypoints.http.knowledge_errors import KnowledgeError, form
from anabranch.entrypoints.http.knowledge_wire import Wire
from anabranch.knowledge.sentences import sentences

Scalar = str | int | float | bool
Text = Annotated[str, Meta(min_length=1, max_length=500)]
ELSEWHERE = (
    "Configured sources and MCP servers to ask, by name, for those who may. Without `collections`, only they are asked"
)
Sources = Annotated[list[Text], Meta(max_length=100, description=ELSEWHERE)]


class DateRange(Wire, frozen=True, kw_only=True):
    """Days, inclusive, compared with the document's `created_date` (or `date`), else with the day it was ingested."""

    start: date | None = None
    end: date | None = None


class FiltersForm(Wire, frozen=True, kw_only=True):
    date_range: DateRange | None = None
    metadata: Annotated[dict[str, Scalar], Meta(max_length=50)] | None = None
    tags: Annotated[list[Text], Meta(max_length=50)] | None = None


class QuerySettings(Wire, frozen=True, kw_only=True):
    top_k: Annotated[int, Meta(ge=1)] | None = None
    rerank: bool | None = None
    include_sources: bool | None = None
    response_format: Literal["text", "json"] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class QueryRequest(Wire, frozen=True, kw_only=True):
    """A question to the collections that the caller may read."""

    query: str
    conversation_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    collections: Annotated[list[Text], Meta(max_length=100, description="Ids or names; all without any")] | None = None
    sources: Sources | None = None
    filters: FiltersForm | None = None
    settings: QuerySettings | None = None


class QueryUsage(Wire, frozen=True, kw_only=True):
    """0 where the model did not say."""

    input_tokens: int
    output_tokens: int
    model: str


class Sentence(Wire, frozen=True, kw_only=True):
    text: str
    citations: list[int]


class AnswerJson(Wire, frozen=True, kw_only=True):
    """The answer without its marks, and sentence by sentence with the numbers of the sources behind each."""

    answer: str
    sentences: list[Sentence]


class QueryDone(Wire, frozen=True, kw_only=True):
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


class QueryResponse(Wire, frozen=True, kw_only=True):
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


class QueryToken(Wire, frozen=True, kw_only=True):
    text: str


class QuerySources(Wire, frozen=True, kw_only=True):
    sources: list[SourceView]


EVENTS: Mapping[str, type[msgspec.Struct]] = {
    "token": QueryToken,
    "sources": QuerySources,
    "done": QueryDone,
    "error": KnowledgeError,
}

encode = msgspec.json.Encoder().encode


class Form:
    """How one question's answer is written: whole, or event by event so that both say the same. A single source that
    fails is an error; of several, the others carry the answer. `elsewhere` says that others than collections are
    asked."""

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
        """One event as SSE; nothing for those that spec 5 does not have, and nothing more after an error."""
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
                return _frame(b"error", form("service_unavailable", reply.error or "The search failed.", {}))
            case Answered(answer=answer):
                found = _frame(b"sources", QuerySources(sources=sources(answer))) if self._include_sources else b""
                return found + _frame(b"done", self._done(answer))
            case Failed():
                return _frame(b"error", form(event.code, event.message, event.details))
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


def sentence_by_sentence(answer: Answer) -> AnswerJson:
    """The marks taken out, each belongs to the sentence that it stood in or right behind."""
    text, at = "", 0
    marks: list[tuple[int, int]] = []
    for citation in answer.citations:
        if citation.start >= at:
            text = (text + answer.text[at : citation.start]).rstrip(" ")
            at = citation.end
        marks.append((len(text), citation.passage + 1))
    text += answer.text[at:]
    found: list[Sentence] = []
    begun = 0
    for start, end in sentences(text):
        numbers = dict.fromkeys(number for place, number in marks if begun < place <= end)
        found.append(Sentence(text=text[start:end], citations=list(numbers)))
        begun = end
    return AnswerJson(answer=text.strip(), sentences=found)


def _frame(name: bytes, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, one_line(encode(data)))
