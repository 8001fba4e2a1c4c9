"""The HTTP request loop: finds the operation in the table, checks, reads and decodes the request, answers it, and
renders whatever goes wrong in the operation's dialect. Reads a body within a limit, sends JSON and streamed bytes."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from anabranch.app.anabranch import Anabranch
from anabranch.app.refusals import is_refused_access
from anabranch.app.revocations import REVOKED
from anabranch.domain.audit import Actor, acting
from anabranch.domain.errors import (
    AnabranchError,
    Forbidden,
    InternalError,
    InvalidQuestion,
    NotFound,
    Unauthorized,
)
from anabranch.domain.model import Allowance
from anabranch.domain.rights import Scope as KeyScope
from anabranch.domain.shares import Claimant, claimant, reply_memory
from anabranch.entrypoints.http.decode_errors import field_of
from anabranch.entrypoints.http.errors import (
    KNOWLEDGE,
    PLAIN,
    ClientGone,
    Dialect,
    Headers,
    InvalidField,
    MethodNotAllowed,
    NoSuchAddress,
    RequestTimedOut,
    RequestTooLarge,
    UpgradeRequired,
    rate_headers,
    refusal_headers,
)
from anabranch.knowledge.model import Caller
from anabranch.network.large_json import MAX_CONTAINERS, has_too_many_containers
from anabranch.pipeline.run import Run
from anabranch.policies.reply_memory import HeldReplies
from anabranch.policies.shares import Held, Share
from anabranch.telemetry.log import Log, correlation_id
from anabranch.telemetry.refused_requests import RefusedRequests

T = TypeVar("T")

WEBSOCKET = "WEBSOCKET"
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
PLANNER_PATHS = "/planner/"
# Ids of planner steps and models, and file names, may have a slash, sent as %2F: each segment is decoded by itself.
ENCODED_PATHS = ("/v1/collections/", PLANNER_PATHS, "/v1/documents/", "/v1/models/")
MAX_LOGGED_PATH = 200
RESPONSE_STARTS = ("http.response.start", "websocket.accept")
BODY_S = 30.0
PIECE_BYTES = 64 * 1024
PIECE_S = 30.0
# What is still read of a refused request before its connection is closed.
DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 5.0
MAX_DIGITS = 18
JSON = (b"content-type", b"application/json")
# Of responses that depend on who asks: a cache in front must not give them to others.
PRIVATE: Headers = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
)


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


@dataclass(slots=True)
class Call(Generic[T]):
    """One request to an operation: the caller, the decoded body, and the connection. A `counted` call has a Run, which
    counts its own failure; the response of a `responding` one has begun."""

    scope: Scope
    receive: Receive
    _send: Send
    max_request_bytes: int
    _refused: RefusedRequests
    operation: "Operation[T] | None" = None
    params: Mapping[str, str] = field(default_factory=dict)
    caller: Caller = field(default_factory=Caller)
    shares: Mapping[str, Share] = field(default_factory=dict)
    body: bytes = b""
    request: T = field(init=False)
    headers: Headers = ()
    counted: bool = False
    responding: bool = False
    replies: HeldReplies = field(init=False)
    _query: QueryParams | None = None
    _has_arrived: bool = False
    _identify_after: float = math.inf
    _held: list[Held] = field(default_factory=list)

    @property
    def surface(self) -> str:
        return self.operation.surface if self.operation is not None else ""

    @property
    def query(self) -> QueryParams:
        self._query = self._query or QueryParams(self.scope["query_string"])
        return self._query

    async def send(self, message: Message) -> None:
        """Sends a part of the response. The first one gets the correlation id, and is logged if it is a refusal. (A
        method: a function that refers to its call would be a cycle, which only the garbage collector ends.)"""
        if message["type"] in RESPONSE_STARTS:
            self.responding = True
            identifier = self.scope["correlation_id"]
            message["headers"] = [*message["headers"], (b"x-correlation-id", identifier.encode())]
            if 400 <= (status := message.get("status", 101)) < 500:
                # Not the address of what is there: it may have the name of a document.
                path = self.operation.path if self.operation is not None else self.scope["path"][:MAX_LOGGED_PATH]
                peer = (self.scope.get("client") or ("",))[0]
                self._refused.add(peer, correlation_id=identifier, status=status, path=path)
        await self._send(message)

    async def read(self) -> None:
        """Reads and decodes the body."""
        assert self.operation is not None, "a call is read for its operation"
        self.body = await self.whole(self.max_request_bytes)
        if not self.body:
            raise InvalidQuestion("The body is empty; send JSON.")
        if self.operation.request_type is not bytes:
            if has_too_many_containers(self.body):
                raise InvalidQuestion(f"The request has more than {MAX_CONTAINERS:,} objects and lists.")
            self.request = self.operation.decode(self.body)

    async def whole(self, max_bytes: int, within_s: float = BODY_S) -> bytes:
        """The whole body, or the error that says why it could not be read."""
        try:
            async with asyncio.timeout(within_s):
                if 0 < self._declared_bytes() <= min(PIECE_BYTES, max_bytes):
                    return await self._small()
                parts = [part async for part in self.parts(max_bytes)]
        except TimeoutError:
            raise RequestTimedOut("The request took too long to arrive.") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _small(self) -> bytes:
        """A body that says that it is small; the parser holds it to that."""
        body, more = b"", True
        while more:
            part, more = await self._next_part()
            body += part
        await self._identify_again()
        return body

    async def parts(self, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """The body as it arrives, at most `max_bytes` of it. A large one counts as an upload while it arrives, and its
        bytes count until the call ends."""
        declared, size, more = self._declared_bytes(), 0, True
        if declared > max_bytes:
            raise self._too_large(max_bytes)
        if declared <= PIECE_BYTES:
            uploading = counted = None
        else:
            uploading, counted = await self.hold("uploads"), await self.hold("upload_bytes", declared)
        while more:
            part, more = await self._next_part()
            size += len(part)
            if size > max_bytes:
                raise self._too_large(max_bytes)
            if more and counted is None:  # one that does not say how large it is
                uploading, counted = await self.hold("uploads"), await self.hold("upload_bytes", len(part))
            elif counted is not None and size > counted.units:
                counted.grow(size - counted.units)
            yield part
        if uploading is not None:
            uploading.leave()
        await self._identify_again()

    async def identify(self, how: Callable[[Scope], Awaitable[Caller]], valid_s: float) -> Caller:
        """The caller; a key is looked up again if the body takes longer than some seconds."""
        self.caller = await how(self.scope)
        if self.caller.credential is not None:
            self._identify_after = time.monotonic() + valid_s
        return self.caller

    async def _identify_again(self) -> None:
        """A body may arrive for minutes: the key that began it may have been revoked meanwhile."""
        if time.monotonic() < self._identify_after:
            return
        assert self.operation is not None, "a caller is identified for an operation"
        assert self.operation.identify is not None, "and by it"
        if (await self.operation.identify(self.scope)).credential != self.caller.credential:
            raise Unauthorized(REVOKED)

    def _too_large(self, max_bytes: int) -> RequestTooLarge:
        settings = "AGGREGATOR_MAX_REQUEST_BYTES; for documents AGGREGATOR_MAX_DOCUMENT_BYTES"
        fixed = self.operation is not None and self.operation.max_request_bytes == max_bytes
        why = "" if fixed else f" ({settings})"
        return RequestTooLarge(f"The request is larger than {max_bytes:,} bytes{why}.", limit=max_bytes)

    async def _next_part(self) -> tuple[bytes, bool]:
        """What has arrived of the body, and whether more will."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._has_arrived = not message.get("more_body", False)
        return message.get("body", b""), not self._has_arrived

    async def hold(self, name: str, units: float = 1.0) -> Held:
        """Hold units of what callers share, once it is this caller's turn, until the call ends."""
        held = self.shares[name].enter(units)
        self._held.append(held)
        await held.turn()
        return held

    def leave(self) -> None:
        """Give back what the call holds."""
        for held in self._held:
            held.leave()

    async def refuse(self, error: AnabranchError, status: int, body: bytes) -> None:
        """Sends an error. If the connection is then closed while the client still sends, it is reset, and the client
        may never see the error: what it sends is read on for a while."""
        headers = [JSON, *PRIVATE, *refusal_headers(error, status)]
        if self._has_arrived or isinstance(error, RequestTimedOut) or not self._will_close(headers):
            await send_response(self.send, status, body, headers)
            return
        await send_response(self.send, status, body, headers, more=True)
        self.leave()
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DISCARD_S):
                await self._discard()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self) -> None:
        size, more = 0, True
        while more and size < DISCARD_BYTES:
            part, more = await self._next_part()
            size += len(part)

    def _will_close(self, headers: Headers) -> bool:
        """Whether a refusal with these headers ends the connection of a request that has a body."""
        scope = self.scope
        if scope["type"] != "http" or not (header(scope, b"content-length") or header(scope, b"transfer-encoding")):
            return False
        return (
            scope.get("http_version") == "1.0"
            or "close" in (header(scope, b"connection") or "").lower()
            or any(name == b"connection" for name, _ in headers)
        )

    def _declared_bytes(self) -> int:
        declared = header(self.scope, b"content-length") or ""
        return int(declared) if declared.isdecimal() and len(declared) < MAX_DIGITS else 0

    def attach(self, run: Run, allowance: Allowance | None) -> Run:
        """From here on the Run counts its own failure, and the response carries the caller's rate limit."""
        self.counted = True
        self.headers = rate_headers(allowance) if allowance is not None else self.headers
        return run


