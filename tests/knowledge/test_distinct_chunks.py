"""Near-duplicates in collections: each text once, the copies named, a full page of different passages."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.domain.model import NEAR_DUPLICATES, Passage, Query
from anabranch.knowledge.model import Permissions
from anabranch.knowledge.search import Searcher
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, Workshop, text, workshop

HERON = (
    "heron-{} The grey heron stands still in shallow water and waits for small fish, frogs and insects, which it takes "
    "with a quick stroke of its long bill; in a hard winter it also hunts mice on {} meadows."
)
SUBJECTS = (
    "herons",
    "storks",
    "otters",
    "beavers",
    "trouts",
    "perches",
    "swans",
    "grebes",
    "dippers",
    "ospreys",
    "eels",
)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        yield opened


def asking(text: str = "What does the grey heron hunt?", limit: int = 10, **more: Any) -> Query:
    usual = Query(text=text, limit=limit, similarity_threshold=0.0, near_duplicates=NEAR_DUPLICATES)
    return msgspec.structs.replace(usual, **more)


def titles(passages: Sequence[Passage]) -> list[str]:
    return [passage.title for passage in passages]


async def test_a_copy_with_another_word_is_left_out_and_named(shop: Workshop) -> None:
    await shop.put(HERON.format("one", "wet"), HERON.format("two", "damp"), "Otters eat fish at night.")
    kept, other = await shop.room.search(asking(), OPERATOR)
    assert other.title == "Otters"
    [copy] = kept.also_in
    assert {kept.title, copy.title} == {"heron-one", "heron-two"}
    assert 0.95 < copy.similarity < 1
    assert copy.source == "notes"
    everything = await shop.room.search(asking(near_duplicates=None), OPERATOR)
    left_out = next(one for one in everything if one.title == copy.title)
    assert left_out.place is not None
    assert (copy.document_id, copy.chunk_id) == (left_out.document_id, left_out.place.chunk_id)
    assert not any(one.also_in for one in everything)


@pytest.mark.parametrize(
    ("one", "other"),
    [("on 5 meadows", "on 6 meadows"), ("on meadows", "not on meadows"), ("on Monday", "on Sunday")],
)
async def test_texts_that_differ_in_a_number_or_a_negation_are_both_found(shop: Workshop, one: str, other: str) -> None:
    body = HERON.format("a", "wet").removeprefix("heron-a ")
    await shop.put(f"alpha {body} It does so {one}.", f"gamma {body} It does so {other}.")
    found = await shop.room.search(asking(), OPERATOR)
    assert sorted(titles(found)) == ["alpha", "gamma"]
    assert not any(passage.also_in for passage in found)


@pytest.mark.parametrize("rerank", [True, False])
@pytest.mark.parametrize("diversity", [None, 0.5])
@pytest.mark.parametrize("limit", [3, 11])
async def test_a_collection_with_five_copies_of_each_document_still_gives_a_full_page(
    shop: Workshop, limit: int, diversity: float | None, rerank: bool
) -> None:
    await shop.put(
        *(
            f"{subject}{'-' * copy} In the river live {subject}, and what {subject} eat there is small fish, "
            f"frogs and insects of {subject} lakes."
            for subject in SUBJECTS
            for copy in range(5)
        )
    )
    found = await shop.room.search(
        asking("What eats fish in the river?", limit, diversity=diversity, rerank=rerank), OPERATOR
    )
    assert len({title.rstrip("-") for title in titles(found)}) == len(found) == limit
    for passage in found:
        assert {copy.title.rstrip("-") for copy in passage.also_in} == {passage.title.rstrip("-")}
        assert len(passage.also_in) <= 4


async def test_more_copies_than_candidates_do_not_hide_the_other_documents(shop: Workshop) -> None:
    await shop.put(
        *(HERON.format(a + b, "wet") for a in "abcdefghij" for b in "klmnopqrs"),
        "Otters swim.",
    )
    found = await shop.room.search(asking(limit=2), OPERATOR)
    assert len(found) == 2
    assert len(found[0].also_in) == 89
    assert found[1].title == "Otters"


async def test_only_copies_that_the_caller_may_see_are_named(shop: Workshop) -> None:
    private = Permissions(visibility="private")
    await shop.room.ingest(OPERATOR, "notes", [text(HERON.format("secret", "wet"), private)])
    await shop.ingest_pending()
    await shop.put(HERON.format("open", "damp"))
    [seen] = await shop.room.search(asking(), ALICE)
    assert (seen.title, seen.also_in) == ("heron-open", ())
    [all_seen] = await shop.room.search(asking(), OPERATOR)
    assert {all_seen.title, *(copy.title for copy in all_seen.also_in)} == {"heron-open", "heron-secret"}
    assert titles(await shop.room.search(asking(), BOB)) == ["heron-open"]


class Backwards:
    """A reranking model that prefers what ranks last."""

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        return [float(at) for at in range(len(passages))]


async def test_a_reranking_model_gets_each_text_once(shop: Workshop) -> None:
    await shop.put(HERON.format("one", "wet"), HERON.format("two", "damp"), "Otters eat fish at night.")
    searcher = Searcher(shop.database, shop.reader, shop.embedder, Backwards())
    for diversity in (None, 0.5):
        found = (await searcher.search(asking(diversity=diversity), OPERATOR, None)).passages
        assert sorted(len(passage.also_in) for passage in found) == [0, 1]
