"""Spec 4's surface: POST /rag/stream, a question to the collections, answered as server-sent events."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Scope

from anabranch.app import Anabranch
from anabranch.app.query_log import LogEntry
from anabranch.app.questions import Options
from anabranch.app.resumable_answers import Frame
from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.domain.eventlog import one_line
from anabranch.domain.events import Answered, AnswerEvent, Failed, Token
from anabranch.domain.model import RAG, Answer, Ground, Message, Usage
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.asgi import header, wants_fresh
from anabranch.entrypoints.http.citations import CitationView, SourceStatus, SourceView, citations, sources, statuses
from anabranch.entrypoints.http.errors import DESCRIPTIONS, Dialect
from anabranch.entrypoints.http.knowledge_wire import KnowledgeWire
from anabranch.entrypoints.http.openapi import parameter
from anabranch.entrypoints.http.operations import Call, EventStream, Operation
from anabranch.entrypoints.http.query import QUERY_SCHEMA, FiltersForm, Sources, Text, filters_of, named, scope_of
from anabranch.entrypoints.http.run_stream import AnswerInfo, AnswerStreams
from anabranch.knowledge.records.database import new_id
from anabranch.pipeline.answer import similarity
from anabranch.text.messages import LANGUAGES, known, language_of, message

SURFACE = "rag_stream"
LONGEST = 10_000
MOST = 8
# The key in the scope under which a request's language is kept for its errors.
LANGUAGE = "anabranch.language"
LANGUAGE_TAG = f"^({'|'.join(LANGUAGES)})([-_][A-Za-z0-9]{{1,8}})*$"
Ratio = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]

NO_CONTEXT = "no_context"
ABSTAINED = "abstained"

# The status and the code of spec 4 for each of our codes.
CODES: Mapping[str, tuple[int, str]] = {
    "invalid_request": (400, "validation_error"),
    "validation_error": (400, "validation_error"),
    "unauthorized": (401, "unauthorized"),
    "forbidden": (403, "forbidden"),
    "not_found": (404, "not_found"),
    "request_timeout": (408, "request_timeout"),
    "request_too_large": (413, "request_too_large"),
    "rate_limited": (429, "rate_limited"),
    "retrieval_timeout": (500, "retrieval_timeout"),
    "generation_failed": (502, "generation_failed"),
    "deadline_exceeded": (504, "deadline_exceeded"),
    "overloaded": (503, "overloaded"),
    "shutting_down": (503, "shutting_down"),
    "cancelled": (499, "cancelled"),
    # Only at the end of a stream.
    "worker_lost": (503, "worker_lost"),
    "stream_full": (507, "stream_full"),
}
OTHERWISE = (500, "internal_error")
# Codes with several causes; `details.reason` names the cause, in English.
EXPLAINED = ("unauthorized", "forbidden", "not_found", "generation_failed")


class RagTurn(KnowledgeWire, frozen=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: Annotated[str, Meta(max_length=100_000)]


class RagRequest(KnowledgeWire, frozen=True, kw_only=True):
    """A question to the collections that the caller may read. `mmr_lambda` null turns
    diversity off, `threshold` 0 the guardrail."""

    query: Annotated[str, Meta(extra_json_schema=QUERY_SCHEMA)]
    top_k: Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MOST})] | None = None
    threshold: Ratio | None = None
    mmr_lambda: Ratio | UnsetType | None = UNSET
    collections: Annotated[list[Text], Meta(max_length=100, description="Ids or names; all without any")] | None = None
    sources: Sources | None = None
    language: Annotated[str, Meta(max_length=35, extra_json_schema={"pattern": LANGUAGE_TAG})] | None = None
    filters: FiltersForm | None = None
    messages: Annotated[list[RagTurn], Meta(max_length=50, description="Earlier turns, oldest first")] | None = None
    rerank: bool = True
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RagDone(KnowledgeWire, frozen=True, kw_only=True):
    """The end of an answer. `guardrail` is null for an answer; `no_context` means that no passage supports one, and
    `guardrail_reason` says why."""

    prompt_version: str
    sources_count: int
    total_tokens: int
    usage: Usage
    sources: list[SourceView]
    citations: list[CitationView]
    cached: bool
    guardrail: str | None
    guardrail_reason: str | None
    query_id: str
    model: str | None
    finish_reason: str | None
    rewritten_query: str | None
    mean_similarity: float | None
    retrieval_ms: int
    latency_ms: int
    source_status: list[SourceStatus] | UnsetType = UNSET


class RagProblem(KnowledgeWire, frozen=True, kw_only=True):
    """An error: a stable code, a sentence in the caller's language, and details."""

    error_code: str
    message: str
    prompt_version: str
    details: dict[str, str | int] = {}


