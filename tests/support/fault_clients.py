"""Plain HTTP clients that write down everything they see, and reconnect with the last id that they have."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

Ref = dict[str, Any]

ENDS = ("done", "error")
CUT = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
PATIENCE_S = 45.0
RETRY_S = 0.2
LINE_BYTES = 2**22


class HistoryFile:
    """Lines of JSON, each with the time since the file was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self._began = time.monotonic()

    def record(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"t": round(time.monotonic() - self._began, 6), "kind": kind, **fields}) + "\n")

    def fact(self, name: str, value: float) -> None:
        self.record("fact", name=name, value=round(value, 3))

    def fault(self, what: str) -> None:
        self.record("fault", what=what)

    def close(self) -> None:
        self._file.close()


class SseEvent(NamedTuple):
    id: int | None
    name: str
    data: Any


class Asking(NamedTuple):
    """A question and how it is asked. A client that leaves does so after that many events, and does not come back."""

    sources: Sequence[Ref]
    model: Ref | None
    group: str = "questions"
    resumable: bool = False
    whole: bool = False
    leaves_after: int | None = None
    verify: bool = False


class Clients:
    """Every question has a number of its own, which the model repeats, and every client an address of its own."""

    def __init__(self, history: HistoryFile, urls: Sequence[str]) -> None:
        self.history = history
        self.urls = urls
        self._numbers = itertools.count(1)
        self._clients = itertools.count(1)
        self._chance = random.Random(18)
        self.readers: list[Reader] = []

    async def __aenter__(self) -> Self:
        # A connection for each request, so that it reaches any of the workers.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE_S)
        self.http = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.close()

    def reader(self, group: str = "questions", question: str | None = None, *, at: int = 0) -> "Reader":
        number = next(self._clients)
        self.readers.append(Reader(self, f"c{number}", question or str(next(self._numbers)), group, at=at))
        return self.readers[-1]

    async def ask(self, asking: Asking, *, at: int = 0) -> "Reader":
        """Ask, and read to the end."""
        reader = self.reader(asking.group, at=at)
        await reader.ask(asking)
        return reader

    async def many(self, asking: Asking, count: int, *, every_s: float = 0.0, at: int | None = None) -> "list[Reader]":
        """So many questions, one every so often, to all servers in turn unless `at` one."""
        asked = []
        for number in range(count):
            place = number if at is None else at
            asked.append(asyncio.create_task(self.ask(asking, at=place)))
            await asyncio.sleep(every_s)
        return list(await asyncio.gather(*asked))

    def request(self, method: str, url: str, **options: Any) -> Any:
        return self.http.request(method, url, **options)

    def pause_s(self) -> float:
        return self._chance.uniform(RETRY_S / 2, RETRY_S)


