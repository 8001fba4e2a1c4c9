"""Both clients of resumable answers against a server with scripted faults: every event once."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from anabranch.client import AnswerClient, Pace, Reset
from anabranch.domain.errors import AnabranchError, StreamUnavailable
from support.node_process import Node, Refused
from support.scripted_server import STREAM_ID, Act, Scripted, step

ASKED = "/api/v1/chat/stream"
QUICK = Pace(first_s=0.002, most_s=0.05, patience_s=5.0)
JS_QUICK = {"firstMs": 2, "mostMs": 50, "patienceMs": 5000}
CLIENTS = ("python", "js")
Heard = list[tuple[str, Any, int] | None]

FAULTS: dict[str, list[Act]] = {
    "nothing": [],
    "cut in mid frame": [Act(cut_after=30), Act(cut_after=100), Act(cut_after=333)],
    "ended early": [Act(frames=3), Act(frames=0), Act(frames=2)],
    "replayed from the start": [Act(frames=6), Act(replay=True, frames=8)],
}
BUSY = [Act(frames=4), Act(status=503), Act(status=503, retry_after="0"), Act(frames=1)]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with closing(Node()) as started:
        yield started


async def heard_by(client: str, node: Node, url: str, *, ask: bool, after: int = 0) -> Heard:
    """(event, data, id) of each, and None for a reset."""
    async with asyncio.timeout(30):
        if client == "js":
            begun = {"path": ASKED, "question": {"prompt": "Why?"}} if ask else {"streamId": STREAM_ID, "after": after}
            said = await node.run("ask" if ask else "answer", baseUrl=url, pace=JS_QUICK, key="k-1", **begun)
            return [frame and (frame["event"], json.loads(frame["data"]), frame["id"]) for frame in said["heard"]]
        async with AnswerClient(url, "k-1", pace=QUICK) as answers:
            frames = answers.ask_resumable(ASKED, {"prompt": "Why?"}) if ask else answers.follow(STREAM_ID, after=after)
            return [
                None if isinstance(frame, Reset) else (frame.event, json.loads(frame.data), frame.id)
                async for frame in frames
            ]


def whole(server: Scripted) -> Heard:
    numbered = server.kept
    return [("token", said["content"]["payload"], said["sequence"] if numbered else 0) for said in server.events]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("ask", [True, False], ids=["ask", "follow"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_answer_client_gets_every_event_once_despite_faults(
    node: Node, client: str, fault: str, ask: bool
) -> None:
    async with Scripted(step(), FAULTS[fault]) as server:
        assert await heard_by(client, node, server.url, ask=ask) == whole(server)
        assert server.acts == []
        paths = [asked.path for asked in server.asked]
        assert paths == [ASKED if ask else f"/v1/streams/{STREAM_ID}", *[f"/v1/streams/{STREAM_ID}"] * (len(paths) - 1)]
        assert {asked.authorization for asked in server.asked} == {"Bearer k-1"}


@pytest.mark.parametrize("client", CLIENTS)
async def test_answer_client_waits_for_an_overloaded_server(node: Node, client: str) -> None:
    async with Scripted(step(), BUSY) as server:
        assert await heard_by(client, node, server.url, ask=True) == whole(server)
        assert server.cursors[:5] == [0, 4, 4, 4, 5]


@pytest.mark.parametrize("client", CLIENTS)
async def test_answer_client_starts_over_after_a_reset(node: Node, client: str) -> None:
    async with Scripted(step(), [Act(frames=4), Act(epoch=1, frames=3), Act()]) as server:
        heard = await heard_by(client, node, server.url, ask=True)
        assert heard[4] is None
        assert heard[5:] == whole(server)


@pytest.mark.parametrize("client", CLIENTS)
async def test_answer_client_can_follow_from_any_cursor(node: Node, client: str) -> None:
    async with Scripted(step()) as server:
        assert await heard_by(client, node, server.url, ask=False, after=9) == whole(server)[9:]
        assert await heard_by(client, node, server.url, ask=False, after=12) == []


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("ask", [True, False], ids=["ask", "follow"])
@pytest.mark.parametrize(
    "last", [("done", {}), ("error", {}), ("message", {"type": "done"}), ("message", {"type": "error"})]
)
async def test_answer_client_stops_at_the_final_event(
    node: Node, client: str, ask: bool, last: tuple[str, dict[str, str]]
) -> None:
    """A server that gave the whole answer may be gone, or have forgotten it, by the time that one would come back."""
    named, payload = last
    events = step()
    events[-1] = {**events[-1], "named": named, "content": {**events[-1]["content"], "payload": payload}}
    async with Scripted(events, [Act(frames=4), Act(), Act(status=404)]) as server:
        heard = await heard_by(client, node, server.url, ask=ask)
        assert [frame[2] for frame in heard if frame] == [said["sequence"] for said in events]
        assert heard[-1] == (named, payload, events[-1]["sequence"])
        assert len(server.asked) == 2


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kept", [True, False])
async def test_on_stream_gets_the_stream_id_of_a_resumable_answer(node: Node, client: str, kept: bool) -> None:
    """Once, before the first word: a page that is reloaded then has what it needs."""
    async with Scripted(step(), [Act(frames=3)] if kept else [], kept=kept) as server:
        streams: list[str] = []
        if client == "js":
            asked = {"path": ASKED, "question": {"prompt": "Why?"}, "baseUrl": server.url, "pace": JS_QUICK}
            streams += (await node.run("ask", **asked))["streams"]
        else:
            async with AnswerClient(server.url, pace=QUICK) as answers:
                async for _ in answers.ask_resumable(ASKED, {"prompt": "Why?"}, on_stream=streams.append):
                    assert len(streams) == kept
        assert streams == [STREAM_ID] * kept


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_answer_that_is_not_stored_cannot_be_resumed(node: Node, client: str) -> None:
    async with Scripted(step(), kept=False) as server:
        assert await heard_by(client, node, server.url, ask=True) == whole(server)
        assert len(server.asked) == 1
    async with Scripted(step(), [Act(cut_after=200)], kept=False) as server:
        with pytest.raises((StreamUnavailable, Refused), match="cut off"):
            await heard_by(client, node, server.url, ask=True)
        assert len(server.asked) == 1


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("ask", [True, False], ids=["ask", "follow"])
async def test_answer_client_raises_the_servers_error(node: Node, client: str, ask: bool) -> None:
    async with Scripted(step(), [Act(status=404)] * 2) as server:
        with pytest.raises((AnabranchError, Refused), match="As the script says"):
            await heard_by(client, node, server.url, ask=ask)
        assert len(server.asked) == 1


@pytest.mark.parametrize("client", CLIENTS)
async def test_answer_client_sends_the_question_once(node: Node, client: str) -> None:
    """A server that is busy has not taken it, but only the caller knows whether it still wants to know."""
    async with Scripted(step(), [Act(status=503)]) as server:
        with pytest.raises((StreamUnavailable, Refused), match="As the script says"):
            await heard_by(client, node, server.url, ask=True)
        assert len(server.asked) == 1
