"""Spec 5's dialect: POST /v1/query, answered in JSON or as server-sent events by one Run."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.naming import COLLECTIONS
from anabranch.domain.errors import AnabranchError, Forbidden, InvalidQuestion
from anabranch.domain.events import Answered, AnswerEvent
from anabranch.domain.model import Allowance, Context, Endpoint, Filters, Ground, Message, Question
from anabranch.entrypoints.http import allowances
from anabranch.entrypoints.http import query_wire as wire
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.exchange import header, send_json, wants_fresh
from anabranch.entrypoints.http.following import follow, whole
from anabranch.entrypoints.http.knowledge_errors import InvalidQuery, body_of
from anabranch.entrypoints.http.ledger import EXTRACTIVE, Entry, Ledger
from anabranch.entrypoints.http.resuming import About, Resuming, preferred
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.identifiers import new_id
from anabranch.pipeline.run import Run

if TYPE_CHECKING:  # it brings numpy along
    from anabranch.knowledge.room import Knowledge

T = TypeVar("T")

SURFACE = "query"
LONGEST = 10_000
TOP_K = 10
MAX_TOKENS = 1_024
TURNS = 5
NOT_YOURS = "Only the operator may name configured sources here; leave out `sources` to ask the collections."

decode = msgspec.json.Decoder(wire.QueryRequest).decode


class SearchFailed(AnabranchError):
    """The collections could not be searched: the embedding model is not installed, the store is out of reach."""

    code = "service_unavailable"


class Started(NamedTuple):
    run: Run
    allowance: Allowance | None
    form: wire.Form
    entry: Entry
    context: Context


class QuerySurface:
    def __init__(self, anabranch: Anabranch, ledger: Ledger) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)
        self._resuming = Resuming(anabranch)
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            run, allowance, form, entry, context = await self._started(scope, receive)
        except AnabranchError as error:
            self._anabranch.turned_away(SURFACE, error.code)
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._anabranch.turned_away(SURFACE, InvalidQuestion.code)
            raise
        left = allowances.left(allowance)
        if "text/event-stream" not in (header(scope, b"accept") or "").lower():
            answer = await whole(run, receive)
            if answer.ground is Ground.ALL_FAILED and len(answer.replies) == 1:
                raise SearchFailed(answer.replies[0].error or "The search failed.")
            entry.write(answer)
            with suppress(TimeoutError):
                await send_json(send, 200, form.response(answer), left)
            return

        def frame(event: AnswerEvent) -> bytes:
            if isinstance(event, Answered) and event.answer.ground is not Ground.ALL_FAILED:
                entry.write(event.answer)
            return form.frame(event)

        if preferred(scope):
            about = About(dialect="query", correlation_id=scope["correlation_id"])
            await self._resuming.follow(run, scope, receive, send, frame, about=about, context=context, headers=left)
        else:
            await follow(run, receive, send, frame, self._settings, left)

    async def _started(self, scope: Scope, receive: Receive) -> Started:
        """Admission: what is wrong with a request is said before any 200."""
        await self._anabranch.check(SURFACE)
        caller = await self._access.caller(scope)
        asked = decode(await body_of(receive, self._settings.max_request_bytes))
        if not asked.query.strip() or len(asked.query) > LONGEST:
            raise InvalidQuery(f"query must have 1 to {LONGEST:,} characters.")
        filters = wire.filters_of(asked.filters)
        room = await self._anabranch.knowledge()
        elsewhere = named(self._anabranch, self._access.vouched(scope, caller), asked.sources)
        ours = bool(asked.collections) or not elsewhere
        searched = await room.chosen(caller, asked.collections or None) if ours else []
        if asked.collections:
            filters = msgspec.structs.replace(filters, collections=tuple(one.id for one in searched))
        asked_of = (*((COLLECTIONS,) if ours else ()), *elsewhere)
        history = await self._history(room, caller, asked.conversation_id)
        question = self._question(asked, asked_of, filters, history, fresh=wants_fresh(scope))
        query_id, conversation = new_id(), asked.conversation_id or new_id()
        settings = asked.settings or wire.QuerySettings()
        form = wire.Form(
            query_id=query_id,
            conversation_id=conversation,
            model=self._anabranch.model.path,
            include_sources=_or(settings.include_sources, True),
            response_format=settings.response_format or "text",
            elsewhere=bool(elsewhere),
        )
        ledger = self._ledger if self._settings.query_log_days else None
        entry = Entry(ledger, room, caller, query_id, conversation, question, searched)
        context = self._access.context(scope, caller, SURFACE)
        run, allowance = await self._anabranch.begin(question, context)
        return Started(run, allowance, form, entry, context)

    def _question(
        self,
        asked: wire.QueryRequest,
        asked_of: tuple[Endpoint, ...],
        filters: Filters,
        history: tuple[Message, ...],
        *,
        fresh: bool,
    ) -> Question:
        model, settings = self._anabranch.model, asked.settings or wire.QuerySettings()
        return Question(
            text=asked.query,
            sources=asked_of,
            model=model,
            history=history,
            top_k=_or(settings.top_k, min(TOP_K, self._settings.max_top_k)),
            similarity_threshold=0.0,
            max_tokens=_or(settings.max_tokens, MAX_TOKENS),
            temperature=0.0,
            profile="query",
            refuse=True,
            filters=filters,
            rerank=_or(settings.rerank, True),
            rewrite=self._anabranch.rewrites(model) and COLLECTIONS in asked_of,
            diversity=self._settings.mmr_lambda,
            threshold=self._settings.guard_threshold,
            fresh=fresh,
        )

    async def _history(self, room: "Knowledge", caller: Caller, conversation: str | None) -> tuple[Message, ...]:
        """The last turns, for a model that can read them."""
        if conversation is None or self._anabranch.model.kind == EXTRACTIVE:
            return ()
        await self._ledger.settled()  # the turn before may still be on its way
        turns = await room.turns(caller, conversation, TURNS)
        return tuple(
            message
            for turn in turns
            for message in (
                Message(role="user", content=turn.question),
                Message(role="assistant", content=turn.answer),
            )
        )


def named(anabranch: Anabranch, vouched: bool, names: Sequence[str] | None) -> tuple[Endpoint, ...]:
    """The configured sources with these names, for those who may use what the operator has configured."""
    if not names:
        return ()
    if not vouched:
        raise Forbidden(NOT_YOURS)
    return anabranch.configured(names)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
