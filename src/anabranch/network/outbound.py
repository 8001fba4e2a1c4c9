"""The one HTTP client: guarded addresses, capped bodies, no redirects, no cookies, no proxies."""

import asyncio
import errno
import io
import socket
import ssl
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.streams import EMPTY_PAYLOAD
from yarl import URL

from anabranch.domain.errors import FailureKind, UpstreamError, UpstreamTimedOut
from anabranch.domain.shares import ReplyMemory, claimant, waits_for_own
from anabranch.network.addresses import AddressGuard, parse
from anabranch.network.redaction import quoted

# The message is the same for an address that other callers may use: callers must not learn what is on the allow-list.
REFUSED = (
    "This address is not open to requests: it is not on the public internet, and the operator has not allowed it to "
    "this caller in AGGREGATOR_ENDPOINT_ALLOWLIST."
)
MAX_ADDRESS = 100
NO_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
# Shorter than the five seconds after which most servers close an idle connection.
IDLE_S = 4.0
LARGE_BODY = 1 << 20
RESENDS = 2
# The body of a reply is read in pieces, and after some of them others have their turn: one read of many tiny chunks
# takes as long as one of a hundred times the bytes.
READ_BYTES = 64 * 1024
READS_AT_ONCE = 4
# What a reply may have beyond the bytes of its body, such as its head and what frames its chunks: this much, and a
# share of the body. Chunks of 24 bytes or more are always within it: a model sends each token as one.
FREE_FRAMING_BYTES = 192 * 1024
FRAMING_SHARE = 0.25
USED = "anabranch_used"
DROPPED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
EXPECTED = (aiohttp.ClientError, OSError, ValueError, zlib.error)
OWN_HEADERS = {
    "User-Agent": "anabranch",
    "Accept": "application/json, text/event-stream",
    "Accept-Encoding": "gzip, deflate",
}


on_used_connection: ContextVar[bool] = ContextVar("on_used_connection", default=False)


class AddressRefused(OSError):
    """Raised inside the connector, before any packet is sent."""


class GuardedResolver(AbstractResolver):
    """Refuses a name if any of its addresses is not permitted."""

    def __init__(self, guard: AddressGuard, inner: AbstractResolver) -> None:
        self._guard = guard
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not all(self._guard.permits(entry["host"]) for entry in found):
            raise AddressRefused
        return found

    async def close(self) -> None:
        await self._inner.close()


class AiohttpOutbound:
    """Outbound over aiohttp. One pool for origins that the operator named, and two that are guarded: with and without
    the private addresses on the allow-list. So no caller can use a connection that it could not have opened. Where a
    pool has `max_connections` in use (0: no limit), further requests wait for one; one caller has at most half as many,
    over all pools, so that its slow upstreams leave connections for others."""

    def __init__(
        self,
        *,
        guard: AddressGuard,
        allowed_origins: Iterable[str] = (),
        max_reply_bytes: int,
        max_connections: int = 0,
        resolver: Callable[[], AbstractResolver] = aiohttp.AsyncResolver,
    ) -> None:
        self._allowed_origins = frozenset(allowed_origins)
        self._max_reply_bytes = max_reply_bytes
        self._places = CallPlaces(max_connections // 2)
        self._public = _guarded(AddressGuard(), resolver(), max_connections)
        self._allowed = _guarded(guard, resolver(), max_connections)
        self._open = _session(Connector(limit=max_connections, keepalive_timeout=IDLE_S, resolver=resolver()))

    async def close(self) -> None:
        for session in (self._public, self._allowed, self._open):
            await session.close()

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        operator: bool = False,
        public_only: bool = False,
    ) -> "PendingRequest":
        target, origin = parse(url)
        if operator or (origin in self._allowed_origins and not public_only):
            session = self._open
        else:
            session = self._public if public_only else self._allowed
        sent = {**OWN_HEADERS, **headers}
        return PendingRequest(
            lambda: session.request(
                method, target, data=_streamed(body), headers=sent, allow_redirects=False, timeout=NO_TIMEOUT
            ),
            target,
            self._max_reply_bytes,
            self._places,
        )


def _streamed(body: bytes | None) -> bytes | io.BytesIO | None:
    """A large body is written in parts, so that others have their turn meanwhile."""
    return body if body is None or len(body) < LARGE_BODY else io.BytesIO(body)


