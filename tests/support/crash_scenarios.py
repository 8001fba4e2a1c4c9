"""A server that is killed and started again on the same folder, and a client that remembers what was acknowledged."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp
import psutil

from anabranch.domain.model import Filters
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.server_process import Program, serving

Victim = Literal["everything", "indexer", "server"]

PATIENCE_S = 50.0
RETRY_S = 0.05
PAUSE_S = 0.3
COLLECTION = "notes"
PUBLIC = {"default_permissions": {"visibility": "public"}}
OVER = ("completed", "failed", "cancelled")
WORDS = ("heron", "otter", "pike", "river", "stone", "water", "reed", "night", "fish", "moon", "boat", "frost", "mill")
INDEXER = "anabranch.app.indexer"


class Client:
    """Speaks to whichever server is up now."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.url = ""

    async def call(self, method: str, path: str, body: Any = None, *, url: str | None = None, **more: Any) -> Any:
        async with self._session.request(method, (url or self.url) + path, json=body, **more) as response:
            assert response.status in (200, 201), await response.text()
            return await response.json()

    async def create(self, name: str = COLLECTION, **settings: Any) -> None:
        body = {"name": name, "settings": {"chunking_strategy": "sentence", **PUBLIC, **settings}}
        await self.call("POST", "/v1/collections", body)

    async def ingest(self, *documents: dict[str, Any], url: str | None = None) -> str:
        body = {"collection_id": COLLECTION, "documents": list(documents)}
        return str((await self.call("POST", "/v1/ingest", body, url=url))["job_id"])

    async def finished(self, job: str, *, url: str | None = None) -> list[dict[str, Any]]:
        """What became of a job's documents, once it is over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self.call("GET", f"/v1/ingest/{job}", url=url)
                if found["status"] in OVER:
                    return list(found["documents"])
                await asyncio.sleep(0.02)

    async def holding(self, word: str, *, url: str | None = None) -> list[dict[str, Any]]:
        """The passages with a word; in the order of the words, for made-up ones are all alike to the reranker."""
        body = {"query": word, "collections": [COLLECTION], "settings": {"rerank": False}}
        found = await self.call("POST", "/v1/query", body, url=url)
        return [source for source in found["sources"] if word in source["content_snippet"]]

    async def listed(self) -> list[dict[str, Any]]:
        """Every document, page by page."""
        documents: list[dict[str, Any]] = []
        after = ""
        while True:
            page = await self.call("GET", f"/v1/documents?limit=500{after}")
            documents += page["documents"]
            if not page["has_more"]:
                assert page["total"] == len(documents)
                return documents
            after = f"&after={page['next']}"


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    # A connection of its own for each call: one that is kept would be the dead server's.
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield Client(session)


def variables(folder: Path, models_dir: Path) -> dict[str, str]:
    given = {"AGGREGATOR_DATA_DIR": str(folder), "AGGREGATOR_MODELS_DIR": str(models_dir)}
    return {**given, "AGGREGATOR_EVIDENCE": "off"}  # only what is found matters


class Site:
    """One data folder, and the server on it: started, killed, started again."""

    def __init__(self, home: Path, models_dir: Path, caller: Client) -> None:
        self.folder = home / "data"
        self._home = home
        self._variables = variables(self.folder, models_dir)
        self._client = caller
        self._stack = AsyncExitStack()
        self.program: Program | None = None

    async def start(self) -> None:
        self.program = await self._stack.enter_async_context(serving(home=self._home, variables=self._variables))
        self._client.url = self.program.url

    async def kill(self, victim: Victim) -> None:
        """At once, without a word; what must end by itself then is waited for."""
        assert self.program is not None
        family = self.program.family()
        indexers = [one for one in family if is_indexer(one)]
        for one in family if victim == "everything" else indexers if victim == "indexer" else family[:1]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        await ended(indexers if victim == "indexer" else family)

    async def close(self) -> None:
        await self._stack.aclose()
        if self.program is not None and psutil.pid_exists(self.program.pid):
            await ended([psutil.Process(self.program.pid)])


@asynccontextmanager
async def site(home: Path, models_dir: Path, caller: Client) -> AsyncIterator[Site]:
    made = Site(home, models_dir, caller)
    try:
        yield made
    finally:
        if made.program is not None:
            with suppress(psutil.NoSuchProcess):
                await made.kill("everything")
        await made.close()


def is_indexer(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return INDEXER in process.cmdline()
    return False


def indexers_of(program: Program) -> list[psutil.Process]:
    return [one for one in program.family() if is_indexer(one)]


async def ended(processes: list[psutil.Process]) -> None:
    await holds(lambda: not any(_runs(process) for process in processes))


async def holds(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  processes and files tell nobody
            await asyncio.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Writer:
    """Sends documents, again and again, and keeps for each what was acknowledged last. A document that was sent and
    not acknowledged is sent again, as a careful client does."""

    def __init__(self, caller: Client, chance: random.Random) -> None:
        self._client = caller
        self._chance = chance
        self._number = 0
        self._unsure: list[str] = []
        self.jobs: list[str] = []
        self.kept: dict[str, str] = {}  # the word that finds the newest acknowledged version of each document
        self.stale: set[str] = set()

    async def write(self, count: int) -> None:
        """So many documents, in requests of a few, one after the other, whatever happens to the server meanwhile."""
        while count > 0:
            names = [*self._unsure, *(self._name() for _ in range(self._chance.randint(1, 8)))]
            versions = {name: self._word() for name in names}
            self._unsure = list(versions)
            try:
                job = await self._client.ingest(*(self._document(*each) for each in versions.items()))
            except aiohttp.ClientError:
                await asyncio.sleep(RETRY_S)
                continue
            self.jobs.append(job)
            self.stale |= {self.kept[name] for name in versions if name in self.kept}
            self.kept |= versions
            self._unsure = []
            count -= len(versions)
            await asyncio.sleep(self._chance.uniform(0, PAUSE_S))

    def _name(self) -> str:
        """A new document, or now and then a new version of one."""
        if self.kept and self._chance.random() < 0.2:
            return self._chance.choice(list(self.kept))
        self._number += 1
        return f"document-{self._number}"

    def _word(self) -> str:
        return f"zq{self._chance.getrandbits(48):012x}"

    def _document(self, name: str, word: str) -> dict[str, Any]:
        """The word stands once, in the first of its sentences; the sentences fill one chunk or two."""
        count = self._chance.choice([1, 3, 8, 30])
        more = [" ".join(self._chance.choices(WORDS, k=12)).capitalize() + "." for _ in range(count)]
        sentences = [f"The word for this one is {word}.", *more]
        return {"id": name, "title": name, "source": {"type": "text", "content": " ".join(sentences)}}


async def all_taken_in(caller: Client, writer: Writer) -> None:
    """Every acknowledged document has been taken in, and every document is there once, in its newest version."""
    for job in writer.jobs:
        taken = await caller.finished(job)
        assert {one["status"] for one in taken} == {"completed"}, taken
    titles = Counter(one["title"] for one in await caller.listed())
    assert set(titles.values()) == {1}
    assert titles.keys() >= writer.kept.keys()


async def all_found(caller: Client, found: Mapping[str, str], stale: set[str]) -> None:
    """By its own word each document is found once; by a word that it no longer has, not at all."""
    for name, word in found.items():
        assert [source["title"] for source in await caller.holding(word)] == [name], word
    for word in stale:
        assert await caller.holding(word) == [], word


def chunk_keys(folder: Path) -> tuple[set[int], list[int]]:
    """The living chunks of the records, and those that can be reached through the index as a new reader sees it."""
    database = SqliteDatabase.open(folder)
    try:
        reader = IndexReader(Generations(folder / "index"))
        view = database.reading(lambda db: reader.view(db, Filters(), Caller(operator=True)))
        reached = [
            int(key) for part, mask in view.parts for key in (part.keys if mask is None else part.keys[mask]).tolist()
        ]
        kept = database.reading(lambda db: {row[0] for row in db.execute("SELECT key FROM chunks")})
        embedded = database.reading(lambda db: {row[0] for row in db.execute("SELECT chunk FROM embeddings")})
        assert kept == embedded
        return kept, reached
    finally:
        database.close()


def is_folded(folder: Path) -> bool:
    """Whether the index has everything that the records have."""
    database = SqliteDatabase.open(folder)
    try:
        last = database.reading(lambda db: db.execute("SELECT coalesce(max(key), 0) FROM chunks").fetchone()[0])
    finally:
        database.close()
    return Generations(folder / "index").current().last_chunk >= int(last)
