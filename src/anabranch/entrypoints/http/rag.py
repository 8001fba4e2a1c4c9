"""Spec 4's surface: POST /rag/stream, a question to the collections, answered as server-sent events."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Scope

from anabranch.app.questions import Options
from anabranch.app.resumable_answers import Frame
from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.domain.events import Answered, AnswerEvent, Failed, Token
from anabranch.domain.model import MAX_QUERY, RAG, Answer, EvidenceUse, Fallback, MaxTokens, Message, Usage, Value
from anabranch.entrypoints.http.decode_errors import described
from anabranch.entrypoints.http.errors import DESCRIPTIONS, Dialect
from anabranch.entrypoints.http.openapi import parameter
from anabranch.entrypoints.http.operations import Call, EventStream, Operation, header
from anabranch.entrypoints.http.query import (
    citations,
    is_partial,
    search_scope,
    sources,
    statuses,
    wants_fresh,
)
from anabranch.entrypoints.http.query_wire import (
    AnswerSupport,
    CitationView,
    CollectionQuestion,
    ExplanationView,
    FallbackWanted,
    RemovedLinks,
    SourceStatus,
    SourceView,
)
from anabranch.entrypoints.http.streams import AnswerInfo, AnswerSurface, data_frame
from anabranch.entrypoints.verification import VerificationView, verification
from anabranch.pipeline.ground import similarity
from anabranch.text.messages import LANGUAGES, known, language_of, message

MAX_TOP_K = 8
# The key in the scope under which a request's language is kept for its errors.
LANGUAGE = "anabranch.language"
LANGUAGE_TAG = f"^({'|'.join(LANGUAGES)})([-_][A-Za-z0-9]{{1,8}})*$"
Ratio = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]

# The status and the code of spec 4 for each of our codes.
CODES: Mapping[str, tuple[int, str]] = {
    "invalid_request": (400, "validation_error"),
    "validation_error": (400, "validation_error"),
    "unauthorized": (401, "unauthorized"),
    "forbidden": (403, "forbidden"),
    "not_found": (404, "not_found"),
    "conflict": (409, "conflict"),
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
EXPLAINED = ("unauthorized", "forbidden", "not_found", "conflict", "generation_failed")


class RagTurn(Value):
    role: Literal["user", "assistant"]
    content: Annotated[str, Meta(max_length=100_000)]


class RagRequest(CollectionQuestion):
    """A question to the collections that the caller may read. `mmr_lambda` null turns
    diversity off, `threshold` 0 the guardrail."""

    top_k: Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_TOP_K})] | None = None
    threshold: Ratio | None = None
    mmr_lambda: Ratio | UnsetType | None = UNSET
    language: Annotated[str, Meta(max_length=35, extra_json_schema={"pattern": LANGUAGE_TAG})] | None = None
    messages: Annotated[list[RagTurn], Meta(max_length=50, description="Earlier turns, oldest first")] | None = None
    rerank: bool = True
    evidence: EvidenceUse | None = None
    max_tokens: MaxTokens | None = None
    fallback: FallbackWanted | None = None


class RagDone(VerificationView, kw_only=True):
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
    mean_similarity: Annotated[
        float | None, Meta(description="The old name of `guardrail_similarity`", extra_json_schema={"deprecated": True})
    ]
    guardrail_similarity: Annotated[
        float | None,
        Meta(description="Mean of the five best scores, each weighted by itself; compared with `threshold`"),
    ]
    retrieval_ms: int
    latency_ms: int
    support: AnswerSupport | None
    removed_links: RemovedLinks
    fallback: (
        Annotated[
            Fallback, Meta(description="The model that failed, and why; `model` is the one that answered instead")
        ]
        | UnsetType
    ) = UNSET
    source_status: list[SourceStatus] | UnsetType = UNSET
    explanation: ExplanationView | UnsetType = UNSET


class RagProblem(Value):
    """An error: a stable code, a sentence in the caller's language, and details."""

    error_code: str
    message: str
    prompt_version: str
    details: dict[str, str | int] = {}


class RagTokenFrame(Value, kw_only=True):
    type: Literal["token"] = "token"
    data: str


class RagDoneFrame(Value, kw_only=True):
    type: Literal["done"] = "done"
    data: RagDone


class RagErrorFrame(Value, kw_only=True):
    type: Literal["error"] = "error"
    data: RagProblem


@dataclass(frozen=True)
class RagRenderer:
    """Renders the events of one answer, in one language."""

    language: str
    correlation_id: str
    prompt_version: str = RAG.prompt_version
    query_id: str = ""
    # Sources other than collections are asked.
    with_status: bool = False

    def frame(self, event: AnswerEvent) -> bytes:
        match event:
            case Token():
                return data_frame(RagTokenFrame(data=event.text))
            case Answered(answer=answer):
                return data_frame(RagDoneFrame(data=self._done(answer)))
            case Failed():
                return data_frame(RagErrorFrame(data=self.problem(event.code, event.message, event.details)))
            case _:
                return b""

    def problem(self, code: str, text: str, details: Mapping[str, str | int]) -> RagProblem:
        """Messages of `validation_error` are in the caller's language already; others are translated here."""
        _, error_code = CODES.get(code, OTHERWISE)
        seconds = details.get("retry_after_s", "")
        values = {"reason": text, "correlation_id": self.correlation_id, **details, "seconds": seconds}
        reason = _own_words(text.removeprefix("Model generation failed: "))
        return RagProblem(
            error_code=error_code,
            message=text if code == error_code == "validation_error" else message(error_code, self.language, **values),
            prompt_version=self.prompt_version,
            details={**details, "reason": reason} if error_code in EXPLAINED else dict(details),
        )

    def _done(self, answer: Answer) -> RagDone:
        usage = answer.usage or Usage()
        guarded = round(similarity(answer.passages), 4) if answer.passages else None
        return RagDone(
            prompt_version=answer.prompt_version or self.prompt_version,
            sources_count=len(answer.passages),
            total_tokens=usage.total_tokens,
            usage=usage,
            sources=sources(answer),
            citations=citations(answer),
            cached=answer.cached,
            guardrail="no_context" if answer.refused else None,
            guardrail_reason=answer.refusal_reason,
            query_id=self.query_id,
            model=answer.model,
            finish_reason=answer.finish_reason,
            rewritten_query=answer.rewritten,
            mean_similarity=guarded,
            guardrail_similarity=guarded,
            retrieval_ms=answer.timings.retrieval_ms,
            latency_ms=answer.timings.total_ms,
            support=answer.support,
            removed_links=answer.removed_links,
            fallback=_fallback(answer),
            source_status=statuses(answer) if self.with_status or is_partial(answer) else UNSET,
            explanation=answer.explanation or UNSET,
            **verification(answer),
        )


