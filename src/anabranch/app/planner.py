"""The planner: owners of sessions, which worker runs a step, and commands forwarded to that worker."""

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from anabranch.app.stream_identity import StreamIdentity
from anabranch.domain.contracts import EventLog, Sessions
from anabranch.domain.errors import (
    AnabranchError,
    Conflict,
    InvalidQuestion,
    LeaseLost,
    NotFound,
    StreamFull,
    StreamsFull,
    StreamUnavailable,
)
from anabranch.domain.eventlog import Entry, Page
from anabranch.domain.events import PlanStepCompleted
from anabranch.domain.model import Context, Value
from anabranch.domain.shares import Claimant
from anabranch.domain.steps import Command, Directive, Progress, Receipt, Trace, stream_of
from anabranch.eventlog.reader import StreamReader, StreamReaders
from anabranch.planner.coordinator import Coordinator, StepDocuments
from anabranch.planner.encoder import encode

if TYPE_CHECKING:
    from anabranch.redis.rpc import WorkerRpc

NOT_FOUND = "There is no such step."
FORWARDED_ERRORS = {error.code: error for error in (InvalidQuestion, NotFound, StreamFull, StreamsFull)}
LOST = "The worker that ran this step is gone."


class StepInfo(Value):
    """What a step's stream stores about it: enough to end it for its owner, and to recognize the same envelope."""

    session_id: str
    plan_step_id: str
    digest: str
    traceparent: str


class ForwardedCommand(Value):
    """A command for the worker that runs the step."""

    stream: str
    command: Command


class ForwardedReply(Value):
    receipt: Receipt | None = None
    code: str = ""
    message: str = ""


async def _forget(_: str) -> None:
    """Nothing is kept."""


class StreamStores(NamedTuple):
    """The event log and the sessions of this worker. `rpc` reaches the other workers, if there are any. `bytes_held_by`
    says what a caller's streams use here; `forget_ended` drops what this process has of streams that ended at least so
    many seconds ago, `forget` one stream of this process everywhere."""

    worker: str
    log: EventLog
    sessions: Sessions
    rpc: "WorkerRpc | None" = None
    bytes_held_by: Callable[[Claimant], int] = lambda _: 0
    forget_ended: Callable[[float], int] = lambda _: 0
    forget: Callable[[str], Awaitable[None]] = _forget


