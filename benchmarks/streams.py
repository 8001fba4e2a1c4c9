"""Memory of a worker that holds a thousand open streams, and whether each of them ends well."""

import argparse
import asyncio
import resource
from contextlib import ExitStack
from typing import cast

import uvloop
from rich.console import Console

from benchmarks.load import DOCUMENT_BYTES, question
from benchmarks.servers import Server, on_terminate_as_on_interrupt, serving, upstream
from benchmarks.wire import post, post_head

MODEL_DELAY_MS = 15_000
RUN_LIMIT_S = 120.0
WARM_UP_STREAMS = 50
OPENING_AT_ONCE = 50
MAX_KB_PER_STREAM = 100.0


class Stream(asyncio.Protocol):
    """One streamed question; reads until the server closes."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._received = bytearray()
        self.generating: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.generating.done() and b"event: generation_start" in self._received:
            self.generating.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.generating, self.ended):
            if not future.done():
                future.set_result(None)

    @property
    def failure(self) -> str | None:
        """Why this stream was not a whole answer."""
        received = bytes(self._received)
        if received[9:12] != b"200":
            return f"not a 200: {received[:300]!r}"
        if b"event: error" in received:
            return f"an error event: {received[-300:]!r}"
        if received.rfind(b"event: ") != received.rfind(b"event: done") or b"event: token" not in received:
            return f"did not end in done: {received[-300:]!r}"
        return None


async def hold(server: Server, body: bytes, count: int) -> list[Stream]:
    """Open streams, and return when each of them waits for the model (or has failed)."""
    request = post(post_head(server.authority, "/api/v1/chat/stream", "Connection: close"), body)
    host, _, port = server.authority.partition(":")
    gate = asyncio.Semaphore(OPENING_AT_ONCE)

    async def open_one() -> Stream:
        async with gate:
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(lambda: Stream(request), host, int(port))
            await stream.generating
            return stream

    return await asyncio.gather(*(open_one() for _ in range(count)))


async def measure(server: Server, instant: Server, slow: Server, count: int, console: Console) -> None:
    for stream in await hold(server, question(instant, sources=1), WARM_UP_STREAMS):
        await stream.ended
    before = server.rss_bytes()
    streams = await hold(server, question(slow, sources=1), count)
    held = sum(not stream.ended.done() for stream in streams)
    during = server.rss_bytes()
    console.print(f"{held} of {count} streams held; waiting for the model")
    await asyncio.gather(*(stream.ended for stream in streams))
    failures = [failure for stream in streams if (failure := stream.failure)]
    for failure in failures[:3]:
        console.print(failure, style="red", markup=False)

    per_stream_kb = (during - before) / 1024 / count
    console.print(f"RSS {before / 2**20:.1f} MB before, {during / 2**20:.1f} MB with {held} streams held")
    _verdict(console, f"{per_stream_kb:.1f} KB per stream (< {MAX_KB_PER_STREAM:g})", per_stream_kb < MAX_KB_PER_STREAM)
    _verdict(console, f"{len(failures)} errors, {count - held} ended early (0)", not failures and held == count)


def _verdict(console: Console, text: str, met: bool) -> None:
    console.print(f"{'[green]PASS[/]' if met else '[red]FAIL[/]'} {text}")


def raise_open_files() -> None:
    """Every stream is a socket here, two in the server and one upstream; children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    count = parser.parse_args().streams
    on_terminate_as_on_interrupt()
    raise_open_files()
    documents = ("--documents", "2", "--document-bytes", str(DOCUMENT_BYTES))
    with ExitStack() as running:
        instant = running.enter_context(upstream(*documents))
        slow = running.enter_context(upstream(*documents, "--model-delay-ms", str(MODEL_DELAY_MS)))
        server = running.enter_context(serving("anabranch"))
        uvloop.run(asyncio.wait_for(measure(server, instant, slow, count, Console()), RUN_LIMIT_S))


if __name__ == "__main__":
    main()
