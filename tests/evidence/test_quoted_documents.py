"""Quoted answers of a running service: citations open the document at exactly the words that are quoted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.evidence.judge import SUPPORTED
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("quoted-documents")]

HANDBOOK = """\
# Handbook

The shop opened in 1954. It sells books, maps and globes.

## Delivery

| Country | Days | Price |
|---|---|---|
| Norway | 4 | 9 euros |
| Iceland | 11 | 25 euros |
| Malta | 6 | 14 euros |

## Payment

The following means of payment are accepted:

- Credit cards
- Vouchers of the shop
- Cash on delivery

## Automation

To print the stock of the shop, run this command:

```
shop stock --all
```
"""
ISLANDS = [f"Isle {number}-{7 * number}" for number in range(11, 71)]
# The list is longer than a chunk.
CHARTS = "# Charts\n\nThe following islands have a chart:\n\n" + "".join(f"- {island}\n" for island in ISLANDS)
HOTELS = "name,city,price\nHotel Adler,Bern,120\nHotel Krone,Basel,95\nHotel Sonne,Zug,210\n"
GERMAN = "Die Erstattung dauert zwei Wochen. Der Versand wird nicht erstattet, und es gibt keine Ausnahmen."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir, evidence="auto") as opened:
        for name in ("handbook", "hotels", "ann", "bob", "german"):
            await opened.collection(name)
        await opened.ingest("handbook", text(HANDBOOK, title="Handbook", filename="handbook.md"))
        await opened.collection("charts")
        await opened.ingest("charts", text(CHARTS, title="Charts", filename="charts.md"))
        await opened.ingest("hotels", text(HOTELS, title="hotels.csv", filename="hotels.csv"))
        ann = [
            text("Goods can be returned within 30 days of delivery.", title="Returns at Ann's"),
            text("Within 30 days of delivery, goods can be returned to any branch.", title="Branches of Ann's"),
            text("Ann paints globes. She has three cats.", title="Ann"),
        ]
        await opened.ingest("ann", *ann)
        await opened.ingest("bob", text("You can return goods within 14 days.", title="Returns at Bob's"))
        await opened.ingest("german", text(GERMAN, title="Erstattung"))
        yield opened


async def checked(shop: Library, question: str, *collections: str) -> Any:
    """The answer, after every citation has been compared with the stored document."""
    answer = await shop.ask(question, collections=list(collections))
    assert not answer["refused"], answer["answer"]
    assert SUPPORTED <= answer["support"] <= 1
    assert answer["citations"]
    spoken = "".join(answer["answer"].split())
    for citation in answer["citations"]:
        start, end = citation["start_char"], citation["end_char"]
        document = await shop.good("GET", f"/v1/documents/{citation['document_id']}")
        assert document["content"][start:end] == citation["quoted_text"]
        assert "".join(citation["quoted_text"].split()) in spoken
        mark = answer["answer"][citation["answer_start"] : citation["answer_end"]]
        assert mark == f"[{citation['citation_index']}]"
    return answer


def quoted_words(answer: Any) -> list[str]:
    return [citation["quoted_text"] for citation in answer["citations"]]


async def test_a_table_question_is_answered_with_the_header_and_one_row(shop: Library) -> None:
    answer = await checked(shop, "How many days does delivery to Iceland take?", "handbook")
    assert quoted_words(answer)[:2] == ["| Country | Days | Price |\n|---|---|---|", "| Iceland | 11 | 25 euros |"]
    assert "Malta" not in answer["answer"]


async def test_a_list_is_quoted_with_its_lead_in(shop: Library) -> None:
    answer = await checked(shop, "Which means of payment are accepted?", "handbook")
    assert quoted_words(answer)[:4] == [
        "The following means of payment are accepted:",
        "Credit cards",
        "Vouchers of the shop",
        "Cash on delivery",
    ]


async def test_a_list_is_quoted_beyond_the_end_of_its_chunk(shop: Library) -> None:
    answer = await checked(shop, "Which islands have a chart?", "charts")
    assert len({citation["chunk_id"] for citation in answer["citations"]}) == 1
    lead, *items = quoted_words(answer)
    assert lead == "The following islands have a chart:"
    assert items == ISLANDS


async def test_code_is_quoted_with_the_sentence_before_it(shop: Library) -> None:
    answer = await checked(shop, "How do I print the stock of the shop?", "handbook")
    assert "To print the stock of the shop, run this command:\n" in answer["answer"]
    assert "\nshop stock --all\n" in answer["answer"]


async def test_a_csv_file_is_answered_with_the_row_that_matches(shop: Library) -> None:
    answer = await checked(shop, "What is the price of Hotel Krone?", "hotels")
    assert "95" in answer["answer"]
    assert "Adler" not in answer["answer"]
    assert "Sonne" not in answer["answer"]


async def test_collections_that_disagree_are_both_named(shop: Library) -> None:
    answer = await checked(shop, "Within how many days can goods be returned?", "ann", "bob")
    assert "30 days" in answer["answer"]
    assert "14 days" in answer["answer"]
    named = {one["source"] for one in answer["sources"]}
    assert len(named) == 2
    assert all(f"{source}: " in answer["answer"] for source in named)


async def test_a_german_document_is_quoted_by_the_rules(shop: Library) -> None:
    answer = await checked(shop, "Wie lange dauert eine Erstattung?", "german")
    assert answer["answer"] == "Die Erstattung dauert zwei Wochen. [1]"


async def test_a_refusal_says_what_was_searched_and_what_is_nearest(shop: Library) -> None:
    answer = await shop.ask("Who won the football world cup in 1998?", collections=["handbook"])
    assert (answer["refused"], answer["citations"]) == (True, [])
    assert 0 <= answer["support"] < SUPPORTED
    assert "handbook" in answer["answer"]
    assert "“Handbook" in answer["answer"]


async def test_passages_of_all_collections_are_in_the_order_of_their_evidence(shop: Library) -> None:
    question = "Within how many days can goods be returned?"
    answer = await checked(shop, question, "ann", "bob", "handbook")
    found = [source["evidence"] for source in answer["sources"]]
    read = [value for value in found if value is not None]
    assert len(read) >= 3, "one of every collection"
    assert read == sorted(read, reverse=True)
    assert found == read + [None] * (len(found) - len(read))
    assert all(0 <= value <= 1 for value in read)
    unranked = await shop.ask(question, collections=["ann", "bob", "handbook"], settings={"evidence": "off"})
    assert all(source["evidence"] is None for source in unranked["sources"])
