"""Sends streams to clients: the answer of a Run, whole or as server-sent events; an answer that is recorded in the log,
which can be read again at /v1/streams; and any stream of the log."""

import asyncio
import copy
import hashlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, AnyStr, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app.anabranch import Anabranch
from anabranch.app.resumable_answers import Frame
from anabranch.app.revocations import Revocations
from anabranch.app.stream_identity import StreamIdentity
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import (
    AnabranchError,
    Cancelled,
    InvalidQuestion,
    LeaseLost,
    NotFound,
    ShuttingDown,
    StreamFull,
    StreamUnavailable,
    Unauthorized,
)
from anabranch.domain.eventlog import LAST, Entry, Page, SequencedEntry, epoch, one_line
from anabranch.domain.events import TERMINAL, AnswerEvent, Failed
from anabranch.domain.model import Answer, Context, Value
from anabranch.entrypoints.http.access import Access, bearer
from anabranch.entrypoints.http.errors import KNOWLEDGE, Headers
from anabranch.entrypoints.http.openapi import CURSORS
from anabranch.entrypoints.http.operations import (
    EVENT_STREAM,
    PIECE_BYTES,
    PIECE_S,
    Call,
    EventStream,
    Operation,
    gone,
    header,
    send_body,
    send_empty,
)
from anabranch.eventlog.reader import StreamReader, TooSlow
from anabranch.knowledge.model import Caller
from anabranch.pipeline.run import Listener, Run

KEEP_ALIVE = b": keep-alive\n\n"
# How long a client may take to read the end of an answer.
LAST_EVENTS_S = 5.0
# What ends a connection from our side: a client that still wants the stream reconnects with its cursor.
RECONNECT = (TooSlow, StreamUnavailable, NotFound, TimeoutError)
NOT_KEPT = "Streams are not kept here: several workers share no Redis."
NO_STREAM = "There is no such stream, or it has expired."
CLIENT_GONE = "The client has gone."
# Longer headers are ignored.
MAX_PREFER = 1_000
PREFERENCE = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
STREAM = EventStream(
    "ResumedEvent",
    "The events after the cursor, as they come, in the dialect of the question, each with its `id`. `event: reset` "
    "comes first if the cursor is not valid: then everything follows from the beginning. A comment line "
    "(`: keep-alive`) may come at any time.",
    (),
)


class StreamTiming(Value):
    """How long a client may take to read one piece, and the end of its stream."""

    piece_s: float = PIECE_S
    end_s: float = 1.0


TIMING = StreamTiming()
encode = msgspec.json.Encoder().encode


class LogReader(Protocol):
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
        self._why = why or ShuttingDown("The server is shutting down; come back in a moment.")
        for callback in tuple(self._callbacks):
            callback()

    @property
    def error(self) -> AnabranchError | None:
        """The reason once it is set; a copy for each reader: a traceback grows wherever it is raised."""
        return copy.copy(self._why)

    def add(self, callback: Callable[[], None]) -> None:
        self._callbacks.add(callback)

    def discard(self, callback: Callable[[], None]) -> None:
        self._callbacks.discard(callback)


class StreamStopped(Value):
    """`stopped` is false if the answer has ended, or if another worker writes it: then it goes on to its end."""

    stopped: bool


class AnswerInfo(Value, omit_defaults=True):
    """What a stream keeps about its answer: enough for another worker to write its end, in the same dialect."""

    dialect: str
    correlation_id: str
    language: str = ""
    prompt_version: str = ""


Writers = Mapping[str, Callable[[AnswerInfo], Frame]]


