"""Answers that can be taken up again: who asks for one, whose it is, and how it is read out of the log."""

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Literal

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.resumable_answers import Frame
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
from anabranch.domain.events import AnswerEvent, Failed
from anabranch.domain.model import Context, Value
from anabranch.entrypoints.http import chat_wire, query_wire, rag_wire
from anabranch.entrypoints.http.access import Access, bearer
from anabranch.entrypoints.http.asgi import EVENT_STREAM, Headers, header
from anabranch.entrypoints.http.log_stream import ShutdownEvent, tail, until_revoked
from anabranch.entrypoints.http.run_stream import KEEP_ALIVE, follow
from anabranch.eventlog.reader import Batch, StreamReader
from anabranch.knowledge.model import Caller
from anabranch.pipeline.run import Run

Dialect = Literal["chat", "rag", "query"]

RESUMABLE = "resumable"
APPLIED = (b"preference-applied", RESUMABLE.encode())
LOST = "The server that wrote this answer is gone, and the rest of it with it. Please ask again."
# Longer ones are no preferences; and what follows is not tried on them.
LONGEST = 1_000
PREFERENCE = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
DIGEST_BYTES = 16


class AnswerInfo(Value, omit_defaults=True):
    """What a stream says of itself: enough to write its end in its owner's place, in the dialect that it began in."""

    dialect: Dialect
    correlation_id: str
    language: str = ""
    prompt_version: str = ""


class Resuming:
    """The way of an answer to a client through the log. The first connection and all that follow read it there."""

    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._never = ShutdownEvent()

    async def follow(
        self,
        run: Run,
        scope: Scope,
        receive: Receive,
        send: Send,
        frame: Frame,
        *,
        about: AnswerInfo,
        context: Context,
        headers: Headers = (),
    ) -> None:
        """Record a Run that has just been started, and send what is recorded. Where the log takes no stream, it is an
        ordinary answer: a preference binds nobody."""
        listener = run.listen()
        recordings = self._anabranch.recordings
        if recordings is None:
            await follow(run, receive, send, frame, self._settings, headers, listener)
            return
        identity = identity_of(scope, context.user_id, operator=context.operator)
        try:
            stream = await recordings.record(
                run, listener, frame, identity=identity, about=msgspec.json.encode(about), context=context
            )
        except (StreamUnavailable, StreamFull):
            await follow(run, receive, send, frame, self._settings, headers, listener)
            return
        except BaseException:
            run.stop(Cancelled("The client has gone."))
            raise
        named = [*headers, (b"stream-id", stream.encode()), APPLIED]
        async with AsyncExitStack() as stack:
            try:
                reader = await stack.enter_async_context(recordings.reader(stream, 0, lost))
            except AnabranchError:  # it is being written all the same: whoever has its id comes back for it
                await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *named]})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            await self.read(reader, receive, send, headers=named)

    async def read(
        self,
        reader: StreamReader,
        receive: Receive,
        send: Send,
        *,
        closing: ShutdownEvent | None = None,
        headers: Headers = (),
    ) -> None:
        """What a reader finds. One without `closing` reads an answer of our own: that ends before the process does."""
        await tail(
            reader,
            receive,
            send,
            frames=frames,
            heartbeat=lambda _: KEEP_ALIVE,
            heartbeat_s=self._settings.heartbeat_interval,
            closing=closing or self._never,
            headers=headers,
        )


def preferred(scope: Scope) -> bool:
    """`Prefer: resumable` (RFC 7240)."""
    for name, _ in scope["headers"]:
        if name == b"prefer":
            return _preferred(scope)
    return False


def _preferred(scope: Scope) -> bool:
    """Several headers are one list; of several preferences of one name the first counts. Ours has no value."""
    text = b",".join(value for name, value in scope["headers"] if name == b"prefer").decode("latin-1")
    for preference in PREFERENCE.findall(text) if len(text) <= LONGEST else ():
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip(" \t").lower() == RESUMABLE:
            return value.strip(" \t") in ("", '""')
    return False


def identity_of(scope: Scope, user: str | None, *, operator: bool) -> str:
    """Whose an answer is. One whom nobody has verified is known by the token that came along; without one, whoever
    knows the answer's unguessable id may read it."""
    if user is not None:
        return f"user:{user}"
    return "operator" if operator else bearer_of(scope)


def bearer_of(scope: Scope) -> str:
    try:
        token = bearer(scope)
    except Unauthorized:
        return ""
    if token is None:
        return ""
    return "bearer:" + hashlib.blake2b(token.encode(), digest_size=DIGEST_BYTES).hexdigest()


