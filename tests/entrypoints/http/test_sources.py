"""/v1/sources: what questions can go to is listed with its health, tested, added and removed."""

import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from anabranch.app.anabranch import Anabranch
from anabranch.app.event_streams import Timing
from anabranch.configuration.added_sources import MAX_BYTES, AddedSourcesFile
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Endpoint
from anabranch.knowledge.durable_files import replace_file
from anabranch.testing import Document, Failure, Space
from conftest import Server, running
from support.collection_server import Library, library, text
from support.mcp_search_server import search_server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("sources")]

TOKEN, KEY = "space-token-0123456789", "model-key-0123456789"
MCP_TOKEN = "mcp-token-0123456789"
SECRETS = (TOKEN, KEY, MCP_TOKEN)
QUESTION = "How long do refunds for printed books take?"
REFUNDS = Document(content="Refunds for printed books take 14 days.", title="Refund notes", score=0.9)


class Shop(Library):
    """A server with a collection and configured sources, and upstreams to add. `seen` is every reply."""

    space: Space
    mcp_url: str

    def __init__(self, opened: Library, space: Space, mcp_url: str) -> None:
        super().__init__(opened.server, opened.folder, opened.secrets)
        self.space = space
        self.mcp_url = mcp_url
        self.seen: list[str] = []

    async def call(self, method: str, path: str, body: Any = None, *, who: str | None = None, **options: Any) -> Any:
        reply = await super().call(method, path, body, who=who, **options)
        self.seen.append(f"{json.dumps(reply.body)} {dict(reply.headers)}")
        return reply

    async def listed(self, who: str | None = "root") -> dict[str, Any]:
        found = await self.good("GET", "/v1/sources", who=who)
        return {one["name"]: one for one in found["sources"]}

    def wiki(self, name: str, slug: str = "wiki", **more: Any) -> dict[str, Any]:
        return {"name": name, "kind": "space", "url": self.space.url, "slug": slug, "token": TOKEN, **more}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Shop]:
    folder = tmp_path_factory.mktemp("data")
    async with Space(everything=True) as space, search_server("Refunds take 21 days.", MCP_TOKEN) as mcp_url:
        space.source("wiki", documents=[REFUNDS], token=TOKEN)
        space.model("writer", reply="I am ready.", token=KEY, form="openai")
        settings: dict[str, Any] = {
            "sources": {"rivers": Endpoint(slug="docs", url=f"{space.url}/", operator=True, token="file-token-0123")},
            "models": {"scribe": Endpoint(slug="scribe", url=space.url, operator=True)},
            "mcp_servers": {"off": McpServer(name="off", url="http://127.0.0.1:9/mcp", enabled=False)},
            "retrieval_timeout": 1.0,
            "endpoint_allowlist": (),
            "rate_limit": 0,
        }
        async with library(folder, models_dir, **settings) as opened:
            await opened.collection("handbook")
            await opened.ingest("handbook", text("Refunds for printed books take 30 days.", title="Handbook"))
            yield Shop(opened, space, mcp_url)


async def test_an_operator_sees_every_source_with_its_health(shop: Shop) -> None:
    found = await shop.good("GET", "/v1/sources", who="root")
    assert (found["can_change"], found["per_process"], found["note"]) == (True, False, None)
    by_name = {one["name"]: one for one in found["sources"]}
    assert list(by_name) == ["collections", "handbook", "rivers", "off", "scribe", "extractive"]
    kinds = [one["kind"] for one in found["sources"]]
    assert kinds == ["collection", "collection", "space", "mcp", "model", "model"]
    rivers = by_name["rivers"]
    assert rivers["origin"] == shop.space.url
    assert (rivers["configured"], rivers["has_secret"], rivers["removable"]) == ("file", True, False)
    assert (rivers["health"], rivers["circuit"], rivers["history"]) == ("unknown", "closed", [])
    assert by_name["off"]["health"] == "disabled"
    assert by_name["handbook"]["documents"] == 1
    assert (by_name["scribe"]["default"], by_name["scribe"]["model_kind"]) == (True, "space")
    assert by_name["extractive"]["health"] == "ok"
    assert not (await shop.good("GET", "/v1/sources"))["can_change"]


async def test_other_callers_see_only_what_they_may_use(shop: Shop) -> None:
    assert list(await shop.listed("bob")) == ["collections", "handbook", "extractive"]


