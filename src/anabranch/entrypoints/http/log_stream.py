"""Sends a stream's log to a client as server-sent events, until its end, a disconnect or the shutdown."""

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Protocol

import msgspec
from starlette.types import Receive, Send

from anabranch.app.revocations import Revocations
from anabranch.domain.errors import AnabranchError, NotFound, ShuttingDown, StreamUnavailable
from anabranch.domain.eventlog import Page
from anabranch.domain.model import Value
from anabranch.entrypoints.http.asgi import EVENT_STREAM, PIECE_BYTES, PIECE_S, Headers
from anabranch.eventlog.reader import TooSlow

CLOSING = "The server is shutting down; come back in a moment."
# Clients that were disconnected together must not reconnect together.
RETRY_MS = (1_000, 3_000)
# What ends a connection from our side: a client that still wants the stream reconnects with its cursor.
COME_BACK = (TooSlow, StreamUnavailable, NotFound, TimeoutError)


class StreamTiming(Value):
    """How long a client may take to read one piece, and the end of its stream."""

    piece_s: float = PIECE_S
    end_s: float = 1.0


TIMING = StreamTiming()


class Tailed(Protocol):
    """Reads a log for a client: a StreamReader, or a chain of them."""

    @property
    def head(self) -> int: ...

    async def next(self, wait_s: float) -> Page | None: ...


class ShutdownEvent:
    """Notifies all streams at once that they have to end, and why, without a task for each."""

    def __init__(self) -> None:
        self._why: AnabranchError | None = None
        self._callbacks: set[Callable[[], None]] = set()

    def set(self, why: AnabranchError | None = None) -> None:
        self._why = why or ShuttingDown(CLOSING)
        for callback in tuple(self._callbacks):
            callback()

    def is_set(self) -> bool:
        return self._why is not None

    @property
    def error(self) -> AnabranchError | None:
        """The reason once it is set; its own for each: a traceback grows wherever it is raised."""
        return copy.copy(self._why)

    def add(self, callback: Callable[[], None]) -> None:
        self._callbacks.add(callback)

    def discard(self, callback: Callable[[], None]) -> None:
        self._callbacks.discard(callback)


@contextmanager
def until_revoked(closing: ShutdownEvent, revocations: Revocations, key: str | None) -> Iterator[ShutdownEvent]:
    """That Closing, for one reader: it is also set when the reader's API key is revoked."""
    if key is None:
        yield closing
        return
    own = ShutdownEvent()
    if closing.is_set():
        own.set()
    closing.add(own.set)
    revocations.add(key, own.set)
    try:
        yield own
    finally:
        closing.discard(own.set)
        revocations.discard(key, own.set)


async def tail(
    reader: Tailed,
    receive: Receive,
    send: Send,
    *,
    frames: Callable[[Page], bytes],
    heartbeat: Callable[[int], bytes],
    heartbeat_s: float,
    closing: ShutdownEvent,
    headers: Headers = (),
    timing: StreamTiming = TIMING,
) -> None:
    """Sends what an entered reader returns, as `frames` renders it, and heartbeats in between. Returns at the stream's
    end, and when the client has disconnected or must reconnect with its cursor. A large batch takes several calls of
    `frames`, only the first of which has `reset` and only the last `ended`."""
    if (error := closing.error) is not None:
        raise error
    await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})
    with suppress(*COME_BACK):
        async with until_gone(receive, closing, "http.disconnect", timing) as timeouts:
            retry = b"retry: %d\n\n" % random.randint(*RETRY_MS)  # noqa: S311
            await timeouts.with_(send({"type": "http.response.body", "body": retry, "more_body": True}))
            await _pump(reader, send, timeouts, frames, heartbeat, heartbeat_s)
    with suppress(TimeoutError):
        async with asyncio.timeout(timing.end_s):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class ReadTimeouts:
    """Calls `stop` when the client takes too long to read one piece. One timer for each client checks now and then: a
    timer for every piece would cost a third of the time that it takes to send it."""

    def __init__(self, stop: Callable[[], None], piece_s: float) -> None:
        self._piece_s = piece_s
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._since: float | None = None
        self._timer = self._loop.call_later(self._piece_s / 3, self._look)

    async def with_(self, sending: Awaitable[None]) -> None:
        self._since = self._loop.time()
        await sending
        self._since = None

    def _look(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._piece_s:
            self._stop()
        else:
            self._timer = self._loop.call_later(self._piece_s / 3, self._look)

    def end(self) -> None:
        self._timer.cancel()


async def _pump(
    reader: Tailed,
    send: Send,
    timeouts: ReadTimeouts,
    frames: Callable[[Page], bytes],
    heartbeat: Callable[[int], bytes],
    heartbeat_s: float,
) -> None:
    while True:
        batch = await reader.next(heartbeat_s)
        bodies = (frames(part) for part in parts(batch)) if batch is not None else (heartbeat(reader.head),)
        for body in bodies:
            for piece in pieces(body):
                await timeouts.with_(send({"type": "http.response.body", "body": piece, "more_body": True}))
        if batch is not None and batch.ended:
            return


def pieces(body: bytes) -> Iterable[bytes]:
    """Pieces, each of which the client must read in time."""
    if len(body) <= PIECE_BYTES:
        return (body,) if body else ()
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))


def parts(batch: Page) -> Iterator[Page]:
    """Splits a batch, so that a client that reads slowly holds one part in memory; a larger entry is a part of its
    own."""
    entries = batch.entries
    if len(entries) < 2 or sum(len(entry.body) for entry in entries) <= PIECE_BYTES:
        yield batch
        return
    begin = size = 0
    for index, entry in enumerate(entries):
        if size and size + len(entry.body) > PIECE_BYTES:
            yield msgspec.structs.replace(
                batch, entries=entries[begin:index], reset=batch.reset and not begin, ended=False
            )
            begin, size = index, 0
        size += len(entry.body)
    yield msgspec.structs.replace(batch, entries=entries[begin:], reset=batch.reset and not begin)


@asynccontextmanager
async def until_gone(
    receive: Receive, closing: ShutdownEvent, leave: str, timing: StreamTiming = TIMING
) -> AsyncIterator[ReadTimeouts]:
    """Ends the block with a TimeoutError when the client disconnects (`leave` is ASGI's message), at the shutdown, or
    when the client does not read in time."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        def stop(_: object = None) -> None:
            if not limit.expired() and not over:
                limit.reschedule(loop.time())

        over = False
        timeouts = ReadTimeouts(stop, timing.piece_s)
        gone = asyncio.create_task(_gone(receive, leave))
        gone.add_done_callback(stop)
        closing.add(stop)
        if closing.is_set():
            stop()
        try:
            yield timeouts
        finally:
            over = True
            timeouts.end()
            closing.discard(stop)
            gone.cancel()


async def _gone(receive: Receive, leave: str) -> None:
    while (await receive())["type"] != leave:
        pass