class CallPlaces:
    """How many requests each caller has open. Those over its limit (0: there is none) wait for its own earlier ones."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._open: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def take(self, caller: str) -> bool:
        """False if it must wait for its `turn`."""
        if waits_for_own.get():  # an earlier call of this task never had its turn
            waits_for_own.set(False)
        count = self._open.get(caller, 0)
        if self._each and count >= self._each:
            return False
        self._open[caller] = count + 1
        return True

    def leave(self, caller: str) -> None:
        waiting = self._waiting.get(caller)
        while waiting:
            following = waiting.popleft()
            if not following.done():
                following.set_result(None)  # it has the place from now on
                return
        self._waiting.pop(caller, None)
        if (count := self._open[caller] - 1) > 0:
            self._open[caller] = count
        else:
            del self._open[caller]

    async def turn(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        waits_for_own.set(True)
        try:
            await turn
            waits_for_own.set(False)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(caller)
            raise


class TinyPieces(aiohttp.ClientPayloadError):
    """Raised where a reply is read."""


class BoundedReplies(ResponseHandler, asyncio.BufferedProtocol):
    """aiohttp's protocol with small reads. It ends a reply that is framing rather than body: its cost is in the parser,
    where its reader cannot see it. `buffer` serves all connections of an event loop: each read is parsed at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, buffer: memoryview) -> None:
        super().__init__(loop)
        self._read_buffer = buffer
        # Of the reply to the latest request.
        self.wire_bytes = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.wire_bytes += nbytes
        self.data_received(bytes(self._read_buffer[:nbytes]))
        if self.wire_bytes > FREE_FRAMING_BYTES and self._is_framing():
            payload, error = self._payload, TinyPieces()
            self.abort()
            for reader in (self, payload):
                if reader is not None:
                    reader.set_exception(error)

    def _is_framing(self) -> bool:
        """Compressed data that stand for nothing are no body either."""
        payload = self._payload
        if payload is None or payload is EMPTY_PAYLOAD:
            return True
        body = min(payload.total_raw_bytes, payload.total_bytes)
        return self.wire_bytes - body > FREE_FRAMING_BYTES + FRAMING_SHARE * body


class Connector(aiohttp.TCPConnector):
    """Bounds replies, and records whether the connection of a request was used before."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        buffer = memoryview(bytearray(READ_BYTES))
        self._factory = partial(BoundedReplies, loop=self._loop, buffer=buffer)  # type: ignore[assignment]

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        on_used_connection.set(hasattr(protocol, USED))
        setattr(protocol, USED, True)
        if isinstance(protocol, BoundedReplies):
            protocol.wire_bytes = 0
        return connection


class PendingRequest:
    """One request: entering it waits for the reply's headers, leaving it closes what was not read."""

    __slots__ = ("_caller", "_max_bytes", "_places", "_response", "_send", "_url")

    def __init__(
        self, send: Callable[[], Awaitable[aiohttp.ClientResponse]], url: URL, max_bytes: int, places: CallPlaces
    ) -> None:
        self._send = send
        self._url = url
        self._max_bytes = max_bytes
        self._places = places

    async def __aenter__(self) -> "AiohttpExchange":
        """If a reused connection is closed without a byte in reply, the server closed it as idle while we wrote. It has
        not read the request, which is sent again."""
        self._caller = caller = claimant.get().name
        if not self._places.take(caller):
            await self._places.turn(caller)
        left = RESENDS
        while True:
            on_used_connection.set(False)
            try:
                self._response = await self._send()
                return AiohttpExchange(self._response, self._max_bytes)
            except EXPECTED as error:
                if not (left and on_used_connection.get() and isinstance(error, DROPPED)):
                    self._places.leave(caller)
                    raise _translated(error, self._url) from error
                left -= 1
            except BaseException:
                self._places.leave(caller)
                raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._places.leave(self._caller)
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class AiohttpExchange:
    """A reply whose body is read within a cap on its decompressed size."""

    __slots__ = ("_max_bytes", "_reads", "_response", "content_type", "status")

    def __init__(self, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        self._response = response
        self._max_bytes = max_bytes
        self._reads = 0
        self.status = response.status
        self.content_type = response.content_type

    def header(self, name: str) -> str:
        return self._response.headers.get(name, "")

    async def read(self, memory: ReplyMemory | None = None) -> bytes:
        declared = self._response.content_length or 0
        if declared > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = counted = 0
        while chunk := await self._next():
            size += len(chunk)
            if size > self._max_bytes:
                raise self._too_large()
            if memory is not None and size > counted:
                more = max(size, declared) - counted
                if not memory.fits(more):
                    await memory.add(more)
                counted += more
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self, *, endless: bool = False) -> AsyncIterator[bytes]:
        size = 0
        while chunk := await self._next():
            size += len(chunk)
            if size > self._max_bytes and not endless:
                raise self._too_large()
            yield chunk

    async def _next(self) -> bytes:
        """What has arrived; empty at the end of the body."""
        self._reads += 1
        if self._reads % READS_AT_ONCE == 0:
            await asyncio.sleep(0)
        try:
            return await self._response.content.readany()
        except EXPECTED as error:
            raise _translated(error, self._response.url) from error

    def _too_large(self) -> UpstreamError:
        return UpstreamError(
            f"The reply is larger than {self._max_bytes:,} bytes (AGGREGATOR_MAX_REPLY_BYTES).", FailureKind.UNUSABLE
        )


