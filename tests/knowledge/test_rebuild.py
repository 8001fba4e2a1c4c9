"""`index rebuild` with another embedder: all vectors are replaced, or none."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import ConfigurationError, EmbeddingFailed
from anabranch.domain.model import Embedding, Query
from anabranch.knowledge.index import writer
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.ingest import Fetched, Indexer, Ingestion
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Caller, Chunking, NewDocument, Parsed
from anabranch.knowledge.parse import ParseLimits, parse
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.knowledge.search import Searcher
from anabranch.testing.fakes import FakeEmbedder

T = TypeVar("T")
OPERATOR = Caller(operator=True)
OLD, NEW = FakeEmbedder(dimensions=128), FakeEmbedder(dimensions=64)
Opened = Callable[[FakeEmbedder], Knowledge]


class Killed(BaseException):
    """As if the process had been."""


class FailingEmbedder(FakeEmbedder):
    """Fails at its second batch."""

    def __init__(self, end: BaseException) -> None:
        super().__init__(dimensions=64)
        self._end = end

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        if self.calls:
            raise self._end
        return await super().embed(texts)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    """Ten documents, embedded with the old embedder."""

    async def parsed(data: bytes, name: str | None, media_type: str | None) -> Parsed:
        return parse(data, name, ParseLimits())

    async def fetched(url: str) -> Fetched:
        raise NotImplementedError

    opened = SqliteDatabase.open(tmp_path)
    room = room_of(opened, tmp_path, OLD)
    await room.create_collection(OPERATOR, "numbers", chunking=Chunking(strategy="fixed", size=50, overlap=0))
    arrived = [NewDocument(source="text", data=f"The number is word{n}.".encode(), title=str(n)) for n in range(10)]
    await room.ingest(OPERATOR, "numbers", arrived)
    writer = IndexWriter(opened, Generations(tmp_path / "index"), OLD.name)
    await Indexer(opened, Ingestion(opened, OLD, parsed, fetched), writer, retention_days=30).drain()
    async with AsyncExitStack() as stack:
        stack.callback(opened.close)
        yield opened


def room_of(database: SqliteDatabase, folder: Path, embedder: FakeEmbedder) -> Knowledge:
    reader = IndexReader(Generations(folder / "index"))
    return Knowledge(
        database=database, index=reader, searcher=Searcher(database, reader, embedder, None), embedder=embedder
    )


async def best(room: Knowledge, text: str) -> str:
    return (await room.search(Query(text=text, limit=1, similarity_threshold=0.0), OPERATOR))[0].title


def sizes(database: SqliteDatabase) -> set[int]:
    return database.reading(lambda db: {row[0] for row in db.execute("SELECT length(vector) FROM embeddings")})


def tables(database: SqliteDatabase) -> set[str]:
    return database.reading(lambda db: {row[0] for row in db.execute("SELECT name FROM sqlite_master")})


def silent(done: int, total: int) -> None: ...


async def reembed(
    database: SqliteDatabase, embedder: Embedder, folder: Path, progress: Callable[[int, int], None] = silent
) -> int:
    index = Generations(folder / "index")

    def drop_index() -> None:
        index.publish(IndexManifest(number=index.current().number))

    return await writer.reembed(database, embedder, drop_index, progress, batch_size=4)


async def test_a_rebuild_with_another_embedder_embeds_every_chunk_again(
    database: SqliteDatabase, tmp_path: Path
) -> None:
    heard: list[tuple[int, int]] = []
    generations = Generations(tmp_path / "index")
    done = await reembed(database, NEW, tmp_path, lambda *at: heard.append(at))
    assert done == 10
    assert heard == [(4, 10), (8, 10), (10, 10)]
    assert sizes(database) == {64 * 4}
    assert database.reading(documents.embedder) == (NEW.name, 64)
    assert "embeddings_next" not in tables(database)
    room = room_of(database, tmp_path, NEW)
    assert await best(room, "word7") == "7"  # without an index: from the records
    IndexWriter(database, generations, NEW.name).rebuild()
    assert generations.current().dimensions == 64
    assert await best(room, "word3") == "3"
    assert (await room.collection(OPERATOR, "numbers")).collection.settings.embedding_model == NEW.name


async def test_an_open_reader_reloads_everything_after_a_rebuild(database: SqliteDatabase, tmp_path: Path) -> None:
    reader = IndexReader(Generations(tmp_path / "index"))
    before = Searcher(database, reader, OLD, None)
    asked = Query(text="word5", limit=1, similarity_threshold=0.0)
    assert (await before.search(asked, OPERATOR, None)).passages[0].title == "5"
    await reembed(database, NEW, tmp_path)
    after = Searcher(database, reader, NEW, None)
    assert (await after.search(asked, OPERATOR, None)).passages[0].title == "5"


@pytest.mark.parametrize("end", [Killed(), EmbeddingFailed("No luck today.")])
async def test_a_rebuild_that_fails_halfway_changes_nothing(
    database: SqliteDatabase, tmp_path: Path, end: BaseException
) -> None:
    with pytest.raises(type(end)):
        await reembed(database, FailingEmbedder(end), tmp_path)
    await assert_old(database, tmp_path)
    assert "embeddings_next" not in tables(database)


async def assert_old(database: SqliteDatabase, folder: Path) -> None:
    assert database.reading(documents.embedder) == (OLD.name, 128)
    assert sizes(database) == {128 * 4}
    assert await best(room_of(database, folder, OLD), "word7") == "7"


class KilledDatabase(SqliteDatabase):
    """The process is killed in a transaction: neither it nor any later one is committed."""

    def __init__(self, folder: Path, *, survives: int) -> None:
        super().__init__(folder)
        self._survives = survives

    def writing(self, work: Callable[[Any], T], *, deleting: bool = False, ordered: bool = True) -> T:
        def killed(db: Session) -> T:
            work(db)
            raise Killed

        self._survives -= 1
        return super().writing(work if self._survives >= 0 else killed)


@pytest.mark.parametrize("survives", [1, 2, 4], ids=["first batch", "second batch", "swap"])
async def test_a_rebuild_killed_in_a_transaction_keeps_the_old_vectors(
    database: SqliteDatabase, tmp_path: Path, survives: int
) -> None:
    """The table of new vectors stays behind, and the next rebuild starts over."""
    killed = KilledDatabase(tmp_path, survives=survives)
    with pytest.raises(Killed):
        await reembed(killed, NEW, tmp_path)
    killed.close()
    assert "embeddings_next" in tables(database)
    await assert_old(database, tmp_path)
    assert await reembed(database, NEW, tmp_path) == 10
    assert sizes(database) == {64 * 4}


async def test_a_document_deleted_during_a_rebuild_stays_deleted(database: SqliteDatabase, tmp_path: Path) -> None:
    room = room_of(database, tmp_path, OLD)
    (first, *_), _ = await room.documents(OPERATOR, "numbers", 0, 1)

    def delete(done: int, total: int) -> None:
        if done == total:
            database.writing(lambda db: documents.remove(db, first.key))

    await reembed(database, NEW, tmp_path, delete)
    count = "SELECT (SELECT count(*) FROM embeddings), (SELECT count(*) FROM chunks)"
    assert tuple(database.reading(lambda db: db.execute(count).fetchone())) == (9, 9)


async def test_a_rebuild_refuses_chunks_longer_than_the_new_embedders_window(
    database: SqliteDatabase, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"10 chunks are longer than the 3 tokens .* again with a smaller"):
        await reembed(database, FakeEmbedder(dimensions=64, window=3), tmp_path)
    await assert_old(database, tmp_path)


async def test_a_rebuild_without_documents_forgets_the_embedder(database: SqliteDatabase, tmp_path: Path) -> None:
    room = room_of(database, tmp_path, OLD)
    await room.delete_collection(OPERATOR, "numbers")
    assert await reembed(database, NEW, tmp_path) == 0
    assert database.reading(documents.embedder) is None
    assert msgspec.json.encode(await room.collections(OPERATOR)) == b"[]"
