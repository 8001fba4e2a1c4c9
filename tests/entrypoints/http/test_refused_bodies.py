"""A client that is still sending when its request is refused gets the refusal, not a reset connection."""

import asyncio

import pytest

from anabranch.configuration.settings import Settings
from conftest import running

MIB = 1024 * 1024


async def sent_whole(url: str, head: str, body: bytes) -> bytes:
    """The response to a request of a client that reads only after it has sent everything."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=MIB)
    writer.write(f"{head}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    for start in range(0, len(body), MIB):
        writer.write(body[start : start + MIB])
        await writer.drain()
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    return received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /api/v1/chat HTTP/1.1", b"413"),
        ("POST /api/v1/chat HTTP/1.0", b"413"),
        ("POST /v1/nothing HTTP/1.0", b"404"),
        ("POST /v1/query HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer wrong", b"401"),
    ],
)
async def test_a_client_that_sends_on_gets_the_refusal(head: str, status: bytes) -> None:
    async with running(Settings(log_level="ERROR")) as server:
        received = await sent_whole(server.url, head, b" " * (12 * MIB))
    assert received.split()[1] == status
    assert b'"error"' in received


async def test_a_refused_body_without_end_is_cut_off() -> None:
    async with running(Settings(log_level="ERROR")) as server:
        with pytest.raises(ConnectionError):
            await sent_whole(server.url, "POST /api/v1/chat HTTP/1.1", b" " * (200 * MIB))
