"""Variety: the choice against its plain definition, and what a search makes of it."""

import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from anabranch.domain.errors import RerankFailed
from anabranch.domain.model import Passage, Query
from anabranch.knowledge.mmr import mmr
from anabranch.knowledge.model import Permissions
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.search import Candidates, Searcher, fetch
from anabranch.testing import FakeEmbedder
from support.knowledge_fixtures import ALICE, OPERATOR, Workshop, text, workshop

Floats = NDArray[np.float32]

DIMENSIONS = 4
numbers = st.floats(-1, 1, width=32, allow_subnormal=False)
sizes = st.integers(0, 12)


def found(size: int) -> st.SearchStrategy[tuple[Floats, Floats]]:
    relevance = arrays.arrays(np.float32, size, elements=st.floats(0, 1, width=32, allow_subnormal=False))
    return st.tuples(relevance, arrays.arrays(np.float32, (size, DIMENSIONS), elements=numbers))


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths > 1e-12 else 0.0


def worth(relevance: Floats, vectors: Floats, taken: Sequence[int], at: int, weight: float) -> float:
    """As the paper has it, without a shortcut."""
    closest = max(cosine(vectors[at].tolist(), vectors[one].tolist()) for one in taken)
    return weight * float(relevance[at]) - (1 - weight) * closest


@given(sizes.flatmap(found), st.integers(0, 15), st.floats(0, 1))
def test_mmr_equals_the_formula(pair: tuple[Floats, Floats], limit: int, weight: float) -> None:
    relevance, vectors = pair
    # Vectors too short to have a direction in 32 bits are nobody's.
    vectors = np.where(np.linalg.norm(vectors, axis=1, keepdims=True) < 1e-3, np.float32(0), vectors)
    order = mmr(relevance, vectors, limit, weight).tolist()
    assert len(order) == len(set(order)) == min(limit, len(relevance))
    if order:
        assert relevance[order[0]] == relevance.max()
    for count in range(1, len(order)):
        taken = order[:count]
        left = [at for at in range(len(relevance)) if at not in taken]
        best = max(worth(relevance, vectors, taken, at, weight) for at in left)
        assert worth(relevance, vectors, taken, order[count], weight) >= best - 1e-5


@given(sizes.flatmap(found))
def test_mmr_with_weight_1_is_the_order_by_relevance(pair: tuple[Floats, Floats]) -> None:
    relevance, vectors = pair
    assert mmr(relevance, vectors, len(relevance), 1.0).tolist() == np.argsort(-relevance, kind="stable").tolist()


def test_mmr_with_weight_0_maximises_diversity() -> None:
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [-1, 0]], np.float32)
    assert mmr(np.array([0.8, 0.9, 0.7, 0.1], np.float32), vectors, 3, 0.0).tolist() == [1, 3, 2]