async def test_other_callers_learn_whether_a_source_works_and_not_how_much_others_ask(shop: Shop) -> None:
    made = {"user": "bob", "grants": ["source:rivers", "source:torn", "mcp:off", "model:scribe"]}
    shop.secrets["granted"] = (await shop.good("POST", "/v1/keys", made, who="root"))["key"]
    await shop.good("POST", "/v1/sources", shop.wiki("torn", Failure.STATUS_503), who="root")
    quiet = await shop.listed("granted")
    await shop.ask(QUESTION)
    await shop.call("POST", "/v1/query", {"query": QUESTION, "sources": ["torn"]})
    seen, all_seen = await shop.listed("granted"), await shop.listed()
    assert list(seen) == ["collections", "handbook", "rivers", "torn", "off", "scribe", "extractive"]
    assert {name: one for name, one in seen.items() if name != "torn"} == {
        name: one for name, one in quiet.items() if name != "torn"
    }, "nothing of other callers' questions that succeed is seen"
    health = {name: (one["health"], one["health_text"]) for name, one in seen.items()}
    assert health["collections"] == ("ok", "No recent call has failed.")
    assert health["torn"] == ("failing", "Recent calls have failed.")
    assert health["off"][0] == "disabled"
    counted = ("last_error", "last_error_at", "last_used_at", "calls", "errors", "history", "origin")
    assert {one[field] for one in seen.values() for field in counted} == {None}
    assert all_seen["collections"]["calls"] >= 1
    assert (all_seen["torn"]["calls"], all_seen["torn"]["health_text"]) == (1, "The last call failed.")
    await shop.good("DELETE", "/v1/sources/torn", who="root")


async def test_the_title_of_a_collection_has_no_marks_that_turn_the_text_around(shop: Shop) -> None:
    described = {"description": "Our \u202ebooks\u2066 are\u200b here"}
    await shop.good("PATCH", "/v1/collections/handbook", described)
    assert (await shop.listed("bob"))["handbook"]["title"] == "Our books are here"
    await shop.good("PATCH", "/v1/collections/handbook", {"description": ""})


async def test_a_source_is_tested_added_used_and_removed(shop: Shop) -> None:
    tested = await shop.good("POST", "/v1/sources/test", {**shop.wiki("wiki"), "question": QUESTION}, who="root")
    assert (tested["ok"], tested["status"], tested["error"]) == (True, "success", None)
    assert tested["passages"] == [{"title": "Refund notes", "text": REFUNDS.content, "score": 0.9}]
    assert "wiki" not in await shop.listed()
    added = await shop.good("POST", "/v1/sources", shop.wiki("wiki"), who="root")
    assert (added["name"], added["configured"], added["removable"], added["has_secret"]) == ("wiki", "page", True, True)
    answer = await shop.ask(QUESTION, sources=["wiki"])
    assert [one["content_snippet"] for one in answer["sources"]] == [REFUNDS.content]
    assert "wiki" in {one["source"] for one in (await shop.ask(QUESTION, sources="all"))["source_status"]}
    wiki = (await shop.listed())["wiki"]
    assert (wiki["calls"], wiki["errors"], wiki["health"]) == (2, 0, "ok")
    assert sum(minute["calls"] for minute in wiki["history"]) == 2
    assert wiki["last_used_at"] is not None
    for name in (".", "..", "My wiki", "x" * 65):
        refused = await shop.call("POST", "/v1/sources", shop.wiki(name), who="root")
        assert (refused.status, refused.code) == (400, "VALIDATION_ERROR")
        assert refused.body["message"] == "The request is not valid: name takes 1 to 64 letters, digits, _ . or -."
    again = await shop.call("POST", "/v1/sources", shop.wiki("wiki"), who="root")
    assert (again.status, again.code) == (409, "CONFLICT")
    assert (await shop.good("POST", "/v1/sources/wiki/test", {}, who="root"))["ok"]
    assert await shop.good("DELETE", "/v1/sources/wiki", who="root") == {"name": "wiki", "deleted": True}
    assert "wiki" not in await shop.listed()
    assert (await shop.call("POST", "/v1/query", {"query": QUESTION, "sources": ["wiki"]})).status == 400


async def test_the_history_counts_errors_and_repeats_the_last_one(shop: Shop) -> None:
    await shop.good("POST", "/v1/sources", shop.wiki("broken", Failure.STATUS_500), who="root")
    await shop.call("POST", "/v1/query", {"query": QUESTION, "sources": ["broken"]})
    broken = (await shop.listed())["broken"]
    assert (broken["calls"], broken["errors"], broken["health"]) == (1, 1, "failing")
    assert "500" in broken["last_error"]
    assert broken["history"][0]["errors"] == 1
    await shop.good("DELETE", "/v1/sources/broken", who="root")


