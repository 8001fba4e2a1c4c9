"""A transport that is listened in on: when something came, when nothing will any more, and what a tool really replied.
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


class SealedTransport(dict[str, Any]):
    """To the SDK an empty object. It refuses replies that break the protocol's rules, where much of them could still be
    read; so what a tool replied goes past it in here."""

    def __init__(self, reply: dict[str, Any]) -> None:
        super().__init__()
        self.reply = reply


class TappedTransport:
    """`heard` is told of everything that is received, `ended` of the end and of why, if the transport knows."""

    def __init__(
        self,
        transport: AbstractAsyncContextManager[TransportStreams],
        heard: Callable[[], None],
        ended: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._heard = heard
        self._ended = ended

    async def __aenter__(self) -> TransportStreams:
        read, write = await self._transport.__aenter__()
        calls: set[RequestId] = set()
        return _Ear(read, calls, self._heard, self._ended), _Mouth(write, calls)

    async def __aexit__(self, *why: Any) -> bool | None:
        return await self._transport.__aexit__(*why)


class _Mouth:
    """Remembers which requests are calls of a tool, for as long as somebody waits for the reply."""

    def __init__(self, stream: WriteStream[SessionMessage], calls: set[RequestId]) -> None:
        self._stream = stream
        self._calls = calls

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

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Ear:
    def __init__(
        self,
        stream: ReadStream[SessionMessage | Exception],
        calls: set[RequestId],
        heard: Callable[[], None],
        ended: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._calls = calls
        self._heard = heard
        self._ended = ended

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        try:
            item = await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._ended("")
            raise
        if isinstance(item, SessionMessage):
            if not _is_ours(item):
                self._heard()
            self._seal(item)
        elif isinstance(item, UpstreamError):
            self._ended(item.message)
        return item

    def _seal(self, item: SessionMessage) -> None:
        message = item.message
        if not isinstance(message, JSONRPCResponse | JSONRPCError) or message.id is None:
            return
        identifier = coerce_request_id(message.id)
        if identifier in self._calls:
            self._calls.discard(identifier)
            if isinstance(message, JSONRPCResponse):
                sealed = SealedTransport(message.result)
                message.result = {"content": [], "structuredContent": sealed, "resultType": "complete"}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _is_ours(item: SessionMessage) -> bool:
    """Over HTTP a call that cannot be made is answered on our side."""
    message = item.message
    return isinstance(message, JSONRPCError) and message.error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT)
