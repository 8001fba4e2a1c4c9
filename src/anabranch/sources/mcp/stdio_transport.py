"""An MCP server that is a child of ours: a message a line, over its input and output."""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_PARAMS,
    ErrorData,
    JSONRPCError,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from anabranch.domain.errors import Trouble, UpstreamError
from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp import process_guard
from anabranch.sources.mcp.framing import MAX_HEARD, BoundedText, LineBuffer, UnsolicitedText, repaired

CHUNK = 65_536
WRITE_S = 5.0
ENDED_S = 0.25
SLOWER_S = 0.1
TOLD_S = 0.5
# A little more than the leash takes at most, and then for what is left after the leash itself was killed.
STOP_S = process_guard.GRACE_S + process_guard.ASKED_S + process_guard.LAST_S + 0.25
KILLED_S = 0.5
GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


@asynccontextmanager
async def stdio(server: McpServer, *, max_line: int, heard: Callable[[str], None]) -> AsyncIterator[TransportStreams]:
    """Runs the server's command for as long as the context lasts. If its process ends before that, or cannot be talked
    to, an UpstreamError is the last that the read stream gives. `heard` gets what it writes that is no message."""
    process, transport, held = await _spawned(server)
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    child = _Child(process, incoming, max_line, BoundedText(heard))
    pumps = [asyncio.create_task(pump) for pump in (child.read(), child.write(outgoing), child.overhear())]
    leader: int | None = None
    try:
        leader = await _seen_to_run(server, held)
        pumps.append(asyncio.create_task(child.outlive(held)))
        yield read_stream, write_stream
    finally:
        for stream in (read_stream, write_stream):
            stream.close()
        try:
            await _whatever_happens(_stopped(process, transport, held, pumps))
            if leader is not None and (process.returncode or 0) < 0:
                # The leash was killed, and its child with it; others of its group were not.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, signal.SIGKILL)
        finally:
            incoming.close()
            outgoing.close()


async def _spawned(
    server: McpServer,
) -> tuple[asyncio.subprocess.Process, asyncio.SubprocessTransport, socket.socket]:
    """The leash, its transport, and our end of the socket that it watches."""
    assert server.command is not None
    _check_folder(server)
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    arguments = ("-I", "-S", process_guard.__file__, str(theirs.fileno()), server.command, *server.args)
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=CHUNK, loop=loop),
            sys.executable,
            *arguments,
            env=get_default_environment() | dict(server.env),
            cwd=server.cwd,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError | ValueError):
            raise _not_run(server, getattr(error, "errno", errno.EINVAL)) from None
        raise
    finally:
        theirs.close()
    return asyncio.subprocess.Process(transport, protocol, loop), transport, ours


def _check_folder(server: McpServer) -> None:
    if server.cwd is not None and not Path(server.cwd).is_dir():
        raise UpstreamError(f"The server's working directory, {server.cwd}, is not there.", Trouble.UNUSABLE)


async def _seen_to_run(server: McpServer, held: socket.socket) -> int:
    """The leash says 0, or the number of the error, and which process the child is."""
    trouble, _, child = (await asyncio.get_running_loop().sock_recv(held, 40)).partition(b" ")
    if trouble != b"0":
        raise _not_run(server, int(trouble) if trouble.isdigit() else None)
    return int(child)


def _not_run(server: McpServer, number: int | None) -> UpstreamError:
    """Names the command and never its arguments, which may hold secrets."""
    match number:
        case errno.ENOENT:
            why = "it was not found. Give its full path, or install it"
        case errno.EACCES | errno.ENOEXEC:
            why = "it may not be executed, or is no program"
        case None:
            why = "it was ended before it could begin"
        case _:
            why = os.strerror(number)
    return UpstreamError(f"The command {server.command} could not be run: {why}.", Trouble.UNUSABLE)


