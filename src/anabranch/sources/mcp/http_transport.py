"""Transport to an MCP server over HTTP: the SDK's requests go through the guarded outbound client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx2
import msgspec
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared.inbound import MCP_METHOD_HEADER
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, METHOD_NOT_FOUND, REQUEST_TIMEOUT

from anabranch.domain.contracts import Exchange, Outbound
from anabranch.domain.errors import FailureKind, UpstreamError, UpstreamTimedOut
from anabranch.domain.mcp import McpServer
from anabranch.network import syft_wire
from anabranch.network.redaction import MAX_QUOTED
from anabranch.sources.mcp.framing import SurrogateRepair, UnsolicitedLimit
from anabranch.sources.mcp.services import McpTiming

MAX_EVENT = 16 * 1024 * 1024
THROTTLE_S = 0.1
FRAMING = frozenset({"accept-encoding", "connection", "content-length", "transfer-encoding"})
# Set by the outbound client.
NOT_FORWARDED = FRAMING | {"host", "user-agent"}
REPLY_HEADERS = ("content-type", "location", MCP_SESSION_ID, "retry-after", "www-authenticate")
SSE = "text/event-stream"
LISTEN = "subscriptions/listen"
JSON = {"content-type": "application/json"}


class _MessageHead(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"")
    method: str = ""


class _ErrorDetail(msgspec.Struct):
    code: int
    message: str


class _ErrorReply(msgspec.Struct):
    error: _ErrorDetail


@asynccontextmanager
async def http_transport(
    server: McpServer, outbound: Outbound, *, max_event: int = MAX_EVENT, timing: McpTiming | None = None
) -> AsyncIterator[TransportStreams]:
    """Connects to the server's URL while the context is open. The outbound client limits the size of a reply;
    `max_event` limits each event of a GET stream. An expired session is an MCPError with the code INVALID_REQUEST and
    the message `Session terminated`, whatever the server's own message is."""
    assert server.url is not None
    transport = OutboundTransport(server, outbound, max_event, timing or McpTiming())
    async with (
        httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=max_event) as streams,
    ):
        yield streams


