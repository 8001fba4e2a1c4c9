"""A server whose records are in PostgreSQL while that is down or frozen: it says so, answers what it can without the
records, and goes on by itself afterwards. Real processes on both sides."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from anabranch.testing import Document, Space
from conftest import ref
from support.collection_server import OVER
from support.postgres_server import PostgresServer, running_postgres
from support.server_process import Program, serving

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-records-outage"), pytest.mark.timeout(120)]

UNREACHABLE = {"status": "not_ready", "reason": "records_unreachable"}
# More than /ready may take, whatever the database does.
READY_S = 5.0
PATIENCE_S = 40.0
HERONS, STORKS = "Herons sleep under the alder by the weir.", "Storks sleep on the chimney of the mill."


class Client:
    def __init__(self, program: Program, session: aiohttp.ClientSession) -> None:
        self.program = program
        self._session = session

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._session.request(method, self.program.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def ready(self) -> tuple[int, Any]:
        began = time.monotonic()
        found = await self.call("GET", "/ready")
        assert time.monotonic() - began < READY_S
        return found

    async def until_ready(self, expected: tuple[int, Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.ready() != expected:  # noqa: ASYNC110  another process decides
                await asyncio.sleep(0.05)

    async def until_logged(self, event: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while all(line["event"] != event for line in self.program.log):  # noqa: ASYNC110  longer than others wait
                await asyncio.sleep(0.05)

    async def ask(self, query: str) -> tuple[int, Any]:
        return await self.call("POST", "/v1/query", {"query": query})

    async def ingest(self, content: str) -> None:
        """Until the indexer has stored it."""
        document = {"source": {"type": "text", "content": content}, "title": content.split(maxsplit=1)[0]}
        body = {"collection_id": "animals", "documents": [document]}
        status, job = await self.call("POST", "/v1/ingest", body)
        assert status == 200, job
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self._job(job["job_id"]))["status"] not in OVER:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)
        assert found["status"] == "completed", found

    async def _job(self, identifier: str) -> dict[str, Any]:
        _, found = await self.call("GET", f"/v1/ingest/{identifier}")
        return dict(found)


@pytest.fixture
async def postgres(tmp_path: Path) -> AsyncIterator[PostgresServer]:
    with running_postgres(tmp_path / "postgres", durable=True) as server:
        yield server


@pytest.fixture
async def client(tmp_path: Path, postgres: PostgresServer) -> AsyncIterator[Client]:
    variables = {"AGGREGATOR_DATABASE_URL": postgres.create_database(), "AGGREGATOR_EVIDENCE": "off"}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with (
        serving(home=tmp_path, variables=variables) as program,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        opened = Client(program, session)
        assert (await opened.call("POST", "/v1/collections", {"name": "animals"}))[0] == 201
        await opened.ingest(HERONS)
        yield opened


async def answered(client: Client) -> None:
    """Everything is as it was before."""
    await client.until_ready((200, {"status": "ready"}))
    status, found = await client.ask("Where do herons sleep at night?")
    assert (status, "alder" in found["answer"]) == (200, True)
    await client.ingest(STORKS)
    status, found = await client.ask("Where do storks sleep?")
    assert (status, "chimney" in found["answer"]) == (200, True)
    (node,) = (await client.call("GET", "/v1/cluster"))[1]["nodes"]
    assert (node["is_alive"], node["leads"]) == (True, True)


async def test_a_server_whose_database_is_down_says_so_and_answers_from_other_sources(
    client: Client, postgres: PostgresServer, space: Space
) -> None:
    space.source("policy", documents=[Document(title="Refunds", content="Refunds take 30 days.", score=0.9)])
    others = {"prompt": "How long?", "model": ref(space, "scribe"), "data_sources": [ref(space, "policy")]}
    postgres.kill()
    asked = asyncio.create_task(client.ask("Where do herons sleep by day?"))
    await client.until_ready((503, UNREACHABLE))
    assert (await client.call("GET", "/health"))[0] == 200
    status, answer = await client.call("POST", "/api/v1/chat", others)
    assert (status, "30 days" in answer["response"]) == (200, True)
    status, cluster = await client.call("GET", "/v1/cluster")
    assert (status, cluster["records"]["is_reachable"]) == (200, False)
    postgres.restart()
    status, found = await asked  # which has waited for it
    assert (status, "alder" in found["answer"]) == (200, True)
    await answered(client)


@pytest.mark.soak
async def test_questions_fail_at_once_in_a_long_outage_and_everything_goes_on_after_it(
    client: Client, postgres: PostgresServer
) -> None:
    assert (await client.ask("Where do herons sleep?"))[0] == 200
    postgres.kill()
    status, refused = await client.ask("Where do herons sleep by day?")
    assert (status, refused["error"]) == (503, "service_unavailable")
    assert refused["message"] == "The records cannot be reached (Connection refused)."
    assert refused["details"] == {"reason": "records_unreachable"}
    began = time.monotonic()
    assert (await client.ask("Where do herons sleep in winter?"))[0] == 503
    assert time.monotonic() - began < READY_S
    await client.until_logged("records_unreachable")
    postgres.restart()
    await answered(client)
    await client.until_logged("records_reachable")
    events = [line["event"] for line in client.program.log]
    assert events.count("records_unreachable") == 1
    assert "indexer_died" not in events


@pytest.mark.soak
async def test_a_server_goes_on_after_its_database_was_frozen(client: Client, postgres: PostgresServer) -> None:
    assert (await client.ask("Where do herons sleep?"))[0] == 200
    postgres.pause()
    try:
        asked = asyncio.create_task(client.ask("Where do herons sleep by day?"))
        await client.until_ready((503, UNREACHABLE))
        status, refused = await asked
        assert (status, refused["details"]["reason"]) == (503, "records_unreachable")
    finally:
        postgres.resume()
    await answered(client)


@pytest.mark.soak
async def test_a_server_can_be_stopped_while_its_database_is_frozen(client: Client, postgres: PostgresServer) -> None:
    postgres.pause()
    try:
        await client.until_ready((503, UNREACHABLE))
        client.program.send(signal.SIGTERM)
        assert await client.program.ended(PATIENCE_S) == 0
    finally:
        postgres.resume()
