"""Following a Run on a client's behalf, as one value or event by event: when the client goes, the Run ends."""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import Cancelled
from anabranch.domain.events import TERMINAL, AnswerEvent
from anabranch.domain.model import Answer
from anabranch.entrypoints.http.asgi import EVENT_STREAM, Headers, header, send_body
from anabranch.pipeline.run import Listener, Run

KEEP_ALIVE = b": keep-alive\n\n"
LAST_WORDS_S = 5.0
MAX_TRACESTATE = 512
TRACEPARENT = re.compile(r"[\da-f]{2}-[\da-f]{32}-[\da-f]{16}-[\da-f]{2}")


async def whole(run: Run, receive: Receive) -> Answer:
    """The answer, or the error that took its place."""
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
    """Every event as `frame` writes it; one that it writes as nothing is not sent. A `listener` is given where the loop
    has turned since the Run began."""
    gone = asyncio.create_task(_stop_when_gone(receive, run))
    # A client that stops reading holds its Run back, but not beyond the Run's own time and a few last words.
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.total_timeout + LAST_WORDS_S):
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


def trace(scope: Scope) -> tuple[str | None, str | None]:
    """`traceparent` and `tracestate`, as far as they can be carried on."""
    traceparent, tracestate = header(scope, b"traceparent") or "", header(scope, b"tracestate") or ""
    if TRACEPARENT.fullmatch(traceparent) is None:
        return None, None
    return traceparent, tracestate if tracestate.isprintable() and len(tracestate) <= MAX_TRACESTATE else None
