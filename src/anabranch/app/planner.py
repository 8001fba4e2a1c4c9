"""The planner's side of streams: whose session it is, which worker keeps a step, and what is passed on to it."""

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from anabranch.domain.contracts import EventLog, Sessions
from anabranch.domain.errors import (
    AnabranchError,
    Conflict,
    InvalidQuestion,
    LeaseLost,
    NotFound,
    ShuttingDown,
    StreamFull,
    StreamsFull,
    StreamUnavailable,
)
from anabranch.domain.eventlog import Entry, Page
from anabranch.domain.events import StepCompleted
from anabranch.domain.model import Context, Value
from anabranch.domain.steps import Command, Directive, Progress, Receipt, Trace, stream_of
from anabranch.eventlog.reader import StreamReader, StreamReaders
from anabranch.planner.coordinator import Coordinator
from anabranch.planner.encoder import described, written

if TYPE_CHECKING:
    from anabranch.redis.rpc import WorkerRpc

NOT_HERE = "There is no such step."
CLOSING = "The server is shutting down; hand the step over again in a moment."
MOVED = "The step is changing hands; try again in a moment."
LOST = "The worker that kept this step is gone."


class StepInfo(Value):
    """What a step's stream says of itself: enough to end it in its owner's place, and to know its envelope again."""

    session_id: str
    plan_step_id: str
    digest: str
    traceparent: str


class ForwardedCommand(Value):
    """A command on its way to the worker that keeps the step."""

    stream: str
    command: Command


class ForwardedReply(Value):
    receipt: Receipt | None = None
    code: str = ""
    message: str = ""


class Registered(NamedTuple):
    """A step's stream, and whether it was begun just now."""

    created: bool
    page: Page


