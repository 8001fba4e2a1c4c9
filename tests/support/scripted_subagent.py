"""A model that says what it is told, when it is told to, and those who hear it through a stream that can be resumed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from anabranch.app.resumable_answers import ResumableAnswers
from anabranch.domain.contracts import EventLog
from anabranch.domain.eventlog import LogLimits
from anabranch.eventlog.memory import MemoryLog
from anabranch.testing import ManualClock, Recorder, model
from anabranch.testing.http_server import HttpServer
from conftest import Server

PATIENCE_S = 10.0
LEASE_S = 30.0
END = None


class Speaker(HttpServer):
    """An OpenAI-compatible model, to be asked one question at a time. `left` counts those that were given up."""

    def __init__(self) -> None:
        self._words: asyncio.Queue[str | None] = asyncio.Queue()
        self.left = 0
        super().__init__(self._respond)

    @property
    def endpoint(self) -> dict[str, str]:
        return {"url": self.url, "slug": "speaker", "kind": "openai"}

    def says(self, *words: str | None) -> None:
        for word in words:
            self._words.put_nowait(word)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.content.read()
        response = await model.open_stream(request)
        try:
            while (word := await self._words.get()) is not END:
                await response.write(model.word("openai", word, "speaker"))
        except asyncio.CancelledError:
            self.left += 1
            raise
        await response.write(model.event(model.chunk("speaker", {}, finish_reason="stop")) + model.DONE)
        return response


class Heard(NamedTuple):
    """One event as it came, without its id; 0 is one without."""

    id: int
    block: bytes

    @property
    def name(self) -> str:
        first = self.block.split(b"\n")[0]
        return first.removeprefix(b"event: ").decode() if first.startswith(b"event: ") else "message"

    @property
    def data(self) -> Any:
        return json.loads(self.block.split(b"data: ", 1)[1])


class Line:
    """A connection on which events come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response

    @property
    def stream(self) -> str:
        return self.headers["Stream-Id"]

    async def blocks(self, count: int) -> list[bytes]:
        """Whatever comes, comments too."""
        async with asyncio.timeout(PATIENCE_S):
            return [await self._response.content.readuntil(b"\n\n") for _ in range(count)]

    async def hear(self, count: int) -> list[Heard]:
        found: list[Heard] = []
        while len(found) < count:
            found += _events(await self.blocks(1))
        return found

    async def rest(self) -> list[Heard]:
        async with asyncio.timeout(PATIENCE_S):
            raw = await self._response.content.read()
        assert not raw or raw.endswith(b"\n\n")
        return _events([block + b"\n\n" for block in raw.split(b"\n\n")[:-1]])

    def cut(self) -> None:
        self._response.close()


def _events(blocks: list[bytes]) -> list[Heard]:
    found = []
    for block in blocks:
        head, _, rest = block.partition(b"\n")
        if head.startswith(b"id: "):
            found.append(Heard(int(head.removeprefix(b"id: ")), rest))
        elif not head.startswith((b":", b"retry:")):
            found.append(Heard(0, block))
    return found


@asynccontextmanager
async def asking(server: Server, path: str, body: dict[str, Any], **headers: str) -> AsyncIterator[Line]:
    """A question whose answer can be taken up again, unless the headers say otherwise."""
    sent = {"Prefer": "resumable", "Accept": "text/event-stream", **headers}
    async with server.session.post(server.url + path, json=body, headers=sent) as response:
        yield Line(response)


@asynccontextmanager
async def resuming(server: Server, stream: str, after: int | str | None = None, **headers: str) -> AsyncIterator[Line]:
    cursor = {"Last-Event-ID": str(after)} if after is not None else {}
    async with server.session.get(f"{server.url}/v1/streams/{stream}", headers={**cursor, **headers}) as response:
        yield Line(response)


class Log(MemoryLog):
    """One whose leases run out when a test says so."""

    def __init__(self, **bounds: Any) -> None:
        self.time = ManualClock()
        super().__init__(clock=self.time, worker="here", limits=LogLimits(ttl_s=1_000, lease_s=LEASE_S, **bounds))


def recorded(server: Server, log: EventLog | None) -> None:
    """From now on, this server's answers are recorded in that log, or not at all."""
    anabranch = server.service._anabranch
    assert anabranch is not None
    bounds: Any = {"lease_s": LEASE_S, "max_events": 20_000, "max_bytes": 2**24}
    anabranch.recordings = None if log is None else ResumableAnswers(log, telemetry=Recorder(), **bounds)
