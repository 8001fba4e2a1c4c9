"""Questions to collections: answers, sources, citations, filters, streams, feedback."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-2")]

HANDBOOK = """# Refunds

Refunds for printed books take 30 days. Digital products cannot be returned once they were downloaded.

# Shipping

Parcels to Iceland leave on Tuesdays. Every parcel is insured up to 500 euros.
"""
GARDEN = "Compost needs three months. Turn the heap every second week, and keep it as moist as a wrung sponge."
LINES = "The archive holds letters\u2028from 1871\u2029and maps\u0085of Zanzibar harbour."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir) as opened:
        await opened.collection("shop", chunking_strategy="sentence", chunk_size=40, chunk_overlap=0)
        await opened.collection("garden")
        handbook = {"author": "Ada", "created_date": "2023-05-01", "tags": ["policy", "shop"], "custom": {"level": 3}}
        await opened.ingest("shop", text(HANDBOOK, title="Handbook", filename="handbook.md", metadata=handbook))
        garden = {"author": "Ben", "created_date": "2024-08-01", "tags": ["plants"], "draft": False}
        await opened.ingest("garden", text(GARDEN, title="Garden", metadata=garden), text(LINES, title="Archive"))
        yield opened


async def test_an_answer_has_the_documented_form(shelf: Library) -> None:
    answer = await shelf.ask("How long do refunds for printed books take?")
    assert set(answer) == {
        *("query_id", "answer", "sources", "conversation_id", "citations", "usage", "latency_ms", "refused"),
        *("rewritten_query", "finish_reason", "support", "removed_links", "timings"),
        *("sentences", "faithfulness_score", "marks"),
    }, "`fallback` is there only if a model has failed"
    assert answer["answer"] == "Refunds for printed books take 30 days. [1]"
    assert answer["usage"] == {"input_tokens": 0, "output_tokens": 0, "model": "extractive"}
    assert (answer["refused"], answer["rewritten_query"]) == (False, None)
    assert answer["latency_ms"] >= 0
    first = answer["sources"][0]
    assert set(first) == {
        *("chunk_id", "document_id", "title", "content_snippet", "score", "citation_index", "source"),
        *("chunk_index", "created_at", "owner"),
        *("collection", "page", "section_title", "headers", "start_char", "end_char", "url", "metadata", "scores"),
        *("chunk_type", "also_in", "also_in_count", "evidence", "suspected_instructions"),
    }
    assert (first["title"], first["collection"], first["citation_index"]) == ("Handbook", "shop", 1)
    assert (first["headers"], first["section_title"]) == (["Refunds"], "Refunds")
    assert first["metadata"]["author"] == "Ada"
    assert set(first["scores"]) == {"dense", "sparse", "fused", "rerank"}
    assert 0 <= first["score"] <= 1


async def test_citations_open_at_the_quoted_words(shelf: Library) -> None:
    for question in ("How long do refunds take?", "When do parcels to Iceland leave?", "What does compost need?"):
        answer = await shelf.ask(question)
        assert answer["citations"], answer
        for citation in answer["citations"]:
            document = await shelf.good("GET", f"/v1/documents/{citation['document_id']}")
            start, end = citation["start_char"], citation["end_char"]
            assert document["content"][start:end] == citation["quoted_text"]
            part = await shelf.good("GET", f"/v1/documents/{citation['document_id']}?start={start}&end={end}")
            assert part["content"] == citation["quoted_text"]
            mark = answer["answer"][citation["answer_start"] : citation["answer_end"]]
            assert mark == f"[{citation['citation_index']}]"
            source = next(one for one in answer["sources"] if one["citation_index"] == citation["citation_index"])
            assert (source["chunk_id"], source["document_id"]) == (citation["chunk_id"], citation["document_id"])


async def test_sources_are_all_that_was_found_in_order(shelf: Library) -> None:
    answer = await shelf.ask("parcels", settings={"top_k": 3})
    assert len(answer["sources"]) == 3
    everything = await shelf.ask("parcels")
    assert [one["chunk_id"] for one in everything["sources"]][:3] == [one["chunk_id"] for one in answer["sources"]]
    for one in everything["sources"]:
        document = await shelf.good("GET", f"/v1/documents/{one['document_id']}")
        chunk = document["content"][one["start_char"] : one["end_char"]]
        assert one["content_snippet"] == chunk[:200]


async def test_a_stream_folds_to_the_same_answer(shelf: Library) -> None:
    for more in (
        {},
        {"settings": {"include_sources": False}},
        {"settings": {"response_format": "json"}},
        {"filters": {"tags": ["nothing"]}},
    ):
        question: dict[str, Any] = {"conversation_id": "fold", **more}
        whole = await shelf.ask("When do parcels to Iceland leave, and how are they insured?", **question)
        events = await shelf.stream("When do parcels to Iceland leave, and how are they insured?", **question)
        checked = [event.data["sentence"] for event in events if event.name == "sentence"]
        assert checked == whole.get("sentences", [])
        events = [event for event in events if event.name != "sentence"]
        names = [event.name for event in events]
        middle = ["sources"] if "sources" in whole else []
        assert names == ["token"] * (len(events) - 1 - len(middle)) + [*middle, "done"]
        folded = {"answer": "".join(event.data["text"] for event in events if event.name == "token")}
        for event in events:
            if event.name != "token":
                folded |= event.data
        for own in ("query_id", "latency_ms", "timings"):
            assert folded.pop(own) != ""
            whole.pop(own)
        assert folded == whole


async def test_a_stream_is_not_cut_by_odd_line_ends(shelf: Library) -> None:
    question = {"query": "What does the archive hold about Zanzibar harbour?"}
    reply = await shelf.call("POST", "/v1/query", question, headers={"Accept": "text/event-stream"})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert reply.headers["X-Accel-Buffering"] == "no"
    assert "Zanzibar" in reply.body
    assert not set("\u2028\u2029\u0085") & set(reply.body)


async def test_sources_can_be_left_out(shelf: Library) -> None:
    assert "sources" not in await shelf.ask("refunds?", settings={"include_sources": False})


async def test_an_answer_sentence_by_sentence(shelf: Library) -> None:
    answer = await shelf.ask("How long do refunds take, and what of compost?", settings={"response_format": "json"})
    told = answer["answer_json"]
    assert told["answer"] == " ".join(sentence["text"] for sentence in told["sentences"])
    assert "[" not in told["answer"]
    assert [number for sentence in told["sentences"] for number in sentence["citations"]] == [
        citation["citation_index"] for citation in answer["citations"]
    ]
    assert all(sentence["citations"] for sentence in told["sentences"])


async def test_a_query_without_an_answer_is_refused_and_says_why(shelf: Library) -> None:
    abstained = await shelf.ask("Who won the chess championship in 1972?")
    assert (abstained["refused"], abstained["finish_reason"]) == (True, "abstained")
    assert abstained["sources"]
    assert not abstained["citations"]
    nothing = await shelf.ask("refunds", filters={"tags": ["none has this"]})
    assert (nothing["refused"], nothing["sources"], nothing["citations"]) == (True, [], [])
    assert nothing["usage"]["model"] == "extractive"
    assert "Nothing" in nothing["answer"]


@pytest.mark.parametrize(
    ("filters", "titles"),
    [
        ({"date_range": {"start": "2024-01-01", "end": "2024-12-31"}}, ["Garden"]),
        ({"date_range": {"end": "2023-05-01"}}, ["Handbook"]),
        ({"date_range": {"start": "2023-05-02", "end": "2024-07-31"}}, []),
        ({"date_range": {"start": "2025-01-01"}}, ["Archive"]),
        ({"metadata": {"author": "Ada"}}, ["Handbook"]),
        ({"metadata": {"custom.level": 3}}, ["Handbook"]),
        ({"metadata": {"level": "3"}}, ["Handbook"]),
        ({"metadata": {"draft": False}}, ["Garden"]),
        ({"metadata": {"author": "Ada", "draft": False}}, []),
        ({"metadata": {"level": 1e300}}, []),
        ({"metadata": {"level": 10**30}}, []),
        ({"tags": ["policy", "shop"]}, ["Handbook"]),
        ({"tags": ["policy", "plants"]}, []),
        ({}, ["Archive", "Garden", "Handbook"]),
        (None, ["Archive", "Garden", "Handbook"]),
    ],
    ids=str,
)
async def test_query_filters_select_documents(shelf: Library, filters: Any, titles: list[str]) -> None:
    answer = await shelf.ask("What is there?", filters=filters, settings={"top_k": 20})
    assert sorted({one["title"] for one in answer["sources"]}) == titles


async def test_only_the_named_collections_are_asked(shelf: Library) -> None:
    made = await shelf.good("GET", "/v1/collections/garden")
    for name in ("garden", made["id"]):
        answer = await shelf.ask("What is there?", collections=[name])
        assert {one["collection"] for one in answer["sources"]} == {"garden"}
    both = await shelf.ask("What is there?", collections=["garden", "shop", "garden"], settings={"top_k": 20})
    assert {one["collection"] for one in both["sources"]} == {"garden", "shop"}
    reply = await shelf.call("POST", "/v1/query", {"query": "What?", "collections": ["garden", "gardn"]})
    assert (reply.status, reply.code) == (404, "NOT_FOUND")
    assert "'gardn'" in reply.body["message"]


@pytest.mark.parametrize("query", ["", "  \n", "x" * 10_001], ids=len)
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_a_question_has_1_to_10_000_characters(shelf: Library, query: str, accept: str) -> None:
    reply = await shelf.call("POST", "/v1/query", {"query": query}, headers={"Accept": accept})
    assert (reply.status, reply.code, reply.body["error"]) == (400, "INVALID_QUERY", "invalid_query")
    assert "1 to 10,000" in reply.body["message"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"query": None}, "query"),
        ({"query": 5}, "query"),
        ({"conversation_id": ""}, "conversation_id"),
        ({"collections": "shop"}, "collections"),
        ({"collections": [1]}, "collections"),
        ({"filters": []}, "filters"),
        ({"filters": {"date_range": {"start": "yesterday"}}}, "start"),
        ({"filters": {"date_range": {"start": "2024-02-30"}}}, "start"),
        ({"filters": {"date_range": {"start": "2024-02-02", "end": "2024-02-01"}}}, "ends before"),
        ({"filters": {"metadata": {"a": [1]}}}, "metadata"),
        ({"filters": {"metadata": {"a": None}}}, "metadata"),
        ({"filters": {"tags": "shop"}}, "tags"),
        ({"settings": {"top_k": 0}}, "top_k"),
        ({"settings": {"top_k": 21}}, "from 1 to 20"),
        ({"settings": {"top_k": "5"}}, "top_k"),
        ({"settings": {"rerank": "yes"}}, "rerank"),
        ({"settings": {"response_format": "xml"}}, "response_format"),
        ({"settings": {"max_tokens": 0}}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_wrong_request_is_400_and_says_why(shelf: Library, change: dict[str, Any], says: str) -> None:
    reply = await shelf.call("POST", "/v1/query", {"query": "What?", **change})
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert says in reply.body["message"]


async def test_without_the_second_look_the_fused_order_stands(shelf: Library) -> None:
    answer = await shelf.ask("parcels to Iceland", settings={"rerank": False})
    assert all(one["scores"]["rerank"] is None for one in answer["sources"])
    fused = [one["scores"]["fused"] for one in answer["sources"]]
    assert fused == sorted(fused, reverse=True)


async def test_reranking_is_on_unless_a_question_turns_it_off(shelf: Library) -> None:
    for settings in ({}, {"rerank": True}, {"rerank": None}):
        answer = await shelf.ask("parcels to Iceland", settings=settings)
        assert all(isinstance(one["scores"]["rerank"], float) for one in answer["sources"])


async def test_without_top_k_ten_passages_are_found(shelf: Library) -> None:
    await shelf.collection("islands", chunking_strategy="sentence", chunk_size=32, chunk_overlap=0)
    islands = [text(f"Island number {number} has a lighthouse.", title=f"Island {number}") for number in range(12)]
    await shelf.ingest("islands", *islands)
    for settings, found in (({}, 10), ({"top_k": 12}, 12)):
        answer = await shelf.ask("Which island has a lighthouse?", collections=["islands"], settings=settings)
        assert len(answer["sources"]) == found


@pytest.mark.sqlite
async def test_an_unexpected_error_is_500_internal_error(shelf: Library) -> None:
    (item,) = await shelf.ingest("garden", text("Mint spreads fast.", title="Mint"))
    with closing(sqlite3.connect(shelf.folder / "records.sqlite")) as db:
        db.execute("UPDATE documents SET created_at = 'damaged' WHERE id = ?", (item["id"],))
        db.commit()
    reply = await shelf.call("GET", f"/v1/documents/{item['id']}", headers={"X-Correlation-ID": "c-500"})
    assert (reply.status, reply.code, reply.body["error"]) == (500, "INTERNAL_ERROR", "internal_error")
    assert reply.body["details"] == {"correlation_id": "c-500"}
    assert "damaged" not in reply.body["message"]
    await shelf.good("DELETE", f"/v1/documents/{item['id']}")


@pytest.mark.sqlite
async def test_every_question_is_written_down(shelf: Library) -> None:
    answer = await shelf.ask("How long do refunds take?", conversation_id="kept", filters={"tags": ["policy"]})
    await shelf.good("POST", "/v1/feedback", {"query_id": answer["query_id"], "rating": "thumbs_up", "comment": "Yes"})
    with closing(sqlite3.connect(shelf.folder / "records.sqlite")) as db:
        db.row_factory = sqlite3.Row
        (asked,) = db.execute("SELECT * FROM queries WHERE id = ?", (answer["query_id"],)).fetchall()
        (answered,) = db.execute("SELECT * FROM responses WHERE query = ?", (answer["query_id"],)).fetchall()
        found = db.execute(
            "SELECT chunk FROM retrievals WHERE query = ? ORDER BY rank", (answer["query_id"],)
        ).fetchall()
        quoted = db.execute("SELECT quoted FROM citations WHERE query = ?", (answer["query_id"],)).fetchall()
    assert (asked["original"], asked["conversation"], asked["user"]) == ("How long do refunds take?", "kept", "")
    assert "policy" in asked["filters"]
    assert (answered["answer"], answered["faithfulness"]) == (answer["answer"], 1.0)
    assert 0 < answered["relevance"] <= 1
    assert (answered["feedback"], answered["comment"]) == ("thumbs_up", "Yes")
    assert [row[0] for row in found] == [one["chunk_id"] for one in answer["sources"]]
    assert [row[0] for row in quoted] == [one["quoted_text"] for one in answer["citations"]]


async def test_feedback_right_after_the_answer_finds_its_question(shelf: Library) -> None:
    for rating in ("thumbs_up", "thumbs_down") * 10:
        events = await shelf.stream("How long do refunds take?")
        body = {"query_id": events[-1].data["query_id"], "rating": rating}
        assert await shelf.good("POST", "/v1/feedback", body) == {"recorded": True}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"query_id": "unknown", "rating": "thumbs_up"}, 404),
        ({"query_id": "unknown", "rating": "meh"}, 400),
        ({"query_id": "unknown"}, 400),
        ({"rating": "thumbs_up"}, 400),
        ({"query_id": "", "rating": "thumbs_up"}, 400),
        ({"query_id": "unknown", "rating": "thumbs_up", "comment": 5}, 400),
    ],
    ids=str,
)
async def test_invalid_feedback_is_refused(shelf: Library, body: dict[str, Any], status: int) -> None:
    reply = await shelf.call("POST", "/v1/feedback", body)
    assert (reply.status, reply.code) == (status, {404: "NOT_FOUND", 400: "VALIDATION_ERROR"}[status])
