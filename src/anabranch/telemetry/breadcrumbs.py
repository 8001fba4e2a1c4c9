"""Breadcrumbs for whoever analyses streams later: they wait in memory, and are written where nobody waits for them."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from anabranch.domain.contracts import Breadcrumbs, Telemetry
from anabranch.domain.signals import CrumbsLost
from anabranch.domain.steps import Breadcrumb

MAX_WAITING = 10_000
BATCH = 1_000
GATHER_S = 0.05
AGAIN_S = 1.0
TELL_S = 1.0
CLOSE_S = 2.0
# Several workers append to one file: what is longer than this may be torn (logwriter.py).
WHOLE_BYTES = 4096
# Of a line that is too long, as much of each field as always fits.
MAX_FIELD = 60

encode = msgspec.json.Encoder().encode


class NoBreadcrumbs:
    """Nobody wants them."""

    def drop(self, crumb: Breadcrumb) -> None: ...


class BreadcrumbFanout:
    """Each of these gets every one."""

    def __init__(self, *sinks: Breadcrumbs) -> None:
        self._sinks = sinks

    def drop(self, crumb: Breadcrumb) -> None:
        for sink in self._sinks:
            sink.drop(crumb)


class LostBreadcrumbs:
    """Counts what was lost, and tells of it at most once a second; on the event loop, where telemetry lives."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._untold = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, count: int) -> None:
        self._untold += count
        if self._timer is None:
            self._tell()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._untold:
            self._telemetry.noted(CrumbsLost(count=self._untold))
            self._untold = 0

    def _tell(self) -> None:
        self._timer = None
        if self._untold:
            self.close()
            self._timer = asyncio.get_running_loop().call_later(TELL_S, self._tell)


class BreadcrumbFile:
    """One line of JSON for each, appended to a file that several workers may share. A thread of its own writes, since a
    disk can take its time: what it cannot take waits, and beyond a bound is lost. The file is opened anew for each
    batch, so that it may be moved away."""

    def __init__(self, path: Path, telemetry: Telemetry) -> None:
        self._path = path
        self._losses = LostBreadcrumbs(telemetry)
        self._waiting: deque[Breadcrumb] = deque()
        self._bell = threading.Event()
        self._closing = threading.Event()
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unwritten: deque[bytes] = deque()
        self._torn = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._write_on, name="breadcrumbs", daemon=True).start()

    def drop(self, crumb: Breadcrumb) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._losses.add(1)
            return
        self._waiting.append(crumb)
        if not self._bell.is_set():
            self._bell.set()

    async def close(self) -> None:
        """Write what waits, as far as a moment allows."""
        self._closing.set()
        self._bell.set()
        if self._loop is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._over.wait()
        left = len(self._waiting) + sum(piece.count(b"\n") for piece in tuple(self._unwritten))
        self._waiting.clear()
        if left:
            self._losses.add(left)
        self._losses.close()

    def _write_on(self) -> None:
        """The thread. It ends when what waited at the closing is written, or cannot be."""
        try:
            while True:
                self._bell.wait()
                self._closing.wait(GATHER_S)
                self._bell.clear()
                closing = self._closing.is_set()
                written = self._write()
                if closing and (not written or not (self._waiting or self._unwritten)):
                    break
                if self._waiting or self._unwritten:
                    self._bell.set()
                if not written:
                    self._closing.wait(AGAIN_S)
        finally:
            self._on_loop(self._over.set)

    def _on_loop(self, call: Callable[..., None], *given: int) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # it is closed, and nobody listens any more
            self._loop.call_soon_threadsafe(call, *given)

    def _write(self) -> bool:
        """One batch; whether it could be written. What could not stays the first to be written."""
        if not self._unwritten:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            lines = [line for line in map(_line, batch) if line]
            self._unwritten.extend(write_chunks(lines))
            if len(lines) < len(batch):
                self._on_loop(self._losses.add, len(batch) - len(lines))
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError:
            return False
        try:
            while self._unwritten:
                piece = b"\n" + self._unwritten[0] if self._torn else self._unwritten[0]
                wrote = os.write(file, piece)
                self._unwritten.popleft()
                self._torn = wrote < len(piece)
                if self._torn:  # whole lines again, after the end of the one that was cut
                    self._unwritten.appendleft(piece[piece.rfind(b"\n", 0, wrote) + 1 :])
        except OSError:
            return False
        finally:
            with suppress(OSError):
                os.close(file)
        return True


def write_chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, as many at a time as are written in one piece."""
    piece = bytearray()
    for line in lines:
        if piece and len(piece) + len(line) >= WHOLE_BYTES:
            yield bytes(piece)
            piece.clear()
        piece += line
    if piece:
        yield bytes(piece)


def _line(crumb: Breadcrumb) -> bytes:
    """Nothing, if it cannot be written at all: a name that is no text ends one line, not the thread."""
    try:
        line = encode(crumb)
        if len(line) >= WHOLE_BYTES - 1:
            fields = msgspec.structs.asdict(crumb)
            line = encode(
                {name: value[:MAX_FIELD] if isinstance(value, str) else value for name, value in fields.items()}
            )
    except (ValueError, TypeError):
        return b""
    return line + b"\n"
