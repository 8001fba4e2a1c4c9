"""Transport to an MCP server that is a child process: one message per line over stdin and stdout."""

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

from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.domain.mcp import McpServer
from anabranch.network.surrogates import repair_surrogates
from anabranch.sources.mcp import process_guard
from anabranch.sources.mcp.framing import MAX_OUTPUT_LINE, LineBuffer, OutputLimiter, UnsolicitedLimit
from anabranch.sources.mcp.services import McpTiming

CHUNK = 65_536
EXIT_S = 0.25
THROTTLE_S = 0.1
REPORT_S = 0.5
# A little more than the process guard takes at most; then the time to end what is left after killing the guard.
STOP_S = process_guard.GRACE_S + process_guard.TERM_S + process_guard.KILL_S + 0.25
KILL_S = 0.5
START_ERRORS = {
    errno.ENOENT: "it was not found. Use its full path, or install it",
    errno.EACCES: "it is not executable",
    errno.ENOEXEC: "it is not executable",
}
CLOSED = (anyio.BrokenResourceError, anyio.ClosedResourceError)


@asynccontextmanager
async def stdio_transport(
    server: McpServer, *, max_line: int, on_output: Callable[[str], None], timing: McpTiming
) -> AsyncIterator[TransportStreams]:
    """Runs the server's command while the context is open. If the process ends early or stops communicating, the last
    item of the read stream is an UpstreamError. `on_output` gets its output that is not a message."""
    process, transport, guard = await _spawn(server)
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    child = _Child(process, incoming, max_line, OutputLimiter(on_output), timing)
    pumps = [asyncio.create_task(pump) for pump in (child.read(), child.write(outgoing), child.read_stderr())]
    leader: int | None = None
    try:
        leader = await _wait_started(server, guard)
        pumps.append(asyncio.create_task(child.watch_guard(guard)))
        yield read_stream, write_stream
    finally:
        for stream in (read_stream, write_stream):
            stream.close()
        try:
            await _run_to_end(_stop(process, transport, guard, pumps))
            if leader is not None and (process.returncode or 0) < 0:
                # The guard was killed, and its child with it, but not the other processes of the group.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, signal.SIGKILL)
        finally:
            incoming.close()
            outgoing.close()


async def _spawn(
    server: McpServer,
) -> tuple[asyncio.subprocess.Process, asyncio.SubprocessTransport, socket.socket]:
    """The guard process, its transport, and our end of the socket that it watches."""
    assert server.command is not None
    loop = asyncio.get_running_loop()
    our_end, guard_end = socket.socketpair()
    our_end.setblocking(False)
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=CHUNK, loop=loop),
            *(
                sys.executable,
                "-I",
                "-S",
                process_guard.__file__,
                str(guard_end.fileno()),
                server.command,
                *server.args,
            ),
            env=get_default_environment() | dict(server.env),
            cwd=server.cwd,
            pass_fds=(guard_end.fileno(),),
            start_new_session=True,
        )
    except BaseException as error:
        our_end.close()
        if isinstance(error, OSError | ValueError):
            raise _start_error(server, getattr(error, "errno", errno.EINVAL)) from None
        raise
    finally:
        guard_end.close()
    return asyncio.subprocess.Process(transport, protocol, loop), transport, our_end


async def _wait_started(server: McpServer, guard: socket.socket) -> int:
    """The guard reports 0 or an errno, and the child's process id."""
    error, _, child = (await asyncio.get_running_loop().sock_recv(guard, 40)).partition(b" ")
    if error != b"0":
        raise _start_error(server, int(error) if error.isdigit() else None)
    return int(child)


def _start_error(server: McpServer, number: int | None) -> UpstreamError:
    """Contains the command, but never its arguments, which may be secrets."""
    if server.cwd is not None and not Path(server.cwd).is_dir():
        return UpstreamError(f"The server's working directory, {server.cwd}, does not exist.", FailureKind.UNUSABLE)
    why = "it was ended before it started" if number is None else START_ERRORS.get(number) or os.strerror(number)
    return UpstreamError(f"The command {server.command} could not be run: {why}.", FailureKind.UNUSABLE)


