"""The reference clients and npm's EventSource against a real server, through a network that cuts connections. Node goes
through it even where nothing is cut: it leaves connections behind that a server which stops at once does not expect."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.app.event_streams import Timing
from anabranch.client import AnswerClient, Pace, PlannerClient, PlannerEvent, Reset, StepView
from anabranch.client.planner import Transport
from anabranch.domain.errors import NotFound
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.testing import Space
from conftest import Server, ref
from support.cutting_proxy import CuttingProxy
from support.node_process import Node, Refused

Serve = Callable[..., AbstractAsyncContextManager[Server]]
State = list[dict[str, Any]]
QUICK = Pace(first_s=0.01, most_s=0.1, patience_s=20.0, heartbeat_s=5.0)
JS_QUICK = {"firstMs": 10, "mostMs": 100, "patienceMs": 20_000, "heartbeatMs": 5_000}
STEP = {"sessionId": "s/1", "planStepId": "p 1"}
STREAM = "/planner/sessions/s%2F1/steps/p%201/stream"
ENVELOPE = {
    "session_id": "s/1",
    "plan_step_id": "p 1",
    "expected_subagents": [{"key": key, "result_key": f"{key}-result"} for key in ("documentation", "voice")],
}


# The server asks clients to come back after one to three seconds; here, a hundred times as soon.
SOON = Timing(retry_ms=(10, 30))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with closing(Node()) as started:
        yield started


@pytest.fixture
async def started(serve: Serve) -> AsyncIterator[Server]:
    async with serve(timing=SOON) as running:
        yield running


async def state_of(url: str, transport: Transport) -> State:
    view = StepView()
    async with PlannerClient(url, pace=QUICK) as client:
        async for event in client.follow("s/1", "p 1", transport=transport):
            view.apply(event)
    return [msgspec.to_builtins(event) for event in sorted(view.latest.values(), key=lambda event: event.sequence)]


async def replayed(client: PlannerClient) -> tuple[list[dict[str, Any]], State]:
    """All of a step's events, and their state, from the replay endpoint."""
    events: list[PlannerEvent] = []
    after, more = 0, True
    while more:
        page = await client.events("s/1", "p 1", after=after, limit=7)
        events += page.events
        after, more = page.next_cursor, page.has_more
    latest = sorted(StepView(events).latest.values(), key=lambda event: event.sequence)
    return msgspec.to_builtins(events), msgspec.to_builtins(latest)


async def test_every_client_ends_with_the_state_of_the_replay(started: Server, node: Node) -> None:
    async with (
        asyncio.timeout(40),
        CuttingProxy(started.url, cut_after=[700, 1100, 1500, 800, 2500, 3000, 1900, 900]) as proxy,
        PlannerClient(started.url) as planner,
    ):
        begun = await planner.begin(ENVELOPE)
        assert (begun.created, begun.status) == (True, "in_progress")
        assert not (await planner.begin(ENVELOPE)).created
        js = {"baseUrl": proxy.url, **STEP, "pace": JS_QUICK}
        followers = [
            asyncio.create_task(state_of(proxy.url, "sse")),
            asyncio.create_task(state_of(proxy.url, "ws")),
            asyncio.create_task(node.run("step", **js)),
            asyncio.create_task(node.run("step", **js, transport="ws")),
            asyncio.create_task(node.run("eventSource", url=proxy.url + STREAM)),
        ]
        await proxy.wait_for_connection()
        for revision in range(1, 31):
            pushed = await planner.push("s/1", "p 1", "voice", "partial", {"text": "ü🌊" * 20}, revision=revision)
            assert pushed.accepted
            if revision % 10 == 0:
                proxy.cut()
            if revision == 15:
                proxy.stall()
            if revision == 25:
                proxy.resume()
        again = await planner.push("s/1", "p 1", "voice", "partial", {}, revision=3)
        assert (again.accepted, again.reason) == (False, "superseded")
        await planner.progress("s/1", "p 1", {"done": 0.5}, stage="half")
        assert await planner.safety("s/1", "p 1", "allow") == "allow"
        await planner.push("s/1", "p 1", "voice", "success", {"transcript": "Hello."}, revision=31)
        proxy.cut()
        finished = [{"status": "partial", "payload": {}}, {"status": "success", "payload": {"answer": "42"}}]
        assert all(said.accepted for said in await planner.push_all("s/1", "p 1", "documentation", finished))
        python_sse, python_ws, js_sse, js_ws, event_source = await asyncio.gather(*followers)
        events, state = await replayed(planner)
    assert state[-1]["type"] == "plan_step_completed"
    assert state[-1]["content"]["status"] == "success"
    assert python_sse == state
    assert python_ws == state
    assert [said["state"] for said in (js_sse, js_ws, event_source)] == [state] * 3
    assert proxy.cuts >= 5
    known = {event["sequence"]: event for event in events}
    for said in (js_sse, js_ws, event_source):
        sequences = [event["sequence"] for event in said["heard"]]
        assert sequences == sorted(set(sequences))
        assert all(known[event["sequence"]] == event for event in said["heard"])


