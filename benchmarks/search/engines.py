"""The engines: each takes the corpus in and answers with row numbers."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.data import CHUNKS_PER_DOCUMENT, DIMENSIONS, Corpus, Queries

Group = tuple[str, int] | None
Groups = dict[str, NDArray[np.int64]]
OVERFETCH = 5


class Engine(Protocol):
    """`load` fills a folder, `open` begins to answer from it, in another process. `dense`, `keyword` and `hybrid` give
    the rows of the best chunks; None is what an engine cannot do."""

    def load(self, corpus: Corpus, folder: Path) -> None: ...

    def open(self, folder: Path, queries: Queries, groups: Groups) -> None: ...

    def dense(self, query: int, limit: int, group: Group) -> Sequence[int] | None: ...

    def keyword(self, query: int, limit: int, group: Group) -> Sequence[int] | None: ...

    def hybrid(self, query: int, limit: int, group: Group) -> Sequence[int] | None: ...


class Ours:
    """The room's own code: records, index, search. `rerank` is what reranking adds."""

    def load(self, corpus: Corpus, folder: Path) -> None:
        from anabranch.domain.model import Embedding
        from anabranch.knowledge.index.manifest import Generations
        from anabranch.knowledge.index.writer import IndexWriter
        from anabranch.knowledge.model import CollectionSettings, DocumentDraft, Permissions, Piece
        from anabranch.knowledge.records import collections, documents
        from anabranch.knowledge.records.database import new_id
        from anabranch.knowledge.records.sqlite import SqliteDatabase

        database = SqliteDatabase.open(folder)
        generations = Generations(folder / "index")
        settings = CollectionSettings(embedding_model="made-up")
        made = database.writing(
            lambda db: collections.create(db, owner="", name="all", description="", settings=settings)
        )
        assert made is not None

        def insert(db: Any, number: int) -> None:
            rows = range(number * CHUNKS_PER_DOCUMENT, (number + 1) * CHUNKS_PER_DOCUMENT)
            pieces, at = [], 0
            for row in rows:
                pieces.append(Piece(start=at, end=at + len(corpus.texts[row]), tokens=150))
                at += len(corpus.texts[row]) + 1
            embeddings = [
                Embedding(vector=corpus.vectors[row].tobytes(), tokens=corpus.tokens[row % len(corpus.tokens)])
                for row in rows
            ]
            draft = DocumentDraft(
                id=new_id(),
                collection=made.key,
                owner="",
                source="text",
                identity=str(number),
                filename=None,
                url=None,
                title=f"Document {number}",
                content=" ".join(corpus.texts[row] for row in rows),
                content_hash=str(number),
                recipe="made-up",
                metadata={name: int(group[rows[0]]) for name, group in corpus.groups.items()},
                permissions=Permissions(visibility="public"),
                day=738000,
                pages=None,
                size=at,
            )
            documents.insert(db, draft, pieces, embeddings)

        for begin in range(0, corpus.documents, 16):
            database.writing(partial(_each, insert, range(begin, min(begin + 16, corpus.documents))))
        writer = IndexWriter(database, generations, "made-up")
        writer.fold()
        writer.compact()
        database.close()

    def open(self, folder: Path, queries: Queries, groups: Groups) -> None:
        from anabranch.knowledge.index.manifest import Generations
        from anabranch.knowledge.index.reader import IndexReader
        from anabranch.knowledge.records.sqlite import SqliteDatabase

        self._queries = queries
        self._database = SqliteDatabase.open(folder)
        self._reader = IndexReader(Generations(folder / "index"))

    def dense(self, query: int, limit: int, group: Group) -> Sequence[int]:
        def find(db: Any) -> list[int]:
            return list(self._view(db, group).nearest(self._queries.vectors[query], limit)[0].tolist())

        return [key - 1 for key in self._database.reading(find)]

    def keyword(self, query: int, limit: int, group: Group) -> Sequence[int]:
        def find(db: Any) -> list[int]:
            return list(self._view(db, group).lexical(self._queries.texts[query]).best(limit)[0].tolist())

        return [key - 1 for key in self._database.reading(find)]

    def hybrid(self, query: int, limit: int, group: Group, *, rerank: bool = False) -> Sequence[int]:
        """Everything from the lists to the passages themselves, as `Searcher` does it after the embedding."""
        from anabranch.domain.model import Embedding, Query
        from anabranch.knowledge.model import Caller
        from anabranch.knowledge.search import asking, fetch, interact, retrieve
        from anabranch.models.calibration import MINILM

        operator, text = Caller(operator=True), self._queries.texts[query]
        asked = Embedding(vector=self._queries.vectors[query].tobytes(), tokens=self._queries.tokens[query])

        def find(db: Any) -> list[int]:
            view = self._view(db, group)
            query = Query(text=text, limit=limit, similarity_threshold=0, rerank=rerank)
            wanted = asking(query, operator, [asked]).limit
            found, _ = retrieve(db, view, query, [asked], MINILM.relevance, wanted)
            if rerank:
                found = interact(db, found, asked)
            fetch(db, found, limit, operator, None)
            return list(found.keys[:limit].tolist())

        return [key - 1 for key in self._database.reading(find)]

    def reranked(self, query: int, limit: int, group: Group) -> Sequence[int]:
        return self.hybrid(query, limit, group, rerank=True)

    def _view(self, db: Any, group: Group) -> Any:
        from anabranch.domain.model import Filters
        from anabranch.knowledge.model import Caller

        filters = Filters(metadata={group[0]: group[1]}) if group else Filters()
        return self._reader.view(db, filters, Caller(operator=True))