class _Child:
    """The pipes of a child process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        incoming: MemoryObjectSendStream[SessionMessage | Exception],
        max_line: int,
        on_output: OutputLimiter,
        timing: McpTiming,
    ) -> None:
        self._process = process
        self._incoming = incoming
        self._max_line = max_line
        self._on_output = on_output
        self._write_timeout_s = timing.write_s
        self._pending_requests = 0
        self._unsolicited = UnsolicitedLimit()

    async def read(self) -> None:
        """Reads to the end even after the stream is closed: a child that cannot write cannot exit."""
        assert self._process.stdout is not None
        lines = LineBuffer()
        try:
            while chunk := await self._process.stdout.read(CHUNK):
                for line in lines.feed(chunk):
                    await self._receive(line)
                self._check_length(lines.pending_bytes)
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await self._process.wait()
            await self._end(self._exit_error())
        except UpstreamError as error:
            await self._end(error)
            while await self._process.stdout.read(CHUNK):
                pass

    async def _receive(self, line: bytes) -> None:
        self._check_length(len(line))
        message = None
        try:
            if line.strip():
                message = jsonrpc_message_adapter.validate_json(repair_surrogates(line), by_name=False)
        except ValueError:
            self._on_output(line)
        if isinstance(message, JSONRPCResponse | JSONRPCError) and self._pending_requests:
            self._pending_requests -= 1
        elif self._unsolicited.is_exceeded_by(len(line)):
            raise UpstreamError("The server sends too much unsolicited data.", FailureKind.UNUSABLE)
        if message is not None:
            with suppress(*CLOSED):
                await self._incoming.send(SessionMessage(message))

    def _check_length(self, size: int) -> None:
        if size > self._max_line:
            raise UpstreamError(
                f"The server sent a message of more than {self._max_line:,} bytes.", FailureKind.UNUSABLE
            )

    async def write(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with outgoing:
            try:
                async for one in outgoing:
                    await self._write_message(one)
            except UpstreamError as error:
                await self._end(error)

    async def _write_message(self, one: SessionMessage) -> None:
        try:
            line = one.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
        except ValueError:  # a lone surrogate cannot be encoded
            if isinstance(one.message, JSONRPCRequest):
                error = ErrorData(
                    code=INVALID_PARAMS, message="The question contains characters that cannot be encoded."
                )
                with suppress(*CLOSED):
                    await self._incoming.send(
                        SessionMessage(JSONRPCError(jsonrpc="2.0", id=one.message.id, error=error))
                    )
        else:
            self._pending_requests += isinstance(one.message, JSONRPCRequest)
            await self._send(line + b"\n")

    async def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(self._write_timeout_s):
                self._process.stdin.write(line)
                await self._process.stdin.drain()
        except TimeoutError:
            raise UpstreamError("The server does not read its input.", FailureKind.DOWN) from None
        except (OSError, RuntimeError):  # uvloop raises RuntimeError on a closed pipe
            # If the process has ended, `read` reports a better reason first.
            await asyncio.sleep(2 * EXIT_S)
            raise UpstreamError("The server closed its input.", FailureKind.DOWN) from None

    async def read_stderr(self) -> None:
        assert self._process.stderr is not None
        lines, limit = LineBuffer(cap=4 * MAX_OUTPUT_LINE), UnsolicitedLimit()
        while chunk := await self._process.stderr.read(CHUNK):
            for line in lines.feed(chunk):
                self._on_output(line)
            if limit.is_exceeded_by(len(chunk)):
                # Slows down this process only.
                await asyncio.sleep(THROTTLE_S)
        for line in lines.rest():
            self._on_output(line)

    async def watch_guard(self, guard: socket.socket) -> None:
        """Without the guard, processes that it started may stay and keep the pipes open."""
        with suppress(OSError):
            await asyncio.get_running_loop().sock_recv(guard, 1)
        await asyncio.sleep(2 * EXIT_S)
        await self._end(self._exit_error())

    async def _end(self, error: UpstreamError) -> None:
        with suppress(*CLOSED), anyio.move_on_after(REPORT_S):
            await self._incoming.send(error)
        self._incoming.close()

    def _exit_error(self) -> UpstreamError:
        status = self._process.returncode
        why = "The server closed its output." if status is None else f"The server's process ended with status {status}."
        if status is not None and not 0 <= status <= 128:
            with suppress(ValueError):
                why = f"The server's process was ended by {signal.Signals(abs(status) % 128).name}."
        return UpstreamError(why, FailureKind.DOWN)


async def _stop(
    process: asyncio.subprocess.Process,
    transport: asyncio.SubprocessTransport,
    guard: socket.socket,
    pumps: Sequence[asyncio.Task[None]],
) -> None:
    """Closes the child's input and the guard's socket. The guard then ends all processes."""
    assert process.stdin is not None
    try:
        process.stdin.close()
        with suppress(OSError):
            guard.shutdown(socket.SHUT_WR)
        for timeout_s in (STOP_S, KILL_S):
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await process.wait()
                break
            with suppress(ProcessLookupError):
                transport.kill()
    finally:
        transport.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        guard.close()


async def _run_to_end(work: Coroutine[None, None, None]) -> None:
    """Runs the work to its end, even if the caller is cancelled."""
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
