"""A planner's side of its steps: hand them over, feed them, and follow what comes of them."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Literal, Self, TypeVar

import aiohttp
import msgspec
from yarl import URL

from anabranch.client.connection import ServerConnection
from anabranch.client.events import Begun, PlannerEvent, Pushed, Replay, Reset
from anabranch.client.reconnect import Pace, Reconnect, again
from anabranch.client.sse import Frame
from anabranch.domain.errors import InvalidQuestion, NotFound, Trouble, UpstreamError
from anabranch.domain.model import Value

T = TypeVar("T")
Transport = Literal["sse", "ws"]
# The events that a step's stream consists of, and how a message without a name is called.
SPOKEN = ("planner_stream", "heartbeat", "reset", "message")


class PlannerClient:
    """Use it as `async with`, or give it a session of your own and close that yourself."""

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        session: aiohttp.ClientSession | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._wire = ServerConnection(base_url, key, session, pace or Pace())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._wire.close()

    async def begin(self, envelope: Mapping[str, Any]) -> Begun:
        """Hands a step over. The same envelope twice is one step, so it is sent until it gets through."""
        session_id = envelope.get("session_id")
        if not isinstance(session_id, str):
            raise InvalidQuestion("The envelope has no session_id.")
        url = self._wire.address("planner", "sessions", session_id, "steps")
        reply = await self._wire.call("POST", url, envelope, repeatable=True)
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
        """A result, or a part of one. With a revision it may be sent twice, and is, until it gets through."""
        fragment = {"status": status, "payload": payload or {}, **more}
        if revision is not None:
            fragment["revision"] = revision
        url = self._step(session_id, plan_step_id, "subagents", subagent, "events")
        reply = await self._wire.call("POST", url, fragment, repeatable=revision is not None)
        return _decoded(reply.body, Pushed)

    async def push_all(
        self, session_id: str, plan_step_id: str, subagent: str, fragments: Iterable[Mapping[str, Any]]
    ) -> tuple[Pushed, ...]:
        """Several at once, in their order; one that is refused does not keep the others out."""
        listed = list(fragments)
        url = self._step(session_id, plan_step_id, "subagents", subagent, "events")
        repeatable = all("revision" in fragment for fragment in listed)
        reply = await self._wire.call("POST", url, listed, repeatable=repeatable)
        return _decoded(reply.body, _Receipts).results

    async def progress(
        self, session_id: str, plan_step_id: str, payload: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """What the planner itself has to say: `stage`, `status`, `next_step_id`."""
        url = self._step(session_id, plan_step_id, "progress")
        await self._wire.call("POST", url, {"payload": payload or {}, **more}, repeatable=False)

    async def safety(self, session_id: str, plan_step_id: str, decision: str, reason: str = "") -> str:
        """The decision as it was applied: what is neither allow nor warn is block."""
        body = {"decision": decision, "reason": reason}
        url = self._step(session_id, plan_step_id, "safety")
        return _decoded((await self._wire.call("POST", url, body, repeatable=True)).body, _Decided).decision

    async def cancel(self, session_id: str, plan_step_id: str) -> str:
        """The step's status after it: `cancelled`, or how it had ended before."""
        reply = await self._wire.call("DELETE", self._step(session_id, plan_step_id), repeatable=True)
        return _decoded(reply.body, _Standing).status

    async def events(self, session_id: str, plan_step_id: str, *, after: int = 0, limit: int = 100) -> Replay:
        """One page of what is kept of a step."""
        url = self._step(session_id, plan_step_id, "events")
        params = {"after": str(after), "limit": str(limit)}
        return _decoded((await self._wire.call("GET", url, repeatable=True, params=params)).body, Replay)

    async def follow(
        self, session_id: str, plan_step_id: str, *, after: int = 0, transport: Transport = "sse"
    ) -> AsyncGenerator[PlannerEvent | Reset]:
        """Every event behind the cursor exactly once, as it comes, whatever happens to connections; then those of the
        next step, if the end names one. Raises what the server refuses with, and StreamUnavailable when it was away
        for longer than the pace has patience."""
        comeback = Reconnect(self._wire.pace)
        url = self._step(session_id, plan_step_id, "ws" if transport == "ws" else "stream")
        cursor = StepCursor(after)

        def connect() -> AsyncGenerator[Frame]:
            if transport == "ws":
                return self._wire.listen_ws(url, cursor.sequence)
            return self._wire.listen(url, cursor.sequence, comeback)

        try:
            async with aclosing(again(connect, comeback)) as frames:
                async for frame in frames:
                    for event in cursor.fresh(frame):
                        yield event
                    if cursor.over:
                        return
        except NotFound:
            # A step that has ended, and was forgotten before its next one came.
            if not cursor.ended:
                raise

    def _step(self, session_id: str, plan_step_id: str, *more: str) -> URL:
        return self._wire.address("planner", "sessions", session_id, "steps", plan_step_id, *more)


class StepCursor:
    """Where a client stands in a stream, and what it has not seen yet."""

    def __init__(self, sequence: int = 0) -> None:
        self.sequence = sequence
        self.ended = False
        self.over = False

    def fresh(self, frame: Frame) -> list[PlannerEvent | Reset]:
        """What a frame brings that is new. A heartbeat tells of a sequence, too, but not that it was delivered."""
        if frame.event not in SPOKEN:
            return []
        message = _decoded(frame.data.encode(), _Message)
        match message.type:
            case "reset":
                self.sequence, self.ended, self.over = 0, False, False
                return [Reset(sequence=message.sequence, epoch=message.epoch)]
            case "event_batch":
                return [event for event in message.events if self._takes(event)]
            case _:
                return []

    def _takes(self, event: PlannerEvent) -> bool:
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


class _Receipts(Value):
    results: tuple[Pushed, ...]


class _Decided(Value):
    decision: str


class _Standing(Value):
    status: str


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise UpstreamError(f"The server sent what cannot be used: {error}", Trouble.UNUSABLE) from error
