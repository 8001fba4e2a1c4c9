"""Search: dense and keyword lists, fused by rank, reranked, checked against the records, each score kept."""

import asyncio
import math
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.contracts import Embedder, Reranker
from anabranch.domain.errors import RerankFailed
from anabranch.domain.model import Embedding, Passage, Place, Query, Scores
from anabranch.knowledge import rerank
from anabranch.knowledge.index.reader import Moved, Reader, View
from anabranch.knowledge.index.segment import products
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import facts
from anabranch.knowledge.records.database import Database, StoreFailed
from anabranch.knowledge.records.documents import permissions_of

OVERFETCH = 5
RRF_K = 60
DENSE_WEIGHT = 0.5
MISSING_RANK = 1000
# As many candidates are fetched and reranked at least, however few are wanted: smoothing needs company.
POOL = 50
# What the records no longer have must not leave a page short.
SPARE = 2
SNAPSHOTS = 5
NEAR, SHARED, BIAS = 5.4, 2.0, -1.9

FETCH = """
SELECT chunks.key AS chunk_key, chunks.id AS chunk_id, chunks.start_char, chunks.end_char,
       chunks.tokens AS chunk_tokens, chunks.headers, chunks.page, chunks.text, documents.*,
       collections.name AS collection_name
FROM chunks JOIN documents ON documents.key = chunks.document JOIN collections ON collections.key = documents.collection
WHERE chunks.key IN (SELECT value FROM json_each(?))
"""


class Candidates(NamedTuple):
    """What retrieval found, best first, and every score of it."""

    keys: NDArray[np.int64]
    dense: NDArray[np.float32]
    sparse: NDArray[np.float32]
    shared: NDArray[np.float32]
    fused: NDArray[np.float32]
    reranked: NDArray[np.float32] | None

    def chosen(self, order: NDArray[np.int64]) -> "Candidates":
        return Candidates(*(part[order] if part is not None else None for part in self))  # type: ignore[arg-type]


class Searcher:
    def __init__(self, database: Database, reader: Reader, embedder: Embedder, reranker: Reranker | None) -> None:
        self._database = database
        self._reader = reader
        self._embedder = embedder
        self._reranker = reranker

    async def search(self, query: Query, caller: Caller, source: str | None) -> list[Passage]:
        """The best passages that the caller may see, best first, as of one moment; without a `source` each is named for
        its collection."""
        texts = [query.text, *query.variants, *([query.hypothetical] if query.hypothetical else [])]
        embeddings = await self._embedder.embed(texts)
        found = await asyncio.to_thread(self._found, query, caller, embeddings, source)
        if query.rerank and self._reranker is not None and found:
            with suppress(RerankFailed):  # then the built-in order stands
                found = await self._reranked(query, found)
        return [one for one in found if one.score >= query.similarity_threshold][: query.limit]

    async def _reranked(self, query: Query, found: Sequence[Passage]) -> list[Passage]:
        """By a model that reads question and passage together."""
        assert self._reranker is not None
        scores = await self._reranker.score(query.text, found)
        scored = [
            msgspec.structs.replace(
                passage,
                place=msgspec.structs.replace(
                    passage.place, scores=msgspec.structs.replace(passage.place.scores, rerank=float(score))
                ),
            )
            for passage, score in zip(found, scores, strict=True)
            if passage.place is not None
        ]
        return in_order(sorted(scored, key=lambda one: -(one.place.scores.rerank or 0.0) if one.place else 0.0))

    def _found(
        self, query: Query, caller: Caller, embeddings: Sequence[Embedding], source: str | None
    ) -> list[Passage]:
        def work(db: sqlite3.Connection) -> list[Passage]:
            facts.check_embedder(db, self._embedder.name)  # somebody may have rebuilt the index with another
            view = self._reader.view(db, query.filters, caller)
            candidates = retrieve(view, query, embeddings)
            if query.rerank and len(candidates.keys):
                candidates = interact(db, view, candidates, embeddings[0])
            wanted = max(query.limit, POOL) if query.rerank and self._reranker is not None else query.limit
            return fetch(db, candidates, wanted, caller, source)

        for _ in range(SNAPSHOTS):
            try:
                return self._database.reading(work)
            except Moved:
                continue
        raise StoreFailed("The index is being replaced too often to search it; ask again.")


