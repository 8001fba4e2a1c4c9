"""Reading the query log and its feedback, and rating answers, under /v1."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.types import Receive

from anabranch.app.anabranch import Anabranch
from anabranch.app.query_log import OFF
from anabranch.domain.errors import NotFound
from anabranch.domain.model import Value
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import ClientGone
from anabranch.entrypoints.http.openapi import integer, parameter
from anabranch.entrypoints.http.operations import Call, Operation
from anabranch.entrypoints.http.streams import ShutdownEvent, until_gone
from anabranch.entrypoints.http.v1_operations import (
    PAGE,
    PERIOD,
    TEXT,
    LogParameters,
    Name,
    opened,
    operation,
    page_of,
    url_parameters,
)
from anabranch.entrypoints.logged_queries import (
    FeedbackEntry,
    QueryDetail,
    feedback_entry,
    query_detail,
    query_entry,
    seconds_of,
)
from anabranch.knowledge.model import Caller, Rating
from anabranch.knowledge.records.database import made_at
from anabranch.knowledge.records.logged_queries import LoggedQuery, QueryEntry, QueryFilter

MAX_MS = 86_400_000
RECENT_S = 2.0
MAX_PAGE_BYTES = 4_000_000
RATE_AGAIN_S = (0.05, 0.1, 0.2, 0.4, 0.8)
GUESTS = "Guests have no entries in the query log; send an API key, or a token that names a user."
NO_FOLDER = "There is no data folder yet, and questions are kept in it."


class Feedback(Value):
    query_id: Annotated[str, Meta(min_length=1, max_length=100)]
    rating: Rating
    comment: Annotated[str, Meta(max_length=10_000)] | None = None


class Sharing(Value):
    shared: bool


class SharedQuery(Value):
    id: str
    shared: bool


class FeedbackRecorded(Value):
    recorded: bool


class QueryPage(Value):
    """Entries of the query log, newest first; `next` is the `after` of the next page. `note` says why a list is empty
    if no entries are kept for this caller."""

    queries: list[QueryEntry]
    has_more: bool
    next: str | None
    note: str | None


class FeedbackPage(Value):
    """Ratings, the latest first; `next` is the `after` of the next page. `note` says why a list is empty if no entries
    are kept for this caller."""

    feedback: list[FeedbackEntry]
    has_more: bool
    next: str | None
    note: str | None


class FeedbackParameters(LogParameters):
    """Also those of `RATED`."""

    rating: Rating | None = None


class QueryParameters(FeedbackParameters):
    """Also those of `FILTERS`."""

    collection: Name | None = None
    conversation_id: Name | None = None
    surface: Name | None = None
    outcome: Name | None = None
    slower_than_ms: Annotated[int, Meta(ge=0, le=MAX_MS)] | None = None


RATED = parameter("rating", {"enum": ["thumbs_up", "thumbs_down"]}, "Only answers with this rating")
FILTERS = (
    parameter("collection", TEXT, "Id or name of a collection"),
    parameter("conversation_id", TEXT, "Only this conversation"),
    parameter(
        "surface", TEXT, "`query`, `rag_stream`, `chat`, `openai`, `endpoints`, `mcp`, `planner`, `cli` or `library`"
    ),
    parameter("outcome", TEXT, "`answered`, `refused`, an error code, or `failed` for every error code"),
    parameter("slower_than_ms", integer(0, MAX_MS), "Only questions that took longer"),
)


class LogPage(NamedTuple):
    entries: list[LoggedQuery] = []
    next: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class QueryLogSurface:
    """Callers read and rate their own questions; operators those of all."""

    anabranch: Anabranch
    access: Access
    closing: ShutdownEvent

    def operations(self) -> list[Operation[Any]]:
        at, feedback = partial(operation, identify=self.access.caller), "/v1/feedback"
        return [
            at(
                *("GET", "/v1/queries", "list_queries", "List questions of the query log", self._queries, QueryPage),
                parameters=(*PAGE, RATED, *PERIOD, *FILTERS),
                scope="read",
            ),
            at(
                *("GET", "/v1/queries/{query}", "get_query", "Get a question of the query log with its answer"),
                *(self._query, QueryDetail),
                scope="read",
            ),
            at(
                *("POST", "/v1/queries/{query}/share", "share_query", "Let others read a question and its answer"),
                *(self._share, SharedQuery),
                request_type=Sharing,
                scope="ask",
            ),
            at(
                *("GET", feedback, "list_feedback", "List ratings", self._feedback, FeedbackPage),
                parameters=(*PAGE, RATED, *PERIOD),
                scope="read",
            ),
            at(
                *("POST", feedback, "feedback", "Rate an answer", self._rate, FeedbackRecorded),
                request_type=Feedback,
                scope="ask",
            ),
        ]

    async def _queries(self, call: Call[None]) -> QueryPage:
        given = url_parameters(call, QueryParameters)
        page = await self._page(call, given, rated=False)
        entries = [query_entry(one, operator=call.caller.operator) for one in page.entries]
        return QueryPage(queries=entries, has_more=page.next is not None, next=page.next, note=page.note)

    async def _feedback(self, call: Call[None]) -> FeedbackPage:
        given = url_parameters(call, FeedbackParameters)
        page = await self._page(call, given, rated=True)
        entries = [feedback_entry(one, operator=call.caller.operator) for one in page.entries]
        return FeedbackPage(feedback=entries, has_more=page.next is not None, next=page.next, note=page.note)

    async def _page(self, call: Call[None], given: FeedbackParameters, *, rated: bool) -> LogPage:
        if (reason := self._why_empty(call.caller)) is not None:
            return LogPage(note=reason)
        await self.anabranch.query_log.settled(call.caller)
        knowledge = await self.anabranch.knowledge()
        cursors = await knowledge.cursors("feedback" if rated else "queries")
        wanted = await self._wanted(call.caller, given)
        before = opened(given.after, cursors)
        found = await knowledge.logged_queries(call.caller, wanted, before, given.limit + 1, rated=rated)
        return LogPage(
            *page_of(
                found, _fitting(found[: given.limit]), lambda one: (one.rated_us or 0) if rated else one.key, cursors
            )
        )

    def _why_empty(self, caller: Caller) -> str | None:
        """The reason if nothing is kept for this caller."""
        if self.anabranch.settings.query_log_days == 0:
            return f"{OFF}."
        if caller.user is None and not caller.operator:
            return GUESTS
        return None if self.anabranch.knowledge.exists else NO_FOLDER

    async def _wanted(self, caller: Caller, given: FeedbackParameters) -> QueryFilter:
        since, until = seconds_of("since", given.since), seconds_of("until", given.until, end=True)
        wanted = QueryFilter(rating=given.rating, since=since, until=until)
        if not isinstance(given, QueryParameters):
            return wanted
        key = None
        if given.collection is not None:
            key = (await (await self.anabranch.knowledge()).collection(caller, given.collection)).collection.key
        return msgspec.structs.replace(
            wanted,
            collection=key,
            conversation=given.conversation_id,
            surface=given.surface,
            outcome=given.outcome,
            slower_than_ms=given.slower_than_ms,
        )

    async def _query(self, call: Call[None]) -> QueryDetail:
        if (reason := self._why_empty(call.caller)) is not None:
            raise NotFound(reason)
        await self.anabranch.query_log.settled(call.caller)
        found = await (await self.anabranch.knowledge()).logged_query(call.caller, call.params["query"])
        return query_detail(found, operator=call.caller.operator)

    async def _share(self, call: Call[Sharing]) -> SharedQuery:
        if (reason := self._why_empty(call.caller)) is not None:
            raise NotFound(reason)
        await self.anabranch.query_log.settled(call.caller)
        identifier, shared = call.params["query"], call.request.shared
        await (await self.anabranch.knowledge()).share(call.caller, identifier, shared=shared)
        return SharedQuery(id=identifier, shared=shared)

    async def _rate(self, call: Call[Feedback]) -> FeedbackRecorded:
        request = call.request
        if self.anabranch.settings.query_log_days == 0:
            raise NotFound(f"{OFF}, so none can be rated.")
        recent = abs(time.time() - made_at(request.query_id)) < RECENT_S  # a client may send a time far ahead
        rate = partial(self.anabranch.query_log.rate, call.caller, request.query_id, request.rating, request.comment)
        if await rate() or (recent and await self._rated_later(call.receive, rate)):
            return FeedbackRecorded(recorded=True)
        raise NotFound(f"There is no query {request.query_id!r}.")

    async def _rated_later(self, receive: Receive, rate: Callable[[], Awaitable[bool]]) -> bool:
        """Another process may still be recording the question. The wait ends with the request and with the drain."""
        try:
            async with until_gone(receive, self.closing, "http.disconnect"):
                for pause_s in RATE_AGAIN_S:
                    await asyncio.sleep(pause_s)
                    if await rate():
                        return True
        except TimeoutError:
            raise self.closing.error or ClientGone() from None
        return False


def _fitting(found: Sequence[LoggedQuery]) -> int:
    """How many of these entries a page has: their questions may be long. At least one."""
    sizes = accumulate(len(msgspec.json.encode(one.entry)) for one in found)
    return max(1, sum(size <= MAX_PAGE_BYTES for size in sizes))
