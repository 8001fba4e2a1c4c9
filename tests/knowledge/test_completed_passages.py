"""Passages that would end inside a list are completed from the text of their document."""

from pathlib import Path

import pytest

from anabranch.domain.model import Query
from anabranch.knowledge.search import MAX_CONTENT
from support.knowledge_fixtures import OPERATOR, workshop

# An emoji is one character of four bytes: places count characters.
LIST = "Birds 🦩 of the delta.\n\n" + "\n".join(f"- The heron number {number} stands still." for number in range(400))


@pytest.mark.parametrize(
    ("document", "is_completed"), [(LIST, True), (LIST + "\n\n" + " " * MAX_CONTENT + "End.", False)]
)
async def test_a_passage_is_completed_from_a_document_that_is_not_too_long(
    tmp_path: Path, document: str, is_completed: bool
) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put(document)
        query = Query(text="heron", limit=3, similarity_threshold=0.0, complete=True)
        places = [(passage.text, passage.place) for passage in await shop.room.search(query, OPERATOR)]
    assert len(places) == 3
    for text, place in places:
        assert place is not None
        assert text == document[place.start : place.end]
    assert any(place is not None and place.added for _, place in places) is is_completed