class _Child:
    """What is read from and written to a child."""

    def __init__(
        self, process: asyncio.subprocess.Process, incoming: Incoming, max_line: int, heard: BoundedText
    ) -> None:
        self._process = process
        self._incoming = incoming
        self._max_line = max_line
        self._heard = heard
        self._owed = 0
        self._unasked = UnsolicitedText()

    async def read(self) -> None:
        """Goes on to the very end even if nobody listens any more, as a child that cannot write cannot end."""
        assert self._process.stdout is not None
        try:
            await self._messages(self._process.stdout)
            with suppress(TimeoutError):
                async with asyncio.timeout(ENDED_S):
                    await self._process.wait()
            await self._end(_how(self._process.returncode), Trouble.DOWN)
        except UpstreamError as error:
            await self._end(error.message, error.trouble)
            while await self._process.stdout.read(CHUNK):
                pass

    async def _messages(self, stdout: asyncio.StreamReader) -> None:
        lines = LineBuffer()
        while chunk := await stdout.read(CHUNK):
            for line in lines.whole(chunk):
                await self._received(line)
            if lines.held > self._max_line:
                raise self._too_long()

    async def _received(self, line: bytes) -> None:
        if len(line) > self._max_line:
            raise self._too_long()
        try:
            message = jsonrpc_message_adapter.validate_json(repaired(line), by_name=False) if line.strip() else None
        except ValueError:
            message = None
            self._heard(line)
        if isinstance(message, JSONRPCResponse | JSONRPCError) and self._owed:
            self._owed -= 1
        elif self._unasked.is_too_much(len(line)):
            raise UpstreamError("The server sends much that nobody has asked for.", Trouble.UNUSABLE)
        if message is None:
            return
        with suppress(*GONE):
            await self._incoming.send(SessionMessage(message))

    def _too_long(self) -> UpstreamError:
        return UpstreamError(f"The server sent a message of more than {self._max_line:,} bytes.", Trouble.UNUSABLE)

    async def write(self, outgoing: Outgoing) -> None:
        async with outgoing:
            async for one in outgoing:
                try:
                    line = one.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
                except ValueError:
                    await self._refuse(one)
                    continue
                self._owed += isinstance(one.message, JSONRPCRequest)
                try:
                    await self._send(line + b"\n")
                except UpstreamError as error:
                    await self._end(error.message, error.trouble)
                    return

    async def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(WRITE_S):
                self._process.stdin.write(line)
                await self._process.stdin.drain()
        except TimeoutError:
            raise UpstreamError("The server does not read what it is sent.", Trouble.DOWN) from None
        except (OSError, RuntimeError):  # uvloop's, once the pipe is closed
            # If it has ended, then whoever reads its output says so, and better.
            await asyncio.sleep(2 * ENDED_S)
            raise UpstreamError("The server closed its input.", Trouble.DOWN) from None

    async def _refuse(self, one: SessionMessage) -> None:
        """Half a surrogate pair cannot be written down."""
        if isinstance(one.message, JSONRPCRequest):
            error = ErrorData(code=INVALID_PARAMS, message="The question holds characters that cannot be sent.")
            with suppress(*GONE):
                await self._incoming.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=one.message.id, error=error)))

    async def overhear(self) -> None:
        assert self._process.stderr is not None
        lines, unread = LineBuffer(cap=4 * MAX_HEARD), UnsolicitedText()
        while chunk := await self._process.stderr.read(CHUNK):
            for line in lines.whole(chunk):
                self._heard(line)
            if unread.is_too_much(len(chunk)):
                # It waits for us then, and nobody else does.
                await asyncio.sleep(SLOWER_S)
        for line in lines.rest():
            self._heard(line)

    async def outlive(self, held: socket.socket) -> None:
        """Once the leash has gone nobody sees to those that it held, and some may still keep the pipes open."""
        with suppress(OSError):
            await asyncio.get_running_loop().sock_recv(held, 1)
        await asyncio.sleep(2 * ENDED_S)
        await self._end(_how(self._process.returncode), Trouble.DOWN)

    async def _end(self, why: str, trouble: Trouble) -> None:
        with suppress(*GONE), anyio.move_on_after(TOLD_S):
            await self._incoming.send(UpstreamError(why, trouble))
        self._incoming.close()


def _how(status: int | None) -> str:
    if status is None:
        return "The server closed its output."
    if 0 <= status <= 128:
        return f"The server's process ended with status {status}."
    with suppress(ValueError):
        return f"The server's process was ended by {signal.Signals(status - 128 if status > 0 else -status).name}."
    return f"The server's process ended with status {status}."


async def _stopped(
    process: asyncio.subprocess.Process,
    transport: asyncio.SubprocessTransport,
    held: socket.socket,
    pumps: Sequence[asyncio.Task[None]],
) -> None:
    """Ends the child's input and lets go of the leash, which sees to the rest even without us."""
    assert process.stdin is not None
    try:
        process.stdin.close()
        with suppress(OSError):
            held.shutdown(socket.SHUT_WR)
        for patience_s in (STOP_S, KILLED_S):
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await process.wait()
                break
            with suppress(ProcessLookupError):
                transport.kill()
    finally:
        transport.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        held.close()


async def _whatever_happens(work: Coroutine[None, None, None]) -> None:
    """Sees the work through, even if whoever waits for it is cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
