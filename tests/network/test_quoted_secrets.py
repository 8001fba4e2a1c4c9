"""Keys and tokens that upstreams quote in their replies reach no other reader and not the log."""

import asyncio
import json
import sys
from base64 import b64encode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Emit
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Answer, Context, Endpoint, Question
from anabranch.network.redaction import REMOVED
from anabranch.testing import model
from anabranch.testing.http_server import HttpServer
from conftest import LOCAL, Server
from support.collection_server import Library, library, text

Serve = Callable[..., AbstractAsyncContextManager[Server]]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("quoted-secrets")]
KEY = 'sk-"proj"/7f3a+91bc55de08aa=='
TOKEN, TRANSACTION, BEARER = "sat-7f3a91bc55de08aa", "tx-91bc/55de08aa7f3a", "ab_55de08aa7f3a91bc"
QUESTION = "How long do refunds take?"


def written(key: str) -> tuple[str, ...]:
    """The ways in which an upstream may write a key."""
    basic = f"user:{key}".encode()
    return (
        key,
        f"Bearer {key}",
        f"https://upstream.example/?key={quote(key, safe='')}&again={quote(key)}",
        json.dumps({"Authorization": key}),
        f"Basic {b64encode(basic).decode()} {urlsafe_b64encode(basic).decode()} {b64encode(key.encode()).decode()}",
    )


def leaks(key: str, said: str) -> bool:
    """Whether a reader can find the key: as it is, in JSON, in a URL or in base64."""
    inside = {b64encode(b"x" * at + key.encode()).decode()[4:-4] for at in range(3)}
    forms = {key, json.dumps(key)[1:-1], json.dumps(json.dumps(key)[1:-1])[1:-1], quote(key, safe=""), *inside}
    return any(form in said for form in forms)


class Parrot(HttpServer):
    """An upstream of every kind that says what it was sent, and whatever else it is told to. What it does goes by the
    slug that is asked: `refuses` (and anything else), `stumbles`, `ends`, `tells`."""

    def __init__(self) -> None:
        self.adds = ""
        super().__init__(self._respond)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        sent = msgspec.json.decode(await request.content.read())
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        said = " ".join((*written(key), str(sent.get("transaction_token")), self.adds))
        slug = sent.get("model") or request.path.split("/")[-2]
        match slug:
            case "stumbles":
                response = await model.open_stream(request)
                await response.write(model.word("openai", "One "))
                await response.write(model.stream_error("openai", said))
                return response
            case "ends":
                return web.json_response({"choices": [{"message": {"content": ""}, "finish_reason": key}]})
            case "tells":
                found = {"content": f"Refunds take {key} days.", "metadata": {"title": key}, "similarity_score": 0.9}
                summary = {"message": {"content": f"Refunds take {key} days."}}
                return web.json_response({"references": {"documents": [found]}, "summary": summary})
            case _:
                return web.json_response({"detail": said}, status=401)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parrot() -> AsyncIterator[Parrot]:
    async with Parrot() as started:
        yield started


# --- what the operator configured, on every surface


SHOUTING = Path(__file__).parents[1] / "support" / "leaking_upstream.py"


def shouting(name: str, *, is_error: bool) -> McpServer:
    args = ("-I", "-S", str(SHOUTING), "error" if is_error else "found")
    return McpServer(name=name, command=sys.executable, args=args, env={"API_KEY": KEY})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, parrot: Parrot) -> AsyncIterator[Library]:
    def endpoint(slug: str, kind: Any = "space") -> Endpoint:
        return Endpoint(slug=slug, url=parrot.url, kind=kind, operator=True, token=KEY)

    servers = {one.name: one for one in (shouting("fails", is_error=True), shouting("finds", is_error=False))}
    async with library(
        tmp_path_factory.mktemp("data"),
        models_dir,
        model_url=parrot.url,
        model_name="refuses",
        model_api_key=KEY,
        model_retries=0,
        planner_retries=0,
        breaker_calls=10_000,
        rate_limit=0,
        log_level="DEBUG",
        sources={slug: endpoint(slug) for slug in ("refuses", "tells")},
        models={slug: endpoint(slug, "openai") for slug in ("refuses", "stumbles", "ends", "tells")},
        published_models={f"mia/{slug}": slug for slug in ("refuses", "stumbles", "ends", "tells")},
        mcp_servers=servers,
    ) as opened:
        await opened.collection("shop")
        await opened.ingest("shop", text("Refunds for printed books take 30 days.", title="Handbook"))
        yield opened