Handler = Callable[[Call[T]], Awaitable[msgspec.Struct | Reply | None]]


@dataclass(frozen=True)
class Operation(Generic[T]):
    """One row of the table. A handler returns a response, or None if it has sent one itself."""

    method: str
    path: str
    name: str
    summary: str
    handler: Handler[T]
    dialect: Dialect
    # The scope that an API key needs for it. Only what needs no caller has none.
    scope: KeyScope | None = field(kw_only=True)
    # What a restricted key must have been granted besides.
    grant: str = ""
    # Bytes are not decoded.
    request_type: Any = None
    # The same as a form with files, where the operation takes one.
    form_type: Any = None
    response_types: tuple[Any, ...] = ()
    media_type: str = "application/json"
    # Others that it sends as they are.
    other_media_types: tuple[str, ...] = ()
    # Descriptions by status; the first is the usual one.
    statuses: Mapping[int, str] = field(default_factory=dict)
    stream: EventStream | None = None
    resumable: bool = False
    errors: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    # Identifies the caller, or refuses it. Without one, everyone may call.
    identify: Callable[[Scope], Awaitable[Caller]] | None = None
    # Refusals are counted under this name, if there is one; with `admission`, a full or stopping server refuses before
    # it reads.
    surface: str = ""
    admission: bool = False
    # Larger bodies are refused; so are those over the limit of the settings.
    max_request_bytes: int = sys.maxsize
    # The handler reads the body itself.
    handler_reads: bool = False
    # The setting that switches its surface off, if it does: the address is 404, and not in the API description.
    switched_off_by: str = ""

    @cached_property
    def changes_records(self) -> bool:
        """Whether it changes what is stored, and is no question."""
        return self.method in CHANGING and self.path.startswith("/v1/") and not self.surface

    def authorize(self, caller: Caller) -> None:
        """Refuse a caller whose key lacks the scope or the grant of this operation."""
        if self.scope is not None:
            caller.rights.require(self.scope)
        if self.grant and not caller.rights.permits(self.grant):
            raise Forbidden(f"This API key was not granted the {self.grant}.", missing_grant=self.grant)

    @cached_property
    def decode(self) -> Callable[[bytes], T]:
        return msgspec.json.Decoder(self.request_type, strict=self.dialect.strict).decode


