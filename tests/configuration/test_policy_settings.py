"""Settings of rate limits, caches, admission, diversity (MMR) and the guardrail, through the entrypoints."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

import redis
from anabranch.policies.cache import CachedEmbedder, MemoryCache
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import FakeEmbedder, Space
from anabranch.testing.fakes import ManualClock
from conftest import Server, ref
from support.collection_server import Library, library, text
from support.embedding_server import ModelServer, model_server
from support.environment import served
from support.settings_collections import TEXTS, embedding, kept, notes
from support.valkey_server import Valkey, running_valkey

__all__ = ["kept", "notes"]  # fixtures

pytestmark = [pytest.mark.xdist_group("policy-settings"), pytest.mark.usefixtures("isolated_home")]

QUESTION = "Where does the river carry the sand?"


@pytest.fixture
async def server(notes: Path) -> AsyncIterator[ModelServer]:
    async with model_server() as started:
        yield started


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


class Answer(NamedTuple):
    status: int
    end: dict[str, Any]
    headers: Any


# A caller through a proxy: without one it would be the operator on this machine, who has no limit.
PROXIED = {"Via": "1.1 proxy"}


def shelf(server: ModelServer, **variables: str) -> AbstractAsyncContextManager[Server]:
    """A server with three documents that has read these variables, open to everybody."""
    return served(**embedding(server), AUTH="none", **variables)


async def ask(server: Server, query: str = QUESTION, **more: Any) -> Answer:
    body = {"query": query, "threshold": 0, **more}
    async with server.session.post(f"{server.url}/rag/stream", json=body, headers=PROXIED) as response:
        raw = (await response.read()).decode()
        if response.status != 200:
            return Answer(response.status, json.loads(raw)["data"], response.headers)
        *_, last = raw.removesuffix("\n\n").split("\n\n")
        return Answer(200, json.loads(last.removeprefix("data: "))["data"], response.headers)


def embedded(server: ModelServer) -> int:
    """How often the question was embedded."""
    return sum(body["input"] == [QUESTION] for body in server.to("/v1/embeddings"))


# --- limits


@pytest.mark.parametrize(("limit", "statuses"), [("2", [200, 200, 429]), ("0", [200, 200, 200])])
async def test_rate_limit_limits_each_caller(server: ModelServer, limit: str, statuses: list[int]) -> None:
    async with shelf(server, RATE_LIMIT=limit) as started:
        answers = [await ask(started) for _ in statuses]
    assert [answer.status for answer in answers] == statuses
    assert ("RateLimit-Limit" in answers[0].headers) == (limit != "0")


async def test_rate_limit_window_is_how_long_requests_count(server: ModelServer) -> None:
    async with shelf(server, RATE_LIMIT="1", RATE_LIMIT_WINDOW="0.5") as started:
        assert (await ask(started)).status == 200
        refused = await ask(started)
        assert refused.status == 429
        assert refused.headers["Retry-After"] == "1"
        async with asyncio.timeout(10):
            while (await ask(started)).status != 200:  # noqa: ASYNC110  the window passes by itself
                await asyncio.sleep(0.05)


async def test_rate_limit_surfaces_are_the_surfaces_with_a_limit(space: Space, server: ModelServer) -> None:
    chat = {"prompt": "Why?", "model": ref(space, "scribe"), "data_sources": []}
    query = {"query": QUESTION}
    async with shelf(server, RATE_LIMIT="1", RATE_LIMIT_SURFACES="chat,query,mcp") as started:
        for path, body in (("/api/v1/chat", chat), ("/v1/query", query)):
            replies = [await started.post(path, body, headers=PROXIED) for _ in range(2)]
            assert [status for status, _, _ in replies] == [200, 429]
            assert replies[0][2]["RateLimit-Remaining"] == "0"
            assert int(replies[1][2]["Retry-After"]) > 0
        assert [(await ask(started)).status for _ in range(2)] == [200, 200]
        async with (
            httpx2.AsyncClient(headers=PROXIED, timeout=30) as web,
            Client(streamable_http_client(f"{started.url}/mcp", http_client=web)) as client,
        ):
            results = [await client.call_tool("search", {"query": QUESTION}) for _ in range(2)]
        assert [result.is_error for result in results] == [False, True]
        assert results[1].structured_content["error"] == "rate_limited"


@pytest.mark.parametrize("auth", ["auto", "none"])
async def test_the_operator_on_this_machine_has_no_rate_limit(space: Space, server: ModelServer, auth: str) -> None:
    chat = {"prompt": "Why?", "model": ref(space, "scribe"), "data_sources": []}
    requests = {"/api/v1/chat": chat, "/v1/query": {"query": QUESTION}, "/rag/stream": {"query": QUESTION}}
    given = {**embedding(server), "AUTH": auth, "RATE_LIMIT": "1", "RATE_LIMIT_SURFACES": "chat,query,mcp,rag_stream"}
    async with served(**given) as started:
        for path, body in requests.items():
            for _ in range(3):
                async with started.session.post(started.url + path, json=body) as response:
                    assert response.status == 200
                    assert not [name for name in response.headers if name.lower().startswith("ratelimit")]
        async with Client(f"{started.url}/mcp") as client:
            results = [await client.call_tool("search", {"query": QUESTION}) for _ in range(3)]
        assert not any(result.is_error for result in results)


@pytest.mark.parametrize(
    "headers",
    [
        {"Via": "1.1 proxy"},
        {"X-Forwarded-For": "203.0.113.9"},
        {"Origin": "https://evil.example"},
        {"Origin": "https://friend.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.example"},
    ],
    ids=str,
)
async def test_proxied_calls_and_other_sites_are_rate_limited(headers: dict[str, str]) -> None:
    chat = {"prompt": "Why?"}
    given = {"RATE_LIMIT": "1", "RATE_LIMIT_SURFACES": "chat", "CORS_ORIGINS": "*,https://friend.example"}
    for auth in ("auto", "none"):
        async with served(AUTH=auth, **given) as started:
            replies = [await started.post("/api/v1/chat", chat, headers=headers) for _ in range(2)]
        assert [status for status, _, _ in replies] == [200, 429]


# --- what spec 4 says of them


async def test_the_redis_key_of_a_rag_rate_limit_is_the_users(tmp_path: Path, models_dir: Path, valkey: Valkey) -> None:
    async with library(tmp_path / "data", models_dir, redis_url=valkey.url) as shelf:
        assert (await shelf.call("POST", "/rag/stream", {"query": QUESTION}, who="alice")).status == 200
    with redis.Redis.from_url(valkey.url) as kept_by_redis:
        assert kept_by_redis.keys("rl:*") == [b"rl:rag_stream:alice"]


async def test_the_prompt_version_is_in_the_answer_and_in_its_cache_key(server: ModelServer, valkey: Valkey) -> None:
    async with shelf(server, REDIS_URL=valkey.url) as started:
        assert (await ask(started)).end["prompt_version"] == "query-2"
    with redis.Redis.from_url(valkey.url) as kept_by_redis:
        [key] = kept_by_redis.keys("rag:qa:*")
    assert key.decode().endswith(":query-2")


async def test_each_text_is_embedded_once_per_model() -> None:
    cache = MemoryCache(1_000_000, ManualClock())
    models = [FakeEmbedder(), FakeEmbedder()]
    models[1].name = "another"
    one, two = (CachedEmbedder(model, where="", cache=cache, ttl_s=60, telemetry=SilentTelemetry()) for model in models)
    await one.embed(["b", "a"])
    await one.embed(["a", "b"])
    await two.embed(["a"])
    assert [model.calls for model in models] == [[("b", "a")], [("a",)]]


async def test_a_text_that_another_caller_has_asked_is_embedded_again(tmp_path: Path, models_dir: Path) -> None:
    """A response says how long its search took, which must not tell what others ask."""

    async def use_tool(shelf: Library, who: str) -> None:
        params = {"name": "search", "arguments": {"query": QUESTION}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        accept = {"Accept": "application/json, text/event-stream"}
        await shelf.good("POST", "/mcp", body, who=who, headers=accept)

    async with model_server() as server:
        given = {"embedding_url": server.url, "embedding_model": "fake-128", "answer_cache_ttl": 0}
        async with library(tmp_path, models_dir, **given) as shelf:
            await shelf.collection("sand")
            await shelf.ingest("sand", text("The river carries the sand to the sea."))
            times = []
            for who in ("alice", "bob", "alice"):
                await shelf.ask(QUESTION, who=who)
                times.append(embedded(server))
            for who in ("bob", "carol", "carol"):
                await use_tool(shelf, who)
                times.append(embedded(server))
    assert times == [1, 2, 2, 2, 3, 3]


# --- caches


@pytest.mark.parametrize(("ttl", "cached"), [("60", True), ("0", False)])
async def test_answer_cache_ttl(server: ModelServer, ttl: str, cached: bool) -> None:
    async with shelf(server, ANSWER_CACHE_TTL=ttl) as started:
        assert not (await ask(started)).end["cached"]
        assert (await ask(started)).end["cached"] == cached


@pytest.mark.parametrize(("ttl", "times"), [("60", 1), ("0", 2)])
async def test_embedding_cache_ttl(server: ModelServer, ttl: str, times: int) -> None:
    async with shelf(server, EMBEDDING_CACHE_TTL=ttl, ANSWER_CACHE_TTL="0") as started:
        await ask(started)
        await ask(started)
    assert embedded(server) == times


@pytest.mark.parametrize(("size", "cached"), [("1000000", True), ("1000", False)])
async def test_cache_bytes_limits_the_memory_cache(server: ModelServer, size: str, cached: bool) -> None:
    async with shelf(server, CACHE_BYTES=size) as started:
        await ask(started)
        assert (await ask(started)).end["cached"] == cached


async def test_redis_url_is_where_servers_share_answers_and_limits(server: ModelServer, valkey: Valkey) -> None:
    given = {"REDIS_URL": valkey.url, "RATE_LIMIT": "3"}
    async with shelf(server, **given) as one, shelf(server, **given) as other:
        assert not (await ask(one)).end["cached"]
        async with asyncio.timeout(10):  # it is written behind the answer
            while not (await ask(other)).end["cached"]:  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.01)
        while (await ask(one)).status == 200:
            pass
        assert (await ask(other)).status == 429


async def test_redis_timeout_bounds_the_wait_for_a_silent_redis(server: ModelServer, valkey: Valkey) -> None:
    async with shelf(server, REDIS_URL=valkey.url, REDIS_TIMEOUT="0.8") as started:
        await ask(started)
        valkey.freeze()
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await ask(started)).status == 200
        assert loop.time() - began >= 0.7
        began = loop.time()
        assert (await ask(started)).status == 200
        assert loop.time() - began < 0.7  # it is left alone now
        valkey.thaw()


# --- the gate


@pytest.mark.parametrize(
    ("running", "waiting", "statuses"),
    [
        ("1", "0", [200, 503, 503]),
        ("1", "1", [200, 200, 503]),
        ("2", "0", [200, 200, 503]),
        ("8", "", [200] * 3),
        ("1", "", [200, 503, 503]),
    ],
)
async def test_max_running_and_max_waiting(space: Space, running: str, waiting: str, statuses: list[int]) -> None:
    space.model("slow", reply="At last.", delay_s=0.5)
    body = {"prompt": "Why?", "model": ref(space, "slow"), "data_sources": []}
    async with served(MAX_RUNNING=running, MAX_WAITING=waiting) as started:
        replies = await asyncio.gather(*(started.post("/api/v1/chat", body) for _ in statuses))
        assert sorted(status for status, _, _ in replies) == statuses
        assert all(headers["Retry-After"] == "1" for status, _, headers in replies if status == 503)
        assert (await started.post("/api/v1/chat", {**body, "model": ref(space, "scribe")}))[0] == 200


@pytest.mark.parametrize(("running", "waiting", "refused"), [("1", "0", 1), ("2", "0", 0), ("1", "1", 0)])
async def test_caller_running_and_caller_waiting(space: Space, running: str, waiting: str, refused: int) -> None:
    """A caller on this machine has four times as much as others."""
    space.model("slow", reply="At last.", delay_s=0.5)
    body = {"prompt": "Why?", "model": ref(space, "slow"), "data_sources": []}
    async with served(CALLER_RUNNING=running, CALLER_WAITING=waiting) as started:
        replies = await asyncio.gather(*(started.post("/api/v1/chat", body) for _ in range(5)))
        assert sorted(status for status, _, _ in replies) == [200] * (5 - refused) + [429] * refused
        assert all(headers["Retry-After"] == "1" for status, _, headers in replies if status == 429)


# --- what is chosen, and whether it is enough


async def test_mmr_lambda_is_for_every_surface(server: ModelServer) -> None:
    """Two of the three are about rivers; with variety, the other one comes second."""

    async def second(started: Server) -> str:
        status, answer, _ = await started.post("/v1/query", {"query": "river delta", "settings": {"top_k": 2}})
        assert status == 200
        return str(answer["sources"][1]["content_snippet"])

    async with shelf(server) as plain:
        assert await second(plain) == TEXTS[0]
    async with shelf(server, MMR_LAMBDA="0") as varied:
        assert await second(varied) == TEXTS[1]


async def test_guard_threshold_is_for_every_surface(server: ModelServer) -> None:
    query = {"query": "Which quarterback scored?"}
    async with shelf(server) as plain, shelf(server, GUARD_THRESHOLD="1") as guarded:
        said = "What was found is not close enough to the question to answer from."
        assert (await plain.post("/v1/query", query))[1]["answer"] != said
        assert (await guarded.post("/v1/query", query))[1]["answer"] == said
        assert (await ask(guarded, threshold=None)).end["guardrail_reason"] == "weak"
