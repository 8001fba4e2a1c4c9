"""Spec 5's dialect: POST /v1/query, answered in JSON or as server-sent events by one Run."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.endpoint_resolver import COLLECTIONS, EXTRACTIVE
from anabranch.app.query_log import LogEntry
from anabranch.app.questions import Options, SearchScope
from anabranch.domain.errors import AnabranchError, Forbidden, InvalidQuestion
from anabranch.domain.model import Allowance, Context, Endpoint, Filters, Ground, Message
from anabranch.entrypoints.http import query_wire as wire
from anabranch.entrypoints.http import rate_headers
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.asgi import header, send_json, wants_fresh
from anabranch.entrypoints.http.knowledge_errors import InvalidKnowledgeQuery, body_of
from anabranch.entrypoints.http.resumable import AnswerInfo, Resuming, preferred
from anabranch.entrypoints.http.run_stream import follow, whole
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.identifiers import new_id
from anabranch.pipeline.run import Run

if TYPE_CHECKING:  # it brings numpy along
    from anabranch.knowledge.knowledge import Knowledge

SURFACE = "query"
LONGEST = 10_000
TURNS = 5

decode = msgspec.json.Decoder(wire.QueryRequest).decode


class SearchFailed(AnabranchError):
    """The collections could not be searched: the embedding model is not installed, the store is out of reach."""

    code = "service_unavailable"


class Started(NamedTuple):
    run: Run
    allowance: Allowance | None
    form: wire.QueryForm
    context: Context


class QuerySurface:
    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)
        self._resuming = Resuming(anabranch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            run, allowance, form, context = await self._started(scope, receive)
        except AnabranchError as error:
            self._anabranch.turned_away(SURFACE, error.code)
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._anabranch.turned_away(SURFACE, InvalidQuestion.code)
            raise
        left = rate_headers.left(allowance)
        if "text/event-stream" not in (header(scope, b"accept") or "").lower():
            answer = await whole(run, receive)
            if answer.ground is Ground.ALL_FAILED and len(answer.replies) == 1:
                raise SearchFailed(answer.replies[0].error or "The search failed.")
            with suppress(TimeoutError):
                await send_json(send, 200, form.response(answer), left)
            return
        if preferred(scope):
            about = AnswerInfo(dialect="query", correlation_id=scope["correlation_id"])
            await self._resuming.follow(
                run, scope, receive, send, form.frame, about=about, context=context, headers=left
            )
        else:
            await follow(run, receive, send, form.frame, self._settings, left)

    async def _started(self, scope: Scope, receive: Receive) -> Started:
        """Admission: what is wrong with a request is said before any 200."""
        await self._anabranch.check(SURFACE)
        caller = await self._access.caller(scope)
        asked = decode(await body_of(receive, self._settings.max_request_bytes))
        if not asked.query.strip() or len(asked.query) > LONGEST:
            raise InvalidKnowledgeQuery(f"query must have 1 to {LONGEST:,} characters.")
        filters = wire.filters_of(asked.filters)
        room = await self._anabranch.knowledge()
        elsewhere = named(self._anabranch, self._access.vouched(scope, caller), asked.sources)
        search, keys = await scope_of(room, caller, asked.collections, elsewhere, filters)
        settings = asked.settings or wire.QuerySettings()
        options = Options(
            top_k=settings.top_k,
            max_tokens=settings.max_tokens,
            rerank=settings.rerank is not False,
            fresh=wants_fresh(scope),
        )
        history = await self._history(room, caller, asked.conversation_id)
        question = self._anabranch.questions.query(asked.query, search, history, options)
        conversation = asked.conversation_id or new_id()
        entry = LogEntry(conversation=conversation, collections=keys)
        form = wire.QueryForm(
            query_id=entry.query_id,
            conversation_id=conversation,
            model=self._anabranch.model.path,
            include_sources=settings.include_sources is not False,
            response_format=settings.response_format or "text",
            elsewhere=bool(elsewhere),
        )
        context = self._access.context(scope, caller, SURFACE)
        run, allowance = await self._anabranch.begin(question, context, entry=entry)
        return Started(run, allowance, form, context)

    async def _history(self, room: "Knowledge", caller: Caller, conversation: str | None) -> tuple[Message, ...]:
        """The last turns, for a model that can read them."""
        if conversation is None or self._anabranch.model.kind == EXTRACTIVE.kind:
            return ()
        await self._anabranch.query_log.settled()  # the turn before may still be on its way
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
        raise Forbidden("Configured sources are not for guests.")
    return anabranch.configured(names)


async def scope_of(
    room: "Knowledge",
    caller: Caller,
    collections: Sequence[str] | None,
    elsewhere: tuple[Endpoint, ...],
    filters: Filters,
) -> tuple[SearchScope, tuple[int, ...] | None]:
    """What a request searches, and the keys of the collections that it names. Without sources and without collections,
    every collection that the caller may see."""
    if not collections:
        return SearchScope(sources=elsewhere or (COLLECTIONS,), filters=filters), () if elsewhere else None
    chosen = await room.chosen(caller, collections)
    filters = msgspec.structs.replace(filters, collections=tuple(one.id for one in chosen))
    return SearchScope(sources=(COLLECTIONS, *elsewhere), filters=filters), tuple(one.key for one in chosen)
