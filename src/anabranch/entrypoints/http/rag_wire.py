"""What POST /rag/stream takes and sends, as spec 4 has it."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from anabranch.domain.errors import AnabranchError
from anabranch.domain.events import Answered, AnswerEvent, Failed, Token
from anabranch.domain.messages import message
from anabranch.domain.model import Answer, Ground, Usage
from anabranch.domain.streams import one_line
from anabranch.entrypoints.http.evidence import CitationView, SourceStatus, SourceView, citations, sources, statuses
from anabranch.entrypoints.http.knowledge_wire import Wire
from anabranch.entrypoints.http.query_wire import FiltersForm, Sources, Text
from anabranch.pipeline.guard import similarity

NO_CONTEXT = "no_context"
ABSTAINED = "abstained"

# What a client is told of our errors: its status, and the code that it knows.
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
    # Only ever at the end of a stream.
    "worker_lost": (503, "worker_lost"),
    "stream_full": (507, "stream_full"),
}
OTHERWISE = (500, "internal_error")
# Of these there are several kinds; `details.reason` says which, in English.
EXPLAINED = ("unauthorized", "forbidden", "not_found", "generation_failed")


class RagTurn(Wire, frozen=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: Annotated[str, Meta(max_length=100_000)]


class RagRequest(Wire, frozen=True, kw_only=True):
    """A question to the collections that the caller may read. `mmr_lambda` null does without variety, `threshold` 0
    without the guardrail."""

    query: str
    top_k: int | None = None
    threshold: float | None = None
    mmr_lambda: float | UnsetType | None = UNSET
    collections: Annotated[list[Text], Meta(max_length=100, description="Ids or names; all without any")] | None = None
    sources: Sources | None = None
    language: Annotated[str, Meta(max_length=35)] | None = None
    filters: FiltersForm | None = None
    messages: Annotated[list[RagTurn], Meta(max_length=50, description="Earlier turns, oldest first")] | None = None
    rerank: bool = True
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RagDone(Wire, frozen=True, kw_only=True):
    """The end, well. `guardrail` is null for an answer; `no_context` says that there was nothing to answer from, and
    `guardrail_reason` why."""

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


class RagProblem(Wire, frozen=True, kw_only=True):
    """What went wrong: a stable code, a sentence in the caller's language, and more where there is more."""

    error_code: str
    message: str
    prompt_version: str
    details: dict[str, str | int] = {}


class RagTokenFrame(Wire, frozen=True, kw_only=True):
    type: Literal["token"] = "token"
    data: str


class RagDoneFrame(Wire, frozen=True, kw_only=True):
    type: Literal["done"] = "done"
    data: RagDone


class RagErrorFrame(Wire, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    data: RagProblem


encode = msgspec.json.Encoder().encode


class Form:
    """How one question's answer is written, event by event, in one language."""

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
        """What was found wrong with a request is in the caller's language already; the rest is translated here."""
        _, known = CODES.get(code, OTHERWISE)
        values = {"reason": said, "correlation_id": self._correlation_id, **details}
        values["seconds"] = values.get("retry_after_s", "")
        return RagProblem(
            error_code=known,
            message=said if code == known == "validation_error" else message(known, self.language, **values),
            prompt_version=self._prompt_version,
            details={**details, "reason": _own(said)} if known in EXPLAINED else dict(details),
        )

    def refusal(self, error: AnabranchError) -> tuple[int, bytes]:
        """An error before the stream begins: its status, and what a frame would have said."""
        status, _ = CODES.get(error.code, OTHERWISE)
        return status, encode(RagErrorFrame(data=self.problem(error.code, error.message, error.details)))

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


def _own(said: str) -> str:
    """Our own words only: what stands behind the colon may be the model server's."""
    return said.removeprefix("Model generation failed: ").partition(": ")[0]


def _reason(answer: Answer) -> str | None:
    if not answer.refused:
        return None
    return ABSTAINED if answer.ground is Ground.DOCUMENTS else answer.ground.value


def _frame(content: Wire) -> bytes:
    return b"data: " + one_line(encode(content)) + b"\n\n"
