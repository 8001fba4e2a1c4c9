"""The child process of a Sandbox: reads files from standard input until it ends, and replies to each with its text."""

import os
import resource
import signal
import sys
from contextlib import suppress
from typing import BinaryIO

import msgspec

from anabranch.knowledge.model import Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits
from anabranch.knowledge.parse.confinement import confine, preload
from anabranch.knowledge.parse.dispatch import parse
from anabranch.knowledge.parse.sandbox import (
    EXHAUSTED,
    MAX_FRAME,
    PREFIX,
    ParseReply,
    ParseRequest,
    ParserReady,
    framed,
)

GRACE_S = 5.0


def main(limits: ParseLimits) -> None:
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        _detach()
        preload()
        _limit(limits)
        # The time limit of a file starts after this.
        _send(replies, framed(ParserReady(restrictions=confine())))
        while (request := _next(requests)) is not None:
            # Ends this process if it hangs, even if the parent is dead.
            signal.setitimer(signal.ITIMER_REAL, limits.timeout_s + GRACE_S)
            _send(replies, _answer(request, limits))
            signal.setitimer(signal.ITIMER_REAL, 0)
            del request


def _detach() -> None:
    """Output of libraries must not mix with the replies; signals to the process group must not end the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _limit(limits: ParseLimits) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, limits.max_memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        with suppress(ValueError, OSError):  # macOS has no RLIMIT_AS
            resource.setrlimit(kind, (most, most))


def _send(replies: BinaryIO, frame: bytes) -> None:
    replies.write(frame)
    replies.flush()


def _next(requests: BinaryIO) -> ParseRequest | None:
    prefix = requests.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    (size,) = PREFIX.unpack(prefix)
    body = requests.read(size)
    return msgspec.msgpack.decode(body, type=ParseRequest) if len(body) == size else None


def _answer(request: ParseRequest, limits: ParseLimits) -> bytes:
    try:
        frame = framed(ParseReply(parsed=parse(request.data, request.filename, limits, request.media_type)))
        if len(frame) > MAX_FRAME:
            raise Unprocessable("The file's structure is too large. Split it.")
    except Unprocessable as refusal:
        return framed(ParseReply(reason=refusal.message))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - task boundary: only this file fails
        reason = f"The file made its parser fail ({type(error).__name__}). Save it in another format and ingest that."
        return framed(ParseReply(reason=reason))
    return frame


if __name__ == "__main__":
    try:
        main(msgspec.json.decode(sys.argv[1], type=ParseLimits))
    except MemoryError:
        os._exit(EXHAUSTED)  # there may be no memory left for a message
