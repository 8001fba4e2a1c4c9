"""Requests to an Anabranch: its addresses, its refusals, and one connection's frames over SSE or WebSocket."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from anabranch.client.reconnect import ConnectionLost, Pace, Reconnect
from anabranch.client.sse import MAX_EVENT_BYTES, Frame, FrameParser
from anabranch.domain.errors import (
    AnabranchError,
    Conflict,
    Forbidden,
    InvalidQuestion,
    NotFound,
    RateLimited,
    StreamFull,
    StreamUnavailable,
    Trouble,
    Unauthorized,
    UpstreamError,
)
from anabranch.domain.model import Value

SUBPROTOCOL = "anabranch.planner"
REFUSALS: dict[int, type[AnabranchError]] = {
    400: InvalidQuestion,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: StreamFull,
    422: InvalidQuestion,
    429: RateLimited,
    503: StreamUnavailable,
}
# What the other side closes with when coming back would only bring the same again.
HOPELESS = (1002, 1003, 1007, 1008, 1009)
# Status 429 and whatever a proxy says while the server behind it is away.
MAY_PASS = (429, 500, 502, 503, 504)
# How long a WebSocket's closing waits for the other side's.
GOODBYE_S = 1.0
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_REFUSAL_BYTES = 64 * 1024
# A larger one than this is no advice.
MAX_RETRY_AFTER_S = 3600


class HttpReply(Value):
    status: int
    body: bytes


class ServerConnection:
    """One server, as one caller reaches it. A session that was given is not closed here."""

    def __init__(self, base_url: str, key: str | None, session: aiohttp.ClientSession | None, pace: Pace) -> None:
        self.pace = pace
        self._base = base_url.rstrip("/")
        self._given = session
        self._own: aiohttp.ClientSession | None = None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = aiohttp.ClientSession()
        return self._own

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()

    def address(self, *parts: str) -> URL:
        """Each part is one segment of the path, whatever it is made of."""
        return URL("/".join((self._base, *(quote(part, safe="") for part in parts))), encoded=True)

    async def call(
        self, method: str, url: URL, body: object = None, *, repeatable: bool, params: Mapping[str, str] | None = None
    ) -> HttpReply:
        """One request and its reply. If it may be sent twice, it is sent until it gets through."""
        comeback = Reconnect(self.pace)
        while True:
            try:
                return await self._called(method, url, body, params)
            except ConnectionLost as cut:
                if not repeatable:
                    raise StreamUnavailable(f"The request did not get through: {cut}") from cut
                await comeback.wait(cut)

    async def _called(self, method: str, url: URL, body: object, params: Mapping[str, str] | None) -> HttpReply:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.pace.connect_s, sock_read=self.pace.patience_s)
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        options: dict[str, Any] = {"params": params, "timeout": timeout, "allow_redirects": False}
        try:
            async with self._session.request(method, url, data=data, headers=headers, **options) as response:
                if response.status >= 300:
                    raise await refused(response)
                content = await _capped(response, MAX_REPLY_BYTES)
                return HttpReply(status=response.status, body=content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLost(_named(error)) from error

    async def listen(self, url: URL, after: int, comeback: Reconnect) -> AsyncGenerator[Frame]:
        """What stands behind the cursor, over SSE. It ends only when the stream is over (204)."""
        headers = {**self._headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        if after:
            headers["Last-Event-ID"] = str(after)
        try:
            async with self._session.get(url, headers=headers, **self._streaming()) as response:
                if response.status == 204:
                    return
                async with aclosing(self.frames(response, comeback)) as frames:
                    async for frame in frames:
                        yield frame
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLost(_named(error)) from error
        raise ConnectionLost("the server ended the connection", clean=True)

    async def asked(self, url: URL, body: object) -> aiohttp.ClientResponse:
        """The response to a question that asks for a resumable answer; the caller closes it."""
        headers = {**self._headers, "Prefer": "resumable", "Content-Type": "application/json"}
        headers["Accept"] = "text/event-stream"
        data = msgspec.json.encode(body)
        try:
            response = await self._session.post(url, data=data, headers=headers, **self._streaming())
            if response.status != 200:
                async with response:
                    raise await refused(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamUnavailable(f"The question did not get through: {_named(error)}") from error
        except ConnectionLost as cut:
            raise StreamUnavailable(str(cut)) from cut
        return response

    async def answered(
        self, response: aiohttp.ClientResponse, comeback: Reconnect, *, kept: bool
    ) -> AsyncGenerator[Frame]:
        """What comes on the connection of the question itself. If the answer is kept, there may be more elsewhere."""
        try:
            async with response, aclosing(self.frames(response, comeback)) as frames:
                async for frame in frames:
                    yield frame
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if kept:
                raise ConnectionLost(_named(error)) from error
            raise StreamUnavailable("The answer was cut off, and the server had not kept it.") from error
        if kept:
            raise ConnectionLost("the server ended the connection", clean=True)

    async def frames(self, response: aiohttp.ClientResponse, comeback: Reconnect) -> AsyncGenerator[Frame]:
        if response.status != 200:
            raise await refused(response)
        if response.content_type != "text/event-stream":
            raise UpstreamError("The server did not answer with a stream.", Trouble.UNUSABLE)
        parser = FrameParser()
        async for chunk in response.content.iter_any():
            for frame in parser.feed(chunk):
                yield frame
            comeback.told(parser.retry_ms)

    async def listen_ws(self, url: URL, after: int) -> AsyncGenerator[Frame]:
        """The same over a WebSocket. It ends only when the stream is over (1000)."""
        timeout = aiohttp.ClientWSTimeout(ws_receive=self.pace.silence_s, ws_close=GOODBYE_S)
        try:
            async with self._session.ws_connect(
                url,
                params={"last_event_id": str(after)} if after else None,
                headers=self._headers,
                protocols=(SUBPROTOCOL,),
                timeout=timeout,
                max_msg_size=MAX_EVENT_BYTES,
            ) as socket:
                async for message in socket:
                    if message.type is not aiohttp.WSMsgType.TEXT:
                        raise UpstreamError("The server sent what is not text.", Trouble.UNUSABLE)
                    yield Frame(event="message", data=message.data)
                code = socket.close_code
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 204:
                return
            raise refusal(error.status, b"", error.headers or {}) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionLost(_named(error)) from error
        if code in HOPELESS:
            raise UpstreamError(f"The server closed the connection with {code}.", Trouble.UNUSABLE)
        if code != 1000:
            raise ConnectionLost(f"the server closed the connection with {code}")

    def _streaming(self) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.pace.connect_s, sock_read=self.pace.silence_s)
        return {"timeout": timeout, "allow_redirects": False}


async def refused(response: aiohttp.ClientResponse) -> Exception:
    return refusal(response.status, await _capped(response, MAX_REFUSAL_BYTES), response.headers)


def refusal(status: int, body: bytes, headers: Mapping[str, str]) -> Exception:
    """What a status means: a Cut if it may pass, else the error that the server had."""
    try:
        said = msgspec.json.decode(body)["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        said = f"The server answered with status {status}."
    if status in MAY_PASS:
        return ConnectionLost(str(said), _retry_after_s(headers.get("Retry-After", "")))
    if kind := REFUSALS.get(status):
        return kind(str(said))
    return UpstreamError(str(said), Trouble.UNUSABLE)


def _retry_after_s(value: str) -> float:
    """Seconds; a date is not what our servers send, and counts as nothing said."""
    return min(float(value), MAX_RETRY_AFTER_S) if value.isascii() and value.isdigit() else 0.0


async def _capped(response: aiohttp.ClientResponse, most: int) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > most:
            raise UpstreamError("The server's reply is too long.", Trouble.UNUSABLE)
    return bytes(content)


def _named(error: BaseException) -> str:
    """What happened, without the request that it happened to."""
    return "nothing came for too long" if isinstance(error, TimeoutError) else f"{type(error).__name__}"
