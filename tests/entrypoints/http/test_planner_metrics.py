"""What /metrics says of steps, of their subagents and of those who read along."""

import asyncio
from pathlib import Path

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


async def test_shadow_mode_compares_with_the_old_way_in_the_form_that_it_pushes(tmp_path: Path) -> None:
    rows = {"table": "orders", "rows": [{"id": 7, "total": 12.5}]}
    async with desk(tmp_path) as planner:
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
