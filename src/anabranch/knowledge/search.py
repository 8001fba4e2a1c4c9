"""Hybrid search in collections: candidates of both indexes, reranking, and diversity."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.contracts import Embedder, Reranker, RunInThread
from anabranch.domain.errors import RerankFailed
from anabranch.domain.explanation import ExplainedPassage, Notes
from anabranch.domain.model import Duplicate, Embedding, Passage, Place, Query, RelevanceCurve, Scores
from anabranch.knowledge.completing import MOST, completed
from anabranch.knowledge.distinct_chunks import DistinctChunks
from anabranch.knowledge.index.contract import Index, Wanted
from anabranch.knowledge.index.segment import products
from anabranch.knowledge.index.view import Lexical, View
from anabranch.knowledge.mmr import Floats, mmr
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import documents, embeddings
from anabranch.knowledge.records.database import Database, ResultRow, Session

T = TypeVar("T")

# Weights, tuned on Cranfield and Medline (docs/search.md).
DENSE = 1.0
SPARSE = 1.5
TOKENS = 0.7
NEIGHBOURS = 10
SMOOTHING = 0.3


def token_scores(question: bytes, chunks: Sequence[bytes], width: int) -> Floats:
    """MaxSim of each chunk: the mean over the question's tokens of the similarity of the closest token, from 0 to 1."""
    question_tokens = np.frombuffer(question, np.uint64).reshape(-1, width // 8)
    counts = np.fromiter((len(chunk) // width for chunk in chunks), np.int64, len(chunks))
    scores = np.zeros(len(chunks), np.float32)
    filled = np.flatnonzero(counts)
    if not len(question_tokens) or not len(filled):
        return scores
    columns = np.ascontiguousarray(np.frombuffer(b"".join(chunks), np.uint64).reshape(-1, width // 8).T)
    begins = np.concatenate(([0], np.cumsum(counts[filled])[:-1]))
    for token in question_tokens:
        apart = np.bitwise_count(columns[0] ^ token[0]).astype(np.uint16)
        for column, bits in zip(columns[1:], token[1:], strict=True):
            apart += np.bitwise_count(column ^ bits)
        scores[filled] += 1 - np.minimum.reduceat(apart, begins) / np.float32(width * 4)
    return scores / np.float32(len(question_tokens))


def combined(
    dense: Floats,
    sparse: Floats,
    tokens: Floats | None,
    vectors: Floats,
) -> Floats:
    """One score per candidate: the weighted sum of the standardised scores, smoothed over its nearest candidates."""
    total = DENSE * _standard(dense) + SPARSE * _standard(sparse)
    if tokens is not None:
        total = total + TOKENS * _standard(tokens)
    return smoothed(total, vectors)


def smoothed(scores: Floats, vectors: Floats) -> Floats:
    """Each score moved towards those of its nearest neighbours: relevant chunks are similar to each other."""
    count = min(NEIGHBOURS, len(scores) - 1)
    if count < 1:
        return scores
    alike = products(vectors, vectors)
    np.fill_diagonal(alike, -np.inf)
    near = np.argpartition(-alike, count - 1, axis=1)[:, :count]
    weights = np.maximum(np.take_along_axis(alike, near, axis=1), 0)
    around = (weights * scores[near]).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-6)
    return np.asarray((1 - SMOOTHING) * scores + SMOOTHING * around, np.float32)


def _standard(scores: Floats) -> Floats:
    return np.asarray((scores - scores.mean()) / np.float32(max(float(scores.std()), 1e-9)), np.float32)


OVERFETCH = 5
RRF_K = 60
DENSE_WEIGHT = 0.5
MISSING_RANK = 1000
# At least this many candidates are reranked: smoothing needs neighbours.
POOL = 50
SPARE = 2
# If near-duplicates leave less than a page, longer lists are read, up to this many chunks.
WIDEN, MOST_WANTED = 4, 2_000
# MMR chooses among the best CHOICE * limit candidates: further down, what is unlike the rest is usually irrelevant
# (docs/search.md). Near-copies of a better candidate do not count towards that number.
CHOICE = 2
COPY = 0.9
# Passages of documents with more characters stay as they were cut: reading the document would take too long.
MAX_CONTENT = 500_000


class Candidates(NamedTuple):
    """The retrieved chunks, best first, with their vectors and scores. `repeats` are those that were left out as
    near-duplicates, if the query asks for an explanation."""

    keys: NDArray[np.int64]
    vectors: Floats
    dense: Floats
    sparse: Floats
    shared: Floats
    fused: Floats
    relevance: NDArray[np.float64]
    reranked: Floats | None = None
    repeats: "Candidates | None" = None

    def chosen(self, order: NDArray[np.int64]) -> "Candidates":
        parts = (part[order] if part is not None else None for part in self[:-1])
        return Candidates(*parts)._replace(repeats=self.repeats)  # type: ignore[arg-type]


class SearchHits(NamedTuple):
    """Passages, best first. `seen` is a hash of all documents that the caller could have found; `vectors` are those of
    the passages, if MMR has yet to choose among them; `notes` what was done to all that were found, if the query asks
    for it. `partial`: a part of the index is damaged, and was not searched."""

    passages: list[Passage]
    seen: str
    vectors: Floats | None = None
    notes: Notes | None = None
    partial: bool = False


# What is read of a question, in characters; more than the window of most embedders.
MAX_TEXT = 20_000


class Searcher:
    def __init__(
        self,
        database: Database,
        index: Index,
        embedder: Embedder,
        reranker: Reranker | None,
        run: RunInThread = asyncio.to_thread,
    ) -> None:
        self._run = run
        self._database = database
        self._index = index
        self._embedder = embedder
        self._reranker = reranker

    async def search(self, query: Query, caller: Caller, source: str | None) -> SearchHits:
        """The best passages that the caller may see, best first (or in MMR order), from one snapshot; without a
        `source` each is named for its collection. Of a long question the beginning is searched for."""
        query = msgspec.structs.replace(query, text=query.text[:MAX_TEXT])
        texts = [query.text, *query.variants, *([query.hypothetical] if query.hypothetical else [])]
        embedded = await self._embedder.embed(texts)
        found = await self._found(query, caller, embedded, source)
        if query.rerank and self._reranker is not None and found.passages:
            try:
                found = await self._reranked(query, found)
            except RerankFailed:  # the built-in order is used, and the answer must not be cached
                found = found._replace(seen="")
        passages = found.passages
        if found.vectors is not None:
            order = varied(np.array([passage.score for passage in passages]), found.vectors, query)
            passages = [passages[at] for at in order]
            if found.notes is not None:
                found.notes.ranked(passages[: query.limit], "variety")
        relevant = [one for one in passages if one.score >= query.similarity_threshold]
        if found.notes is not None:
            note_ends(found.notes, passages, query, is_varied=found.vectors is not None)
        return SearchHits(relevant[: query.limit], found.seen, notes=found.notes, partial=found.partial)

    async def _found(
        self, query: Query, caller: Caller, embedded: Sequence[Embedding], source: str | None
    ) -> SearchHits:
        """The passages to return, or those that the reranking model orders. If near-duplicates leave too few, longer
        lists are read."""
        distinct = None
        if query.near_duplicates is not None:
            distinct = DistinctChunks(query.near_duplicates, caller, source)
        search = partial(self._candidates, query=query, caller=caller, embedded=embedded, source=source)
        wanted = asking(query, caller, embedded)
        while True:
            is_last = distinct is None or wanted.limit >= MOST_WANTED
            work = partial(search, wanted=wanted.limit, distinct=distinct, is_last=is_last)
            found = await self._index.find(self._reading, wanted, work)
            if found is not None:
                return found
            wanted = wanted._replace(limit=min(WIDEN * wanted.limit, MOST_WANTED))

    def _reading(self, work: Callable[[Session], T]) -> Awaitable[T]:
        return self._run(self._database.reading, work)

    async def _reranked(self, query: Query, found: SearchHits) -> SearchHits:
        """The passages in the order of the reranking model."""
        assert self._reranker is not None
        scores = await self._reranker.score(query.text, found.passages)
        scored = [_scored(*pair) for pair in zip(found.passages, scores, strict=True)]
        order = sorted(range(len(scored)), key=lambda at: -scores[at])
        vectors = None if found.vectors is None else found.vectors[order]
        if found.notes is not None:
            for rank, at in enumerate(order, 1):
                found.notes.add(scored[at], "rerank", rank=rank, score=scores[at], note="by the reranking model")
        return SearchHits(in_order([scored[at] for at in order]), found.seen, vectors, found.notes, found.partial)

    def _candidates(
        self,
        db: Session,
        view: View,
        *,
        query: Query,
        caller: Caller,
        embedded: Sequence[Embedding],
        source: str | None,
        wanted: int,
        distinct: DistinctChunks | None,
        is_last: bool,
    ) -> SearchHits | None:
        """The passages of lists of this length; None if they are too few, and longer lists would have more."""
        documents.check_embedder(db, self._embedder.name)  # `index rebuild` may have changed it
        notes = Notes() if query.explain else None
        curve = self._embedder.calibration.relevance
        found, has_more = retrieve(db, view, query, embedded, curve, wanted, distinct)
        if has_more and len(found.keys) < query.limit and not is_last:
            return None
        if query.rerank and len(found.keys):
            found = interact(db, found, embedded[0])
        vectors = order = None
        if query.rerank and self._reranker is not None:
            fetched = fetch(db, found, max(query.limit, POOL), caller, source, complete=query.complete)
            vectors = None if query.diversity is None else found.vectors[list(fetched)]
        else:
            order = None if query.diversity is None else varied(found.relevance, found.vectors, query)
            fetched = fetch(db, found, query.limit, caller, source, order, complete=query.complete)
        if notes is not None:
            others = fetch_others(db, found, fetched, caller, source)
            note_search(notes, found, {**fetched, **others}, distinct)
            note_choice(notes, found, fetched, others, is_varied=order is not None)
        passages = list(fetched.values())
        if distinct is not None and distinct.copies:
            passages = [_naming(passage, distinct.copies) for passage in passages]
        # What is missing now is found later, so a partial answer must not be cached.
        return SearchHits(passages, "" if view.partial else view.seen, vectors, notes, view.partial)


def asking(query: Query, caller: Caller, embedded: Sequence[Embedding]) -> Wanted:
    """What a query wants of the index."""
    texts, limit = (query.text, *query.variants), max(query.limit * OVERFETCH, POOL)
    return Wanted(query.filters, caller, texts, embedded, limit)


def retrieve(
    db: Session,
    view: View,
    query: Query,
    embedded: Sequence[Embedding],
    curve: RelevanceCurve,
    wanted: int,
    distinct: DistinctChunks | None = None,
) -> tuple[Candidates, bool]:
    """The best chunks of the dense and the BM25 list, each of so many, fused by reciprocal rank, with all scores; with
    `distinct`, only those that it selects. And whether longer lists would have more."""
    vectors = [np.frombuffer(embedding.vector, np.float32) for embedding in embedded]
    lexical = [view.lexical(text) for text in (query.text, *query.variants)]
    # Reranking and MMR choose among more candidates; others may have been deleted since they were indexed.
    choosing = query.rerank or query.diversity is not None
    size = max(POOL, query.limit) if choosing else SPARE * query.limit
    ranked, fused, has_more = _fused(view, vectors, lexical, wanted)
    if distinct is None:
        best, stored = np.arange(len(ranked))[:size], view.vectors(ranked[:size], len(vectors[0]))
    else:
        best, stored = distinct.first(db, view, ranked, size, len(vectors[0]))
    found = _with_scores(ranked[best], stored, fused[best], vectors, lexical, curve)
    if not query.explain or distinct is None or not distinct.repeats:
        return found, has_more
    again = np.flatnonzero(np.isin(ranked, list(distinct.repeats)))
    stored = view.vectors(ranked[again], len(vectors[0]))
    repeats = _with_scores(ranked[again], stored, fused[again], vectors, lexical, curve)
    return found._replace(repeats=repeats), has_more


def _with_scores(
    keys: NDArray[np.int64],
    stored: Floats,
    fused: NDArray[np.float64],
    vectors: Sequence[Floats],
    lexical: Sequence[Lexical],
    curve: RelevanceCurve,
) -> Candidates:
    dense = products(np.stack(vectors), stored).max(axis=0)
    shared = lexical[0].shares(keys)
    return Candidates(
        keys=keys,
        vectors=stored,
        dense=dense,
        sparse=np.max([one.at(keys) for one in lexical], axis=0).astype(np.float32),
        shared=shared,
        fused=fused.astype(np.float32),
        relevance=relevance(dense, shared, curve),
    )


def _fused(
    view: View, vectors: Sequence[Floats], lexical: Sequence[Lexical], wanted: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], bool]:
    """The keys of both lists by their fused scores, the scores, and whether longer lists would have more."""
    dense = _best([view.nearest(vector, wanted) for vector in vectors], wanted)
    sparse = _best([one.best(wanted) for one in lexical], wanted)
    keys = np.union1d(dense, sparse)
    fused = DENSE_WEIGHT / (RRF_K + _ranks(keys, dense)) + (1 - DENSE_WEIGHT) / (RRF_K + _ranks(keys, sparse))
    order = np.lexsort((keys, -fused))
    return keys[order], fused[order], wanted in (len(dense), len(sparse))


def interact(db: Session, found: Candidates, question: Embedding) -> Candidates:
    """Rerank by dense, BM25 and (if the embedder has token vectors) late-interaction scores, smoothed."""
    tokens = None
    if question.tokens:
        keys = found.keys.tolist()
        stored = embeddings.token_vectors(db, keys)
        tokens = token_scores(question.tokens, [stored.get(key, b"") for key in keys], len(question.vector) // 32)
    scores = combined(found.dense, found.sparse, tokens, found.vectors)
    return found._replace(reranked=scores).chosen(np.lexsort((found.keys, -scores)))


def fetch(
    db: Session,
    found: Candidates,
    wanted: int,
    caller: Caller,
    source: str | None,
    order: NDArray[np.int64] | None = None,
    *,
    complete: bool = False,
) -> dict[int, Passage]:
    """The passages by rank, each checked against the permissions in the records: the first `wanted`, by rank or in the
    given order. With `complete`, none ends inside a list, or before the code that it introduces."""
    ordered = np.arange(len(found.keys)) if order is None else order
    passages: dict[int, Passage] = {}
    for begin in range(0, len(ordered), wanted):  # more than once only if indexed chunks were deleted
        keys = {rank: int(found.keys[rank]) for rank in ordered[begin : begin + wanted].tolist()}
        rows = documents.chunks_by_key(db, caller, list(keys.values()))
        for rank, row in ((rank, rows[key]) for rank, key in keys.items() if key in rows):
            if len(passages) < wanted:
                passages[rank] = _passage(row, found, rank, source)
        if len(passages) >= wanted:
            break
    ranked = sorted(passages)
    if complete:
        passages = completed_passages(db, passages, found)
    passages.update(zip(ranked, in_order([passages[rank] for rank in ranked]), strict=True))
    return passages


def completed_passages(db: Session, passages: Mapping[int, Passage], found: Candidates) -> dict[int, Passage]:
    keys = {rank: int(found.keys[rank]) for rank in passages}
    following = documents.following_texts(db, list(keys.values()), MOST + 1, MAX_CONTENT)
    return {rank: _completed(passage, following.get(keys[rank], "")) for rank, passage in passages.items()}


def _completed(passage: Passage, following: str) -> Passage:
    place = passage.place
    assert place is not None
    added = completed(passage.text, following) - len(passage.text)
    if not added:
        return passage
    tokens = round(place.tokens * (1 + added / max(1, len(passage.text))))
    longer = msgspec.structs.replace(place, end=place.end + added, tokens=tokens, added=added)
    return msgspec.structs.replace(passage, text=passage.text + following[:added], place=longer)


def varied(scores: NDArray[np.float64], vectors: Floats, query: Query) -> NDArray[np.int64]:
    """The ranks in MMR order: first the chosen ones, then the rest, in case a chosen one was deleted."""
    monotone = np.maximum.accumulate(scores[::-1])[::-1]
    copies = (np.tril(products(vectors, vectors), -1) > COPY).any(axis=1)
    near = (monotone >= query.similarity_threshold) & (np.cumsum(~copies) <= CHOICE * query.limit)
    pool = int(np.count_nonzero(near))  # a prefix: neither condition holds again once it has failed
    weight = 1.0 if query.diversity is None else query.diversity
    chosen = mmr(monotone[:pool].astype(np.float32), vectors[:pool], query.limit, weight)
    return np.concatenate((chosen, np.setdiff1d(np.arange(len(scores)), chosen)))


def fetch_others(
    db: Session, found: Candidates, fetched: Mapping[int, Passage], caller: Caller, source: str | None
) -> dict[int, Passage]:
    """The candidates that were not fetched, by rank, for an explanation; each is checked against the permissions."""
    others = np.setdiff1d(np.arange(len(found.keys)), np.fromiter(fetched, np.int64, len(fetched)))
    return fetch(db, found, len(others), caller, source, others) if len(others) else {}


def note_search(
    notes: Notes, found: Candidates, candidates: Mapping[int, Passage], distinct: DistinctChunks | None
) -> None:
    """The score parts of all candidates and near-duplicates, their ranks among what the caller may see, and what the
    near-duplicates repeat."""
    repeats = distinct.repeats if distinct is not None else {}
    ranked: list[tuple[Candidates, int, Passage | ExplainedPassage]] = [
        (found, at, passage) for at, passage in candidates.items()
    ]
    if distinct is not None and found.repeats is not None:
        keys = found.repeats.keys.tolist()
        ranked += [(found.repeats, at, distinct.named(repeats[key].row)) for at, key in enumerate(keys)]
    for rank, (scores, at, passage) in enumerate(sorted(ranked, key=lambda one: -one[0].fused[one[1]]), 1):
        dense, sparse, fused = (float(part[at]) for part in (scores.dense, scores.sparse, scores.fused))
        notes.add(passage, "search", rank=rank, dense=dense, sparse=sparse or None, fused=fused)
    for repeat in repeats.values():
        assert distinct is not None
        notes.repeats(distinct.named(repeat.row), distinct.named(repeat.better), repeat.similarity)


def note_choice(
    notes: Notes, found: Candidates, fetched: Mapping[int, Passage], others: Mapping[int, Passage], *, is_varied: bool
) -> None:
    """The ranks after reranking and MMR, and why `others` were not fetched."""
    everything = {**fetched, **others}
    if found.reranked is not None:
        for rank, at in enumerate(sorted(everything), 1):
            notes.add(everything[at], "rerank", rank=rank, score=float(found.reranked[at]))
    if is_varied:
        notes.ranked(fetched.values(), "variety")
    for passage in others.values():
        _note_not_chosen(notes, passage, len(fetched), is_varied=is_varied)


def note_ends(notes: Notes, passages: Sequence[Passage], query: Query, *, is_varied: bool) -> None:
    """Why passages at the end of the list are not returned."""
    returned = 0
    for passage in passages:
        if passage.score < query.similarity_threshold:
            least = query.similarity_threshold
            note = "its score is below the similarity threshold"
            notes.add(passage, "threshold", left_out=True, note=note, score=passage.score, threshold=least)
        elif returned >= query.limit:
            _note_not_chosen(notes, passage, query.limit, is_varied=is_varied)
        else:
            returned += 1


def _note_not_chosen(notes: Notes, passage: Passage, most: int, *, is_varied: bool) -> None:
    if is_varied:
        notes.add(passage, "variety", left_out=True, note="others are more relevant, or less like the chosen ones")
    else:
        notes.add(passage, "limit", left_out=True, note="the source returns only its best passages", most=most)


def in_order(passages: Sequence[Passage]) -> list[Passage]:
    """The passages with each score raised to the highest below it, so that scores never rise with the rank."""
    ordered: list[Passage] = []
    highest = 0.0
    for passage in reversed(passages):
        highest = max(highest, passage.score)
        ordered.append(msgspec.structs.replace(passage, score=highest) if passage.score < highest else passage)
    return ordered[::-1]


def relevance(dense: Floats, shared: Floats, curve: RelevanceCurve) -> NDArray[np.float64]:
    """The relevance score of each candidate, comparable between collections (docs/search.md)."""
    logits = curve.near * dense.astype(np.float64) + curve.shared * shared + curve.bias
    return np.asarray(1 / (1 + np.exp(-logits)), np.float64)


def _naming(passage: Passage, copies: Mapping[str, Sequence[Duplicate]]) -> Passage:
    """The passage with the names of the near-duplicates that were left out."""
    assert passage.place is not None
    left_out = copies.get(passage.place.chunk_id)
    return passage if left_out is None else msgspec.structs.replace(passage, also_in=tuple(left_out))


def _passage(row: ResultRow, found: Candidates, at: int, source: str | None) -> Passage:
    return Passage(
        source=row["collection_name"] if source is None else source,
        title=row["title"],
        text=row["text"],
        score=float(found.relevance[at]),
        document_id=row["id"],
        place=Place(
            chunk_id=row["chunk_id"],
            collection=row["collection_name"],
            owner=row["collection_owner"] or None,
            start=row["start_char"],
            end=row["end_char"],
            tokens=row["chunk_tokens"],
            index=row["chunk_key"] - row["first_chunk"],
            page=row["page"],
            later_pages=_later_pages(row["later_pages"]),
            headers=tuple(msgspec.json.decode(row["headers"])),
            url=row["url"],
            metadata=msgspec.json.decode(row["metadata"]),
            chunk_type=row["kind"],
            scores=Scores(
                dense=float(found.dense[at]),
                sparse=float(found.sparse[at]) or None,
                fused=float(found.fused[at]),
                rerank=float(found.reranked[at]) if found.reranked is not None else None,
            ),
        ),
    )


def _later_pages(stored: str | None) -> tuple[tuple[int, int], ...]:
    return msgspec.json.decode(stored, type=tuple[tuple[int, int], ...]) if stored else ()


def _scored(passage: Passage, score: float) -> Passage:
    """The passage with the score of the reranking model."""
    assert passage.place is not None
    scores = msgspec.structs.replace(passage.place.scores, rerank=float(score))
    return msgspec.structs.replace(passage, place=msgspec.structs.replace(passage.place, scores=scores))


def _best(lists: Sequence[tuple[NDArray[np.int64], Floats]], limit: int) -> NDArray[np.int64]:
    """The keys of several lists merged into one, each at its best score."""
    if len(lists) == 1:
        return lists[0][0]
    keys = np.concatenate([one for one, _ in lists])
    scores = np.concatenate([one for _, one in lists])
    order = np.lexsort((keys, -scores))
    _, first = np.unique(keys[order], return_index=True)
    return keys[order][np.sort(first)][:limit]


def _ranks(keys: NDArray[np.int64], ranked: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank of each key, from 1; MISSING_RANK if it is not in the list."""
    ranks = np.full(len(keys), MISSING_RANK, np.int64)
    ranks[np.searchsorted(keys, ranked)] = np.arange(1, len(ranked) + 1)
    return ranks