class Bm25sAndNumpy:
    """What one would write by hand: bm25s, a matrix in memory, and ranks fused."""

    def load(self, corpus: Corpus, folder: Path) -> None:
        import bm25s

        index = bm25s.BM25()
        index.index(bm25s.tokenize(corpus.texts, show_progress=False), show_progress=False)
        index.save(str(folder))
        np.save(folder / "vectors.npy", corpus.vectors)

    def open(self, folder: Path, queries: Queries, groups: Groups) -> None:
        import bm25s

        self._queries = queries
        self._groups = groups
        self._bm25s = bm25s
        self._index = bm25s.BM25.load(str(folder), mmap=False)
        self._vectors = np.load(folder / "vectors.npy")

    def dense(self, query: int, limit: int, group: Group) -> Sequence[int]:
        return list(_top(self._similar(query, group), limit))

    def keyword(self, query: int, limit: int, group: Group) -> Sequence[int]:
        words = self._bm25s.tokenize([self._queries.texts[query]], show_progress=False)
        mask = self._mask(group)
        found, _ = self._index.retrieve(
            words, k=limit, show_progress=False, weight_mask=None if mask is None else mask.astype(np.float32)
        )
        return [int(row) for row in found[0]]

    def hybrid(self, query: int, limit: int, group: Group) -> Sequence[int]:
        lists = (self.dense(query, limit * OVERFETCH, group), self.keyword(query, limit * OVERFETCH, group))
        scores: dict[int, float] = {}
        for rows in lists:
            for rank, row in enumerate(rows, 1):
                scores[row] = scores.get(row, 0.0) + 1 / (60 + rank)
        return sorted(scores, key=lambda row: -scores[row])[:limit]

    def _similar(self, query: int, group: Group) -> NDArray[np.float32]:
        scores = self._vectors @ self._queries.vectors[query]
        mask = self._mask(group)
        return scores if mask is None else np.where(mask, scores, np.float32(-2))

    def _mask(self, group: Group) -> NDArray[np.bool_] | None:
        return None if group is None else self._groups[group[0]] == group[1]


