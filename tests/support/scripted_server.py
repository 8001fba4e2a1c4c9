"""A server that speaks the wire of planner streams and resumable answers, and misbehaves as a script tells it to."""

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any, Self

import msgspec
from aiohttp import web

from anabranch.domain.eventlog import EPOCH, epoch
from anabranch.domain.model import Value
from anabranch.testing.http_server import json
from support.cutting_proxy import no_more_accepted

STREAM_ID = "st-1"
RETRY = b"retry: 2\n\n"


class Act(Value):
    """What one connection gets. A status other than 200 is all of it. `epoch` renumbers the stream before it; with
    `replay` the cursor is ignored (everything comes again); then it is cut after `cut_after` bytes of the events, ended
    in due form after `frames` of them, or left hanging after them (`hang`)."""

    status: int = 200
    retry_after: str | None = None
    epoch: int | None = None
    replay: bool = False
    cut_after: int | None = None
    frames: int | None = None
    hang: bool = False
    close_code: int = 1012


class Asked(Value):
    """What a client came with."""

    path: str
    cursor: int
    authorization: str | None
    at: float = 0.0


def event(sequence: int, type_: str = "subagent_result", *, status: str = "partial", **payload: Any) -> dict[str, Any]:
    content = {"stage": "documentation", "status": status, "payload": payload, "revision": sequence}
    key = "doc" if type_ == "subagent_result" else None
    return {
        "session_id": "s",
        "plan_step_id": "p",
        "sequence": sequence,
        "type": type_,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "content": {**content, "result_key": key},
        "telemetry": {},
    }


def step(length: int = 12, text: str = "Grüße \N{LINE SEPARATOR} 🌊") -> list[dict[str, Any]]:
    """A step's events, the end included."""
    middle = [event(sequence, text=f"{text} {sequence}") for sequence in range(2, length)]
    end = event(length, "plan_step_completed", status="success", next_step_id=None)
    return [event(1, "step_started", status="in_progress"), *middle, end]


class Scripted:
    """Serves `events` as a step (SSE and WebSocket) and as an answer, one act of the script a connection; when the
    script is at its end, as it should be."""

    def __init__(self, events: Sequence[dict[str, Any]], acts: Sequence[Act] = (), *, kept: bool = True) -> None:
        self.events = list(events)
        self.acts = list(acts)
        self.asked: list[Asked] = []
        self.kept = kept
        self._last = Act()

    async def __aenter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = web.Server(self._serve, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await no_more_accepted(self._socket)
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def connections(self) -> int:
        return len(self._server.connections)

    @property
    def cursors(self) -> list[int]:
        return [asked.cursor for asked in self.asked]

    @property
    def _head(self) -> int:
        return int(self.events[-1]["sequence"])

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers.get("Last-Event-ID") or request.query.get("last_event_id") or "0"
        if request.method == "GET" and request.path.endswith(
            "/events"
        ):  # a WebSocket client wants to know why it was refused
            return self._refused(self._last)
        key = request.headers.get("Authorization")
        asked = Asked(path=request.path, cursor=int(given), authorization=key, at=time.monotonic())
        self.asked.append(asked)
        act = self._last = self.acts.pop(0) if self.acts else Act()
        if act.status != 200:
            return self._refused(act)
        if request.path.startswith("/planner") and request.method != "GET":
            return json(b'{"session_id":"s","plan_step_id":"p","status":"cancelled","accepted":true,"sequence":7}', 201)
        if act.epoch is not None:
            self._renumber(act.epoch)
        if request.path.endswith("/ws"):
            return await self._messages(request, asked.cursor, act)
        if asked.cursor == self._head and not act.replay:
            return web.Response(status=204)
        return await self._stream(request, asked.cursor, act)

    def _refused(self, act: Act) -> web.Response:
        headers = {"Retry-After": act.retry_after} if act.retry_after else {}
        return json(b'{"error":"scripted","message":"As the script says."}', act.status, **headers)

    def _renumber(self, epoch_: int) -> None:
        base = epoch_ * EPOCH
        self.events = [{**event, "sequence": base + place} for place, event in enumerate(self.events, 1)]

    def _behind(self, cursor: int, act: Act) -> tuple[bool, list[dict[str, Any]]]:
        head = self._head
        reset = bool(cursor) and (epoch(cursor) != epoch(head) or cursor > head)
        after = 0 if reset or act.replay else cursor
        return reset, [event for event in self.events if event["sequence"] > after]

    def _batches(self, cursor: int, act: Act) -> list[dict[str, Any]]:
        reset, events = self._behind(cursor, act)
        head = self._head
        said: list[dict[str, Any]] = [{"type": "reset", "sequence": head, "epoch": epoch(head)}] if reset else []
        # Its sequence is ahead of what was delivered: whoever takes it for a cursor loses events.
        said.append({"type": "heartbeat", "sequence": head})
        batches = [events[place : place + 5] for place in range(0, len(events), 5)]
        return [*said, *({"type": "event_batch", "batch_sequence": 1, "events": batch} for batch in batches)]

    async def _stream(self, request: web.BaseRequest, cursor: int, act: Act) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.kept and request.method == "POST":
            response.headers["Stream-Id"] = STREAM_ID
        await response.prepare(request)
        is_step = request.path.endswith("/stream") and request.path.startswith("/planner")
        frames = self.step_frames(cursor, act) if is_step else self._answer_frames(cursor, act)
        await response.write(RETRY)
        body = b"".join(frames[: act.frames])
        if act.cut_after is not None:
            await response.write(body[: act.cut_after])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(body)
        if act.hang:
            await asyncio.Event().wait()
        await response.write_eof()
        return response

    def step_frames(self, cursor: int, act: Act) -> list[bytes]:
        frames = []
        for message in self._batches(cursor, act):
            name = b"planner_stream" if message["type"] == "event_batch" else message["type"].encode()
            head = b"id: %d\n" % message["events"][-1]["sequence"] if "events" in message else b""
            frames.append(head + b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(message)))
        return frames

    def _answer_frames(self, cursor: int, act: Act) -> list[bytes]:
        reset, events = self._behind(cursor, act)
        frames = [b'event: reset\ndata: {"type":"reset","sequence":%d,"epoch":1}\n\n' % self._head] if reset else []
        for said in events:
            number = b"id: %d\n" % said["sequence"] if self.kept else b""
            text = msgspec.json.encode(said["content"]["payload"])
            named = said.get("named", "token").encode()
            frames.append(b": keep-alive\n\n%bevent: %b\ndata: %b\n\n" % (number, named, text))
        return frames

    async def _messages(self, request: web.BaseRequest, cursor: int, act: Act) -> web.StreamResponse:
        channel = web.WebSocketResponse(protocols=("anabranch.planner",))
        await channel.prepare(request)
        left = act.cut_after
        for message in self._batches(cursor, act)[: act.frames]:
            text = msgspec.json.encode(message).decode()
            if left is not None and left < len(text):
                assert request.transport is not None
                request.transport.abort()
                return channel
            left = None if left is None else left - len(text)
            await channel.send_str(text)
        if act.hang:
            await channel.receive()
        ended = act.cut_after is None and act.frames is None
        await channel.close(code=1000 if ended else act.close_code)
        return channel
