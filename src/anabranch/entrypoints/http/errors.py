"""Errors on the wire: the status table, the error dialects, and the headers of a refusal."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from operator import attrgetter
from typing import Any

import msgspec
from starlette.types import Scope

from anabranch.domain.errors import (
    AnabranchError,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    EmbeddingFailed,
    Forbidden,
    GenerationFailed,
    GenerationTimedOut,
    HubFailed,
    IndexFailed,
    InvalidQuestion,
    LeaseLost,
    LimitReached,
    NotFound,
    Overloaded,
    RateLimited,
    RetrievalTimedOut,
    ShuttingDown,
    StreamFull,
    StreamsFull,
    StreamUnavailable,
    Unauthorized,
)
from anabranch.domain.model import Allowance, Value
from anabranch.entrypoints.http import decode_errors
from anabranch.knowledge.records.database import StoreFailed
from anabranch.policies.rate_limits import RateLimitExceeded

Headers = Iterable[tuple[bytes, bytes]]

# Response headers that a web page of another origin may read.
EXPOSED = [
    "Retry-After",
    "RateLimit-Limit",
    "RateLimit-Remaining",
    "RateLimit-Reset",
    "Stream-Id",
    "Preference-Applied",
]
RETRY_AFTER_S = 5
# The log is available again as soon as Redis is, or as another worker has taken the stream over.
STREAM_RETRY_AFTER_S = 1


class RequestTooLarge(AnabranchError):
    code = "request_too_large"


class RequestTimedOut(AnabranchError):
    code = "request_timeout"


class ClientGone(Exception):
    """The client disconnected before its request was complete: no response is sent."""


class SearchUnavailable(AnabranchError):
    """The collections could not be searched: the embedding model is not installed, or the store is unreachable."""

    code = "service_unavailable"


class RoutingError(AnabranchError):
    """A request that no operation takes, and the headers that say what to send instead."""

    def __init__(self, message: str, **headers: str) -> None:
        super().__init__(message)
        self.headers = headers


class InvalidField(InvalidQuestion):
    """`field` is the path of the value that is not valid, such as `messages[0].role`."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class MethodNotAllowed(RoutingError):
    code = "method_not_allowed"


class UpgradeRequired(RoutingError):
    code = "http_error"


STATUSES: dict[type[AnabranchError], int] = {
    InvalidQuestion: 422,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    MethodNotAllowed: 405,
    RequestTimedOut: 408,
    Conflict: 409,
    LeaseLost: 409,
    RequestTooLarge: 413,
    StreamFull: 413,
    UpgradeRequired: 426,
    RateLimited: 429,
    Cancelled: 499,
    GenerationFailed: 502,
    HubFailed: 502,
    Overloaded: 503,
    ShuttingDown: 503,
    EmbeddingFailed: 503,
    IndexFailed: 503,
    StoreFailed: 503,
    SearchUnavailable: 503,
    StreamUnavailable: 503,
    StreamsFull: 503,
    RetrievalTimedOut: 504,
    GenerationTimedOut: 504,
    DeadlineExceeded: 504,
}