class RagTokenFrame(KnowledgeWire, frozen=True, kw_only=True):
    type: Literal["token"] = "token"
    data: str


class RagDoneFrame(KnowledgeWire, frozen=True, kw_only=True):
    type: Literal["done"] = "done"
    data: RagDone


class RagErrorFrame(KnowledgeWire, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    data: RagProblem


encode = msgspec.json.Encoder().encode


class RagForm:
    """Renders the events of one answer, in one language."""

    def __init__(self, *, query_id: str, language: str, prompt_version: str, correlation_id: str) -> None:
        self.query_id = query_id
        self._correlation_id = correlation_id
        self.language = language
        self.elsewhere = False
        self._prompt_version = prompt_version

    def frame(self, event: AnswerEvent) -> bytes:
        match event:
            case Token():
                return _frame(RagTokenFrame(data=event.text))
            case Answered(answer=answer):
                return _frame(RagDoneFrame(data=self._done(answer)))
            case Failed():
                return _frame(RagErrorFrame(data=self.problem(event.code, event.message, event.details)))
            case _:
                return b""

    def problem(self, code: str, said: str, details: Mapping[str, str | int]) -> RagProblem:
        """Messages of `validation_error` are in the caller's language already; others are translated here."""
        _, known = CODES.get(code, OTHERWISE)
        values = {"reason": said, "correlation_id": self._correlation_id, **details}
        values["seconds"] = values.get("retry_after_s", "")
        return RagProblem(
            error_code=known,
            message=said if code == known == "validation_error" else message(known, self.language, **values),
            prompt_version=self._prompt_version,
            details={**details, "reason": _own(said)} if known in EXPLAINED else dict(details),
        )

    def _done(self, answer: Answer) -> RagDone:
        usage = answer.usage or Usage()
        return RagDone(
            prompt_version=answer.prompt_version or self._prompt_version,
            sources_count=len(answer.passages),
            total_tokens=usage.total_tokens,
            usage=usage,
            sources=sources(answer),
            citations=citations(answer),
            cached=answer.cached,
            guardrail=NO_CONTEXT if answer.refused else None,
            guardrail_reason=_reason(answer),
            query_id=self.query_id,
            model=answer.model,
            finish_reason=answer.finish_reason,
            rewritten_query=answer.rewritten,
            mean_similarity=round(similarity(answer.passages), 4) if answer.passages else None,
            retrieval_ms=answer.timings.retrieval_ms,
            latency_ms=answer.timings.total_ms,
            source_status=statuses(answer) if self.elsewhere else UNSET,
        )


class InvalidRagRequest(InvalidQuestion):
    """An error whose message is in the caller's language."""

    code = "validation_error"


def _form(scope: Scope) -> RagForm:
    language = scope.get(LANGUAGE) or language_of(header(scope, b"accept-language"))
    return RagForm(
        query_id=new_id(),
        language=language,
        prompt_version=RAG.prompt_version,
        correlation_id=scope["correlation_id"],
    )


def _render(error: AnabranchError, scope: Scope) -> tuple[int, bytes]:
    status, _ = CODES.get(error.code, OTHERWISE)
    return status, encode(RagErrorFrame(data=_form(scope).problem(error.code, error.message, error.details)))


DIALECT = Dialect(
    render=_render,
    error_type=RagErrorFrame,
    descriptions={**DESCRIPTIONS, 400: f"`validation_error`: {DESCRIPTIONS[422]}"},
    always=(400, 401, 404, 429, 500, 503),
    strict=False,
    invalid="{}",
    counted_as=lambda error: CODES.get(error.code, OTHERWISE)[1],
)
STREAM = EventStream(
    "RagEvent",
    "Server-sent events without a name, each with one `data:` line of JSON: `token` for each part of the answer, and "
    "at the end exactly one `done` or `error`. Without a passage to answer from, `done` has the `guardrail` "
    "`no_context`. A comment line (`: keep-alive`) may come at any time.",
    (RagTokenFrame, RagDoneFrame, RagErrorFrame),
)
ACCEPT_LANGUAGE = "The language of messages, unless `language` is set: en, de, es, fr or zh."


class RagSurface:
    """Answers questions from the collections, with a guardrail."""

    def __init__(self, anabranch: Anabranch, access: Access, streams: AnswerStreams) -> None:
        self._anabranch = anabranch
        self._access = access
        self._streams = streams

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                method="POST",
                path="/rag/stream",
                name="rag_stream",
                summary="Ask the collections, and follow the answer as it comes",
                dialect=DIALECT,
                handler=self._stream,
                takes=RagRequest,
                stream=STREAM,
                resumable=True,
                parameters=(parameter("Accept-Language", {"type": "string"}, ACCEPT_LANGUAGE, "header"),),
                who=self._access.caller,
                surface=SURFACE,
                admission=True,
            )
        ]

    async def _stream(self, call: Call[RagRequest]) -> None:
        asked, scope, anabranch = call.asked, call.scope, self._anabranch
        form = _form(scope)
        if asked.language is not None:
            scope[LANGUAGE] = form.language = _language(asked.language, form.language)
        _check(asked, form.language)
        knowledge = await anabranch.knowledge()
        elsewhere = named(anabranch, self._access.vouched(scope, call.caller), asked.sources)
        filters = filters_of(asked.filters)
        search, keys = await scope_of(knowledge, call.caller, asked.collections, elsewhere, filters)
        form.elsewhere = bool(elsewhere)
        question = anabranch.questions.rag(
            asked.query,
            search,
            tuple(Message(role=turn.role, content=turn.content) for turn in asked.messages or ()),
            Options(
                top_k=asked.top_k,
                max_tokens=asked.max_tokens or None,
                rerank=asked.rerank,
                fresh=wants_fresh(scope),
                threshold=asked.threshold,
                diversity=asked.mmr_lambda,
                language=form.language,
                answer_in=form.language if asked.language is not None else None,
            ),
        )
        context = self._access.context(scope, call.caller, SURFACE)
        entry = LogEntry(query_id=form.query_id, conversation=new_id(), collections=keys)
        run = call.begun(*await anabranch.begin(question, context, entry=entry))
        info = AnswerInfo(
            dialect="rag",
            correlation_id=context.correlation_id,
            language=form.language,
            prompt_version=RAG.prompt_version,
        )
        await self._streams.send(call, run, form.frame, info, context)


