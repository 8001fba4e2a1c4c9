"""A collection of this server as a source."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Context, Endpoint, Query, SourceReply, Status
from anabranch.knowledge.model import EVERYTHING, PARTIAL, Caller

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge


class CollectionSource:
    """Searches one collection, or all. `knowledge` gives None as long as there is no data folder."""

    def __init__(self, endpoint: Endpoint, knowledge: "Callable[[], Awaitable[Knowledge | None]]") -> None:
        self._endpoint = endpoint
        self._knowledge = knowledge

    async def search(self, query: Query, context: Context) -> SourceReply:
        """A caller without permission gets the same reply as for an empty collection."""
        path, source = self._endpoint.path, None
        if self._endpoint.slug != EVERYTHING:
            filters = msgspec.structs.replace(query.filters, collections=(self._endpoint.slug,))
            query, source = msgspec.structs.replace(query, filters=filters), path
        caller = Caller.of(context)
        try:
            knowledge = await self._knowledge()
            if knowledge is None:
                return SourceReply(path=path, status=Status.SUCCESS, empty=True)
            found = await knowledge.find(query, caller, source)
            empty = not found.passages and await knowledge.is_empty(query.filters.collections, caller)
        except AnabranchError as error:
            return SourceReply(path=path, status=Status.ERROR, error=error.message)
        return SourceReply(
            path=path,
            status=Status.SUCCESS,
            error=PARTIAL if found.partial else None,
            passages=tuple(found.passages),
            seen=found.seen,
            empty=empty,
            distinct=query.near_duplicates is not None,
            explanation=found.notes.explanation() if found.notes is not None else None,
        )
