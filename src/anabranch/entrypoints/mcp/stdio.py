"""MCP over standard input and output: one client, which has started this process."""

import asyncio
import json
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
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

from anabranch.app import Anabranch
from anabranch.entrypoints.mcp.question_tools import McpCaller
from anabranch.entrypoints.mcp.server import server
from anabranch.knowledge.model import Caller
from anabranch.telemetry.log import Log

SURFACE = "mcp"
PIECE = 64 * 1024
STDIN, STDOUT, STDERR = 0, 1, 2
LAST_WORDS_S = 1.0

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


async def serve(anabranch: Anabranch, log: Log) -> None:
    """Until standard input ends. Whoever has started this process is its operator."""

    def asker(_request: object) -> McpCaller:
        return McpCaller(anabranch.context(surface=SURFACE, operator=True), Caller(operator=True), vouched=True)

    made = server(anabranch, log, asker)
    with _claimed() as (source, sink):
        async with _streams(source, sink, anabranch.settings.max_request_bytes) as (incoming, outgoing):
            await made.run(incoming, outgoing, made.create_initialization_options())


@contextmanager
def _claimed() -> Iterator[tuple[int, int]]:
    """The two ends of the wire, under numbers that nobody else knows: children and stray prints must not reach it."""
    sys.stdout.flush()
    source, sink = os.dup(STDIN), os.dup(STDOUT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    os.dup2(STDERR, STDOUT)
    try:
        yield source, sink
    finally:
        # Not closed: a thread may still wait at them, and another file must not get their numbers.
        os.dup2(source, STDIN)
        os.dup2(sink, STDOUT)


@asynccontextmanager
async def _streams(source: int, sink: int, max_line: int) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """The wire as the SDK wants it. Reading and writing block, in threads that do not outlive the program: the SDK's
    own could neither be stopped by a signal nor bounded, and leaves what it cannot read unanswered."""
    lines: asyncio.Queue[tuple[bytes | None, threading.Event]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    writing, pending = _Writer(sink), _Pending()
    read_in, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, write_out = anyio.create_memory_object_stream[SessionMessage](0)

    def put(line: bytes | None) -> None:
        """Waits until the line is taken on: a client that sends faster than it is served must wait, too."""
        taken = threading.Event()
        loop.call_soon_threadsafe(lines.put_nowait, (line, taken))
        taken.wait()

    async def receive() -> None:
        async with read_in:
            while True:
                line, taken = await lines.get()
                taken.set()
                if line is None:
                    await pending.over()
                    return
                message = _message(line, max_line)
                if isinstance(message, JSONRPCError):
                    await writing.write(message)
                elif message is not None:
                    pending.asked(message.message)
                    await read_in.send(message)

    async def send() -> None:
        async with write_out:
            async for message in write_out:
                await writing.write(message.message)
                pending.answered(message.message)

    threading.Thread(target=_read, args=(source, max_line, put), name="mcp-stdin", daemon=True).start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        tasks.start_soon(send)
        yield incoming, outgoing
        tasks.cancel_scope.cancel()


def _read(source: int, max_line: int, put: Callable[[bytes | None], None]) -> None:
    """Lines, as they come; one that is too long is not kept beyond that."""
    rest = bytearray()
    with suppress(RuntimeError):  # the loop has gone
        while piece := _piece(source):
            if b"\n" in piece:
                *whole, last = (bytes(rest) + piece).split(b"\n")
                for line in whole:
                    put(line)
                rest = bytearray(last)
            else:
                rest += piece
                del rest[max_line + 1 :]
        if rest:
            put(bytes(rest))
        put(None)


def _piece(source: int) -> bytes:
    try:
        return os.read(source, PIECE)
    except OSError:
        return b""


def _message(line: bytes, max_line: int) -> SessionMessage | JSONRPCError | None:
    """What a line says; an error to send back if it says nothing that can be understood."""
    if not line.strip():
        return None
    if len(line) > max_line:
        return _error(None, INVALID_REQUEST, f"The line is longer than {max_line:,} bytes.")
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError:
        pass
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return _error(None, PARSE_ERROR, "The line is not JSON.")
    given = said.get("id") if isinstance(said, dict) else None
    known = given if isinstance(given, str | int) and not isinstance(given, bool) else None
    return _error(known, INVALID_REQUEST, "The line is not one JSON-RPC message.")


def _error(number: RequestId | None, code: int, message: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=number, error=ErrorData(code=code, message=message))


class _Pending:
    """What was asked and is not yet answered: it has a moment when standard input ends, which in a pipe is at once."""

    def __init__(self) -> None:
        self._numbers: set[RequestId] = set()
        self._none = asyncio.Event()

    def asked(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCRequest):
            self._numbers.add(message.id)

    def answered(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._numbers.discard(message.id)
            if not self._numbers:
                self._none.set()

    async def over(self) -> None:
        self._none.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self._numbers:
                    await self._none.wait()
                    self._none.clear()


class _Writer:
    """Writes lines in a thread of its own; whoever writes waits until the line is out."""

    def __init__(self, sink: int) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="mcp-stdout", daemon=True).start()

    async def write(self, message: JSONRPCMessage) -> None:
        line = message.model_dump_json(by_alias=True, exclude_unset=True)
        written: asyncio.Future[None] = self._loop.create_future()
        self._waiting.put((line.encode() + b"\n", written))
        await written

    def _work(self) -> None:
        with suppress(RuntimeError):  # the loop has gone
            while True:
                data, written = self._waiting.get()
                with suppress(OSError):  # nobody reads any more; standard input says so, too
                    while data:
                        data = data[os.write(self._sink, data) :]
                self._loop.call_soon_threadsafe(_release, written)


def _release(written: "asyncio.Future[None]") -> None:
    if not written.done():
        written.set_result(None)
