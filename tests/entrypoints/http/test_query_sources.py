"""The sources of an answer: near-duplicates once, in the order of their numbers, with their type."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.domain.model import Answer, Duplicate, Endpoint, Ground, Passage, Place, SourceReply, Status
from anabranch.entrypoints.http.query import sources
from anabranch.testing import Document, Space
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("query-sources")]

POLICY = (
    "A customer who bought a bicycle in one of our shops may bring it back within {} days and gets the money back, as "
    "long as the bicycle was not ridden on the road; lamps, locks, bags and {} clothes are exchanged, not paid back."
)
GUIDE = """# Travel

## Hotels

The Lark has a garden, and the Swan has a lake.

## Trains

| from | to | hours |
|---|---|---|
| Bern | Basel | one |
| Bern | Chur | two |

## Packing

- a raincoat for the mountains
- a lamp for the night train
- a map of the lakes and of the mountain huts

## Command

```
pack --bag large raincoat lamp
```
"""
ASKED = "How long may a customer bring a bicycle back?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with Space() as opened:
        opened.source("mirror", documents=[Document(title="Mirror", content=POLICY.format("30", "padded"))])
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, space: Space) -> AsyncIterator[Library]:
    mirror = Endpoint(slug="mirror", url=space.url, name="mirror", operator=True)
    async with library(tmp_path_factory.mktemp("data"), models_dir, rate_limit=0, sources={"mirror": mirror}) as opened:
        await opened.collection("shop")
        await opened.collection("travel", chunking_strategy="sentence", chunk_size=32, chunk_overlap=0)
        for title, days, clothes in (("North", "30", "warm"), ("South", "30", "light"), ("Sale", "14", "warm")):
            await opened.ingest("shop", text(POLICY.format(days, clothes), title=title))
        await opened.ingest("travel", text(GUIDE, title="Guide", filename="guide.md"))
        yield opened


async def rag(shelf: Library, **more: Any) -> Any:
    reply = await shelf.call("POST", "/rag/stream", {"query": ASKED, **more})
    assert reply.status == 200, reply
    return json.loads(reply.body.strip().rpartition("data: ")[2])["data"]


async def test_query_shows_a_near_duplicate_once_and_names_the_other(shelf: Library) -> None:
    answer = await shelf.ask(ASKED, collections=["shop"])
    assert {one["title"] for one in answer["sources"]} in ({"North", "Sale"}, {"South", "Sale"})
    both = next(one for one in answer["sources"] if one["title"] != "Sale")
    [copy] = both["also_in"]
    assert {both["title"], copy["title"]} == {"North", "South"}
    assert set(copy) == {"title", "source", "similarity", "document_id", "chunk_id", "url"}
    assert 0.95 < copy["similarity"] < 1
    assert (await shelf.good("GET", f"/v1/documents/{copy['document_id']}"))["title"] == copy["title"]


async def test_a_copy_with_another_number_of_days_is_a_source_of_its_own(shelf: Library) -> None:
    answer = await shelf.ask(ASKED, collections=["shop"])
    sale = next(one for one in answer["sources"] if one["title"] == "Sale")
    assert sale["also_in"] == []
    assert "14 days" in sale["content_snippet"]


async def test_a_near_duplicate_of_another_source_is_named_too(shelf: Library) -> None:
    answer = await shelf.ask(ASKED, collections=["shop"], sources=["mirror"])
    assert len(answer["sources"]) == 2
    named = [{one["title"], *(copy["title"] for copy in one["also_in"])} for one in answer["sources"]]
    assert sorted(map(sorted, named)) == [["Mirror", "North", "South"], ["Sale"]]
    assert {one["source"]: one["results"] for one in answer["source_status"]} == {"collections": 2, "mirror": 1}


@pytest.mark.parametrize("top_k", [2, 20])
async def test_sources_are_in_the_order_of_their_numbers(shelf: Library, top_k: int) -> None:
    """Numbers follow the merged ranks, which are not those of one source after the other."""
    asked: dict[str, Any] = {"collections": ["shop", "travel"], "sources": ["mirror"], "settings": {"top_k": top_k}}
    answer = await shelf.ask(ASKED, **asked)
    streamed = next(event for event in await shelf.stream(ASKED, **asked) if event.name == "sources")
    assert len(answer["sources"]) > 1
    for found in (answer["sources"], streamed.data["sources"]):
        numbers = [one["citation_index"] for one in found]
        cited = [number for number in numbers if number is not None]
        assert numbers == [*range(1, len(cited) + 1), *[None] * (len(numbers) - len(cited))]
    done = await rag(shelf, collections=["shop", "travel"], sources=["mirror"])
    assert [one["citation_index"] for one in done["sources"]] == list(range(1, len(done["sources"]) + 1))


async def test_passages_without_a_number_come_last_and_copies_not_at_all() -> None:
    def passage(name: str, **more: Any) -> Passage:
        place = Place(chunk_id=name, collection="c", start=0, end=9, tokens=3)
        return Passage(source="c", title=name, text=name * 9, score=0.5, document_id="d", place=place, **more)

    copy = Duplicate(title="copy", source="c", similarity=0.99, chunk_id="copy")
    found = [passage(name) for name in ("covered", "third", "copy", "second", "first")]
    answer = Answer(
        text="",
        ground=Ground.DOCUMENTS,
        replies=(SourceReply(path="c", status=Status.SUCCESS, passages=tuple(found)),),
        passages=(passage("first", also_in=(copy,)), passage("second")),
        unused=(passage("third"),),
    )
    shown = [(one.title, one.citation_index, len(one.also_in)) for one in sources(answer)]
    assert shown == [("first", 1, 1), ("second", 2, 0), ("third", None, 0), ("covered", None, 0)]


async def test_twenty_of_many_copies_are_named_and_all_are_counted_and_left_out() -> None:
    def passage(name: str, **more: Any) -> Passage:
        place = Place(chunk_id=name, collection="c", start=0, end=9, tokens=3)
        return Passage(source="c", title=name, text=name, score=0.5, document_id="d", place=place, **more)

    names = [f"copy {number}" for number in range(100)]
    copies = tuple(Duplicate(title=name, source="c", similarity=0.99, chunk_id=name) for name in names)
    reply = SourceReply(path="c", status=Status.SUCCESS, passages=tuple(map(passage, ("first", *names))))
    answer = Answer(
        text="", ground=Ground.DOCUMENTS, replies=(reply,), passages=(passage("first", also_in=copies),), unused=()
    )
    (shown,) = sources(answer)
    assert (shown.also_in, shown.also_in_count) == (copies[:20], 100)


async def test_rag_stream_shows_a_near_duplicate_once_and_names_the_other(shelf: Library) -> None:
    done = await rag(shelf, collections=["shop"])
    assert sorted(len(one["also_in"]) for one in done["sources"]) == [0, 1]
    assert sorted(one["also_in_count"] for one in done["sources"]) == [0, 1]


async def test_chunk_types_are_shown_and_can_be_filtered(shelf: Library) -> None:
    everything = await shelf.ask("What is there?", collections=["travel"])
    assert {one["chunk_type"] for one in everything["sources"]} == {"paragraph", "table", "list", "code"}
    kinds: tuple[tuple[str | list[str], set[str]], ...] = (
        ("table", {"table"}),
        (["code", "table", "code"], {"table", "code"}),
        (["heading"], set()),
        ([], {"paragraph", "table", "list", "code"}),
    )
    for kind, shown in kinds:
        answer = await shelf.ask("What is there?", filters={"chunk_type": kind}, settings={"top_k": 20})
        assert {one["chunk_type"] for one in answer["sources"]} == shown
        streamed = await rag(shelf, filters={"chunk_type": kind}, threshold=0, top_k=8, mmr_lambda=None)
        assert {one["chunk_type"] for one in streamed["sources"]} == shown
    reply = await shelf.call("POST", "/v1/query", {"query": "What?", "filters": {"chunk_type": "tables"}})
    assert reply.status == 400
    said = "filters.chunk_type takes paragraph, heading, code, table, list, or a list of these, not 'tables'."
    assert said in reply.body["message"]


async def test_guardrail_similarity_has_the_value_of_the_deprecated_mean_similarity(shelf: Library) -> None:
    done = await rag(shelf)
    assert done["guardrail_similarity"] == done["mean_similarity"] > 0.55
    document = await shelf.good("GET", "/openapi.json")
    fields = document["components"]["schemas"]["RagDone"]["properties"]
    assert fields["mean_similarity"]["deprecated"] is True
    assert "deprecated" not in fields["guardrail_similarity"]
