"""Verified answers over HTTP: each sentence with the words that support it, in every dialect that answers."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.client import AnswerClient, AnswerFrame
from anabranch.domain.model import Message
from anabranch.testing import Document, Space
from conftest import ref
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("verified-answers")]

REFUNDS = "Refunds for printed books take 30 days."
PARCELS = "Parcels to Iceland leave on Tuesdays."
INSURED = "Every parcel is insured up to 500 euros."
INVENTED = "Giraffes sleep standing beneath acacia trees."
DOCUMENTS = {
    "Returns": f"# Returns\n\nThis page is about money. {REFUNDS} Ask the desk for a form.",
    "Shipping": f"# Shipping\n\n{PARCELS} {INSURED}",
}
# What the model writes, by a word of the question. The numbers of the passages are those of `numbered`.
WRITTEN = {
    "right": f"{REFUNDS} [{{refunds}}] {PARCELS} [{{parcels}}]",
    "wrong": f"{REFUNDS} [{{parcels}}]",
    "unmarked": f"{REFUNDS} {PARCELS}",
    "invented": f"{REFUNDS} [{{refunds}}] {INVENTED} [{{parcels}}]",
    "useless": f"{INVENTED} [{{refunds}}]",
    "listed": f"Here is what the documents say:\n\n- {REFUNDS}\n- {INVENTED}\n\n```\npay[1]\n```\n",
    "numbered": f"{REFUNDS} [9] Giraffes sleep standing in `trees[1]` at night.",
    "changed": "Refunds for printed books take 45 days. [{refunds}]",
}


def scripted(messages: Sequence[Message]) -> str:
    """What the model writes; it sees in the prompt which number a passage has."""
    prompt = messages[-1].content
    way = next(way for way in WRITTEN if f"{way} answer" in prompt)
    first, second = (prompt.find(said) for said in (REFUNDS, PARCELS))
    refunds, parcels = (1, 2) if first < second else (2, 1)
    return WRITTEN[way].replace("{refunds}", str(refunds)).replace("{parcels}", str(parcels))


def question(way: str) -> str:
    return f"How long do refunds for printed books take, and when do parcels to Iceland leave? A {way} answer"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with Space() as opened:
        opened.model("writer", reply=scripted)
        documents = [Document(title=title, content=content) for title, content in DOCUMENTS.items()]
        opened.source("desk", documents=documents)
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, space: Space) -> AsyncIterator[Library]:
    async with shop(tmp_path_factory, models_dir, space) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demanding(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, space: Space) -> AsyncIterator[Library]:
    async with shop(tmp_path_factory, models_dir, space, min_faithfulness=0.6) as opened:
        yield opened


@asynccontextmanager
async def shop(paths: pytest.TempPathFactory, models_dir: Path, space: Space, **given: Any) -> AsyncIterator[Library]:
    writer = {"model_url": space.url, "model_name": "writer", "rate_limit": 0, **given}
    async with library(paths.mktemp("data"), models_dir, **writer) as opened:
        await opened.collection("shop")
        await opened.ingest("shop", *(text(content, title=title) for title, content in DOCUMENTS.items()))
        yield opened


def verdicts(answer: Any) -> list[tuple[str, str]]:
    return [(one["text"].partition(" [")[0], one["verdict"]) for one in answer["sentences"]]


async def check_places(shelf: Library, answer: Any, written: str) -> None:
    """Every offset of a sentence leads to what it says."""
    for one in answer["sentences"]:
        assert written[one["start"] : one["end"]] == one["text"]
        assert all(written[word["start"] : word["end"]] == word["text"] for word in one["doubted"])
        for quote in one["citations"]:
            document = await shelf.good("GET", f"/v1/documents/{quote['document_id']}")
            assert document["content"][quote["start_char"] : quote["end_char"]] == quote["quoted_text"]
            source = next(one for one in answer["sources"] if one["citation_index"] == quote["citation_index"])
            for name in ("chunk_id", "document_id", "source"):
                assert source[name] == quote[name]


async def rag(shelf: Library, way: str, **more: Any) -> tuple[str, Any]:
    """The text of a /rag/stream, and its end."""
    reply = await shelf.call("POST", "/rag/stream", {"query": question(way), "threshold": 0, **more})
    frames = [json.loads(line.removeprefix("data: ")) for line in reply.body.splitlines() if line.startswith("data: ")]
    assert {frame["type"] for frame in frames} == {"token", "done"}
    return "".join(frame["data"] for frame in frames if frame["type"] == "token"), frames[-1]["data"]


def chat(space: Space, way: str, **more: Any) -> dict[str, Any]:
    sources, model = [ref(space, "desk")], ref(space, "writer")
    return {"prompt": question(way), "data_sources": sources, "model": model, **more}


async def test_every_sentence_has_its_verdict_and_the_words_that_support_it(shelf: Library) -> None:
    answer = await shelf.ask(question("invented"))
    assert verdicts(answer) == [(REFUNDS, "supported"), (INVENTED, "unsupported")]
    supported, invented = answer["sentences"]
    (quote,) = supported["citations"]
    assert set(supported) == {"start", "end", "text", "verdict", "support", "reason", "citations", "doubted"}
    assert set(quote) == {
        *("citation_index", "source", "document_id", "chunk_id", "start_char", "end_char", "quoted_text", "page"),
        "support",
    }
    assert (quote["quoted_text"], quote["support"], supported["reason"]) == (REFUNDS, 1.0, None)
    assert (invented["citations"], invented["support"]) == ([], 0.0)
    assert answer["faithfulness_score"] == 0.5
    assert answer["marks"] == {"written": 2, "corrected": 0, "removed": 1, "added": 0}
    assert not {"unfaithful", "left_out"} & set(answer)
    await check_places(shelf, answer, answer["answer"])


async def test_a_wrong_mark_is_corrected_in_the_citations(shelf: Library) -> None:
    answer = await shelf.ask(question("wrong"))
    (sentence,), (citation,) = answer["sentences"], answer["citations"]
    mark = answer["answer"][citation["answer_start"] : citation["answer_end"]]
    assert (mark, citation["quoted_text"]) != (f"[{citation['citation_index']}]", REFUNDS)
    assert citation["quoted_text"] == sentence["citations"][0]["quoted_text"] == REFUNDS
    assert citation["citation_index"] == sentence["citations"][0]["citation_index"]
    assert answer["marks"] == {"written": 1, "corrected": 1, "removed": 0, "added": 0}


async def test_a_missing_mark_is_a_citation_at_the_end_of_its_sentence(shelf: Library) -> None:
    answer = await shelf.ask(question("unmarked"))
    ends = [sentence["end"] for sentence in answer["sentences"]]
    assert [(one["answer_start"], one["answer_end"]) for one in answer["citations"]] == [(end, end) for end in ends]
    assert [one["quoted_text"] for one in answer["citations"]] == [REFUNDS, PARCELS]
    assert answer["marks"] == {"written": 0, "corrected": 0, "removed": 0, "added": 2}


async def test_a_changed_number_is_not_supported(shelf: Library) -> None:
    answer = await shelf.ask(question("changed"))
    (sentence,) = answer["sentences"]
    assert sentence["verdict"] in ("partly", "unsupported", "contradicted")
    assert answer["faithfulness_score"] <= 0.5
    await check_places(shelf, answer, answer["answer"])


async def test_a_stream_has_each_sentence_when_it_is_complete_and_all_at_the_end(shelf: Library) -> None:
    events = await shelf.stream(question("right"))
    done = events[-1].data
    checked = [event.data for event in events if event.name == "sentence"]
    assert [one["index"] for one in checked] == [0, 1]
    assert [one["sentence"] for one in checked] == done["sentences"]
    assert verdicts(done) == [(REFUNDS, "supported"), (PARCELS, "supported")]
    for event_at, event in enumerate(events):
        if event.name == "sentence":
            before = "".join(one.data["text"] for one in events[:event_at] if one.name == "token")
            assert before[event.data["sentence"]["start"] :].startswith(event.data["sentence"]["text"])


async def test_the_end_of_a_rag_stream_has_the_sentences_and_no_other_frame_has(shelf: Library) -> None:
    written, done = await rag(shelf, "invented")
    assert verdicts(done) == [(REFUNDS, "supported"), (INVENTED, "unsupported")]
    assert (done["faithfulness_score"], done["marks"]["removed"]) == (0.5, 1)
    await check_places(shelf, done, written)


async def test_a_request_can_turn_verification_off(shelf: Library) -> None:
    fields = {"sentences", "faithfulness_score", "unfaithful", "left_out", "marks"}
    assert not fields & set(await shelf.ask(question("right"), verify=False))
    events = await shelf.stream(question("right"), verify=False)
    assert "sentence" not in [event.name for event in events]
    assert not fields & set(events[-1].data)
    _, done = await rag(shelf, "right", verify=False)
    assert not fields & set(done)


async def test_chat_is_verified_only_on_request_and_has_no_other_event(shelf: Library, space: Space) -> None:
    asked = chat(space, "invented")
    plain, verified = await shelf.server.chat(**asked), await shelf.server.chat(**asked, verify=True)
    assert set(verified) - set(plain) == {"sentences", "faithfulness_score", "marks"}
    assert (verified["response"], verified["faithfulness_score"]) == (plain["response"], 0.5)
    assert verdicts(verified) == [(REFUNDS, "supported"), (INVENTED, "unsupported")]
    (quote,) = verified["sentences"][0]["citations"]
    assert (quote["source"], quote["quoted_text"]) == ("desk", REFUNDS)
    assert verified["sources"]["Returns"]["content"][quote["start_char"] : quote["end_char"]] == REFUNDS
    events, more = await shelf.server.stream(**asked), await shelf.server.stream(**asked, verify=True)
    assert list(dict.fromkeys(one.name for one in events)) == list(dict.fromkeys(one.name for one in more))
    assert set(more[-1].data) - set(events[-1].data) == {"sentences", "faithfulness_score", "marks"}
    assert more[-1].data["sentences"] == verified["sentences"]


async def test_a_strict_answer_leaves_out_what_no_source_supports(shelf: Library, space: Space) -> None:
    note = "One sentence that no source supports was left out."
    answer = await shelf.ask(question("invented"), answer_policy="strict")
    assert INVENTED not in answer["answer"]
    assert answer["answer"].endswith(note)
    assert (verdicts(answer), answer["left_out"]) == ([(REFUNDS, "supported")], 1)
    await check_places(shelf, answer, answer["answer"])
    events = await shelf.stream(question("invented"), answer_policy="strict")
    assert "".join(event.data["text"] for event in events if event.name == "token") == answer["answer"]
    written, done = await rag(shelf, "invented", answer_policy="strict")
    assert (INVENTED in written, done["left_out"]) == (False, 1)
    told = await shelf.server.chat(**chat(space, "invented"), answer_policy="strict")
    assert (INVENTED in told["response"], told["left_out"], verdicts(told)) == (False, 1, [(REFUNDS, "supported")])


async def test_json_sentences_have_the_verdicts_and_the_right_citations(shelf: Library) -> None:
    answer = await shelf.ask(question("wrong"), settings={"response_format": "json"})
    right = answer["sentences"][0]["citations"][0]["citation_index"]
    told = answer["answer_json"]
    assert told == {
        "answer": REFUNDS,
        "sentences": [{"text": REFUNDS, "citations": [right], "verdict": "supported"}],
    }
    answer = await shelf.ask(question("invented"), settings={"response_format": "json"})
    told = answer["answer_json"]
    assert told["answer"] == f"{REFUNDS} {INVENTED}"
    assert [(one["text"], one["verdict"]) for one in told["sentences"]] == verdicts(answer)
    assert [len(one["citations"]) for one in told["sentences"]] == [1, 0]
    answer = await shelf.ask(question("listed"), settings={"response_format": "json"})
    told = answer["answer_json"]
    assert told["answer"] == WRITTEN["listed"].strip(), "what is in code is no mark"
    assert [one["text"] for one in told["sentences"]] == [one["text"] for one in answer["sentences"]]
    assert [one["reason"] for one in answer["sentences"]] == ["no_claim", None, None, "code"]
    answer = await shelf.ask(question("numbered"), settings={"response_format": "json"})
    assert answer["answer_json"]["answer"] == f"{REFUNDS} Giraffes sleep standing in `trees[1]` at night."
    assert answer["marks"] == {"written": 1, "corrected": 1, "removed": 0, "added": 0}
    plain = await shelf.ask(question("wrong"), verify=False, settings={"response_format": "json"})
    assert all(set(one) == {"text", "citations"} for one in plain["answer_json"]["sentences"])


async def test_a_plain_answer_below_the_minimum_is_withheld_and_a_streamed_one_is_flagged(
    demanding: Library, space: Space
) -> None:
    for _ in range(2):
        events = await demanding.stream(question("invented"))
        assert INVENTED in "".join(event.data["text"] for event in events if event.name == "token")
        assert (events[-1].data["unfaithful"], events[-1].data["faithfulness_score"]) == (True, 0.5)
        answer = await demanding.ask(question("invented"))
        assert answer["answer"] == "The answer was withheld: the sources support only 50% of its sentences."
        assert (answer["refused"], answer["unfaithful"], answer["faithfulness_score"]) == (True, True, 0.5)
        assert (answer["sentences"], answer["citations"]) == ([], [])
    _, done = await rag(demanding, "invented")
    assert (done["unfaithful"], len(done["sentences"])) == (True, 2)
    told = await demanding.server.chat(**chat(space, "invented"), verify=True)
    assert told["response"].startswith("The answer was withheld")
    assert told["unfaithful"]
    passing = await demanding.ask(question("right"))
    assert "unfaithful" not in passing
    assert verdicts(passing) == [(REFUNDS, "supported"), (PARCELS, "supported")]


async def test_the_setting_turns_verification_off_or_on_where_a_request_does_not_say(
    tmp_path_factory: pytest.TempPathFactory, models_dir: Path, space: Space
) -> None:
    async with shop(tmp_path_factory, models_dir, space, verify="off") as opened:
        assert "sentences" not in await opened.ask(question("changed"))
        asked = await opened.ask(question("changed"), verify=True)
        (sentence,) = asked["sentences"]
        assert (sentence["verdict"], sentence["reason"], sentence["support"]) == ("unchecked", "off", None)
        assert (asked["faithfulness_score"], len(asked["citations"])) == (None, 1)
    async with shop(tmp_path_factory, models_dir, space, verify="on") as opened:
        assert verdicts(await opened.server.chat(**chat(space, "right"))) == [
            (REFUNDS, "supported"),
            (PARCELS, "supported"),
        ]
        assert "sentences" not in await opened.server.chat(**chat(space, "right"), verify=False)


async def test_a_cached_answer_has_the_same_sentences(shelf: Library) -> None:
    asked = f"{question('right')}, once more"
    _, first = await rag(shelf, "right", query=asked)
    _, again = await rag(shelf, "right", query=asked)
    assert (first["cached"], again["cached"]) == (False, True)
    for name in ("sentences", "faithfulness_score", "marks", "citations"):
        assert again[name] == first[name]
    events = await shelf.stream(asked)
    assert [one.data["sentence"] for one in events if one.name == "sentence"] == events[-1].data["sentences"]


async def test_the_client_gets_each_sentence_once_also_when_it_resumes_between_them(shelf: Library) -> None:
    streams: list[str] = []
    async with AnswerClient(shelf.server.url) as answers:
        asked = answers.ask_resumable("/v1/query", {"query": question("right")}, on_stream=streams.append)
        frames = [frame async for frame in asked if isinstance(frame, AnswerFrame)]
        first, second = (at for at, frame in enumerate(frames) if frame.event == "sentence")
        rest = [frame async for frame in answers.follow(streams[0], after=frames[first].id)]
    assert rest == frames[first + 1 :]
    told = [json.loads(frames[at].data)["sentence"] for at in (first, second)]
    assert told == json.loads(frames[-1].data)["sentences"]


@pytest.mark.parametrize("change", [{"verify": "yes"}, {"answer_policy": "lenient"}], ids=str)
async def test_a_wrong_option_of_verification_is_400_and_says_what_it_takes(shelf: Library, change: Any) -> None:
    reply = await shelf.call("POST", "/v1/query", {"query": "What?", **change})
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert next(iter(change)) in reply.body["message"]
