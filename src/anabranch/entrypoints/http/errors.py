"""The one table from errors to HTTP, and the form in which they are sent."""

import msgspec
from starlette.types import Send

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
    InvalidQuestion,
    LeaseLost,
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
from anabranch.entrypoints.http import rate_headers
from anabranch.entrypoints.http.asgi import Headers, send_json
from anabranch.entrypoints.http.knowledge_errors import RequestTimedOut, RequestTooLarge
from anabranch.knowledge.records.database import StoreFailed

STATUSES: dict[type[AnabranchError], int] = {
    InvalidQuestion: 422,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    Conflict: 409,
    RateLimited: 429,
    Overloaded: 503,
    RetrievalTimedOut: 504,
    Cancelled: 499,
    GenerationTimedOut: 504,
    GenerationFailed: 502,
    DeadlineExceeded: 504,
    HubFailed: 502,
    ShuttingDown: 503,
    EmbeddingFailed: 503,
    StoreFailed: 503,
    StreamUnavailable: 503,
    StreamFull: 413,
    StreamsFull: 503,
    LeaseLost: 409,
    RequestTimedOut: 408,
    RequestTooLarge: 413,
}
# What these say is said before the request has been read to its end.
UNREAD = (RequestTimedOut, RequestTooLarge)
CLOSE: Headers = ((b"connection", b"close"),)


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: a stable code, a sentence (twice: some clients read `detail`), and more where there is more."""

    error: str
    message: str
    detail: str
    details: dict[str, str | int]


async def send_error(send: Send, error: AnabranchError) -> None:
    status = status_of(error)
    close = CLOSE if isinstance(error, UNREAD) else ()
    await send_json(send, status, body_of(error), [*rate_headers.refused(error, status), *close])


def status_of(error: AnabranchError) -> int:
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), 500)


def body_of(error: AnabranchError) -> bytes:
    return body(error.code, error.message, **error.details)


def body(code: str, message: str, **details: str | int) -> bytes:
    return msgspec.json.encode(ErrorBody(error=code, message=message, detail=message, details=details))
