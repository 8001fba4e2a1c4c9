"""Documents on their way in: as text, as a file, from an address, in a form."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from anabranch.testing.http_server import HttpServer
from support.collection_server import Library, form, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-1")]

MAX_DOCUMENT = 20_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(
        tmp_path_factory.mktemp("data"), models_dir, max_document_bytes=MAX_DOCUMENT, max_request_bytes=10_000
    ) as opened:
        await opened.collection("notes")
        yield opened


def file(data: bytes, filename: str | None = None, **more: Any) -> dict[str, Any]:
    return {"source": {"type": "file", "content": base64.b64encode(data).decode(), "filename": filename}, **more}


async def test_an_accepted_job_tells_what_became_of_it(shelf: Library) -> None:
    body = {
        "collection_id": "notes",
        "documents": [text("Otters hold hands while they sleep.", title="Otters"), file(b"\x00\x01\x02", "x.bin")],
    }
    reply = await shelf.call("POST", "/v1/ingest", body)
    assert (reply.status, set(reply.body)) == (200, {"job_id", "status", "documents_queued"})
    assert (reply.body["status"], reply.body["documents_queued"]) == ("accepted", 2)
    job = await shelf.job(reply.body["job_id"])
    assert job["status"] == "completed"
    assert job["progress"] == {"total": 2, "processed": 2, "failed": 1}
    good, bad = job["documents"]
    assert (good["name"], good["status"], good["outcome"], good["chunk_count"]) == ("Otters", "completed", "added", 1)
    assert "error" not in good
    assert (bad["name"], bad["status"], bad["code"]) == ("x.bin", "failed", "UNPROCESSABLE")
    assert isinstance(bad["error"], str)
    assert bad["error"].endswith(".")
    assert job["created_at"] <= job["completed_at"]
    kept = await shelf.good("GET", f"/v1/documents/{good['id']}")
    assert (kept["title"], kept["content"]) == ("Otters", "Otters hold hands while they sleep.")
    lost = await shelf.good("GET", f"/v1/documents/{bad['id']}")
    assert (lost["status"], lost["error"], lost["searchable"]) == ("failed", bad["error"], False)


async def test_a_job_in_which_everything_fails_has_failed(shelf: Library) -> None:
    accepted = await shelf.good("POST", "/v1/ingest", {"collection_id": "notes", "documents": [file(b"")]})
    assert (await shelf.job(accepted["job_id"]))["status"] == "failed"


async def test_files_in_base64_with_and_without_line_breaks(shelf: Library) -> None:
    page = b"<html><head><title>Herons</title></head><body><p>Herons wait.</p></body></html>"
    wrapped = file(page, "herons.html")
    wrapped["source"]["content"] = base64.encodebytes(page).decode()
    (item,) = await shelf.ingest("notes", wrapped)
    kept = await shelf.good("GET", f"/v1/documents/{item['id']}")
    assert (kept["title"], kept["content"]) == ("Herons", "Herons wait.")
    assert kept["source"] == {"type": "file", "filename": "herons.html", "url": None, "connector_id": None}


async def test_the_same_again_changes_nothing_and_another_version_replaces(shelf: Library) -> None:
    (first,) = await shelf.ingest("notes", text("Version one of the plan.", id="plan"))
    (same,) = await shelf.ingest("notes", text("Version one of the plan.", id="plan"))
    (said,) = await shelf.ingest("notes", text("Version one of the plan.", id="plan", metadata={"state": "old"}))
    (new,) = await shelf.ingest("notes", text("Version two of the plan.", id="plan"))
    assert [one["outcome"] for one in (first, same, said, new)] == ["added", "unchanged", "updated", "replaced"]
    assert {one["id"] for one in (first, same, said, new)} == {first["id"]}
    kept = await shelf.good("GET", f"/v1/documents/{first['id']}")
    assert kept["content"] == "Version two of the plan."


async def test_an_address_is_fetched_through_the_guard(shelf: Library) -> None:
    async def page(request: web.BaseRequest) -> web.StreamResponse:
        found = request.path == "/storks.txt"
        return web.Response(text="Storks clap their beaks." if found else "Nothing here.", status=200 if found else 404)

    async with HttpServer(page) as server:
        addresses = [f"{server.url}/storks.txt", f"{server.url}/gone", "http://169.254.169.254/latest"]
        items = await shelf.ingest("notes", *({"source": {"type": "url", "content": one}} for one in addresses))
    assert [one["status"] for one in items] == ["completed", "failed", "failed"]
    assert "404" in items[1]["error"]
    kept = await shelf.good("GET", f"/v1/documents/{items[0]['id']}")
    assert (kept["content"], kept["source"]["url"]) == ("Storks clap their beaks.", addresses[0])


async def test_a_form_with_files_and_what_holds_for_all_of_them(shelf: Library) -> None:
    fields = {
        "metadata": json.dumps({"tags": ["birds"], "author": "Ada"}),
        "permissions": json.dumps({"visibility": "private"}),
        "settings": json.dumps({"chunking_strategy": "fixed", "chunk_size": 40, "chunk_overlap": 0}),
    }
    words = " ".join(f"word{number}" for number in range(200))
    data = form(
        ("größe.md", b"# Cranes\n\nCranes dance."), ("long.txt", words.encode()), collection_id="notes", **fields
    )
    accepted = await shelf.good("POST", "/v1/ingest", data=data)
    assert accepted["documents_queued"] == 2
    job = await shelf.job(accepted["job_id"])
    assert [one["name"] for one in job["documents"]] == ["größe.md", "long.txt"]
    assert job["documents"][1]["chunk_count"] > 5
    kept = await shelf.good("GET", f"/v1/documents/{job['documents'][0]['id']}")
    assert kept["metadata"] == {"tags": ["birds"], "author": "Ada"}
    assert kept["permissions"]["visibility"] == "private"
    assert kept["title"] == "Cranes"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: form(("a.txt", b"a")), "collection_id"),
        (lambda: form(collection_id="notes"), "no file"),
        (lambda: form(("a.txt", b"a"), collection_id="notes", metadata="[1]"), "metadata"),
        (lambda: form(("a.txt", b"a"), collection_id="notes", metadata="{"), "metadata"),
        (lambda: form(("a.txt", b"a"), collection_id="notes", permissions='{"visibility": 3}'), "permissions"),
        (lambda: form(("a.txt", b"a"), collection_id="notes", settings='{"chunk_size": 3}'), "settings"),
        (lambda: form(("n" * 501, b"a"), collection_id="notes"), "500 characters"),
    ],
    ids=["no collection", "no file", "metadata a list", "metadata broken", "permissions", "settings", "name"],
)
async def test_a_wrong_form_is_400(shelf: Library, made: Callable[[], Any], says: str) -> None:
    reply = await shelf.call("POST", "/v1/ingest", data=made())
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert says in reply.body["message"]


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=x", "Multipart/Form-Data;;;="])
@pytest.mark.parametrize("body", [b"", b"nonsense", b"--x\r\n\r\n\r\n--x--", b"--x\r\nContent-Disposition: y\r\n\r\nz"])
async def test_a_broken_form_is_400(shelf: Library, kind: str, body: bytes) -> None:
    reply = await shelf.call("POST", "/v1/ingest", data=body, headers={"Content-Type": kind})
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": [text("x")] * 1001}, "documents"),
        ({"documents": [{"source": {"type": "tape", "content": ""}}]}, "type"),
        ({"documents": [{"source": {"type": "text", "content": 5}}]}, "content"),
        ({"documents": [{"source": {"type": "file", "content": "not base64!"}}]}, "base64"),
        ({"documents": [{"source": {"type": "file", "content": "YQ"}}]}, "base64"),
        ({"documents": [{"source": {"type": "file", "content": "ü"}}]}, "base64"),
        ({"documents": [{"source": {"type": "url", "content": "file:///etc/passwd"}}]}, "http"),
        ({"documents": [text("x", metadata=[1])]}, "metadata"),
        ({"documents": [text("x", metadata={"x": "y" * 70_000})]}, "larger than"),
        ({"documents": [text("x", metadata={"x": [[]] * 99_999})]}, "documents[0].metadata is larger than 262,144"),
        ({"documents": [text("x", metadata={"x": [[]] * 6_000})] * 20}, "documents[16].metadata has more than 100,000"),
        ({"documents": [text("x", permissions={"visibility": "no"})]}, "visibility"),
        ({"documents": [text("x", title="")]}, "title"),
        ({"documents": [text("x", id="i" * 501)]}, "id"),
        ({"settings": {"chunk_size": 0}}, "chunk_size"),
        ({"collection_id": ""}, "collection_id"),
        ({"collection_id": None}, "collection_id"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_wrong_request_is_400_and_says_why(shelf: Library, change: dict[str, Any], says: str) -> None:
    reply = await shelf.call("POST", "/v1/ingest", {"collection_id": "notes", "documents": [text("x")], **change})
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert says in reply.body["message"]


async def test_deep_metadata_is_400_everywhere(shelf: Library) -> None:
    for depth in (50, 900):
        deep = json.loads("[" * depth + "]" * depth)
        reply = await shelf.call(
            "POST", "/v1/ingest", {"collection_id": "notes", "documents": [text("x", metadata={"a": deep})]}
        )
        assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    body = b'{"collection_id": "notes", "documents": ' + b"[" * 100_000
    assert (await shelf.call("POST", "/v1/ingest", data=body)).status == 400


async def test_documents_may_be_larger_than_other_requests(shelf: Library) -> None:
    """The limit of requests is 10,000 bytes here, that of a document 20,000."""
    words = " ".join(f"word{number % 500}" for number in range(10_000)).encode()[:MAX_DOCUMENT]
    (item,) = await shelf.ingest("notes", file(words, "large.txt"))
    assert item["status"] == "completed"
    one_more = {"collection_id": "notes", "documents": [file(words + b" more", "larger.txt")]}
    as_form = form(("larger.txt", words + b" more"), collection_id="notes")
    for reply in (
        await shelf.call("POST", "/v1/ingest", one_more),
        await shelf.call("POST", "/v1/ingest", data=as_form),
    ):
        assert (reply.status, reply.code) == (413, "REQUEST_TOO_LARGE")
        assert "20,000 bytes" in reply.body["message"]
    large = {"query": "x" * 10_001}
    assert (await shelf.call("POST", "/v1/query", large)).status == 413


@pytest.mark.parametrize("as_form", [False, True])
async def test_a_request_beyond_all_measure_is_413(shelf: Library, as_form: bool) -> None:
    beyond = b"x" * (int(MAX_DOCUMENT * 1.4) + 1024 * 1024 + 1)
    data = form(("x.txt", beyond), collection_id="notes") if as_form else BytesIO(beyond)
    reply = await shelf.call("POST", "/v1/ingest", data=data)
    assert (reply.status, reply.code) == (413, "REQUEST_TOO_LARGE")


async def test_a_job_can_be_cancelled(shelf: Library) -> None:
    await shelf.collection("cancelled")
    documents = [text(f"Note {number} about the harbour. " * 60, id=str(number)) for number in range(300)]
    accepted = await shelf.good("POST", "/v1/ingest", {"collection_id": "cancelled", "documents": documents})
    await shelf.good("DELETE", f"/v1/ingest/{accepted['job_id']}")
    job = await shelf.job(accepted["job_id"])
    assert job["status"] == "cancelled"
    kept = (await shelf.good("GET", "/v1/collections/cancelled"))["document_count"]
    assert kept == sum(one["status"] == "completed" for one in job["documents"]) < 300
    again = await shelf.good("DELETE", f"/v1/ingest/{accepted['job_id']}")
    assert again["status"] == "cancelled"


async def test_an_unknown_job_is_404(shelf: Library) -> None:
    for method in ("GET", "DELETE"):
        reply = await shelf.call(method, "/v1/ingest/nothing")
        assert (reply.status, reply.code) == (404, "NOT_FOUND")
