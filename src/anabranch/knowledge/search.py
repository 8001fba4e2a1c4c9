"""Search: dense and keyword lists, fused by rank, reranked, checked against the records, each score kept."""

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.contracts import Embedder, Reranker
from anabranch.domain.errors import RerankFailed
from anabranch.domain.model import Embedding, Passage, Place, Query, Scores
from anabranch.knowledge import rerank
from anabranch.knowledge.index.reader import IndexReader, Moved, View
from anabranch.knowledge.index.segment import products
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import facts
from anabranch.knowledge.records.database import Database, StoreFailed
from anabranch.knowledge.records.documents import permissions_of
from anabranch.knowledge.rerank import mmr

OVERFETCH = 5
RRF_K = 60
DENSE_WEIGHT = 0.5
MISSING_RANK = 1000
# As many candidates are fetched and reranked at least, however few are wanted: smoothing needs company.
POOL = 50
# What the records no longer have must not leave a page short.
SPARE = 2
# Variety is chosen among the best, so many times what is wanted: from further down it would bring what is unlike the
# rest because it is beside the point (docs/search.md). What is as good as a copy of something better does not count.
CHOICE = 2
COPY = 0.9
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


class SearchHits(NamedTuple):
    """Passages, best first, and row by row their vectors where the choice among them is still to be made. `seen` stands
    for all that could have been found."""

    passages: list[Passage]
    seen: str
    vectors: NDArray[np.float32] | None = None