class InvalidRagRequest(InvalidQuestion):
    """An error whose message is in the caller's language."""

    code = "validation_error"


def _language(scope: Scope, requested: str | None = None) -> str:
    return scope.get(LANGUAGE) or language_of(header(scope, b"accept-language"), requested)


def _render(error: AnabranchError, scope: Scope) -> tuple[int, bytes]:
    status, _ = CODES.get(error.code, OTHERWISE)
    renderer = RagRenderer(_language(scope), scope["correlation_id"])
    return status, msgspec.json.encode(RagErrorFrame(data=renderer.problem(error.code, error.message, error.details)))


DIALECT = Dialect(
    render=_render,
    error_type=RagErrorFrame,
    descriptions={**DESCRIPTIONS, 400: f"`validation_error`: {DESCRIPTIONS[422]}"},
    always=(400, 401, 404, 429, 500, 503),
    strict=False,
    explain=described,
    counted_as=lambda error: CODES.get(error.code, OTHERWISE)[1],
)
STREAM = EventStream(
    "RagEvent",
    "Server-sent events without a name, each with one `data:` line of JSON: `token` for each part of the answer, and "
    "at the end exactly one `done` or `error`. Without a passage to answer from, `done` has the `guardrail` "
    "`no_context`. A comment line (`: keep-alive`) may come at any time.",
    (RagTokenFrame, RagDoneFrame, RagErrorFrame),
)


class RagSurface(AnswerSurface):
    """Answers questions from the collections, with a guardrail."""

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                "POST",
                "/rag/stream",
                "rag_stream",
                "Ask the collections, and follow the answer as it comes",
                self._stream,
                DIALECT,
                request_type=RagRequest,
                stream=STREAM,
                resumable=True,
                parameters=(
                    parameter(
                        "Accept-Language",
                        {"type": "string"},
                        "The language of messages, unless `language` is set: en, de, es, fr or zh.",
                        "header",
                    ),
                ),
                errors=(409,),
                scope="ask",
                identify=self.access.caller,
                surface="rag_stream",
                admission=True,
            )
        ]

    async def _stream(self, call: Call[RagRequest]) -> None:
        request, anabranch = call.request, self.anabranch
        call.scope[LANGUAGE] = language = _language(call.scope, request.language)
        _check(request, language)
        search, entry = await search_scope(anabranch, self.access, call, request)
        question = anabranch.questions.rag(
            request.query,
            search,
            tuple(Message(role=turn.role, content=turn.content) for turn in request.messages or ()),
            Options(
                top_k=request.top_k,
                max_tokens=request.max_tokens,
                rerank=request.rerank,
                evidence=request.evidence,
                fresh=wants_fresh(call),
                threshold=request.threshold,
                diversity=request.mmr_lambda,
                fallback=request.fallback,
                explain=request.explain,
                verify=request.verify,
                answer_policy=request.answer_policy or "all",
                language=language,
                answer_in=language if request.language is not None else None,
            ),
        )
        context = self.access.context(call, streaming=True)
        run = call.attach(*await anabranch.begin(question, context, entry=entry))
        renderer = RagRenderer(
            language, context.correlation_id, query_id=entry.query_id, with_status=bool(request.sources)
        )
        about = {"dialect": "rag", "language": language, "prompt_version": RAG.prompt_version}
        await self.streams.send(call, run, renderer.frame, context, **about)


def lost_rag(info: AnswerInfo) -> Frame:
    """Renders the end of an answer whose worker has stopped."""
    return RagRenderer(info.language, info.correlation_id, info.prompt_version).frame


def _check(request: RagRequest, language: str) -> None:
    """The limits of a request, with messages in the caller's language."""
    valid = {
        "language_unknown": request.language is None or known(request.language) is not None,
        "query_empty": bool(request.query.strip()),
        "query_too_long": len(request.query) <= MAX_QUERY,
        "top_k_range": request.top_k is None or 1 <= request.top_k <= MAX_TOP_K,
        "threshold_range": request.threshold is None or 0 <= request.threshold <= 1,
        "mmr_lambda_range": not isinstance(request.mmr_lambda, float) or 0 <= request.mmr_lambda <= 1,
    }
    broken = next((key for key, is_valid in valid.items() if not is_valid), None)
    if broken is not None:
        limit = MAX_TOP_K if broken == "top_k_range" else MAX_QUERY
        raise InvalidRagRequest(message(broken, language, limit=limit, languages=", ".join(LANGUAGES)))


def _own_words(text: str) -> str:
    """The part of a text after a colon may come from the model server."""
    return text.partition(": ")[0]


def _fallback(answer: Answer) -> Fallback | UnsetType:
    why = answer.fallback
    return UNSET if why is None else msgspec.structs.replace(why, message=_own_words(why.message))
