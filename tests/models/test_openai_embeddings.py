"""Embeddings from a server: order, unit length, retries, and invalid replies."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from anabranch.domain.contracts import Embedder, Exchange
from anabranch.domain.errors import EmbeddingFailed, UpstreamError
from anabranch.domain.shares import ReplyMemory
from anabranch.models.remote import ModelServer, OpenAIEmbeddings, api_url
from support.model_servers import Served, served

DIMENSIONS = 8


def vector(text: str) -> list[float]:
    return [float(len(text)), 2.0, *[0.0] * (DIMENSIONS - 2)]


def good(asked: dict[str, Any]) -> object:
    items = [{"object": "embedding", "index": n, "embedding": vector(t)} for n, t in enumerate(asked["input"])]
    return {"object": "list", "data": items[::-1], "model": asked["model"], "usage": {"total_tokens": 1}}


def embedder(server: Served, **more: Any) -> OpenAIEmbeddings:
    return client(server.url, server.outbound, api_key="key", sleep=server.sleep, **more)


def client(url: str, outbound: Any, *, window: int = 8000, **more: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(ModelServer(api_url(url, "/embeddings"), outbound, **more), "small", window=window)


async def test_embeddings_keep_the_order_of_texts_across_batches() -> None:
    texts = ["x" * number for number in range(1, 301)]
    async with served(good) as server:
        embeds: Embedder = embedder(server)
        assert embeds.dimensions == 0
        found = [np.frombuffer(each.vector, np.float32) for each in await embeds.embed(texts)]
    assert embeds.dimensions == DIMENSIONS
    assert embeds.name == "small"
    for text, each in zip(texts, found, strict=True):
        expected = np.array(vector(text)) / np.linalg.norm(vector(text))
        assert np.abs(each - expected).max() < 1e-6
    assert [len(asked["input"]) for asked in server.asked] == [16, 96, 96, 92]
    assert {asked["model"] for asked in server.asked} == {"small"}
    assert server.headers[0]["Authorization"] == "Bearer key"
    assert set(server.paths) == {"/v1/embeddings"}


async def test_long_vectors_are_requested_in_small_batches() -> None:
    def long(asked: dict[str, Any]) -> object:
        return {"data": [{"embedding": [0.5] * 4096} for _ in asked["input"]]}

    async with served(long) as server:
        assert len(await embedder(server).embed(["x"] * 40)) == 40
    assert [len(asked["input"]) for asked in server.asked] == [16, 20, 4]


async def test_embedding_no_texts_makes_no_call() -> None:
    async with served(good) as server:
        assert list(await embedder(server).embed([])) == []
    assert server.asked == []


@pytest.mark.parametrize("fault", [429, 500, 502, 503, 504, ConnectionResetError()])
async def test_transient_embedding_failures_are_retried(fault: int | BaseException) -> None:
    async with served(fault, fault, fault, good) as server:
        assert len(await embedder(server).embed(["a"])) == 1
    assert len(server.slept) == 3
    for slept, most in zip(server.slept, (0.5, 1.0, 2.0), strict=True):
        assert most / 2 <= slept <= most


async def test_an_unavailable_embedding_server_fails_after_three_retries() -> None:
    async with served(503) as server:
        with pytest.raises(EmbeddingFailed, match="No luck today"):
            await embedder(server).embed(["a"])
        assert len(server.asked) == 4


@pytest.mark.parametrize("status", [400, 401, 404, 413])
async def test_permanent_embedding_failures_are_not_retried(status: int) -> None:
    async with served(status) as server:
        with pytest.raises(EmbeddingFailed, match="No luck today") as failed:
            await embedder(server).embed(["a"])
        assert len(server.asked) == 1
    assert failed.value.code == "embedding_failed"
    assert failed.value.details == {"upstream_status": status}


async def test_an_unreachable_embedding_server_fails() -> None:
    async with served(good) as server:
        gone = client("http://127.0.0.1:9", server.outbound, sleep=server.sleep)
        with pytest.raises(EmbeddingFailed, match="No connection"):
            await gone.embed(["a"])
    assert len(server.slept) == 3


async def test_an_embedding_url_that_cannot_be_called_is_not_retried() -> None:
    async with served(good) as server:
        wrong = client("ftp://127.0.0.1", server.outbound, sleep=server.sleep)
        with pytest.raises(EmbeddingFailed, match="must begin with http"):
            await wrong.embed(["a"])
    assert server.slept == []


async def test_an_embedding_server_that_times_out_fails() -> None:
    async with served(None) as server:
        with pytest.raises(EmbeddingFailed, match=r"within 0\.05 s"):
            await embedder(server, timeout_s=0.05).embed(["a"])
        assert len(server.asked) == 4


HOSTILE: list[tuple[str, bytes | dict[str, Any]]] = [
    ("not a list", b"<html>"),
    ("not a list", b"[" * 100_000),
    ("not a list", b'{"data": [{"index": 0, "embedding": [NaN, 1]}, {"index": 1, "embedding": [1, 1]}]}'),
    ("not a list", {"data": None}),
    ("not a list", {"error": "no"}),
    ("not a list", {"data": [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": "AAAA"}]}),
    ("not a list", {"data": [{"index": "0", "embedding": [1.0]}, {"index": "1", "embedding": [1.0]}]}),
    ("not a list", {"data": [{"index": 0, "embedding": ["1"]}, {"index": 1, "embedding": [None]}]}),
    ("does not match", {"data": []}),
    ("does not match", {"data": [{"index": 0, "embedding": [1.0]}]}),
    ("does not match", {"data": [{"index": 0, "embedding": [1.0]}] * 2}),
    ("does not match", {"data": [{"index": n, "embedding": [1.0]} for n in (0, 1, 2)]}),
    ("does not match", {"data": [{"index": n, "embedding": [1.0]} for n in (-1, 0)]}),
    ("one usable length", {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]}),
    ("one usable length", {"data": [{"index": n, "embedding": []} for n in (0, 1)]}),
    ("one usable length", {"data": [{"index": n, "embedding": [1] * 20_000} for n in (0, 1)]}),
    ("cannot be compared", {"data": [{"index": n, "embedding": [0.0, 0.0]} for n in (0, 1)]}),
    ("cannot be compared", {"data": [{"index": n, "embedding": [1.7e308, 1.7e308]} for n in (0, 1)]}),
    ("larger than", b" " * 5_000_000),
]


@pytest.mark.parametrize(("complaint", "reply"), HOSTILE, ids=lambda value: str(value)[:40])
async def test_hostile_replies_fail_clearly(complaint: str, reply: bytes | dict[str, Any]) -> None:
    body = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
    async with served(body) as server:
        with pytest.raises(EmbeddingFailed, match=complaint):
            await embedder(server).embed(["a", "b"])


async def test_embeddings_that_change_their_length_fail() -> None:
    async with served(good, lambda _: {"data": [{"index": 0, "embedding": [1.0] * 9}]}) as server:
        embeds = embedder(server)
        await embeds.embed(["a"])
        with pytest.raises(EmbeddingFailed, match="from 8 to 9"):
            await embeds.embed(["a"])
    assert embeds.dimensions == DIMENSIONS


async def test_texts_sent_to_the_embedding_server_fit_the_window_and_are_never_empty() -> None:
    async with served(good) as server:
        embeds = embedder(server, window=10)
        await embeds.embed(["", "one two three", "word " * 50, "\ud800"])
    assert server.asked[0]["input"] == [" ", "one two three", "word " * 9 + "word", "?"]


def test_estimated_tokens_are_close_to_common_vocabularies() -> None:
    embeds = client("http://127.0.0.1", None)  # nothing is sent
    assert embeds.window == 8000
    text = "Internationalization, 2024: 東京 has 14 million people."
    pieces = [text[start:end] for start, end in embeds.tokens(text)]
    assert pieces[:4] == ["Intern", "ationa", "lizati", "on"]
    assert "".join(pieces) == text.replace(" ", "")
    assert {"東", "京"} <= set(pieces)


@pytest.mark.parametrize("given", ["http://h", "http://h/", "http://h/v1", "http://h/v1/", "http://h/v1/embeddings"])
def test_embedding_url_may_be_host_or_full_path(given: str) -> None:
    assert api_url(given, "/embeddings") == "http://h/v1/embeddings"


class Busy:
    """An Outbound whose server is busy once, and says for how long."""

    def __init__(self, retry_after: str) -> None:
        self.status = 429
        self.content_type = "application/json"
        self._retry_after = retry_after

    def header(self, name: str) -> str:
        return self._retry_after if name == "Retry-After" else ""

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[Exchange]:
        yield self
        self.status = 200

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        operator: bool = False,
        public_only: bool = False,
    ) -> AbstractAsyncContextManager[Exchange]:
        assert operator
        return self._exchange()

    async def read(self, memory: ReplyMemory | None = None) -> bytes:
        return b"{}" if self.status == 429 else b'{"data": [{"embedding": [1.0]}]}'

    async def chunks(self, *, endless: bool = False) -> AsyncIterator[bytes]:
        yield await self.read()


async def test_retry_after_of_an_embedding_server_is_respected() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        outbound.status = 200

    outbound = Busy("7")
    await client("http://h", outbound, sleep=sleep).embed(["a"])
    assert slept == [7.0]
    outbound = Busy("3600")
    with pytest.raises(EmbeddingFailed, match="429"):
        await client("http://h", outbound, sleep=sleep).embed(["a"])
    assert slept == [7.0]


def test_an_invalid_embedding_url_is_refused() -> None:
    with pytest.raises(UpstreamError):
        api_url("http://h/?q=1", "/embeddings")
