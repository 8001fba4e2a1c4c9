"""Breadcrumbs, the analytics events of planner steps: queued in memory and written to a file by a thread."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from anabranch.domain.contracts import Breadcrumbs, Telemetry
from anabranch.domain.model import Value
from anabranch.domain.signals import BreadcrumbsDropped
from anabranch.domain.steps import Breadcrumb
from anabranch.telemetry.log import batches

MAX_QUEUED = 10_000
PER_BATCH = 1_000
# Several workers append to one file or pipe: a longer write may be interleaved with another.
MAX_WRITE_BYTES = 4096
# The fields of a line that is longer than that are cut to this length.
MAX_FIELD = 60
LOSS_REPORT_EVERY_S = 1.0

encode = msgspec.json.Encoder().encode


class BreadcrumbTiming(Value):
    """Seconds to collect a batch, to wait after a failed write, and for the last writes at the end."""

    gather_s: float = 0.05
    retry_s: float = 1.0
    close_s: float = 2.0


class NoBreadcrumbs:
    """Discards breadcrumbs."""

    def drop(self, crumb: Breadcrumb) -> None: ...


class BreadcrumbFanout:
    """Passes each breadcrumb to several sinks."""

    def __init__(self, *sinks: Breadcrumbs) -> None:
        self._sinks = sinks

    def drop(self, crumb: Breadcrumb) -> None:
        for sink in self._sinks:
            sink.drop(crumb)


class LostBreadcrumbs:
    """Counts lost breadcrumbs and reports the count at most once a second. Runs on the event loop."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._unreported = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, count: int) -> None:
        self._unreported += count
        if self._timer is None:
            self._report()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unreported:
            self._telemetry.noted(BreadcrumbsDropped(count=self._unreported))
            self._unreported = 0

    def _report(self) -> None:
        self._timer = None
        if self._unreported:
            self.close()
            self._timer = asyncio.get_running_loop().call_later(LOSS_REPORT_EVERY_S, self._report)


class BreadcrumbFile:
    """Appends breadcrumbs to a file as lines of JSON. Several workers may share the file. A thread writes, since a disk
    may block; beyond MAX_QUEUED breadcrumbs are lost. The file is opened for each batch, so that it can be rotated."""

    def __init__(self, path: Path, telemetry: Telemetry, timing: BreadcrumbTiming = BreadcrumbTiming()) -> None:
        self._path = path
        self._timing = timing
        self._losses = LostBreadcrumbs(telemetry)
        self._queue: deque[Breadcrumb] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unwritten: deque[bytes] = deque()
        self._torn = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="breadcrumbs", daemon=True).start()

    def drop(self, crumb: Breadcrumb) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self._losses.add(1)
            return
        self._queue.append(crumb)
        if not self._wake.is_set():
            self._wake.set()

    async def close(self) -> None:
        """Write what is queued, within `close_s`."""
        self._closing.set()
        self._wake.set()
        if self._loop is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timing.close_s):
                    await self._ended.wait()
        left = len(self._queue) + sum(piece.count(b"\n") for piece in tuple(self._unwritten))
        self._queue.clear()
        if left:
            self._losses.add(left)
        self._losses.close()

    def _run(self) -> None:
        """The thread. After `close` it ends when the queue is empty or cannot be written."""
        try:
            while True:
                self._wake.wait()
                self._closing.wait(self._timing.gather_s)
                self._wake.clear()
                closing = self._closing.is_set()
                written = self._write()
                if closing and (not written or not (self._queue or self._unwritten)):
                    break
                if self._queue or self._unwritten:
                    self._wake.set()
                if not written:
                    self._closing.wait(self._timing.retry_s)
        finally:
            self._on_loop(self._ended.set)

    def _on_loop(self, call: Callable[..., None], *given: int) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *given)

    def _write(self) -> bool:
        """Write one batch; False if that failed. What was not written stays first in the queue."""
        if not self._unwritten:
            crumbs = [self._queue.popleft() for _ in range(min(PER_BATCH, len(self._queue)))]
            lines = [line for line in map(_line, crumbs) if line]
            self._unwritten.extend(batch.encode() for batch in batches(lines, MAX_WRITE_BYTES - 1))
            if len(lines) < len(crumbs):
                self._on_loop(self._losses.add, len(crumbs) - len(lines))
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
                if self._torn:  # write the cut line once more, whole
                    self._unwritten.appendleft(piece[piece.rfind(b"\n", 0, wrote) + 1 :])
        except OSError:
            return False
        finally:
            with suppress(OSError):
                os.close(file)
        return True


def _line(crumb: Breadcrumb) -> str:
    """The line; empty if the breadcrumb holds a text that cannot be encoded."""
    try:
        line = encode(crumb)
        if len(line) >= MAX_WRITE_BYTES - 1:
            fields = msgspec.structs.asdict(crumb)
            line = encode(
                {name: value[:MAX_FIELD] if isinstance(value, str) else value for name, value in fields.items()}
            )
    except (ValueError, TypeError):
        return ""
    return line.decode()
