"""What a client sees of a question while it is answered: progress, timings, whole texts, and the model it names."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from anabranch.domain.model import Endpoint
from anabranch.testing import Document, Space
from conftest import SseEvent
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("query-progress")]

RULES = "A parcel to Iceland leaves on Tuesdays. " + "The harbour master keeps a list of every parcel. " * 8
OTHER = "Letters to Iceland take a week by ship, and longer in winter. " * 5 + "Each is insured."
ASKED = "When does a parcel to Iceland leave?"
BOTH = ["collections", "mirror"]
TIMES = {
    *("retrieval_ms", "merge_ms", "evidence_ms", "prompt_ms"),
    *("first_token_ms", "generation_ms", "verification_ms", "total_ms"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with Space() as space:
        space.source("mirror", documents=[Document(title="Mirror", content=OTHER)])
        space.model("writer", reply="Parcels leave on Tuesdays [1].")
        sources = {"mirror": Endpoint(slug="mirror", url=space.url, name="mirror", operator=True)}
        sources["gone"] = Endpoint(slug="gone", url=space.url, name="gone", operator=True)
        models = {"writer": Endpoint(slug="writer", url=space.url, name="writer", operator=True)}
        folder = tmp_path_factory.mktemp("data")
        async with library(folder, models_dir, sources=sources, models=models) as opened:
            await opened.collection("post")
            await opened.ingest("post", text(RULES, title="Rules"))
            yield opened


def named(events: list[SseEvent]) -> list[str]:
    return [event.name or "" for event in events]


async def test_a_stream_with_progress_names_its_sources_as_they_reply(shelf: Library) -> None:
    events = await shelf.stream(ASKED, sources=BOTH, model="extractive", settings={"progress": True})
    names = named(events)
    assert names[:5] == ["started", "retrieval", "source", "source", "retrieved"]
    assert names.index("generating") < names.index("token")
    by_name = {event.name: event.data for event in events}
    done = by_name["done"]
    assert by_name["started"] == {"query_id": done["query_id"], "conversation_id": done["conversation_id"]}
    asked = by_name["retrieval"]["sources"]
    replies = {event.data["index"]: event.data for event in events if event.name == "source"}
    assert [replies[index]["source"] for index in sorted(replies)] == asked == BOTH
    assert all(set(one) == {"index", "source", "status", "latency_ms", "results", "error"} for one in replies.values())
    assert by_name["retrieved"]["passages"] == sum(one["results"] for one in replies.values()) == 2
    assert by_name["generating"] == {"model": "extractive"}
    assert [one["source"] for one in done["source_status"]] == asked


async def test_a_stream_without_progress_has_none_of_these_events(shelf: Library) -> None:
    events = await shelf.stream(ASKED, settings={"progress": False})
    assert set(named(events)) == {"token", "sentence", "sources", "done"}
    assert "source_status" not in events[-1].data


async def test_a_failed_source_is_in_the_progress_before_the_error(shelf: Library) -> None:
    events = await shelf.stream(ASKED, sources=["gone"], settings={"progress": True})
    assert named(events) == ["started", "retrieval", "source", "error"]
    assert (events[2].data["status"], events[2].data["results"]) == ("error", 0)


async def test_an_answer_says_how_long_its_stages_took(shelf: Library) -> None:
    answer = await shelf.ask(f"{ASKED} Really?", sources=BOTH)
    times = answer["timings"]
    assert set(times) == TIMES
    assert times["total_ms"] == answer["latency_ms"] >= times["first_token_ms"] >= times["retrieval_ms"]
    refused = (await shelf.ask(ASKED, filters={"tags": ["nothing"]}))["timings"]
    assert (refused["first_token_ms"], refused["generation_ms"]) == (None, 0)


async def test_the_timings_of_a_cached_answer_are_its_own(shelf: Library) -> None:
    await shelf.ask(f"{ASKED} Say it twice.")
    again = (await shelf.ask(f"{ASKED} Say it twice."))["timings"]
    assert again == {**dict.fromkeys(TIMES, 0), "first_token_ms": None, "total_ms": again["total_ms"]}


async def test_sources_have_their_whole_text_on_request(shelf: Library) -> None:
    answer = await shelf.ask(ASKED, sources=BOTH, settings={"include_text": True})
    assert len(answer["sources"]) == 2
    for one in answer["sources"]:
        assert len(one["text"]) > 200
        assert one["text"].startswith(one["content_snippet"])
    remote = next(one for one in answer["sources"] if one["source"] == "mirror")
    assert remote["text"].endswith("Each is insured.")
    plain = await shelf.ask(ASKED, sources=BOTH)
    assert all("text" not in one for one in plain["sources"])


async def test_a_request_may_name_a_configured_model(shelf: Library) -> None:
    answer = await shelf.ask(ASKED, model="writer", verify=False)
    assert (answer["answer"], answer["usage"]["model"]) == ("Parcels leave on Tuesdays [1].", "writer")
    quoted = await shelf.ask(ASKED, model="extractive")
    assert quoted["usage"]["model"] == "extractive"


async def test_only_who_may_use_a_model_can_name_it(shelf: Library) -> None:
    reply = await shelf.call("POST", "/v1/query", {"query": ASKED, "model": "writer"}, who="bob")
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert reply.body["message"] == "There is no model 'writer' that you may use; name one of: extractive."
    for bad in ("", "x" * 501, 7):
        assert (await shelf.call("POST", "/v1/query", {"query": ASKED, "model": bad})).status == 400