@dataclass(frozen=True)
class AnswerStreams:
    """Sends answers, recorded in the log where the client prefers it, and reads recorded ones again. `writers` render
    the end of an answer whose worker has stopped, by dialect."""

    anabranch: Anabranch
    access: Access
    closing: ShutdownEvent
    writers: Writers

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                "GET",
                "/v1/streams/{stream}",
                "resume",
                "Read a resumable answer from a cursor on",
                self._resume,
                KNOWLEDGE,
                scope="ask",
                identify=self._identify,
                stream=STREAM,
                statuses={200: "The rest of the answer.", 204: "The answer has ended, and the client has all of it."},
                parameters=CURSORS,
            ),
            Operation(
                "DELETE",
                "/v1/streams/{stream}",
                "stop_answer",
                "Stop a resumable answer",
                self._stop,
                KNOWLEDGE,
                scope="ask",
                identify=self._identify,
                response_types=(StreamStopped,),
            ),
        ]

    async def send(self, call: Call[Any], run: Run, frame: Frame, context: Context, **about: str) -> None:
        """Sends every event of a Run that has just begun; where the client prefers a resumable answer, records it.
        `about` are fields of its AnswerInfo."""
        if prefers_resumable(call.scope):
            info = AnswerInfo(correlation_id=context.correlation_id, **about)
            await self._record(call, run, frame, info, context)
        else:
            await follow(call, run, frame, self.anabranch.settings)

    async def _record(self, call: Call[Any], run: Run, frame: Frame, info: AnswerInfo, context: Context) -> None:
        """Records a Run, and sends what is recorded. If the log takes no stream, the answer is an ordinary one."""
        listener, recordings = run.listen(), self.anabranch.recordings
        try:
            if recordings is None:
                raise StreamUnavailable(NOT_KEPT)
            identity, about = _owner_of(call.scope, call.caller), msgspec.json.encode(info)
            stream = await recordings.record(run, listener, frame, identity=identity, about=about, context=context)
        except (StreamUnavailable, StreamFull):
            await follow(call, run, frame, self.anabranch.settings, listener)
            return
        except BaseException:
            run.stop(Cancelled(CLIENT_GONE))
            raise
        headers = [*call.headers, (b"stream-id", stream.encode()), (b"preference-applied", b"resumable")]
        async with AsyncExitStack() as stack:
            try:
                reader = await stack.enter_async_context(recordings.reader(stream, 0, self._lost))
            except AnabranchError:  # it is recorded all the same: a client with its id can read it later
                await send_empty(call.send, 200, [*EVENT_STREAM, *headers])
                return
            # An answer of this process ends before the process does.
            await self._read(reader, call, ShutdownEvent(), headers)

    async def _read(self, reader: StreamReader, call: Call[Any], closing: ShutdownEvent, headers: Headers = ()) -> None:
        separate = call.operation is None or call.operation.dialect.separate_comments
        await tail(
            reader,
            call.receive,
            call.send,
            frames=frames,
            heartbeat=lambda _: KEEP_ALIVE if separate else KEEP_ALIVE[:-1],
            heartbeat_s=self.anabranch.settings.heartbeat_interval,
            retry_ms=self.anabranch.timing.retry_ms,
            closing=closing,
            headers=headers,
            separate=separate,
        )

    async def _resume(self, call: Call[None]) -> None:
        recordings = self.anabranch.recordings
        if recordings is None:
            raise StreamUnavailable(NOT_KEPT)
        stream, after = call.params["stream"], cursor(call)
        async with AsyncExitStack() as stack:
            reader = await self._opened(stack, stream, after)
            # A stream that does not exist and one of another caller look the same.
            if reader is None or not _owns(call, reader.page.identity):
                raise NotFound(NO_STREAM)
            page = reader.page
            if page.ended and not (page.reset or page.more or any(entry.body for entry in page.entries)):
                await send_empty(call.send, 204)  # the client has every event
            elif call.scope["method"] == "HEAD":
                await send_empty(call.send, 200, EVENT_STREAM)
            else:
                await call.hold("stream_readers")
                ends = ShutdownEvent() if recordings.holds(stream) else self.closing
                with until_revoked(ends, self.anabranch.revocations, call.caller.credential) as closing:
                    await self._read(reader, call, closing)

    async def _stop(self, call: Call[None]) -> StreamStopped:
        recordings, stream = self.anabranch.recordings, call.params["stream"]
        if recordings is None:
            raise StreamUnavailable(NOT_KEPT)
        async with AsyncExitStack() as stack:
            reader = await self._opened(stack, stream, 0)
            if reader is None or not _owns(call, reader.page.identity):
                raise NotFound(NO_STREAM)
        return StreamStopped(stopped=recordings.stop(stream, Cancelled("The answer was stopped.")))

    async def _opened(self, stack: AsyncExitStack, stream: str, after: int) -> StreamReader | None:
        """A reader of a stream that exists."""
        recordings = self.anabranch.recordings
        if recordings is not None and re.fullmatch(r"[A-Za-z0-9_-]{16,64}", stream) is not None:
            with suppress(NotFound):
                return await stack.enter_async_context(recordings.reader(stream, after, self._lost))
        return None

    async def _identify(self, scope: Scope) -> Caller:
        """The caller. Where callers are not verified, an unknown token may be the one that the question came with."""
        try:
            return await self.access.caller(scope)
        except Unauthorized:
            if self.anabranch.settings.auth in ("api_key", "jwt"):
                raise
            return Caller()

    def _lost(self, page: Page) -> Entry:
        """The end of an answer whose worker has stopped."""
        info = msgspec.json.decode(page.about, type=AnswerInfo)
        event = Failed(
            code=LeaseLost.code,
            message="The server that wrote this answer has stopped before its end. Please ask again.",
        )
        return Entry(key=LeaseLost.code, revision=1, body=self.writers[info.dialect](info)(event), final=True)


