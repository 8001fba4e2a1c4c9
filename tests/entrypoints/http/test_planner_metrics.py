"""What /metrics says of steps, of their subagents and of those who read along."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from anabranch.testing.http_server import HttpServer
from support.metrics_scrape import scrape
from support.planner_fixtures import desk


async def test_steps_subagents_and_readers_are_counted(tmp_path: Path) -> None:
    async with desk(tmp_path) as planner:
        await planner.begin("s", "p", {"key": "voice", "deadline_ms": 1}, "action")
        async with planner.stream("s", "p") as stream, planner.stream("s", "p") as other:
            await stream.events(1)
            await other.events(1)
            assert (await scrape(planner.session, planner.url)).value("anabranch_stream_readers") == 2
            await planner.push("s", "p", "action", payload={"action": "refund"})
            await stream.rest()
            await other.rest()
        await planner.push("s", "p", "action", payload={"action": "refund"})
        async with asyncio.timeout(10):
            while (found := await scrape(planner.session, planner.url)).value("anabranch_stream_readers"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert found.value("planner_steps_total", status="partial_failure") == 1
    assert found.value("planner_step_latency_ms_count") == 1
    assert found.value("planner_subagents_total", subagent="voice", status="timeout") == 1
    assert found.value("planner_subagents_total", subagent="action", status="success") == 1
    assert found.value("planner_subagent_latency_ms_count", subagent="action") == 1
    assert found.value("anabranch_stage_latency_ms_count", stage="aggregation.emit") > 1
    assert found.value("anabranch_stage_latency_ms_count", stage="aggregation.wait") == 2


async def test_shadow_mode_compares_with_the_old_way_in_the_form_that_it_pushes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"table": "orders", "rows": [{"id": 7, "total": 12.5}]}
    async with desk(tmp_path, log_level="INFO") as planner:
        await planner.begin("s", "same", "row_selection", shadow=True, legacy_response={"row_selection": rows})
        await planner.push("s", "same", "row_selection", payload=rows)
        await planner.begin("s", "late", "row_selection", shadow=True)
        await planner.push("s", "late", "row_selection", payload=rows)
        other = {"legacy_response": {"row_selection": {**rows, "rows": []}}}
        assert await planner.ask("POST", "/planner/sessions/s/steps/late/progress", other) == (202, {"accepted": True})
        async with asyncio.timeout(10):
            while (found := await scrape(planner.session, planner.url)).value("planner_shadow_total") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert found.values("planner_shadow_total", "equal") == {"true": 1, "false": 1}
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logged = {line["plan_step_id"]: line for line in lines if line["event"] == "planner_shadow"}
    assert (logged["same"]["level"], logged["same"]["equal"], logged["same"]["differences"]) == ("info", True, [])
    assert (logged["late"]["level"], logged["late"]["equal"]) == ("warning", False)
    assert "extra /row_selection/rows/0" in logged["late"]["differences"]


async def test_a_subagent_that_fails_too_often_is_degraded_in_the_next_step_of_its_caller(tmp_path: Path) -> None:
    asked: list[str] = []

    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(status=500)

    async with (
        HttpServer(refuse) as listener,
        desk(
            tmp_path,
            people=("alice", "bob"),
            planner_retries=0,
            breaker_pause=600.0,
            endpoint_allowlist=("127.0.0.1",),
        ) as planner,
    ):
        prices = {"key": "prices", "url": f"{listener.url}/prices"}
        for number in range(10):
            await planner.begin("s", f"p{number}", prices, who="alice")
            async with planner.stream("s", f"p{number}", who="alice") as stream:
                await stream.rest()
        assert len(asked) == 10
        await planner.begin("s", "next", prices, who="alice")
        events = (await planner.events("s", "next", who="alice"))["events"]
        assert len(asked) == 10, "it is not called any more"
        await planner.begin("t", "other", prices, who="bob")
        async with planner.stream("t", "other", who="bob") as stream:
            await stream.rest()
    degraded = next(event["content"] for event in events if event["type"] == "degraded")
    assert "circuit breaker is open" in degraded["payload"]["reason"]
    assert events[-1]["content"]["status"] == "failed"
    assert len(asked) == 11, "another caller's breaker is closed"
