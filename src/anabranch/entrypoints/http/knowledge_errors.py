"""Spec 5's errors: one table from our codes to its own, and the layer that answers in its form."""

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.entrypoints.http import rate_headers
from anabranch.entrypoints.http.asgi import Headers, TooLarge, read_body, send_json
from anabranch.telemetry.log import Log

TABLE: Mapping[str, tuple[int, str]] = {
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
# Whatever else can go wrong is something that we depend on: a model, the store, the hub, the time that is left.
UNAVAILABLE = (503, "SERVICE_UNAVAILABLE")
ROUTING = {
    404: ("not_found", "There is nothing at this address."),
    405: ("method_not_allowed", "This address does not take that method."),
}
OUR_FAULT = "Something went wrong on our side; the log has the details under this correlation id."


class InvalidKnowledgeQuery(InvalidQuestion):
    code = "invalid_query"


class RequestTooLarge(AnabranchError):
    code = "request_too_large"


class RequestTimedOut(AnabranchError):
    code = "request_timeout"


class Gone(Exception):
    """The client left before its request was through: there is nobody to answer."""


class KnowledgeError(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: a stable code (in both cases), a sentence that says what to do, and more where there is more."""

    error: str
    code: str
    message: str
    details: dict[str, str | int]


def form(code: str, message: str, details: Mapping[str, str | int]) -> KnowledgeError:
    """`details.cause` tells apart what spec 5 has one code for."""
    ours = code in TABLE
    _, name = TABLE.get(code, UNAVAILABLE)
    more = dict(details) if ours or code == name.lower() else {"cause": code, **details}
    return KnowledgeError(error=name.lower(), code=name, message=message, details=more)


async def send_failure(
    send: Send, code: str, message: str, details: Mapping[str, str | int] | None = None, headers: Headers = ()
) -> None:
    status, _ = TABLE.get(code, UNAVAILABLE)
    await send_json(send, status, msgspec.json.encode(form(code, message, details or {})), [*headers, *_more(status)])


def _more(status: int) -> Headers:
    match status:
        case 401:
            return [(b"www-authenticate", b"Bearer")]
        case 408 | 413:
            return [(b"connection", b"close")]  # the rest of the request is not read
        case _:
            return []


async def body_of(receive: Receive, max_bytes: int, within_s: float | None = None) -> bytes:
    """The request's body, all of it; what is wrong with it is an error of this dialect."""
    try:
        body = await (read_body(receive, max_bytes) if within_s is None else read_body(receive, max_bytes, within_s))
    except TimeoutError:
        raise RequestTimedOut("The request took too long to arrive.") from None
    except TooLarge:
        raise RequestTooLarge(f"The request is larger than {max_bytes:,} bytes.", limit=max_bytes) from None
    if body is None:
        raise Gone
    if not body:
        raise InvalidQuestion("The body is empty; send JSON.")
    return body


class KnowledgeDialect:
    """Lets handlers raise: what they raise, and what cannot be routed, is answered here."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Gone:
            pass
        except AnabranchError as error:
            status, _ = TABLE.get(error.code, UNAVAILABLE)
            again = rate_headers.refused(error, status)
            await send_failure(send, error.code, error.message, error.details, again)
        except UnicodeDecodeError:
            await send_failure(send, "invalid_request", "The body is not UTF-8.")
        except (msgspec.MsgspecError, RecursionError) as error:
            await send_failure(send, "invalid_request", f"The request is not valid: {error}")
        except HTTPException as error:
            code, message = ROUTING.get(error.status_code, ("invalid_request", error.detail))
            headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
            await send_failure(send, code, message, headers=headers)
        except Exception as error:
            if begun:
                raise  # the edge logs it, and the connection breaks off
            correlation_id = scope["correlation_id"]
            self._log.error("unexpected_error", correlation_id=correlation_id, exc_info=error)
            await send_failure(send, "internal_error", OUR_FAULT, {"correlation_id": correlation_id})
