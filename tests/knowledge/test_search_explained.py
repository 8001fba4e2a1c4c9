"""What a collection's search notes about the chunks that it found."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.domain.explanation import ExplainedPassage
from anabranch.domain.model import NEAR_DUPLICATES, Passage, Query
from anabranch.knowledge.model import Permissions
from anabranch.knowledge.search import Searcher
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, Workshop, text, workshop

# A document is known by its first word; each is longer than the one before.
PLACES = ("Pond", "Marsh", "Lagoon", "Estuary", "Wetlands")
HERONS = tuple(f"{place} herons eat small fish and frogs." for place in PLACES)
ASKED = "What do herons eat?"


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        await opened.put(*HERONS)
        yield opened


class Longest:
    """A reranker that prefers long passages."""

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        return [float(len(passage.text)) for passage in passages]


async def explained(
    shop: Workshop, limit: int, reranker: Longest | None = None, **more: Any
) -> tuple[list[Passage], tuple[ExplainedPassage, ...]]:
    searcher = Searcher(shop.database, shop.reader, shop.embedder, reranker)
    query = Query(text=ASKED, limit=limit, similarity_threshold=more.pop("threshold", 0.0), explain=True, **more)
    found = await searcher.search(query, OPERATOR, None)
    assert found.notes is not None
    return found.passages, found.notes.explanation().passages


def ranks(passage: ExplainedPassage, stage: str) -> list[int | None]:
    return [step.rank for step in passage.steps if step.stage == stage]


async def test_what_a_search_does_not_return_is_left_out_by_its_limit(shop: Workshop) -> None:
    passages, noted = await explained(shop, 2)
    assert [one.left_out for one in noted] == [None, None, "limit", "limit", "limit"]
    assert [one.chunk_id for one in noted[:2]] == [one.place.chunk_id for one in passages if one.place]
    assert sorted(rank or 0 for one in noted for rank in ranks(one, "search")) == [1, 2, 3, 4, 5]


async def test_the_ranks_of_a_reranking_model_come_after_the_built_in_ones(shop: Workshop) -> None:
    passages, noted = await explained(shop, 2, Longest())
    assert [one.text for one in noted] == sorted(HERONS, key=len, reverse=True)
    assert [ranks(one, "rerank")[1] for one in noted] == [1, 2, 3, 4, 5]
    assert [one.text for one in passages] == [one.text for one in noted[:2]]


@pytest.mark.parametrize("reranker", [None, Longest()])
async def test_mmr_names_what_it_chose_and_what_it_did_not(shop: Workshop, reranker: Longest | None) -> None:
    passages, noted = await explained(shop, 3, reranker, diversity=0.3)
    assert [(one.text, ranks(one, "variety")) for one in noted[:3]] == [
        (one.text, [rank]) for rank, one in enumerate(passages, 1)
    ]
    assert [one.left_out for one in noted] == [None, None, None, "variety", "variety"]


async def test_a_score_below_the_threshold_is_named(shop: Workshop) -> None:
    passages, noted = await explained(shop, 10, threshold=1.0)
    assert passages == []
    assert {one.left_out for one in noted} == {"threshold"}
    assert noted[0].steps[-1].values["threshold"] == 1.0


async def test_each_near_duplicate_is_noted_once_also_if_longer_lists_are_read(shop: Workshop) -> None:
    copied = "herons eat what swims and what hops, in the morning and in the evening, and rest on one leg at noon."
    await shop.put(*(f"{one}{other} {copied}" for one in "abcdefghij" for other in "klmnopqr"))
    passages, noted = await explained(shop, 10, near_duplicates=NEAR_DUPLICATES)
    copies = [one for one in noted if one.left_out == "near_duplicates"]
    assert len(copies) == 79
    assert all([step.stage for step in one.steps] == ["search", "near_duplicates"] for one in copies)
    [kept] = {one.steps[-1].other.chunk_id for one in copies if one.steps[-1].other}
    assert kept in {one.place.chunk_id for one in passages if one.place}


async def test_a_query_without_explain_notes_nothing(shop: Workshop) -> None:
    assert (await shop.room.find(Query(text=ASKED, limit=2, similarity_threshold=0.0), OPERATOR)).notes is None


async def test_chunks_of_others_are_never_noted(shop: Workshop) -> None:
    private = Permissions(visibility="private")
    await shop.collection("own", ALICE, default_permissions=private)
    await shop.room.ingest(ALICE, "own", [text("Secret herons eat fish.")])
    await shop.ingest_pending()
    query = Query(text=ASKED, limit=1, similarity_threshold=0.0, near_duplicates=NEAR_DUPLICATES, explain=True)
    for caller, sees in ((ALICE, True), (BOB, False)):
        notes = (await shop.room.find(query, caller)).notes
        assert notes is not None
        assert any("Secret" in one.text for one in notes.explanation().passages) is sees
