"""Documents that are kept: listed, opened, described anew, deleted."""

import asyncio
import hashlib
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from aiohttp import web
from reportlab.pdfgen.canvas import Canvas
from yarl import URL

from anabranch.testing.http_server import HttpServer
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
        *("status", "error", "processed_at", "searchable", "collection_owner"),
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
    deleted = await shelf.good("DELETE", f"/v1/documents/{key}")
    assert (deleted["deleted"], deleted["chunks_removed"]) == (True, 1)
    assert key not in [one["document_id"] for one in (await shelf.ask(question))["sources"]]
    for method in ("GET", "DELETE"):
        assert (await shelf.call(method, f"/v1/documents/{key}")).code == "NOT_FOUND"
    assert (await shelf.call("PATCH", f"/v1/documents/{key}", {"title": "x"})).code == "NOT_FOUND"


async def test_a_document_has_a_time_ordered_id_and_the_hash_of_its_content(shelf: Library) -> None:
    content = "Newts climb walls."
    kept = await shelf.good("GET", f"/v1/documents/{await document(shelf, content)}")
    assert uuid.UUID(kept["id"]).version == 7
    assert kept["content_hash"] == hashlib.sha256(content.encode()).hexdigest()
    assert (kept["status"], kept["error"], kept["searchable"]) == ("completed", None, True)
    assert kept["processed_at"] == kept["updated_at"]


async def test_failed_documents_are_listed_by_status_and_retried(shelf: Library) -> None:
    await shelf.collection("failing")
    broken = {"source": {"type": "file", "content": "AAEC", "filename": "one/broken file.bin"}, "title": "Broken"}
    (item,) = await shelf.ingest("failing", broken)
    page = await shelf.good("GET", "/v1/documents?collection=failing&status=failed")
    (failed,) = page["documents"]
    assert (page["total"], page["has_more"], failed["id"], failed["title"]) == (1, False, item["id"], "Broken")
    assert (failed["status"], failed["error"], failed["searchable"]) == ("failed", item["error"], False)
    assert (failed["size_bytes"], failed["processed_at"] >= failed["created_at"]) == (3, True)
    assert (await shelf.good("GET", "/v1/documents?collection=failing"))["total"] == 0
    assert (await shelf.good("GET", "/v1/documents?collection=failing&status=all"))["total"] == 1
    accepted = await shelf.good("POST", f"/v1/documents/{quote('one/broken file.bin', safe='')}/retry")
    assert (accepted["status"], accepted["documents_queued"]) == ("accepted", 1)
    job = await shelf.job(accepted["job_id"])
    assert [(one["id"], one["status"]) for one in job["documents"]] == [(item["id"], "failed")]
    reply = await shelf.call("PATCH", f"/v1/documents/{item['id']}", {"title": "New"})
    assert (reply.status, reply.code) == (409, "CONFLICT")
    deleted = await shelf.good("DELETE", f"/v1/documents/{item['id']}")
    assert (deleted["deleted"], deleted["chunks_removed"]) == (True, 0)
    assert (await shelf.call("POST", f"/v1/documents/{item['id']}/retry")).status == 404
    assert (await shelf.call("GET", f"/v1/documents/{item['id']}")).status == 404


async def test_an_empty_upload_is_retried_and_fails_as_empty(shelf: Library) -> None:
    await shelf.collection("empty files")
    (item,) = await shelf.ingest("empty files", {"source": {"type": "file", "content": "", "filename": "empty.md"}})
    accepted = await shelf.good("POST", f"/v1/documents/{item['id']}/retry")
    (again,) = (await shelf.job(accepted["job_id"]))["documents"]
    assert (again["status"], again["error"]) == ("failed", "The file is empty.")


async def test_a_failed_list_is_paged(shelf: Library) -> None:
    await shelf.collection("pages of failed")
    broken = [{"source": {"type": "file", "content": "AAEC", "filename": f"{n}.bin"}} for n in range(5)]
    await shelf.ingest("pages of failed", *broken, text("Fine.", title="Fine"))
    seen, after = [], ""
    while True:
        page = await shelf.good("GET", f"/v1/documents?collection=pages%20of%20failed&status=all&limit=2{after}")
        seen += [one["title"] for one in page["documents"]]
        if not page["has_more"]:
            break
        after = f"&after={page['next']}"
    assert (seen, page["total"]) == (["Fine", *(f"{n}.bin" for n in range(5))], 6)


