"""What the chat surface takes and sends, as spec 1 and today's clients have it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from anabranch.domain.eventlog import one_line
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    GenerationStarted,
    RetrievalFinished,
    RetrievalStarted,
    SourceReplied,
    Token,
)
from anabranch.domain.model import Answer, Message, SourceReply, Status, Usage

WireStatus = Literal[
    "success", "error", "timeout", "payment_failed", "access_denied", "policy_violation", "rate_limited"
]


class ChatWire(msgspec.Struct, frozen=True, kw_only=True):
    """A form on the wire; fields that it does not know are passed over."""


class EndpointRef(ChatWire, frozen=True, kw_only=True):
    """Where a data source or a model is reached, and whose it is."""

    url: Annotated[
        str, Meta(description="Base URL of the SyftAI-Space; empty for an endpoint that the operator named")
    ] = ""
    slug: Annotated[str, Meta(description="The endpoint's slug; for an OpenAI-compatible server the model's name")] = ""
    name: Annotated[str, Meta(description="A name to show")] | None = ""
    tenant_name: Annotated[str, Meta(description="Sent as X-Tenant-Name")] | None = None
    owner_username: Annotated[str, Meta(description="Whose tokens go along")] | None = None
    query_override: Annotated[str, Meta(description="Ask this source something else than the prompt")] | None = None
    kind: Annotated[Literal["space", "openai"], Meta(description="Which protocol it speaks")] = "space"


class ChatTurn(ChatWire, frozen=True, kw_only=True):
    """An earlier message of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(ChatWire, frozen=True, kw_only=True):
    """One question to many data sources, and the model that is to answer it."""

    prompt: Annotated[str, Meta(min_length=1, description="The question")]
    model: EndpointRef | None = None
    data_sources: list[EndpointRef] | None = None
    endpoint_tokens: Annotated[dict[str, str], Meta(description="Satellite tokens by owner")] | None = None
    transaction_tokens: Annotated[dict[str, str], Meta(description="Transaction tokens by owner")] | None = None
    top_k: Annotated[int, Meta(ge=1, description="Documents per source")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    similarity_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    messages: Annotated[list[ChatTurn], Meta(description="Earlier turns")] | None = None
    retrieval_only: Annotated[bool, Meta(description="Documents only, no answer")] | None = None
    custom_system_prompt: str | None = None


class DocumentSource(ChatWire, frozen=True, kw_only=True, gc=False):
    slug: str
    content: str


class SourceInfo(ChatWire, frozen=True, kw_only=True, gc=False):
    path: str
    documents_retrieved: int
    status: WireStatus
    error_message: str | None


class Metadata(ChatWire, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    retrieval_time_ms: int
    generation_time_ms: int
    total_time_ms: int
    documents_omitted: Annotated[int, Meta(description="Documents that had no room in the model's context")] = 0
    finish_reason: (
        Annotated[str, Meta(description="Why the model ended, where it was not done: `length`, …")] | None
    ) = None


class Done(ChatWire, frozen=True, kw_only=True):
    """The end of a stream: everything but the text."""

    sources: dict[str, DocumentSource]
    retrieval_info: list[SourceInfo]
    metadata: Metadata
    usage: Usage | None


class ChatResponse(ChatWire, frozen=True, kw_only=True):
    """The whole answer."""

    response: str
    sources: dict[str, DocumentSource]
    retrieval_info: list[SourceInfo]
    metadata: Metadata
    usage: Usage | None


class RetrievalStart(ChatWire, frozen=True, kw_only=True):
    sources: int


class SourceComplete(ChatWire, frozen=True, kw_only=True):
    path: str
    status: WireStatus
    documents: int


class RetrievalComplete(ChatWire, frozen=True, kw_only=True):
    total_documents: int
    time_ms: int


class GenerationStart(ChatWire, frozen=True, kw_only=True):
    pass


class TokenData(ChatWire, frozen=True, kw_only=True):
    content: str


class StreamError(ChatWire, frozen=True, kw_only=True):
    message: str
    error: str
    details: dict[str, str | int]


EVENTS: dict[str, type[ChatWire]] = {
    "retrieval_start": RetrievalStart,
    "source_complete": SourceComplete,
    "retrieval_complete": RetrievalComplete,
    "generation_start": GenerationStart,
    "token": TokenData,
    "done": Done,
    "error": StreamError,
}

STATUSES: dict[Status, WireStatus] = {
    Status.SUCCESS: "success",
    Status.ERROR: "error",
    Status.TIMEOUT: "timeout",
    Status.PAYMENT_FAILED: "payment_failed",
    Status.ACCESS_DENIED: "access_denied",
    Status.POLICY_VIOLATION: "policy_violation",
    Status.RATE_LIMITED: "rate_limited",
    Status.SKIPPED: "error",
}

encode = msgspec.json.Encoder().encode


def response(answer: Answer) -> bytes:
    end = _done(answer)
    return encode(
        ChatResponse(
            response=answer.text,
            sources=end.sources,
            retrieval_info=end.retrieval_info,
            metadata=end.metadata,
            usage=end.usage,
        )
    )


def frame(event: AnswerEvent) -> bytes:
    """One event as SSE."""
    match event:
        case Token():
            return _frame(b"token", TokenData(content=event.text))
        case RetrievalStarted():
            return _frame(b"retrieval_start", RetrievalStart(sources=len(event.sources)))
        case SourceReplied(reply=reply):
            complete = SourceComplete(path=reply.path, status=_status(reply), documents=len(reply.passages))
            return _frame(b"source_complete", complete)
        case RetrievalFinished():
            complete_all = RetrievalComplete(total_documents=event.passages, time_ms=event.time_ms)
            return _frame(b"retrieval_complete", complete_all)
        case GenerationStarted():
            return _frame(b"generation_start", GenerationStart())
        case Answered(answer=answer):
            return _frame(b"done", _done(answer))
        case Failed():
            return _frame(b"error", StreamError(message=event.message, error=event.code, details=event.details))


def history(turns: list[ChatTurn] | None) -> tuple[Message, ...]:
    return tuple(Message(role=turn.role, content=turn.content) for turn in turns or ())


def _frame(name: bytes, data: ChatWire) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, one_line(encode(data)))


def _sources(replies: tuple[SourceReply, ...]) -> dict[str, DocumentSource]:
    """Every document as its source returned it; a second one with the same title is `Title (2)`."""
    sources: dict[str, DocumentSource] = {}
    taken: dict[str, int] = {}
    for reply in replies:
        for passage in reply.passages:
            title, count = passage.title, taken.get(passage.title, 1)
            while title in sources:
                count += 1
                title = f"{passage.title} ({count})"
            taken[passage.title] = count
            sources[title] = DocumentSource(slug=passage.source, content=passage.text)
    return sources


def _info(reply: SourceReply) -> SourceInfo:
    return SourceInfo(
        path=reply.path, documents_retrieved=len(reply.passages), status=_status(reply), error_message=reply.error
    )


def _status(reply: SourceReply) -> WireStatus:
    return STATUSES[reply.status]


def _done(answer: Answer) -> Done:
    return Done(
        sources=_sources(answer.replies),
        retrieval_info=[_info(reply) for reply in answer.replies],
        metadata=Metadata(
            retrieval_time_ms=answer.timings.retrieval_ms,
            generation_time_ms=answer.timings.generation_ms,
            total_time_ms=answer.timings.total_ms,
            documents_omitted=answer.omitted,
            finish_reason=None if answer.finish_reason == "stop" else answer.finish_reason,
        ),
        usage=answer.usage,
    )
