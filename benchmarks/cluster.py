"""python -m benchmarks.cluster --database URL --index URL [--chunks N]: hybrid search over made-up chunks with records
in PostgreSQL and the index in OpenSearch: how fast both are filled, and the time of a search under filters."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from anabranch.app.search_index import index_writer, open_index
from anabranch.app.startup import outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.model import Embedding, Filters, Query
from anabranch.knowledge.model import Caller, CollectionSettings, Piece
from anabranch.knowledge.records import attributes, collections, documents
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.search import Searcher
from anabranch.testing import FakeEmbedder
from benchmarks.query import made_up_document
from benchmarks.search import data

RESULT = Path(__file__).parent / "results" / "cluster.json"
BATCH = 100
REHEARSAL = 20
LIMIT = 10
FILTERS = {"no filter": {}, "10%": {"g10": "3"}, "0.1%": {"g1000": "3"}}


class Made(FakeEmbedder):
    """The vectors of the questions are those of the corpus; there are no token vectors."""

    def __init__(self, questions: data.Queries) -> None:
        super().__init__(dimensions=data.DIMENSIONS)
        self._known = dict(zip(questions.texts, questions.vectors, strict=True))

    async def embed(self, texts: Sequence[str]) -> list[Embedding]:
        return [Embedding(vector=self._known[text].tobytes(), tokens=b"") for text in texts]


def fill(database: Database, corpus: data.Corpus, embedder: str) -> None:
    own = CollectionSettings(embedding_model=embedder)
    create = partial(collections.create, owner="", name="all", description="", settings=own)
    made = database.writing(create)
    assert made is not None, "the database is empty"
    database.writing(lambda db: documents.require_embedder(db, embedder, data.DIMENSIONS))

    def insert(db: Session, numbers: Iterable[int]) -> None:
        for number in numbers:
            rows = range(number * data.CHUNKS_PER_DOCUMENT, (number + 1) * data.CHUNKS_PER_DOCUMENT)
            ends = np.cumsum([len(corpus.texts[row]) + 1 for row in rows]).tolist()
            spans = ((end - 1 - len(corpus.texts[row]), end - 1) for row, end in zip(rows, ends, strict=True))
            groups = {name: str(numbers[rows[0]]) for name, numbers in corpus.groups.items()}
            draft = made_up_document(number, made.key, [corpus.texts[row] for row in rows], **groups)
            vectors = [Embedding(vector=corpus.vectors[row].tobytes(), tokens=b"") for row in rows]
            documents.insert(db, draft, [Piece(start=begin, end=end, tokens=150) for begin, end in spans], vectors)

    for begin in range(0, corpus.documents, BATCH):
        database.writing(partial(insert, numbers=range(begin, min(begin + BATCH, corpus.documents))))
        if begin % 10_000 == 0:
            print(f"{begin * data.CHUNKS_PER_DOCUMENT:,} chunks stored", flush=True)


async def searched(settings: Settings, database: Database, questions: data.Queries) -> dict[str, Any]:
    """Each question with each filter in turn."""
    embedder = Made(questions)
    took: dict[str, list[float]] = {name: [] for name in FILTERS}
    spent = dict.fromkeys(FILTERS, 0.0)
    found = dict.fromkeys(FILTERS, 0)
    async with outbound_for(settings) as outbound:
        index = open_index(settings, outbound, embedder.name)
        searcher = Searcher(database, index, embedder, None)
        for number, text in enumerate(questions.texts):
            for name, metadata in FILTERS.items():
                filters = Filters(metadata=metadata)
                query = Query(text=text, limit=LIMIT, similarity_threshold=0.0, rerank=False, filters=filters)
                began, cpu = time.perf_counter(), time.process_time()
                hits = await searcher.search(query, Caller(user="somebody"), None)
                if number >= REHEARSAL:
                    took[name].append((time.perf_counter() - began) * 1_000)
                    spent[name] += time.process_time() - cpu
                    found[name] += len(hits.passages)
    count = len(questions.texts) - REHEARSAL
    return {
        name: {
            "p50_ms": round(float(np.percentile(times, 50)), 1),
            "p99_ms": round(float(np.percentile(times, 99)), 1),
            "cpu_ms": round(1_000 * spent[name] / count, 1),
            "passages": round(found[name] / count, 1),
        }
        for name, times in took.items()
    }


async def recall(settings: Settings, database: Database, corpus: data.Corpus, questions: data.Queries) -> float:
    """The share of the ten nearest chunks that OpenSearch has among its own."""
    embedder = Made(questions)
    shares = []
    async with outbound_for(settings) as outbound:
        index: Any = open_index(settings, outbound, embedder.name)
        name = database.reading(index_name)
        for vector in questions.vectors[:50]:
            near = {"vector": vector.astype(float).tolist(), "k": 60}
            body = msgspec.json.encode({"size": 60, "_source": False, "query": {"knn": {"vector": near}}})
            reply = await index._client.call("POST", f"{name}/_search", body)
            keys = {int(hit["_id"]) for hit in reply["hits"]["hits"]}
            shares.append(len(keys & nearest(corpus.vectors, vector)) / 10)
    return round(float(np.mean(shares)), 3)


def nearest(vectors: NDArray[np.float32], vector: NDArray[np.float32]) -> set[int]:
    scores = vectors @ vector
    return {int(row) + 1 for row in np.argpartition(-scores, 10)[:10]}


def index_name(db: Session) -> str:
    from anabranch.knowledge.records.index_position import current

    found = current(db)
    assert found is not None
    return found.name


def memory_mb(port: int) -> int:
    """The resident memory of the server at a port."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.pid and one.laddr[1:] == (port,):
            return round(psutil.Process(one.pid).memory_info().rss / 1e6)
    return 0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--database", required=True, help="the address of an empty PostgreSQL database")
    options.add_argument("--index", required=True, help="the address of OpenSearch, with a name")
    options.add_argument("--chunks", type=int, default=1_000_000)
    options.add_argument("--queries", type=int, default=220)
    options.add_argument("--filled", action="store_true", help="the database has the chunks from an earlier run")
    options.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    given = options.parse_args()
    corpus = data.corpus(given.chunks)
    questions = data.queries(corpus, given.queries)
    settings = Settings(
        database_url=given.database, index_url=given.index, index_shards=2, index_replicas=0, index_timeout=60.0
    )
    embedder = Made(questions).name
    with closing(PostgresDatabase.open(given.database)) as database:
        began = time.perf_counter()
        if not given.filled:
            fill(database, corpus, embedder)
        stored_s = time.perf_counter() - began
        began, cpu = time.perf_counter(), time.process_time()
        with index_writer(settings, database, embedder) as writer:
            writer.rebuild(lambda done, total: print(f"{done:,} of {total:,} chunks indexed", flush=True))
        indexed_s, indexed_cpu_s = time.perf_counter() - began, time.process_time() - cpu
        found = asyncio.run(searched(settings, database, questions))
        known = asyncio.run(recall(settings, database, corpus, questions))
        size = database.reading(lambda db: db.size())
        count = database.reading(lambda db: len(attributes.documents_with(db, "g10", "3")))
    port = int(given.index.split("://")[1].split("/")[0].split(",")[0].rpartition(":")[2])
    result = {
        "chunks": given.chunks,
        "stored_per_s": None if given.filled else round(given.chunks / stored_s),
        "indexed_per_s": round(given.chunks / indexed_s),
        "indexing_cpu_ms_per_chunk": round(1_000 * indexed_cpu_s / given.chunks, 2),
        "records_mb": round(size / 1e6),
        "opensearch_memory_mb": memory_mb(port),
        "own_memory_mb": round(psutil.Process().memory_info().rss / 1e6),
        "documents_of_10%": count,
        "searches": found,
        "recall_of_the_ten_nearest": known,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result, indent=2))
    if given.keep:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
