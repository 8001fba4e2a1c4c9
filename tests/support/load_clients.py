"""A served shelf and the many who ask it at once: what each was told, how long it took, and what the log says after."""

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.metrics_scrape import Scraped, scrape
from support.server_process import Program, serving

PATIENCE_S = 30.0
# As the settings have them, if nobody says otherwise.
LIMIT = 20
WINDOW_S = 300
HANDBOOK = "Refunds for printed books take 30 days. Parcels to Iceland leave on Tuesdays."
REFUNDS = "How long do refunds for printed books take?"
OVER = ("completed", "failed", "cancelled")
# What a server may say above the level of information while it is overrun, or Redis is gone.
EXPECTED = ("redis_gone", "overloaded")
# Searched for in the text: a line need not be one of our own.
COMPLAINT = re.compile(r'"level":"(?:warning|error|critical)"|Traceback|never retrieved|never awaited|was destroyed')


Asking = AbstractAsyncContextManager[aiohttp.ClientResponse]


class Told(NamedTuple):
    """What became of one question. `began` is by the clock of this process."""

    status: int
    frames: list[dict[str, Any]]
    headers: Mapping[str, str]
    began: float
    took_s: float

    @property
    def end(self) -> dict[str, Any]:
        data: dict[str, Any] = self.frames[-1]["data"]
        return data

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.frames[-1]["type"] == "done" and self.end["guardrail"] is None


class Crowd:
    """Everybody has a key of their own; without one, it is the operator at this machine who asks."""

    def __init__(self, programs: Sequence[Program], session: aiohttp.ClientSession, secrets: Mapping[str, str]) -> None:
        self.programs = programs
        self.secrets = secrets
        self._urls = [program.url for program in programs]
        self._session = session

    async def ask(self, query: str = REFUNDS, *, who: str | None = None, at: int = 0, **more: Any) -> Told:
        began = time.monotonic()
        async with self.asking(query, who=who, at=at, **more) as response:
            raw = (await response.read()).decode()
        took_s = time.monotonic() - began
        if response.status != 200:
            return Told(response.status, [json.loads(raw)], response.headers, began, took_s)
        assert raw.endswith("\n\n"), raw
        blocks = [block for block in raw[:-2].split("\n\n") if not block.startswith(":")]
        frames = [json.loads(block.removeprefix("data: ")) for block in blocks]
        return Told(200, frames, response.headers, began, took_s)

    def asking(self, query: str = REFUNDS, *, who: str | None = None, at: int = 0, **more: Any) -> "Asking":
        """The request itself, to be read, or left, by whoever sends it."""
        headers = {**self._key(who), **more.pop("headers", {})}
        return self._session.post(f"{self._urls[at]}/rag/stream", json={"query": query, **more}, headers=headers)

    async def burst(self, each: int) -> dict[str, list[Told]]:
        """Everybody asks the first server so often, all at once; what each was told."""
        await self.ask()  # so that the answer is known
        names = list(self.secrets)
        told = await asyncio.gather(*(self.ask(who=name) for _ in range(each) for name in names))
        return {name: list(told[position :: len(names)]) for position, name in enumerate(names)}

    async def call(self, method: str, path: str, body: Any = None, *, who: str | None = None, at: int = 0) -> Any:
        url = self._urls[at] + path
        async with self._session.request(method, url, json=body, headers=self._key(who)) as response:
            assert response.status in (200, 201), await response.text()
            return await response.json()

    async def ingest(self, collection: str, content: str, *, title: str, who: str | None = None, at: int = 0) -> None:
        """Take a document in, and wait until it is there."""
        document = {"title": title, "source": {"type": "text", "content": content}}
        body = {"collection_id": collection, "documents": [document]}
        job = (await self.call("POST", "/v1/ingest", body, who=who, at=at))["job_id"]
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.call("GET", f"/v1/ingest/{job}", who=who, at=at))["status"] not in OVER:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert found["status"] == "completed", found

    async def metrics(self, at: int = 0) -> Scraped:
        return await scrape(self._session, self._urls[at])

    async def reads(self, name: str, value: float, at: int = 0, **labels: str) -> None:
        """Wait until /metrics says so."""
        async with asyncio.timeout(PATIENCE_S):
            while [sample.value for sample in (await self.metrics(at)).all(name, **labels)] != [value]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def pulse(self) -> AsyncIterator[list[float]]:
        """How long each server took, meanwhile, for what needs nothing at all: so much is the machine's doing."""
        took_s: list[float] = []

        async def beat() -> None:
            while True:
                for url in self._urls:
                    began = time.monotonic()
                    async with self._session.get(f"{url}/health") as response:
                        await response.read()
                    took_s.append(time.monotonic() - began)
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        try:
            yield took_s
        finally:
            beating.cancel()
            await asyncio.wait([beating])

    def complaints(self) -> list[str]:
        """What the servers have logged that nobody expected: warnings, errors, and whatever is no line of the log."""
        return [line for program in self.programs for line in program.lines if _is_complaint(line)]

    def torn(self) -> list[str]:
        """Lines of the log in which those of two workers have run into each other."""
        return [line for program in self.programs for line in program.lines if not _is_whole(line)]

    def _key(self, who: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[who]}"} if who is not None else {}


