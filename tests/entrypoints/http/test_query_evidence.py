"""Quoted answers that the evidence model chooses, as callers of the HTTP surfaces get them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-evidence")]

RETURNS = """# Returns

You can return a product within 30 days of delivery. It must be unused and in its original box.

## Return fees

| Country | Fee | Days until refund |
|---|---|---|
| Germany | 4.90 EUR | 5 |
| France | 6.50 EUR | 7 |
| Spain | free | 9 |

## Accepted formats

The invoice can be uploaded in these formats:

- PDF, at most 10 MB
- PNG or JPEG
- TIFF with one page
"""
FEE = "What is the return fee in France?"
FORMATS = "Which formats can the invoice be uploaded in?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir, evidence="auto") as opened:
        await opened.collection("shop")
        await opened.ingest("shop", text(RETURNS, title="Returns", filename="returns.md"))
        yield opened


async def test_an_answer_says_how_probable_it_is_and_each_source_what_its_evidence_is(shelf: Library) -> None:
    answer = await shelf.ask(FEE)
    assert not answer["refused"]
    assert 0.5 <= answer["support"] <= 1
    first, *others = (one["evidence"] or 0 for one in answer["sources"])
    assert first >= max(others)
    refused = await shelf.ask("Who is the chief executive?")
    assert refused["refused"]
    assert 0 <= refused["support"] < 0.5


async def test_a_request_can_keep_the_order_of_the_search(shelf: Library) -> None:
    answer = await shelf.ask(FEE, settings={"evidence": "off"})
    assert [one["evidence"] for one in answer["sources"]] == [None] * len(answer["sources"])
    scores = [one["score"] for one in answer["sources"]]
    assert scores == sorted(scores, reverse=True)


async def test_every_part_of_a_quotation_opens_at_its_words_in_the_document(shelf: Library) -> None:
    for question, parts in ((FEE, ["| Country | Fee", "| France |"]), (FORMATS, ["The invoice", "PDF", "PNG", "TIFF"])):
        answer = await shelf.ask(question)
        assert [one["quoted_text"][: len(part)] for one, part in zip(answer["citations"], parts, strict=True)] == parts
        for citation in answer["citations"]:
            document = await shelf.good("GET", f"/v1/documents/{citation['document_id']}")
            assert document["content"][citation["start_char"] : citation["end_char"]] == citation["quoted_text"]
            assert citation["quoted_text"] in answer["answer"]
            assert answer["answer"][citation["answer_start"] : citation["answer_end"]] == "[1]"


async def test_every_sentence_of_a_quoted_table_list_or_listing_names_its_source(shelf: Library) -> None:
    for question in (FEE, FORMATS):
        answer = await shelf.ask(question, settings={"response_format": "json"})
        told = answer["answer_json"]
        assert "[1]" not in told["answer"]
        assert [sentence["citations"] for sentence in told["sentences"]] == [[1]] * len(told["sentences"])


async def test_each_sentence_of_a_quotation_is_supported_by_its_own_words(shelf: Library) -> None:
    for question, parts in ((FEE, ["| France |"]), (FORMATS, ["The invoice", "PDF", "PNG", "TIFF"])):
        answer = await shelf.ask(question)
        assert {one["verdict"] for one in answer["sentences"]} == {"supported"}
        sentence = answer["sentences"][-1]
        quotes = [one["quoted_text"] for one in sentence["citations"]]
        assert [quote[: len(part)] for quote, part in zip(quotes, parts, strict=True)] == parts
        assert all(quote in sentence["text"] for quote in quotes)
        assert answer["faithfulness_score"] == 1.0
        assert answer["marks"] == {"written": 1, "corrected": 0, "removed": 0, "added": 0}


async def test_the_end_of_a_rag_stream_has_the_support(shelf: Library) -> None:
    reply = await shelf.call("POST", "/rag/stream", {"query": FEE})
    done = json.loads(reply.body.rpartition("data: ")[2])
    assert done["type"] == "done"
    assert done["data"]["support"] == (await shelf.ask(FEE))["support"]


async def test_the_query_log_keeps_the_support(shelf: Library) -> None:
    answer = await shelf.ask(FEE)
    record = await shelf.good("GET", f"/v1/queries/{answer['query_id']}")
    assert record["settings"]["support"] == answer["support"]
    assert record["settings"]["evidence"] == "rank"