class ErrorBody(Value):
    """An error: a stable code, a sentence (twice: some clients read `detail`), and details."""

    error: str
    message: str
    detail: str
    details: dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one surface reads requests and renders errors; `descriptions` and `always` are for OpenAPI."""

    render: Callable[[AnabranchError, Scope], tuple[int, bytes]]
    error_type: type[msgspec.Struct]
    descriptions: Mapping[int, str]
    always: tuple[int, ...]
    # Lenient surfaces read "5" and 5.0 as 5.
    strict: bool = True
    # The message for a request that does not decode: of the error, and the type that was expected.
    explain: Callable[[str, Any], str] = decode_errors.explain
    # HEAD goes with every GET, unless the surface has only long streams.
    head: bool = True
    # The code that a refused request is counted under in the metrics.
    counted_as: Callable[[AnabranchError], str] = attrgetter("code")
    # Whether a blank line follows each comment of a stream with ids. Clients that keep the last id, as openai's in
    # Python, take every blank line for an event.
    separate_comments: bool = True
    # Where the paths begin at which it also renders that there is nothing.
    prefixes: tuple[str, ...] = ()
    path_schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string", "minLength": 1})


class NoSuchAddress(NotFound):
    """No operation has the path of the request."""

    def __init__(self) -> None:
        super().__init__("There is nothing at this address.")


def status_of(error: AnabranchError) -> int:
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), 500)


def render_plain(error: AnabranchError, _scope: Scope) -> tuple[int, bytes]:
    body = ErrorBody(error=error.code, message=error.message, detail=error.message, details=error.details)
    return status_of(error), msgspec.json.encode(body)


DESCRIPTIONS: dict[int, str] = {
    401: "The API key is missing, unknown, revoked or expired.",
    403: "The caller may read this, but not change it, or its API key lacks a scope, which `details` names.",
    404: "It does not exist, or not for this caller.",
    408: "The request took too long to arrive.",
    409: "The name or id is already in use.",
    413: "The request is too large.",
    422: "The request is invalid or over a limit; the message says which.",
    426: "Open this address as a WebSocket.",
    429: "Rate limit exceeded; `Retry-After` says when to retry.",
    500: "Internal error.",
    502: "The model failed; `details` has `model_path` and `latency_ms`.",
    503: "The server is shutting down or overloaded, or a dependency is unreachable; `Retry-After` says when to retry.",
    504: "The model, or the whole question, timed out.",
}
PLAIN = Dialect(render=render_plain, error_type=ErrorBody, descriptions=DESCRIPTIONS, always=(500,))


class KnowledgeError(Value):
    """An error: a stable code (in lower and upper case), a sentence that says what to do, and details."""

    error: str
    code: str
    message: str
    details: dict[str, str | int]


KNOWLEDGE_CODES: Mapping[str, tuple[int, str]] = {
    "invalid_query": (400, "INVALID_QUERY"),
    "invalid_request": (400, "VALIDATION_ERROR"),
    "unauthorized": (401, "UNAUTHORIZED"),
    "forbidden": (403, "FORBIDDEN"),
    "not_found": (404, "NOT_FOUND"),
    "method_not_allowed": (405, "METHOD_NOT_ALLOWED"),
    "request_timeout": (408, "REQUEST_TIMEOUT"),
    "conflict": (409, "CONFLICT"),
    "request_too_large": (413, "REQUEST_TOO_LARGE"),
    "unprocessable": (422, "UNPROCESSABLE"),
    "rate_limited": (429, "RATE_LIMITED"),
    "cancelled": (499, "CANCELLED"),
    "internal_error": (500, "INTERNAL_ERROR"),
}
# Every other error is a failed dependency: a model, the store, the hub, or no time left.
UNAVAILABLE = (503, "SERVICE_UNAVAILABLE")


def knowledge_error(code: str, message: str, details: Mapping[str, str | int]) -> KnowledgeError:
    """`details.cause` disambiguates errors that share a code of spec 5. A 400 has its sentence in `details.text` too:
    in spec 5, `details` is that text; it stays an object for the clients that read its fields."""
    status, name = KNOWLEDGE_CODES.get(code, UNAVAILABLE)
    more = dict(details) if code in KNOWLEDGE_CODES or code == name.lower() else {"cause": code, **details}
    if status == 400:
        more.setdefault("text", message)
    return KnowledgeError(error=name.lower(), code=name, message=message, details=more)


def _render_knowledge(error: AnabranchError, _scope: Scope) -> tuple[int, bytes]:
    status, _ = KNOWLEDGE_CODES.get(error.code, UNAVAILABLE)
    return status, msgspec.json.encode(knowledge_error(error.code, error.message, error.details))


def _with_codes(status: int, description: str) -> str:
    codes = [f"`{code}`" for known, code in (*KNOWLEDGE_CODES.values(), UNAVAILABLE) if known == status]
    return f"{', '.join(codes)}: {description}"


CONFLICT = "The name is in use, several collections or documents have it, or the document's status does not allow this."
KNOWLEDGE = Dialect(
    render=_render_knowledge,
    error_type=KnowledgeError,
    descriptions={
        status: _with_codes(status, description)
        for status, description in {**DESCRIPTIONS, 400: DESCRIPTIONS[422], 409: CONFLICT}.items()
    },
    always=(400, 401, 404, 500, 503),
)


def refusal_headers(error: AnabranchError, status: int) -> list[tuple[bytes, bytes]]:
    """What goes with an error on every surface: how to authenticate, when to retry, and whether the connection ends."""
    sent = error.headers if isinstance(error, RoutingError) else {}
    headers = [(name.encode(), value.encode()) for name, value in sent.items()]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, RequestTimedOut | RequestTooLarge):
        headers.append((b"connection", b"close"))  # the rest of the request is not read
    if status in (429, 503):
        usual = STREAM_RETRY_AFTER_S if isinstance(error, StreamUnavailable) else RETRY_AFTER_S
        headers.append((b"retry-after", str(error.details.get("retry_after_s", usual)).encode()))
        headers.extend(rate_headers(_allowance(error)))
    return headers


def refused_connection(error: AnabranchError) -> bytes:
    """The whole response to a connection that may not stay, before its request."""
    status, body = render_plain(error, {})
    headers = [*refusal_headers(error, status), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()), b"content-type: application/json"]
    return b"\r\n".join([*lines, *(b"%b: %b" % pair for pair in headers), b"", body])


def _allowance(error: AnabranchError) -> Allowance | None:
    match error:
        case RateLimitExceeded():
            return error.allowance
        case LimitReached():
            return Allowance(
                limit=int(error.details["allowed"]), remaining=0, reset_s=float(error.details["retry_after_s"])
            )
    return None


def rate_headers(allowance: Allowance | None) -> Headers:
    """What the caller may still ask."""
    if allowance is None:
        return ()
    return [
        (b"ratelimit-limit", str(allowance.limit).encode()),
        (b"ratelimit-remaining", str(allowance.remaining).encode()),
        (b"ratelimit-reset", str(math.ceil(allowance.reset_s)).encode()),
    ]