async def test_clients_follow_a_cancelled_step_and_the_next_one(started: Server, node: Node) -> None:
    async with (
        asyncio.timeout(30),
        CuttingProxy(started.url) as proxy,
        PlannerClient(started.url, pace=QUICK) as planner,
    ):
        await planner.begin({**ENVELOPE, "next_step_id": "p 2"})
        js = asyncio.create_task(node.run("step", baseUrl=proxy.url, **STEP, pace=JS_QUICK))
        await planner.push("s/1", "p 1", "voice", "success", {"transcript": "a"})
        await planner.push("s/1", "p 1", "documentation", "error", {"error": "b"})
        await planner.begin({**ENVELOPE, "plan_step_id": "p 2"})
        assert await planner.cancel("s/1", "p 2") == "cancelled"
        events = [event async for event in planner.follow("s/1", "p 1")]
        heard = (await js)["heard"]
    ends = [event for event in events if not isinstance(event, Reset) and event.ends_step]
    assert [(end.plan_step_id, end.content.status) for end in ends] == [
        ("p 1", "partial_failure"),
        ("p 2", "cancelled"),
    ]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert heard == msgspec.to_builtins(events)


def secret(folder: Path, user: str) -> str:
    database = SqliteDatabase.open(folder)
    try:
        return database.writing(lambda db: keys.create(db, user=user))[1]
    finally:
        database.close()


async def test_every_client_sends_its_api_key(serve: Serve, node: Node, tmp_path: Path) -> None:
    """Over WebSocket, too; and what belongs to another is not there."""
    alice, bob = secret(tmp_path / "data", "alice"), secret(tmp_path / "data", "bob")
    async with asyncio.timeout(30), serve(auth="api_key", timing=SOON) as server, CuttingProxy(server.url) as proxy:
        async with PlannerClient(server.url, alice, pace=QUICK) as planner, PlannerClient(server.url, bob) as other:
            await planner.begin(ENVELOPE)
            assert await planner.cancel("s/1", "p 1") == "cancelled"
            events, _ = await replayed(planner)
            for transport in ("sse", "ws"):
                follow = {"baseUrl": proxy.url, **STEP, "pace": JS_QUICK, "transport": transport}
                heard = [event async for event in planner.follow("s/1", "p 1", transport=transport)]
                assert msgspec.to_builtins(heard) == events
                assert (await node.run("step", **follow, key=alice))["heard"] == events
                with pytest.raises(NotFound):
                    _ = [event async for event in other.follow("s/1", "p 1", transport=transport)]
                with pytest.raises(Refused) as caught:
                    await node.run("step", **follow, key=bob)
                assert (caught.value.status, caught.value.code) == (404, "not_found")
                # A client that has every event gets 204.
                after = heard[-1].sequence
                assert [event async for event in planner.follow("s/1", "p 1", after=after, transport=transport)] == []
                assert (await node.run("step", **follow, key=alice, after=after))["heard"] == []
        assert (await node.run("eventSource", url=proxy.url + STREAM, key=alice))["heard"] == events


async def test_a_resumable_answer_survives_lost_connections(started: Server, node: Node, space: Space) -> None:
    question = {
        "prompt": "Why?",
        "user_id": "ada",
        "data_sources": [ref(space, "docs", "alice")],
        "model": ref(space, "scribe", "mia"),
    }
    path = "/api/v1/chat/stream"
    async with (
        asyncio.timeout(30),
        CuttingProxy(started.url, cut_after=[900, 300, 700, 500, 900, 350, 800]) as proxy,
        AnswerClient(proxy.url, pace=QUICK) as answers,
    ):
        python = [frame async for frame in answers.ask_resumable(path, question)]
        js = await node.run("ask", baseUrl=proxy.url, path=path, question=question, pace=JS_QUICK)
        whole = await started.chat(**question)
    assert proxy.cuts >= 4
    for heard in (msgspec.to_builtins(python), js["heard"]):
        assert [frame["id"] for frame in heard] == list(range(1, len(heard) + 1))
        words = "".join(json.loads(frame["data"])["content"] for frame in heard if frame["event"] == "token")
        assert heard[-1]["event"] == "done"
        assert words == whole["response"]
