"""Every client of a step's stream against a server with scripted faults: each event once, and the same state."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, closing
from typing import Any

import msgspec
import pytest

from anabranch.client import Pace, PlannerClient, PlannerEvent, Reset, StepView
from anabranch.client.planner import Transport
from anabranch.domain.errors import AnabranchError, NotFound, StreamUnavailable, UpstreamError
from support.node_process import Node, Refused
from support.scripted_server import Act, Scripted, event, step

QUICK = {"first": 0.002, "most": 0.05, "patience": 10.0, "heartbeat": 10.0}
STEP = {"sessionId": "s", "planStepId": "p"}
ALL = ("python-sse", "python-ws", "js-sse", "js-ws", "eventsource")
OURS = ALL[:4]
SSE = ("python-sse", "js-sse", "eventsource")
Heard = list[dict[str, Any] | None]

# Where the first wave stands in the stream.
WAVE = b"".join(Scripted(step()).step_frames(0, Act())).index("🌊".encode())

# What happens to the connections, one act each; after the last all is well. None of it may be seen from outside.
FAULTS: dict[str, list[Act]] = {
    "nothing": [],
    "cut before anything": [Act(cut_after=0), Act(cut_after=0)],
    "cut in mid frame": [Act(cut_after=50), Act(cut_after=1300), Act(cut_after=2200)],
    "cut in mid character": [Act(cut_after=WAVE + size) for size in (1, 2, 3)],
    "cut between frames": [Act(frames=2), Act(frames=3)],
    "replayed from the start": [Act(frames=3), Act(replay=True, frames=3), Act(replay=True)],
    "busy": [Act(status=503), Act(frames=2), Act(status=503, retry_after="0"), Act(status=502)],
    "too slow": [Act(frames=2, close_code=1013), Act(frames=2, close_code=1006)],
}
RESETS: dict[str, list[Act]] = {
    "another epoch": [Act(frames=3), Act(epoch=1)],
    "cut after a reset": [Act(frames=3), Act(epoch=1, frames=1), Act(cut_after=1700)],
    "two epochs": [Act(frames=3), Act(epoch=1, frames=3), Act(epoch=3)],
    "an epoch before anything was heard": [Act(frames=0), Act(epoch=1)],
}


def pace(**given: float) -> Pace:
    return Pace(**{f"{name}_s": seconds for name, seconds in {**QUICK, **given}.items()})


def js_pace(**given: float) -> dict[str, float]:
    return {f"{name}Ms": seconds * 1000 for name, seconds in {**QUICK, **given}.items()}


async def python_heard(
    url: str, transport: Transport, *, key: str | None = None, after: int = 0, **given: float
) -> tuple[Heard, Heard]:
    heard: Heard = []
    view = StepView()
    async with PlannerClient(url, key, pace=pace(**given)) as client:
        async for said in client.follow("s", "p", after=after, transport=transport):
            view.apply(said)
            heard.append(None if isinstance(said, Reset) else msgspec.to_builtins(said))
    state = sorted(view.latest.values(), key=lambda event: event.sequence)
    return heard, [msgspec.to_builtins(event) for event in state]


async def heard_by(client: str, node: Node, url: str, **options: Any) -> tuple[Heard, Heard]:
    """What a client heard (None is a reset), and the state that it has in the end."""
    kind, _, transport = client.partition("-")
    async with asyncio.timeout(30):
        if kind == "python":
            return await python_heard(url, "ws" if transport == "ws" else "sse", **options)
        if kind == "eventsource":
            said = await node.run("eventSource", url=f"{url}/planner/sessions/s/steps/p/stream", **options)
        else:
            key, after = options.pop("key", None), options.pop("after", 0)
            asked = {"baseUrl": url, "key": key, "after": after, "pace": js_pace(**options), **STEP}
            said = await node.run("step", transport=transport, **asked)
    return said["heard"], said["state"]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with closing(Node()) as started:
        yield started


@pytest.mark.parametrize("client", ALL)
@pytest.mark.parametrize("fault", FAULTS)
async def test_planner_client_gets_every_event_once_despite_faults(node: Node, client: str, fault: str) -> None:
    events = step()
    async with Scripted(events, FAULTS[fault]) as server:
        heard, state = await heard_by(client, node, server.url)
        assert server.acts == []
    assert heard == events
    assert state == [events[0], *events[-2:]]


@pytest.mark.parametrize("client", ALL)
@pytest.mark.parametrize("fault", RESETS)
async def test_planner_client_starts_over_after_a_reset(node: Node, client: str, fault: str) -> None:
    async with Scripted(step(), RESETS[fault]) as server:
        heard, state = await heard_by(client, node, server.url)
        events = server.events
        assert server.acts == []
    resets = [place for place, said in enumerate(heard) if said is None]
    assert bool(resets) == (fault != "an epoch before anything was heard")
    assert heard[resets[-1] + 1 if resets else 0 :] == events
    assert state == [events[0], *events[-2:]]


@pytest.mark.parametrize("client", ALL)
async def test_planner_client_reconnects_with_its_cursor(node: Node, client: str) -> None:
    async with Scripted(step(), [Act(frames=2), Act(status=503), Act(frames=3)]) as server:
        await heard_by(client, node, server.url, key="k-1")
        cursors = server.cursors
        assert cursors[:3] == [0, 5, 5]
        if client != "js-ws":  # a browser's WebSocket cannot send the header
            assert {asked.authorization for asked in server.asked} == {"Bearer k-1"}


@pytest.mark.parametrize("client", ALL)
async def test_planner_client_cut_off_after_step_completed_reads_on_to_the_end(node: Node, client: str) -> None:
    events = step(6)
    events[4] = event(5, "step_completed", status="success", next_step_id=None)
    async with Scripted(events, [Act(frames=2)]) as server:
        heard, _ = await heard_by(client, node, server.url)
        assert server.cursors[:2] == [0, 5]
    assert heard == events


@pytest.mark.parametrize("client", OURS)
async def test_missing_heartbeats_count_as_a_lost_connection(node: Node, client: str) -> None:
    events = step()
    async with Scripted(events, [Act(frames=2, hang=True), Act(frames=0, hang=True)]) as server:
        heard, _ = await heard_by(client, node, server.url, heartbeat=0.04)
        assert server.acts == []
    assert heard == events


@pytest.mark.parametrize("client", OURS)
async def test_planner_client_can_start_after_any_cursor(node: Node, client: str) -> None:
    events = step()
    async with Scripted(events) as server:
        assert (await heard_by(client, node, server.url, after=7))[0] == events[7:]
        assert (await heard_by(client, node, server.url, after=12))[0] == []


async def test_an_event_source_stops_at_204(node: Node) -> None:
    """It reconnects after the end with the last id, and gets 204."""
    async with Scripted(step(), [Act(frames=2)]) as server:
        said = await node.run("eventSource", url=f"{server.url}/planner/sessions/s/steps/p/stream")
        assert server.cursors == [0, 5, 12]
    assert said["end"] == {"sequence": 12, "opened": 1}


@pytest.mark.parametrize("client", OURS)
@pytest.mark.parametrize("status", [401, 404, 409, 422])
async def test_planner_client_raises_errors_that_no_retry_can_help(node: Node, client: str, status: int) -> None:
    async with Scripted(step(), [Act(status=status)] * 4) as server:
        with pytest.raises((AnabranchError, Refused)) as caught:
            await heard_by(client, node, server.url, key="secret-key")
        # Node's WebSocket itself asks a second time when it gets a 401.
        assert len(server.asked) == (2 if (client, status) == ("js-ws", 401) else 1)
    assert "secret-key" not in str(caught.value)
    codes = {401: "unauthorized", 404: "not_found", 409: "conflict", 422: "invalid_request"}
    if isinstance(caught.value, AnabranchError):
        assert caught.value.code == codes[status]
    else:
        assert isinstance(caught.value, Refused)
        assert caught.value.status == status


@pytest.mark.parametrize("client", OURS)
async def test_planner_client_gives_up_after_its_patience(node: Node, client: str) -> None:
    async with Scripted(step(), [Act(status=503)] * 100) as server:
        with pytest.raises((StreamUnavailable, Refused), match="too long"):
            await heard_by(client, node, server.url, patience=0.2)
        assert 1 < len(server.asked) < 100


@pytest.mark.parametrize("client", OURS)
async def test_planner_client_gives_up_if_retry_after_exceeds_its_patience(node: Node, client: str) -> None:
    async with Scripted(step(), [Act(status=503, retry_after="60")] * 3) as server:
        with pytest.raises((StreamUnavailable, Refused), match="too long"):
            await heard_by(client, node, server.url)
        assert len(server.asked) == 1


async def test_planner_client_honours_retry_after(node: Node) -> None:
    async def waited_s(client: str) -> float:
        async with Scripted(step(), [Act(status=503, retry_after="1")]) as server:
            await heard_by(client, node, server.url)
            return server.asked[1].at - server.asked[0].at

    # Timers may be early by their grain.
    assert min(await asyncio.gather(*map(waited_s, OURS))) >= 0.99


@pytest.mark.parametrize("client", OURS)
async def test_planner_stream_continues_with_the_next_step(node: Node, client: str) -> None:
    first, second = step(6), step(6)
    first[-1] = event(6, "plan_step_completed", status="partial_failure", next_step_id="q")
    second = [{**said, "plan_step_id": "q", "sequence": 6 + said["sequence"]} for said in second]
    events = first + second
    async with Scripted(events, [Act(frames=3), Act(frames=2)]) as server:
        heard, state = await heard_by(client, node, server.url)
    assert heard == events
    assert [said["plan_step_id"] for said in state if said and said["type"] == "plan_step_completed"] == ["p", "q"]


@pytest.mark.parametrize("client", OURS)
@pytest.mark.parametrize("status", ["blocked", "cancelled", "worker_lost"])
async def test_a_cancelled_or_blocked_step_has_no_next_step(node: Node, client: str, status: str) -> None:
    events = [*step(3)[:2], event(3, "plan_step_completed", status=status, next_step_id="q")]
    async with Scripted(events, [Act(hang=True)]) as server:
        assert (await heard_by(client, node, server.url))[0] == events


@pytest.mark.parametrize("client", ["python-sse", "js-sse"])
async def test_planner_stream_ends_if_the_next_step_never_starts(node: Node, client: str) -> None:
    """The step was forgotten while its next one was waited for."""
    events = [*step(3)[:2], event(3, "plan_step_completed", status="success", next_step_id="q")]
    async with Scripted(events, [Act(), Act(status=404)]) as server:
        assert (await heard_by(client, node, server.url))[0] == events


async def test_closing_the_planner_client_closes_its_connections(node: Node) -> None:
    async with Scripted(step(), [Act(frames=2, hang=True)] * 2) as server, asyncio.timeout(10):
        async with PlannerClient(server.url, pace=pace()) as client, aclosing(client.follow("s", "p")) as events:
            async for said in events:
                assert isinstance(said, PlannerEvent)
                break
        said = await node.run("step", baseUrl=server.url, **STEP, pace=js_pace(), abortAfter=3)
        assert said["end"] == {"sequence": 3, "aborted": True}
        while server.connections:  # noqa: ASYNC110 (the server does not announce it)
            await asyncio.sleep(0.01)


async def test_an_exception_in_a_callback_is_not_retried(node: Node) -> None:
    async with Scripted(step()) as server:
        with pytest.raises(Refused, match="own mistake"):
            await node.run("step", baseUrl=server.url, **STEP, pace=js_pace(), throwAfter=3)
        assert len(server.asked) == 1


async def test_repeatable_requests_are_retried_until_they_succeed() -> None:
    async def begin(client: PlannerClient) -> bool:
        return (await client.begin({"session_id": "s", "plan_step_id": "p"})).created

    async def push(client: PlannerClient) -> bool:
        return (await client.push("s", "p", "voice", "partial", revision=1)).accepted

    async def cancel(client: PlannerClient) -> bool:
        return await client.cancel("s", "p") == "cancelled"

    for call in (begin, push, cancel):
        acts = [Act(status=503, retry_after="0"), Act(status=502)]
        async with Scripted(step(), acts) as server, PlannerClient(server.url, pace=pace()) as client:
            assert await call(client)
            assert len(server.asked) == 3


async def test_requests_that_are_not_repeatable_are_sent_once() -> None:
    async with Scripted(step(), [Act(status=503)] * 2) as server, PlannerClient(server.url, pace=pace()) as client:
        with pytest.raises(StreamUnavailable, match="As the script says"):
            await client.progress("s", "p", {"done": 1})
        with pytest.raises(StreamUnavailable, match="As the script says"):
            await client.push("s", "p", "voice", "partial")
        assert len(server.asked) == 2


async def test_a_reply_that_is_not_a_stream_is_an_error() -> None:
    broken = [{**event(1), "content": "nonsense"}]
    async with Scripted(broken) as server, PlannerClient(server.url, pace=pace()) as client:
        with pytest.raises(UpstreamError, match="cannot be decoded"):
            _ = [said async for said in client.follow("s", "p")]
        assert len(server.asked) == 1


def test_step_view_keeps_the_highest_revision_in_any_order() -> None:
    events = msgspec.convert(step(), list[PlannerEvent])
    view, other = StepView(events), StepView([*reversed(events), *events])
    assert view.latest == other.latest
    assert view.results["doc"].content.revision == 11
    assert (view.status("p"), view.status("q"), view.sequence) == ("success", None, 12)
    assert not view.apply(events[3])
    assert view.apply(Reset(epoch=1))
    assert (view.status("p"), view.sequence) == (None, 0)
    assert StepView(events[:3]).status("p") == "in_progress"


async def test_a_step_deleted_before_its_end_raises_not_found() -> None:
    async with Scripted(step(), [Act(frames=2), Act(status=404)]) as server:
        with pytest.raises(NotFound):
            await python_heard(server.url, "sse")
