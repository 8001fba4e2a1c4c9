"""Spec 2's dialect: steps are handed over, fed, judged, followed, read again and cancelled under /planner/sessions/."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import zip_longest
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.planner import Planner
from anabranch.domain.errors import AnabranchError, InvalidQuestion, StreamFull, StreamUnavailable
from anabranch.domain.steps import Cancel
from anabranch.domain.streams import Recorded
from anabranch.entrypoints.http import planner_views as views
from anabranch.entrypoints.http import planner_wire as wire
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.chaining import Arrivals, Chain
from anabranch.entrypoints.http.errors import send_error
from anabranch.entrypoints.http.exchange import JSON, PIECE_S, header, send_json
from anabranch.entrypoints.http.knowledge_errors import Gone, body_of
from anabranch.entrypoints.http.planner_socket import check_origin, follow, with_key
from anabranch.entrypoints.http.tailing import Closing, pieces, tail, until_gone, until_revoked
from anabranch.knowledge.model import Caller
from anabranch.streams.mux import Lagging

SURFACE = "planner"
WEBSOCKET = "WEBSOCKET"
MOST = 1_000
LONGEST_LIMIT = 15
USUAL = 100
NO_SHARED_LOG = (
    "Several workers without a Redis cannot keep planner steps: "
    "set AGGREGATOR_REDIS_URL to one that they share, or serve with one worker."
)


class PlannerUnavailable(StreamUnavailable):
    code = "planner_unavailable"


class Call(NamedTuple):
    """A request to a step, from somebody who is known."""

    planner: Planner
    caller: Caller
    identity: str
    session_id: str
    plan_step_id: str
    key: str
    scope: Scope
    receive: Receive
    send: Send

    @property
    def step(self) -> tuple[str, str, str]:
        return self.identity, self.session_id, self.plan_step_id


Handler = Callable[[Call], Awaitable[None]]


class PlannerSurface:
    """`leaving` is set when the server begins to stop, `left` when all that it kept has ended."""

    def __init__(self, anabranch: Anabranch, leaving: Closing, left: Closing) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)
        self._leaving = leaving
        self._left = left
        self._arrivals = Arrivals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answered(scope, receive, send)
        except Gone:
            pass
        except AnabranchError as error:
            await self._refuse(send, error)
        except UnicodeDecodeError:
            await self._refuse(send, InvalidQuestion("The request is not UTF-8."))
        except (msgspec.MsgspecError, RecursionError) as error:
            await self._refuse(send, InvalidQuestion(f"The request is not valid: {error}"))

    async def _refuse(self, send: Send, error: AnabranchError) -> None:
        self._anabranch.turned_away(SURFACE, error.code)
        await send_error(send, error)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Who asks comes first, then whether the request makes sense by itself; only then is the step looked up, so
        that what is said of a request says nothing of steps that are not the caller's."""
        method, handler, ids = self._routed(_segments(scope))
        asked = WEBSOCKET if scope["type"] == "websocket" else scope["method"]
        if asked != method:
            raise _not_that(method, asked)
        if asked == WEBSOCKET:
            check_origin(scope, [origin for origin in self._settings.cors_origins if origin != "*"])
            scope = with_key(scope)
        caller = await self._access.caller(scope)
        if (planner := self._anabranch.planner) is None:
            raise PlannerUnavailable(NO_SHARED_LOG)
        session_id, plan_step_id, key = (
            wire.identifier(given, what) if given is not None else ""
            for given, what in zip_longest(ids, ("The session's id", "The step's id", "The subagent's key"))
        )
        identity = self._access.identity(caller)
        await handler(Call(planner, caller, identity, session_id, plan_step_id, key, scope, receive, send))

    def _routed(self, segments: Sequence[str]) -> tuple[str, Handler, tuple[str, ...]]:
        match segments:
            case ["planner", "sessions", session, "steps"]:
                return "POST", self._begin, (session,)
            case ["planner", "sessions", session, "steps", step]:
                return "DELETE", self._cancel, (session, step)
            case ["planner", "sessions", session, "steps", step, "progress"]:
                return "POST", self._progress, (session, step)
            case ["planner", "sessions", session, "steps", step, "safety"]:
                return "POST", self._safety, (session, step)
            case ["planner", "sessions", session, "steps", step, "stream"]:
                return "GET", self._stream, (session, step)
            case ["planner", "sessions", session, "steps", step, "events"]:
                return "GET", self._events, (session, step)
            case ["planner", "sessions", session, "steps", step, "ws"]:
                return WEBSOCKET, self._socket, (session, step)
            case ["planner", "sessions", session, "steps", step, "subagents", key, "events"]:
                return "POST", self._push, (session, step, key)
            case _:
                raise HTTPException(404)

    async def _body(self, call: Call) -> bytes:
        return await body_of(call.receive, self._settings.max_request_bytes)

    async def _begin(self, call: Call) -> None:
        directive = wire.directive(call.session_id, wire.step_of(await self._body(call)))
        context = self._access.context(call.scope, call.caller, SURFACE)
        created, page = await call.planner.begin(directive, context, call.identity)
        call = call._replace(plan_step_id=directive.plan_step_id)
        if not call.planner.streaming:
            await self._answer_at_the_end(call)
            return
        status = "in_progress"
        if page.ended:
            last = await call.planner.page(*call.step, page.head - 1, 1)
            status = views.status_of(last.entries[-1])
        body = views.accepted(call.session_id, call.plan_step_id, page, status)
        await send_json(call.send, 201 if created else 200, body)

    async def _answer_at_the_end(self, call: Call) -> None:
        """The step goes on if its planner leaves meanwhile; handing it over again gets the answer."""
        entries: list[Recorded] = []
        with self._until_revoked(call, self._left) as closing:
            try:
                async with (
                    await call.planner.reader(*call.step, 0) as reader,
                    until_gone(call.receive, closing, "http.disconnect"),
                ):
                    ended = False
                    while not ended:
                        batch = await reader.next(self._settings.heartbeat_interval)
                        if batch is not None:
                            entries = [*([] if batch.reset else entries), *batch.entries]
                            ended = batch.ended
            except TimeoutError:
                raise closing.error or Gone() from None
            except Lagging:  # it takes everything at once
                raise StreamUnavailable("The step brings more than could be read; hand it over again.") from None
        with suppress(TimeoutError):
            await send_json(call.send, 200, views.answer(call.session_id, call.plan_step_id, entries))

    async def _push(self, call: Call) -> None:
        sent = wire.pushes_of(await self._body(call))
        if not isinstance(sent, list):
            receipt = await call.planner.tell(*call.step, wire.push(call.key, sent))
            status = 202 if receipt.ignored is None else 200
            await send_json(call.send, status, msgspec.json.encode(views.taken(receipt)))
            return
        if not 1 <= len(sent) <= wire.PUSHES:
            raise InvalidQuestion(f"Send one event, or a list of 1 to {wire.PUSHES}.")
        results = []
        for one in [wire.push(call.key, form) for form in sent]:
            try:
                results.append(views.taken(await call.planner.tell(*call.step, one)))
            except (InvalidQuestion, StreamFull) as error:
                results.append(views.Taken(accepted=False, error=error.code, message=error.message))
        status = 202 if any(one.accepted for one in results) else 200
        await send_json(call.send, status, msgspec.json.encode(views.TakenList(results=results)))

    async def _progress(self, call: Call) -> None:
        receipt = await call.planner.tell(*call.step, wire.progress(await self._body(call)))
        status = 202 if receipt.ignored is None else 200
        await send_json(call.send, status, msgspec.json.encode(views.taken(receipt)))

    async def _safety(self, call: Call) -> None:
        decision = wire.decision(wire.safety_of(await self._body(call)))
        receipt = await call.planner.tell(*call.step, decision)
        body = views.Judged(
            decision=wire.verdict(decision.decision),
            status=receipt.status,
            accepted=receipt.ignored is None,
            sequence=receipt.sequence,
            reason=receipt.ignored,
        )
        await send_json(call.send, 200, msgspec.json.encode(body))

    async def _cancel(self, call: Call) -> None:
        receipt = await call.planner.tell(*call.step, Cancel())
        body = views.StepStands(
            status=receipt.status,
            accepted=receipt.ignored is None,
            sequence=receipt.sequence,
            reason=receipt.ignored,
        )
        await send_json(call.send, 200, msgspec.json.encode(body))

    async def _events(self, call: Call) -> None:
        asked = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        after = wire.cursor(asked.get("after", ["0"])[-1], "after")
        limit = asked.get("limit", [str(USUAL)])[-1]
        if not (limit.isascii() and limit.isdigit() and len(limit) <= LONGEST_LIMIT and int(limit)):
            raise InvalidQuestion("limit must be a whole number from 1 on.")
        page = await call.planner.page(*call.step, after, min(int(limit), MOST))
        await call.send({"type": "http.response.start", "status": 200, "headers": [JSON]})
        with suppress(TimeoutError):
            for part in views.page(call.session_id, call.plan_step_id, after, page):
                for piece in pieces(part):
                    async with asyncio.timeout(PIECE_S):
                        await call.send({"type": "http.response.body", "body": piece, "more_body": True})
            await call.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, call: Call) -> None:
        async with self._chain(call) as chain:
            if chain.over:
                await call.send({"type": "http.response.start", "status": 204, "headers": []})
                await call.send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            with self._until_revoked(call, self._closing(call, chain)) as closing:
                await tail(
                    chain,
                    call.receive,
                    call.send,
                    frames=views.Frames().sse,
                    heartbeat=views.sse_heartbeat,
                    heartbeat_s=self._settings.heartbeat_interval,
                    closing=closing,
                )

    async def _socket(self, call: Call) -> None:
        async with self._chain(call) as chain:
            with self._until_revoked(call, self._closing(call, chain)) as closing:
                if (error := closing.error) is not None:
                    raise error
                heartbeat_s = self._settings.heartbeat_interval
                await follow(chain, call.scope, call.receive, call.send, heartbeat_s=heartbeat_s, closing=closing)

    def _until_revoked(self, call: Call, closing: Closing) -> AbstractContextManager[Closing]:
        return until_revoked(closing, self._anabranch.revocations, call.caller.key)

    def _chain(self, call: Call) -> Chain:
        asked = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        # A client that reconnects by itself still has the address that it began with: the header is the newer one.
        sent = header(call.scope, b"last-event-id") or asked.get("last_event_id", ["0"])[-1]
        return Chain(call.planner, self._arrivals, call.step, wire.cursor(sent, "Last-Event-ID"))

    def _closing(self, call: Call, chain: Chain) -> Closing:
        """Who follows a step that is kept elsewhere can do so there, too; one that is kept here is followed to its end,
        which a stopping server brings about."""
        return self._left if call.planner.keeps(chain.page) else self._leaving


def _segments(scope: Scope) -> list[str]:
    """The path's, each decoded by itself: an id may have a slash in it."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return [unquote(segment, errors="strict") for segment in raw.decode("latin-1").split("/")[1:]]


def _not_that(method: str, asked: str) -> HTTPException:
    if method != WEBSOCKET:
        return HTTPException(405, headers={"Allow": method})
    if asked != "GET":
        return HTTPException(405, headers={"Allow": "GET"})
    return HTTPException(
        426, "Open this address as a WebSocket.", headers={"Upgrade": "websocket", "Connection": "Upgrade"}
    )
