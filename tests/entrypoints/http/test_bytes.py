"""Bytes in pieces: events that arrive, bodies that come and go."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import LimitReached, UpstreamError
from anabranch.domain.shares import Claimant, Limit, claimant
from anabranch.entrypoints.http.errors import ClientGone, RequestTimedOut, RequestTooLarge
from anabranch.entrypoints.http.operations import PIECE_BYTES, Call, send_body
from anabranch.network import sse
from anabranch.policies.shares import Share
from anabranch.telemetry.log import configured_log
from anabranch.telemetry.refused_requests import RefusedRequests

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


class Uploads:
    """What callers share of uploads, and calls of one caller."""

    def __init__(self, each: float = 4, each_bytes: float = 1_000) -> None:
        self.shares = {
            "uploads": Share(Limit(name="uploads", description="uploads at once", each=each)),
            "upload_bytes": Share(Limit(name="upload_bytes", description="uploads at once", each=each_bytes)),
        }

    def call(self, *messages: dict[str, Any], declared: int | None = None) -> Call[Any]:
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        claimant.set(Claimant(name="user:ada"))
        refused = RefusedRequests(configured_log(Settings()))
        return Call({"headers": headers}, receiving(*messages), none, 10, refused, shares=self.shares)

    @property
    def held(self) -> list[float]:
        return [share.held for share in self.shares.values()]


async def none(_message: Any) -> None:
    return


async def test_reading_a_body() -> None:
    uploads = Uploads()
    assert await uploads.call(part(b"ab", True), part(b"c", False)).whole(10) == b"abc"
    with pytest.raises(ClientGone):
        await uploads.call(part(b"ab", True), {"type": "http.disconnect"}).whole(10)
    with pytest.raises(RequestTooLarge, match="5 bytes"):
        await uploads.call(part(b"abc", True), part(b"def", True)).whole(5)
    with pytest.raises(RequestTooLarge, match="5 bytes"):
        await uploads.call(declared=6).whole(5)
    with pytest.raises(RequestTimedOut):
        await uploads.call(part(b"a", True)).whole(10, within_s=0.01)


async def test_a_large_body_counts_while_it_arrives_and_its_bytes_until_the_call_ends() -> None:
    size = 2 * PIECE_BYTES
    uploads = Uploads(each_bytes=size)
    for declared in (None, size):
        call = uploads.call(*[part(bytes(PIECE_BYTES), True)] * 2, part(b"", False), declared=declared)
        parts = call.parts(10 * PIECE_BYTES)
        assert len(await anext(parts)) == PIECE_BYTES
        assert uploads.held == [1, declared or PIECE_BYTES]
        assert len(b"".join([piece async for piece in parts])) == PIECE_BYTES
        assert uploads.held == [0, size]
        call.leave()
        assert uploads.held == [0, 0]


async def test_a_body_beyond_the_callers_share_is_refused() -> None:
    uploads = Uploads(each_bytes=10)
    first = uploads.call(part(b"1234567", True), part(b"8", False))
    await first.whole(100)
    with pytest.raises(LimitReached, match="limit of 10 uploads at once"):
        await uploads.call(part(b"123", True), part(b"4", False)).whole(100)
    first.leave()
    assert await uploads.call(part(b"123", True), part(b"4", False)).whole(100) == b"1234"


async def test_a_small_body_in_one_piece_is_no_upload() -> None:
    uploads = Uploads(each=0)
    assert await uploads.call(part(b"abc", False), declared=3).whole(100) == b"abc"


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
