"""GET /v1/streams/{id}: the rest of an answer that was asked for as resumable, or all of it again."""

import re
from contextlib import AsyncExitStack, suppress

from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.domain.errors import InvalidQuestion, NotFound, StreamUnavailable, Unauthorized
from anabranch.domain.streams import LAST, Page
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.exchange import EVENT_STREAM, header
from anabranch.entrypoints.http.resuming import Resuming, bearer_of, identity_of, lost
from anabranch.entrypoints.http.tailing import Closing, until_revoked
from anabranch.knowledge.model import Caller

NOT_HERE = "There is no such stream, or it has been forgotten."
NOT_KEPT = "Streams are not kept here: several workers share no Redis."
NOT_A_CURSOR = "The cursor is not one of ours: send the last `id` that came, or none."
STREAM_ID = re.compile(r"[A-Za-z0-9_-]{16,64}", re.ASCII)
CURSOR = re.compile(r"[0-9]{1,20}", re.ASCII)


class StreamSurface:
    def __init__(self, anabranch: Anabranch, closing: Closing) -> None:
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
                ends = Closing() if recordings.holds(stream) else self._closing
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