async def test_a_completed_document_cannot_be_retried(shelf: Library) -> None:
    key = await document(shelf, "Herons stand still.")
    reply = await shelf.call("POST", f"/v1/documents/{key}/retry")
    assert (reply.status, reply.code) == (409, "CONFLICT")
    assert "completed" in reply.body["message"]


@pytest.mark.parametrize("status", ["", "broken", "Failed", "cancelled"])
async def test_an_unknown_status_is_400_with_the_allowed_ones(shelf: Library, status: str) -> None:
    reply = await shelf.call("GET", f"/v1/documents?status={status}")
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert "pending, processing, completed, failed or all" in reply.body["message"]
    assert reply.body["details"] == {"text": reply.body["message"]}


async def test_others_do_not_see_what_has_failed(shelf: Library) -> None:
    await shelf.collection("of alice", who="alice")
    broken = {"source": {"type": "file", "content": "AAEC", "filename": "alices secret.bin"}}
    (item,) = await shelf.ingest("of alice", broken, who="alice")
    assert (await shelf.good("GET", "/v1/documents?status=failed", who="alice"))["total"] == 1
    for status in ("failed", "all", "pending"):
        page = await shelf.good("GET", f"/v1/documents?status={status}", who="bob")
        assert "alices" not in str(page)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/retry")):
        for name in (item["id"], "alices%20secret.bin", "alices%20secre.bin"):
            reply = await shelf.call(method, f"/v1/documents/{name}{path}", who="bob")
            assert (reply.status, reply.code) == (404, "NOT_FOUND")
            assert "Did you mean" not in reply.body["message"]


@pytest.mark.parametrize("filename", ["hr/refunds.md", "100%.md", "a%2Fb.md", "größe 🌉.md", "a?b#c.md", "..", "a+b"])
async def test_a_document_is_named_by_its_file_name_in_a_url(shelf: Library, filename: str) -> None:
    await shelf.collection(f"files {filename}")
    source = {"type": "text", "content": f"Named {filename}.", "filename": filename}
    (item,) = await shelf.ingest(f"files {filename}", {"source": source})
    url = URL(f"{shelf.server.url}/v1/documents/{quote(filename, safe='').replace('.', '%2E')}", encoded=True)
    async with shelf.server.session.get(url) as response:
        assert (response.status, (await response.json())["id"]) == (200, item["id"])
    async with shelf.server.session.delete(url) as response:
        assert (await response.json())["deleted"]


async def test_a_title_of_several_documents_is_409_with_their_ids(shelf: Library) -> None:
    ids = [await document(shelf, f"Twin {n}.", title="Twins") for n in range(2)]
    reply = await shelf.call("GET", "/v1/documents/Twins")
    assert (reply.status, reply.code) == (409, "CONFLICT")
    assert all(one in reply.body["message"] for one in ids)
    assert (await shelf.call("GET", "/v1/documents/Triplets")).status == 404


async def test_a_changed_title_is_found_by_the_next_question(shelf: Library) -> None:
    key = await document(shelf, "They were towed out at dawn.", title="Barges")
    await shelf.good("PATCH", f"/v1/documents/{key}", {"title": "Quinquireme of Nineveh"})
    sources = (await shelf.ask("quinquireme Nineveh", collections=["notes"]))["sources"]
    assert (sources[0]["document_id"], sources[0]["title"]) == (key, "Quinquireme of Nineveh")
    assert sources[0]["scores"]["sparse"] > 0


