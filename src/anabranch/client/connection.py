"""Requests to an Anabranch server: URLs, errors, retries, and the frames of one connection over SSE or WebSocket."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from anabranch.domain.errors import (
    AnabranchError,
    Conflict,
    FailureKind,
    Forbidden,
    InvalidQuestion,
    NotFound,
    RateLimited,
    StreamFull,
    StreamUnavailable,
    Unauthorized,
    UpstreamError,
)
from anabranch.domain.model import Value
from anabranch.network.sse import Frame, FrameParser

SUBPROTOCOL = "anabranch.planner"
ERRORS: dict[int, type[AnabranchError]] = {
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
NETWORK_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
# WebSocket close codes after which a new connection would end in the same way.
FATAL_CLOSE_CODES = (1002, 1003, 1007, 1008, 1009)
# 429, and what a proxy answers while the server behind it is down.
RETRYABLE_STATUSES = (429, 500, 502, 503, 504)
CLOSE_TIMEOUT_S = 1.0
# Five events of half a megabyte each, and some more.
MAX_EVENT_BYTES = 8 * 1024 * 1024
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
MAX_RETRY_AFTER_S = 3600


class Pace(Value):
    """Timing of reconnects. The client waits `first_s` (or what the server's `retry:` says), then twice as long each
    time, at most `most_s`, and gives up after `patience_s` without a frame. The server sends a heartbeat every
    `heartbeat_s`; three missing ones count as a lost connection."""

    first_s: float = 1.0
    most_s: float = 30.0
    patience_s: float = 120.0
    heartbeat_s: float = 15.0
    connect_s: float = 10.0

    @property
    def silence_s(self) -> float:
        return 3 * self.heartbeat_s


class ConnectionLost(Exception):
    """The connection ended or failed, and a retry may succeed. `wait_s` is the server's Retry-After; `clean` says that
    the server closed the connection in the regular way."""

    def __init__(self, reason: str, wait_s: float = 0.0, *, clean: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.clean = clean


class Reconnect:
    """Backoff between attempts. With `eager`, the first reconnect after a clean close is immediate: the stream may have
    ended, and only a request shows that."""

    def __init__(
        self,
        pace: Pace,
        *,
        eager: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace = pace
        self._eager = eager
        self._sleep = sleep
        self._jitter = jitter
        self._now = now
        self._first_s = pace.first_s
        self.succeeded()

    def succeeded(self) -> None:
        """A frame arrived: start over with the shortest wait."""
        self._failures = 0
        self._since: float | None = None

    def set_retry(self, retry_ms: int | None) -> None:
        """Use the server's `retry:` as the shortest wait."""
        if retry_ms is not None:
            self._first_s = retry_ms / 1000

    async def wait(self, lost: ConnectionLost) -> None:
        """Sleep at least as long as the server asks, with jitter."""
        at_once = self._eager and lost.clean and not self._failures
        backoff_s = 0.0 if at_once else min(self._first_s * 2**self._failures, self._pace.most_s)
        wait_s = max(backoff_s * (1 + self._jitter() / 2), lost.wait_s)
        self._failures = min(self._failures + 1, 16)
        now = self._now()
        # Counted from the first failure, not from the last frame: the caller may spend any time on a frame.
        self._since = now if self._since is None else self._since
        if now + wait_s > self._since + self._pace.patience_s:
            raise StreamUnavailable(f"The server could not be reached for too long: {lost}")
        await self._sleep(wait_s)

    async def frames(self, connect: Callable[[], AsyncGenerator[Frame]]) -> AsyncGenerator[Frame]:
        """The frames of one connection after another, until one ends without ConnectionLost."""
        while True:
            try:
                async with aclosing(connect()) as frames:
                    async for frame in frames:
                        self.succeeded()
                        yield frame
            except ConnectionLost as lost:
                await self.wait(lost)
            else:
                return


class HttpReply(Value):
    status: int
    body: bytes


class ServerConnection:
    """One server and one API key. It closes only a session that it created itself."""

    def __init__(self, base_url: str, key: str | None, session: aiohttp.ClientSession | None, pace: Pace) -> None:
        self.pace = pace
        self._base = base_url.rstrip("/")
        self._owns_session = session is None
        self._current = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._current is None:
            self._current = aiohttp.ClientSession()
        return self._current

    async def close(self) -> None:
        if self._owns_session and self._current is not None:
            await self._current.close()

    def url(self, *segments: str) -> URL:
        """Each segment is one segment of the path, whatever characters it has."""
        return URL("/".join((self._base, *(quote(segment, safe="") for segment in segments))), encoded=True)

    async def call(
        self, method: str, url: URL, body: object = None, *, repeatable: bool, params: Mapping[str, str] | None = None
    ) -> HttpReply:
        """One request and its reply. A repeatable request is retried until it succeeds."""
        reconnect = Reconnect(self.pace)
        while True:
            try:
                return await self._call_once(method, url, body, params)
            except ConnectionLost as lost:
                if not repeatable:
                    raise StreamUnavailable(f"The request failed: {lost}") from lost
                await reconnect.wait(lost)

    async def _call_once(self, method: str, url: URL, body: object, params: Mapping[str, str] | None) -> HttpReply:
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        options = {**self._options(self.pace.patience_s), "params": params, "headers": headers}
        try:
            async with self._session.request(method, url, data=data, **options) as response:
                if response.status >= 300:
                    raise await response_error(response)
                return HttpReply(status=response.status, body=await _read(response, MAX_REPLY_BYTES))
        except NETWORK_ERRORS as error:
            raise ConnectionLost(_description(error)) from error

    async def listen(self, url: URL, after: int, reconnect: Reconnect) -> AsyncGenerator[Frame]:
        """The events after the cursor, over SSE. It returns only when the stream has ended (204)."""
        headers = {**self._headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        if after:
            headers["Last-Event-ID"] = str(after)
        try:
            async with self._session.get(url, headers=headers, **self._options(self.pace.silence_s)) as response:
                if response.status == 204:
                    return
                async with aclosing(self.frames(response, reconnect)) as frames:
                    async for frame in frames:
                        yield frame
        except NETWORK_ERRORS as error:
            raise ConnectionLost(_description(error)) from error
        raise ConnectionLost("the server ended the connection", clean=True)

    async def ask(self, url: URL, body: object) -> aiohttp.ClientResponse:
        """The response to a question that asks for a resumable answer; the caller closes it."""
        headers = {**self._headers, "Prefer": "resumable", "Content-Type": "application/json"}
        headers["Accept"] = "text/event-stream"
        data = msgspec.json.encode(body)
        try:
            response = await self._session.post(url, data=data, headers=headers, **self._options(self.pace.silence_s))
            if response.status != 200:
                async with response:
                    raise await response_error(response)
        except NETWORK_ERRORS as error:
            raise StreamUnavailable(f"The question could not be sent: {_description(error)}") from error
        except ConnectionLost as lost:
            raise StreamUnavailable(str(lost)) from lost
        return response

    async def answer(
        self, response: aiohttp.ClientResponse, reconnect: Reconnect, *, resumable: bool
    ) -> AsyncGenerator[Frame]:
        """The frames on the question's own connection. The rest of a resumable answer can be fetched later."""
        try:
            async with response, aclosing(self.frames(response, reconnect)) as frames:
                async for frame in frames:
                    yield frame
        except NETWORK_ERRORS as error:
            if resumable:
                raise ConnectionLost(_description(error)) from error
            raise StreamUnavailable("The answer was cut off, and the server has not stored it.") from error
        if resumable:
            raise ConnectionLost("the server ended the connection", clean=True)

    async def frames(self, response: aiohttp.ClientResponse, reconnect: Reconnect) -> AsyncGenerator[Frame]:
        if response.status != 200:
            raise await response_error(response)
        if response.content_type != "text/event-stream":
            raise UpstreamError("The server did not answer with a stream.", FailureKind.UNUSABLE)
        parser = FrameParser(MAX_EVENT_BYTES)
        async for chunk in response.content.iter_any():
            for frame in parser.feed(chunk):
                yield frame
            reconnect.set_retry(parser.retry_ms)

    async def listen_ws(self, url: URL, after: int) -> AsyncGenerator[Frame]:
        """The events after the cursor, over a WebSocket. It returns only when the stream has ended (1000)."""
        timeout = aiohttp.ClientWSTimeout(ws_receive=self.pace.silence_s, ws_close=CLOSE_TIMEOUT_S)
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
                        raise UpstreamError("The server sent a message that is not text.", FailureKind.UNUSABLE)
                    yield Frame(event="message", data=message.data)
                code = socket.close_code
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 204:
                return
            raise status_error(error.status, b"", error.headers or {}) from error
        except NETWORK_ERRORS as error:
            raise ConnectionLost(_description(error)) from error
        if code in FATAL_CLOSE_CODES:
            raise UpstreamError(f"The server closed the connection with {code}.", FailureKind.UNUSABLE)
        if code != 1000:
            raise ConnectionLost(f"the server closed the connection with {code}")

    def _options(self, read_timeout_s: float) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.pace.connect_s, sock_read=read_timeout_s)
        return {"timeout": timeout, "allow_redirects": False}


class StreamClient:
    """Use it as `async with`, or pass a session of your own and close that yourself."""

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        session: aiohttp.ClientSession | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._server = ServerConnection(base_url, key, session, pace or Pace())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()


async def response_error(response: aiohttp.ClientResponse) -> Exception:
    return status_error(response.status, await _read(response, MAX_ERROR_BYTES), response.headers)


def status_error(status: int, body: bytes, headers: Mapping[str, str]) -> Exception:
    """ConnectionLost if a retry may succeed, else the error that the server reported."""
    try:
        message = str(msgspec.json.decode(body)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"The server answered with status {status}."
    if status in RETRYABLE_STATUSES:
        # In seconds: our servers never send a date.
        retry_after = headers.get("Retry-After", "")
        is_number = retry_after.isascii() and retry_after.isdigit()
        return ConnectionLost(message, min(float(retry_after), MAX_RETRY_AFTER_S) if is_number else 0.0)
    return ERRORS[status](message) if status in ERRORS else UpstreamError(message, FailureKind.UNUSABLE)


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > limit:
            raise UpstreamError("The server's reply is too long.", FailureKind.UNUSABLE)
    return bytes(content)


def _description(error: BaseException) -> str:
    """The kind of failure, without the request and its headers."""
    return "the server sent nothing for too long" if isinstance(error, TimeoutError) else type(error).__name__
