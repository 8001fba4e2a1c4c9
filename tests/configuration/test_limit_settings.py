"""The settings that limit what one caller may hold. Callers on this machine, as here, may hold four times as much."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from anabranch.entrypoints.cli.resources import alone
from conftest import Server
from support.canary_server import Canary, reply
from support.environment import served
from support.federation import new_key
from support.step_requests import STEPS, begin, push, until

pytestmark = pytest.mark.usefixtures("isolated_home")

WEIGHT = 4
LARGE = 300_000


async def limit(server: Server, name: str) -> dict[str, Any]:
    async with server.session.get(f"{server.url}/v1/limits") as response:
        assert response.status == 200
        found = {one["name"]: one for one in (await response.json())["limits"]}
    return dict(found[name])


@asynccontextmanager
async def unfinished(server: Server, size: int = LARGE) -> AsyncIterator[None]:
    """An upload of which the last byte does not come."""
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/ingest HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    writer.write(head.encode() + bytes(size - 1))
    try:
        yield
    finally:
        writer.close()


async def waits(server: Server, name: str, waiting: int) -> bool:
    return bool((await limit(server, name))["waiting"] == waiting)


async def holds(server: Server, name: str, least: int) -> bool:
    used = (await limit(server, name))["used"]
    return bool(used >= least if least else not used)


async def test_caller_uploads_is_how_many_arrive_at_once() -> None:
    async with served(CALLER_UPLOADS="1") as server:
        async with AsyncExitStack() as uploads:
            for _ in range(WEIGHT + 1):
                await uploads.enter_async_context(unfinished(server))
            await until(lambda: waits(server, "uploads", 1))
            found = await limit(server, "uploads")
            assert (found["allowed"], found["used"]) == (WEIGHT, WEIGHT)
            assert found["setting"] == "AGGREGATOR_CALLER_UPLOADS"
        await until(lambda: waits(server, "uploads", 0))


@pytest.mark.parametrize("setting", ["CALLER_UPLOAD_BYTES", "MAX_UPLOAD_BYTES"])
async def test_caller_upload_bytes_and_max_upload_bytes_limit_what_is_held(setting: str) -> None:
    most = 2 * LARGE // WEIGHT if setting.startswith("CALLER") else 2 * LARGE
    async with served(**{setting: str(most)}) as server, AsyncExitStack() as uploads:
        for _ in range(3):
            await uploads.enter_async_context(unfinished(server))
        await until(lambda: waits(server, "upload_bytes", 1))
        found = await limit(server, "upload_bytes")
        assert (found["unit"], found["allowed"], found["used"]) == ("bytes", 2 * LARGE, 2 * LARGE)


@pytest.mark.parametrize(("setting", "weight"), [("CALLER_RESPONSE_BYTES", WEIGHT), ("MAX_RESPONSE_BYTES", 1)])
async def test_caller_response_bytes_and_max_response_bytes_limit_large_replies(setting: str, weight: int) -> None:
    document = {"content": "x" * LARGE, "similarity_score": 0.9}
    says = reply(body=msgspec.json.encode({"references": {"documents": [document]}}))
    async with (
        served(**{setting: str(LARGE * 3 // 2 // weight)}) as server,
        Canary(says) as source,
        Canary(b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n{") as silent,
    ):
        sources = [{"url": source.url, "slug": "large"}]
        model = {"url": silent.url, "slug": "m"}
        first = asyncio.create_task(server.chat(prompt="x", data_sources=sources, model=model))
        await until(lambda: holds(server, "response_bytes", LARGE))
        second = asyncio.create_task(server.chat(prompt="x", data_sources=sources, retrieval_only=True))
        await until(lambda: waits(server, "response_bytes", 1))
        first.cancel()
        assert len((await second)["sources"]) == 1
        await until(lambda: holds(server, "response_bytes", 0))
        both = await server.chat(
            prompt="x", data_sources=[*sources, {"url": source.url, "slug": "b"}], retrieval_only=True
        )
        refused = next(one for one in both["retrieval_info"] if one["status"] == "error")
        assert f"AGGREGATOR_{setting}" in refused["error_message"]


async def test_a_model_reply_over_the_limit_is_a_429() -> None:
    event = b"data: " + msgspec.json.encode({"content": "word " * 10_000}) + b"\n\n"
    says = reply(body=event * 8).replace(b"application/json", b"text/event-stream")
    async with served(CALLER_RESPONSE_BYTES="50000") as server, Canary(says) as upstream:
        model = {"url": upstream.url, "slug": "m"}
        async with server.session.post(f"{server.url}/api/v1/chat", json={"prompt": "x", "model": model}) as response:
            assert response.status == 429
            assert (await response.json())["details"]["limit"] == "response_bytes"
        await until(lambda: holds(server, "response_bytes", 0))


async def test_caller_steps_is_how_many_one_caller_runs_at_once() -> None:
    async with served(CALLER_STEPS="1") as server:
        statuses = [(await begin(server, f"step {number}"))[0] for number in range(WEIGHT + 1)]
        assert statuses == [201] * WEIGHT + [429]
        assert (await limit(server, "steps"))["used"] == WEIGHT
        await push(server, "step 0")
        assert (await begin(server, "another"))[0] == 201


async def test_caller_stream_memory_limits_the_streams_of_one_caller() -> None:
    async with served(CALLER_STREAM_MEMORY="20000") as server:
        assert (await begin(server, "step"))[0] == 201
        status, said = await push(server, "step", payload={"text": "x" * 100_000})
        assert (status, said["error"]) == (503, "streams_full")
        assert "AGGREGATOR_CALLER_STREAM_MEMORY" in said["message"]
        assert 0 < (await limit(server, "stream_bytes"))["used"] < WEIGHT * 20_000


@pytest.mark.parametrize(
    ("setting", "most", "name", "allowed"),
    [
        ("CALLER_PENDING_DOCUMENTS", "1", "pending_documents", "4 documents"),
        ("CALLER_PENDING_BYTES", "10", "pending_bytes", "40 bytes of documents"),
    ],
)
async def test_caller_pending_documents_and_caller_pending_bytes_limit_what_waits(
    tmp_path: Path, setting: str, most: str, name: str, allowed: str
) -> None:
    """Nothing is processed: the lock of the folder is taken."""
    tmp_path.joinpath("data").mkdir()
    with alone(tmp_path / "data"):
        async with served(DATA_DIR=str(tmp_path / "data"), **{setting: most}) as server:
            assert (await limit(server, name))["used"] == 0
            assert (await server.post("/v1/collections", {"name": "notes"}))[0] == 201
            for number in range(WEIGHT):
                assert (await ingest(server, f"{number:010}"))[0] == 200
            status, said, headers = await ingest(server, "too much")
            assert (status, said["error"], said["details"]["limit"]) == (429, "rate_limited", name)
            assert f"your limit of {allowed} that are not processed yet (AGGREGATOR_{setting})" in said["message"]
            assert headers["Retry-After"] == "1"
            found = await limit(server, name)
            assert found["used"] == found["allowed"] == int(most) * WEIGHT
            assert found["setting"] == f"AGGREGATOR_{setting}"


async def test_caller_collections_limits_what_one_caller_owns(tmp_path: Path) -> None:
    async with served(DATA_DIR=str(tmp_path), CALLER_COLLECTIONS="1") as server:
        for number in range(WEIGHT):
            assert (await server.post("/v1/collections", {"name": f"notes {number}"}))[0] == 201
        status, said, _ = await server.post("/v1/collections", {"name": "one more"})
        assert (status, said["error"], said["details"]["limit"]) == (403, "forbidden", "collections")
        assert "your limit of 4 collections (AGGREGATOR_CALLER_COLLECTIONS). Delete some" in said["message"]
        assert (await limit(server, "collections"))["used"] == WEIGHT


@pytest.mark.parametrize(
    ("setting", "most", "name", "allowed"),
    [
        ("CALLER_DOCUMENTS", "1", "documents", "4 stored documents"),
        ("CALLER_STORED_BYTES", "10", "stored_bytes", "40 bytes of stored documents"),
    ],
)
async def test_caller_documents_and_caller_stored_bytes_limit_what_is_stored(
    tmp_path: Path, setting: str, most: str, name: str, allowed: str
) -> None:
    """Documents that are not processed yet count: the lock of the folder is taken."""
    tmp_path.joinpath("data").mkdir()
    with alone(tmp_path / "data"):
        async with served(DATA_DIR=str(tmp_path / "data"), **{setting: most}) as server:
            assert (await server.post("/v1/collections", {"name": "notes"}))[0] == 201
            for number in range(WEIGHT):
                assert (await ingest(server, f"{number:010}"))[0] == 200
            status, said, _ = await ingest(server, "too much")
            assert (status, said["error"], said["details"]["limit"]) == (403, "forbidden", name)
            assert f"your limit of {allowed} (AGGREGATOR_{setting}). Delete some" in said["message"]


async def test_caller_stream_readers_is_how_many_streams_one_caller_reads() -> None:
    async with served(CALLER_STREAM_READERS="1") as server:
        assert (await begin(server, "step"))[0] == 201
        stream = f"{server.url}{STEPS}/step/stream"
        async with AsyncExitStack() as readers:
            for _ in range(WEIGHT):
                response = await readers.enter_async_context(server.session.get(stream))
                assert response.status == 200
            assert (await limit(server, "stream_readers"))["used"] == WEIGHT
            refused = await readers.enter_async_context(server.session.get(stream))
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
            assert "your limit of 4 streams that are read at once" in (await refused.json())["message"]
            with pytest.raises(aiohttp.WSServerHandshakeError, match="429"):
                await server.session.ws_connect(f"{server.url}{STEPS}/step/ws")

        async def free() -> bool:
            return bool((await limit(server, "stream_readers"))["used"] == 0)

        await until(free)


async def test_caller_changes_limits_what_one_key_changes_within_the_window(tmp_path: Path) -> None:
    """Reading, and what this machine does without a key, has no such limit."""
    async with served(DATA_DIR=str(tmp_path), CALLER_CHANGES="3", RATE_LIMIT_WINDOW="600") as server:
        _, secret = new_key(tmp_path, user="bob")
        sent = {"Authorization": f"Bearer {secret}"}
        for number in range(3):
            status, _, headers = await server.post("/v1/collections", {"name": f"notes {number}"}, headers=sent)
            assert (status, headers["RateLimit-Remaining"]) == (201, str(2 - number))
        status, said, headers = await server.post("/v1/collections", {"name": "one more"}, headers=sent)
        assert (status, said["error"], said["details"]["limit"]) == (429, "rate_limited", "changes")
        assert "your limit of 3 changes within 600 seconds (AGGREGATOR_CALLER_CHANGES)" in said["message"]
        assert 0 < int(headers["Retry-After"]) <= 600
        assert (await server.post("/v1/session", {"key": secret}))[0] == 429
        async with server.session.get(f"{server.url}/v1/limits", headers=sent) as response:
            found = {one["name"]: one for one in (await response.json())["limits"]}["changes"]
        assert (found["used"], found["allowed"], found["window_s"]) == (3, 3, 600)
        for number in range(5):
            assert (await server.post("/v1/collections", {"name": f"local {number}"}))[0] == 201


async def ingest(server: Server, content: str) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    document = {"source": {"type": "text", "content": content}}
    return await server.post("/v1/ingest", {"collection_id": "notes", "documents": [document]})
