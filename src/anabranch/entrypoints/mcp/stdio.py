"""MCP server over standard input and output, for the one client that started this process."""

import asyncio
import json
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.lowlevel import NotificationOptions
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from anabranch.app.anabranch import Anabranch
from anabranch.domain.mcp import Aggregation, McpServer
from anabranch.domain.rights import EVERY_GRANT
from anabranch.entrypoints.mcp.question_tools import McpCaller
from anabranch.entrypoints.mcp.server import ToolChanges, Tools, server
from anabranch.knowledge.model import Caller
from anabranch.telemetry.log import Log

STDIN, STDOUT, STDERR = 0, 1, 2
OPERATOR = Caller(operator=True)
DRAIN_S = 1.0
LISTEN = "subscriptions/listen"

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


class StdioServer:
    """The server of the one client that started this process, who is the operator."""

    def __init__(self, anabranch: Anabranch, log: Log) -> None:
        self._anabranch = anabranch
        self._tools = Tools(anabranch, log)
        self._changes = ToolChanges()
        self._server = server(self._tools, self._identify, self._changes)

    async def serve(self) -> None:
        """Serve until standard input ends, or until this is cancelled."""
        options = self._server.create_initialization_options(NotificationOptions(tools_changed=True))
        with _private_descriptors() as (source, sink):
            try:
                async with _streams(source, sink, self._anabranch.settings.max_request_bytes) as (incoming, outgoing):
                    await self._server.run(incoming, outgoing, options)
            except* anyio.BrokenResourceError:
                pass  # the SDK passed on a message while it was ending

    async def reconfigure(self, servers: Mapping[str, McpServer], aggregation: Aggregation) -> None:
        """Apply another configuration, and tell the client if it changes the tools."""
        before = self._tools.listed(OPERATOR, EVERY_GRANT)
        await self._anabranch.reconfigure(servers, aggregation)
        if self._tools.listed(OPERATOR, EVERY_GRANT) != before:
            await self._changes.announce()

    def _identify(self, _request: object) -> McpCaller:
        context = self._anabranch.context(surface="mcp", operator=True)
        return McpCaller(context, OPERATOR, EVERY_GRANT)


@contextmanager
def _private_descriptors() -> Iterator[tuple[int, int]]:
    """Duplicates of stdin and stdout. The originals are redirected: children and `print` cannot write to the client."""
    sys.stdout.flush()
    source, sink = os.dup(STDIN), os.dup(STDOUT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    os.dup2(STDERR, STDOUT)
    try:
        yield source, sink
    finally:
        # Not closed: a thread may still block on them, and another file must not get their numbers.
        os.dup2(source, STDIN)
        os.dup2(sink, STDOUT)


@asynccontextmanager
async def _streams(source: int, sink: int, max_line: int) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """Message streams for the SDK. Daemon threads read and write. The SDK's `stdio_server` was still running 10 s after
    SIGTERM, buffered a line of 200 MB, and did not answer it."""
    lines: asyncio.Queue[tuple[bytes | None, threading.Event]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    writing, pending = _Writer(sink), _Pending()
    read_in, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, write_out = anyio.create_memory_object_stream[SessionMessage](0)

    def put(line: bytes | None) -> None:
        """Blocks until the line is accepted: backpressure for a client that sends faster than it is served."""
        accepted = threading.Event()
        loop.call_soon_threadsafe(lines.put_nowait, (line, accepted))
        accepted.wait()

    async def receive() -> None:
        async with read_in:
            while True:
                line, accepted = await lines.get()
                accepted.set()
                if line is None:
                    await pending.wait_answered()
                    return
                message = _message(line, max_line)
                if isinstance(message, JSONRPCError):
                    await writing.write(message)
                elif message is not None:
                    pending.add(message.message)
                    await read_in.send(message)

    async def send() -> None:
        async with write_out:
            async for message in write_out:
                await writing.write(message.message)
                pending.remove(message.message)

    threading.Thread(target=_read, args=(source, max_line, put), name="mcp-stdin", daemon=True).start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        tasks.start_soon(send)
        yield incoming, outgoing
        tasks.cancel_scope.cancel()


def _read(source: int, max_line: int, put: Callable[[bytes | None], None]) -> None:
    """Passes on complete lines. Of a line over the limit it keeps only one byte more."""
    rest = bytearray()
    with suppress(RuntimeError):  # the event loop is closed
        while chunk := _chunk(source):
            if b"\n" in chunk:
                *whole, last = (bytes(rest) + chunk).split(b"\n")
                for line in whole:
                    put(line)
                rest = bytearray(last)
            else:
                rest += chunk
                del rest[max_line + 1 :]
        if rest:
            put(bytes(rest))
        put(None)


def _chunk(source: int) -> bytes:
    try:
        return os.read(source, 64 * 1024)
    except OSError:
        return b""


def _message(line: bytes, max_line: int) -> SessionMessage | JSONRPCError | None:
    """The message in a line; an error reply if it has none."""
    if not line.strip():
        return None
    if len(line) > max_line:
        return _error(None, INVALID_REQUEST, f"The line is longer than {max_line:,} bytes.")
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError:
        pass
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return _error(None, PARSE_ERROR, "The line is not JSON.")
    given = value.get("id") if isinstance(value, dict) else None
    request_id = given if isinstance(given, str | int) and not isinstance(given, bool) else None
    return _error(request_id, INVALID_REQUEST, "The line is not one JSON-RPC message.")


def _error(request_id: RequestId | None, code: int, message: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=code, message=message))


class _Pending:
    """Requests without a reply. They may finish after the end of stdin, which in a shell pipe comes at once. A
    subscription is not waited for: it lasts until the end."""

    def __init__(self) -> None:
        self._ids: set[RequestId] = set()
        self._all_answered = asyncio.Event()

    def add(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCRequest) and message.method != LISTEN:
            self._ids.add(message.id)

    def remove(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._ids.discard(message.id)
            if not self._ids:
                self._all_answered.set()

    async def wait_answered(self) -> None:
        self._all_answered.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._ids:
                    await self._all_answered.wait()
                    self._all_answered.clear()


class _Writer:
    """Writes lines in a thread. `write` returns when the line is written."""

    def __init__(self, sink: int) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="mcp-stdout", daemon=True).start()

    async def write(self, message: JSONRPCMessage) -> None:
        written: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n", written))
        await written

    def _work(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            while True:
                data, written = self._queue.get()
                with suppress(OSError):  # the client has closed the pipe; stdin ends, too
                    while data:
                        data = data[os.write(self._sink, data) :]
                self._loop.call_soon_threadsafe(_release, written)


def _release(written: "asyncio.Future[None]") -> None:
    if not written.done():
        written.set_result(None)