@dataclass(frozen=True)
class AnswerSurface:
    """A surface that answers questions, whole or as a stream."""

    anabranch: Anabranch
    access: Access
    streams: AnswerStreams


async def whole(run: Run, receive: Receive) -> Answer:
    """The answer, or the error that replaced it. If the client disconnects, the Run ends."""
    leaving = asyncio.create_task(_stop_when_gone(receive, run))
    try:
        return await run.value()
    finally:
        leaving.cancel()


async def follow(
    call: Call[Any],
    run: Run,
    frame: Callable[[AnswerEvent], bytes],
    settings: Settings,
    listener: Listener | None = None,
) -> None:
    """Sends every event as `frame` renders it; empty ones are not sent. A `listener` is needed if the event loop has
    turned since the Run began."""
    leaving = asyncio.create_task(_stop_when_gone(call.receive, run))
    # A client that stops reading delays its Run, but not beyond the Run's own time limit.
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.total_timeout + LAST_EVENTS_S):
                await _send_events(call, listener or run.listen(), frame, settings.heartbeat_interval)
    finally:
        leaving.cancel()


async def _send_events(
    call: Call[Any], listener: Listener, frame: Callable[[AnswerEvent], bytes], heartbeat_s: float
) -> None:
    send = call.send
    async with listener:
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *call.headers]})
        more = True
        while more:
            try:
                async with asyncio.timeout(heartbeat_s):
                    events = await listener.ready()
            except TimeoutError:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                continue
            more = not isinstance(events[-1], TERMINAL)
            body = b"".join(map(frame, events))
            call.replies.count_response(len(body))
            if body or not more:
                await send_body(send, body, more=more)


async def _stop_when_gone(receive: Receive, run: Run) -> None:
    await gone(receive)
    run.stop(Cancelled(CLIENT_GONE))


def event_frame(name: bytes, data: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name, one_line(encode(data)))


