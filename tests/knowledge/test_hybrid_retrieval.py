"""Hybrid retrieval by the numbers of spec 5: the length of the lists, reciprocal rank fusion, the reranked pool."""

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from anabranch.domain.model import Filters, Passage, Query
from anabranch.knowledge.search import Searcher, retrieve
from support.knowledge_fixtures import OPERATOR, Workshop, workshop

WORDS = ("river", "delta", "sand", "bread", "oven", "heron", "otter", "train", "lamp", "stone", "glass", "king")
QUESTION = "river delta heron"
DOCUMENTS = 220


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    chance = random.Random(7)
    texts = [f"d{number} " + " ".join(chance.choices(WORDS, k=9)) + "." for number in range(DOCUMENTS)]
    async with workshop(tmp_path) as opened:
        await opened.collection()
        await opened.put(*texts)
        yield opened


@pytest.mark.segments
@pytest.mark.parametrize("top_k", [5, 20])
async def test_fused_score_is_the_formula_over_lists_of_five_times_top_k(shop: Workshop, top_k: int) -> None:
    """Each list has five times the requested number of chunks (at least 50); a chunk that is missing in one has rank
    1,000 there."""
    embedded = await shop.embedder.embed([QUESTION])
    vector = np.frombuffer(embedded[0].vector, np.float32)
    length = max(5 * top_k, 50)
    query = Query(text=QUESTION, limit=top_k, similarity_threshold=0, rerank=False)
    view = shop.database.reading(lambda db: shop.reader.view(db, Filters(), OPERATOR))
    curve = shop.embedder.calibration.relevance
    found, _ = shop.database.reading(lambda db: retrieve(db, view, query, embedded, curve, length))
    dense = view.nearest(vector, DOCUMENTS)[0].tolist()[:length]
    sparse = view.lexical(QUESTION).best(DOCUMENTS)[0].tolist()[:length]
    assert len(dense) == len(sparse) == length

    def fused(key: int) -> float:
        ranks = [ranked.index(key) + 1 if key in ranked else 1_000 for ranked in (dense, sparse)]
        return sum(0.5 / (60 + rank) for rank in ranks)

    expected = sorted({*dense, *sparse}, key=lambda key: (-fused(key), key))
    assert found.keys.tolist() == expected[: 2 * top_k]
    assert found.fused.tolist() == pytest.approx([fused(key) for key in found.keys.tolist()])
    assert any((key in dense) != (key in sparse) for key in expected)


class Counting:
    """A reranking model that counts what it gets."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        self.counts.append(len(passages))
        return [0.0] * len(passages)


async def test_fifty_candidates_reach_the_reranking_model(shop: Workshop) -> None:
    reranker = Counting()
    searcher = Searcher(shop.database, shop.reader, shop.embedder, reranker)
    for limit in (5, 20, 60):
        query = Query(text=QUESTION, limit=limit, similarity_threshold=0)
        assert len((await searcher.search(query, OPERATOR, None)).passages) == limit
    assert reranker.counts == [50, 50, 60]