class OutboundTransport(httpx2.AsyncBaseTransport):
    """The SDK's requests to one server. A failed request becomes a JSON-RPC error reply: an exception would end the
    connection, and every other call with it."""

    def __init__(self, server: McpServer, outbound: Outbound, max_event: int, timing: McpTiming) -> None:
        self._max_event = max_event
        self._timing = timing
        self._origin = _origin(httpx2.URL(server.url or ""))
        self._headers = {name.title(): value for name, value in server.headers.items() if name.lower() not in FRAMING}
        self._outbound = outbound
        self._next_listen_at = 0.0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        timeout_s = self._status_timeout_s(request, body)
        try:
            if _origin(request.url) != self._origin:
                raise UpstreamError("It redirects to another origin; such redirects are not followed.")
            if request.method == "GET":
                await self._wait_listen_gap()
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(timeout_s):
                    call = self._outbound.request(
                        request.method,
                        str(request.url),
                        headers=self._request_headers(request),
                        body=body or None,
                        operator=True,
                    )
                    exchange = await stack.enter_async_context(call)
                if timeout_s is not None:
                    return httpx2.Response(exchange.status, headers=_reply_headers(exchange))
                if request.method == "POST" and exchange.status >= 400:
                    return await _error_reply(request, exchange)
                return self._stream(request, exchange, stack.pop_all())
        except TimeoutError:
            return _failed(504, REQUEST_TIMEOUT, "The server did not answer in time.")
        except UpstreamTimedOut as error:
            return _failed(504, REQUEST_TIMEOUT, error.message)
        except UpstreamError as error:
            return _failed(502, CONNECTION_CLOSED, error.message)

    def _request_headers(self, request: httpx2.Request) -> dict[str, str]:
        """Protocol headers take precedence over configured ones."""
        given = {name.title(): value for name, value in request.headers.items() if name not in NOT_FORWARDED}
        return {**self._headers, **given}

    async def _wait_listen_gap(self) -> None:
        """Limits the rate of GET streams to a server that ends each of them at once."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next_listen_at)
        self._next_listen_at = at + self._timing.listen_gap_s
        await asyncio.sleep(at - now)

    def _status_timeout_s(self, request: httpx2.Request, body: bytes) -> float | None:
        """The time limit of a reply of which only the status matters; None for any other, which the caller limits. The
        SDK sends nothing else before such a reply has arrived."""
        if request.method == "DELETE":
            return self._timing.session_delete_s
        if request.method != "POST":
            return None
        head = msgspec.json.decode(body, type=_MessageHead)
        return None if head.id and head.method else self._timing.notification_s

    def _stream(self, request: httpx2.Request, exchange: Exchange, stack: AsyncExitStack) -> httpx2.Response:
        listens = request.method == "GET"
        body = _Body(
            exchange,
            stack,
            listens=listens,
            endless=exchange.content_type == SSE and (listens or request.headers.get(MCP_METHOD_HEADER) == LISTEN),
            max_event=self._max_event,
            last_bytes_s=self._timing.last_bytes_s,
        )
        return httpx2.Response(exchange.status, headers=_reply_headers(exchange), stream=body)


class _Body(httpx2.AsyncByteStream):
    """The body of a reply as a stream. Closing it closes the connection, unless the body was read to its end."""

    def __init__(
        self,
        exchange: Exchange,
        stack: AsyncExitStack,
        *,
        listens: bool,
        endless: bool,
        max_event: int,
        last_bytes_s: float,
    ) -> None:
        self._repair = SurrogateRepair(max_event)
        self._last_bytes_s = last_bytes_s
        self._chunks = exchange.chunks(endless=endless)
        self._is_sse = exchange.content_type == SSE
        self._listens = listens
        self._endless = endless
        self._unsolicited = UnsolicitedLimit()
        self._stack = stack

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """If the connection breaks, the SDK reopens a GET stream, resumes the stream of a call if the server supports
        it, and fails only the one call of a plain reply."""
        has_data = False
        try:
            async for chunk in self._chunks:
                has_data = True
                yield self._repair.feed(chunk)
                if self._endless and self._unsolicited.is_exceeded_by(len(chunk)):
                    # Slows down this server only.
                    await asyncio.sleep(THROTTLE_S)
            yield self._repair.rest()
        except UpstreamError as error:
            if self._listens and has_data:
                return
            if not self._is_sse:
                raise httpx2.StreamError(error.message) from error
            if error.failure_kind is FailureKind.UNUSABLE:
                raise httpx2.SSEError(error.message) from error
            raise httpx2.ReadError(error.message) from error

    async def aclose(self) -> None:
        """A stream that was read to its end leaves its connection for the next call."""
        async with self._stack:
            if self._is_sse and not self._endless:
                with suppress(TimeoutError, UpstreamError):
                    async with asyncio.timeout(self._last_bytes_s):
                        async for _ in self._chunks:
                            pass


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _reply_headers(exchange: Exchange) -> dict[str, str]:
    return {name: value for name in REPLY_HEADERS if (value := exchange.header(name))}


async def _error_reply(request: httpx2.Request, exchange: Exchange) -> httpx2.Response:
    """The server's own JSON-RPC error, or one made from its status."""
    status = exchange.status
    try:
        body = await exchange.read()
    except UpstreamError:
        body = b""
    if MCP_SESSION_ID in request.headers and (status == 404 or (status == 400 and b"session" in body.lower())):
        return httpx2.Response(404)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        msgspec.json.decode(body, type=_ErrorReply)
        return httpx2.Response(status, headers=JSON, content=body)
    match status:
        case 401 | 403:
            sentence = f"The server rejected the request ({status}); check the configured headers"
        case 404:
            sentence = "There is no MCP server at this URL (404)"
        case 429:
            sentence = "The server's rate limit is exceeded (429)"
        case _:
            sentence = f"The server answered with an error ({status})"
    # Shortened where the secrets of the server are removed: the first part of one would not be recognised there.
    why = syft_wire.reason(_decoded(body), most=4 * MAX_QUOTED)
    return _failed(
        status, METHOD_NOT_FOUND if status == 404 else INTERNAL_ERROR, f"{sentence}: {why}" if why else f"{sentence}."
    )


def _decoded(body: bytes) -> object:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body)
    return None


def _failed(status: int, code: int, message: str) -> httpx2.Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return httpx2.Response(status, headers=JSON, content=msgspec.json.encode(error))
