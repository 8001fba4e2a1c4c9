"""`anabranch serve` as a process: it starts, answers, drains, and ends as its operator expects."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from anabranch.knowledge.records.database import new_id
from anabranch.testing import Space
from conftest import parse_sse, ref
from support.server_process import PATIENCE_S, READY, Program, serving, started

PROMPT = "What is an anabranch?"
STREAMING = {"AGGREGATOR_MODEL_STREAMING_ENABLED": "true"}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as opened:
        yield opened


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def body(space: Space, model: str = "scribe") -> dict[str, Any]:
    return {"prompt": PROMPT, "model": ref(space, model), "data_sources": [ref(space, "docs")]}


async def refused(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until nobody listens there any more; until then every answer must say that the server drains."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with session.get(f"{url}/ready", headers={"Connection": "close"}) as response:
                    assert response.status in (200, 503)
            except aiohttp.ClientConnectorError:
                return
            except aiohttp.ClientError:
                continue


async def said(program: Program) -> str:
    """The one sentence before an end with status 2."""
    assert await program.ended() == 2
    assert len(program.lines) == 1, program.text
    assert program.text.startswith("anabranch: ")
    return program.text


async def gone(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- starting


async def test_host_and_port_from_the_environment(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    port = free_port()
    variables = {"AGGREGATOR_HOST": "127.0.0.2", "AGGREGATOR_PORT": str(port)}
    async with started(home=tmp_path, variables=variables) as program:
        await program.logged(READY)
        await program.listens()
        async with session.get(f"http://127.0.0.2:{port}/health") as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://127.0.0.1:{port}/health")


async def test_options_win_over_the_environment_and_a_misspelt_variable_is_warned_about(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    variables = {"AGGREGATOR_HOST": "127.0.0.2", "AGGREGATOR_PORT": str(free_port()), "AGGREGATOR_PROT": "1"}
    async with serving(home=tmp_path, variables=variables) as program:
        assert program.host == "127.0.0.1"
        assert str(program.port) != variables["AGGREGATOR_PORT"]
        [warned] = [line for line in program.log if line["event"] == "unknown_setting"]
        assert (warned["variable"], warned["hint"]) == ("AGGREGATOR_PROT", "did you mean AGGREGATOR_PORT?")
        async with session.get(f"{program.url}/health") as response:
            assert response.status == 200
            assert (await response.json())["status"] == "healthy"


async def test_the_config_option_reaches_the_workers_and_without_redis_each_has_its_own_limits(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    (tmp_path / "mine.yaml").write_text("settings: {debug: true}", encoding="utf-8")
    async with serving("--config", "mine.yaml", home=tmp_path, workers=2) as program:
        assert [line["workers"] for line in program.log if line["event"] == "limits_not_shared"] == [2]
        async with session.get(f"{program.url}/docs") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("public", "level", "to"),
    [("false", "info", "the operator, keys and tokens"), ("true", "warning", "everybody")],
)
async def test_the_start_says_who_may_reach_private_addresses(tmp_path: Path, public: str, level: str, to: str) -> None:
    variables = {"AGGREGATOR_ENDPOINT_ALLOWLIST_PUBLIC": public, "AGGREGATOR_ENDPOINT_ALLOWLIST": "10.0.0.0/8"}
    async with serving(home=tmp_path, variables=variables) as program:
        [said] = [line for line in program.log if line["event"] == "private_addresses_allowed"]
    assert (said["level"], said["to"], said["addresses"]) == (level, to, ["10.0.0.0/8"])


async def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with started("--host", "127.0.0.1", "--port", str(port), home=tmp_path) as program:
            sentence = await said(program)
    assert f"127.0.0.1:{port}" in sentence
    assert "already in use" in sentence


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        ([], {"AGGREGATOR_TOTAL_TIMEOUT": "soon"}, "AGGREGATOR_TOTAL_TIMEOUT"),
        (["--workers", "2"], {"AGGREGATOR_MAX_TOP_K": "-1"}, "AGGREGATOR_MAX_TOP_K"),
        (["--port", "65536"], {}, "65535"),
        (["--host", "not a host"], {}, "not a host"),
        (["--config", "missing.yaml"], {}, "missing.yaml"),
        ([], {"AGGREGATOR_RERANKER_PATH": "/missing/model.onnx"}, "AGGREGATOR_RERANKER_PATH takes an ONNX file"),
        ([], {"AGGREGATOR_DATA_DIR": "/dev/null/data"}, "AGGREGATOR_DATA_DIR"),
        ([], {"AGGREGATOR_REDIS_URL": "redis://host:nothing"}, "AGGREGATOR_REDIS_URL"),
        (
            ["--workers", "2"],
            {"AGGREGATOR_OTLP_ENDPOINT": "http://127.0.0.1:4318", "AGGREGATOR_OTLP_HEADERS": "x"},
            "AGGREGATOR_OTLP_HEADERS",
        ),
    ],
)
async def test_a_wrong_setting_is_one_sentence(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], named: str
) -> None:
    async with started(*arguments, home=tmp_path, variables=variables) as program:
        assert named in await said(program)


# --- ending


@pytest.mark.parametrize("workers", [1, 2])
async def test_sigterm_lets_a_running_stream_finish(
    tmp_path: Path, space: Space, session: aiohttp.ClientSession, workers: int
) -> None:
    words = "word " * 20
    space.model("talker", reply=words, chunk_delay_s=0.05)
    async with serving(home=tmp_path, workers=workers, variables=STREAMING) as program:
        async with session.post(f"{program.url}/api/v1/chat/stream", json=body(space, "talker")) as response:
            begun = await response.content.readuntil(b"event: token")
            program.send(signal.SIGTERM)
            await refused(session, program.url)
            assert not space.requests[-1].finished, "the stream must still be running when nobody else gets in"
            events = parse_sse((begun + await response.content.read()).decode())
        assert events[-1].name == "done"
        assert "".join(event.data["content"] for event in events if event.name == "token") == words
        assert await program.ended() == 0
    assert "Traceback" not in program.text
    completed = [line["status"] for line in program.log if line["event"] == "chat_request_completed"]
    assert completed == ["success"], "what happened last must not be missing from the log"


async def stops_being_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until every worker says that it is stopping."""
    async with asyncio.timeout(PATIENCE_S):
        stopping = 0
        while stopping < 10:
            async with session.get(f"{url}/ready", headers={"Connection": "close"}) as response:
                stopping = stopping + 1 if response.status == 503 else 0
                assert (await response.json())["status"] == ("draining" if response.status == 503 else "ready")


