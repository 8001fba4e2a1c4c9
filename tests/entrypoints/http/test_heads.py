"""A request's head is bounded in size and in time, and nobody else pays for one that is not."""

import asyncio
import contextlib

import pytest

from anabranch.configuration.settings import Settings
from anabranch.entrypoints.http.server import HeadCapped
from conftest import running

QUIET = Settings(log_level="ERROR")
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


class Impatient(HeadCapped):
    head_s = 0.2


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes, by whichever means, without an answer."""
    async with asyncio.timeout(5):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def ended(reader: asyncio.StreamReader) -> None:
    """Returns when the server has closed, after whatever it has answered."""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            await reader.read()


async def test_a_head_without_end_is_cut_off() -> None:
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        writer.write(GET + b"X-Long: " + b"x" * 1_000_000)
        assert await closed(reader)
        writer.close()
        async with server.session.get(f"{server.url}/health") as response:
            assert response.status == 200


async def test_a_head_of_many_short_headers_is_cut_off() -> None:
    """Each takes a hundred times its bytes in memory."""
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        writer.write(GET + b"a:\r\n" * (HeadCapped.max_headers + 1))
        assert await closed(reader)
        writer.close()


async def test_a_long_body_is_not_taken_for_a_head() -> None:
    async with running(QUIET) as server:
        body = b'{"prompt": "' + b"x" * 300_000 + b'", "retrieval_only": true}'
        async with server.session.post(f"{server.url}/api/v1/chat", data=body) as response:
            assert response.status == 200


async def test_a_head_that_dawdles_is_cut_off() -> None:
    async with running(QUIET, Impatient) as server:
        for begun in (b"", GET):
            reader, writer = await connected(server.url)
            writer.write(begun)
            assert await closed(reader)
            writer.close()


async def test_the_time_of_a_head_begins_again_with_every_request() -> None:
    class Patient(HeadCapped):
        head_s = 1.2

    async with running(QUIET, Patient) as server:
        reader, writer = await connected(server.url)
        for _ in range(4):
            writer.write(GET + b"\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(Patient.head_s / 3):
                    await reader.read(1)
        writer.close()


async def test_a_connection_without_a_new_request_is_cut_off_whatever_it_sends() -> None:
    refused = (
        b"POST /v1/collections HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: 1000\r\n\r\n{"
    )
    unread = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    upgrade = b"GET /ws HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 9\r\n\r\n"
    async with running(QUIET, Impatient) as server:
        for sent, more in ((GET + b"\r\n", b"\r\n"), (refused, b"x"), (unread, b"x"), (upgrade, b"x")):
            reader, writer = await connected(server.url)
            writer.write(sent)
            if sent != upgrade:
                assert await reader.readuntil(b"\r\n\r\n")
            writer.write(more)
            assert await ends(reader)
            writer.close()


async def test_trailers_without_end_are_cut_off() -> None:
    chunked = GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    async with running(QUIET) as server:
        for trailers in (b"a:b\r\n" * 200_000, b"a:" + b"b" * 1_000_000):
            reader, writer = await connected(server.url)
            writer.write(chunked)
            assert await reader.readuntil(b"}")
            writer.write(trailers)
            assert await ends(reader)
            writer.close()


async def test_the_chunks_of_a_body_are_not_taken_for_trailers() -> None:
    prompt = b'{"retrieval_only": true, "prompt": "' + b"x" * 300_000 + b'"}'
    for size in (1_000, 200_000):
        pieces = [prompt[at : at + size] for at in range(0, len(prompt), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        head = b"POST /api/v1/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with running(QUIET) as server:
            reader, writer = await connected(server.url)
            writer.write(head + body + b"0\r\nChecksum: 1\r\n\r\n" + GET + b"\r\n")
            for _ in range(2):
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}")
            writer.close()


async def test_requests_that_are_sent_together_are_answered_in_order() -> None:
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        paths = [b"/missing", b"/health", b"/health"] * 10
        writer.write(b"".join(b"GET %b HTTP/1.1\r\nX-Long: %b\r\n\r\n" % (path, b"x" * 8_000) for path in paths))
        for path in paths:
            assert (b"200 OK" in await reader.readuntil(b"\r\n\r\n")) == (path == b"/health")
            await reader.readuntil(b"}" if path == b"/health" else b"{}}")
        writer.close()


async def test_many_requests_that_are_sent_together_are_cut_off() -> None:
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        writer.write(b"GET /ab HTTP/1.1\r\n\r\n" * 3_000)
        assert await ends(reader)
        writer.close()
        async with server.session.get(f"{server.url}/health") as response:
            assert response.status == 200


async def test_a_body_that_ends_in_the_read_of_a_new_head_is_not_counted_to_it() -> None:
    body = b'{"retrieval_only": true, "prompt": "' + b"x" * 150_000 + b'"}'
    head = b"POST /api/v1/chat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        writer.write(head + body + GET)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        await reader.readuntil(b"}")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def ends(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes, after whatever it answers."""
    async with asyncio.timeout(5):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
    return True


@pytest.mark.parametrize("path", [b"/nothing", b"/api/v1/chat"])
async def test_a_body_in_tiny_chunks_ends_its_connection(path: bytes) -> None:
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
        writer.write(b"1\r\n \r\n" * 200_000)
        await ended(reader)
        writer.close()


async def test_a_body_in_thousands_of_chunks_of_a_line_is_read_whole() -> None:
    async with running(QUIET) as server:
        reader, writer = await connected(server.url)
        writer.write(b"POST /api/v1/chat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunks = [b'{"prompt": "', *[b"x" * 64] * 10_000, b'", "retrieval_only": true}']
        writer.write(b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
