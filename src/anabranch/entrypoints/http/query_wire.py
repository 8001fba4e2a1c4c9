"""What POST /v1/query takes and sends, as spec 5 has it."""

from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.events import Answered, AnswerEvent, Failed, SourceReplied, Token
from anabranch.domain.model import Answer, Citation, Filters, Passage, Scores, Status
from anabranch.domain.streams import one_line
from anabranch.entrypoints.http.knowledge_errors import KnowledgeError, form
from anabranch.entrypoints.http.knowledge_wire import Wire
from anabranch.knowledge.sentences import sentences

SNIPPET = 200

Scalar = str | int | float | bool
Text = Annotated[str, Meta(min_length=1, max_length=500)]


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
    filters: FiltersForm | None = None
    settings: QuerySettings | None = None


class SourceView(Wire, frozen=True, kw_only=True):
    """A passage that was found, in order of rank. `citation_index` is its number in the answer's marks; null where the
    prompt had no room for it. `score` is the similarity of meaning, from 0 to 1."""

    chunk_id: str
    document_id: str
    title: str
    content_snippet: str
    score: float
    citation_index: int | None
    collection: str
    page: int | None
    section_title: str | None
    headers: tuple[str, ...]
    start_char: int
    end_char: int
    url: str | None
    metadata: dict[str, Any]
    scores: Scores


class CitationView(Wire, frozen=True, kw_only=True):
    """The words behind a mark: `start_char` and `end_char` are offsets in the document's content, `answer_start` and
    `answer_end` those of the mark in the answer."""

    citation_index: int
    chunk_id: str
    document_id: str
    start_char: int
    end_char: int
    quoted_text: str
    answer_start: int
    answer_end: int


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
    """How one question's answer is written: whole, or event by event so that both say the same."""

    def __init__(
        self, *, query_id: str, conversation_id: str, model: str, include_sources: bool, response_format: str
    ) -> None:
        self._query_id = query_id
        self._conversation_id = conversation_id
        self._model = model
        self._include_sources = include_sources
        self._as_json = response_format == "json"
        self._failed = False

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
            case SourceReplied(reply=reply) if reply.status is not Status.SUCCESS:
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


def sources(answer: Answer) -> list[SourceView]:
    """Every passage that was found, in order of rank."""
    numbers = {passage.place.chunk_id: n for n, passage in enumerate(answer.passages, 1) if passage.place is not None}
    found = (passage for reply in answer.replies for passage in reply.passages)
    return [view for passage in found if (view := _source(passage, numbers)) is not None]


def _source(passage: Passage, numbers: Mapping[str, int]) -> SourceView | None:
    place = passage.place
    if place is None:
        return None
    return SourceView(
        chunk_id=place.chunk_id,
        document_id=passage.document_id or "",
        title=passage.title,
        content_snippet=passage.text[:SNIPPET],
        score=passage.score,
        citation_index=numbers.get(place.chunk_id),
        collection=place.collection,
        page=place.page,
        section_title=place.headers[-1] if place.headers else None,
        headers=place.headers,
        start_char=place.start,
        end_char=place.end,
        url=place.url,
        metadata=dict(place.metadata),
        scores=place.scores,
    )


def citations(answer: Answer) -> list[CitationView]:
    found = (_citation(one, answer.passages[one.passage]) for one in answer.citations)
    return [view for view in found if view is not None]


def _citation(citation: Citation, passage: Passage) -> CitationView | None:
    place = passage.place
    if place is None:
        return None
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
