"""The HTTP request loop: finds the operation in the table, checks, reads and decodes the request, answers it, and
renders whatever goes wrong in the operation's dialect."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from anabranch.domain.errors import AnabranchError, InternalError, InvalidQuestion, NotFound
from anabranch.domain.model import Allowance
from anabranch.entrypoints.http.asgi import JSON, ClientGone, Headers, header, read_body, send_response
from anabranch.entrypoints.http.errors import (
    KNOWLEDGE,
    OUR_FAULT,
    PLAIN,
    Dialect,
    MethodNotAllowed,
    UpgradeRequired,
    rate_headers,
    refusal_headers,
)
from anabranch.knowledge.model import Caller
from anabranch.pipeline.run import Run
from anabranch.telemetry.log import Log, correlation_id

T = TypeVar("T")

WEBSOCKET = "WEBSOCKET"
PLANNER_PATHS = "/planner/"
MAX_LOGGED_PATH = 200
NO_ADDRESS = "There is nothing at this address."
BEGINNINGS = ("http.response.start", "websocket.accept")


class Reply(NamedTuple):
    """A whole response."""

    body: bytes
    status: int | None = None
    headers: Headers = (JSON,)


class EventStream(NamedTuple):
    """A stream of server-sent events, as OpenAPI describes it: the types of its data, by event name if it has one."""

    name: str
    description: str
    events: Mapping[str, type[msgspec.Struct]] | Sequence[type[msgspec.Struct]]


class Call(Generic[T]):
    """One request to an operation: the caller, the decoded body, and the connection."""

    __slots__ = ("asked", "body", "caller", "headers", "params", "receive", "scope", "send", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send, params: Mapping[str, str]) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.params = params
        self.caller = Caller()
        self.body = b""
        self.asked: T
        self.headers: Headers = ()
        self.started = False

    @property
    def query(self) -> QueryParams:
        return QueryParams(self.scope["query_string"])

    def begun(self, run: Run, allowance: Allowance | None) -> Run:
        """From here on the Run counts its own failure, and the response carries the caller's rate limit."""
        self.started = True
        self.headers = rate_headers(allowance)
        return run


Handler = Callable[[Call[T]], Awaitable[msgspec.Struct | Reply | None]]


