"""A collection of this server as a source."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Context, Endpoint, Query, SourceReply, Status
from anabranch.knowledge.model import EVERYTHING, Caller

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge


class CollectionSource:
    def __init__(self, endpoint: Endpoint, knowledge: "Callable[[], Awaitable[Knowledge]]") -> None:
        self._endpoint = endpoint
        self._knowledge = knowledge

    async def search(self, query: Query, context: Context) -> SourceReply:
        """A caller without permission gets the same reply as for an empty collection."""
        path, source = self._endpoint.path, None
        if self._endpoint.slug != EVERYTHING:
            filters = msgspec.structs.replace(query.filters, collections=(self._endpoint.slug,))
            query, source = msgspec.structs.replace(query, filters=filters), path
        try:
            found = await (await self._knowledge()).find(query, Caller.of(context), source)
        except AnabranchError as error:
            return SourceReply(path=path, status=Status.ERROR, error=error.message)
        return SourceReply(
            path=path,
            status=Status.SUCCESS,
            passages=tuple(found.passages),
            seen=found.seen,
            distinct=query.near_duplicates is not None,
        )