async def test_an_address_that_a_caller_names_is_neither_opened_by_an_added_source_nor_in_its_history(
    shop: Shop,
) -> None:
    before = await shop.good("POST", "/v1/sources", shop.wiki("private"), who="root")
    chat = {"prompt": QUESTION, "data_sources": [{"url": shop.space.url, "slug": "wiki"}], "retrieval_only": True}
    [refused] = (await shop.good("POST", "/api/v1/chat", chat))["retrieval_info"]
    assert (refused["status"], refused["documents_retrieved"]) == ("error", 0)
    assert (await shop.listed())["private"] == before
    await shop.good("DELETE", "/v1/sources/private", who="root")


@pytest.mark.parametrize(
    ("slug", "status", "said"),
    [
        (Failure.STATUS_500, "error", "500"),
        (Failure.STATUS_403, "access_denied", ""),
        (Failure.HTML, "error", "HTML"),
        (Failure.HANG, "timeout", "1 second"),
        (Failure.RESET, "error", ""),
    ],
)
async def test_the_test_of_a_source_that_fails_says_why(shop: Shop, slug: str, status: str, said: str) -> None:
    tested = await shop.good("POST", "/v1/sources/test", shop.wiki("failing", slug), who="root")
    assert (tested["ok"], tested["status"], tested["passages"]) == (False, status, [])
    assert said in tested["error"]
    assert "<html" not in tested["error"]


async def test_a_model_is_tested_added_used_by_name_and_removed(shop: Shop) -> None:
    model = {"name": "writer", "kind": "model", "url": shop.space.url, "slug": "writer", "token": KEY}
    tested = await shop.good("POST", "/v1/sources/test", model, who="root")
    assert (tested["ok"], tested["text"]) == (True, "I am ready.")
    wrong = await shop.good("POST", "/v1/sources/test", {**model, "token": "another-key-0123"}, who="root")
    assert (wrong["ok"], wrong["text"]) == (False, None)
    assert "401" in wrong["error"]
    late = await shop.good("POST", "/v1/sources/test", {**model, "slug": Failure.STATUS_503}, who="root")
    assert (late["ok"], late["status"]) == (False, "error")
    added = await shop.good("POST", "/v1/sources", model, who="root")
    assert (added["kind"], added["model_kind"], added["default"]) == ("model", "openai", False)
    chat = {"prompt": QUESTION, "data_sources": [], "model": {"url": "", "slug": "writer"}}
    answer = await shop.good("POST", "/api/v1/chat", chat)
    assert "I am ready." in answer["response"]
    assert (await shop.listed())["writer"]["calls"] == 1
    await shop.good("DELETE", "/v1/sources/writer", who="root")
    assert (await shop.call("POST", "/api/v1/chat", chat)).status == 422


async def test_an_mcp_server_is_tested_added_used_and_removed(shop: Shop) -> None:
    notes = {"name": "notes", "kind": "mcp", "url": shop.mcp_url, "token": MCP_TOKEN, "description": "Our notes"}
    tested = await shop.good("POST", "/v1/sources/test", notes, who="root")
    assert (tested["ok"], tested["tool"]) == (True, "search_notes"), tested
    assert tested["passages"][0]["text"] == "Refunds take 21 days."
    refused = await shop.good("POST", "/v1/sources/test", {**notes, "token": "another-token-01"}, who="root")
    assert not refused["ok"]
    await shop.good("POST", "/v1/sources", notes, who="root")
    assert "21 days" in str((await shop.ask("How long do refunds take?", sources=["notes"]))["sources"])
    listed = (await shop.listed())["notes"]
    assert (listed["title"], listed["tool"], listed["health"]) == ("Our notes", "search_notes", "ok")
    assert listed["origin"] == shop.mcp_url.removesuffix("/mcp")
    await shop.good("DELETE", "/v1/sources/notes", who="root")
    assert "notes" not in await shop.listed()


async def test_a_command_is_refused(shop: Shop) -> None:
    body = {"name": "tool", "kind": "mcp", "command": "python", "url": shop.mcp_url}
    for path in ("/v1/sources", "/v1/sources/test"):
        reply = await shop.call("POST", path, body, who="root")
        assert reply.status == 400
        assert "only from anabranch.yaml" in reply.body["message"]