class Router:
    """Finds operations by path and method."""

    def __init__(self, operations: Iterable[Operation[Any]]) -> None:
        self._fixed: dict[str, dict[str, Operation[Any]]] = {}
        self._templates: dict[tuple[str, ...], dict[str, Operation[Any]]] = {}
        self._dialects: list[Dialect] = []
        for one in operations:
            if one.dialect.prefixes and one.dialect not in self._dialects:
                self._dialects.append(one.dialect)
            if "{" in one.path:
                methods = self._templates.setdefault(tuple(one.path.split("/")), {})
            else:
                methods = self._fixed.setdefault(one.path, {})
            methods[one.method] = one
            if one.method == "GET" and one.dialect.head:
                methods["HEAD"] = one

    def find(self, scope: Scope) -> tuple[Operation[Any], Mapping[str, str]]:
        methods, params = self._at(scope)
        method = WEBSOCKET if scope["type"] == "websocket" else scope["method"]
        found = methods.get(method)
        if found is not None and not found.switched_off_by:
            return found, params
        if setting := next((one.switched_off_by for one in methods.values()), ""):
            raise NotFound(f"This API is switched off on this server ({setting}=true switches it on).")
        if not methods or (method == WEBSOCKET and not scope["path"].startswith(PLANNER_PATHS)):
            raise NoSuchAddress
        if methods.keys() == {WEBSOCKET} and method == "GET":
            raise UpgradeRequired("Open this address as a WebSocket.", upgrade="websocket", connection="Upgrade")
        allowed = ", ".join("GET" if one == WEBSOCKET else one for one in methods)
        raise MethodNotAllowed("This address does not take that method.", allow=allowed)

    def dialect_at(self, scope: Scope) -> Dialect:
        """The dialect of a request that no operation takes."""
        path = scope["path"]
        with suppress(UnicodeDecodeError):
            if here := self._at(scope)[0]:
                return next(one.dialect for one in here.values()) if path.startswith("/v1/") else PLAIN
        near = next((one for one in self._dialects if path.startswith(one.prefixes)), None)
        return near or (KNOWLEDGE if path.startswith("/v1/") else PLAIN)

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
        self,
        anabranch: Anabranch,
        operations: Iterable[Operation[Any]],
        log: Log,
        claimant_of: Callable[[Scope, Caller], Claimant],
        actor_of: Callable[[Scope, Caller, str], Actor],
    ) -> None:
        self._shares = anabranch.limits.shares
        self._anabranch = anabranch
        self._max_request_bytes = anabranch.settings.max_request_bytes
        self._router = Router(operations)
        self._log = log
        self._refused = RefusedRequests(log)
        self._claimant_of = claimant_of
        self._actor_of = actor_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            send = _refusing_as_http(send, scope)
        scope["correlation_id"] = correlation_id(header(scope, b"x-correlation-id"))
        call: Call[Any] = Call(scope, receive, send, self._max_request_bytes, self._refused)
        call.replies = replies = HeldReplies(self._shares["response_bytes"])
        reply_memory.set(replies)
        try:
            call.operation, call.params = self._router.find(scope)
            call.max_request_bytes = min(self._max_request_bytes, call.operation.max_request_bytes)
            await self._answer(call, call.operation)
        except ClientGone:
            pass
        except Exception as error:
            refusal, dialect = self._refusal(call, error)
            if call.responding:
                raise
            status, body = dialect.render(refusal, scope)
            await call.refuse(refusal, status, body)
        finally:
            replies.leave()
            call.leave()

    async def _answer(self, call: Call[Any], operation: Operation[Any]) -> None:
        acting.set(partial(self._actor_of, call.scope, call.caller, call.surface))
        if operation.admission:
            await self._anabranch.runs.check(operation.surface)
        if operation.identify is not None:
            caller = await call.identify(operation.identify, self._anabranch.revocations.every_s)
            claimant.set(self._claimant_of(call.scope, caller))
            acting.set(partial(self._actor_of, call.scope, caller, call.surface))
            operation.authorize(caller)
            if operation.changes_records:
                call.headers = rate_headers(await self._anabranch.runs.admit_change())
            if caller.rights.limits:
                call.headers = rate_headers(await self._anabranch.runs.admit_key(caller, operation.surface))
        call.shares = self._shares
        if operation.request_type is not None and not operation.handler_reads:
            await call.read()
        answer = await operation.handler(call)
        if answer is None:
            return
        reply = answer if isinstance(answer, Reply) else Reply(msgspec.json.encode(answer))
        status = reply.status or next(iter(operation.statuses), 200)
        private = PRIVATE if operation.identify is not None else ()
        await call.replies.add_response(len(reply.body) if private else 0)
        with suppress(TimeoutError):  # the client does not read
            await send_response(call.send, status, reply.body, [*reply.headers, *private, *call.headers])

    def _refusal(self, call: Call[Any], error: Exception) -> tuple[AnabranchError, Dialect]:
        """The error as the client gets it, logged or counted."""
        operation, identifier = call.operation, call.scope["correlation_id"]
        dialect = operation.dialect if operation is not None else self._router.dialect_at(call.scope)
        refusal = _as_refusal(error, dialect, identifier, operation.request_type if operation is not None else None)
        if call.responding or (refusal is not error and isinstance(refusal, InternalError)):
            self._log.error("unexpected_error", correlation_id=identifier, exc_info=error)
        elif call.surface and not call.counted:
            self._anabranch.runs.rejected(call.surface, dialect.counted_as(refusal))
        if operation is not None and is_refused_access(refusal, identified=operation.identify is not None):
            self._anabranch.refused(acting.get()(), operation.name, refusal.code)
        return refusal, dialect


