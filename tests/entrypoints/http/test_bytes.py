"""Bytes in pieces: events that arrive, bodies that come and go."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.errors import UpstreamError
from anabranch.entrypoints.http.errors import ClientGone, RequestTimedOut, RequestTooLarge
from anabranch.entrypoints.http.operations import PIECE_BYTES, read_body, send_body
from anabranch.network import sse

LINES = st.sampled_from(
    ["data: a", "data:b", "data", ": comment", "event: x", "id: 1", "data:  two spaces", "naïve", ""]
)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


async def read(pieces: list[bytes]) -> list[str]:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return [data async for data in sse.events(chunks())]


@given(st.lists(LINES, max_size=12), ENDS, st.lists(st.integers(0, 120), max_size=8))
def test_events_do_not_depend_on_how_the_bytes_are_cut(lines: list[str], end: str, cuts: list[int]) -> None:
    whole = end.join([*lines, ""]).encode()
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[start:stop] for start, stop in itertools.pairwise(edges)]
    expected: list[str] = []
    data: list[str] = []
    for line in [*lines, ""]:
        if line == "data" or line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            expected.append("\n".join(data))
            data = []
    assert asyncio.run(read(pieces)) == expected


@pytest.mark.parametrize("hostile", [[b"\r" * 5000], [b"\r"] * 5000, [b"data: x\r"] * 2000, [b"\n\r" * 5000]])
async def test_carriage_returns_cost_nothing(hostile: list[bytes]) -> None:
    async with asyncio.timeout(2):
        await read(hostile)


async def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(UpstreamError, match="too long"):
        await read([b"data: " + b"x" * 1000] * 2000)


def receiving(*messages: dict[str, Any]) -> Any:
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        if not queue:
            await asyncio.Event().wait()
        return queue.pop(0)

    return receive


def part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_reading_a_body() -> None:
    assert await read_body(receiving(part(b"ab", True), part(b"c", False)), 10) == b"abc"
    with pytest.raises(ClientGone):
        await read_body(receiving(part(b"ab", True), {"type": "http.disconnect"}), 10)
    with pytest.raises(RequestTooLarge, match="5 bytes"):
        await read_body(receiving(part(b"abc", True), part(b"def", True)), 5)
    with pytest.raises(RequestTimedOut):
        await read_body(receiving(part(b"a", True)), 10, within_s=0.01)


@given(st.integers(0, 5 * PIECE_BYTES), st.booleans())
def test_a_body_is_sent_whole_and_in_pieces(size: int, more: bool) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(send_body(send, body, more=more))
    assert b"".join(message["body"] for message in sent) == body
    assert all(len(message["body"]) <= PIECE_BYTES for message in sent)
    assert [message["more_body"] for message in sent] == [True] * (len(sent) - 1) + [more]


async def test_a_client_that_does_not_read_is_given_up() -> None:
    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await send_body(send, bytes(3 * PIECE_BYTES), more=False, within_s=0.01)
