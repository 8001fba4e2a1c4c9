"""Sends the answer of a Run to a client: whole, as server-sent events, or as events that are recorded in the log and
can be read again at /v1/streams."""

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.resumable_answers import Frame
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import (
    AnabranchError,
    Cancelled,
    InvalidQuestion,
    LeaseLost,
    NotFound,
    StreamFull,
    StreamUnavailable,
    Unauthorized,
)
from anabranch.domain.eventlog import LAST, Entry, Page, epoch
from anabranch.domain.events import TERMINAL, AnswerEvent, Failed
from anabranch.domain.model import Answer, Context, Value
from anabranch.entrypoints.http.access import Access, bearer
from anabranch.entrypoints.http.asgi import EVENT_STREAM, Headers, header, send_body, send_empty
from anabranch.entrypoints.http.errors import KNOWLEDGE
from anabranch.entrypoints.http.log_stream import ShutdownEvent, tail, until_revoked
from anabranch.entrypoints.http.openapi import integer, parameter
from anabranch.entrypoints.http.operations import Call, EventStream, Operation
from anabranch.eventlog.reader import StreamReader
from anabranch.knowledge.model import Caller
from anabranch.pipeline.run import Listener, Run

KEEP_ALIVE = b": keep-alive\n\n"
# How long a client may take to read the end of an answer.
LAST_EVENTS_S = 5.0
RESUMABLE = "resumable"
APPLIED = (b"preference-applied", RESUMABLE.encode())
LOST = "The server that wrote this answer has stopped before its end. Please ask again."
# Longer headers are ignored.
MAX_PREFER = 1_000
PREFERENCE = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
DIGEST_BYTES = 16
NOT_HERE = "There is no such stream, or it has expired."
NOT_KEPT = "Streams are not kept here: several workers share no Redis."
NOT_A_CURSOR = "The cursor is not valid: send the last `id` that was received, or none."
STREAM_ID = re.compile(r"[A-Za-z0-9_-]{16,64}", re.ASCII)
CURSOR = re.compile(r"[0-9]{1,20}", re.ASCII)
STREAM = EventStream(
    "ResumedEvent",
    "The events after the cursor, as they come, in the dialect of the question, each with its `id`. `event: reset` "
    "comes first if the cursor is not valid: then everything follows from the beginning. A comment line "
    "(`: keep-alive`) may come at any time.",
    (),
)


class AnswerInfo(Value, omit_defaults=True):
    """What a stream keeps about its answer: enough for another worker to write its end, in the same dialect."""

    dialect: str
    correlation_id: str
    language: str = ""
    prompt_version: str = ""


Writers = Mapping[str, Callable[[AnswerInfo], Frame]]


class AnswerStreams:
    """Sends answers, recorded in the log where the client prefers it, and reads recorded ones again. `writers` render
    the end of an answer whose worker has stopped, by dialect."""

    def __init__(self, anabranch: Anabranch, access: Access, closing: ShutdownEvent, writers: Writers) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = access
        self._closing = closing
        self._writers = writers
        self._never = ShutdownEvent()

    def operations(self) -> list[Operation[Any]]:
        cursor_schema = integer(0, LAST)
        return [
            Operation(
                method="GET",
                path="/v1/streams/{stream}",
                name="resume",
                summary="Read a resumable answer from a cursor on",
                dialect=KNOWLEDGE,
                handler=self._resume,
                stream=STREAM,
                statuses={200: "The rest of the answer.", 204: "The answer has ended, and the client has all of it."},
                parameters=(
                    parameter("Last-Event-ID", cursor_schema, "The last id that was received", "header"),
                    parameter("last_event_id", cursor_schema, "The same, for clients that cannot send headers"),
                ),
            )
        ]

    async def send(self, call: Call[Any], run: Run, frame: Frame, info: AnswerInfo, context: Context) -> None:
        """Sends every event of a Run that has just begun; where the client prefers a resumable answer, records it."""
        if preferred(call.scope):
            await self._record(call, run, frame, info, context)
        else:
            await follow(run, call.receive, call.send, frame, self._settings, call.headers)

    async def _record(self, call: Call[Any], run: Run, frame: Frame, info: AnswerInfo, context: Context) -> None:
        """Records a Run, and sends what is recorded. If the log takes no stream, the answer is an ordinary one."""
        listener, recordings, send = run.listen(), self._anabranch.recordings, call.send
        if recordings is None:
            await follow(run, call.receive, send, frame, self._settings, call.headers, listener)
            return
        identity = identity_of(call.scope, context.user_id, operator=context.operator)
        about = msgspec.json.encode(info)
        try:
            stream = await recordings.record(run, listener, frame, identity=identity, about=about, context=context)
        except (StreamUnavailable, StreamFull):
            await follow(run, call.receive, send, frame, self._settings, call.headers, listener)
            return
        except BaseException:
            run.stop(Cancelled("The client has gone."))
            raise
        headers = [*call.headers, (b"stream-id", stream.encode()), APPLIED]
        async with AsyncExitStack() as stack:
            try:
                reader = await stack.enter_async_context(recordings.reader(stream, 0, self._lost))
            except AnabranchError:  # it is recorded all the same: a client with its id can read it later
                await send_empty(send, 200, [*EVENT_STREAM, *headers])
                return
            # An answer of this process ends before the process does.
            await self._read(reader, call, self._never, headers)

    async def _read(self, reader: StreamReader, call: Call[Any], closing: ShutdownEvent, headers: Headers = ()) -> None:
        await tail(
            reader,
            call.receive,
            call.send,
            frames=frames,
            heartbeat=lambda _: KEEP_ALIVE,
            heartbeat_s=self._settings.heartbeat_interval,
            closing=closing,
            headers=headers,
        )

    async def _resume(self, call: Call[None]) -> None:
        recordings = self._anabranch.recordings
        if recordings is None:
            raise StreamUnavailable(NOT_KEPT)
        stream, after = call.params["stream"], cursor(call)
        async with AsyncExitStack() as stack:
            reader = None
            if STREAM_ID.fullmatch(stream) is not None:
                with suppress(NotFound):
                    reader = await stack.enter_async_context(recordings.reader(stream, after, self._lost))
            # A stream that does not exist and one of another caller look the same.
            caller = await self._owner(call.scope, reader.page.identity if reader else None)
            if caller is None or reader is None:
                raise NotFound(NOT_HERE)
            if _is_complete(reader.page):
                await send_empty(call.send, 204)
            elif call.scope["method"] == "HEAD":
                await send_empty(call.send, 200, EVENT_STREAM)
            else:
                ends = ShutdownEvent() if recordings.holds(stream) else self._closing
                with until_revoked(ends, self._anabranch.revocations, caller.key) as closing:
                    await self._read(reader, call, closing)

    async def _owner(self, scope: Scope, identity: str | None) -> Caller | None:
        """The caller, if the stream is theirs. Where callers are not verified, an unknown token may be the one that the
        question came with."""
        if identity is not None and identity in ("", bearer_of(scope)):
            return Caller()
        try:
            caller = await self._access.caller(scope)
        except Unauthorized:
            if self._settings.auth in ("api_key", "jwt"):
                raise
            return None
        return caller if identity == identity_of(scope, caller.user, operator=caller.operator) else None

    def _lost(self, page: Page) -> Entry:
        """The end of an answer whose worker has stopped."""
        info = msgspec.json.decode(page.about, type=AnswerInfo)
        body = self._writers[info.dialect](info)(Failed(code=LeaseLost.code, message=LOST))
        return Entry(key=LeaseLost.code, revision=1, body=body, final=True)


