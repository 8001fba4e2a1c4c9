"""The planner's operations: steps, pushes and their streams."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.types import Scope

from anabranch.app.anabranch import Anabranch
from anabranch.app.planner import Planner
from anabranch.app.stream_identity import StreamIdentity
from anabranch.domain.errors import Forbidden, InvalidQuestion, NotFound, StreamFull, StreamUnavailable, Unauthorized
from anabranch.domain.eventlog import LAST, Page, SequencedEntry
from anabranch.domain.rights import PLANNER
from anabranch.domain.steps import Cancel, Decision, Receipt, verdict_of
from anabranch.entrypoints.http import planner_wire as wire
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import DESCRIPTIONS, ClientGone, Dialect, ErrorBody, render_plain
from anabranch.entrypoints.http.openapi import CURSORS, integer, parameter
from anabranch.entrypoints.http.operations import (
    JSON,
    PIECE_S,
    WEBSOCKET,
    Call,
    EventStream,
    Operation,
    Reply,
    header,
    send_empty,
)
from anabranch.entrypoints.http.streams import (
    TIMING,
    LogReader,
    ShutdownEvent,
    pieces,
    pump,
    tail,
    until_gone,
    until_revoked,
)
from anabranch.eventlog.reader import StreamReader, TooSlow
from anabranch.knowledge.model import Caller

POLL_S = 0.25
# Owner, session and step.
Place = tuple[StreamIdentity, str, str]


class Arrivals:
    """Waits for steps that do not exist yet: one polling task for all that wait for the same step."""

    def __init__(self) -> None:
        self._polls: dict[Place, asyncio.Task[None]] = {}
        self._waiting: dict[Place, int] = {}

    async def wait(self, planner: Planner, place: Place, wait_s: float) -> bool:
        """Whether the step was started within this time."""
        poll = self._polls.get(place)
        if poll is None:
            poll = self._polls[place] = asyncio.create_task(_poll(planner, place))
        self._waiting[place] = self._waiting.get(place, 0) + 1
        try:
            done, _ = await asyncio.wait({poll}, timeout=wait_s)
        finally:
            self._waiting[place] -= 1
            if not self._waiting[place]:
                del self._waiting[place]
                poll.cancel()
            if (poll.done() or place not in self._waiting) and self._polls.get(place) is poll:
                del self._polls[place]
        if done:
            poll.result()
        return bool(done)


class Chain:
    """A reader of a step and of the steps that follow it. The sequences of a later step are shifted by the last one
    of the previous step, so they continue to count, and a cursor after a step's end is one of the next step. If a
    cursor is not valid, everything is read again from the first step. `over`: nothing follows the cursor."""

    def __init__(
        self, planner: Planner, arrivals: Arrivals, place: Place, after: int, open_readers: AsyncExitStack
    ) -> None:
        self.over = False
        self._planner = planner
        self._arrivals = arrivals
        self._session = place[:2]
        self._first = self._step = place[2]
        # The cursor within the step that is read or awaited.
        self._after = after
        self._shift = 0
        self._passed: list[str] = []
        self._reader: StreamReader | None = None
        self._reset = False
        self._open_readers = open_readers

    async def start(self) -> None:
        """Opens the step of the cursor."""
        await self._open()
        while (reader := self._reader) is not None and reader.page.ended and self._after >= reader.page.head:
            head = reader.page.head
            following = self._following((await self._planner.page(*self._session, self._step, head - 1, 1)).entries[-1])
            if following is None:
                self.over = self._after == head
                return
            await self._advance(head, following, self._after - head)
            with suppress(NotFound):
                await self._open()

    @property
    def head(self) -> int:
        return self._shift + (self._reader.head if self._reader is not None else 0)

    async def next(self, wait_s: float) -> Page | None:
        """New events, or None if there were none within this time. Raises NotFound once the step before the awaited one
        has expired."""
        reader = self._reader
        if reader is None:
            if not await self._arrivals.wait(self._planner, (*self._session, self._step), wait_s):
                await self._planner.page(*self._session, self._passed[-1], 0, 1)
                return None
            reader = await self._open()
        batch = await reader.next(wait_s)
        if batch is not None and batch.reset and self._shift:
            reader = await self._restart()
            batch = await reader.next(wait_s)
        if batch is None:
            return None
        shift, reset = self._shift, self._reset
        self._reset = False
        following = self._following(batch.entries[-1]) if batch.ended and batch.entries else None
        if following is not None:
            await self._advance(batch.entries[-1].sequence, following, 0)
        if not shift and not reset and following is None:
            return batch
        return Page(
            entries=tuple(
                msgspec.structs.replace(entry, sequence=entry.sequence + shift) if shift else entry
                for entry in batch.entries
            ),
            head=batch.head + shift,
            reset=batch.reset or reset,
            ended=batch.ended and following is None,
        )

    def _following(self, final: SequencedEntry) -> str | None:
        """The next step, unless it was read already: that would be a cycle."""
        following = wire.next_step(final)
        return None if following is None or following in (*self._passed, self._step) else following

    async def _open(self) -> StreamReader:
        reader = await self._planner.reader(*self._session, self._step, self._after)
        self._reader = await self._open_readers.enter_async_context(reader)
        # The first page of the step that was opened last.
        self.page = reader.page
        return reader

    async def _advance(self, final: int, following: str, after: int) -> None:
        await self._open_readers.aclose()
        self._reader = None
        self._passed.append(self._step)
        self._step, self._after = following, after
        self._shift += final

    async def _restart(self) -> StreamReader:
        await self._open_readers.aclose()
        self._reader = None
        self._passed.clear()
        self._step, self._after, self._shift = self._first, 0, 0
        self._reset = True
        return await self._open()


async def _poll(planner: Planner, place: Place) -> None:
    while True:
        try:
            await planner.page(*place, 0, 1)
        except NotFound:
            await asyncio.sleep(POLL_S)
        else:
            return


STEPS = "/planner/sessions/{session}/steps"
STEP = f"{STEPS}/{{step}}"
MAX_PAGE = 1_000
DEFAULT_PAGE = 100
PROTOCOL = "anabranch.planner"
KEY = "bearer."
# Close codes of the WebSocket.
ENDED, NOT_ALLOWED, SHUTTING_DOWN, TRY_AGAIN = 1000, 1008, 1012, 1013

DIALECT = Dialect(
    render=render_plain,
    error_type=ErrorBody,
    descriptions={
        **DESCRIPTIONS,
        404: "There is no such step, or not for this caller.",
        409: "The session has another step of that id.",
        413: "The request, or what the stream would hold with it, is too large.",
    },
    always=(401, 404, 422, 500, 503),
    head=False,
    explain=lambda error, _: wire.explain(error),
    path_schema=wire.ID_SCHEMA,
)
STREAM = EventStream(
    "PlannerFrame",
    "Server-sent events. `planner_stream`: a batch of up to five events, with the last one's `sequence` as its `id`; "
    "`heartbeat`: nothing new, and the latest `sequence`; `reset`: the cursor is no longer valid, discard what was "
    "received, all events follow. The stream ends after `plan_step_completed`, unless that names a next step: then it "
    "continues with that step's events, and `sequence` continues to count.",
    {"planner_stream": wire.EventBatch, "heartbeat": wire.Heartbeat, "reset": wire.ResetView},
)
SOCKET = (
    "A WebSocket with the events of `/stream` as JSON messages. A web page offers the subprotocols `anabranch.planner` "
    "and `bearer.KEY`. The server closes with 1000 at the end, and with 1012 or 1013 when the client should reconnect "
    "with its cursor."
)
IGNORED = {202: "Written to the stream.", 200: "Ignored; `reason` says why."}


class PlannerUnavailable(StreamUnavailable):
    code = "planner_unavailable"


@dataclass(frozen=True)
class PlannerSurface:
    """`closing` is set when the server begins to stop, `closed` when every step that it kept has ended."""

    anabranch: Anabranch
    access: Access
    closing: ShutdownEvent
    closed: ShutdownEvent
    arrivals: Arrivals = field(default_factory=Arrivals)

    def operations(self) -> list[Operation[Any]]:
        at = partial(
            Operation[Any],
            dialect=DIALECT,
            scope="ask",
            grant=PLANNER,
            surface="planner",
            identify=self.access.caller,
        )
        return [*self._commands(at), *self._events_of_steps(at)]

    def _commands(self, at: Callable[..., Operation[Any]]) -> list[Operation[Any]]:
        return [
            at(
                *("POST", STEPS, "begin_step", "Start a step", self._begin),
                request_type=wire.StepForm,
                response_types=(wire.StepAccepted, wire.StepAnswer),
                statuses={
                    201: "The step runs.",
                    200: "The step exists already. With streaming off: its answer, at its end.",
                },
                errors=(409,),
            ),
            at("DELETE", STEP, "cancel_step", "Cancel a step", self._cancel, response_types=(wire.StepReceipt,)),
            at(
                "POST",
                f"{STEP}/subagents/{{key}}/events",
                "push_events",
                "A subagent's results, or parts of them",
                self._push,
                request_type=wire.Pushes,
                response_types=(wire.PushReceiptView, wire.PushReceipts),
                statuses=IGNORED,
            ),
            at(
                *("POST", f"{STEP}/progress", "push_progress", "The planner's own events", self._progress),
                request_type=wire.ProgressForm,
                response_types=(wire.PushReceiptView,),
                statuses=IGNORED,
            ),
            at(
                *("POST", f"{STEP}/safety", "decide_safety", "Apply a safety decision", self._safety),
                request_type=wire.SafetyForm,
                response_types=(wire.SafetyReceipt,),
            ),
        ]

    def _events_of_steps(self, at: Callable[..., Operation[Any]]) -> list[Operation[Any]]:
        return [
            at(
                *("GET", f"{STEP}/events", "step_events", "A page of a step's events", self._events),
                response_types=(wire.EventPage,),
                parameters=(
                    parameter("after", integer(0, LAST), "The last sequence that was received"),
                    parameter("limit", integer(1, MAX_PAGE, default=DEFAULT_PAGE), "Page size"),
                ),
            ),
            at(
                *("GET", f"{STEP}/stream", "follow_step", "Follow a step", self._stream),
                stream=STREAM,
                statuses={
                    200: "The events after the cursor.",
                    204: "The step has ended, and the client has all of it.",
                },
                parameters=CURSORS,
            ),
            at(
                *(WEBSOCKET, f"{STEP}/ws", "follow_step_socket", "Follow a step over a WebSocket", self._socket),
                identify=self._socket_caller,
                statuses={101: SOCKET},
                errors=(403, 426),
                parameters=CURSORS,
            ),
        ]

    async def _socket_caller(self, scope: Scope) -> Caller:
        check_origin(scope, [origin for origin in self.anabranch.settings.cors_origins if origin != "*"])
        return await self.access.caller(with_key(scope))

    def _step(self, call: Call[Any], plan_step_id: str | None = None) -> tuple[Planner, Place]:
        """The planner and the step that a call names. The request is validated before the step is looked up, so that
        an error says nothing about steps of other callers."""
        if (planner := self.anabranch.planner) is None:
            raise PlannerUnavailable(
                "Several workers without a Redis cannot keep planner steps: "
                "set AGGREGATOR_REDIS_URL to one that they share, or serve with one worker."
            )
        session_id = wire.identifier(call.params["session"], "The session's id")
        if plan_step_id is None:
            plan_step_id = wire.identifier(call.params["step"], "The step's id")
        if (identity := StreamIdentity.of(call.caller)) is None:
            raise Unauthorized("Guests keep no streams: send a token that names its user.")
        return planner, (identity, session_id, plan_step_id)

    async def _begin(self, call: Call[wire.StepForm]) -> Reply:
        planner, place = self._step(call, call.request.plan_step_id)
        identity, session_id, plan_step_id = place
        created, page = await planner.begin(
            wire.directive(session_id, call.request), self.access.context(call), identity
        )
        if not planner.streaming:
            return Reply(await self._answer_at_the_end(call, planner, place), 200)
        status = "in_progress"
        if page.ended:
            status = wire.status_of((await planner.page(*place, page.head - 1, 1)).entries[-1])
        return Reply(wire.accepted(session_id, plan_step_id, page, status), 201 if created else 200)

    async def _answer_at_the_end(self, call: Call[Any], planner: Planner, place: Place) -> bytes:
        """The step continues if its planner disconnects meanwhile; starting it again gets the answer."""
        entries: list[SequencedEntry] = []
        with self._until_revoked(call, self.closed) as closing:
            try:
                async with (
                    await planner.reader(*place, 0) as reader,
                    until_gone(call.receive, closing, "http.disconnect"),
                ):
                    ended = False
                    while not ended:
                        batch = await reader.next(self.anabranch.settings.heartbeat_interval)
                        if batch is not None:
                            entries = [*([] if batch.reset else entries), *batch.entries]
                            ended = batch.ended
            except TimeoutError:
                raise closing.error or ClientGone() from None
            except TooSlow:
                raise StreamUnavailable("The step has more events than could be read; start it again.") from None
        return wire.answer(*place[1:], entries)

    async def _push(self, call: Call[wire.PushForm | list[wire.PushForm]]) -> Reply:
        planner, place = self._step(call)
        key, sent = wire.identifier(call.params["key"], "The subagent's key"), call.request
        if not isinstance(sent, list):
            return _receipt(await planner.tell(*place, wire.push(key, sent)))
        results = []
        for one in [wire.push(key, form) for form in sent]:
            try:
                results.append(wire.push_receipt(await planner.tell(*place, one)))
            except (InvalidQuestion, StreamFull) as error:
                results.append(wire.PushReceiptView(accepted=False, error=error.code, message=error.message))
        body = msgspec.json.encode(wire.PushReceipts(results=results))
        return Reply(body, 202 if any(one.accepted for one in results) else 200)

    async def _progress(self, call: Call[wire.ProgressForm]) -> Reply:
        planner, place = self._step(call)
        return _receipt(await planner.tell(*place, wire.progress(call.request, call.body)))

    async def _safety(self, call: Call[wire.SafetyForm]) -> wire.SafetyReceipt:
        planner, place = self._step(call)
        decision = call.request.decision
        verdict = verdict_of(decision) if isinstance(decision, str) else "block"
        receipt = await planner.tell(*place, Decision(decision=verdict, reason=call.request.reason or ""))
        return wire.SafetyReceipt(decision=verdict, **msgspec.structs.asdict(wire.step_receipt(receipt)))

    async def _cancel(self, call: Call[None]) -> wire.StepReceipt:
        planner, place = self._step(call)
        return wire.step_receipt(await planner.tell(*place, Cancel()))

    async def _events(self, call: Call[None]) -> None:
        planner, place = self._step(call)
        after = wire.cursor(call.query.get("after", "0"), "after")
        limit = call.query.get("limit", str(DEFAULT_PAGE))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 15 and int(limit)):
            raise InvalidQuestion("limit must be a whole number from 1 on.")
        found = await planner.page(*place, after, min(int(limit), MAX_PAGE))
        await call.send({"type": "http.response.start", "status": 200, "headers": [JSON]})
        with suppress(TimeoutError):
            for part in wire.page(*place[1:], after, found):
                for piece in pieces(part):
                    async with asyncio.timeout(PIECE_S):
                        await call.send({"type": "http.response.body", "body": piece, "more_body": True})
            await call.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, call: Call[None]) -> None:
        async with self._reading(call) as (chain, closing):
            if chain.over:
                await send_empty(call.send, 204)
                return
            await tail(
                chain,
                call.receive,
                call.send,
                frames=wire.Frames().sse,
                heartbeat=wire.sse_heartbeat,
                heartbeat_s=self.anabranch.settings.heartbeat_interval,
                retry_ms=self.anabranch.timing.retry_ms,
                closing=closing,
            )

    async def _socket(self, call: Call[None]) -> None:
        async with self._reading(call) as (chain, closing):
            if (error := closing.error) is not None:
                raise error
            await follow(chain, call, heartbeat_s=self.anabranch.settings.heartbeat_interval, closing=closing)

    @asynccontextmanager
    async def _reading(self, call: Call[None]) -> AsyncIterator[tuple[Chain, ShutdownEvent]]:
        """The events after the cursor, and what ends them. A step that another worker keeps can be followed there at
        once; one that is kept here is followed to its end, which the shutdown brings about."""
        planner, place = self._step(call)
        await call.hold("stream_readers")
        # A client that reconnects by itself uses its first address again: the header is newer.
        sent = header(call.scope, b"last-event-id") or call.query.get("last_event_id", "0")
        async with AsyncExitStack() as readers:
            chain = Chain(planner, self.arrivals, place, wire.cursor(sent, "Last-Event-ID"), readers)
            await chain.start()
            with self._until_revoked(call, self.closed if planner.keeps(chain.page) else self.closing) as closing:
                yield chain, closing

    def _until_revoked(self, call: Call[Any], closing: ShutdownEvent) -> AbstractContextManager[ShutdownEvent]:
        return until_revoked(closing, self.anabranch.revocations, call.caller.credential)


def _receipt(receipt: Receipt) -> Reply:
    return Reply(msgspec.json.encode(wire.push_receipt(receipt)), 202 if receipt.ignored is None else 200)


def with_key(scope: Scope) -> Scope:
    """The scope with the key of a web page, which can send it only as a subprotocol."""
    keys = [one.removeprefix(KEY) for one in scope.get("subprotocols", ()) if one.startswith(KEY)]
    if not keys:
        return scope
    return {**scope, "headers": [*scope["headers"], *((b"authorization", f"Bearer {key}".encode()) for key in keys)]}


def check_origin(scope: Scope, named: Collection[str]) -> None:
    """Browsers open WebSockets across origins without CORS, so the origin is checked here. Others send no Origin."""
    host = header(scope, b"host") or ""
    for name, value in scope["headers"]:
        origin = value.decode("latin-1")
        if name == b"origin" and origin not in named and origin.partition("://")[2] != host:
            raise Forbidden("A web page of this origin may not open it; name the origin in CORS_ORIGINS.")


async def follow(reader: LogReader, call: Call[Any], *, heartbeat_s: float, closing: ShutdownEvent) -> None:
    """Sends what an entered reader returns, until the end, or until the client disconnects or must reconnect."""
    receive, send = call.receive, call.send

    def send_text(text: str) -> Awaitable[None]:
        return send({"type": "websocket.send", "text": text})

    def heartbeat(head: int) -> str:
        return wire.heartbeat(head).decode()

    code = ENDED
    await receive()
    try:
        protocol = PROTOCOL if PROTOCOL in call.scope.get("subprotocols", ()) else None
        await send({"type": "websocket.accept", "subprotocol": protocol, "headers": []})
        async with until_gone(receive, closing, "websocket.disconnect") as timeouts:
            await pump(reader, send_text, timeouts, wire.Frames().messages, heartbeat, heartbeat_s)
    except (TooSlow, StreamUnavailable):
        code = TRY_AGAIN
    except NotFound:
        pass  # the previous step has expired, and no other came
    except TimeoutError:
        match closing.error:
            case None:
                code = TRY_AGAIN
            case Unauthorized():
                code = NOT_ALLOWED
            case _:
                code = SHUTTING_DOWN
    except OSError:
        return  # the client has disconnected
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(TIMING.end_s):
            await send({"type": "websocket.close", "code": code, "reason": ""})
