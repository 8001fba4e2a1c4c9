"""Frames of MCP transports: limits on size, and a tap that reads what passes."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, Self, TypeVar

import anyio
from mcp.client._transport import ReadStream, TransportStreams, WriteStream
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    REQUEST_TIMEOUT,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from anabranch.domain.errors import UpstreamError
from anabranch.network.surrogates import repair_surrogates

S = TypeVar("S", ReadStream[SessionMessage | Exception], WriteStream[SessionMessage])


class SurrogateRepair:
    """Repairs a stream of chunks, line by line. A line longer than `limit` bytes is passed on unchanged; its reader
    rejects it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not end and len(self._pending) + len(chunk) <= self._limit:
            self._pending += chunk
            return b""
        whole = bytes(self._pending) + chunk[: end or None]
        self._pending = bytearray(chunk[end:] if end else b"")
        return repair_surrogates(whole) if end else whole

    def rest(self) -> bytes:
        return repair_surrogates(bytes(self._pending))


MAX_OUTPUT_LINE = 2_000
BURST, PER_S = 100, 20.0
# Limit of unsolicited data: in lines, plus one for each kilobyte.
UNSOLICITED_BURST, UNSOLICITED_PER_S = 10_000.0, 500.0


class LineBuffer:
    """Joins chunks into lines. With `cap`, the rest of a longer line is dropped."""

    def __init__(self, cap: int | None = None) -> None:
        self._cap = cap
        self._pending = bytearray()

    @property
    def pending_bytes(self) -> int:
        return len(self._pending)

    def rest(self) -> list[bytes]:
        """The text after the last line end."""
        return [bytes(self._pending)] if self._pending else []

    def feed(self, chunk: bytes) -> list[bytes]:
        first, *more = chunk.split(b"\n")
        self._pending += first if self._cap is None else first[: max(0, self._cap - self.pending_bytes)]
        if not more:
            return []
        lines = [bytes(self._pending), *more[:-1]]
        self._pending = bytearray(more[-1])
        return lines


class OutputLimiter:
    """Passes on printable lines of a process's output, at a limited rate."""

    def __init__(self, on_output: Callable[[str], None]) -> None:
        self._on_output = on_output
        self._left = float(BURST)
        self._at = time.monotonic()
        self._dropped = 0

    def __call__(self, line: bytes) -> None:
        now = time.monotonic()
        self._left = min(BURST, self._left + (now - self._at) * PER_S)
        self._at = now
        if self._left < 1:
            self._dropped += 1
            return
        if self._dropped:
            self._on_output(f"({self._dropped:,} lines dropped.)")
            self._dropped = 0
        text = line[: 4 * MAX_OUTPUT_LINE].decode("utf-8", "replace")[:MAX_OUTPUT_LINE].rstrip()
        if text:
            self._left -= 1
            self._on_output("".join(character if character.isprintable() else " " for character in text))


class UnsolicitedLimit:
    """Rate limit of data that is not the reply to a request."""

    def __init__(self) -> None:
        self._left = UNSOLICITED_BURST
        self._at = time.monotonic()

    def is_exceeded_by(self, size: int) -> bool:
        """Whether a line of so many bytes exceeds the limit now."""
        now = time.monotonic()
        self._left = min(UNSOLICITED_BURST, self._left + (now - self._at) * UNSOLICITED_PER_S) - 1 - size / 1024
        self._at = now
        return self._left < 0


class RawReply(dict[str, Any]):
    """An empty object to the SDK, which carries a tool's reply past it: the SDK rejects replies that violate the
    protocol, although much of them is usable."""

    def __init__(self, reply: dict[str, Any]) -> None:
        super().__init__()
        self.reply = reply


@asynccontextmanager
async def tapped(
    transport: AbstractAsyncContextManager[TransportStreams],
    on_message: Callable[[], None],
    on_end: Callable[[str], None],
) -> AsyncIterator[TransportStreams]:
    """Calls `on_message` for every received message, and `on_end` at the end, with the reason if it is known."""
    calls: set[RequestId] = set()
    async with transport as (read, write):
        yield _TappedReader(read, calls, on_message, on_end), _TappedWriter(write, calls)


class _TappedStream(Generic[S]):
    """A stream of the transport; `calls` are the ids of the tool calls that wait for a reply."""

    def __init__(self, stream: S, calls: set[RequestId]) -> None:
        self._stream: S = stream
        self._calls = calls

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _TappedWriter(_TappedStream[WriteStream[SessionMessage]]):
    async def send(self, item: SessionMessage, /) -> None:
        match item.message:
            case JSONRPCRequest(method="tools/call") as request:
                self._calls.add(coerce_request_id(request.id))
            case JSONRPCNotification(method="notifications/cancelled") as notice:
                if (cancelled := cancelled_request_id_from_params(notice.params)) is not None:
                    self._calls.discard(coerce_request_id(cancelled))
        await self._stream.send(item)


class _TappedReader(_TappedStream[ReadStream[SessionMessage | Exception]]):
    def __init__(
        self,
        stream: ReadStream[SessionMessage | Exception],
        calls: set[RequestId],
        on_message: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(stream, calls)
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
            self._tap(item.message)
        elif isinstance(item, UpstreamError):
            self._on_end(item.message)
        return item

    def _tap(self, message: JSONRPCMessage) -> None:
        # Errors with these codes come from our HTTP transport, for a request that failed.
        if not isinstance(message, JSONRPCError) or message.error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            self._on_message()
        if not isinstance(message, JSONRPCResponse | JSONRPCError) or message.id is None:
            return
        identifier = coerce_request_id(message.id)
        if isinstance(message, JSONRPCResponse) and identifier in self._calls:
            message.result = {
                "content": [],
                "structuredContent": RawReply(message.result),
                "resultType": "complete",
            }
        self._calls.discard(identifier)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
