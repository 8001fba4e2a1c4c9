"""Settings of streams, planner steps and their analytics, through the entrypoints."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from anabranch import Anabranch, Settings
from anabranch.app.stream_identity import StreamIdentity
from anabranch.configuration.settings import load
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.eventlog import Entry
from anabranch.testing.http_server import HttpServer
from conftest import Server
from support.environment import LOCAL, loaded, served
from support.otlp_collector import Collector
from support.step_requests import STEPS, begin, post, push, until

pytestmark = pytest.mark.usefixtures("isolated_home")


async def events(server: Server, step: str) -> list[dict[str, Any]]:
    async with server.session.get(f"{server.url}{STEPS}/{step}/events?limit=1000") as response:
        found: list[dict[str, Any]] = (await response.json())["events"] if response.status == 200 else []
        return found


async def ended(server: Server, step: str) -> list[dict[str, Any]]:
    """A step's events, once it has ended: its stream closes then."""
    async with server.session.get(f"{server.url}{STEPS}/{step}/stream") as response:
        await response.read()
    return await events(server, step)


@asynccontextmanager
async def opened(**variables: str) -> AsyncIterator[Anabranch]:
    async with Anabranch.open(settings=loaded(**variables), streaming=True) as anabranch:
        yield anabranch


async def test_several_workers_without_redis_have_no_resumable_streams() -> None:
    chat = {"prompt": "Why?", "retrieval_only": True}
    async with served(WORKERS="2") as server:
        status, said = await begin(server, "p")
        assert (status, said["error"]) == (503, "planner_unavailable")
        assert "AGGREGATOR_REDIS_URL" in said["message"]
        prefer = {"Prefer": "resumable"}
        async with server.session.post(f"{server.url}/api/v1/chat/stream", json=chat, headers=prefer) as response:
            assert response.status == 200
            assert "Stream-Id" not in response.headers
    async with served(WORKERS="1") as server:
        assert (await begin(server, "p"))[0] == 201


async def test_stream_ttl_is_how_long_a_stream_can_be_read_after_its_end() -> None:
    async with served(STREAM_TTL="0.3") as server:
        await begin(server, "p")
        await push(server, "p")
        await until(lambda: gone(server, "p"))
    async with served() as server:
        await begin(server, "p")
        await push(server, "p")
        assert not await gone(server, "p")


async def gone(server: Server, step: str) -> bool:
    async with server.session.get(f"{server.url}{STEPS}/{step}/events") as response:
        return response.status == 404


async def test_stream_lease_is_when_a_silent_worker_counts_as_lost() -> None:
    async with opened(STREAM_LEASE="0.2") as anabranch:
        assert anabranch.recordings is not None
        log = anabranch.recordings.log
        await log.open("s", identity="")

        async def abandoned() -> bool:
            return (await log.read("s", 0, 1)).abandoned

        assert not await abandoned()
        await until(abandoned)


@pytest.mark.parametrize(("most", "kept"), [("20", range(2, 21)), ("1000", range(60, 70))])
async def test_stream_events_is_how_many_a_stream_holds(most: str, kept: range) -> None:
    async with served(STREAM_EVENTS=most) as server:
        await begin(server, "p")
        pushed = [{"status": "partial", "revision": number} for number in range(1, 61)]
        await post(server, f"{STEPS}/p/subagents/notes/events", pushed)
        found = await events(server, "p")
    assert len(found) in kept
    assert found[-1]["content"]["revision"] == 60


@pytest.mark.parametrize(("most", "status"), [("10000", 413), ("100000", 202)])
async def test_stream_bytes_is_how_large_a_stream_may_be(most: str, status: int) -> None:
    async with served(STREAM_BYTES=most) as server:
        await begin(server, "p")
        assert (await push(server, "p", payload={"text": "x" * 12_000}))[0] == status


@pytest.mark.parametrize(("most", "status"), [("10000", 503), ("10000000", 201)])
async def test_stream_memory_limits_all_streams_together(most: str, status: int) -> None:
    async with served(STREAM_MEMORY=most) as server:
        statuses = [(await begin(server, f"p{number}"))[0] for number in range(10)]
    assert statuses[0] == 201
    assert statuses[-1] == status


