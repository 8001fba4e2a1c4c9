"""A client for planner steps: it starts them, pushes results, and follows their streams."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Literal, TypeVar

import msgspec
from yarl import URL

from anabranch.client.connection import Reconnect, StreamClient
from anabranch.client.events import Begun, PlannerEvent, Pushed, Replay, Reset
from anabranch.domain.errors import FailureKind, InvalidQuestion, NotFound, UpstreamError
from anabranch.domain.model import Value
from anabranch.network.sse import Frame

T = TypeVar("T")
Transport = Literal["sse", "ws"]
# The event names of a step's stream; "message" is an event without a name.
EVENT_NAMES = ("planner_stream", "heartbeat", "reset", "message")


class PlannerClient(StreamClient):
    """Use it as `async with`, or pass a session of your own and close that yourself."""

    async def begin(self, envelope: Mapping[str, Any]) -> Begun:
        """Starts a step. Sending the same envelope twice is one step, so the request is retried until it succeeds."""
        session_id = envelope.get("session_id")
        if not isinstance(session_id, str):
            raise InvalidQuestion("The envelope has no session_id.")
        url = self._server.url("planner", "sessions", session_id, "steps")
        reply = await self._server.call("POST", url, envelope, repeatable=True)
        return msgspec.structs.replace(_decoded(reply.body, Begun), created=reply.status == 201)

    async def push(
        self,
        session_id: str,
        plan_step_id: str,
        subagent: str,
        status: str,
        payload: Mapping[str, Any] | None = None,
        *,
        revision: int | None = None,
        **more: Any,
    ) -> Pushed:
        """Pushes a result, or a part of one. With a revision the request is retried until it succeeds."""
        fragment = {"status": status, "payload": payload or {}, **more}
        if revision is not None:
            fragment["revision"] = revision
        url = self._step(session_id, plan_step_id, "subagents", subagent, "events")
        reply = await self._server.call("POST", url, fragment, repeatable=revision is not None)
        return _decoded(reply.body, Pushed)

    async def push_all(
        self, session_id: str, plan_step_id: str, subagent: str, fragments: Iterable[Mapping[str, Any]]
    ) -> tuple[Pushed, ...]:
        """Pushes several fragments in their order. A rejected one does not affect the others."""
        listed = list(fragments)
        url = self._step(session_id, plan_step_id, "subagents", subagent, "events")
        repeatable = all("revision" in fragment for fragment in listed)
        reply = await self._server.call("POST", url, listed, repeatable=repeatable)
        return _decoded(reply.body, _PushResults).results

    async def progress(
        self, session_id: str, plan_step_id: str, payload: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """Reports the planner's own progress: `stage`, `status`, `next_step_id`."""
        url = self._step(session_id, plan_step_id, "progress")
        await self._server.call("POST", url, {"payload": payload or {}, **more}, repeatable=False)

    async def safety(self, session_id: str, plan_step_id: str, decision: str, reason: str = "") -> str:
        """The decision as the server applied it. Anything other than allow or warn is block."""
        body = {"decision": decision, "reason": reason}
        url = self._step(session_id, plan_step_id, "safety")
        return _decoded((await self._server.call("POST", url, body, repeatable=True)).body, _SafetyDecision).decision

    async def cancel(self, session_id: str, plan_step_id: str) -> str:
        """Cancels the step. Returns its status: `cancelled`, or its status if it had already ended."""
        reply = await self._server.call("DELETE", self._step(session_id, plan_step_id), repeatable=True)
        return _decoded(reply.body, _StepStatus).status

    async def events(self, session_id: str, plan_step_id: str, *, after: int = 0, limit: int = 100) -> Replay:
        """One page of a step's stored events."""
        url = self._step(session_id, plan_step_id, "events")
        params = {"after": str(after), "limit": str(limit)}
        return _decoded((await self._server.call("GET", url, repeatable=True, params=params)).body, Replay)

    async def follow(
        self, session_id: str, plan_step_id: str, *, after: int = 0, transport: Transport = "sse"
    ) -> AsyncGenerator[PlannerEvent | Reset]:
        """Every event after the cursor exactly once, across reconnects; then the events of the next step, if the last
        event names one. Raises the server's errors, and StreamUnavailable if the server was unreachable for longer than
        `Pace.patience_s`."""
        reconnect = Reconnect(self._server.pace)
        url = self._step(session_id, plan_step_id, "ws" if transport == "ws" else "stream")
        cursor = StepCursor(after)

        def connect() -> AsyncGenerator[Frame]:
            if transport == "ws":
                return self._server.listen_ws(url, cursor.sequence)
            return self._server.listen(url, cursor.sequence, reconnect)

        try:
            async with aclosing(reconnect.frames(connect)) as frames:
                async for frame in frames:
                    for event in cursor.advance(frame):
                        yield event
                    if cursor.over:
                        return
        except NotFound:
            # The step has ended, and the server deleted it before the next one began.
            if not cursor.ended:
                raise

    def _step(self, session_id: str, plan_step_id: str, *more: str) -> URL:
        return self._server.url("planner", "sessions", session_id, "steps", plan_step_id, *more)


class StepCursor:
    """The client's position in a step's stream."""

    def __init__(self, sequence: int = 0) -> None:
        self.sequence = sequence
        self.ended = False
        self.over = False

    def advance(self, frame: Frame) -> list[PlannerEvent | Reset]:
        """The new events of a frame. A heartbeat carries a sequence, too, but does not mean that it was delivered."""
        if frame.event not in EVENT_NAMES:
            return []
        message = _decoded(frame.data.encode(), _Message)
        match message.type:
            case "reset":
                self.sequence, self.ended, self.over = 0, False, False
                return [Reset(sequence=message.sequence, epoch=message.epoch)]
            case "event_batch":
                return [event for event in message.events if self._is_new(event)]
            case _:
                return []

    def _is_new(self, event: PlannerEvent) -> bool:
        if event.sequence <= self.sequence:
            return False
        self.sequence = event.sequence
        self.ended, self.over = event.ends_step, event.ends_stream
        return True


class _Message(Value):
    type: str
    events: tuple[PlannerEvent, ...] = ()
    sequence: int = 0
    epoch: int = 0


class _PushResults(Value):
    results: tuple[Pushed, ...]


class _SafetyDecision(Value):
    decision: str


class _StepStatus(Value):
    status: str


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise UpstreamError(f"The server's reply cannot be decoded: {error}", FailureKind.UNUSABLE) from error
