"""How log lines get out: in batches, and nothing waits for long."""

import asyncio
import atexit
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import parent_process
from typing import TextIO

FLUSH_AFTER_S = 0.05
PIPE_BYTES = 4096


class LogWriter:
    """Writes lines in batches: a system call per line would cost more than the rest of the telemetry. A line waits
    at most FLUSH_AFTER_S; an error, and anything outside an event loop, is written at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # One of several workers: they write into the same pipe, which takes only so much in one piece.
        self._most_bytes = PIPE_BYTES if parent_process() is not None else None
        self._lines: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        atexit.register(self.flush)

    def msg(self, line: str) -> None:
        self._lines.append(line)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if loop is not self._loop:
            self._loop = loop
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_later(FLUSH_AFTER_S, self.flush)

    def urgent(self, line: str) -> None:
        self._lines.append(line)
        self.flush()

    debug = info = warning = msg
    error = critical = exception = fatal = urgent

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines = self._lines, []
            with suppress(OSError, ValueError):
                for piece in ["\n".join(lines) + "\n"] if self._most_bytes is None else pieces(lines, self._most_bytes):
                    self._stream.write(piece)
                    self._stream.flush()


def pieces(lines: Sequence[str], most_bytes: int) -> Iterator[str]:
    """Whole lines, as many at a time as fit."""
    piece: list[str] = []
    size = 0
    for line in lines:
        length = len(line.encode(errors="replace")) + 1
        if piece and size + length > most_bytes:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line + "\n")
        size += length
    if piece:
        yield "".join(piece)