async def test_only_an_operator_with_a_key_changes_sources(shop: Shop) -> None:
    calls = [
        ("POST", "/v1/sources", shop.wiki("mine")),
        ("POST", "/v1/sources/test", shop.wiki("mine")),
        ("POST", "/v1/sources/rivers/test", {}),
        ("DELETE", "/v1/sources/rivers", None),
        ("GET", "/v1/keys", None),
        ("POST", "/v1/keys", {"user": "eve"}),
        ("DELETE", "/v1/keys/00000000", None),
    ]
    for method, path, body in calls:
        without = await shop.call(method, path, body)
        assert without.status == 401, (path, without)
        assert "anabranch keys create --user NAME --operator" in without.body["message"]
        other = await shop.call(method, path, body, who="alice")
        assert other.status == 403, (path, other)
    assert "mine" not in await shop.listed()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "x", "url": "ftp://example.com"}, "http://"),
        ({"name": "x", "url": "http://ann:pass-word-1234@example.com"}, "http://"),
        ({"name": "x", "slug": None}, "slug"),
        ({"name": "x", "token": "${HOME}"}, "variables"),
        ({"name": "x", "headers": {"A": "b"}}, "headers does not go with the kind space"),
        ({"name": "x", "kind": "mcp", "slug": None}, "Send either"),
        ({"name": "x", "unknown": 1}, "unknown"),
    ],
)
async def test_what_anabranch_yaml_would_refuse_is_refused(shop: Shop, body: dict[str, Any], said: str) -> None:
    given = {**shop.wiki("x"), **body}
    if given["kind"] == "mcp":
        given["headers"] = {"authorization": "Basic 0123456789"}
    reply = await shop.call("POST", "/v1/sources", {k: v for k, v in given.items() if v is not None}, who="root")
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR"), reply
    assert said in reply.body["message"]
    assert "pass-word-1234" not in reply.body["message"]


async def test_names_in_use_and_names_of_the_file_are_refused(shop: Shop) -> None:
    for name in ("rivers", "scribe", "off", "extractive", "collections", "default"):
        reply = await shop.call("POST", "/v1/sources", shop.wiki(name), who="root")
        assert reply.status == 409, name
    removed = await shop.call("DELETE", "/v1/sources/rivers", who="root")
    assert removed.status == 409
    assert "anabranch.yaml" in removed.body["message"]
    assert (await shop.call("DELETE", "/v1/sources/nobody", who="root")).status == 404


@pytest.mark.sqlite
async def test_no_secret_is_in_any_reply_and_only_the_server_reads_the_file(shop: Shop) -> None:
    await shop.good("POST", "/v1/sources", shop.wiki("kept"), who="root")
    file = shop.folder / "sources.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert TOKEN in file.read_text()
    await shop.listed()
    await shop.good("DELETE", "/v1/sources/kept", who="root")
    assert not any(secret in reply for secret in (*SECRETS, "file-token-0123") for reply in shop.seen)


@pytest_asyncio.fixture(loop_scope="module")
async def first(tmp_path: Path, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path, models_dir, rate_limit=0) as opened:
        yield opened