async def test_manual_and_api_documents_and_their_connector(shelf: Library) -> None:
    await shelf.collection("connected")
    sent = [
        {"source": {"type": kind, "content": f"Sent as {kind}.", "connector_id": f"c-{kind}"}, "title": kind}
        for kind in ("manual", "api", "text")
    ]
    for item in await shelf.ingest("connected", *sent):
        kept = await shelf.good("GET", f"/v1/documents/{item['id']}")
        kind = kept["title"]
        source = {"type": kind, "filename": None, "url": None, "connector_id": f"c-{kind}"}
        assert (kept["source"], kept["content"]) == (source, f"Sent as {kind}.")
    page = await shelf.good("GET", "/v1/documents?connector_id=c-api")
    assert [one["title"] for one in page["documents"]] == ["api"]
    filters = {"metadata": {"source.connector_id": "c-manual"}}
    found = await shelf.ask("Sent as what?", filters=filters, collections=["connected"])
    assert [one["title"] for one in found["sources"]] == ["manual"]


async def test_sources_have_the_order_and_time_of_their_chunk(shelf: Library) -> None:
    await shelf.collection("chapters", chunking_strategy="fixed", chunk_size=40, chunk_overlap=0)
    words = " ".join(f"Chapter{number} of the saga." for number in range(60))
    (item,) = await shelf.ingest("chapters", text(words, title="Saga"))
    kept = await shelf.good("GET", f"/v1/documents/{item['id']}")
    found = await shelf.ask("saga", collections=["chapters"], settings={"top_k": 20})
    chunks = sorted(found["sources"], key=lambda one: one["start_char"])
    assert [one["chunk_index"] for one in chunks] == list(range(kept["chunk_count"]))
    assert all(kept["created_at"][:16] == one["created_at"][:16] for one in chunks)


async def test_a_source_of_a_pdf_has_its_page(shelf: Library) -> None:
    beetles = "Beetles live below the bark of old trees, where they dig long tunnels in the winter."
    marmots = "Marmots whistle at noon, when an eagle is near, and then they all run to their burrows."
    pdf = b64encode(pages_of(beetles, marmots)).decode()
    await shelf.collection("pages", chunking_strategy="sentence", chunk_size=32, chunk_overlap=0)
    await shelf.ingest("pages", {"source": {"type": "file", "content": pdf, "filename": "animals.pdf"}})
    found = await shelf.ask("When do marmots whistle?", collections=["pages"])
    assert {one["content_snippet"]: one["page"] for one in found["sources"]} == {beetles: 1, marmots: 2}


async def test_jobs_and_documents_are_pending_and_processing_until_they_are_completed(shelf: Library) -> None:
    """The page does not answer at first; the second job is for the same document, and waits for the first."""
    release = asyncio.Event()

    async def page(_request: web.BaseRequest) -> web.StreamResponse:
        await release.wait()
        return web.Response(text="Storks take their time.")

    async def status(job: str) -> str:
        return str((await shelf.good("GET", f"/v1/ingest/{job}"))["status"])

    async with HttpServer(page) as server:
        source = {"type": "url", "content": f"{server.url}/storks.txt"}
        body = {"collection_id": "notes", "documents": [{"source": source}]}
        first = (await shelf.good("POST", "/v1/ingest", body))["job_id"]
        async with asyncio.timeout(20):
            while await status(first) == "pending":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        (seen,) = (await shelf.good("GET", "/v1/documents?status=processing"))["documents"]
        assert (seen["source"]["url"], seen["content_hash"], seen["processed_at"]) == (source["content"], None, None)
        second = (await shelf.good("POST", "/v1/ingest", body))["job_id"]
        assert (await status(first), await status(second)) == ("processing", "pending")
        (waiting,) = (await shelf.good("GET", "/v1/documents?status=pending"))["documents"]
        assert waiting["id"] == seen["id"]
        release.set()
        assert ((await shelf.job(first))["status"], (await shelf.job(second))["status"]) == ("completed", "completed")
    assert (await shelf.good("GET", f"/v1/documents/{seen['id']}"))["status"] == "completed"


def pages_of(*texts: str) -> bytes:
    file = BytesIO()
    canvas = Canvas(file)
    for one in texts:
        canvas.drawString(50, 800, one)
        canvas.showPage()
    canvas.save()
    return file.getvalue()
