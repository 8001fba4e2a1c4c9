"""What holds for the whole surface: its errors, who may call from a web page, and that no request breaks it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-2")]

NAMED = "https://app.example.com"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir, cors_origins=("*", NAMED)) as opened:
        await opened.collection("notes")
        await opened.ingest("notes", text("Quinces are picked in October."))
        yield opened


async def test_other_addresses_and_methods_answer_in_the_same_form(shelf: Library) -> None:
    reply = await shelf.call("GET", "/v1/nowhere")
    assert (reply.status, reply.code, set(reply.body)) == (404, "NOT_FOUND", {"error", "code", "message", "details"})
    reply = await shelf.call("PUT", "/v1/documents/x", {})
    assert (reply.status, reply.code) == (405, "METHOD_NOT_ALLOWED")
    assert {"GET", "PATCH", "DELETE"} <= set(reply.headers["Allow"].split(", "))
    assert (await shelf.call("HEAD", "/v1/collections")).status == 200


@pytest.mark.parametrize("path", ["/v1/collections", "/v1/ingest", "/v1/query", "/v1/feedback", "/v1/documents/x"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"query": "\xff", "title": "\xff"}',
        b'{"query": NaN}',
        b"[" * 200_000,
        b'"\\ud800"',
    ],
    ids=lambda body: repr(body[:12]),
)
async def test_what_is_not_json_is_400(shelf: Library, path: str, body: bytes) -> None:
    method = "PATCH" if path.startswith("/v1/documents") else "POST"
    reply = await shelf.call(method, path, data=body)
    assert (reply.status, reply.code, reply.body["error"]) == (400, "VALIDATION_ERROR", "validation_error")


async def test_mangled_requests_never_break_the_server(shelf: Library) -> None:
    chance = random.Random(7)
    known = json.loads((Path(__file__).parent / "requests.json").read_text())
    for _ in range(400):
        one = chance.choice(known)
        body = _mangled(one["body"], chance)
        reply = await shelf.call(one["method"], one["path"], body)
        assert reply.status in (200, 201, 400, 404, 409), (one, body, reply)
        assert "error" not in reply.body or reply.body["code"].lower() == reply.body["error"]
    (item,) = await shelf.ingest("notes", text("Medlars are picked in November."))
    assert item["status"] == "completed", "and the indexer lives, too"


def _mangled(value: Any, chance: random.Random) -> Any:
    """The value with something in it replaced, left out, or doubled."""
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        1.5,
        10**30,
        1e300,
        "",
        "\x00",
        "𐀀" * 300,
        [],
        {},
        [[]],
        {"": None},
        "2024-13-01",
    ]
    if chance.random() < 0.15:
        return chance.choice(odd)
    if isinstance(value, dict):
        kept = {name: _mangled(inner, chance) for name, inner in value.items() if chance.random() > 0.1}
        return {**kept, chance.choice(["x", "\x00", "é"]): chance.choice(odd)} if chance.random() < 0.2 else kept
    if isinstance(value, list):
        return [_mangled(inner, chance) for inner in value for _ in range(chance.choice([1, 1, 1, 0, 2]))]
    return value


@pytest.mark.parametrize(
    ("path", "origin", "allowed"),
    [
        ("/api/v1/chat", "https://any.example", "*"),
        ("/v1/query", "https://any.example", None),
        ("/v1/query", NAMED, NAMED),
        ("/v1/documents/x", NAMED, NAMED),
        ("/api/v1/endpoints/notes/query", "https://any.example", None),
    ],
)
async def test_pages_of_other_origins_read_only_what_they_may(
    shelf: Library, path: str, origin: str, allowed: str | None
) -> None:
    method = "PATCH" if "documents" in path else "POST"
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization",
    }
    reply = await shelf.call("OPTIONS", path, headers=asked)
    assert reply.headers.get("Access-Control-Allow-Origin") == allowed
    assert (reply.status == 200) == (allowed is not None)
    reply = await shelf.call(method, path, {}, who="alice", headers={"Origin": origin})
    assert reply.headers.get("Access-Control-Allow-Origin") == allowed


async def test_concurrent_queries_are_all_answered_and_logged(shelf: Library) -> None:
    answers = await asyncio.gather(*(shelf.ask("When are quinces picked?", who="bob") for _ in range(40)))
    assert {answer["answer"].partition(" [")[0] for answer in answers} == {"Quinces are picked in October."}
    assert len({answer["query_id"] for answer in answers}) == 40
    stats = await shelf.good("GET", "/v1/collections/notes/stats", who="bob")
    assert stats["query_count_30d"] >= 40


async def test_the_correlation_id_of_a_query_is_echoed(shelf: Library) -> None:
    headers = {"X-Correlation-ID": "abc-123", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    reply = await shelf.call("POST", "/v1/query", {"query": "When are quinces picked?"}, headers=headers)
    assert reply.headers["X-Correlation-ID"] == "abc-123"