@pytest.mark.parametrize(("workers", "to_all"), [(1, False), pytest.param(2, False, marks=pytest.mark.soak), (2, True)])
async def test_during_the_shutdown_delay_ready_is_503_and_questions_are_answered(
    tmp_path: Path, space: Space, session: aiohttp.ClientSession, workers: int, to_all: bool
) -> None:
    """A service manager sends the signal to every process; a container, to the first only."""
    variables = {"AGGREGATOR_SHUTDOWN_DELAY": "2"}
    async with serving(home=tmp_path, workers=workers, variables=variables) as program:
        os.killpg(program.pid, signal.SIGTERM) if to_all else program.send(signal.SIGTERM)
        await stops_being_ready(session, program.url)
        for _ in range(4):
            headers = {"Connection": "close"}
            async with session.post(f"{program.url}/api/v1/chat", json=body(space), headers=headers) as response:
                assert response.status == 200
        await refused(session, program.url)
        assert await program.ended() == 0
    assert "Traceback" not in program.text
    assert program.log[-1]["event"] == "server_stopped"


@pytest.mark.parametrize(("workers", "second"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
async def test_a_second_signal_skips_the_shutdown_delay(
    tmp_path: Path, session: aiohttp.ClientSession, workers: int, second: signal.Signals
) -> None:
    async with serving(home=tmp_path, workers=workers, variables={"AGGREGATOR_SHUTDOWN_DELAY": "600"}) as program:
        program.send(signal.SIGTERM)
        await stops_being_ready(session, program.url)
        await ends_at_once_and_well(program, second)


@pytest.mark.parametrize(("workers", "to_all"), [(1, False), (2, True)])
async def test_ctrl_c_does_not_wait_for_the_shutdown_delay(tmp_path: Path, workers: int, to_all: bool) -> None:
    async with serving(home=tmp_path, workers=workers, variables={"AGGREGATOR_SHUTDOWN_DELAY": "600"}) as program:
        os.killpg(program.pid, signal.SIGINT) if to_all else program.send(signal.SIGINT)
        assert await program.ended(within_s=5) == 0
    assert "Traceback" not in program.text
    assert program.log[-1]["event"] == "server_stopped"


async def test_a_stream_past_the_drain_time_ends_in_an_error_that_says_why(
    tmp_path: Path, space: Space, session: aiohttp.ClientSession
) -> None:
    space.model("endless", reply="word " * 10_000, chunk_delay_s=0.01)
    variables = {**STREAMING, "AGGREGATOR_DRAIN_TIMEOUT": "0.3"}
    async with serving(home=tmp_path, variables=variables) as program:
        async with session.post(f"{program.url}/api/v1/chat/stream", json=body(space, "endless")) as response:
            begun = await response.content.readuntil(b"event: token")
            program.send(signal.SIGTERM)
            events = parse_sse((begun + await response.content.read()).decode())
        assert events[-1].name == "error"
        assert events[-1].data["error"] == "shutting_down"
        assert "shutting down" in events[-1].data["message"]
        assert await program.ended(within_s=5) == 0
    await space.wait_for(lambda: space.requests[-1].disconnected)


async def test_a_waiting_answer_past_the_drain_time_is_503(
    tmp_path: Path, space: Space, session: aiohttp.ClientSession
) -> None:
    async with serving(home=tmp_path, variables={"AGGREGATOR_DRAIN_TIMEOUT": "0.3"}) as program:
        asked = asyncio.create_task(session.post(f"{program.url}/api/v1/chat", json=body(space, "hang")).__aenter__())
        await space.wait_for(lambda: any(request.slug == "hang" for request in space.requests))
        program.send(signal.SIGTERM)
        response = await asked
        assert (response.status, (await response.json())["error"]) == (503, "shutting_down")
        assert response.headers["Retry-After"]
        assert await program.ended(within_s=5) == 0


async def test_feedback_that_waits_for_its_question_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The body comes once the server drains, so that the wait would begin only then."""
    head = b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n"
    async with serving(home=tmp_path) as program:
        reader, writer = await asyncio.open_connection(program.host, program.port)
        writer.write(head)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        program.send(signal.SIGTERM)
        await program.logged("Shutting down")
        writer.write(json.dumps({"query_id": new_id(), "rating": "thumbs_up"}).encode().ljust(100))
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in reply
        assert await program.ended(within_s=5) == 0
        writer.close()


async def ends_at_once_and_well(program: Program, number: signal.Signals) -> None:
    """As a server that has nothing to do must."""
    program.send(number)
    code = await program.ended(within_s=5)
    assert "Traceback" not in program.text
    assert "Aborted" not in program.text
    assert program.log[-1]["event"] == "server_stopped"
    assert code == 0


async def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    async with serving(home=tmp_path, workers=2) as program:
        family = psutil.Process(program.pid).children(recursive=True)
        assert len(family) >= 2
        os.kill(program.pid, signal.SIGKILL)
        _, left = await asyncio.to_thread(psutil.wait_procs, family, 15)
    assert left == []


async def test_a_worker_that_was_killed_is_logged_with_its_signal(tmp_path: Path) -> None:
    async with serving(home=tmp_path, workers=2) as program:
        first = int(re.findall(r"Started server process \[(\d+)\]", program.text)[0])
        os.kill(first, signal.SIGKILL)
        await program.logged("worker_died")
        await program.until(lambda: program.text.count(READY) >= 3)
        (line,) = (line for line in program.log if line["event"] == "worker_died")
        await ends_at_once_and_well(program, signal.SIGTERM)
    assert (line["level"], line["pid"], line["signal"]) == ("warning", first, "SIGKILL")


# With two workers and SIGTERM: test_two_workers_answer_and_leave_no_process.
@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGINT)])
async def test_an_idle_server_ends_at_once_and_well(tmp_path: Path, workers: int, number: signal.Signals) -> None:
    async with serving(home=tmp_path, workers=workers) as program:
        await ends_at_once_and_well(program, number)


async def test_ctrl_c_in_a_terminal_lets_a_stream_finish(
    tmp_path: Path, space: Space, session: aiohttp.ClientSession
) -> None:
    """A terminal sends the signal to every process of the group at once."""
    space.model("talker", reply="word " * 10, chunk_delay_s=0.05)
    async with serving(home=tmp_path, workers=2, variables=STREAMING) as program:
        async with session.post(f"{program.url}/api/v1/chat/stream", json=body(space, "talker")) as response:
            begun = await response.content.readuntil(b"event: token")
            os.killpg(program.pid, signal.SIGINT)
            events = parse_sse((begun + await response.content.read()).decode())
        assert events[-1].name == "done"
        await program.ended()
    assert "Traceback" not in program.text


async def test_two_workers_answer_and_leave_no_process(
    tmp_path: Path, space: Space, session: aiohttp.ClientSession
) -> None:
    async with serving(home=tmp_path, workers=2) as program:
        family = program.family()
        assert len(family) >= 3
        for _ in range(4):
            async with session.post(f"{program.url}/api/v1/chat", json=body(space)) as response:
                assert response.status == 200
        await ends_at_once_and_well(program, signal.SIGTERM)
        await gone(family)
    completed = [line for line in program.log if line["event"] == "chat_request_completed"]
    assert len(completed) == 4
