"""The Python and the JavaScript SSE parser: against the standard, and against each other."""

import asyncio
import base64
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.errors import UpstreamError
from anabranch.network.sse import Frame, FrameParser
from support.examples import examples
from support.node_process import Node, Refused

MARK = b"\xef\xbb\xbf"
# Streams, and their events according to the standard.
KNOWN: list[tuple[bytes, list[tuple[str, str, str | None]]]] = [
    (b"data: a\n\n", [("message", "a", None)]),
    (b"data:a\r\n\r\n", [("message", "a", None)]),
    (b"data: a\rdata: b\r\r", [("message", "a\nb", None)]),
    (MARK + b"data: a\n\n", [("message", "a", None)]),
    (MARK + MARK + b"data: a\n\ndata: b\n\n", [("message", "b", None)]),
    (b": a comment\nid: 7\nevent: x\ndata:  two spaces\n\n", [("x", " two spaces", "7")]),
    (b"event: x\nid: 1\n\ndata: a\n\n", [("message", "a", None)]),
    (b"data\n\ndata\ndata\n\n", [("message", "", None), ("message", "\n", None)]),
    (b"id: 1\0\ndata: a\n\n", [("message", "a", None)]),
    (b"data: a\nignored: b\ndata : c\n\n", [("message", "a", None)]),
    ("data: Grüße 🌊\u2028x\n\n".encode(), [("message", "Grüße 🌊\u2028x", None)]),
    (b"data: a\n\ndata: cut off\n", [("message", "a", None)]),
    (b"data: \xff\xe2\x82\n\n", [("message", "\ufffd\ufffd", None)]),
]

lines = st.one_of(
    st.sampled_from([b"", b"data", b"data:", b": x", b"event: e", b"id: 3", b"id:\0", b"retry: 25", b"retry: x"]),
    st.text("aß🌊: \u2028\t", max_size=8).map(lambda text: b"data: " + text.encode()),
    st.binary(max_size=6).map(lambda junk: b"data:" + junk.translate(None, b"\r\n")),
)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream, and the same in pieces that are cut anywhere."""
    whole = draw(st.sampled_from([b"", MARK])) + b"".join(draw(st.lists(st.tuples(lines, ends).map(b"".join))))
    borders = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=12)))
    return whole, [whole[a:b] for a, b in zip([0, *borders], [*borders, len(whole)], strict=True)]


def parsed(pieces: list[bytes]) -> tuple[list[tuple[str, str, str | None]], int | None]:
    parser = FrameParser(1_000_000)
    frames = [frame for piece in pieces for frame in parser.feed(piece)]
    return [(frame.event, frame.data, frame.id) for frame in frames], parser.retry_ms


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with closing(Node()) as started:
        yield started


@pytest.mark.parametrize(("stream", "frames"), KNOWN)
def test_sse_is_parsed_according_to_the_standard(stream: bytes, frames: list[tuple[str, str, str | None]]) -> None:
    assert parsed([stream])[0] == frames
    assert parsed([stream[place : place + 1] for place in range(len(stream))])[0] == frames


@given(streams())
@settings(max_examples=examples(150))
def test_sse_parsing_does_not_depend_on_chunk_boundaries(stream: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = stream
    assert parsed(pieces) == parsed([whole])


async def test_python_and_javascript_sse_parsers_agree(node: Node) -> None:
    """Hypothesis makes the cases, and all of them go to Node in one call."""
    cases = [([stream], frames) for stream, frames in KNOWN]
    pieces = [([stream[place : place + 1] for place in range(len(stream))], frames) for stream, frames in KNOWN]
    made: list[list[bytes]] = []

    @given(streams())
    @settings(max_examples=examples(150), database=None)
    def collect(stream: tuple[bytes, list[bytes]]) -> None:
        made.append(stream[1])

    collect()
    asked = [case for case, _ in cases + pieces] + made
    encoded = [[base64.b64encode(piece).decode() for piece in case] for case in asked]
    async with asyncio.timeout(30):
        read = await node.run("parse", cases=encoded)
    for case, theirs in zip(asked, read, strict=True):
        frames, retry = parsed(case)
        assert [tuple(frame) for frame in theirs["frames"]] == frames, case
        assert theirs["retry"] == retry, case


@pytest.mark.parametrize("piece", ["x" * 100, "data: " + "x" * 94 + "\n", ":" * 100])
async def test_an_sse_event_over_the_size_limit_is_an_error(node: Node, piece: str) -> None:
    """The limit holds for one long line and for many short ones."""
    parser = FrameParser(max_event_bytes=1000)
    for _ in range(10):
        assert parser.feed(piece.encode()) == []
    with pytest.raises(UpstreamError, match="too long"):
        parser.feed(piece.encode())
    with pytest.raises(Refused, match="too long"):
        await node.run("tooLong", piece=piece, count=11)


def test_the_size_limit_counts_each_sse_event_alone() -> None:
    parser = FrameParser(max_event_bytes=1000)
    for _ in range(50):
        assert parser.feed(b":" * 100 + b"\n") == []
        assert parser.feed(b"data: " + b"x" * 94 + b"\n\n") == [Frame(event="message", data="x" * 94)]