@pytest.mark.parametrize(("most", "got"), [("2000", 1), ("100000", 50)])
async def test_stream_client_bytes_is_how_far_a_reader_may_fall_behind(most: str, got: int) -> None:
    async with opened(STREAM_CLIENT_BYTES=most) as anabranch:
        assert anabranch.planner is not None
        assert anabranch.recordings is not None
        log = anabranch.recordings.log
        token = await log.open("step:1:s:p", identity="user:me")
        await log.append("step:1:s:p", token, [Entry(key="begin", revision=1, body=b"{}")])
        async with await anabranch.planner.reader(StreamIdentity(user="me"), "s", "p", 0) as reader:
            assert await reader.next(5) is not None
            news = [Entry(key="k", revision=n, body=b"x" * 100, partial=True) for n in range(1, 51)]
            await log.append("step:1:s:p", token, news)
            batch = await reader.next(5)
    assert batch is not None
    assert len(batch.entries) == got


async def test_planner_streaming_off_answers_once_at_the_end() -> None:
    given = {"AI_ENABLE_AGGREGATOR_STREAMING": "false", "AGGREGATOR_LOG_LEVEL": "ERROR"}
    async with running_with(load(given)) as server:
        answer = asyncio.create_task(begin(server, "p"))
        await until(lambda: events(server, "p"))
        assert not answer.done()
        await push(server, "p", payload={"found": 7})
        status, said = await answer
    assert (status, said["status"]) == (200, "success")
    assert said["results"]["notes"]["payload"] == {"found": 7}


@asynccontextmanager
async def running_with(settings: Settings) -> AsyncIterator[Server]:
    from conftest import running  # noqa: PLC0415

    async with running(settings) as server:
        yield server


async def test_planner_timeout_is_for_subagents_without_a_deadline() -> None:
    async with served(PLANNER_TIMEOUT="0.1") as server:
        await begin(server, "p")
        found = await ended(server, "p")
    assert [event["type"] for event in found[-3:]] == ["timeout", "step_completed", "plan_step_completed"]
    assert found[-3]["content"]["payload"] == {"deadline_ms": 100}


@pytest.mark.parametrize("retries", ["0", "1"])
async def test_planner_retries_is_how_often_a_subagent_is_retried(retries: str) -> None:
    asked: list[str] = []

    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(status=503)

    async with HttpServer(refuse) as listener, served(PLANNER_RETRIES=retries, ENDPOINT_ALLOWLIST=LOCAL) as server:
        await begin(server, "p", {"key": "notes", "url": f"{listener.url}/ask", "deadline_ms": 20_000})
        found = await ended(server, "p")
    assert len(asked) == int(retries) + 1
    assert [event["type"] for event in found].count("retry") == int(retries)


async def test_planner_steps_is_how_many_run_at_once() -> None:
    async with served(PLANNER_STEPS="1") as server:
        assert (await begin(server, "one"))[0] == 201
        assert (await begin(server, "two"))[0] == 503
        await push(server, "one")
        assert (await begin(server, "two"))[0] == 201


async def test_planner_subagents_are_the_enabled_ones() -> None:
    async with served(PLANNER_SUBAGENTS="row_selection,other") as server:
        await begin(server, "p", {"key": "voice"}, {"key": "notes"})
        await push(server, "p")
        found = await ended(server, "p")
    assert {event["content"]["stage"] for event in found if event["type"] == "degraded"} == {"voice"}
    assert found[-1]["content"]["status"] == "partial_failure"


async def test_analytics_file_gets_a_line_for_each_event(tmp_path: Path) -> None:
    file = tmp_path / "crumbs.jsonl"
    async with served(ANALYTICS_FILE=str(file)) as server:
        await begin(server, "p")
        await push(server, "p")
        await push(server, "p")
        found = await events(server, "p")
    crumbs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [crumb["sequence"] for crumb in crumbs if crumb["sequence"]] == [event["sequence"] for event in found]
    with pytest.raises(ConfigurationError, match=r"^AGGREGATOR_ANALYTICS_FILE takes a file in a folder that exists\.$"):
        loaded(ANALYTICS_FILE=str(tmp_path / "nowhere" / "crumbs.jsonl"))


async def test_analytics_otlp_sends_events_to_the_collector() -> None:
    async with Collector() as collector:
        async with served(OTLP_ENDPOINT=collector.url, ANALYTICS_OTLP="true") as server:
            await begin(server, "p")
            await push(server, "p")
        await collector.until(lambda: any(path == "/v1/logs" for path, _, _ in collector.requests))
    with pytest.raises(ConfigurationError, match="AGGREGATOR_ANALYTICS_OTLP needs AGGREGATOR_OTLP_ENDPOINT"):
        loaded(ANALYTICS_OTLP="true")
