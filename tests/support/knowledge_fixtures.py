"""Knowledge in this process with an indexer that tests run step by step, and sample records."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from anabranch.app.startup import LazyOutbound
from anabranch.domain.contracts import Embedder
from anabranch.domain.model import Filters, Passage, Query
from anabranch.domain.shares import Limit
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.opensearch.index import OpenSearchIndex
from anabranch.knowledge.index.opensearch.writer import OpenSearchWriter, Sizes
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.ingest import Fetched, Indexer, Ingestion
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Caller, Chunking, DefaultVisibility, NewDocument, Parsed, Permissions
from anabranch.knowledge.parse import ParseLimits, parse
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.records.queries import QueryRecord
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.knowledge.search import Searcher
from anabranch.models.factory import LocalEmbedder
from anabranch.testing import FakeEmbedder
from support.opensearch_client import blocking_client, client_of, index_for, outbound
from support.postgres_server import database_for

OPERATOR = Caller(operator=True)
ALICE = Caller(user="alice", groups=("staff",))
BOB = Caller(user="bob")
GUEST = Caller()


def query_record(identifier: str, user: str) -> QueryRecord:
    """An answered question in the query log."""
    return QueryRecord(
        id=identifier,
        user=user,
        original="What?",
        answer="That.",
        refused=False,
        model=None,
        found=(),
        quotes=(),
        collections=(),
        top_k=5,
        input_tokens=0,
        output_tokens=0,
        retrieval_ms=1,
        latency_ms=1,
    )


class Workshop:
    """Everything of a room in the open: what a process has, and what the indexer has."""

    def __init__(
        self,
        folder: Path,
        embedder: Embedder | None = None,
        pages: Mapping[str, bytes] | None = None,
        default_visibility: DefaultVisibility | None = "public",
        limits: Mapping[str, Limit] | None = None,
        database: Database | None = None,
        index: str | None = None,
    ) -> None:
        self.folder = folder
        self.embedder = embedder or FakeEmbedder()
        self.database = database or records_in(folder)
        self.generations = Generations(folder / "index")
        self.reader: Any = IndexReader(self.generations)
        self.writer: Any = IndexWriter(self.database, self.generations, self.embedder.name)
        self._closing = ExitStack()
        self._closing.callback(self.database.close)
        self._outbound: LazyOutbound | None = None
        if (url := index or index_for(folder)) is not None:
            self._outbound = outbound()
            self.reader = OpenSearchIndex(client_of(url, self._outbound), self.embedder.name)
            blocking = blocking_client(url)
            self._closing.callback(blocking.close)
            self.writer = OpenSearchWriter(self.database, blocking, self.embedder.name, sizes=Sizes(replicas=0))
        searcher = Searcher(self.database, self.reader, self.embedder, None)
        # Most tests are about something else than who may see what.
        self.room = Knowledge(
            database=self.database,
            index=self.reader,
            searcher=searcher,
            embedder=self.embedder,
            default_visibility=default_visibility,
            limits=limits,
        )
        self._pages = pages or {}
        ingestion = Ingestion(self.database, self.embedder, self._parse, self._fetch)
        self.indexer = Indexer(self.database, ingestion, self.writer, retention_days=30)

    async def _parse(self, data: bytes, filename: str | None, media_type: str | None) -> Parsed:
        return parse(data, filename, ParseLimits(), media_type)

    async def _fetch(self, url: str) -> Fetched:
        return Fetched(self._pages[url], "text/plain")

    async def collection(self, name: str = "notes", caller: Caller = OPERATOR, **settings: Any) -> str:
        chunking = Chunking(strategy="sentence")
        return (await self.room.create_collection(caller, name, chunking=chunking, **settings)).id

    async def put(self, *texts: str, collection: str = "notes", caller: Caller = OPERATOR, **more: Any) -> str:
        """Take texts in, each under the identity of its first word; the job's id."""
        arrived = [text(one, **more) for one in texts]
        job = await self.room.ingest(caller, collection, arrived)
        await self.ingest_pending()
        return job

    async def ingest_pending(self) -> None:
        while await self.indexer._step():
            pass
        if self._outbound is not None:
            await asyncio.to_thread(self.writer.fold)

    async def close(self) -> None:
        if self._outbound is not None:
            await self._outbound.close()
        await asyncio.to_thread(self._closing.close)

    async def find(self, question: str, caller: Caller = OPERATOR, limit: int = 10, **filters: Any) -> list[Passage]:
        query = Query(text=question, limit=limit, similarity_threshold=0.0, filters=Filters(**filters))
        return await self.room.search(query, caller)

    async def titles(self, question: str, caller: Caller = OPERATOR, **more: Any) -> list[str]:
        return [passage.title for passage in await self.find(question, caller, **more)]


def records_in(folder: Path) -> Database:
    """The records of a data folder, wherever these tests have them."""
    url = database_for(folder)
    return SqliteDatabase.open(folder) if url is None else PostgresDatabase.open(url)


def text(content: str, permissions: Permissions | None = None, **more: Any) -> NewDocument:
    name = content.split(maxsplit=1)[0]
    return NewDocument(source="text", data=content.encode(), title=name, identity=name, permissions=permissions, **more)


@asynccontextmanager
async def workshop(folder: Path, **more: Any) -> AsyncIterator[Workshop]:
    opened = Workshop(folder, **more)
    try:
        yield opened
    finally:
        await opened.close()


def folder_with(folder: Path, *texts: str) -> Path:
    """A data folder that the local embedding model goes with, with one collection of these texts."""
    embedder = FakeEmbedder(dimensions=LocalEmbedder.dimensions)
    embedder.name = LocalEmbedder.name

    async def make() -> None:
        async with workshop(folder, embedder=embedder) as shop:
            await shop.collection()
            await shop.put(*texts)

    asyncio.run(make())
    return folder


def flip(file: Path, at: int, mask: int = 1) -> None:
    """Damage: some bits of one byte."""
    with file.open("r+b") as opened:
        opened.seek(at)
        [before] = opened.read(1)
        opened.seek(at)
        opened.write(bytes([before ^ mask]))
