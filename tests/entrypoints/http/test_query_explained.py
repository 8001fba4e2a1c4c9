"""`explain` in a question: each passage's way from its source to its place in the prompt, or why it was left out."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.domain.model import Endpoint
from anabranch.testing import Document, Space
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("explain")]

POLICY = (
    "A customer who bought a bicycle in one of our shops may bring it back within {} days and gets the money back, as "
    "long as the bicycle was not ridden on the road; lamps, locks, bags and {} clothes are exchanged, not paid back."
)
ASKED = "How long may a customer bring a bicycle back?"
HUTS = ("Lark", "Swan", "Heron", "Finch", "Plover", "Curlew")
HUT = (
    "The {} hut is open from June to September and has beds for walkers. Its warden cooks soup in the evening and "
    "lights the stove before breakfast. Walkers book a bed in the hut a week before they come, and they bring a "
    "sleeping bag, a lamp and warm clothes. The path to the {} hut begins at the bridge below the lake, climbs through "
    "the forest for three hours, and crosses two streams that carry much water after rain. Dogs stay outside the hut. "
)
BEDS = "When do walkers book a bed in the hut?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with Space() as opened:
        mirror = Document(title="Mirror", content=POLICY.format("30", "padded"))
        other = Document(title="Lamps", content="Lamps for a bicycle are sold by the customer desk.")
        opened.source("mirror", documents=[mirror, other])
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, space: Space) -> AsyncIterator[Library]:
    mirror = Endpoint(slug="mirror", url=space.url, name="mirror", operator=True)
    given: dict[str, Any] = {"evidence": "auto", "sources": {"mirror": mirror}, "query_context_tokens": 2_000}
    async with library(tmp_path_factory.mktemp("data"), models_dir, rate_limit=0, **given) as opened:
        await opened.collection("shop")
        for title, days, clothes in (("North", "30", "warm"), ("South", "30", "light"), ("Sale", "14", "warm")):
            await opened.ingest("shop", text(POLICY.format(days, clothes), title=title))
        hidden = {"visibility": "private"}
        secret = text(POLICY.format("30", "costly"), title="Board", permissions=hidden)
        await opened.ingest("shop", secret)
        await opened.collection("huts")
        for hut in HUTS:
            await opened.ingest("huts", text(HUT.format(hut, hut) * 2, title=hut))
        yield opened


async def explained(shelf: Library, query: str, **more: Any) -> tuple[Any, list[Any]]:
    """The answer, and the passages of its explanation."""
    answer = await shelf.ask(query, explain=True, **more)
    return answer, answer["explanation"]["passages"]


def step(passage: Any, stage: str) -> Any:
    return next(one for one in passage["steps"] if one["stage"] == stage)


def stages(passage: Any) -> list[str]:
    return [one["stage"] for one in passage["steps"]]


async def test_the_place_in_the_prompt_is_the_number_of_the_citation(shelf: Library) -> None:
    answer, passages = await explained(shelf, BEDS, collections=["huts"])
    numbers = {one["chunk_id"]: one["citation_index"] for one in answer["sources"] if one["citation_index"]}
    assert {one["chunk_id"]: one["citation_index"] for one in passages if one["citation_index"]} == numbers
    shown = [one for one in passages if one["citation_index"] is not None]
    assert [one["citation_index"] for one in shown] == list(range(1, len(shown) + 1))
    assert passages[: len(shown)] == shown
    assert [step(one, "prompt")["rank"] for one in shown] == [one["citation_index"] for one in shown]
    assert answer["citations"][0]["chunk_id"] == passages[answer["citations"][0]["citation_index"] - 1]["chunk_id"]
    assert all(one["left_out"] is None for one in shown)


async def test_a_passage_goes_from_the_search_over_rerank_source_merge_and_evidence_to_the_prompt(
    shelf: Library,
) -> None:
    answer, [first, *_] = await explained(shelf, BEDS, collections=["huts"])
    assert stages(first) == ["search", "rerank", "source", "merge", "evidence", "prompt"]
    source = answer["sources"][0]
    values = {name: step(first, "search")["values"][name] for name in ("dense", "sparse", "fused")}
    assert values == pytest.approx({name: source["scores"][name] for name in values}, abs=1e-5)
    assert step(first, "rerank")["values"]["score"] == pytest.approx(source["scores"]["rerank"], abs=1e-5)
    assert step(first, "source")["values"]["score"] == pytest.approx(source["score"], abs=1e-5)
    assert step(first, "evidence")["values"] == {"probability": source["evidence"]}
    assert first["text"] == source["content_snippet"][:80]
    assert (first["title"], first["document_id"]) == (source["title"], source["document_id"])


async def test_a_passage_that_is_cut_by_the_token_budget_says_so(shelf: Library) -> None:
    answer, passages = await explained(shelf, BEDS, collections=["huts"])
    unused = {one["chunk_id"] for one in answer["sources"] if one["citation_index"] is None}
    left_out = [one for one in passages if one["left_out"] == "budget"]
    assert unused
    assert {one["chunk_id"] for one in left_out} == unused
    end = left_out[0]["steps"][-1]
    assert (end["stage"], end["left_out"], end["values"]["budget"]) == ("budget", True, 2_000)
    assert 100 < end["values"]["tokens"] < 1_000
    assert end["note"] == "no room for it in the prompt (AGGREGATOR_QUERY_CONTEXT_TOKENS)"
    cut = [one for one in passages if "characters" in one["steps"][-1].get("note", "")]
    assert len(cut) == 1
    assert cut[0]["citation_index"] == max(one["citation_index"] or 0 for one in passages)


async def test_a_near_duplicate_names_the_passage_that_it_was_left_out_for(shelf: Library) -> None:
    _, passages = await explained(shelf, ASKED, collections=["shop"], who="bob")
    [copy] = [one for one in passages if one["left_out"] == "near_duplicates"]
    found, end = copy["steps"]
    kept = next(one for one in passages if one["chunk_id"] == end["other"]["chunk_id"])
    assert {copy["title"], kept["title"], end["other"]["title"]} == {"North", "South"}
    assert kept["citation_index"] is not None
    assert 0.95 < end["values"]["similarity"] < 1
    assert found["stage"] == "search"
    assert found["rank"] > step(kept, "search")["rank"]
    assert found["values"].keys() == step(kept, "search")["values"].keys() == {"dense", "sparse", "fused"}
    ranks = [step(one, "search")["rank"] for one in passages]
    assert sorted(ranks) == list(range(1, len(passages) + 1))


async def test_a_near_duplicate_of_another_source_is_left_out_when_replies_are_merged(shelf: Library) -> None:
    _, passages = await explained(shelf, ASKED, collections=["shop"], sources=["mirror"])
    by_title = {one["title"]: one for one in passages}
    mirrors = [one for one in (by_title["Mirror"], by_title["North"], by_title["South"]) if one["left_out"]]
    assert {one["left_out"] for one in mirrors} == {"near_duplicates"}
    lamps = by_title["Lamps"]
    assert lamps["source"] == "mirror"
    assert stages(lamps)[:2] == ["source", "merge"]
    assert step(lamps, "source")["rank"] == 2


async def test_a_passage_that_the_evidence_model_did_not_read_says_why(shelf: Library) -> None:
    answer, passages = await explained(shelf, BEDS, collections=["huts"])
    read = {one["chunk_id"]: one["evidence"] for one in answer["sources"]}
    judged = [(read[one["chunk_id"]], step(one, "evidence")) for one in passages if "evidence" in stages(one)]
    assert {probability is None for probability, _ in judged} == {True, False}
    for probability, noted in judged:
        assert ("note" in noted) == (probability is None)
        assert noted.get("note", "") in (
            "",
            "not read: other passages are more likely to answer",
            "not read: a passage read before it answers",
        )
    for query, settings, why in (
        (BEDS, {"evidence": "off"}, "the evidence model is off for this question"),
        ("Wann buchen die Wanderer ein Bett in der Hütte?", {"evidence": "rank"}, "the question is not in English"),
    ):
        _, passages = await explained(shelf, query, collections=["huts"], settings=settings)
        assert step(passages[0], "evidence") == {"stage": "evidence", "note": f"not read: {why}"} | (
            {} if settings["evidence"] == "off" else {"rank": step(passages[0], "evidence")["rank"]}
        )


async def test_a_passage_that_overlaps_a_better_one_says_what_is_kept_of_it(shelf: Library) -> None:
    await shelf.collection("paths", chunking_strategy="fixed", chunk_size=64, chunk_overlap=32)
    await shelf.ingest("paths", text(HUT.format("Lark", "Lark"), title="Paths"))
    _, passages = await explained(shelf, BEDS, collections=["paths"], settings={"evidence": "off"})
    overlapping = [one for one in passages if "overlap" in stages(one)]
    assert overlapping
    for one in overlapping:
        noted = step(one, "overlap")
        assert noted["other"]["chunk_id"] != one["chunk_id"]
        assert noted["other"]["title"] == "Paths"
        assert (noted["note"] == "better passages of the same document have almost all of it") == (
            one["left_out"] == "overlap"
        )
        assert noted.get("left_out", False) or noted["note"].startswith("cut to ")


async def test_passages_beyond_top_k_say_so(shelf: Library) -> None:
    _, passages = await explained(shelf, BEDS, collections=["huts"], settings={"top_k": 2})
    left_out = [one for one in passages if one["left_out"] == "top_k"]
    assert left_out
    assert left_out[0]["steps"][-1]["values"] == {"most": 2}
    settings = {"top_k": 2, "evidence": "off"}
    _, passages = await explained(shelf, BEDS, collections=["huts"], settings=settings)
    assert {one["left_out"] for one in passages} == {None, "limit"}


async def test_a_caller_sees_nothing_of_documents_that_are_hidden_from_him(shelf: Library) -> None:
    answer, _ = await explained(shelf, ASKED, collections=["shop"], who="bob")
    assert "Board" not in json.dumps(answer)
    assert "costly" not in json.dumps(answer)
    ranks = [step(one, "search")["rank"] for one in answer["explanation"]["passages"][:2]]
    assert sorted(ranks) == [1, 2]
    assert answer["explanation"]["more"] == 0
    operator, _ = await explained(shelf, ASKED, collections=["shop"])
    assert "Board" in json.dumps(operator["explanation"])


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"rerank": False}, {"evidence": "off"}])
async def test_an_explained_answer_is_the_same_as_any(shelf: Library, settings: dict[str, Any]) -> None:
    plain = await shelf.ask(ASKED, collections=["shop", "huts"], sources=["mirror"], settings=settings)
    assert "explanation" not in plain
    answer, _ = await explained(shelf, ASKED, collections=["shop", "huts"], sources=["mirror"], settings=settings)
    for name in ("answer", "sources", "citations", "support", "refused"):
        assert answer[name] == plain[name]


async def test_an_explanation_is_of_its_own_run_and_not_of_a_cached_answer(shelf: Library) -> None:
    await shelf.ask(BEDS, collections=["huts"])
    answer, passages = await explained(shelf, BEDS, collections=["huts"])
    assert passages
    assert "explanation" not in await shelf.ask(BEDS, collections=["huts"])
    assert not answer["refused"]


async def test_a_stream_has_the_explanation_at_its_end(shelf: Library) -> None:
    _, passages = await explained(shelf, BEDS, collections=["huts"])
    *_, done = await shelf.stream(BEDS, collections=["huts"], explain=True)
    assert [one["chunk_id"] for one in done.data["explanation"]["passages"]] == [one["chunk_id"] for one in passages]


async def test_the_rag_stream_explains_variety_and_its_guardrail(shelf: Library) -> None:
    found = await rag(shelf, BEDS, top_k=2, evidence="off")
    assert [step(one, "variety")["rank"] for one in found if one["citation_index"]] == [1, 2]
    assert {one["left_out"] for one in found} == {None, "variety"}
    refused = await rag(shelf, "What does the warden think of quantum gravity?", threshold=1.0)
    assert refused
    guarded = [one for one in refused if one["left_out"] == "guard"]
    assert guarded[0]["steps"][-1]["values"]["threshold"] == 1.0
    assert all(one["citation_index"] is None for one in refused)


async def rag(shelf: Library, query: str, **more: Any) -> list[Any]:
    body = {"query": query, "collections": ["huts"], "explain": True, **more}
    reply = await shelf.call("POST", "/rag/stream", body)
    assert reply.status == 200, reply
    found = json.loads(reply.body.strip().rpartition("data: ")[2])["data"]["explanation"]["passages"]
    assert isinstance(found, list)
    return found