class Planner:
    def __init__(
        self,
        stores: StreamStores,
        coordinator: Coordinator,
        *,
        ttl_s: float,
        client_bytes: int,
        streaming: bool,
        readers: StreamReaders | None = None,
        documents: StepDocuments | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.streaming = streaming
        self._worker, self._log, self._sessions, self._rpc = stores[:4]
        self._coordinator = coordinator
        self._ttl_s = ttl_s
        self._claim_s = 2 * ttl_s
        self._client_bytes = client_bytes
        self._readers = readers
        self._documents = documents or StepDocuments(ttl_s)
        self._forget = stores.forget
        self._wall = wall
        self._owners: dict[str, tuple[str, str]] = {}
        self._claims_at = wall() + ttl_s / 2

    async def begin(self, directive: Directive, context: Context, identity: StreamIdentity) -> tuple[bool, Page]:
        """Start a step; whether it is new, and its stream. The same envelope again changes nothing; another one of that
        name is a Conflict."""
        session, step = directive.session_id, directive.plan_step_id
        stream = stream_of(session, step)
        digest = hashlib.blake2b(msgspec.json.encode(directive, order="sorted"), digest_size=16).hexdigest()
        about = StepInfo(session_id=session, plan_step_id=step, digest=digest, traceparent=context.traceparent or "")
        # Before the session is claimed and a stream exists, so that a refused step leaves nothing behind.
        with self._coordinator.reserve(stream):
            if not await self._sessions.claim(session, identity.owner, self._claim_s):
                raise NotFound(NOT_FOUND)
            try:
                token = await self._log.open(stream, identity=identity.stored, about=msgspec.json.encode(about))
            except Conflict:
                page = await self.page(identity, session, step)
                if _about(page).digest != digest:
                    raise Conflict(f"This session has another step {step!r}; give this one an id of its own.") from None
                return False, page
            await self._coordinator.begin(stream, token, directive, context)
            self._owners[stream] = (session, identity.owner)
            return True, await self._log.read(stream, 0, 1)

    async def tell(self, identity: StreamIdentity, session_id: str, plan_step_id: str, command: Command) -> Receipt:
        """Send a command to the step, on whichever worker it runs."""
        stream = stream_of(session_id, plan_step_id)
        page = await self.page(identity, session_id, plan_step_id)
        # For its legacy answer, a step in shadow mode waits after its end.
        compares = isinstance(command, Progress) and command.legacy is not None
        if page.keeper == self._worker or self._coordinator.holds(stream) or (page.ended and not compares):
            return await self._execute(stream, command)
        if page.abandoned and await self._log.end_abandoned(stream, self.lost(page)):
            self._coordinator.record_ignored(session_id, plan_step_id, command)
            return Receipt(ignored="ended", status="worker_lost")
        if self._rpc is None:
            raise StreamUnavailable(LOST)
        try:
            reply = await self._rpc.ask(
                page.keeper, msgspec.json.encode(ForwardedCommand(stream=stream, command=command))
            )
        except StreamUnavailable:
            if not page.ended:
                raise
            return await self._execute(stream, command)  # the results to compare are gone with its worker
        return _received(reply)

    async def reader(self, identity: StreamIdentity, session_id: str, plan_step_id: str, after: int) -> StreamReader:
        """A reader of a step from a cursor on; not yet entered."""
        await self.page(identity, session_id, plan_step_id)
        stream = stream_of(session_id, plan_step_id)
        return StreamReader(
            self._log,
            stream,
            after,
            cap_bytes=self._client_bytes,
            lost=self.lost,
            held=partial(self._coordinator.holds, stream),
            readers=self._readers,
            whole=not self.streaming,
        )

    async def page(
        self, identity: StreamIdentity, session_id: str, plan_step_id: str, after: int = 0, limit: int = 1
    ) -> Page:
        """A page of a step that this identity may read; for any other identity it does not exist."""
        stream = stream_of(session_id, plan_step_id)
        try:
            page = await self._log.read(stream, after, limit)
        except NotFound:
            raise NotFound(NOT_FOUND) from None
        if not identity.may_read(page.identity):
            # For a step that does not exist, Redis and all workers are asked. Ask them here, too, so that the time of
            # the reply does not reveal that the step exists.
            with suppress(NotFound):
                await self._log.read(stream_of(session_id, secrets.token_hex(8)), 0, 1)
            raise NotFound(NOT_FOUND)
        held = self._coordinator.holds(stream)
        if page.abandoned and not held and await self._log.end_abandoned(stream, self.lost(page)):
            return await self._log.read(stream, after, limit)
        return page

    def keeps(self, page: Page) -> bool:
        """Whether this worker writes the stream."""
        return page.keeper == self._worker and not page.ended

    async def handle(self, body: bytes) -> bytes:
        """Execute a command that another worker has forwarded; the reply is what `tell` decodes."""
        forwarded = msgspec.json.decode(body, type=ForwardedCommand)
        try:
            reply = ForwardedReply(receipt=await self._execute(forwarded.stream, forwarded.command))
        except AnabranchError as error:
            reply = ForwardedReply(code=error.code, message=error.message)
        return msgspec.json.encode(reply)

    def lost(self, page: Page) -> Entry:
        """The final entry of a step whose worker is gone."""
        about = _about(page)
        return encode(
            PlanStepCompleted(status="worker_lost", reason=LOST),
            session_id=about.session_id,
            plan_step_id=about.plan_step_id,
            at=self._wall(),
            trace=_trace(about.traceparent),
        ).entry

    async def tend(self) -> None:
        """Renew the claims on sessions whose steps are in progress, twice in `ttl_s`; drop what was noted of steps that
        cannot be read any more."""
        self._owners = {stream: owner for stream, owner in self._owners.items() if self._coordinator.holds(stream)}
        self._documents.tend(self._coordinator, self._wall())
        if self._wall() < self._claims_at:
            return
        self._claims_at = self._wall() + self._ttl_s / 2
        for session, owner in set(self._owners.values()):
            await self._sessions.claim(session, owner, self._claim_s)

    async def erase(self, documents: Collection[str]) -> int:
        """End the steps of this worker for which one of these documents was found, and drop their streams, also of
        those that have ended; returns how many."""
        streams = self._documents.streams(documents)
        for stream in streams:
            await self._coordinator.end_erased(stream)
            await self._forget(stream)
            self._documents.drop(stream)
        return len(streams)

    async def drain(self, grace_s: float) -> None:
        await self._coordinator.drain(grace_s)

    async def _execute(self, stream: str, command: Command) -> Receipt:
        """Execute a command of a step that runs or ran on this worker. After the end it is ignored."""
        try:
            return await self._coordinator.execute(stream, command)
        except (NotFound, LeaseLost) as gone:
            if self._coordinator.holds(stream):  # the step expects no such subagent
                raise
            page = await self._log.read(stream, 0, 1)
            last = await self._log.read(stream, page.head - 1, 1)
            if not (page.ended and last.entries):
                raise StreamUnavailable("The step is moving to another worker; try again in a moment.") from gone
            about = _about(page)
            self._coordinator.record_ignored(about.session_id, about.plan_step_id, command)
            return Receipt(ignored="ended", status=msgspec.json.decode(last.entries[-1].body)["content"]["status"])


def _received(body: bytes) -> Receipt:
    reply = msgspec.json.decode(body, type=ForwardedReply)
    if reply.receipt is not None:
        return reply.receipt
    raise FORWARDED_ERRORS.get(reply.code, StreamUnavailable)(reply.message)


def _about(page: Page) -> StepInfo:
    return msgspec.json.decode(page.about, type=StepInfo)


def _trace(traceparent: str) -> Trace:
    """The trace of the request that started the step, with a new span."""
    trace_id = traceparent[3:35] or secrets.token_hex(16)
    return Trace(trace_id=trace_id, span_id=secrets.token_hex(8), parent_span_id=traceparent[36:52] or None)
