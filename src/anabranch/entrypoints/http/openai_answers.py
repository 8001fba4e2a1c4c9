"""Renders the events of an answer in OpenAI's forms: chat completions and responses, whole or as a stream."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from anabranch.app.resumable_answers import Frame
from anabranch.domain.events import Answered, AnswerEvent, Failed, Token
from anabranch.domain.model import Answer, Citation, Passage, Usage
from anabranch.domain.sentences import place_of
from anabranch.entrypoints.http.errors import SearchUnavailable
from anabranch.entrypoints.http.openai_wire import (
    AnnotationAdded,
    AnswerDetails,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    CompletionAnnotation,
    CompletionChoice,
    CompletionDelta,
    ContentPartEvent,
    FinishReason,
    IncompleteDetails,
    OutputItemEvent,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ResponseAnnotation,
    ResponseChanged,
    ResponseErrorEvent,
    ResponseEvent,
    ResponseFailure,
    ResponseStatus,
    ResponseUsage,
    ResponseView,
    UrlCitation,
    problem,
)
from anabranch.entrypoints.http.query import QueryRenderer, SingleSource, sources
from anabranch.entrypoints.http.streams import AnswerInfo, data_frame, event_frame
from anabranch.pipeline.prompt import estimate

DONE = b"data: [DONE]\n\n"
# Before the id of the question.
RESPONSE_ID, MESSAGE_ID = "resp_", "msg_"
# Why a model stopped, in OpenAI's words; every other reason is the end of the answer.
FINISH_REASONS: dict[str | None, FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "incomplete": "length",
    "content_filter": "content_filter",
}


def finish_reason(answer: Answer) -> FinishReason:
    return FINISH_REASONS.get(answer.finish_reason, "stop")


class OpenAIAnswer(NamedTuple):
    """What both forms take from an answer. `asked` are the texts of the request, for the estimate of tokens."""

    query: QueryRenderer
    asked: tuple[str, ...] = ()
    address: str = ""

    def details(self, answer: Answer) -> AnswerDetails:
        return AnswerDetails(sources=sources(answer), **msgspec.structs.asdict(self.query.done(answer)))

    def usage(self, answer: Answer) -> Usage:
        """As the model reports it, else an estimate."""
        if answer.usage is not None and answer.usage.total_tokens:
            return answer.usage
        read = (*self.asked, *(passage.text for passage in answer.passages))
        prompt, completion = sum(map(estimate, read)), estimate(answer.text)
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

    def citations(self, answer: Answer) -> list[UrlCitation]:
        """The citations that have an address."""
        return [
            UrlCitation(start_index=start, end_index=end, title=passage.title, url=url)
            for one in answer.citations
            if (url := self._url(one, passage := answer.passages[one.passage]))
            for start, end in _cited_range(one, answer)
        ]

    def _url(self, citation: Citation, passage: Passage) -> str:
        """The document's own address, else its page on this server, at the quoted words."""
        place = place_of(passage)
        if place.url or passage.place is None or not passage.document_id:
            return place.url or ""
        start, end = place.start + citation.passage_start, place.start + citation.passage_end
        return f"{self.address}/#/documents/{quote(passage.document_id, safe='')}?start={start}&end={end}"


def _cited_range(citation: Citation, answer: Answer) -> Iterator[tuple[int, int]]:
    """The mark of the citation; of one without a mark, its sentence."""
    if citation.start < citation.end:
        yield citation.start, citation.end
        return
    yield from [(one.start, one.end) for one in answer.sentences if one.start < citation.start <= one.end][:1]


@dataclass
class CompletionRenderer:
    """Renders one answer as a chat completion."""

    model: str = ""
    answer: OpenAIAnswer = field(default_factory=lambda: OpenAIAnswer(QueryRenderer()))
    include_usage: bool = False
    _created: int = field(default_factory=lambda: int(time.time()))
    _single: SingleSource = field(default_factory=SingleSource)
    _begun: bool = False
    _failed: bool = False

    def response(self, answer: Answer) -> bytes:
        message = AssistantMessage(content=answer.text, annotations=self._annotations(answer))
        return msgspec.json.encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self.model,
                choices=(CompletionChoice(message=message, finish_reason=finish_reason(answer)),),
                usage=self.answer.usage(answer),
                anabranch=self.answer.details(answer),
            )
        )

    def frame(self, event: AnswerEvent) -> bytes:
        """One event as SSE: first the role, at the end the citations, the details and `[DONE]`."""
        if self._failed:
            return b""
        if (failure := self._single.failure(event)) is not None:
            return self._error(SearchUnavailable.code, failure)
        if isinstance(event, Failed):
            return self._error(event.code, event.message)
        role = b"" if self._begun else self._chunk(CompletionDelta(role="assistant", content=""))
        self._begun = True
        match event:
            case Token():
                return role + self._chunk(CompletionDelta(content=event.text))
            case Answered(answer=answer):
                return role + self._end(answer)
            case _:
                return role

    def _end(self, answer: Answer) -> bytes:
        delta = CompletionDelta(annotations=self._annotations(answer))
        last = self._chunk(delta, finish_reason(answer), self.answer.details(answer))
        if not self.include_usage:
            return last + DONE
        usage = self.answer.usage(answer)
        return last + data_frame(msgspec.structs.replace(self._empty, choices=(), usage=usage)) + DONE

    def _error(self, code: str, message: str) -> bytes:
        self._failed = True
        return data_frame(problem(code, message)[1]) + DONE

    def _chunk(
        self, delta: CompletionDelta, reason: FinishReason | None = None, details: AnswerDetails | None = None
    ) -> bytes:
        choices = (ChunkChoice(delta=delta, finish_reason=reason),)
        return data_frame(msgspec.structs.replace(self._empty, choices=choices, anabranch=details or UNSET))

    @property
    def _empty(self) -> ChatCompletionChunk:
        usage = None if self.include_usage else UNSET
        return ChatCompletionChunk(id=self._id, created=self._created, model=self.model, choices=(), usage=usage)

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self.answer.query.query_id}"

    def _annotations(self, answer: Answer) -> list[CompletionAnnotation]:
        return [CompletionAnnotation(url_citation=one) for one in self.answer.citations(answer)]