@dataclass(frozen=True, kw_only=True)
class Operation(Generic[T]):
    """One row of the table. A handler returns a response, or None if it has sent one itself."""

    method: str
    path: str
    name: str
    summary: str
    dialect: Dialect
    handler: Handler[T]
    takes: Any = None
    # `raw`: the handler gets undecoded bytes. `handler`: it reads the body itself.
    reads: Literal["json", "raw", "handler"] = "json"
    # The same as a form with files, where the operation takes one.
    form: Any = None
    gives: tuple[Any, ...] = ()
    media_type: str = "application/json"
    # Descriptions by status; the first is the usual one.
    statuses: Mapping[int, str] = field(default_factory=dict)
    stream: EventStream | None = None
    resumable: bool = False
    errors: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    # Identifies the caller, or refuses it. Without one, everyone may call.
    who: Callable[[Scope], Awaitable[Caller]] | None = None
    # Refusals are counted under this name; with `admission`, a full or stopping server refuses before it reads.
    surface: str | None = None
    admission: bool = False
    decode: Callable[[bytes], Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.takes is not None and self.reads == "json":
            decode = msgspec.json.Decoder(self.takes, strict=self.dialect.strict).decode
            object.__setattr__(self, "decode", decode)


class Admission(Protocol):
    """What the loop needs of an Anabranch."""

    async def check(self, surface: str) -> None: ...

    def turned_away(self, surface: str, code: str) -> None: ...


class Router:
    """Finds operations by path and method."""

    def __init__(self, operations: Iterable[Operation[Any]]) -> None:
        self._fixed: dict[str, dict[str, Operation[Any]]] = {}
        self._templates: dict[tuple[str, ...], dict[str, Operation[Any]]] = {}
        for one in operations:
            segments = tuple(one.path.split("/"))
            at = self._templates.setdefault(segments, {}) if "{" in one.path else self._fixed.setdefault(one.path, {})
            at[one.method] = one
            if one.method == "GET" and one.dialect.head:
                at["HEAD"] = one

    def find(self, scope: Scope) -> tuple[Operation[Any], Mapping[str, str]]:
        methods, params = self._at(scope)
        method = WEBSOCKET if scope["type"] == "websocket" else scope["method"]
        if method in methods:
            return methods[method], params
        if not methods or (method == WEBSOCKET and not scope["path"].startswith(PLANNER_PATHS)):
            raise NotFound(NO_ADDRESS)
        if methods.keys() == {WEBSOCKET} and method == "GET":
            raise UpgradeRequired("Open this address as a WebSocket.", upgrade="websocket", connection="Upgrade")
        allowed = ", ".join("GET" if one == WEBSOCKET else one for one in methods)
        raise MethodNotAllowed("This address does not take that method.", allow=allowed)

    def _at(self, scope: Scope) -> tuple[Mapping[str, Operation[Any]], Mapping[str, str]]:
        if (fixed := self._fixed.get(scope["path"])) is not None:
            return fixed, {}
        segments, empty_ids = _segments(scope), scope["path"].startswith(PLANNER_PATHS)
        for template, methods in self._templates.items():
            if len(template) == len(segments) and all(
                (given or empty_ids) if wanted.startswith("{") else wanted == given
                for wanted, given in zip(template[1:], segments[1:], strict=True)
            ):
                named = zip(template, segments, strict=True)
                return methods, {wanted[1:-1]: given for wanted, given in named if wanted.startswith("{")}
        return {}, {}


class RequestLoop:
    """Answers every request: one correlation id, one operation, one response or error."""

    def __init__(
        self, admission: Admission, operations: Iterable[Operation[Any]], max_request_bytes: int, log: Log
    ) -> None:
        self._admission = admission
        self._router = Router(operations)
        self._max_request_bytes = max_request_bytes
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            send = _refusing_as_http(send, scope)
        scope["correlation_id"] = identifier = correlation_id(header(scope, b"x-correlation-id"))
        echo = (b"x-correlation-id", identifier.encode())
        begun = False

        async def send_marked(message: Message) -> None:
            nonlocal begun
            if message["type"] in BEGINNINGS:
                begun = True
                message["headers"] = [*message["headers"], echo]
                if 400 <= message.get("status", 101) < 500:
                    self._log_refusal(scope, message["status"])
            await send(message)

        operation: Operation[Any] | None = None
        call: Call[Any] | None = None
        try:
            operation, params = self._router.find(scope)
            call = Call(scope, receive, send_marked, params)
            await self._answer(operation, call)
        except ClientGone:
            pass
        except Exception as error:
            dialect = operation.dialect if operation is not None else _dialect_at(scope["path"])
            refusal = _as_refusal(error, dialect, identifier)
            if begun or (refusal is not error and isinstance(refusal, InternalError)):
                self._log.error("unexpected_error", correlation_id=identifier, exc_info=error)
            elif operation is not None and operation.surface is not None and not (call and call.started):
                self._admission.turned_away(operation.surface, dialect.counted_as(refusal))
            if begun:
                raise
            status, body = dialect.render(refusal, scope)
            await send_response(send_marked, status, body, [JSON, *refusal_headers(refusal, status)])

    async def _answer(self, operation: Operation[Any], call: Call[Any]) -> None:
        if operation.admission and operation.surface is not None:
            await self._admission.check(operation.surface)
        if operation.who is not None:
            call.caller = await operation.who(call.scope)
        if operation.takes is not None and operation.reads != "handler":
            call.body = await read_body(call.receive, self._max_request_bytes)
            if not call.body:
                raise InvalidQuestion("The body is empty; send JSON.")
            if operation.decode is not None:
                call.asked = operation.decode(call.body)
        answer = await operation.handler(call)
        if answer is None:
            return
        reply = answer if isinstance(answer, Reply) else Reply(msgspec.json.encode(answer))
        status = reply.status or next(iter(operation.statuses), 200)
        with suppress(TimeoutError):  # the client does not read
            await send_response(call.send, status, reply.body, [*reply.headers, *call.headers])

    def _log_refusal(self, scope: Scope, status: int) -> None:
        path, peer = scope["path"][:MAX_LOGGED_PATH], (scope.get("client") or ("",))[0]
        identifier = scope["correlation_id"]
        self._log.info("request_refused", correlation_id=identifier, status=status, path=path, peer=peer)


def _as_refusal(error: Exception, dialect: Dialect, identifier: str) -> AnabranchError:
    match error:
        case AnabranchError():
            return error
        case UnicodeDecodeError():
            return InvalidQuestion("The request is not UTF-8.")
        case msgspec.MsgspecError() | RecursionError():
            return InvalidQuestion(dialect.invalid.format(error))
        case _:
            return InternalError(OUR_FAULT, correlation_id=identifier)


def _dialect_at(path: str) -> Dialect:
    """The dialect of an address that no operation has."""
    return KNOWLEDGE if path.startswith("/v1/") else PLAIN


def _segments(scope: Scope) -> list[str]:
    """The segments of the path. A planner's ids may contain a slash, so there each segment is decoded by itself."""
    path: str = scope["path"]
    raw: bytes | None = scope.get("raw_path") if path.startswith(PLANNER_PATHS) else None
    if raw is None:
        return path.split("/")
    return [unquote(segment, errors="strict") for segment in raw.decode("latin-1").split("/")]


def _refusing_as_http(send: Send, scope: Scope) -> Send:
    """Sends what comes before a WebSocket is accepted as an HTTP response, where the server can."""
    can = "websocket.http.response" in (scope.get("extensions") or {})

    async def answer(message: Message) -> None:
        if not message["type"].startswith("http."):
            await send(message)
            return
        with suppress(OSError):  # the client has disconnected
            if can:
                await send({**message, "type": f"websocket.{message['type']}"})
            elif message["type"] == "http.response.start":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})

    return answer