async def said_by(shelf: Library, method: str, path: str, body: Any = None, **headers: str) -> str:
    reply = await shelf.call(method, path, body, headers=headers)
    return json.dumps(reply.body, ensure_ascii=False) if not isinstance(reply.body, str) else reply.body


STREAMED = {"Accept": "text/event-stream"}


@pytest.mark.parametrize("source", ["refuses", "fails"])
@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/query", {}), ("/v1/query", STREAMED), ("/rag/stream", {})], ids=["query", "sse", "rag"]
)
async def test_source_errors_contain_no_configured_key(
    shelf: Library, path: str, headers: dict[str, str], source: str
) -> None:
    said = await said_by(shelf, "POST", path, {"query": QUESTION, "sources": [source]}, **headers)
    assert REMOVED in said
    assert not leaks(KEY, said)


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/query", {}), ("/v1/query", STREAMED), ("/rag/stream", {})], ids=["query", "sse", "rag"]
)
async def test_model_errors_contain_no_configured_key(shelf: Library, path: str, headers: dict[str, str]) -> None:
    said = await said_by(shelf, "POST", path, {"query": QUESTION, "threshold": 0}, **headers)
    assert "It asks for a valid token (401)" in said
    assert not leaks(KEY, said)


@pytest.mark.parametrize("path", ["/api/v1/chat", "/api/v1/chat/stream"])
@pytest.mark.parametrize("model", ["refuses", "stumbles", "ends", "tells"])
async def test_chat_responses_contain_no_key_of_configured_endpoints(shelf: Library, path: str, model: str) -> None:
    sources = [{"url": "", "slug": slug} for slug in ("refuses", "tells")]
    body = {"prompt": QUESTION, "model": {"url": "", "slug": model}, "data_sources": sources}
    said = await said_by(shelf, "POST", path, body)
    assert REMOVED in said
    assert not leaks(KEY, said)


@pytest.mark.parametrize("slug", ["refuses", "stumbles", "ends", "tells"])
@pytest.mark.parametrize("stream", [False, True])
async def test_published_model_responses_contain_no_key(shelf: Library, slug: str, stream: bool) -> None:
    said = await said_by(shelf, "POST", f"/api/v1/endpoints/{slug}/query", {"messages": QUESTION, "stream": stream})
    assert "Refunds" in said or "Model generation failed" in said
    assert not leaks(KEY, said)


async def test_mcp_ask_and_aggregate_responses_contain_no_key(shelf: Library) -> None:
    async with (
        httpx2.AsyncClient(timeout=30) as client,
        Client(streamable_http_client(f"{shelf.server.url}/mcp", http_client=client)) as tools,
    ):
        results = [
            await tools.call_tool("ask", {"question": QUESTION}),
            await tools.call_tool("ask", {"question": QUESTION, "sources": ["refuses", "fails"]}),
            await tools.call_tool("aggregate", {"query_text": QUESTION}),
        ]
    [found] = results[-1].structured_content["results"]
    assert found["server_result"]["content"]["text"] == f"No entry for {REMOVED}"
    for result in results:
        said = result.model_dump_json()
        assert REMOVED in said
        assert not leaks(KEY, said)


async def events(shelf: Library, session: str, subagent: dict[str, Any]) -> str:
    path = f"/planner/sessions/{session}/steps"
    await shelf.good("POST", path, {"plan_step_id": "p", "expected_subagents": [subagent]})
    async with asyncio.timeout(20), shelf.server.session.get(f"{shelf.server.url}{path}/p/stream") as response:
        return await response.text()


async def test_planner_events_contain_no_key(shelf: Library, parrot: Parrot) -> None:
    said = await events(shelf, "in-process", {"key": "documentation", "input": {"question": QUESTION}})
    parrot.adds = KEY
    said += await events(shelf, "elsewhere", {"key": "lookup", "url": f"{parrot.url}/lookup"})
    assert said.count(REMOVED) >= 2
    assert not leaks(KEY, said)


async def test_subagent_results_contain_no_key(shelf: Library) -> None:
    async def reply(_request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"status": "error", "payload": {"error": f"bad key {KEY}", "trace": [KEY]}})

    async with HttpServer(reply) as listener:
        said = await events(shelf, "with-payload", {"key": "lookup", "url": listener.url})
    assert REMOVED in said
    assert not leaks(KEY, said)


