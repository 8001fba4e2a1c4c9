"""Spec 1's surface: POST /api/v1/chat and POST /api/v1/chat/stream."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from anabranch.app.endpoint_resolver import EXTRACTIVE, collection_endpoint
from anabranch.app.questions import Options
from anabranch.domain.errors import InvalidQuestion
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
from anabranch.domain.model import (
    COLLECTION_ADDRESS,
    Answer,
    Context,
    Endpoint,
    EvidenceUse,
    Fallback,
    MaxTokens,
    Message,
    Passage,
    Question,
    Status,
    Temperature,
    Usage,
    Value,
)
from anabranch.domain.rights import NO_GRANT, Grants
from anabranch.entrypoints.http.access import may_name
from anabranch.entrypoints.http.errors import DESCRIPTIONS, Dialect, ErrorBody, render_plain
from anabranch.entrypoints.http.operations import Call, EventStream, Operation, Reply
from anabranch.entrypoints.http.query_wire import AnswerSupport, FallbackWanted, RemovedLinks
from anabranch.entrypoints.http.streams import AnswerSurface, event_frame, whole
from anabranch.entrypoints.verification import VerificationView, VerifiedRequest, verification
from anabranch.pipeline.run import Run

WireStatus = Literal[
    "success", "error", "timeout", "payment_failed", "access_denied", "policy_violation", "rate_limited"
]

# Of each list in a request. Fewer data sources are allowed (AGGREGATOR_MAX_DATA_SOURCES).
MAX_ITEMS = 1_000


class EndpointRef(Value, gc=False):
    """The address of a data source or a model, and its owner."""

    url: Annotated[
        str, Meta(description="Base URL of the SyftAI-Space; empty for an endpoint that the operator configured")
    ] = ""
    slug: Annotated[str, Meta(description="The endpoint's slug; for an OpenAI-compatible server the model's name")] = ""
    name: Annotated[str, Meta(description="A name to show")] | None = ""
    tenant_name: Annotated[str, Meta(description="Sent as X-Tenant-Name")] | None = None
    owner_username: Annotated[str, Meta(description="The owner whose tokens are sent")] | None = None
    query_override: Annotated[str, Meta(description="Sent to this source instead of the prompt")] | None = None
    kind: Annotated[Literal["space", "openai"], Meta(description="The protocol of the endpoint")] = "space"


class ChatRequest(VerifiedRequest, kw_only=True):
    """A question to data sources, and the model that answers it."""

    prompt: Annotated[str, Meta(min_length=1, description="The question", extra_json_schema={"pattern": r"\S"})]
    model: (
        Annotated[
            EndpointRef,
            Meta(
                description="Without one, or with the slug `extractive`, the answer quotes sentences of the documents",
                examples=[{"slug": "extractive"}],
            ),
        ]
        | None
    ) = None
    data_sources: (
        Annotated[list[Annotated[EndpointRef, Meta(examples=[{"slug": "handbook"}])]], Meta(max_length=MAX_ITEMS)]
        | None
    ) = None
    endpoint_tokens: (
        Annotated[dict[str, str], Meta(max_length=MAX_ITEMS, description="Satellite tokens by owner")] | None
    ) = None
    transaction_tokens: (
        Annotated[dict[str, str], Meta(max_length=MAX_ITEMS, description="Transaction tokens by owner")] | None
    ) = None
    top_k: Annotated[int, Meta(ge=1, description="Documents per source")] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    similarity_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    messages: Annotated[list[Message], Meta(max_length=MAX_ITEMS, description="Earlier turns")] | None = None
    retrieval_only: Annotated[bool, Meta(description="Documents only, no answer")] | None = None
    custom_system_prompt: str | None = None
    evidence: EvidenceUse | None = None
    fallback: FallbackWanted | None = None
    defence: (
        Annotated[
            bool,
            Meta(
                description="Protect against prompt injection: random boundaries around documents in the prompt; links "
                "that occur in no document become text, and HTML is escaped"
            ),
        ]
        | None
    ) = None


class DocumentSource(Value, gc=False, omit_defaults=True):
    """`owner` is that of the collection, if a user owns it. `suspected_instructions` are sentences that look like
    instructions to a model; only with `defence` in the request, and of documents in the prompt."""

    slug: str
    content: str
    owner: str | None = None
    suspected_instructions: tuple[str, ...] = ()


class SourceInfo(Value, gc=False):
    path: str
    documents_retrieved: int
    status: WireStatus
    error_message: str | None


class Metadata(Value, gc=False, omit_defaults=True):
    retrieval_time_ms: int
    generation_time_ms: int
    total_time_ms: int
    documents_omitted: Annotated[int, Meta(description="Documents that did not fit into the model's context")] = 0
    finish_reason: Annotated[str, Meta(description="Why the model stopped, if not at its end: `length`, …")] | None = (
        None
    )
    fallback: (
        Annotated[Fallback, Meta(description="The model that failed, and why; the answer quotes the documents instead")]
        | None
    ) = None
    support: AnswerSupport | None = None
    removed_links: RemovedLinks = ()


class Done(VerificationView, kw_only=True):
    """The end of a stream: everything but the text."""

    sources: dict[str, DocumentSource]
    retrieval_info: list[SourceInfo]
    metadata: Metadata
    usage: Usage | None


class ChatResponse(Done, kw_only=True):
    """The whole answer."""

    response: str


class RetrievalStart(Value):
    sources: int


class SourceComplete(Value):
    path: str
    status: WireStatus
    documents: int


class RetrievalComplete(Value):
    total_documents: int
    time_ms: int


class GenerationStart(Value):
    pass


class TokenData(Value):
    content: str


class StreamError(Value):
    message: str
    error: str
    details: dict[str, str | int]


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


DIALECT = Dialect(
    render=render_plain,
    error_type=ErrorBody,
    descriptions=DESCRIPTIONS,
    always=(401, 422, 429, 500, 503),
    strict=False,
)
STREAM = EventStream(
    "ChatEvent",
    "Server-sent events, in this order: `retrieval_start`; a `source_complete` for each source as it completes; "
    "`retrieval_complete`; `generation_start`; `token` for each part of the answer; and at the end exactly one `done` "
    "or `error`. Each event has one `data:` line of JSON, of the type under its name here. A comment line "
    "(`: keep-alive`) may come at any time.",
    {
        "retrieval_start": RetrievalStart,
        "source_complete": SourceComplete,
        "retrieval_complete": RetrievalComplete,
        "generation_start": GenerationStart,
        "token": TokenData,
        "done": Done,
        "error": StreamError,
    },
)


class ChatSurface(AnswerSurface):
    """Two ways to ask: the whole answer as JSON, or its events. One Run behind each."""

    def operations(self) -> list[Operation[Any]]:
        at = partial(
            Operation[Any],
            dialect=DIALECT,
            request_type=ChatRequest,
            identify=self.access.admit,
            surface="chat",
            scope="ask",
            admission=True,
        )
        return [
            at(
                *("POST", "/api/v1/chat", "chat", "Ask, and get the whole answer", self._complete),
                response_types=(ChatResponse,),
                errors=(502, 504),
            ),
            # By the time a model fails, a stream has begun: it says so in an event.
            at(
                *("POST", "/api/v1/chat/stream", "chat_stream", "Ask, and follow the answer as it comes", self._stream),
                stream=STREAM,
                resumable=True,
            ),
        ]

    async def _complete(self, call: Call[ChatRequest]) -> Reply:
        run, _ = await self._begin(call, streaming=False)
        return Reply(response(await whole(run, call.receive)))

    async def _stream(self, call: Call[ChatRequest]) -> None:
        run, context = await self._begin(call, streaming=True)
        await self.streams.send(call, run, frame, context, dialect="chat")

    async def _begin(self, call: Call[ChatRequest], *, streaming: bool) -> tuple[Run, Context]:
        request, references = call.request, call.request.data_sources or []
        named = any(reference is not None and not reference.url for reference in (request.model, *references))
        tokens, transactions = request.endpoint_tokens, request.transaction_tokens
        context = self.access.context(
            call, tokens=tokens, transactions=transactions, streaming=streaming, names_configured=named
        )
        grants = self.access.grants(call.scope, call.caller) if named else NO_GRANT
        return call.attach(*await self.anabranch.begin(self._question(call, references, grants), context)), context

    def _question(self, call: Call[ChatRequest], references: Sequence[EndpointRef], grants: Grants) -> Question:
        request = call.request
        public_only = self.access.public_only(call.scope, call.caller)
        may = may_name(call.caller, grants)
        known = self.anabranch.questions.known_sources(grants) if may else {}
        if may or call.caller.user is not None:
            asked = {one.slug for one in references if one.slug.startswith(COLLECTION_ADDRESS)}
            known = {**{name: collection_endpoint(name) for name in asked}, **known}
        return self.anabranch.questions.chat(
            request.prompt,
            tuple(_endpoint(one, known, public_only) for one in references),
            None if request.retrieval_only else self._model(request.model, grants, public_only),
            tuple(request.messages or ()),
            Options(
                top_k=request.top_k,
                similarity_threshold=request.similarity_threshold,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                system_prompt=request.custom_system_prompt or None,
                evidence=request.evidence,
                fallback=request.fallback,
                defence=bool(request.defence),
                verify=request.verify,
                answer_policy=request.answer_policy or "all",
            ),
        )

    def _model(self, reference: EndpointRef | None, grants: Grants, public_only: bool) -> Endpoint:
        """The model by URL or by name; none, or an empty one, stands for the sentences of the documents."""
        if reference is None or not (reference.url or reference.slug):
            return EXTRACTIVE
        if not reference.url:
            otherwise = ", or send a url and a slug"
            return self.anabranch.questions.named_model(reference.slug, grants, otherwise=otherwise)
        if not reference.slug:
            raise InvalidQuestion("model has a url but no slug: send both, or no model to get quoted sentences.")
        return _endpoint(reference, {}, public_only)


def _endpoint(reference: EndpointRef, named: Mapping[str, Endpoint], public_only: bool) -> Endpoint:
    """The endpoint that a request names: by URL, or, for a caller who may, by its name in the configuration or the
    address of a collection."""
    if not reference.url and reference.slug in named:
        return named[reference.slug]
    return Endpoint(
        slug=reference.slug,
        url=reference.url,
        name=reference.name or "",
        owner=reference.owner_username or None,
        tenant=reference.tenant_name or None,
        kind=reference.kind,
        query=reference.query_override or None,
        public_only=public_only,
    )


def response(answer: Answer) -> bytes:
    return msgspec.json.encode(ChatResponse(response=answer.text, **msgspec.structs.asdict(_done(answer))))


def frame(event: AnswerEvent) -> bytes:
    """One event as SSE."""
    match event:
        case Token():
            return event_frame(b"token", TokenData(content=event.text))
        case RetrievalStarted():
            return event_frame(b"retrieval_start", RetrievalStart(sources=len(event.sources)))
        case SourceReplied(reply=reply):
            status, documents = STATUSES[reply.status], len(reply.passages)
            return event_frame(b"source_complete", SourceComplete(path=reply.path, status=status, documents=documents))
        case RetrievalFinished():
            return event_frame(
                b"retrieval_complete", RetrievalComplete(total_documents=event.passages, time_ms=event.time_ms)
            )
        case GenerationStarted():
            return event_frame(b"generation_start", GenerationStart())
        case Answered(answer=answer):
            return event_frame(b"done", _done(answer))
        case Failed():
            return event_frame(b"error", StreamError(message=event.message, error=event.code, details=event.details))
        case _:
            return b""  # spec 1 has no event for a fallback or a checked sentence; `done` says it


def _sources(answer: Answer) -> dict[str, DocumentSource]:
    """Every document as its source returned it; a second one with the same title is `Title (2)`."""
    sources: dict[str, DocumentSource] = {}
    copies: dict[str, int] = {}
    for reply in answer.replies:
        for passage in reply.passages:
            title = passage.title
            while title in sources:
                copies[passage.title] = count = copies.get(passage.title, 1) + 1
                title = f"{passage.title} ({count})"
            owner = passage.place.owner if passage.place is not None else None
            sources[title] = DocumentSource(slug=passage.source, content=passage.text, owner=owner)
    suspects = [passage for passage in answer.passages if passage.suspected_instructions]
    return _marked(sources, suspects) if suspects else sources


def _marked(sources: dict[str, DocumentSource], suspects: Sequence[Passage]) -> dict[str, DocumentSource]:
    orders = {(one.source, one.text): one.suspected_instructions for one in suspects}
    return {
        title: msgspec.structs.replace(one, suspected_instructions=orders.get((one.slug, one.content), ()))
        for title, one in sources.items()
    }


def _done(answer: Answer) -> Done:
    return Done(
        sources=_sources(answer),
        retrieval_info=[
            SourceInfo(
                path=reply.path,
                documents_retrieved=len(reply.passages),
                status=STATUSES[reply.status],
                error_message=reply.error,
            )
            for reply in answer.replies
        ],
        metadata=Metadata(
            retrieval_time_ms=answer.timings.retrieval_ms,
            generation_time_ms=answer.timings.generation_ms,
            total_time_ms=answer.timings.total_ms,
            documents_omitted=answer.omitted,
            finish_reason=None if answer.finish_reason == "stop" else answer.finish_reason,
            fallback=answer.fallback,
            support=answer.support,
            removed_links=answer.removed_links,
        ),
        usage=answer.usage,
        **verification(answer),
    )