class Reader:
    """One client with one question. `at` is the number of the server that it asks first; it reconnects to the next."""

    def __init__(self, clients: Clients, name: str, question: str, group: str, *, at: int) -> None:
        self._clients = clients
        self._history = clients.history
        self._client = {"client": name, "question": question}
        self._group = group
        self.at = at
        number = int(name[1:])
        self._headers = {"X-Forwarded-For": f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"}
        self.question = question
        self.status = 0
        self.stream: str | None = None
        self.last_id: int | None = None
        self.ended = asyncio.Event()
        self.opened = asyncio.Event()
        self.seen = asyncio.Event()
        self.reopened = asyncio.Event()
        self.reopened_after_s = 0.0
        self.refused_after_s: float | None = None
        self.refused_without_hint = False
        self.events = 0
        self._cut_at: float | None = None
        self._response: aiohttp.ClientResponse | None = None

    def share_address(self, address: str) -> None:
        """Be the same caller as all others with that address."""
        self._headers = {"X-Forwarded-For": address}

    async def ask(self, asking: Asking) -> None:
        self._record("asked", group=self._group)
        path = "/api/v1/chat" if asking.whole else "/api/v1/chat/stream"
        headers = {**self._headers, **({"Prefer": "resumable"} if asking.resumable else {})}
        body: dict[str, Any] = {
            "prompt": f"Question {self.question}: where does an anabranch rejoin the river?",
            "data_sources": list(asking.sources),
            "verify": asking.verify,
            "model": asking.model,
        }
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._attempt("POST", path, asking, headers=headers, json=body)
                if self.stream is not None and not self.ended.is_set() and asking.leaves_after is None:
                    await self.resume(self.at + 1)
        except TimeoutError:
            self._record("broken")

    async def follow(self, stream: str, after: int | None = None) -> None:
        """Read a stream that another client has asked for."""
        self._record("asked", group=self._group)
        self.stream, self.last_id = stream, after
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.resume(self.at)
        except TimeoutError:
            self._record("broken")

    async def resume(self, at: int) -> None:
        """Reconnect to one server after the other until the answer has ended, or there is no such stream."""
        for place in itertools.count(at):
            self.at = place
            headers = {**self._headers, **({} if self.last_id is None else {"Last-Event-ID": str(self.last_id)})}
            await self._attempt("GET", f"/v1/streams/{self.stream}", None, headers=headers)
            if self.ended.is_set() or self.status in (204, 404, 403, 400):
                return
            await asyncio.sleep(self._clients.pause_s())

    def cut(self) -> None:
        """Lose the connection, without a word."""
        self._cut_at = time.monotonic()
        if self._response is not None and self._response.connection is not None:
            transport = self._response.connection.transport
            if transport is not None:
                transport.abort()

    async def _attempt(self, method: str, path: str, asking: Asking | None, **options: Any) -> None:
        urls = self._clients.urls
        url, asked = urls[self.at % len(urls)] + path, time.monotonic()
        try:
            async with self._clients.request(method, url, **options) as response:
                self._response = response
                self.status = response.status
                self.stream = response.headers.get("Stream-Id") or self.stream
                self._record("response", status=response.status, stream=self.stream)
                self.opened.set()
                if self._cut_at is not None and self.status in (200, 204):
                    self.reopened_after_s, self._cut_at = time.monotonic() - self._cut_at, None
                    self.reopened.set()
                if self.status >= 400:
                    self.refused_after_s = time.monotonic() - asked
                    self.refused_without_hint = "Retry-After" not in response.headers
                if response.status != 200:
                    await response.read()
                elif response.content_type == "application/json":
                    self._record("answer", data=await response.json())
                    self.ended.set()
                else:
                    await self._events(response, asking)
        except CUT:
            self._record("broken")
        finally:
            self._response = None
            self.opened.set()

    async def _events(self, response: aiohttp.ClientResponse, asking: Asking | None) -> None:
        async for event in parsed(response.content):
            self._record("event", id=event.id, name=event.name, data=event.data)
            self.events += 1
            self.seen.set()
            self.last_id = event.id if event.id is not None else self.last_id
            if event.name in ENDS:
                self.ended.set()
            if asking is not None and asking.leaves_after is not None and self.events >= asking.leaves_after:
                self._record("left")
                self.cut()
                return
        if not self.ended.is_set():
            self._record("broken")

    def _record(self, kind: str, **fields: Any) -> None:
        self._history.record(kind, **self._client, **fields)


async def parsed(content: aiohttp.StreamReader) -> AsyncIterator[SseEvent]:
    """Server-sent events as they are specified; one that is not whole is none."""
    number: int | None = None
    name, data = "message", []
    while line := await content.readuntil(b"\n"):
        if not line.endswith(b"\n"):
            return
        key, _, value = line.decode().rstrip("\n").partition(": ")
        match key:
            case "id":
                number = int(value)
            case "event":
                name = value
            case "data":
                data.append(value)
            case "" if data and line == b"\n":
                yield SseEvent(number, name, json.loads("\n".join(data)))
                number, name, data = None, "message", []
