"""Following steps by server-sent events: from the beginning or a cursor, to the end and into the next step."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from anabranch.domain.eventlog import EPOCH, Page, SequencedEntry
from anabranch.entrypoints.http import planner_wire as views
from anabranch.entrypoints.http.streams import ShutdownEvent, StreamTiming, tail
from support.planner_fixtures import Desk, desk

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("planner-stream")]

SESSIONS = itertools.count()
PATIENCE_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def planner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    async with desk(tmp_path_factory.mktemp("data"), heartbeat_interval=0.1) as opened:
        yield opened


@pytest.fixture
def session() -> str:
    return f"sess-{next(SESSIONS)}"


@pytest.fixture(autouse=True)
async def patience() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE_S):
        yield


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


async def finished(planner: Desk, session: str, step: str, partials: int = 0, **more: Any) -> list[dict[str, Any]]:
    await planner.begin(session, step, **more)
    for n in range(partials):
        await planner.push(session, step, "lookup", status="partial", payload={"n": n})
    await planner.push(session, step, "lookup", payload={"n": partials})
    found: list[dict[str, Any]] = (await planner.events(session, step))["events"]
    return found


async def test_the_bytes_of_a_stream(planner: Desk, session: str) -> None:
    events = await finished(planner, session, "p", partials=3)
    async with planner.session.get(f"{planner.url}/planner/sessions/{session}/steps/p/stream") as response:
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        text = await response.text()
    retry, *frames = text.removesuffix("\n\n").split("\n\n")
    assert 1_000 <= int(retry.removeprefix("retry: ")) <= 3_000
    assert [len(re.findall('"sequence":', frame.split("\n")[2])) for frame in frames] == [5, len(events) - 5]
    first, second = (frame.split("\n") for frame in frames)
    assert first[:2] == ["id: 5", "event: planner_stream"]
    assert first[2].startswith('data: {"type":"event_batch","batch_sequence":1,"events":[{"sequence":1,')
    assert second[:2] == [f"id: {len(events)}", "event: planner_stream"]
    assert second[2].startswith('data: {"type":"event_batch","batch_sequence":2,"events":[{"sequence":6,')


async def test_everybody_sees_the_same_live_and_again(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    async with planner.stream(session, "p") as first, planner.stream(session, "p") as second:
        seen = [await first.events(1), await second.events(1)]
        for n in range(3):
            await planner.push(session, "p", "lookup", status="partial", payload={"n": n})
            for stream, found in zip((first, second), seen, strict=True):
                found.extend(await stream.events(1))
        await planner.push(session, "p", "lookup")
        for stream, found in zip((first, second), seen, strict=True):
            found.extend(event for frame in await stream.rest() for event in frame.data["events"])
    replayed = (await planner.events(session, "p"))["events"]
    assert seen == [replayed, replayed]
    assert types(replayed)[-1] == "plan_step_completed"


async def test_a_client_comes_back_with_its_cursor(planner: Desk, session: str) -> None:
    events = await finished(planner, session, "p", partials=8)
    for after in (1, 6, len(events) - 1):
        async with planner.stream(session, "p", f"?last_event_id={after}") as stream:
            rest = [event for frame in await stream.rest() for event in frame.data["events"]]
        assert rest == events[after:]
    async with planner.stream(session, "p", "?last_event_id=1", Last_Event_ID="9") as stream:
        rest = [event for frame in await stream.rest() for event in frame.data["events"]]
    assert rest == events[9:], "the header is the newer one"


async def test_a_stream_cut_between_step_completed_and_the_end_goes_on_with_the_end(
    planner: Desk, session: str
) -> None:
    events = await finished(planner, session, "p")
    assert types(events)[-2:] == ["step_completed", "plan_step_completed"]
    async with planner.stream(session, "p", f"?last_event_id={len(events) - 1}") as stream:
        rest = [event for frame in await stream.rest() for event in frame.data["events"]]
    assert types(rest) == ["plan_step_completed"]


async def test_a_cursor_at_the_end_of_a_step_is_204(planner: Desk, session: str) -> None:
    events = await finished(planner, session, "p")
    path = f"/planner/sessions/{session}/steps/p/stream"
    assert await planner.ask("GET", f"{path}?last_event_id={len(events)}") == (204, None)
    assert await planner.ask("GET", path, headers={"Last-Event-ID": str(len(events))}) == (204, None)


@pytest.mark.parametrize("cursor", [100, EPOCH + 1])
async def test_an_invalid_cursor_resets_the_planner_stream(planner: Desk, session: str, cursor: int) -> None:
    events = await finished(planner, session, "p")
    async with planner.stream(session, "p", Last_Event_ID=str(cursor)) as stream:
        frames = await stream.rest()
    assert frames[0] == (None, "reset", {"type": "reset", "sequence": len(events), "epoch": 0})
    assert [event for frame in frames[1:] for event in frame.data["events"]] == events


async def test_heartbeats_say_how_far_it_is_and_move_no_cursor(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    async with planner.stream(session, "p") as stream:
        await stream.events(1)
        beats = [await anext(stream) for _ in range(2)]
        assert beats == [(None, "heartbeat", {"type": "heartbeat", "sequence": 2})] * 2
        await planner.push(session, "p", "lookup", status="partial")
        head = (await stream.events(2))[-1]["sequence"]
        assert (await anext(stream)).data == {"type": "heartbeat", "sequence": head}


async def test_the_stream_goes_on_into_the_next_step(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", next_step_id="q")
    async with planner.stream(session, "p") as stream:
        await planner.push(session, "p", "lookup")
        before = await stream.events(7)
        last = before[-1]["sequence"]
        assert (await anext(stream)).data == {"type": "heartbeat", "sequence": last}, "it waits"
        await planner.begin(session, "q")
        await planner.push(session, "q", "lookup", payload={"of": "q"})
        after = [event for frame in await stream.rest() for event in frame.data["events"]]
    own = (await planner.events(session, "q"))["events"]
    assert {event["plan_step_id"] for event in after} == {"q"}
    assert [{**event, "sequence": event["sequence"] - last} for event in after] == own
    whole = before + after
    assert [event["sequence"] for event in whole] == list(range(1, len(whole) + 1))
    for cursor in (0, 2, last, last + 2):
        async with planner.stream(session, "p", f"?last_event_id={cursor}") as stream:
            rest = [event for frame in await stream.rest() for event in frame.data["events"]]
        assert rest == whole[cursor:]
    path = f"/planner/sessions/{session}/steps/p/stream?last_event_id={len(whole)}"
    assert await planner.ask("GET", path) == (204, None)
    async with planner.stream(session, "p", f"?last_event_id={len(whole) + 1}") as stream:
        frames = await stream.rest()
    assert frames[0].event == "reset"
    assert [event for frame in frames[1:] for event in frame.data["events"]] == whole


async def test_steps_that_name_each_other_come_to_an_end(planner: Desk, session: str) -> None:
    first = await finished(planner, session, "p", next_step_id="q")
    second = await finished(planner, session, "q", next_step_id="p")
    async with planner.stream(session, "p") as stream:
        events = [event for frame in await stream.rest() for event in frame.data["events"]]
    assert types(events) == types(first) + types(second)


async def test_a_step_that_was_stopped_has_no_next(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", next_step_id="q")
    async with planner.stream(session, "p") as stream:
        await planner.ask("DELETE", f"/planner/sessions/{session}/steps/p")
        assert [frame.event for frame in await stream.rest()][-1] == "planner_stream"


async def test_a_client_that_reads_nothing_holds_nobody_up(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    host, port = planner.url.removeprefix("http://").split(":")
    _, lazy = await asyncio.open_connection(host, int(port), limit=1_024)
    lazy.write(f"GET /planner/sessions/{session}/steps/p/stream HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    try:
        async with planner.stream(session, "p") as stream:
            await stream.events(1)
            for n in range(20):
                payload = {"n": n, "text": "x" * 200_000}
                assert (await planner.push(session, "p", "lookup", status="partial", payload=payload))[0] == 202
                found = await stream.events(1)
                while found[-1]["content"]["payload"] != payload:
                    found = await stream.events(1)
    finally:
        lazy.transport.abort()


async def test_a_disconnected_planner_client_leaves_no_tasks(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    async with planner.stream(session, "p") as stream:
        await stream.events(1)
        tasks = len(asyncio.all_tasks())
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while len(asyncio.all_tasks()) >= tasks:
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.005)


class Endless:
    """A reader that always has more."""

    head = 1

    async def next(self, wait_s: float) -> Page:
        await asyncio.sleep(0)
        return Page(entries=(SequencedEntry(sequence=1, key="k", revision=1, body=b"{}"),), head=1)


async def test_a_client_that_does_not_read_in_time_ends_the_stream() -> None:
    """Independently of the HTTP server's own limits."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 5:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    frames = views.Frames().sse
    await tail(
        Endless(),
        receive,
        send,
        frames=frames,
        heartbeat=views.sse_heartbeat,
        heartbeat_s=9.0,
        retry_ms=(10, 30),
        closing=ShutdownEvent(),
        timing=StreamTiming(piece_s=0.02, end_s=0.02),
    )
    assert len(sent) == 7, "the one that was not read, and the end"