class Load:
    """Questions at a steady pace to all servers in turn, by people who may ask them all. Each is for the limiter and
    both caches: other words have other vectors, and what may take another number of tokens is another answer."""

    def __init__(self, asked: Crowd, names: Iterator[str], every_s: float) -> None:
        self._asked = asked
        self._names = names
        self._every_s = every_s
        self._who = ""
        self._numbers = itertools.count()

    async def send(self, count: int) -> list[Told]:
        sent: list[asyncio.Task[Told]] = []
        servers = len(self._asked.programs)
        for _ in range(count):
            number = next(self._numbers)
            if number % LIMIT == 0:
                self._who = next(self._names)
            query = REFUNDS + "?" * (number % 100)
            asking = self._asked.ask(query, who=self._who, at=number % servers, max_tokens=100 + number)
            sent.append(asyncio.create_task(asking))
            await asyncio.sleep(self._every_s)
        return list(await asyncio.gather(*sent))


def is_exact(told: Sequence[Told]) -> None:
    """As many were answered as the limit says, and the others were told when to come back."""
    answered = [one for one in told if one.is_answered]
    refused = [one for one in told if one.status == 429]
    others = [(one.status, one.frames[-1]) for one in told if one not in answered and one not in refused]
    found = len(answered), len(refused), others
    assert found == (LIMIT, len(told) - LIMIT, []), found
    assert all(one.end["error_code"] == "rate_limited" for one in refused)
    assert all(0 < int(one.headers["Retry-After"]) <= WINDOW_S for one in refused)
    assert {one.headers["RateLimit-Limit"] for one in told} == {str(LIMIT)}
    assert {one.headers["RateLimit-Remaining"] for one in refused} == {"0"}
    assert all(0 < int(one.headers["RateLimit-Reset"]) <= WINDOW_S for one in told)


@asynccontextmanager
async def crowd(
    home: Path, models_dir: Path, *, people: int = 0, workers: Sequence[int] = (1,), **settings: Any
) -> AsyncIterator[Crowd]:
    """A server for each number of workers, all on one data folder with a handbook in it. Settings are variables in
    small letters."""
    folder = home / "data"
    variables = {"data_dir": str(folder), "models_dir": str(models_dir), "model_retries": "0", **settings}
    given = {f"AGGREGATOR_{name.upper()}": value for name, value in variables.items()}
    # A connection of its own for each question, so that it goes to any of the workers.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with AsyncExitStack() as stack:
        secrets = _secrets(folder, people)
        starting = (serving(home=home, workers=number, variables=given) for number in workers)
        started = await asyncio.gather(*map(stack.enter_async_context, starting))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        opened = Crowd(started, session, secrets)
        chunking = {"chunking_strategy": "sentence", "chunk_size": 40, "chunk_overlap": 0}
        chunking["default_permissions"] = {"visibility": "public"}
        await opened.call("POST", "/v1/collections", {"name": "shop", "settings": chunking})
        await opened.ingest("shop", HANDBOOK, title="Handbook")
        yield opened


def _secrets(folder: Path, people: int) -> dict[str, str]:
    database = SqliteDatabase.open(folder)
    try:
        made = (f"person-{number}" for number in range(people))
        return {user: database.writing(lambda db, user=user: keys.create(db, user=user))[1] for user in made}  # type: ignore[misc]
    finally:
        database.close()


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _is_complaint(line: str) -> bool:
    return COMPLAINT.search(line) is not None and not any(f'"event":"{event}"' in line for event in EXPECTED)
