"""What a client of a planner step that does not read holds in memory."""

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

from anabranch.domain.eventlog import Page, SequencedEntry
from anabranch.entrypoints.http.planner import follow
from anabranch.entrypoints.http.streams import ShutdownEvent

SIZE = 500_000


class OneEvent:
    """A stream of one large event."""

    head = 1

    def __init__(self) -> None:
        body = b'{"sequence":0,"text":"%b"}' % (b"y" * SIZE)
        self._page = Page(entries=(SequencedEntry(key="k", revision=1, body=body, sequence=1),), head=1, ended=True)

    async def next(self, wait_s: float) -> Page:
        return self._page


async def test_a_websocket_message_that_waits_for_its_client_is_in_memory_once() -> None:
    held: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "websocket.send":
            held.append(tracemalloc.get_traced_memory()[0] - before)

    async def receive() -> Any:
        return await arrivals.get()

    arrivals = asyncio.Queue[Any]()
    arrivals.put_nowait({"type": "websocket.connect"})
    call = SimpleNamespace(receive=receive, send=send, scope={})
    reader = OneEvent()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await follow(reader, cast("Any", call), heartbeat_s=1.0, closing=ShutdownEvent())
    finally:
        tracemalloc.stop()
    (size,) = held
    assert SIZE < size < 1.5 * SIZE
