"""Another embedder: all of it or nothing."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from anabranch.domain.errors import ConfigurationError, EmbeddingFailed
from anabranch.domain.model import Embedding, Query
from anabranch.knowledge import rebuild
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.indexer import Indexer
from anabranch.knowledge.ingest import Fetched, Ingestion
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Caller, NewDocument
from anabranch.knowledge.parse import ParseLimits, parse
from anabranch.knowledge.parsed import Chunking, Parsed
from anabranch.knowledge.records import documents, facts
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.search import Searcher
from anabranch.testing.fakes import FakeEmbedder

OPERATOR = Caller(operator=True)
OLD, NEW = FakeEmbedder(dimensions=128), FakeEmbedder(dimensions=64)
Opened = Callable[[FakeEmbedder], Knowledge]


class Killed(BaseException):
    """As if the process had been."""


class Mortal(FakeEmbedder):
    """Ends with its second batch."""

    def __init__(self, end: BaseException) -> None:
        super().__init__(dimensions=64)
        self._end = end

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        if self.calls:
            raise self._end
        return await super().embed(texts)


@pytest.fixture
async def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    """Ten documents, embedded with the old embedder, in batches of four for the new one."""
    monkeypatch.setattr(rebuild, "BATCH", 4)

    async def parsed(data: bytes, name: str | None, media_type: str | None) -> Parsed:
        return parse(data, name, ParseLimits())

    async def fetched(url: str) -> Fetched:
        raise NotImplementedError

    opened = Database.open(tmp_path)
    room = room_of(opened, tmp_path, OLD)
    await room.create_collection(OPERATOR, "numbers", chunking=Chunking(strategy="fixed", size=50, overlap=0))
    arrived = [NewDocument(source="text", data=f"The number is word{n}.".encode(), title=str(n)) for n in range(10)]
    await room.ingest(OPERATOR, "numbers", arrived)
    writer = IndexWriter(opened, Generations(tmp_path / "index"), OLD.name)
    await Indexer(opened, Ingestion(opened, OLD, parsed, fetched), writer, retention_days=30).drain()
    async with AsyncExitStack() as stack:
        stack.callback(opened.close)
        yield opened


def room_of(database: Database, folder: Path, embedder: FakeEmbedder) -> Knowledge:
    reader = IndexReader(Generations(folder / "index"))
    return Knowledge(
        database=database, reader=reader, searcher=Searcher(database, reader, embedder, None), embedder=embedder
    )


async def best(room: Knowledge, text: str) -> str:
    return (await room.search(Query(text=text, limit=1, similarity_threshold=0.0), OPERATOR))[0].title


def sizes(database: Database) -> set[int]:
    return database.reading(lambda db: {row[0] for row in db.execute("SELECT length(vector) FROM embeddings")})


def tables(database: Database) -> set[str]:
    return database.reading(lambda db: {row[0] for row in db.execute("SELECT name FROM sqlite_master")})


def silent(done: int, total: int) -> None: ...


async def test_every_chunk_is_embedded_anew_and_found(database: Database, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    generations = Generations(tmp_path / "index")
    done = await rebuild.embed_anew(database, NEW, generations, lambda *at: heard.append(at))
    assert done == 10
    assert heard == [(4, 10), (8, 10), (10, 10)]
    assert sizes(database) == {64 * 4}
    assert database.reading(facts.embedder) == (NEW.name, 64)
    assert "embeddings_next" not in tables(database)
    room = room_of(database, tmp_path, NEW)
    assert await best(room, "word7") == "7"  # without an index: from the records
    IndexWriter(database, generations, NEW.name).rebuild()
    assert generations.current().dimensions == 64
    assert await best(room, "word3") == "3"
    assert (await room.collection(OPERATOR, "numbers")).collection.settings.embedding_model == NEW.name


async def test_a_reader_that_was_open_starts_afresh(database: Database, tmp_path: Path) -> None:
    reader = IndexReader(Generations(tmp_path / "index"))
    before = Searcher(database, reader, OLD, None)
    asked = Query(text="word5", limit=1, similarity_threshold=0.0)
    assert (await before.search(asked, OPERATOR, None)).passages[0].title == "5"
    await rebuild.embed_anew(database, NEW, Generations(tmp_path / "index"), silent)
    after = Searcher(database, reader, NEW, None)
    assert (await after.search(asked, OPERATOR, None)).passages[0].title == "5"


@pytest.mark.parametrize("end", [Killed(), EmbeddingFailed("No luck today.")])
async def test_an_end_in_the_middle_leaves_everything_as_it_was(
    database: Database, tmp_path: Path, end: BaseException
) -> None:
    with pytest.raises(type(end)):
        await rebuild.embed_anew(database, Mortal(end), Generations(tmp_path / "index"), silent)
    await assert_old(database, tmp_path)
    assert "embeddings_next" not in tables(database)


async def assert_old(database: Database, folder: Path) -> None:
    assert database.reading(facts.embedder) == (OLD.name, 128)
    assert sizes(database) == {128 * 4}
    assert await best(room_of(database, folder, OLD), "word7") == "7"


@pytest.mark.parametrize("last", ["_keep", "_swap"])
async def test_a_kill_that_leaves_no_time_to_tidy_up(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The scratch table stays behind, the old vectors are whole, and the next rebuild starts over."""
    original = database.writing

    def dying(work: Callable[..., object]) -> object:
        raise Killed

    def fails(*_: object, **__: object) -> None:
        monkeypatch.setattr(database, "writing", dying)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rebuild, last, fails)
        with pytest.raises(Killed):
            await rebuild.embed_anew(database, NEW, Generations(tmp_path / "index"), silent)
    monkeypatch.setattr(database, "writing", original)
    assert "embeddings_next" in tables(database)
    await assert_old(database, tmp_path)
    assert await rebuild.embed_anew(database, NEW, Generations(tmp_path / "index"), silent) == 10
    assert sizes(database) == {64 * 4}


async def test_a_document_deleted_meanwhile_stays_deleted(database: Database, tmp_path: Path) -> None:
    room = room_of(database, tmp_path, OLD)
    (first, *_), _ = await room.documents(OPERATOR, "numbers", 0, 1)

    def delete(done: int, total: int) -> None:
        if done == total:
            database.writing(lambda db: documents.remove(db, first.key))

    await rebuild.embed_anew(database, NEW, Generations(tmp_path / "index"), delete)
    count = "SELECT (SELECT count(*) FROM embeddings), (SELECT count(*) FROM chunks)"
    assert tuple(database.reading(lambda db: db.execute(count).fetchone())) == (9, 9)


async def test_chunks_that_do_not_fit_are_refused_with_what_to_do(database: Database, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"10 chunks are longer than the 3 tokens .* again with a smaller"):
        await rebuild.embed_anew(
            database, FakeEmbedder(dimensions=64, window=3), Generations(tmp_path / "index"), silent
        )
    await assert_old(database, tmp_path)


async def test_where_nothing_is_left_the_next_embedder_decides(database: Database, tmp_path: Path) -> None:
    room = room_of(database, tmp_path, OLD)
    await room.delete_collection(OPERATOR, "numbers")
    assert await rebuild.embed_anew(database, NEW, Generations(tmp_path / "index"), silent) == 0
    assert database.reading(facts.embedder) is None
    assert msgspec.json.encode(await room.collections(OPERATOR)) == b"[]"
