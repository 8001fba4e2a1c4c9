"""An MCP server at a URL: the SDK's HTTP goes out through the one guarded client, like everything else."""

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
from anabranch.domain.errors import Trouble, UpstreamError, UpstreamTimedOut
from anabranch.domain.mcp import McpServer
from anabranch.network import syft_wire
from anabranch.network.redaction import MAX_QUOTED
from anabranch.sources.mcp.framing import SurrogateRepair, UnsolicitedText

MAX_EVENT = 16 * 1024 * 1024
NOTICE_S = 5.0
FAREWELL_S = 1.0
LAST_BYTES_S = 0.02
LISTEN_GAP_S = 0.25
SLOWER_S = 0.1
FRAMING = frozenset({"accept-encoding", "connection", "content-length", "transfer-encoding"})
# The HTTP library's own, in place of which the one client has others.
UNSENT = FRAMING | {"host", "user-agent"}
TAKEN = ("content-type", "location", MCP_SESSION_ID, "retry-after", "www-authenticate")
EVENTS = "text/event-stream"
LISTEN = "subscriptions/listen"
JSON = {"content-type": "application/json"}


class _Head(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"")
    method: str = ""


class _Fault(msgspec.Struct):
    code: int
    message: str


class _Refusal(msgspec.Struct):
    error: _Fault


@asynccontextmanager
async def web(server: McpServer, outbound: Outbound, *, max_event: int = MAX_EVENT) -> AsyncIterator[TransportStreams]:
    """Talks to the server's URL for as long as the context lasts. A reply is capped by the client, and each event of a
    stream that is listened to by `max_event`. A session that the server has forgotten is an MCPError with the code
    INVALID_REQUEST and the message `Session terminated`, in whatever words the server says it."""
    assert server.url is not None
    transport = OverOutbound(server, outbound, max_event=max_event)
    async with (
        httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=max_event) as streams,
    ):
        yield streams


class OverOutbound(httpx2.AsyncBaseTransport):
    """The SDK's requests to one server. A call that fails is answered in the server's stead, with a JSON-RPC error that
    says why: an exception would end the connection, and every other call with it."""

    def __init__(self, server: McpServer, outbound: Outbound, *, max_event: int = MAX_EVENT) -> None:
        self._max_event = max_event
        self._origin = _origin(httpx2.URL(server.url or ""))
        self._headers = {name.title(): value for name, value in server.headers.items() if name.lower() not in FRAMING}
        self._outbound = outbound
        self._listens_at = 0.0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        patience_s = _patience_s(request, body)
        try:
            if _origin(request.url) != self._origin:
                raise UpstreamError("It redirects to another address, which is not followed.")
            if request.method == "GET":
                await self._paced()
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(patience_s):
                    call = self._outbound.request(
                        request.method, str(request.url), headers=self._sent(request), body=body or None, operator=True
                    )
                    exchange = await stack.enter_async_context(call)
                if patience_s is not None:
                    return httpx2.Response(exchange.status, headers=_taken(exchange))
                if request.method == "POST" and exchange.status >= 400:
                    return await _refused(request, exchange)
                return _streamed(request, exchange, stack.pop_all(), self._max_event)
        except TimeoutError:
            return _failed(504, REQUEST_TIMEOUT, "It did not answer in time.")
        except UpstreamTimedOut as error:
            return _failed(504, REQUEST_TIMEOUT, error.message)
        except UpstreamError as error:
            return _failed(502, CONNECTION_CLOSED, error.message)

    def _sent(self, request: httpx2.Request) -> dict[str, str]:
        """What the protocol needs goes before what is configured; all in the one client's way of writing names."""
        given = {name.title(): value for name, value in request.headers.items() if name not in UNSENT}
        return {**self._headers, **given}

    async def _paced(self) -> None:
        """A server that ends at once whatever is listened to must not keep us busy."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._listens_at)
        self._listens_at = at + LISTEN_GAP_S
        await asyncio.sleep(at - now)


class _Body(httpx2.AsyncByteStream):
    """A reply's body as it comes; closing it closes the connection, unless nothing was left to read."""

    def __init__(
        self, exchange: Exchange, stack: AsyncExitStack, *, listens: bool, endless: bool, max_event: int
    ) -> None:
        self._mending = SurrogateRepair(max_event)
        self._chunks = exchange.chunks(endless=endless)
        self._is_events = exchange.content_type == EVENTS
        self._listens = listens
        self._endless = endless
        self._unasked = UnsolicitedText()
        self._stack = stack

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What breaks off is what the SDK then makes the best of: a stream that is only listened to is over and taken
        up again, a call's stream is taken up if the server can, and a plain reply fails its call and no other."""
        heard = False
        try:
            async for chunk in self._chunks:
                heard = True
                yield self._mending.mended(chunk)
                if self._endless and self._unasked.is_too_much(len(chunk)):
                    # It waits for us then, and nobody else does.
                    await asyncio.sleep(SLOWER_S)
            yield self._mending.rest()
        except UpstreamError as error:
            if self._listens and heard:
                return
            if not self._is_events:
                raise httpx2.StreamError(error.message) from error
            if error.trouble is Trouble.UNUSABLE:
                raise httpx2.SSEError(error.message) from error
            raise httpx2.ReadError(error.message) from error

    async def aclose(self) -> None:
        """A stream that was read to its very end leaves its connection for the next call."""
        async with self._stack:
            if self._is_events and not self._endless:
                with suppress(TimeoutError, UpstreamError):
                    async with asyncio.timeout(LAST_BYTES_S):
                        async for _ in self._chunks:
                            pass


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _patience_s(request: httpx2.Request, body: bytes) -> float | None:
    """How long to wait for a reply of which only the status matters; None for any other, whose caller knows. The SDK
    sends nothing else before such a reply is here."""
    if request.method == "DELETE":
        return FAREWELL_S
    if request.method != "POST":
        return None
    head = msgspec.json.decode(body, type=_Head)
    return None if head.id and head.method else NOTICE_S


def _streamed(request: httpx2.Request, exchange: Exchange, stack: AsyncExitStack, max_event: int) -> httpx2.Response:
    listens = request.method == "GET"
    endless = exchange.content_type == EVENTS and (listens or request.headers.get(MCP_METHOD_HEADER) == LISTEN)
    body = _Body(exchange, stack, listens=listens, endless=endless, max_event=max_event)
    return httpx2.Response(exchange.status, headers=_taken(exchange), stream=body)


def _taken(exchange: Exchange) -> dict[str, str]:
    return {name: said for name in TAKEN if (said := exchange.header(name))}


async def _refused(request: httpx2.Request, exchange: Exchange) -> httpx2.Response:
    """A refusal in the server's own JSON-RPC, if it is that, and otherwise in a sentence."""
    status = exchange.status
    try:
        body = await exchange.read()
    except UpstreamError:
        body = b""
    if MCP_SESSION_ID in request.headers and (status == 404 or (status == 400 and b"session" in body.lower())):
        return httpx2.Response(404)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        msgspec.json.decode(body, type=_Refusal)
        return httpx2.Response(status, headers=JSON, content=body)
    match status:
        case 401 | 403:
            sentence = f"It refused the request ({status}); check the headers that are configured for it"
        case 404:
            sentence = "It has nothing at this URL (404)"
        case 429:
            sentence = "It is asked too often (429)"
        case _:
            sentence = f"It answered with an error ({status})"
    # It is shortened where the server's own secrets are removed: the beginning of one would not be recognised there.
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
