"""Collections: made, listed, counted, deleted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-1")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir) as opened:
        yield opened


async def test_a_new_collection_says_what_was_made_smaller(shelf: Library) -> None:
    reply = await shelf.call("POST", "/v1/collections", {"name": "defaults", "description": "All of it"})
    made = reply.body
    assert reply.status == 201
    assert set(made) == {
        *("id", "name", "address", "description", "owner", "settings"),
        *("document_count", "chunk_count", "created_at", "published"),
    }
    assert (made["name"], made["description"], made["owner"]) == ("defaults", "All of it", None)
    assert (made["document_count"], made["chunk_count"]) == (0, 0)
    assert made["created_at"].endswith("Z")
    assert made["settings"] == {
        "embedding_model": "all-MiniLM-L6-v2",
        "chunking_strategy": "semantic",
        "chunk_size": 254,
        "chunk_overlap": 50,
        "requested": {"chunk_size": 512, "chunk_overlap": 50},
        "default_permissions": {"visibility": "public", "allowed_users": [], "allowed_groups": []},
    }


async def test_a_collection_keeps_the_settings_that_fit(shelf: Library) -> None:
    settings = {
        "embedding_model": "all-MiniLM-L6-v2",
        "chunking_strategy": "fixed",
        "chunk_size": 100,
        "chunk_overlap": 10,
        "default_permissions": {"visibility": "restricted", "allowed_users": ["bob"], "allowed_groups": ["staff"]},
        "later": 1,
    }
    made = await shelf.good("POST", "/v1/collections", {"name": "chosen", "settings": settings, "later": []})
    expected = {name: value for name, value in settings.items() if name != "later"}
    assert made["settings"] == {**expected, "requested": None}
    assert await shelf.good("GET", "/v1/collections/chosen") == made
    assert await shelf.good("GET", f"/v1/collections/{made['id']}") == made


async def test_a_name_is_taken_once_by_each_owner(shelf: Library) -> None:
    await shelf.collection("twice", who="alice")
    reply = await shelf.call("POST", "/v1/collections", {"name": "twice"}, who="alice")
    assert (reply.status, reply.code, reply.body["error"]) == (409, "CONFLICT", "conflict")
    await shelf.collection("twice", who="bob")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "  "}, "1 to 100"),
        ({"name": "a\nb"}, "U+000A"),
        ({"name": "n" * 101}, "name"),
        ({"name": 5}, "name"),
        ({"name": "x", "settings": []}, "settings"),
        ({"name": "x", "settings": {"embedding_model": "text-embedding-3-small"}}, "anabranch index rebuild"),
        ({"name": "x", "settings": {"chunking_strategy": "magic"}}, "chunking_strategy"),
        ({"name": "x", "settings": {"chunk_size": 1}}, "chunk_size"),
        ({"name": "x", "settings": {"chunk_size": "100"}}, "chunk_size"),
        ({"name": "x", "settings": {"chunk_overlap": -1}}, "chunk_overlap"),
        ({"name": "x", "settings": {"default_permissions": {"visibility": "all"}}}, "visibility"),
        ({"name": "x", "settings": {"default_permissions": {"allowed_users": ["u"] * 1001}}}, "allowed_users"),
        ({"name": "x", "settings": {"default_permissions": {"allowed_groups": ["g" * 201]}}}, "allowed_groups"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_wrong_collection_is_400_and_says_why(shelf: Library, body: Any, says: str) -> None:
    reply = await shelf.call("POST", "/v1/collections", body)
    assert (reply.status, reply.code, reply.body["error"]) == (400, "VALIDATION_ERROR", "validation_error")
    assert says in reply.body["message"]
    assert set(reply.body) == {"error", "code", "message", "details"}
    assert reply.body["details"]["text"] == reply.body["message"]


async def test_counts_follow_the_documents(shelf: Library) -> None:
    await shelf.collection("counted")
    before = await shelf.good("GET", "/v1/collections/counted/stats")
    assert before == {
        "document_count": 0,
        "chunk_count": 0,
        "total_tokens": 0,
        "storage_bytes": 0,
        "query_count_30d": 0,
    }
    content = "The lighthouse keeper writes down the weather every evening."
    await shelf.ingest("counted", text(content), text("Fishermen read the log before they sail."))
    for _ in range(3):
        await shelf.ask("Who writes down the weather?", collections=["counted"])
    after = await shelf.good("GET", "/v1/collections/counted/stats")
    assert (after["document_count"], after["chunk_count"], after["query_count_30d"]) == (2, 2, 3)
    assert after["total_tokens"] > 10
    text_and_vectors = 2 * (len(content) + len("Fishermen read the log before they sail.")) + 2 * 384 * 4
    assert after["storage_bytes"] > text_and_vectors + 2 * 384 * 5
    listed = await shelf.good("GET", "/v1/collections")
    found = next(one for one in listed["collections"] if one["name"] == "counted")
    assert (found["document_count"], found["chunk_count"]) == (2, 2)


async def test_a_deleted_collection_takes_its_documents_along(shelf: Library) -> None:
    await shelf.collection("doomed")
    (item,) = await shelf.ingest("doomed", text("The doomed expedition carried 40 barrels of pickled walnuts."))
    question = "How many barrels of pickled walnuts did the expedition carry?"
    assert "40 barrels" in (await shelf.ask(question))["answer"]
    deleted = await shelf.good("DELETE", "/v1/collections/doomed")
    assert (deleted["deleted"], deleted["documents_removed"]) == (True, 1)
    assert (await shelf.ask(question))["refused"]
    for path in ("/v1/collections/doomed", "/v1/collections/doomed/stats", f"/v1/documents/{item['id']}"):
        reply = await shelf.call("GET", path)
        assert (reply.status, reply.code) == (404, "NOT_FOUND")
    assert (await shelf.call("DELETE", "/v1/collections/doomed")).status == 404
