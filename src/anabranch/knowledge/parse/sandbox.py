"""Parsing in a reused child process, so that a bad file can crash only itself. Messages have a length prefix."""

import asyncio
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from anabranch.domain.errors import InternalError, ShuttingDown
from anabranch.domain.model import Value
from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits, check_size, mebibytes

PREFIX = struct.Struct(">I")
MAX_FRAME = 512 * 1024 * 1024
EXHAUSTED = 77  # the child's exit status if it runs out of memory
BUFFER = 1024 * 1024
START_S = 60.0
EXIT_S = 1.0
PROGRAM = ("-m", "anabranch.knowledge.parse")


class ParseRequest(Value):
    data: bytes
    filename: str | None
    media_type: str | None


class ParseReply(Value):
    """The parsed file, or the reason why it cannot be parsed."""

    parsed: Parsed | None = None
    reason: str = ""


class ParserReady(Value):
    """The first message of a child. `restrictions` are `applied`, or have the reason why not."""

    restrictions: dict[str, str]


Message = TypeVar("Message", ParseReply, ParserReady)


def framed(message: ParseRequest | ParseReply | ParserReady) -> bytes:
    body = msgspec.msgpack.encode(message)
    return PREFIX.pack(len(body)) + body


class Sandbox:
    """Parses one file at a time. The child starts with the first file; it is replaced after a crash, a time-out or a
    cancelled call, because its next reply would belong to another file."""

    def __init__(self, limits: ParseLimits, program: Sequence[str] = PROGRAM) -> None:
        self._limits = limits
        self._program = program
        # What the latest child has given up, by name: `applied`, or the reason why not.
        self.restrictions: dict[str, str] = {}
        self._busy = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the child, if it runs."""
        return self._child.pid if self._child else None

    async def parse(self, data: bytes, filename: str | None, media_type: str | None = None) -> Parsed:
        check_size(data, self._limits)  # before the file is copied to the child
        request = framed(ParseRequest(data=data, filename=_encodable(filename), media_type=_encodable(media_type)))
        async with self._busy:
            try:
                reply = await self._ask(await self._started(), request)
            except BaseException:
                await self._end()
                raise
        if reply.parsed is None:
            raise Unprocessable(reply.reason)
        return reply.parsed

    async def start(self) -> None:
        """Start the child, if it does not run."""
        async with self._busy:
            await self._started()

    async def close(self) -> None:
        """End the child at once, with the file that it parses."""
        self._closed = True
        await self._end()

    async def _ask(self, child: asyncio.subprocess.Process, request: bytes) -> ParseReply:
        assert child.stdin is not None
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                child.stdin.write(request)
                await child.stdin.drain()
                return await _message(child, ParseReply)
        except TimeoutError:
            raise Unprocessable(
                f"The file took longer than {self._limits.timeout_s:g} seconds to be read. Split or simplify it."
            ) from None
        except (EOFError, OSError, msgspec.DecodeError):
            if self._closed:
                raise ShuttingDown("The parser was closed.") from None
            raise Unprocessable(await self._cause(child)) from None

    async def _cause(self, child: asyncio.subprocess.Process) -> str:
        """Why the child sent no valid reply."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                await child.wait()
        code = child.returncode
        if code == EXHAUSTED:
            return f"The file needs more than {mebibytes(self._limits.max_memory)} of memory to be read. Split it."
        how = "no valid reply" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"The file made its parser crash ({how}). Save it again, or in another format, and ingest that."

    async def _started(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise ShuttingDown("The parser was closed.")
        if self._child is not None and self._child.stdout is not None:
            if self._child.returncode is None and not self._child.stdout.at_eof():
                return self._child
            await self._end()  # it ended while idle
        try:
            async with asyncio.timeout(START_S):
                self._child = await _spawn(self._program, self._limits)
                self.restrictions = (await _message(self._child, ParserReady)).restrictions
        except (EOFError, OSError, msgspec.DecodeError) as error:
            if self._closed:
                raise ShuttingDown("The parser was closed.") from None
            limit = mebibytes(self._limits.max_memory)
            raise InternalError(f"The parser's process does not start within {START_S:g} s and {limit}.") from error
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.stdin is not None:
            with suppress(ProcessLookupError):
                child.kill()
            child.stdin.close()
            await child.wait()


async def _spawn(program: Sequence[str], limits: ParseLimits) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-B", *program, msgspec.json.encode(limits).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=BUFFER,
        cwd="/",
        # Without the parent's environment, which holds keys that a hostile file could read.
        env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONUTF8": "1"},
    )


async def _message(child: asyncio.subprocess.Process, kind: type[Message]) -> Message:
    assert child.stdout is not None
    (size,) = PREFIX.unpack(await child.stdout.readexactly(PREFIX.size))
    if size > MAX_FRAME:
        raise EOFError("the frame is too large")
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=kind)


def _encodable(text: str | None) -> str | None:
    """File names may contain bytes that are not valid UTF-8."""
    return None if text is None else text[-255:].encode("utf-8", "replace").decode("utf-8")