def test_mmr_defers_near_duplicates() -> None:
    vectors = np.array([[1, 0], [1, 0], [0.6, 0.8]], np.float32)
    relevance = np.array([0.9, 0.89, 0.8], np.float32)
    assert mmr(relevance, vectors, 3, 0.5).tolist() == [0, 2, 1]
    assert mmr(relevance, vectors, 3, 1.0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_mmr_keeps_the_rank_of_equal_vectors(weight: float) -> None:
    for vectors in (np.zeros((4, 3), np.float32), np.ones((4, 3), np.float32)):
        assert mmr(np.full(4, 0.5, np.float32), vectors, 9, weight).tolist() == [0, 1, 2, 3]


def test_mmr_of_nothing_is_empty() -> None:
    nothing = np.empty((0, 3), np.float32)
    assert mmr(np.empty(0, np.float32), nothing, 5, 0.5).tolist() == []
    assert mmr(np.ones(2, np.float32), np.ones((2, 3), np.float32), 0, 0.5).tolist() == []


# The first word is a document's name.
HERONS = (
    "Herons eat small fish in the river.",
    "Again: herons eat small fish in the river.",
    "Also herons eat small fish in the river.",
    "Nests of herons hang high in old trees.",
    "Otters eat fish at night.",
)
QUESTION = "What do herons eat in the river?"


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        await opened.put(*HERONS)
        yield opened


def asking(limit: int, diversity: float | None, **more: float | bool) -> Query:
    usual = Query(text=QUESTION, limit=limit, similarity_threshold=0.0, diversity=diversity)
    return msgspec.structs.replace(usual, **more)


def said(passages: Sequence[Passage]) -> list[str]:
    return [passage.text for passage in passages]


@pytest.mark.parametrize("rerank", [True, False])
async def test_diversity_1_finds_the_same_as_no_diversity(shop: Workshop, rerank: bool) -> None:
    for limit in range(1, 7):
        plain = await shop.room.search(asking(limit, None, rerank=rerank), OPERATOR)
        assert await shop.room.search(asking(limit, 1.0, rerank=rerank), OPERATOR) == plain


async def test_diversity_finds_what_duplicates_displaced(shop: Workshop) -> None:
    plain = await shop.room.search(asking(3, None), OPERATOR)
    varied = await shop.room.search(asking(3, 0.3), OPERATOR)
    assert all("small fish" in passage.text for passage in plain)
    assert varied[0].text == plain[0].text
    assert any("small fish" not in passage.text for passage in varied)
    assert len(varied) == 3


async def test_diversity_ignores_near_copies_in_its_candidates(shop: Workshop) -> None:
    at_length = "Herons eat small fish in the river: roach, perch, bleak, ruffe, gudgeon, dace, tench, minnows, loaches"
    await shop.put(*(f"Copy-{number}: {at_length}." for number in range(30)))
    plain = await shop.room.search(asking(3, None), OPERATOR)
    varied = await shop.room.search(asking(3, 0.3), OPERATOR)
    assert all("small fish" in passage.text for passage in plain)
    assert any("small fish" not in passage.text for passage in varied)


async def test_diversity_does_not_choose_low_ranked_passages(shop: Workshop) -> None:
    near = ("Fish of the river eat larvae.", "Storks, unlike herons, eat in meadows.")
    await shop.put(*near, "Trams run on rails.", "Bakers knead dough.", "Chess has kings.", "Glass is made of sand.")
    varied = await shop.room.search(asking(2, 0.0), OPERATOR)
    assert set(said(varied)) <= {*HERONS, *near}


async def test_diversity_respects_the_similarity_threshold(shop: Workshop) -> None:
    everything = await shop.room.search(asking(5, None), OPERATOR)
    least = everything[2].score
    varied = await shop.room.search(asking(3, 0.0, similarity_threshold=least), OPERATOR)
    assert set(said(varied)) == set(said(everything[:3]))


async def test_diversity_respects_permissions(shop: Workshop) -> None:
    private = Permissions(visibility="private")
    await shop.room.ingest(OPERATOR, "notes", [text("Secret nests of pike are in the reeds.", private)])
    await shop.ingest_pending()
    assert len(await shop.room.search(asking(6, 0.0), OPERATOR)) == 6
    seen = await shop.room.search(asking(6, 0.0), ALICE)
    assert len(seen) == 5
    assert not any("Secret" in passage.text for passage in seen)


async def test_deleted_chunks_are_replaced_by_the_next_best(shop: Workshop) -> None:
    def work(db: Session) -> list[Passage]:
        keys = np.array([row[0] for row in db.execute("SELECT key FROM chunks ORDER BY key")])
        keys[1] = 9_999
        scores = np.linspace(0.9, 0.5, len(keys), dtype=np.float32)
        vectors = np.zeros((len(keys), DIMENSIONS), np.float32)
        candidates = Candidates(keys, vectors, scores, scores, scores, scores, scores.astype(np.float64))
        return list(fetch(db, candidates, 3, OPERATOR, None, np.array([4, 1, 0, 2, 3])).values())

    chosen = shop.database.reading(work)
    assert said(chosen) == [HERONS[4], HERONS[0], HERONS[2]]
    assert chosen[1].score > chosen[2].score > chosen[0].score


class Fond:
    """A reranker that likes what is said about small fish, and best where most is said; or one that is down."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        if self._fails:
            raise RerankFailed("The reranker is down.")
        return [("small fish" in passage.text) + len(passage.text) / 1000 for passage in passages]


async def test_diversity_is_applied_after_a_reranking_model(shop: Workshop) -> None:
    searcher = Searcher(shop.database, shop.reader, shop.embedder, Fond())
    plain = (await searcher.search(asking(3, None), OPERATOR, None)).passages
    assert said(plain) == sorted(HERONS[:3], key=len, reverse=True)
    assert (await searcher.search(asking(3, 1.0), OPERATOR, None)).passages == plain
    varied = (await searcher.search(asking(3, 0.3), OPERATOR, None)).passages
    assert varied[0] == plain[0]
    assert any("small fish" not in passage.text for passage in varied)


async def test_diversity_works_if_the_reranking_model_fails(shop: Workshop) -> None:
    searcher = Searcher(shop.database, shop.reader, shop.embedder, Fond(fails=True))
    chosen = (await searcher.search(asking(3, 0.3), OPERATOR, None)).passages
    assert said(chosen) == said(await shop.room.search(asking(3, 0.3), OPERATOR))


async def test_mmr_of_vectors_of_any_length(tmp_path: Path) -> None:
    async with workshop(tmp_path, embedder=FakeEmbedder()) as empty:
        await empty.collection()
        assert await empty.room.search(asking(3, 0.5), OPERATOR) == []