def data_frame(data: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: %b\n\n" % one_line(encode(data))


def prefers_resumable(scope: Scope) -> bool:
    """`Prefer: resumable` (RFC 7240). Several headers are one list; the first preference of a name counts. `resumable`
    has no value."""
    text = b",".join([value for name, value in scope["headers"] if name == b"prefer"]).decode("latin-1")
    for preference in PREFERENCE.findall(text) if len(text) <= MAX_PREFER else ():
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip(" \t").lower() == "resumable":
            return value.strip(" \t") in ("", '""')
    return False


def _owner_of(scope: Scope, caller: Caller) -> str:
    """The owner of an answer. An unverified caller is known by its token; without one, every client that knows the
    answer's unguessable id may read it."""
    identity = StreamIdentity.of(caller)
    return _token_digest(scope) if identity is None else identity.stored


def _owns(call: Call[Any], stored: str) -> bool:
    """Whether an answer is the caller's. One without an owner is for everybody who knows its id."""
    identity = StreamIdentity.of(call.caller)
    return stored in ("", _token_digest(call.scope)) or (identity is not None and identity.may_read(stored))


def _token_digest(scope: Scope) -> str:
    """A digest of the token, or nothing."""
    token = None
    with suppress(Unauthorized):
        token = bearer(scope)
    return "" if token is None else "bearer:" + hashlib.blake2b(token.encode(), digest_size=16).hexdigest()


def frames(batch: Page) -> bytes:
    """Events with their ids. An end that its dialect does not have is not sent."""
    written = [b"id: %d\n%b" % (entry.sequence, entry.body) for entry in batch.entries if entry.body]
    if batch.reset:
        reset = {"type": "reset", "sequence": batch.head, "epoch": epoch(batch.head)}
        written.insert(0, event_frame(b"reset", reset))
    return b"".join(written)


def cursor(call: Call[Any]) -> int:
    """The client's cursor: an EventSource sends it as a header, and then the one in its address is older."""
    sent = header(call.scope, b"last-event-id") or call.query.get("last_event_id") or "0"
    if re.fullmatch(r"[0-9]{1,20}", sent) is None:
        raise InvalidQuestion("The cursor is not valid: send the last `id` that was received, or none.")
    return min(int(sent), LAST)


@contextmanager
def until_revoked(closing: ShutdownEvent, revocations: Revocations, credential: str | None) -> Iterator[ShutdownEvent]:
    """That event, for one reader: it is also set when the reader's API key is revoked or expires."""
    if credential is None:
        yield closing
        return
    event = ShutdownEvent()
    if closing.error is not None:
        event.set()
    closing.add(event.set)
    revocations.add(credential, event.set)
    try:
        yield event
    finally:
        closing.discard(event.set)
        revocations.discard(credential, event.set)


async def tail(
    reader: LogReader,
    receive: Receive,
    send: Send,
    *,
    frames: Callable[[Page], bytes],
    heartbeat: Callable[[int], bytes],
    heartbeat_s: float,
    retry_ms: tuple[int, int],
    closing: ShutdownEvent,
    headers: Headers = (),
    timing: StreamTiming = TIMING,
    separate: bool = True,
) -> None:
    """Sends what an entered reader returns, as `frames` renders it, and heartbeats in between. Returns at the stream's
    end, and when the client has disconnected or must reconnect with its cursor. A large batch takes several calls of
    `frames`, only the first of which has `reset` and only the last `ended`. What is no event is followed by a blank
    line if it is `separate`."""
    if (error := closing.error) is not None:
        raise error

    def send_piece(piece: bytes) -> Awaitable[None]:
        return send({"type": "http.response.body", "body": piece, "more_body": True})

    await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})
    with suppress(*RECONNECT):
        async with until_gone(receive, closing, "http.disconnect", timing) as timeouts:
            retry = b"retry: %d\n\n" % random.randint(*retry_ms)  # noqa: S311
            await timeouts.with_(send_piece(retry if separate else retry[:-1]))
            await pump(reader, send_piece, timeouts, lambda part: pieces(frames(part)), heartbeat, heartbeat_s)
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
        self._timer = self._loop.call_later(self._piece_s / 3, self._check)

    async def with_(self, sending: Awaitable[None]) -> None:
        self._since = self._loop.time()
        await sending
        self._since = None

    def _check(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._piece_s:
            self._stop()
        else:
            self._timer = self._loop.call_later(self._piece_s / 3, self._check)

    def end(self) -> None:
        self._timer.cancel()


async def pump(
    reader: LogReader,
    send: Callable[[AnyStr], Awaitable[None]],
    timeouts: ReadTimeouts,
    render: Callable[[Page], Iterable[AnyStr]],
    heartbeat: Callable[[int], AnyStr],
    heartbeat_s: float,
) -> None:
    """Sends everything that a reader returns, in pieces that the client must read in time, until its end."""
    ended = False
    while not ended:
        batch = await reader.next(heartbeat_s)
        if batch is None:
            await timeouts.with_(send(heartbeat(reader.head)))
            continue
        for part in parts(batch):
            for piece in render(part):
                await timeouts.with_(send(piece))
        ended = batch.ended


def pieces(body: bytes) -> Iterable[bytes]:
    """Pieces, each of which the client must read in time."""
    if len(body) <= PIECE_BYTES:
        return (body,) if body else ()
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))


def parts(batch: Page) -> Iterator[Page]:
    """Splits a batch, so that a client that reads slowly holds one part in memory; a larger entry is a part of its
    own."""
    *earlier, last = by_size(batch.entries)
    for number, entries in enumerate(earlier):
        yield msgspec.structs.replace(batch, entries=entries, reset=batch.reset and not number, ended=False)
    yield msgspec.structs.replace(batch, entries=last, reset=batch.reset and not earlier) if earlier else batch


def by_size(entries: Sequence[SequencedEntry]) -> list[Sequence[SequencedEntry]]:
    """Groups of entries of at most one piece; a larger entry is a group of its own."""
    groups: list[Sequence[SequencedEntry]] = []
    begin = size = 0
    for index, entry in enumerate(entries):
        if size and size + len(entry.body) > PIECE_BYTES:
            groups.append(entries[begin:index])
            begin, size = index, 0
        size += len(entry.body)
    return [*groups, entries[begin:]]


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
        leaving = asyncio.create_task(gone(receive, leave))
        leaving.add_done_callback(stop)
        closing.add(stop)
        if closing.error is not None:
            stop()
        try:
            yield timeouts
        finally:
            over = True
            timeouts.end()
            closing.discard(stop)
            leaving.cancel()