async def test_embedder_errors_contain_no_key(
    tmp_path: Path, models_dir: Path, parrot: Parrot, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the indexer, a process of its own, writes down of a document that it could not embed."""
    embedding = {"embedding_url": parrot.url, "embedding_model": "refuses", "embedding_api_key": KEY}
    async with library(tmp_path, models_dir, log_level="DEBUG", **embedding) as opened:
        await opened.collection("shop")
        said = json.dumps(await opened.ingest("shop", text("Refunds take 30 days.")))
        said += await said_by(opened, "POST", "/v1/query", {"query": QUESTION})
    assert REMOVED in said
    assert not leaks(KEY, said + capfd.readouterr().err)


async def test_the_log_contains_no_key_in_any_encoding(
    serve: Serve, parrot: Parrot, capfd: pytest.CaptureFixture[str]
) -> None:
    named = {"m": Endpoint(slug="refuses", url=parrot.url, kind="openai", operator=True, token=KEY)}
    for form in ("json", "console"):
        async with serve(log_level="DEBUG", log_format=form, models=named, sources=named) as server:
            body = {"prompt": QUESTION, "model": {"url": "", "slug": "m"}, "data_sources": [{"url": "", "slug": "m"}]}
            await server.post("/api/v1/chat", body)
    log = capfd.readouterr().err
    assert log.count("chat_request_completed") == 2
    assert not leaks(KEY, log)


class Broken:
    """An Answerer that fails with an upstream's words."""

    def __init__(self, **_: object) -> None: ...

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        raise ZeroDivisionError(f"{KEY} {TOKEN}")


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_logged_tracebacks_contain_no_key(
    serve: Serve,
    parrot: Parrot,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    log_format: str,
) -> None:
    monkeypatch.setattr("anabranch.app.wiring.Pipeline", Broken)
    async with serve(log_format=log_format, model_url=parrot.url, model_api_key=KEY) as server:
        body = {"prompt": QUESTION, "model": {"url": parrot.url, "slug": "x"}, "endpoint_tokens": {"mia": TOKEN}}
        status, _, _ = await server.post("/api/v1/chat", body)
    log = capfd.readouterr().err
    assert status == 500
    assert f"ZeroDivisionError: {REMOVED} {REMOVED}" in log
    assert not leaks(KEY, log)


# --- what a caller sent along


def body_of(parrot: Parrot, model: str) -> dict[str, Any]:
    def named(slug: str) -> dict[str, str]:
        return {"url": parrot.url, "slug": slug, "owner_username": "mia"}

    return {
        "prompt": QUESTION,
        "model": named(model),
        "data_sources": [named("refuses"), named("tells")],
        "endpoint_tokens": {"mia": TOKEN, "nobody": "sat-of-nobody"},
        "transaction_tokens": {"mia": TRANSACTION},
    }


@pytest.mark.parametrize("path", ["/api/v1/chat", "/api/v1/chat/stream"])
@pytest.mark.parametrize("model", ["refuses", "stumbles", "ends", "tells"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_responses_contain_no_caller_tokens(
    serve: Serve, parrot: Parrot, capfd: pytest.CaptureFixture[str], path: str, model: str, streaming: bool
) -> None:
    parrot.adds = f"{BEARER} sat-of-nobody"
    async with serve(log_level="DEBUG", model_streaming_enabled=streaming) as server:
        headers = {"Authorization": f"Bearer {BEARER}"}
        async with server.session.post(server.url + path, json=body_of(parrot, model), headers=headers) as response:
            said = await response.text()
    assert REMOVED in said
    log = capfd.readouterr().err
    for token in (TOKEN, TRANSACTION, BEARER, "sat-of-nobody"):
        assert not leaks(token, said + log), token


async def test_library_answers_contain_no_caller_tokens(parrot: Parrot, tmp_path: Path) -> None:
    settings = Settings(endpoint_allowlist=LOCAL, data_dir=str(tmp_path), model_retries=0)
    source = Endpoint(slug="refuses", url=parrot.url, owner="mia")
    async with Anabranch.open(settings=settings) as opened:
        answer = await opened.ask(QUESTION, sources=[source], tokens={"mia": TOKEN})
        guest = msgspec.structs.replace(source, token=KEY)
        other = await opened.ask(QUESTION, sources=[guest])
    for reply in (*answer.replies, *other.replies):
        assert reply.error is not None
        assert REMOVED in reply.error
        assert not leaks(TOKEN, reply.error)
        assert not leaks(KEY, reply.error)


async def test_a_common_word_used_as_a_key_stays_in_answers_and_documents(serve: Serve, parrot: Parrot) -> None:
    model = Endpoint(slug="tells", url=parrot.url, operator=True, token="ollama")
    async with serve(models={"m": model}, sources={"m": model}) as server:
        body = {"prompt": QUESTION, "model": {"url": "", "slug": "m"}, "data_sources": [{"url": "", "slug": "m"}]}
        answer = await server.chat(**body)
    assert answer["response"] == "Refunds take ollama days."
