"""The SyftAI-Space surface, as sources have it: POST /api/v1/endpoints/{slug}/query."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.types import Scope

from anabranch.app.anabranch import Anabranch
from anabranch.app.publishing import Publication
from anabranch.app.questions import Options, relayed
from anabranch.domain.errors import AnabranchError, DeadlineExceeded, InvalidQuestion
from anabranch.domain.events import Answered, AnswerEvent, Failed, Token
from anabranch.domain.model import (
    Answer,
    Context,
    Endpoint,
    MaxTokens,
    Message,
    Passage,
    Question,
    SourceReply,
    Status,
    Temperature,
    Value,
)
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import DESCRIPTIONS, Dialect, SearchUnavailable, status_of
from anabranch.entrypoints.http.operations import Call, EventStream, Operation, header
from anabranch.entrypoints.http.streams import data_frame, follow, whole

MAX_QUESTION = 100_000


class EndpointMessage(Value):
    role: Literal["system", "user", "assistant"] = "user"
    content: str = ""


class EndpointQuery(Value):
    """A question of an aggregator: a data source takes a text, a model takes messages."""

    messages: str | Annotated[list[EndpointMessage], Meta(max_length=1_000)]
    limit: Annotated[int, Meta(ge=1)] | None = None
    similarity_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    include_metadata: bool | None = True
    transaction_token: Annotated[str, Meta(max_length=8_192)] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    stream: bool | None = False


class EndpointError(Value):
    detail: str


class EndpointReply(Value):
    """`references` of a collection, or the `summary` of a model."""

    summary: dict[str, Any] | None
    references: dict[str, Any] | None


def _render(error: AnabranchError, _scope: Scope) -> tuple[int, bytes]:
    return status_of(error), msgspec.json.encode(EndpointError(detail=error.message))


DIALECT = Dialect(
    render=_render,
    error_type=EndpointError,
    descriptions={**DESCRIPTIONS, 404: "Nothing of that name is published, or not for this caller."},
    always=(401, 404, 422, 429, 500, 502, 503, 504),
    strict=False,
)
STREAM = EventStream(
    "EndpointEvent",
    "A model with `stream`: server-sent events without a name, each a chunk of a chat completion as JSON, and at the "
    "end `[DONE]`.",
    (),
)


@dataclass(frozen=True)
class EndpointSurface:
    """Published collections answer with references, published models with a summary."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                "POST",
                f"/api/v1/endpoints/{path}/query",
                name,
                "Ask a published collection or model",
                self._query,
                DIALECT,
                request_type=EndpointQuery,
                response_types=(EndpointReply,),
                stream=STREAM,
                scope="ask",
                identify=self.access.visitor,
                surface="endpoints",
                admission=True,
                handler_reads=True,
            )
            for path, name in (("{slug}", "ask_endpoint"), ("{owner}/{slug}", "ask_endpoint_of_owner"))
        ]

    async def _query(self, call: Call[EndpointQuery]) -> EndpointReply | None:
        """The body is read last: an address where nothing is published does not exist, whatever is sent to it."""
        publishing, owner = self.anabranch.publishing, call.params.get("owner") or header(call.scope, b"x-tenant-name")
        owners = self.access.owners(call.caller, await publishing.owners())
        publication = await publishing.find(call.caller, call.params["slug"], owner, owners)
        await call.read()
        request, model = call.request, publication.model
        streaming = model is not None and bool(request.stream)
        context = self.access.context(call, streaming=streaming)
        question = self._search(publication, request) if model is None else _relayed(model, request)
        entry = publication.log_entry(request.transaction_token or None)
        answerer = publishing.answerer(publication)
        run = call.attach(*await self.anabranch.begin(question, context, answerer, entry))
        if streaming:
            chunks = CompletionChunks(publication.slug, context.correlation_id)
            await follow(call, run, chunks.frame, self.anabranch.settings)
            return None
        answer = await whole(run, call.receive)
        if model is not None:
            return EndpointReply(summary=_summary(publication, answer, context), references=None)
        reply = answer.replies[0]
        if reply.status is Status.TIMEOUT:
            raise DeadlineExceeded("The search took too long.")
        if reply.status is not Status.SUCCESS:  # the reason is in the log: it may name our folders
            raise SearchUnavailable("The collection cannot be searched at the moment.")
        metadata = request.include_metadata is not False
        return EndpointReply(summary=None, references=_references(publication, reply, metadata=metadata))

    def _search(self, publication: Publication, request: EndpointQuery) -> Question:
        text = _last_question(_turns(request))
        if len(text) > MAX_QUESTION:
            raise InvalidQuestion(f"The question has {len(text):,} characters; the limit is {MAX_QUESTION:,}.")
        return self.anabranch.questions.published_search(
            text, publication.collection or "", request.limit, request.similarity_threshold
        )


class CompletionChunks:
    """Renders a published model's answer as chunks of an OpenAI chat completion."""

    def __init__(self, model: str, identifier: str) -> None:
        self._head = {"id": identifier, "object": "chat.completion.chunk", "model": model}

    def frame(self, event: AnswerEvent) -> bytes:
        match event:
            case Token():
                return self._chunk({"content": event.text})
            case Answered(answer=answer):
                return self._chunk({}, answer.finish_reason or "stop", usage=answer.usage) + b"data: [DONE]\n\n"
            case Failed():
                return data_frame({"error": {"message": event.message, "code": event.code}}) + b"data: [DONE]\n\n"
            case _:
                return b""

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None, **more: object) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return data_frame({**self._head, "choices": [choice], **more})


def _turns(request: EndpointQuery) -> list[EndpointMessage]:
    return [EndpointMessage(content=request.messages)] if isinstance(request.messages, str) else request.messages


def _relayed(model: Endpoint, request: EndpointQuery) -> Question:
    turns = _turns(request)
    messages = tuple(Message(role=turn.role, content=turn.content) for turn in turns)
    options = Options(max_tokens=request.max_tokens, temperature=request.temperature)
    return relayed(_last_question(turns), model, messages, options)


def _last_question(turns: list[EndpointMessage]) -> str:
    text = next((turn.content for turn in reversed(turns) if turn.role == "user"), "")
    if not text.strip():
        raise InvalidQuestion("messages has no question of the user.")
    return text


def _references(publication: Publication, reply: SourceReply, *, metadata: bool) -> dict[str, Any]:
    partial = {} if reply.error is None else {"warning": reply.error}
    return {
        "documents": [_document(passage, metadata=metadata) for passage in reply.passages],
        "provider_info": {"name": "anabranch", "endpoint": publication.path, **partial},
        "cost": 0.0,
    }


def _document(passage: Passage, *, metadata: bool) -> dict[str, Any]:
    document = {"document_id": passage.document_id, "content": passage.text, "similarity_score": passage.score}
    if not metadata or (place := passage.place) is None:
        return document
    about = {
        **place.metadata,
        "title": passage.title,
        "chunk_id": place.chunk_id,
        "start_char": place.start,
        "end_char": place.end,
        "page_number": place.page,
        "headers": place.headers,
        "url": place.url,
    }
    return {**document, "metadata": about}


def _summary(publication: Publication, answer: Answer, context: Context) -> dict[str, Any]:
    tokens = answer.usage.completion_tokens if answer.usage is not None else None
    return {
        "id": context.correlation_id,
        "model": publication.slug,
        "message": {"role": "assistant", "content": answer.text, "tokens": tokens},
        "finish_reason": answer.finish_reason or "stop",
        "usage": answer.usage,
        "cost": 0.0,
        "provider_info": {"name": "anabranch", "endpoint": publication.path},
    }