def _as_refusal(error: Exception, dialect: Dialect, identifier: str, request_type: Any) -> AnabranchError:
    match error:
        case AnabranchError():
            return error
        case UnicodeDecodeError():
            return InvalidQuestion("The request is not UTF-8.")
        case msgspec.MsgspecError() | RecursionError():
            message = dialect.explain(str(error), request_type)
            field = field_of(str(error))
            return InvalidField(message, field) if field else InvalidQuestion(message)
        case _:
            return InternalError(
                "Something went wrong on our side; the log has the details under this correlation id.",
                correlation_id=identifier,
            )


def _segments(scope: Scope) -> list[str]:
    """The segments of the path."""
    path: str = scope["path"]
    raw: bytes | None = scope.get("raw_path") if path.startswith(ENCODED_PATHS) else None
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


async def while_connected(call: Call[Any], work: Coroutine[Any, Any, T]) -> T:
    """The result of the work; it is cancelled if the client disconnects."""
    task, leaving = asyncio.create_task(work), asyncio.create_task(gone(call.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


async def gone(receive: Receive, leave: str = "http.disconnect") -> None:
    """Returns when the client has disconnected; `leave` is ASGI's message."""
    while (await receive())["type"] != leave:
        pass


async def send_response(
    send: Send, status: int, body: bytes, headers: Headers = (JSON,), *, more: bool = False
) -> None:
    """Sends a whole response; with `more`, its end is left to the caller."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send_body(send, body, more=more)


async def send_empty(send: Send, status: int, headers: Headers = ()) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_body(send: Send, body: bytes, *, more: bool, within_s: float = PIECE_S) -> None:
    """Sends in pieces with a time limit for each, so that a client that does not read cannot hold much memory. After
    each piece others get their turn: sending to a client that reads quickly never waits."""
    for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
        async with asyncio.timeout(within_s):
            await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})
        await asyncio.sleep(0)
    sent = max(0, (len(body) - 1) // PIECE_BYTES) * PIECE_BYTES
    await send({"type": "http.response.body", "body": body[sent:] if sent else body, "more_body": more})


def unless_known(call: Call[Any], body: bytes, headers: Headers) -> Reply:
    """A file with its ETag; 304 without it, if the client has this version."""
    etag = b'"%b"' % blake2b(body, digest_size=12).hexdigest().encode()
    known = (header(call.scope, b"if-none-match") or "").encode("latin-1")
    headers = [*headers, (b"etag", etag)]
    return Reply(b"", 304, headers) if etag in known else Reply(body, 200, headers)


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name (in lower case)."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value is nested deeper than that."""
    return next(islice(levels_of(value), levels + 1, None), None) is not None


def levels_of(value: Any) -> Iterator[list[Any]]:
    """The values at each level of nesting of a JSON value; at the first, it is the only one."""
    level = [value]
    while level:
        yield level
        containers = [one for one in level if isinstance(one, Mapping | list)]
        level = [inner for one in containers for inner in (one.values() if isinstance(one, Mapping) else one)]
