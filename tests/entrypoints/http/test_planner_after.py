"""What is sent to a step after its end, and what strangers hear: recorded, not delivered, and nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from anabranch.app.event_streams import Timing
from anabranch.eventlog.redis.store import RedisLogTiming
from anabranch.planner.services import PlannerTiming
from support.planner_fixtures import Desk, desk, envelope
from support.valkey_server import Valkey, running_valkey

PATIENCE_S = 30.0


NOTHING_TO_RESTORE = Timing(log=RedisLogTiming(restore_s=0.0))


@pytest.fixture(autouse=True)
async def patience() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


@asynccontextmanager
async def orchestrator(*replies: int | None) -> AsyncIterator[str]:
    """Where a callback goes: one reply after the other, None for one that never comes."""
    left, over = list(replies), asyncio.Event()

    async def reply(_: web.Request) -> web.Response:
        status = left.pop(0)
        if status is None:
            await over.wait()
        return web.Response(status=status or 200, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_post("/callback", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/callback"
    finally:
        over.set()
        await runner.cleanup()


def passed_over(file: Path) -> list[dict[str, Any]]:
    """The breadcrumbs of what was not delivered."""
    return [crumb for crumb in map(json.loads, lines(file)) if crumb["ignored"] is not None]


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def recorded(file: Path, count: int) -> list[dict[str, Any]]:
    while len(crumbs := passed_over(file)) < count:  # noqa: ASYNC110  a thread writes them
        await asyncio.sleep(0.01)
    return crumbs


async def called_back(file: Path) -> dict[str, Any]:
    while True:
        for crumb in map(json.loads, lines(file)):
            if crumb["type"] == "callback":
                return dict(crumb)
        await asyncio.sleep(0.01)


async def measured(planner: Desk, line: str) -> None:
    while True:
        async with planner.session.get(f"{planner.url}/metrics") as response:
            if line in (await response.text()).splitlines():
                return
        await asyncio.sleep(0.01)


async def send_everything(planner: Desk, session: str) -> None:
    step = f"/planner/sessions/{session}/steps/p"
    replies = [
        await planner.push(session, "p", "lookup", revision=7, attempt=3),
        await planner.ask("POST", f"{step}/progress", {"status": "thinking"}),
        await planner.ask("POST", f"{step}/safety", {"decision": "who knows"}),
        await planner.ask("DELETE", step),
    ]
    for status, body in replies:
        assert (status, body["accepted"], body["reason"]) == (200, False, "ended")


async def test_what_comes_after_the_end_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "crumbs.jsonl"
    async with desk(tmp_path / "data", analytics_file=str(file)) as planner:
        await planner.begin("s", "p")
        await planner.push("s", "p", "lookup")
        await send_everything(planner, "s")
        crumbs = await recorded(file, 4)
    assert {(crumb["session_id"], crumb["plan_step_id"], crumb["ignored"]) for crumb in crumbs} == {("s", "p", "ended")}
    told = [(crumb["type"], crumb["subagent"], crumb["status"], crumb["retry_count"]) for crumb in crumbs]
    assert told == [
        ("subagent_result", "lookup", "success", 2),
        ("progress", None, "thinking", 0),
        ("safety", None, "block", 0),
        ("plan_step_completed", None, "cancelled", 0),
    ]


async def test_another_worker_passes_the_old_ways_answer_on(tmp_path: Path, valkey: Valkey) -> None:
    file = tmp_path / "crumbs.jsonl"
    given: dict[str, Any] = {"redis_url": valkey.url, "metrics_public": True, "timing": NOTHING_TO_RESTORE}
    async with (
        desk(tmp_path / "one", **given) as one,
        desk(tmp_path / "two", analytics_file=str(file), **given) as other,
    ):
        await one.begin("s", "p", shadow=True)
        await one.push("s", "p", "lookup", payload={"n": 1})
        legacy = {"legacy_response": {"lookup": {"n": 1}}}
        path = "/planner/sessions/s/steps/p/progress"
        assert (await other.ask("POST", path, legacy))[0] == 202
        await measured(one, 'planner_shadow_total{equal="true"} 1.0')
        await send_everything(other, "s")
        assert len(await recorded(file, 4)) == 4


async def test_a_retry_through_another_worker_is_taken_and_a_repeated_push_is_not(
    tmp_path: Path, valkey: Valkey
) -> None:
    given: dict[str, Any] = {"redis_url": valkey.url, "timing": NOTHING_TO_RESTORE}
    async with desk(tmp_path / "one", **given) as one, desk(tmp_path / "two", **given) as other:
        await one.begin("s", "p", "lookup", "rows")
        for planner in (one, other):
            assert (await planner.push("s", "p", "lookup", status="error", revision=1))[0] == (
                202 if planner is one else 200
            )
        status, taken = await other.push("s", "p", "lookup", revision=1, payload={"n": 2})
        assert (status, taken["accepted"]) == (202, True)
        status, again = await one.push("s", "p", "lookup", revision=1, payload={"n": 2})
        assert (status, again["reason"]) == (200, "duplicate")
        assert (await other.push("s", "p", "rows"))[0] == 202
        events = [await planner.events("s", "p") for planner in (one, other)]
    assert events[0] == events[1]
    end = events[0]["events"][-1]["content"]
    assert (end["status"], end["payload"]["subagents"]["lookup"]["attempts"]) == ("success", 2)


async def test_while_redis_is_gone_others_learn_nothing_either(tmp_path: Path, valkey: Valkey) -> None:
    async with desk(
        tmp_path / "data", people=("alice", "bob"), redis_url=valkey.url, timing=NOTHING_TO_RESTORE
    ) as planner:
        await planner.begin("s", "p", who="alice")
        valkey.kill()
        step = "/planner/sessions/s/steps/p/events"
        theirs, none = [await planner.ask("GET", path, who="bob") for path in (step, step.replace("/p/", "/q/"))]
        assert theirs == none
        assert theirs[0] == 503
        assert (await planner.ask("GET", step, who="alice"))[0] == 200
        status, refused = await planner.ask("POST", "/planner/sessions/t/steps", envelope("p"), "alice")
        assert (status, "AGGREGATOR_REDIS_URL" in refused["message"]) == (503, True)


async def test_a_refused_request_creates_no_session(tmp_path: Path) -> None:
    async with desk(tmp_path / "data", people=("alice", "bob"), planner_steps=1) as planner:
        await planner.begin("s", "p", who="alice")
        status, refused = await planner.ask("POST", "/planner/sessions/t/steps", envelope("p"), "alice")
        assert (status, refused["error"]) == (503, "overloaded")
        await planner.ask("DELETE", "/planner/sessions/s/steps/p", who="alice")
        await planner.begin("t", "p", who="bob")


async def test_a_refused_request_creates_no_stream(tmp_path: Path, valkey: Valkey) -> None:
    async with desk(tmp_path / "data", planner_steps=2, redis_url=valkey.url, timing=NOTHING_TO_RESTORE) as planner:
        path = "/planner/sessions/s/steps"
        steps = [str(number) for number in range(8)]
        replies = await asyncio.gather(*(planner.ask("POST", path, envelope(step)) for step in steps))
        assert sorted(status for status, _ in replies) == [201] * 2 + [503] * 6
        for step, (status, _) in zip(steps, replies, strict=True):
            if status == 201:
                await planner.ask("DELETE", f"{path}/{step}")
        later = next(step for step, (status, _) in zip(steps, replies, strict=True) if status == 503)
        assert (await planner.ask("GET", f"{path}/{later}/events"))[0] == 404
        await planner.begin("s", later)
        await planner.ask("DELETE", f"{path}/{later}")


async def test_a_callback_is_tried_again_until_it_was_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timing = Timing(planner=PlannerTiming(first_callback_s=0.01), callback_timeout_s=0.1)
    file = tmp_path / "crumbs.jsonl"
    given: dict[str, Any] = {"analytics_file": str(file), "endpoint_allowlist": ("127.0.0.1",)}
    async with orchestrator(None, 302, 204) as url, desk(tmp_path / "data", timing=timing, **given) as planner:
        await planner.begin("s", "p", callback_url=url)
        await planner.ask("POST", "/planner/sessions/s/steps/p/safety", {"decision": "block"})
        crumb = await called_back(file)
    assert (crumb["status"], crumb["retry_count"]) == ("success", 2)
    assert "Traceback" not in capsys.readouterr().err
