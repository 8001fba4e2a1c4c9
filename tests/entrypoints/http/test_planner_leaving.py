"""A server that stops: steps that it keeps are followed to their end, and nobody is kept waiting for more."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from support.planner_fixtures import Stream, desk, envelope
from support.server_process import serving

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
async def patience() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


async def test_streams_end_before_the_server_does(tmp_path: Path) -> None:
    variables = {"AGGREGATOR_DRAIN_TIMEOUT": "0.3", "AGGREGATOR_DATA_DIR": str(tmp_path / "data")}
    async with serving(home=tmp_path, variables=variables) as program, aiohttp.ClientSession(program.url) as session:
        steps = "/planner/sessions/s/steps"
        for spec in (envelope("live"), envelope("over", next_step_id="never")):
            async with session.post(steps, json=spec) as response:
                assert response.status == 201, await response.text()
        async with session.post(f"{steps}/over/subagents/lookup/events", json={"status": "success"}) as response:
            assert response.status == 202
        sockets = program.url.replace("http", "ws") + steps
        async with (
            session.get(f"{steps}/live/stream") as followed,
            session.get(f"{steps}/over/stream") as waiting,
            connect(f"{sockets}/live/ws") as socket,
            connect(f"{sockets}/over/ws") as idle,
        ):
            streams = [Stream(followed), Stream(waiting)]
            for stream, count in zip(streams, (2, 7), strict=True):
                await stream.events(count)
            for one in (socket, idle):
                await one.recv()
            await idle.recv()  # its seven events are two messages
            program.send(signal.SIGTERM)
            live, over = [await stream.rest() for stream in streams]
            last = [json.loads(message) async for message in socket][-1]
            with pytest.raises(ConnectionClosedError):
                await idle.recv()
        assert await program.ended() == 0
    assert live[-1].data["events"][-1]["content"]["status"] == "worker_lost"
    assert last["events"][-1]["content"]["status"] == "worker_lost"
    assert over == []
    assert (socket.close_code, idle.close_code) == (1000, 1012)
    assert not [line for line in program.log if line.get("level") == "error"], program.text


async def test_several_workers_without_a_redis_keep_no_steps(tmp_path: Any) -> None:
    async with desk(tmp_path, workers=2) as planner:
        status, refused = await planner.ask("POST", "/planner/sessions/s/steps", envelope("p"))
        assert (status, refused["error"]) == (503, "planner_unavailable")
        assert "AGGREGATOR_REDIS_URL" in refused["message"]
        assert (await planner.ask("GET", "/planner/sessions/s/steps/p/stream"))[0] == 503
