"""Documents that are kept: listed, opened, described anew, deleted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-2")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir) as opened:
        await opened.collection("notes")
        await opened.collection("paged")
        yield opened


async def document(shelf: Library, content: str, **more: Any) -> str:
    (item,) = await shelf.ingest("notes", text(content, **more))
    return str(item["id"])


async def test_pages_hold_every_document_once(shelf: Library) -> None:
    await shelf.ingest("paged", *(text(f"Page {number}.", title=f"Page {number}") for number in range(11)))
    seen: list[str] = []
    after = ""
    while True:
        page = await shelf.good("GET", f"/v1/documents?collection=paged&limit=4{after}")
        assert page["total"] == 11
        assert "content" not in page["documents"][0]
        seen += [one["title"] for one in page["documents"]]
        assert page["has_more"] == (page["next"] is not None)
        if not page["has_more"]:
            break
        after = f"&after={page['next']}"
    assert seen == [f"Page {number}" for number in range(11)]
    everything = await shelf.good("GET", "/v1/documents?limit=1000")
    assert everything["total"] == len(everything["documents"]) >= 11
    assert everything["documents"][0]["collection"] in ("paged", "notes")


async def test_a_page_goes_on_behind_a_deleted_document(shelf: Library) -> None:
    await shelf.collection("shrinking")
    await shelf.ingest("shrinking", *(text(f"Leaf {number}.", title=str(number)) for number in range(4)))
    page = await shelf.good("GET", "/v1/documents?collection=shrinking&limit=2")
    for one in page["documents"]:
        await shelf.good("DELETE", f"/v1/documents/{one['id']}")
    rest = await shelf.good("GET", f"/v1/documents?collection=shrinking&limit=2&after={page['next']}")
    assert [one["title"] for one in rest["documents"]] == ["2", "3"]


async def test_a_cursor_tells_nothing_and_takes_no_other(shelf: Library) -> None:
    await shelf.ingest("paged", *(text(f"Page {number}.", title=f"Page {number}") for number in range(3)))
    path = "/v1/documents?collection=paged&limit=1"
    cursors = {(await shelf.good("GET", path))["next"] for _ in range(5)}
    assert len(cursors) == 5
    cursor = cursors.pop()
    for wrong in ("1", "AAAA", "%ff", cursor[:-1], cursor[1:], cursor[:4] + "AAAA" + cursor[8:]):
        reply = await shelf.call("GET", f"{path}&after={wrong}")
        assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "limit=", "limit=1e3", "limit=٣"])
async def test_a_wrong_page_is_400(shelf: Library, query: str) -> None:
    assert (await shelf.call("GET", f"/v1/documents?{query}")).code == "VALIDATION_ERROR"


async def test_a_list_of_a_collection_that_is_not_there_is_404(shelf: Library) -> None:
    assert (await shelf.call("GET", "/v1/documents?collection=nowhere")).code == "NOT_FOUND"


async def test_a_document_is_opened_whole_or_in_part(shelf: Library) -> None:
    content = "Ünder the bridge 🌉 lives a troll."
    key = await document(shelf, content, title="Trolls", metadata={"author": "Asbjørnsen", "n": 3})
    whole = await shelf.good("GET", f"/v1/documents/{key}")
    assert set(whole) == {
        *("id", "collection_id", "collection", "title", "source", "metadata", "permissions", "content_hash"),
        *("chunk_count", "token_count", "size_bytes", "pages", "created_at", "updated_at"),
        *("status", "error", "processed_at", "searchable"),
        *("content", "content_start", "content_end", "content_length"),
    }
    assert (whole["collection"], whole["title"], whole["metadata"]) == (
        "notes",
        "Trolls",
        {"author": "Asbjørnsen", "n": 3},
    )
    assert (whole["content"], whole["content_length"]) == (content, len(content))
    for start, end in ((17, 18), (0, 5), (30, 9_999), (500, 900), (9, 3)):
        part = await shelf.good("GET", f"/v1/documents/{key}?start={start}&end={end}")
        assert part["content"] == content[start:end]
        assert part["content"] == content[part["content_start"] : part["content_end"]]
    assert (await shelf.call("GET", f"/v1/documents/{key}?start=-1")).code == "VALIDATION_ERROR"


async def test_what_is_said_about_a_document_can_change(shelf: Library) -> None:
    key = await document(shelf, "Badgers dig setts.", title="Old", metadata={"a": 1, "tags": ["x"]})
    changed = await shelf.good("PATCH", f"/v1/documents/{key}", {"title": "New"})
    assert (changed["title"], changed["metadata"]) == ("New", {"a": 1, "tags": ["x"]})
    assert "content" not in changed
    changed = await shelf.good("PATCH", f"/v1/documents/{key}", {"metadata": {"tags": ["y"]}, "title": None})
    assert (changed["title"], changed["metadata"]) == ("New", {"tags": ["y"]})
    assert changed["updated_at"] > changed["created_at"]
    filters = {"tags": ["y"]}
    found = await shelf.ask("What do badgers dig?", filters=filters)
    assert [one["title"] for one in found["sources"]] == ["New"]
    assert not (await shelf.ask("What do badgers dig?", filters={"tags": ["x"]}))["sources"]


@pytest.mark.parametrize(
    "body",
    [
        {"title": ""},
        {"title": "t" * 201},
        {"metadata": []},
        {"metadata": "x"},
        {"metadata": {"x": "y" * 70_000}},
        {"permissions": {"visibility": "hidden"}},
        {"permissions": {"allowed_users": "bob"}},
        [],
        "x",
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_wrong_change_is_400_and_changes_nothing(shelf: Library, body: Any) -> None:
    key = await document(shelf, "Moles are nearly blind.", title="Moles", id="moles")
    before = await shelf.good("GET", f"/v1/documents/{key}")
    reply = await shelf.call("PATCH", f"/v1/documents/{key}", body)
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert await shelf.good("GET", f"/v1/documents/{key}") == before


async def test_a_deleted_document_is_gone_at_once(shelf: Library) -> None:
    key = await document(shelf, "Pangolins carry 1,000 scales of keratin.")
    question = "How many scales of keratin do pangolins carry?"
    assert "1,000" in (await shelf.ask(question))["answer"]
    assert await shelf.good("DELETE", f"/v1/documents/{key}") == {"deleted": True, "chunks_removed": 1}
    assert key not in [one["document_id"] for one in (await shelf.ask(question))["sources"]]
    for method in ("GET", "DELETE"):
        assert (await shelf.call(method, f"/v1/documents/{key}")).code == "NOT_FOUND"
    assert (await shelf.call("PATCH", f"/v1/documents/{key}", {"title": "x"})).code == "NOT_FOUND"