async def test_other_workers_and_later_starts_have_added_sources_and_a_reload_keeps_them(
    first: Library, shop: Shop, models_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = first.server.service._settings
    if settings.database_url is not None:  # another node, with a data folder of its own
        settings = msgspec.structs.replace(settings, data_dir=str(first.folder / "second"))
    async with running(settings, timing=Timing(sources_every_s=0.01)) as server:
        second = Shop(Library(server, first.folder, first.secrets), shop.space, shop.mcp_url)
        await first.good("POST", "/v1/sources", shop.wiki("wiki"), who="root")
        await shop.space.wait_for(lambda: "wiki" in _catalog(server).sources)
        assert (await second.listed())["wiki"]["configured"] == "page"
        # Added there, it is added to what this worker has.
        notes = {"name": "notes", "kind": "mcp", "url": shop.mcp_url, "token": MCP_TOKEN}
        await second.good("POST", "/v1/sources", notes, who="root")
        reload = server.service._anabranch
        assert reload is not None
        await reload.reconfigure({"filed": McpServer(name="filed", url="http://127.0.0.1:9/mcp")}, settings.aggregation)
        assert {"wiki", "notes", "filed"} <= set(await second.listed())
        # The file has this name now, too.
        await reload.reconfigure({"notes": McpServer(name="notes", url="http://127.0.0.1:9/mcp")}, settings.aggregation)
        both = [
            one for one in (await second.good("GET", "/v1/sources", who="root"))["sources"] if one["name"] == "notes"
        ]
        assert [(one["configured"], one["removable"]) for one in both] == [("file", False), ("page", True)]
        assert (both[1]["health"], "anabranch.yaml" in both[1]["health_text"]) == ("disabled", True)
    async with running(settings) as server:
        later = Shop(Library(server, first.folder, first.secrets), shop.space, shop.mcp_url)
        assert {"wiki", "notes"} <= set(await later.listed())
        assert "14 days" in (await later.ask(QUESTION, sources=["wiki"]))["answer"]
    async with Anabranch.open(settings=settings) as opened:
        assert "14 days" in (await opened.ask(QUESTION, sources=["wiki"])).text
        assert "21 days" in str((await opened.aggregate("How long do refunds take?")).results)
    shown = capfd.readouterr()
    assert not any(secret in shown.out + shown.err for secret in SECRETS)


async def test_two_sources_of_one_slug_show_their_names_and_never_their_addresses(shop: Shop) -> None:
    shop.space.source("hooks/secret-path/wiki", documents=[REFUNDS], token=TOKEN)
    hooked = shop.wiki("hooked", url=f"{shop.space.url}/hooks/secret-path")
    for source in (shop.wiki("plain"), hooked):
        await shop.good("POST", "/v1/sources", source, who="root")
    try:
        answer = await shop.ask(QUESTION, sources=["plain", "hooked"], explain=True)
        assert [one["source"] for one in answer["source_status"]] == ["plain/wiki", "hooked/wiki"]
        assert "secret-path" not in json.dumps(answer)
        assert shop.space.url.partition("//")[2] not in json.dumps(answer)
    finally:
        for name in ("plain", "hooked"):
            await shop.good("DELETE", f"/v1/sources/{name}", who="root")


async def test_a_question_to_all_sources_has_no_limit_of_sources(shop: Shop) -> None:
    names = [f"many{number}" for number in range(11)]
    for name in names:
        await shop.good("POST", "/v1/sources", shop.wiki(name), who="root")
    try:
        answer = await shop.ask(QUESTION, sources="all")
        assert len(answer["source_status"]) == 13
    finally:
        for name in names:
            await shop.good("DELETE", f"/v1/sources/{name}", who="root")


@pytest.mark.sqlite
async def test_what_the_file_of_added_sources_cannot_hold_is_refused(shop: Shop) -> None:
    large = shop.wiki("large", tenant="x" * 500) | {"kind": "mcp", "arguments": {"a": "x" * 70_000}}
    for path in ("/v1/sources", "/v1/sources/test"):
        assert (await shop.call("POST", path, large, who="root")).status == 413
    await shop.good("POST", "/v1/sources", shop.wiki("kept"), who="root")
    file = AddedSourcesFile(shop.folder, replace_file)
    entry = {"url": "http://a.example/mcp", "arguments": {"a": "x" * MAX_BYTES}}
    with pytest.raises(ConfigurationError, match="remove another entry"):
        file.change(lambda blocks: blocks.adding("mcpServers", "fat", entry))
    assert file.read().names == ("kept",)
    await shop.good("DELETE", "/v1/sources/kept", who="root")


@pytest.mark.sqlite
async def test_a_pipe_in_place_of_the_file_stops_nothing(tmp_path: Path, models_dir: Path) -> None:
    os.mkfifo(tmp_path / "sources.json")
    async with library(tmp_path, models_dir, rate_limit=0) as opened:
        assert "sources.json" in (await opened.good("GET", "/v1/sources", who="root"))["note"]


@pytest.mark.sqlite
async def test_a_damaged_file_stops_nothing_and_is_reported(tmp_path: Path, models_dir: Path) -> None:
    (tmp_path / "sources.json").write_text('{"sources": {"wiki": {"token": "secret-in-a-damaged-file"')
    async with library(tmp_path, models_dir, rate_limit=0) as opened:
        found = await opened.good("GET", "/v1/sources", who="root")
        assert "sources.json" in found["note"]
        assert "secret-in" not in found["note"]
        assert (await opened.good("GET", "/v1/sources", who="bob"))["note"] is None
        reply = await opened.call(
            "POST", "/v1/sources", {"name": "x", "kind": "space", "url": "http://a.example", "slug": "b"}, who="root"
        )
        assert reply.status == 409
        assert "secret-in" in (tmp_path / "sources.json").read_text()


def _catalog(server: Server) -> Any:
    anabranch = server.service._anabranch
    assert anabranch is not None
    return anabranch.catalog