class EventHead(TypedDict):
    """The fields of a ResponseEvent."""

    type: str
    sequence_number: int


@dataclass
class ResponseRenderer:
    """Renders one answer as a response. `begun` is the response before there is an answer."""

    begun: ResponseView
    answer: OpenAIAnswer
    _single: SingleSource = field(default_factory=SingleSource)
    _number: int = 0
    _started: bool = False
    _writing: bool = False
    _failed: bool = False

    def response(self, answer: Answer) -> bytes:
        return msgspec.json.encode(self._completed(answer))

    def frame(self, event: AnswerEvent) -> bytes:
        """One event as SSE, in OpenAI's order."""
        if self._failed:
            return b""
        begin = b"" if self._started else self._changed("created") + self._changed("in_progress")
        self._started = True
        failure = self._single.failure(event)
        match event:
            case _ if failure is not None:
                return begin + self._failure(SearchUnavailable.code, failure)
            case Failed():
                return begin + self._failure(event.code, event.message)
            case Token():
                return begin + self._opened() + self._text(event.text)
            case Answered(answer=answer):
                return begin + self._opened() + self._end(answer)
            case _:
                return begin

    def _opened(self) -> bytes:
        """The beginning of the message, once."""
        if self._writing:
            return b""
        self._writing = True
        item = OutputMessage(id=self._item, status="in_progress", content=())
        return self._sent(OutputItemEvent(item=item, **self._next("output_item.added"))) + self._sent(
            ContentPartEvent(item_id=self._item, part=OutputText(), **self._next("content_part.added"))
        )

    def _text(self, text: str) -> bytes:
        return self._sent(OutputTextDelta(item_id=self._item, delta=text, **self._next("output_text.delta")))

    def _end(self, answer: Answer) -> bytes:
        whole = self._completed(answer)
        (message,) = whole.output
        (part,) = message.content
        annotations = b"".join(
            self._sent(
                AnnotationAdded(
                    item_id=self._item,
                    annotation=one,
                    annotation_index=index,
                    **self._next("output_text.annotation.added"),
                )
            )
            for index, one in enumerate(part.annotations)
        )
        return (
            annotations
            + self._sent(OutputTextDone(item_id=self._item, text=part.text, **self._next("output_text.done")))
            + self._sent(ContentPartEvent(item_id=self._item, part=part, **self._next("content_part.done")))
            + self._sent(OutputItemEvent(item=message, **self._next("output_item.done")))
            + self._changed(whole.status, whole)
        )

    def _completed(self, answer: Answer) -> ResponseView:
        reason = finish_reason(answer)
        status: ResponseStatus = "completed" if reason == "stop" else "incomplete"
        cited = [ResponseAnnotation(**msgspec.structs.asdict(one)) for one in self.answer.citations(answer)]
        part = OutputText(text=answer.text, annotations=cited)
        usage = self.answer.usage(answer)
        cut = IncompleteDetails(reason="max_output_tokens" if reason == "length" else "content_filter")
        return msgspec.structs.replace(
            self.begun,
            status=status,
            output=(OutputMessage(id=self._item, status=status, content=(part,)),),
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
            incomplete_details=None if reason == "stop" else cut,
            anabranch=self.answer.details(answer),
        )

    def _failure(self, code: str, message: str) -> bytes:
        self._failed = True
        error = problem(code, message)[1].error
        failure = ResponseFailure(code=error.code or error.type, message=message)
        return self._changed("failed", msgspec.structs.replace(self.begun, status="failed", error=failure))

    def _changed(self, name: str, response: ResponseView | None = None) -> bytes:
        return self._sent(ResponseChanged(response=response or self.begun, **self._next(name)))

    def _next(self, name: str) -> EventHead:
        number, self._number = self._number, self._number + 1
        return {"type": f"response.{name}", "sequence_number": number}

    def _sent(self, event: ResponseEvent) -> bytes:
        return event_frame(event.type.encode(), event)

    @property
    def _item(self) -> str:
        return MESSAGE_ID + self.answer.query.query_id


def lost_completion(_info: AnswerInfo) -> Frame:
    """Renders the end of an answer whose worker has stopped."""
    return CompletionRenderer().frame


def lost_response(_info: AnswerInfo) -> Frame:
    """The same for a response: its beginning is not known any more."""

    def frame(event: AnswerEvent) -> bytes:
        assert isinstance(event, Failed), "an answer that is lost ends with an error"
        lost = ResponseErrorEvent(type="error", sequence_number=0, code=event.code, message=event.message)
        return event_frame(b"error", lost)

    return frame