def lost_rag(info: AnswerInfo) -> Frame:
    """Renders the end of an answer whose worker has stopped."""
    return RagForm(
        query_id="",
        language=info.language,
        prompt_version=info.prompt_version,
        correlation_id=info.correlation_id,
    ).frame


def _language(tag: str, accepted: str) -> str:
    found = known(tag)
    if found is None:
        raise InvalidRagRequest(message("language_unknown", accepted, languages=", ".join(LANGUAGES)))
    return found


def _check(asked: RagRequest, language: str) -> None:
    """The limits of a request, with messages in the caller's language."""
    if not asked.query.strip():
        raise InvalidRagRequest(message("query_empty", language))
    if len(asked.query) > LONGEST:
        raise InvalidRagRequest(message("query_too_long", language, limit=LONGEST))
    if asked.top_k is not None and not 1 <= asked.top_k <= MOST:
        raise InvalidRagRequest(message("top_k_range", language, limit=MOST))
    if asked.threshold is not None and not 0 <= asked.threshold <= 1:
        raise InvalidRagRequest(message("threshold_range", language))
    if isinstance(asked.mmr_lambda, float) and not 0 <= asked.mmr_lambda <= 1:
        raise InvalidRagRequest(message("mmr_lambda_range", language))


def _own(said: str) -> str:
    """Our own words only: the part after the colon may come from the model server."""
    return said.removeprefix("Model generation failed: ").partition(": ")[0]


def _reason(answer: Answer) -> str | None:
    if not answer.refused:
        return None
    return ABSTAINED if answer.ground is Ground.DOCUMENTS else answer.ground.value


def _frame(content: KnowledgeWire) -> bytes:
    return b"data: " + one_line(encode(content)) + b"\n\n"