class Planner:
    def __init__(
        self,
        *,
        log: EventLog,
        sessions: Sessions,
        coordinator: Coordinator,
        worker: str,
        post: "WorkerRpc | None",
        ttl_s: float,
        client_bytes: int,
        streaming: bool,
        readers: StreamReaders | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.streaming = streaming
        self._log = log
        self._sessions = sessions
        self._coordinator = coordinator
        self._worker = worker
        self._post = post
        self._ttl_s = ttl_s
        self._client_bytes = client_bytes
        self._readers = readers
        self._wall = wall
        self._kept: dict[str, tuple[str, str]] = {}
        self._claims_at = wall() + ttl_s / 2
        self._closing = False

    async def begin(self, directive: Directive, context: Context, identity: str) -> Registered:
        """Take on a step. The same one again is not begun again; another of that name is a Conflict."""
        if self._closing:
            raise ShuttingDown(CLOSING)
        # Before the session is anybody's, and before there is a stream: one that is turned away leaves nothing behind.
        with self._coordinator.place(stream_of(directive.session_id, directive.plan_step_id)):
            return await self._begun(directive, context, identity)

    async def tell(self, identity: str, session_id: str, plan_step_id: str, command: Command) -> Receipt:
        """Pass a command on to the step, wherever it is kept."""
        stream = stream_of(session_id, plan_step_id)
        page = await self._owned(identity, session_id, plan_step_id)
        if page.keeper == self._worker or self._coordinator.holds(stream) or (page.ended and not _compares(command)):
            return await self._taken(stream, command)
        if page.abandoned and await self._log.end_abandoned(stream, self.lost(page)):
            self._coordinator.pass_over(session_id, plan_step_id, command)
            return Receipt(ignored="ended", status="worker_lost")
        if self._post is None:
            raise StreamUnavailable(LOST)
        try:
            reply = await self._post.ask(
                page.keeper, msgspec.json.encode(ForwardedCommand(stream=stream, command=command))
            )
        except StreamUnavailable:
            if not page.ended:
                raise
            return await self._taken(stream, command)  # with its keeper, what could be compared is gone as well
        return _received(reply)

    async def reader(self, identity: str, session_id: str, plan_step_id: str, after: int) -> StreamReader:
        """One who follows a step from a cursor on; not yet entered."""
        await self._owned(identity, session_id, plan_step_id)
        return StreamReader(
            self._log,
            stream_of(session_id, plan_step_id),
            after,
            cap_bytes=self._client_bytes,
            lost=self.lost,
            readers=self._readers,
            whole=not self.streaming,
        )

    async def page(self, identity: str, session_id: str, plan_step_id: str, after: int, limit: int) -> Page:
        return await self._owned(identity, session_id, plan_step_id, after, limit)

    def keeps(self, page: Page) -> bool:
        """Whether this worker writes that stream."""
        return page.keeper == self._worker and not page.ended

    async def letter(self, body: bytes) -> bytes:
        """A command that another worker has passed on: what became of it, in the form that `tell` reads."""
        letter = msgspec.json.decode(body, type=ForwardedCommand)
        try:
            reply = ForwardedReply(receipt=await self._taken(letter.stream, letter.command))
        except AnabranchError as error:
            reply = ForwardedReply(code=error.code, message=error.message)
        return msgspec.json.encode(reply)

    def lost(self, page: Page) -> Entry:
        """The end of a step whose worker is gone."""
        about = _about(page)
        event = described(StepCompleted(status="worker_lost", reason=LOST))
        body = written(
            event,
            session_id=about.session_id,
            plan_step_id=about.plan_step_id,
            at=self._wall(),
            trace=_trace(about.traceparent),
        )
        return Entry(key=event.key, revision=event.revision, body=body, final=True)

    async def tend(self) -> None:
        """Sessions with steps that still run stay their owner's. A claim lasts so long that now and then is enough."""
        self._kept = {stream: whose for stream, whose in self._kept.items() if self._coordinator.holds(stream)}
        if self._wall() < self._claims_at:
            return
        self._claims_at = self._wall() + self._ttl_s / 2
        for session, identity in set(self._kept.values()):
            await self._sessions.claim(session, identity, self._claim_s)

    async def drain(self, grace_s: float) -> None:
        self._closing = True
        await self._coordinator.drain(grace_s)

    @property
    def _claim_s(self) -> float:
        return 2 * self._ttl_s

    async def _owned(self, identity: str, session_id: str, plan_step_id: str, after: int = 0, limit: int = 1) -> Page:
        """What is there is nobody's business but its owner's."""
        try:
            page = await self._log.read(stream_of(session_id, plan_step_id), after, limit)
        except NotFound:
            raise NotFound(NOT_HERE) from None
        if page.identity != identity:
            if page.keeper == self._worker:
                # Of a step that is kept here we know without asking: whoever may not must wait, or be turned away, as
                # if there were none.
                with suppress(NotFound):
                    await self._log.read(stream_of(session_id, secrets.token_hex(8)), 0, 1)
            raise NotFound(NOT_HERE)
        if page.abandoned and await self._log.end_abandoned(stream_of(session_id, plan_step_id), self.lost(page)):
            return await self._log.read(stream_of(session_id, plan_step_id), after, limit)
        return page

    async def _begun(self, directive: Directive, context: Context, identity: str) -> Registered:
        session, step = directive.session_id, directive.plan_step_id
        if not await self._sessions.claim(session, identity, self._claim_s):
            raise NotFound(NOT_HERE)
        stream, digest = stream_of(session, step), _digest(directive)
        about = StepInfo(session_id=session, plan_step_id=step, digest=digest, traceparent=context.traceparent or "")
        try:
            token = await self._log.open(stream, identity=identity, about=msgspec.json.encode(about))
        except Conflict:
            page = await self._owned(identity, session, step)
            if _about(page).digest != digest:
                raise Conflict(f"This session has another step {step!r}; give this one an id of its own.") from None
            return Registered(created=False, page=page)
        await self._coordinator.begin(stream, token, directive, context)
        self._kept[stream] = (session, identity)
        return Registered(created=True, page=await self._log.read(stream, 0, 1))

    async def _taken(self, stream: str, command: Command) -> Receipt:
        """What became of a command here, where its step is or was kept. One that has ended says so to everything."""
        try:
            return await self._coordinator.take(stream, command)
        except (NotFound, LeaseLost) as gone:
            if self._coordinator.holds(stream):  # it expects no such subagent
                raise
            page = await self._log.read(stream, 0, 1)
            last = await self._log.read(stream, page.head - 1, 1)
            if not (page.ended and last.entries):
                raise StreamUnavailable(MOVED) from gone
            about = _about(page)
            self._coordinator.pass_over(about.session_id, about.plan_step_id, command)
            return Receipt(ignored="ended", status=msgspec.json.decode(last.entries[-1].body)["content"]["status"])


def _compares(command: Command) -> bool:
    """Whether it is the old way's answer, for which a step in shadow mode waits with its keeper after its end."""
    return isinstance(command, Progress) and command.legacy is not None


def _received(body: bytes) -> Receipt:
    reply = msgspec.json.decode(body, type=ForwardedReply)
    if reply.receipt is not None:
        return reply.receipt
    kinds: tuple[type[AnabranchError], ...] = (InvalidQuestion, NotFound, StreamFull, StreamsFull)
    raise next((kind for kind in kinds if kind.code == reply.code), StreamUnavailable)(reply.message)


def _about(page: Page) -> StepInfo:
    return msgspec.json.decode(page.about, type=StepInfo)


def _digest(directive: Directive) -> str:
    return hashlib.blake2b(msgspec.json.encode(directive, order="sorted"), digest_size=16).hexdigest()


def _trace(traceparent: str) -> Trace:
    """The trace that a step came with, in a span of its own."""
    trace_id = traceparent[3:35] or secrets.token_hex(16)
    return Trace(trace_id=trace_id, span_id=secrets.token_hex(8), parent_span_id=traceparent[36:52] or None)