async def whole(run: Run, receive: Receive) -> Answer:
    """The answer, or the error that replaced it. If the client disconnects, the Run ends."""
    gone = asyncio.create_task(_stop_when_gone(receive, run))
    try:
        return await run.value()
    finally:
        gone.cancel()


async def follow(
    run: Run,
    receive: Receive,
    send: Send,
    frame: Callable[[AnswerEvent], bytes],
    settings: Settings,
    headers: Headers = (),
    listener: Listener | None = None,
) -> None:
    """Sends every event as `frame` renders it; empty ones are not sent. A `listener` is needed if the event loop has
    turned since the Run began."""
    gone = asyncio.create_task(_stop_when_gone(receive, run))
    # A client that stops reading delays its Run, but not beyond the Run's own time limit.
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.total_timeout + LAST_EVENTS_S):
                await _send_events(listener or run.listen(), send, frame, settings.heartbeat_interval, headers)
    finally:
        gone.cancel()


async def _send_events(
    listener: Listener, send: Send, frame: Callable[[AnswerEvent], bytes], heartbeat_s: float, headers: Headers
) -> None:
    async with listener:
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})
        while True:
            try:
                async with asyncio.timeout(heartbeat_s):
                    events = await listener.ready()
            except TimeoutError:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                continue
            more = not isinstance(events[-1], TERMINAL)
            frames = b"".join(map(frame, events))
            if frames or not more:
                await send_body(send, frames, more=more)
            if not more:
                return


async def _stop_when_gone(receive: Receive, run: Run) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    run.stop(Cancelled("The client has gone."))


def preferred(scope: Scope) -> bool:
    """`Prefer: resumable` (RFC 7240)."""
    for name, _ in scope["headers"]:
        if name == b"prefer":
            return _preferred(scope)
    return False


def _preferred(scope: Scope) -> bool:
    """Several headers are one list; the first preference of a name counts. `resumable` has no value."""
    text = b",".join(value for name, value in scope["headers"] if name == b"prefer").decode("latin-1")
    for preference in PREFERENCE.findall(text) if len(text) <= MAX_PREFER else ():
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip(" \t").lower() == RESUMABLE:
            return value.strip(" \t") in ("", '""')
    return False


def identity_of(scope: Scope, user: str | None, *, operator: bool) -> str:
    """The owner of an answer. An unverified caller is known by its token; without one, every client that knows the
    answer's unguessable id may read it."""
    if user is not None:
        return f"user:{user}"
    return "operator" if operator else bearer_of(scope)


def bearer_of(scope: Scope) -> str:
    """A digest of the token, or nothing."""
    try:
        token = bearer(scope)
    except Unauthorized:
        return ""
    if token is None:
        return ""
    return "bearer:" + hashlib.blake2b(token.encode(), digest_size=DIGEST_BYTES).hexdigest()


def frames(batch: Page) -> bytes:
    """Events with their ids. An end that its dialect does not have is not sent."""
    written = [b"id: %d\n%b" % (entry.sequence, entry.body) for entry in batch.entries if entry.body]
    if batch.reset:
        data = msgspec.json.encode({"type": "reset", "sequence": batch.head, "epoch": epoch(batch.head)})
        written.insert(0, b"event: reset\ndata: %b\n\n" % data)
    return b"".join(written)


def cursor(call: Call[Any]) -> int:
    """The client's cursor: an EventSource sends it as a header, and then the one in its address is older."""
    sent = header(call.scope, b"last-event-id") or call.query.get("last_event_id") or "0"
    if CURSOR.fullmatch(sent) is None:
        raise InvalidQuestion(NOT_A_CURSOR)
    return min(int(sent), LAST)


def _is_complete(page: Page) -> bool:
    """Whether the client has every event."""
    return page.ended and not (page.reset or page.more or any(entry.body for entry in page.entries))
