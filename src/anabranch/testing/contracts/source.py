"""The tests of the contract Source."""

import asyncio
import time
from collections.abc import Callable

from anabranch.domain.contracts import Source
from anabranch.domain.model import Context, Query, Status

QUERY = Query(text="Why?", limit=2, similarity_threshold=0.1)


def context() -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + 30)


class SourceContract:
    """The fixture `make` gives a source by its slug, owned by alice: `docs` has passages, `broken` fails, `hang` never
    answers."""

    async def test_passages_name_their_source(self, make: Callable[[str], Source]) -> None:
        reply = await make("docs").search(QUERY, context())
        assert (reply.path, reply.status, reply.error) == ("alice/docs", Status.SUCCESS, None)
        assert 0 < len(reply.passages) <= QUERY.limit
        for passage in reply.passages:
            assert passage.source == "alice/docs"
            assert passage.title
            assert passage.text
            assert 0 <= passage.score <= 1

    async def test_a_failure_is_a_reply_with_an_error(self, make: Callable[[str], Source]) -> None:
        reply = await make("broken").search(QUERY, context())
        assert (reply.path, reply.status, reply.passages) == ("alice/broken", Status.ERROR, ())
        assert reply.error

    async def test_a_search_can_be_cancelled(self, make: Callable[[str], Source]) -> None:
        search = asyncio.create_task(make("hang").search(QUERY, context()))
        await asyncio.sleep(0)
        search.cancel()
        await asyncio.wait([search])
        assert search.cancelled()

    async def test_concurrent_searches_give_the_same_passages(self, make: Callable[[str], Source]) -> None:
        source = make("docs")
        replies = await asyncio.gather(*(source.search(QUERY, context()) for _ in range(20)))
        assert all(reply.passages == replies[0].passages for reply in replies)
