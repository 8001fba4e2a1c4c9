"""Following a stream's log on a client's behalf, as server-sent events, until one of the two has had enough."""

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
from anabranch.entrypoints.http.exchange import EVENT_STREAM, PIECE_BYTES, PIECE_S, Headers
from anabranch.streams.mux import Batch, Lagging

CLOSING = "The server is shutting down; come back in a moment."
# Clients that were cut off together must not come back together.
RETRY_MS = (1_000, 3_000)
GOODBYE_S = 1.0
LOOK_S = PIECE_S / 3
# What ends a connection from our side: whoever still wants the stream comes back with its cursor.
COME_BACK = (Lagging, StreamUnavailable, NotFound, TimeoutError)


class Tailed(Protocol):
    """Who reads a log for a client: a Reader, or one that goes on into the next stream."""

    @property
    def head(self) -> int: ...

    async def next(self, wait_s: float) -> Batch | None: ...


class Closing:
    """That streams have to end, and why, told to all of them at once without a task for each."""

    def __init__(self) -> None:
        self._why: AnabranchError | None = None
        self._told: set[Callable[[], None]] = set()

    def set(self, why: AnabranchError | None = None) -> None:
        self._why = why or ShuttingDown(CLOSING)
        for tell in tuple(self._told):
            tell()

    def is_set(self) -> bool:
        return self._why is not None

    @property
    def error(self) -> AnabranchError | None:
        """The reason once it is set; its own for each: a traceback grows wherever it is raised."""
        return copy.copy(self._why)

    def add(self, tell: Callable[[], None]) -> None:
        self._told.add(tell)

    def discard(self, tell: Callable[[], None]) -> None:
        self._told.discard(tell)


@contextmanager
def until_revoked(closing: Closing, revocations: Revocations, key: str | None) -> Iterator[Closing]:
    """That Closing, for one reader: it is also set when the reader's API key is revoked."""
    if key is None:
        yield closing
        return
    own = Closing()
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
    frames: Callable[[Batch], bytes],
    heartbeat: Callable[[int], bytes],
    heartbeat_s: float,
    closing: Closing,
    headers: Headers = (),
) -> None:
    """Everything that an entered reader hands out, as `frames` writes it, and a heartbeat when nothing came. It returns
    at the stream's end, and whenever the client has gone or must come back with its cursor. A batch comes in several
    calls of `frames` where it is large, only the first of which has `reset` and only the last `ended`."""
    if (error := closing.error) is not None:
        raise error
    await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})
    with suppress(*COME_BACK):
        async with until_gone(receive, closing, "http.disconnect") as patience:
            retry = b"retry: %d\n\n" % random.randint(*RETRY_MS)  # noqa: S311
            await patience.with_(send({"type": "http.response.body", "body": retry, "more_body": True}))
            await _pump(reader, send, patience, frames, heartbeat, heartbeat_s)
    with suppress(TimeoutError):
        async with asyncio.timeout(GOODBYE_S):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Patience:
    """With a client that takes its time: `stop` is called when one piece has taken it too long. One timer for each
    client looks now and then: to set one for every piece would cost a third of all that it takes to send it."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._since: float | None = None
        self._timer = self._loop.call_later(LOOK_S, self._look)

    async def with_(self, sending: Awaitable[None]) -> None:
        self._since = self._loop.time()
        await sending
        self._since = None

    def _look(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= PIECE_S:
            self._stop()
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def end(self) -> None:
        self._timer.cancel()


async def _pump(
    reader: Tailed,
    send: Send,
    patience: Patience,
    frames: Callable[[Batch], bytes],
    heartbeat: Callable[[int], bytes],
    heartbeat_s: float,
) -> None:
    while True:
        batch = await reader.next(heartbeat_s)
        bodies = (frames(part) for part in parts(batch)) if batch is not None else (heartbeat(reader.head),)
        for body in bodies:
            for piece in pieces(body):
                await patience.with_(send({"type": "http.response.body", "body": piece, "more_body": True}))
        if batch is not None and batch.ended:
            return


def pieces(body: bytes) -> Iterable[bytes]:
    """What the client must take in time, one by one."""
    if len(body) <= PIECE_BYTES:
        return (body,) if body else ()
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))


def parts(batch: Batch) -> Iterator[Batch]:
    """A batch in parts that are written one by one, so that a client which reads slowly holds no more than one of
    them; an entry that is larger is a part of its own."""
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
async def until_gone(receive: Receive, closing: Closing, leave: str) -> AsyncIterator[Patience]:
    """The block is left with a TimeoutError when the client goes (`leave` is how ASGI says so), when we have to, or
    when patience with the client is over."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        def stop(_: object = None) -> None:
            if not limit.expired() and not over:
                limit.reschedule(loop.time())

        over = False
        patience = Patience(stop)
        gone = asyncio.create_task(_gone(receive, leave))
        gone.add_done_callback(stop)
        closing.add(stop)
        if closing.is_set():
            stop()
        try:
            yield patience
        finally:
            over = True
            patience.end()
            closing.discard(stop)
            gone.cancel()


async def _gone(receive: Receive, leave: str) -> None:
    while (await receive())["type"] != leave:
        pass