class Lance:
    """LanceDB with its own full-text index, an HNSW index and scalar indexes on what is filtered by."""

    def load(self, corpus: Corpus, folder: Path) -> None:
        import lancedb
        import pyarrow as pa

        vectors = pa.FixedSizeListArray.from_arrays(pa.array(corpus.vectors.reshape(-1)), DIMENSIONS)
        columns: dict[str, Any] = {
            "row": pa.array(np.arange(len(corpus.texts))),
            "text": corpus.texts,
            "vector": vectors,
        }
        columns |= {name: pa.array(group) for name, group in corpus.groups.items()}
        table = lancedb.connect(folder).create_table("chunks", pa.table(columns))
        table.create_fts_index("text", with_position=False, replace=True)
        for name in corpus.groups:
            table.create_scalar_index(name)
        table.create_index(metric="cosine", vector_column_name="vector", index_type="IVF_HNSW_SQ")

    def open(self, folder: Path, queries: Queries, groups: Groups) -> None:
        import lancedb
        from lancedb.rerankers import RRFReranker

        self._queries = queries
        self._table = lancedb.connect(folder).open_table("chunks")
        self._fuse = RRFReranker()

    def dense(self, query: int, limit: int, group: Group) -> Sequence[int]:
        search = self._table.search(self._queries.vectors[query]).metric("cosine")
        return self._rows(search, limit, group)

    def keyword(self, query: int, limit: int, group: Group) -> Sequence[int]:
        return self._rows(self._table.search(self._queries.texts[query], query_type="fts"), limit, group)

    def hybrid(self, query: int, limit: int, group: Group) -> Sequence[int]:
        search = self._table.search(query_type="hybrid").vector(self._queries.vectors[query])
        search = search.text(self._queries.texts[query]).rerank(self._fuse)
        return self._rows(search, limit * OVERFETCH, group)[:limit]

    def _rows(self, search: Any, limit: int, group: Group) -> list[int]:
        if group is not None:
            search = search.where(f"{group[0]} = {group[1]}", prefilter=True)
        return list(search.limit(limit).select(["row", "text"]).to_arrow()["row"].to_pylist())


class Chroma:
    """Chroma has no keyword ranking of its own: dense only."""

    def load(self, corpus: Corpus, folder: Path) -> None:
        import chromadb

        client = chromadb.PersistentClient(str(folder), chromadb.Settings(anonymized_telemetry=False))
        collection = client.create_collection("chunks", metadata={"hnsw:space": "cosine"})
        for begin in range(0, len(corpus.texts), 5_000):
            rows = range(begin, min(begin + 5_000, len(corpus.texts)))
            collection.add(
                ids=[str(row) for row in rows],
                embeddings=corpus.vectors[rows.start : rows.stop],
                documents=corpus.texts[rows.start : rows.stop],
                metadatas=[{name: int(group[row]) for name, group in corpus.groups.items()} for row in rows],
            )

    def open(self, folder: Path, queries: Queries, groups: Groups) -> None:
        import chromadb

        self._queries = queries
        client = chromadb.PersistentClient(str(folder), chromadb.Settings(anonymized_telemetry=False))
        self._collection = client.get_collection("chunks")

    def dense(self, query: int, limit: int, group: Group) -> Sequence[int]:
        where: Any = {group[0]: group[1]} if group else None
        found = self._collection.query(
            query_embeddings=[self._queries.vectors[query]], n_results=limit, where=where, include=["documents"]
        )
        return [int(one) for one in found["ids"][0]]

    def keyword(self, *_: object) -> None:
        return None

    def hybrid(self, *_: object) -> None:
        return None


def _each(insert: Callable[[Any, int], None], numbers: range, db: Any) -> None:
    for number in numbers:
        insert(db, number)


def _top(scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
    best = np.argpartition(-scores, limit)[:limit]
    return np.asarray(best[np.argsort(-scores[best])])


ENGINES = {"anabranch": Ours, "bm25s + numpy": Bm25sAndNumpy, "LanceDB": Lance, "Chroma": Chroma}
