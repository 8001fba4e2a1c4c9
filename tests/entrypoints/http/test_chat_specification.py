"""The chat API as spec 1 describes it: defaults, its example request, timings and headers."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from anabranch.testing import Document, Space
from anabranch.testing.http_server import HttpServer, json
from conftest import Server, ref

PATIENCE_S = 20.0


async def test_defaults_of_a_chat_request(server: Server, space: Space) -> None:
    await server.chat(prompt="Why?", model=ref(space, "scribe"), data_sources=[ref(space, "docs")])
    asked, written = (request.body for request in space.requests)
    assert (asked["limit"], asked["similarity_threshold"], asked["include_metadata"]) == (5, 0.5, True)
    assert (written["max_tokens"], written["temperature"], written["stream"]) == (1024, 0.7, False)


async def test_the_specifications_example_request_is_accepted(server: Server, space: Space) -> None:
    """Word for word, except for the address."""
    space.source("product-docs", documents=[Document(title="Product Overview", content="Feature A is fast.")])
    space.source("faq-dataset", documents=[Document(title="FAQ - Features", content="Feature B is safe.")])
    space.model("gpt-4-endpoint")
    answer = await server.chat(
        prompt="What are the key features of our product?",
        model={
            "url": space.url,
            "slug": "gpt-4-endpoint",
            "name": "GPT-4",
            "tenant_name": "acme-corp",
            "owner_username": "alice",
        },
        data_sources=[
            {
                "url": space.url,
                "slug": "product-docs",
                "name": "Product Documentation",
                "tenant_name": "acme-corp",
                "owner_username": "alice",
            },
            {
                "url": space.url,
                "slug": "faq-dataset",
                "name": "FAQ",
                "tenant_name": "acme-corp",
                "owner_username": "bob",
            },
        ],
        endpoint_tokens={"alice": "eyJhbGciOiJSUzI1NiIs...", "bob": "eyJhbGciOiJSUzI1NiIs..."},
        transaction_tokens={"alice": "tx_abc123", "bob": "tx_def456"},
        top_k=5,
        max_tokens=1024,
        temperature=0.7,
        similarity_threshold=0.5,
    )
    assert answer["response"] == "Feature A is fast [alice/product-docs]. Feature B is safe [bob/faq-dataset]."
    assert set(answer["sources"]) == {"Product Overview", "FAQ - Features"}
    assert {request.headers["X-Tenant-Name"] for request in space.requests} == {"acme-corp"}
    tokens = {request.slug: request.body["transaction_token"] for request in space.requests}
    assert tokens == {"product-docs": "tx_abc123", "faq-dataset": "tx_def456", "gpt-4-endpoint": "tx_abc123"}


async def test_a_reply_with_provider_info_and_cost_is_read(server: Server) -> None:
    reply = {
        "summary": None,
        "references": {
            "documents": [
                {"document_id": "doc-123", "content": "No title.", "metadata": {"pages": 3}, "similarity_score": 0.85},
                {"document_id": "doc-124", "content": "Titled.", "metadata": {"title": "Doc Title"}},
            ],
            "provider_info": {"name": "weaviate", "region": ["eu"]},
            "cost": 0.001,
        },
    }

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return json(reply)

    async with HttpServer(answer) as source:
        got = await server.chat(prompt="Why?", data_sources=[{"url": source.url, "slug": "s"}], retrieval_only=True)
    assert got["retrieval_info"][0]["status"] == "success"
    assert set(got["sources"]) == {"doc-123", "Doc Title"}  # without a title, the document's id


async def test_sources_are_asked_at_the_same_time(server: Server, space: Space) -> None:
    """Each source answers only when all of them have been asked."""
    names = [f"source-{number}" for number in range(10)]
    all_asked = asyncio.Event()
    asked: set[str] = set()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.add(request.path)
        if len(asked) == len(names):
            all_asked.set()
        await asyncio.wait_for(all_asked.wait(), PATIENCE_S)
        return json(b'{"references": {"documents": []}}')

    async with HttpServer(answer) as source:
        sources = [{"url": source.url, "slug": name} for name in names]
        got = await server.chat(prompt="Why?", data_sources=sources, retrieval_only=True)
    assert [info["status"] for info in got["retrieval_info"]] == ["success"] * 10


async def test_metadata_has_the_times_of_retrieval_and_generation(server: Server, space: Space) -> None:
    space.source("slow", documents=[Document(title="T", content="A fact.")], delay_s=0.06)
    space.model("slow-writer", reply="Written.", delay_s=0.04)
    request: dict[str, Any] = {"prompt": "?", "model": ref(space, "slow-writer"), "data_sources": [ref(space, "slow")]}
    metadata = (await server.chat(**request))["metadata"]
    events = await server.stream(**request)
    [retrieved] = [event.data["time_ms"] for event in events if event.name == "retrieval_complete"]
    for times in (metadata, events[-1].data["metadata"]):
        assert all(type(time) is int for time in times.values())
        assert times["retrieval_time_ms"] >= 60
        assert times["generation_time_ms"] >= 40
        # Each is rounded by itself.
        assert times["total_time_ms"] >= times["retrieval_time_ms"] + times["generation_time_ms"] - 2
    assert type(retrieved) is int
    assert retrieved >= 60


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_chat_stream_leaves_the_connection_open(server: Server, space: Space, version: str) -> None:
    """HTTP/1.1 connections stay open unless a header says otherwise; HTTP/1.0 ones only if it says so."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /api/v1/chat/stream HTTP/{version}\r\nHost: localhost\r\nConnection: keep-alive\r\n"
    body = b'{"prompt": "Why?"}'
    for _ in range(2 if version == "1.1" else 1):
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in answered
        if version == "1.1":
            assert b"connection: close" not in answered
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")
    writer.close()