def _guarded(guard: AddressGuard, resolver: AbstractResolver, max_connections: int) -> aiohttp.ClientSession:
    def checked(info: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
        """Checks the address itself before the connection, for names and literal addresses alike."""
        family, kind, protocol, _, address = info
        if not guard.permits(str(address[0])):
            raise AddressRefused
        return socket.socket(family=family, type=kind, proto=protocol)

    resolver = GuardedResolver(guard, resolver)
    return _session(
        Connector(limit=max_connections, keepalive_timeout=IDLE_S, resolver=resolver, socket_factory=checked)
    )


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        timeout=NO_TIMEOUT,
        read_bufsize=READ_BYTES,
    )


def _translated(error: Exception, url: URL) -> UpstreamError:
    """The error; if the upstream failed, with the host and the port of the URL, and nothing else of it."""
    if isinstance(error, TinyPieces):
        translated = UpstreamError("The reply comes in pieces that are too small.", FailureKind.UNUSABLE)
    else:
        translated = _without_address(error)
    if translated.failure_kind.fault:
        host = f"[{url.host}]" if ":" in (url.host or "") else url.host
        translated.address = quoted(f"{host}:{url.port}", most=MAX_ADDRESS)
    return translated


def _without_address(error: Exception) -> UpstreamError:
    """The error without addresses and library messages, with its `FailureKind` for the policies."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    match error:
        case _ if isinstance(cause, AddressRefused):
            return UpstreamError(REFUSED)
        case aiohttp.ClientConnectorDNSError():
            return UpstreamError("The host name could not be resolved.", FailureKind.DOWN)
        case aiohttp.ClientConnectorCertificateError():
            reason = getattr(cause, "verify_message", "")
            shown = f" ({reason})" if reason else ""
            return UpstreamError(f"The certificate could not be verified{shown}.", FailureKind.UNUSABLE)
        case aiohttp.ClientConnectorSSLError() | ssl.SSLError():
            return UpstreamError("A secure connection could not be made (TLS failed).", FailureKind.UNUSABLE)
        case TimeoutError():
            return UpstreamTimedOut("The connection timed out.", FailureKind.DOWN)
        case aiohttp.ClientConnectorError() if error.os_error.errno in (errno.EMFILE, errno.ENFILE):
            return UpstreamError("We have too many connections open at the moment.", FailureKind.BUSY)
        case aiohttp.ClientConnectorError():
            return UpstreamError("No connection could be made.", FailureKind.DOWN)
        case aiohttp.InvalidURL() | aiohttp.InvalidUrlClientError():
            return UpstreamError("The endpoint's URL is not usable.")
        case aiohttp.ContentTypeError() | aiohttp.ClientPayloadError() | zlib.error():
            return UpstreamError("The reply broke off or could not be decompressed.", FailureKind.DOWN)
        case aiohttp.ClientResponseError():
            return UpstreamError("The reply was not valid HTTP.", FailureKind.UNUSABLE)
        case aiohttp.ClientError() | OSError():
            return UpstreamError("The connection was closed before the reply was complete.", FailureKind.DOWN)
        case _:
            return UpstreamError(
                "The request could not be sent: the URL or a header holds characters that HTTP forbids."
            )