def retrieve(view: View, query: Query, embeddings: Sequence[Embedding]) -> Candidates:
    """Both lists, over-fetched, fused by rank; of the best, every score."""
    wanted = max(query.limit * OVERFETCH, POOL)
    vectors = [np.frombuffer(embedding.vector, np.float32) for embedding in embeddings]
    dense = _best([view.nearest(vector, wanted) for vector in vectors], wanted)
    lexical = [view.lexical(text) for text in (query.text, *query.variants)]
    sparse = _best([one.best(wanted) for one in lexical], wanted)
    keys = np.union1d(dense, sparse)
    fused = DENSE_WEIGHT / (RRF_K + _ranks(keys, dense)) + (1 - DENSE_WEIGHT) / (RRF_K + _ranks(keys, sparse))
    best = np.lexsort((keys, -fused))[: max(POOL, query.limit) if query.rerank else SPARE * query.limit]
    keys = keys[best]
    return Candidates(
        keys=keys,
        dense=products(np.stack(vectors), view.vectors(keys, len(vectors[0]))).max(axis=0),
        sparse=np.max([one.at(keys) for one in lexical], axis=0).astype(np.float32),
        shared=lexical[0].shares(keys),
        fused=fused[best].astype(np.float32),
        reranked=None,
    )


def interact(db: sqlite3.Connection, view: View, found: Candidates, question: Embedding) -> Candidates:
    """Late interaction, where the embedder knows tokens; the other two scores and the neighbours in any case."""
    width = len(question.vector) // 32
    tokens = None
    if question.tokens:
        stored = dict(
            db.execute(
                "SELECT chunk, tokens FROM embeddings WHERE chunk IN (SELECT value FROM json_each(?))",
                _listed(found.keys.tolist()),
            )
        )
        tokens = rerank.token_scores(question.tokens, [stored.get(key, b"") for key in found.keys.tolist()], width)
    scores = rerank.combined(found.dense, found.sparse, tokens, view.vectors(found.keys, len(question.vector) // 4))
    return found._replace(reranked=scores).chosen(np.lexsort((found.keys, -scores)))


def fetch(db: sqlite3.Connection, found: Candidates, wanted: int, caller: Caller, source: str | None) -> list[Passage]:
    """The passages themselves, each checked once more against the records."""
    passages: list[Passage] = []
    for begin in range(0, len(found.keys), wanted):  # more than once only if the index had something that is not there
        keys = found.keys[begin : begin + wanted].tolist()
        rows = {row["chunk_key"]: row for row in db.execute(FETCH, _listed(keys))}
        for at, key in enumerate(keys, begin):
            row = rows.get(key)
            if row is not None and permissions_of(row).permits(caller, row["owner"]):
                passages.append(_passage(row, found, at, source))
        if len(passages) >= wanted:
            break
    return in_order(passages[:wanted])


def in_order(passages: Sequence[Passage]) -> list[Passage]:
    """With scores that do not rise from one rank to the next: nothing is less relevant than what stands below it."""
    ordered: list[Passage] = []
    highest = 0.0
    for passage in reversed(passages):
        highest = max(highest, passage.score)
        ordered.append(msgspec.structs.replace(passage, score=highest) if passage.score < highest else passage)
    return ordered[::-1]


def _relevance(dense: float, shared: float) -> float:
    """How likely a passage is of use, from 0 to 1: a number that can be compared between collections. Fitted so that
    at 0.5 little of use is lost (docs/search.md)."""
    return 1 / (1 + math.exp(-(NEAR * dense + SHARED * shared + BIAS)))


def _passage(row: sqlite3.Row, found: Candidates, at: int, source: str | None) -> Passage:
    return Passage(
        source=row["collection_name"] if source is None else source,
        title=row["title"],
        text=row["text"],
        score=_relevance(float(found.dense[at]), float(found.shared[at])),
        document_id=row["id"],
        place=Place(
            chunk_id=row["chunk_id"],
            collection=row["collection_name"],
            start=row["start_char"],
            end=row["end_char"],
            tokens=row["chunk_tokens"],
            page=row["page"],
            headers=tuple(msgspec.json.decode(row["headers"])),
            url=row["url"],
            metadata=msgspec.json.decode(row["metadata"]),
            scores=Scores(
                dense=float(found.dense[at]),
                sparse=float(found.sparse[at]) or None,
                fused=float(found.fused[at]),
                rerank=float(found.reranked[at]) if found.reranked is not None else None,
            ),
        ),
    )


def _listed(keys: Sequence[int]) -> tuple[str]:
    return (msgspec.json.encode(keys).decode(),)


def _best(lists: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]], limit: int) -> NDArray[np.int64]:
    """The keys of several lists as one list, each at the best of its scores."""
    if len(lists) == 1:
        return lists[0][0]
    keys = np.concatenate([one for one, _ in lists])
    scores = np.concatenate([one for _, one in lists])
    order = np.lexsort((keys, -scores))
    _, first = np.unique(keys[order], return_index=True)
    return keys[order][np.sort(first)][:limit]


def _ranks(keys: NDArray[np.int64], ranked: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank of each key, from 1, or the rank of what is missing."""
    ranks = np.full(len(keys), MISSING_RANK, np.int64)
    ranks[np.searchsorted(keys, ranked)] = np.arange(1, len(ranked) + 1)
    return ranks
