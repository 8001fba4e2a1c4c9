"""A planner's stream over a WebSocket: the same batches, heartbeats and cursors as messages of JSON."""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from anabranch.domain.errors import Forbidden, NotFound, StreamUnavailable, Unauthorized
from anabranch.entrypoints.http import planner_views as views
from anabranch.entrypoints.http.exchange import header
from anabranch.entrypoints.http.tailing import GOODBYE_S, Closing, Patience, Tailed, parts, until_gone
from anabranch.streams.mux import Lagging

PROTOCOL = "anabranch.planner"
KEY = "bearer."
THE_END, NOT_ALLOWED, GOING_AWAY, COME_BACK = 1000, 1008, 1012, 1013
FOREIGN = "A web page of this origin may not open it; name the origin in CORS_ORIGINS."


def with_key(scope: Scope) -> Scope:
    """A web page cannot give a WebSocket headers: it offers its key as a subprotocol."""
    keys = [one.removeprefix(KEY) for one in scope.get("subprotocols", ()) if one.startswith(KEY)]
    if not keys:
        return scope
    return {**scope, "headers": [*scope["headers"], *((b"authorization", f"Bearer {key}".encode()) for key in keys)]}


def check_origin(scope: Scope, named: Collection[str]) -> None:
    """Browsers open WebSockets across origins without asking us: so it is we who look. Others send no Origin."""
    host = header(scope, b"host") or ""
    for name, value in scope["headers"]:
        origin = value.decode("latin-1")
        if name == b"origin" and origin not in named and origin.partition("://")[2] != host:
            raise Forbidden(FOREIGN)


async def follow(
    reader: Tailed, scope: Scope, receive: Receive, send: Send, *, heartbeat_s: float, closing: Closing
) -> None:
    """Everything that an entered reader hands out, until the end, or until the client goes or must come back."""
    offered = PROTOCOL in scope.get("subprotocols", ())
    code = THE_END
    await receive()
    try:
        await send({"type": "websocket.accept", "subprotocol": PROTOCOL if offered else None, "headers": []})
        async with until_gone(receive, closing, "websocket.disconnect") as patience:
            await _pump(reader, send, patience, heartbeat_s)
    except (Lagging, StreamUnavailable):
        code = COME_BACK
    except NotFound:
        pass  # the step before has been forgotten, and no other came
    except TimeoutError:
        match closing.error:
            case None:
                code = COME_BACK
            case Unauthorized():
                code = NOT_ALLOWED
            case _:
                code = GOING_AWAY
    except OSError:
        return  # the client has gone while something was sent
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(GOODBYE_S):
            await send({"type": "websocket.close", "code": code, "reason": ""})


async def _pump(reader: Tailed, send: Send, patience: Patience, heartbeat_s: float) -> None:
    frames = views.Frames()
    while True:
        batch = await reader.next(heartbeat_s)
        if batch is None:
            await patience.with_(send({"type": "websocket.send", "text": views.heartbeat(reader.head).decode()}))
            continue
        for part in parts(batch):
            for message in frames.messages(part):
                await patience.with_(send({"type": "websocket.send", "text": message.decode()}))
        if batch.ended:
            return
