"""The chunks of a document over HTTP: their order, their pages, and who may read them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("document-chunks")]

GUIDE = "# Trains\n\n" + "\n\n".join(
    f"Train number {n} leaves from platform {n} at noon, on every day." for n in range(12)
)
PRIVATE = {"visibility": "private"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir) as opened:
        await opened.collection("travel", who="alice", chunking_strategy="sentence", chunk_size=32, chunk_overlap=0)
        await opened.ingest("travel", text(GUIDE, title="Guide", filename="a/guide.md"), who="alice")
        await opened.ingest("travel", text(GUIDE, title="Secret", permissions=PRIVATE, id="secret"), who="alice")
        yield opened


async def test_chunks_come_in_order_with_their_place_in_the_content(shelf: Library) -> None:
    document = await shelf.good("GET", "/v1/documents/Guide", who="bob")
    page = await shelf.good("GET", f"/v1/documents/{document['id']}/chunks", who="bob")
    chunks = page["chunks"]
    assert (page["total"], page["has_more"], page["next"]) == (document["chunk_count"], False, None)
    assert [one["index"] for one in chunks] == list(range(page["total"]))
    assert set(chunks[0]) == {"id", "index", "start_char", "end_char", "tokens", "type", "headers", "page", "text"}
    for one in chunks:
        assert document["content"][one["start_char"] : one["end_char"]] == one["text"]
        assert (one["headers"], one["page"]) == (["Trains"], None)
    assert sum(one["tokens"] for one in chunks) == document["token_count"]
    found = (await shelf.ask("When does train number 7 leave?", who="bob"))["sources"][0]
    assert chunks[found["chunk_index"]]["id"] == found["chunk_id"]


async def test_pages_of_chunks_are_read_with_a_cursor(shelf: Library) -> None:
    whole = (await shelf.good("GET", "/v1/documents/a%2Fguide.md/chunks", who="alice"))["chunks"]
    read, after = [], ""
    while True:
        page = await shelf.good("GET", f"/v1/documents/a%2Fguide.md/chunks?limit=5{after}", who="alice")
        read += page["chunks"]
        if not page["has_more"]:
            break
        after = f"&after={page['next']}"
    assert read == whole
    assert len(whole) > 5


async def test_only_who_may_see_a_document_gets_its_chunks(shelf: Library) -> None:
    assert (await shelf.good("GET", "/v1/documents/Secret/chunks", who="alice"))["total"] > 0
    for who, name in (("bob", "Secret"), ("alice", "nothing")):
        reply = await shelf.call("GET", f"/v1/documents/{name}/chunks", who=who)
        assert (reply.status, reply.code) == (404, "NOT_FOUND")
    foreign = await shelf.call("GET", "/v1/documents/Guide/chunks", headers={"X-Forwarded-For": "203.0.113.9"})
    assert foreign.status == 401


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "after=", "after=0", "after=AAAA", "after=%00"])
async def test_an_odd_page_of_chunks_is_refused(shelf: Library, query: str) -> None:
    reply = await shelf.call("GET", f"/v1/documents/Guide/chunks?{query}", who="alice")
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize("path", ["documents", "documents?status=all", "queries", "feedback", "audit"])
async def test_a_cursor_of_chunks_stands_for_no_place_in_the_lists_of_all(shelf: Library, path: str) -> None:
    """Its caller chooses the number in it: with it, a search in a list would count what others have."""
    page = await shelf.good("GET", "/v1/documents/Guide/chunks?limit=5", who="alice")
    who = "root" if path == "audit" else "alice"
    reply = await shelf.call("GET", f"/v1/{path}{'&' if '?' in path else '?'}after={page['next']}", who=who)
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert "not a cursor of this list" in reply.body["message"]
