"""Feedback on a question that is not recorded, or not yet."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from starlette.types import Message

from anabranch.knowledge.records import queries
from anabranch.knowledge.records.database import made_at, new_id
from support.collection_server import PATIENCE_S, Library, library
from support.knowledge_fixtures import query_record, records_in

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-1")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Library]:
    folder = tmp_path_factory.mktemp("data")
    async with library(folder, folder / "no models") as opened:
        yield opened


def ahead(seconds: int) -> str:
    """An id as ours, but made so many seconds from now."""
    return str(uuid.UUID(int=uuid.UUID(new_id()).int + (seconds * 1_000 << 80)))


async def rate(shelf: Library, query: str, after_the_body: Callable[[], Awaitable[Message]]) -> list[Message]:
    """What the server sends. It asks for a message after the body when it begins to wait, and not before."""
    sent: list[Message] = []
    body = json.dumps({"query_id": query, "rating": "thumbs_up"}).encode()
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return inbox.pop() if inbox else await after_the_body()

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {shelf.secrets['alice']}".encode())]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/feedback", "query_string": b""}
    async with asyncio.timeout(PATIENCE_S):
        await shelf.server.service({**scope, "headers": headers, "client": ("127.0.0.1", 1)}, receive, send)
    return sent


async def test_a_question_dated_ahead_is_not_waited_for(shelf: Library) -> None:
    dated = [ahead(seconds) for seconds in (10, 86_400, 10**9)] + ["ffffffff-ffff-7fff-bfff-ffffffffffff"]
    assert made_at(dated[-1]) > made_at(dated[0]) > made_at(new_id())

    async def waits() -> Message:
        raise AssertionError("It waits.")

    for query in dated:
        begun, _ = await rate(shelf, query, waits)
        assert begun["status"] == 404


async def test_the_wait_for_a_question_ends_when_the_client_goes(shelf: Library) -> None:
    async def goes() -> Message:
        return {"type": "http.disconnect"}

    assert await rate(shelf, new_id(), goes) == []


async def test_a_question_that_another_process_records_a_moment_later_is_rated(shelf: Library) -> None:
    query = new_id()
    asked = query_record(query, "alice")
    other = records_in(shelf.folder)

    async def recorded() -> Message:
        await other.write(lambda db: queries.record(db, asked))
        await asyncio.Event().wait()
        raise AssertionError

    begun, body = await rate(shelf, query, recorded)
    assert (begun["status"], json.loads(body["body"])) == (200, {"recorded": True})
    other.close()