def frames(batch: Batch) -> bytes:
    """Each under its number. An end that its dialect has no word for is not sent."""
    written = [b"id: %d\n%b" % (entry.sequence, entry.body) for entry in batch.entries if entry.body]
    if batch.reset:
        data = msgspec.json.encode({"type": "reset", "sequence": batch.head, "epoch": epoch(batch.head)})
        written.insert(0, b"event: reset\ndata: %b\n\n" % data)
    return b"".join(written)


def lost(page: Page) -> Entry:
    """The end of an answer whose worker is gone."""
    about = msgspec.json.decode(page.about, type=AnswerInfo)
    body = WRITERS[about.dialect](about)(Failed(code=LeaseLost.code, message=LOST))
    return Entry(key=LeaseLost.code, revision=1, body=body, final=True)


def _rag(about: AnswerInfo) -> Callable[[AnswerEvent], bytes]:
    return rag_wire.RagForm(
        query_id="",
        language=about.language,
        prompt_version=about.prompt_version,
        correlation_id=about.correlation_id,
    ).frame


def _query(_about: AnswerInfo) -> Callable[[AnswerEvent], bytes]:
    return query_wire.QueryForm(
        query_id="", conversation_id="", model="", include_sources=False, response_format="text"
    ).frame


WRITERS: Mapping[Dialect, Callable[[AnswerInfo], Callable[[AnswerEvent], bytes]]] = {
    "chat": lambda _: chat_wire.frame,
    "rag": _rag,
    "query": _query,
}

NOT_HERE = "There is no such stream, or it has been forgotten."
NOT_KEPT = "Streams are not kept here: several workers share no Redis."
NOT_A_CURSOR = "The cursor is not one of ours: send the last `id` that came, or none."
STREAM_ID = re.compile(r"[A-Za-z0-9_-]{16,64}", re.ASCII)
CURSOR = re.compile(r"[0-9]{1,20}", re.ASCII)


class StreamSurface:
    def __init__(self, anabranch: Anabranch, closing: ShutdownEvent) -> None:
        self._anabranch = anabranch
        self._access = Access(anabranch)
        self._resuming = Resuming(anabranch)
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        recordings = self._anabranch.recordings
        if recordings is None:
            raise StreamUnavailable(NOT_KEPT)
        stream, after = scope["path_params"]["stream"], cursor(scope)
        async with AsyncExitStack() as stack:
            reader = None
            if STREAM_ID.fullmatch(stream) is not None:
                with suppress(NotFound):
                    reader = await stack.enter_async_context(recordings.reader(stream, after, lost))
            # What is not there and what is not the caller's are the same to them.
            caller = await self._owner(scope, reader.page.identity if reader else None)
            if caller is None or reader is None:
                raise NotFound(NOT_HERE)
            if _has_all(reader.page):
                await _end(send, 204)
            elif scope["method"] == "HEAD":
                await _end(send, 200)
            else:
                # One of our own ends before the process does.
                ends = ShutdownEvent() if recordings.holds(stream) else self._closing
                with until_revoked(ends, self._anabranch.revocations, caller.key) as closing:
                    await self._resuming.read(reader, receive, send, closing=closing)

    async def _owner(self, scope: Scope, identity: str | None) -> Caller | None:
        """The caller, if the stream is theirs. A token that nobody here knows is none the worse for it where callers
        are not verified: it may be the one that the question came with."""
        if identity is not None and identity in ("", bearer_of(scope)):
            return Caller()
        try:
            caller = await self._access.caller(scope)
        except Unauthorized:
            if self._anabranch.settings.auth in ("api_key", "jwt"):
                raise
            return None
        return caller if identity == identity_of(scope, caller.user, operator=caller.operator) else None


def cursor(scope: Scope) -> int:
    """What the client has: an EventSource sends it as a header, and then the one in its address is an old one."""
    said = header(scope, b"last-event-id") or QueryParams(scope["query_string"]).get("last_event_id") or "0"
    if CURSOR.fullmatch(said) is None:
        raise InvalidQuestion(NOT_A_CURSOR)
    return min(int(said), LAST)


def _has_all(page: Page) -> bool:
    """Whether nothing is left that a client could hear."""
    return page.ended and not (page.reset or page.more or any(entry.body for entry in page.entries))


async def _end(send: Send, status: int) -> None:
    headers = list(EVENT_STREAM) if status == 200 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