class Searcher:
    def __init__(self, database: Database, reader: IndexReader, embedder: Embedder, reranker: Reranker | None) -> None:
        self._database = database
        self._reader = reader
        self._embedder = embedder
        self._reranker = reranker

    async def search(self, query: Query, caller: Caller, source: str | None) -> SearchHits:
        """The best passages that the caller may see, best first (or as they were chosen for variety), as of one moment;
        without a `source` each is named for its collection."""
        texts = [query.text, *query.variants, *([query.hypothetical] if query.hypothetical else [])]
        embeddings = await self._embedder.embed(texts)
        found = await asyncio.to_thread(self._found, query, caller, embeddings, source)
        if query.rerank and self._reranker is not None and found.passages:
            try:
                found = await self._reranked(query, found)
            except RerankFailed:  # then the built-in order stands, and the answer is not worth keeping
                found = found._replace(seen="")
        passages = found.passages
        if found.vectors is not None:
            scores = np.array([passage.score for passage in passages])
            passages = [passages[at] for at in varied(scores, found.vectors, query)]
        enough = [one for one in passages if one.score >= query.similarity_threshold]
        return SearchHits(enough[: query.limit], found.seen)

    async def _reranked(self, query: Query, found: SearchHits) -> SearchHits:
        """By a model that reads question and passage together."""
        assert self._reranker is not None
        scores = await self._reranker.score(query.text, found.passages)
        scored = [_scored(*pair) for pair in zip(found.passages, scores, strict=True)]
        order = sorted(range(len(scored)), key=lambda at: -scores[at])
        vectors = None if found.vectors is None else found.vectors[order]
        return SearchHits(in_order([scored[at] for at in order]), found.seen, vectors)

    def _found(self, query: Query, caller: Caller, embeddings: Sequence[Embedding], source: str | None) -> SearchHits:
        def work(db: sqlite3.Connection) -> SearchHits:
            facts.check_embedder(db, self._embedder.name)  # somebody may have rebuilt the index with another
            view = self._reader.view(db, query.filters, caller)
            candidates = retrieve(view, query, embeddings)
            if query.rerank and len(candidates.keys):
                candidates = interact(db, view, candidates, embeddings[0])
            vectors = None
            if query.diversity is not None:
                vectors = view.vectors(candidates.keys, len(embeddings[0].vector) // 4)
            if query.rerank and self._reranker is not None:  # it has yet to say how relevant each is
                fetched = fetch(db, candidates, max(query.limit, POOL), caller, source)
                return SearchHits(
                    list(fetched.values()), view.seen, None if vectors is None else vectors[list(fetched)]
                )
            order = None if vectors is None else varied(relevance(candidates), vectors, query)
            return SearchHits(list(fetch(db, candidates, query.limit, caller, source, order).values()), view.seen)

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
    best = np.lexsort((keys, -fused))[: _pooled(query)]
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


def fetch(
    db: sqlite3.Connection,
    found: Candidates,
    wanted: int,
    caller: Caller,
    source: str | None,
    order: NDArray[np.int64] | None = None,
) -> dict[int, Passage]:
    """The passages themselves, by rank, each checked once more against the records: as many as are wanted, taken by
    rank or in the order of choice."""
    taking = np.arange(len(found.keys)) if order is None else order
    scores = relevance(found)
    passages: dict[int, Passage] = {}
    for begin in range(0, len(taking), wanted):  # more than once only if the index had something that is not there
        ranks = taking[begin : begin + wanted].tolist()
        keys = found.keys[ranks].tolist()
        rows = {row["chunk_key"]: row for row in db.execute(FETCH, _listed(keys))}
        for rank, key in zip(ranks, keys, strict=True):
            row = rows.get(key)
            if len(passages) < wanted and row is not None and permissions_of(row).permits(caller, row["owner"]):
                passages[rank] = _passage(row, found, rank, float(scores[rank]), source)
        if len(passages) >= wanted:
            break
    ranked = sorted(passages)
    passages.update(zip(ranked, in_order([passages[rank] for rank in ranked]), strict=True))
    return passages


def varied(scores: NDArray[np.float64], vectors: NDArray[np.float32], query: Query) -> NDArray[np.int64]:
    """What stands in order of relevance in the order of choice: first the few that are unlike each other, then the
    rest, in case the records have lost one of them."""
    shown = np.maximum.accumulate(scores[::-1])[::-1]
    copies = (np.tril(products(vectors, vectors), -1) > COPY).any(axis=1)
    near = (shown >= query.similarity_threshold) & (np.cumsum(~copies) <= CHOICE * query.limit)
    pool = int(np.count_nonzero(near))  # the first so many, for neither condition holds again once it has failed
    weight = 1.0 if query.diversity is None else query.diversity
    chosen = mmr(shown[:pool].astype(np.float32), vectors[:pool], query.limit, weight)
    return np.concatenate((chosen, np.setdiff1d(np.arange(len(scores)), chosen)))


def in_order(passages: Sequence[Passage]) -> list[Passage]:
    """With scores that do not rise from one rank to the next: nothing is less relevant than what stands below it."""
    ordered: list[Passage] = []
    highest = 0.0
    for passage in reversed(passages):
        highest = max(highest, passage.score)
        ordered.append(msgspec.structs.replace(passage, score=highest) if passage.score < highest else passage)
    return ordered[::-1]


def relevance(found: Candidates) -> NDArray[np.float64]:
    """How likely each is of use, from 0 to 1: a number that can be compared between collections. Fitted so that at 0.5
    little of use is lost (docs/search.md)."""
    likely: NDArray[np.float64] = NEAR * found.dense.astype(np.float64) + SHARED * found.shared + BIAS
    return 1 / (1 + np.exp(-likely))


def _passage(row: sqlite3.Row, found: Candidates, at: int, score: float, source: str | None) -> Passage:
    return Passage(
        source=row["collection_name"] if source is None else source,
        title=row["title"],
        text=row["text"],
        score=score,
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


def _scored(passage: Passage, score: float) -> Passage:
    """With what a reranking model gave it."""
    assert passage.place is not None
    scores = msgspec.structs.replace(passage.place.scores, rerank=float(score))
    return msgspec.structs.replace(passage, place=msgspec.structs.replace(passage.place, scores=scores))


def _pooled(query: Query) -> int:
    """How many candidates are looked at more closely."""
    choosing = query.rerank or query.diversity is not None
    return max(POOL, query.limit) if choosing else SPARE * query.limit


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
