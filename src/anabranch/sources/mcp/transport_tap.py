"""Wraps a transport of the SDK: reports received messages and the end, and keeps the raw replies of tools.
It imports the SDK, so it is loaded late."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

import anyio
from mcp.client._transport import ReadStream, TransportStreams, WriteStream
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    REQUEST_TIMEOUT,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from anabranch.domain.errors import UpstreamError


class RawReply(dict[str, Any]):
    """An empty object to the SDK, which carries a tool's reply past it: the SDK rejects replies that violate the
    protocol, although much of them is usable."""

    def __init__(self, reply: dict[str, Any]) -> None:
        super().__init__()
        self.reply = reply


class TappedTransport:
    """Calls `on_message` for every received message, and `on_end` at the end, with the reason if it is known."""

    def __init__(
        self,
        transport: AbstractAsyncContextManager[TransportStreams],
        on_message: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._on_message = on_message
        self._on_end = on_end

    async def __aenter__(self) -> TransportStreams:
        read, write = await self._transport.__aenter__()
        calls: set[RequestId] = set()
        return _TappedReader(read, calls, self._on_message, self._on_end), _TappedWriter(write, calls)

    async def __aexit__(self, *why: Any) -> bool | None:
        return await self._transport.__aexit__(*why)


class _TappedStream:
    """A stream of the transport; `calls` are the ids of the tool calls that wait for a reply."""

    def __init__(
        self, stream: ReadStream[SessionMessage | Exception] | WriteStream[SessionMessage], calls: set[RequestId]
    ) -> None:
        self._closed_stream = stream
        self._calls = calls

    async def aclose(self) -> None:
        await self._closed_stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _TappedWriter(_TappedStream):
    def __init__(self, stream: WriteStream[SessionMessage], calls: set[RequestId]) -> None:
        super().__init__(stream, calls)
        self._stream = stream

    async def send(self, item: SessionMessage, /) -> None:
        match item.message:
            case JSONRPCRequest(method="tools/call") as request:
                self._calls.add(coerce_request_id(request.id))
            case JSONRPCNotification(method="notifications/cancelled") as notice:
                if (cancelled := cancelled_request_id_from_params(notice.params)) is not None:
                    self._calls.discard(coerce_request_id(cancelled))
            case _:
                pass
        await self._stream.send(item)


class _TappedReader(_TappedStream):
    def __init__(
        self,
        stream: ReadStream[SessionMessage | Exception],
        calls: set[RequestId],
        on_message: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(stream, calls)
        self._stream = stream
        self._on_message = on_message
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        try:
            item = await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._on_end("")
            raise
        if isinstance(item, SessionMessage):
            if not _is_local_error(item):
                self._on_message()
            self._wrap_reply(item)
        elif isinstance(item, UpstreamError):
            self._on_end(item.message)
        return item

    def _wrap_reply(self, item: SessionMessage) -> None:
        message = item.message
        if not isinstance(message, JSONRPCResponse | JSONRPCError) or message.id is None:
            return
        identifier = coerce_request_id(message.id)
        if identifier in self._calls:
            self._calls.discard(identifier)
            if isinstance(message, JSONRPCResponse):
                raw = RawReply(message.result)
                message.result = {"content": [], "structuredContent": raw, "resultType": "complete"}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


def _is_local_error(item: SessionMessage) -> bool:
    """Whether our HTTP transport made it, for a request that failed."""
    message = item.message
    return isinstance(message, JSONRPCError) and message.error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT)
