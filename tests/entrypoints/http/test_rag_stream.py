"""POST /rag/stream: frames, guardrail, refusals, languages, limits, cache, and a client that leaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from anabranch.domain.model import Endpoint
from anabranch.testing import Failure, Space
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rag")]

HANDBOOK = """# Refunds

Refunds for printed books take 30 days. Digital products cannot be returned once they were downloaded.

# Shipping

Parcels to Iceland leave on Tuesdays. Every parcel is insured up to 500 euros.
"""
GARDEN = "Compost needs three months. Turn the heap every second week, and keep it as moist as a wrung sponge."
REFUNDS = "How long do refunds for printed books take?"
FOREIGN = "Which quarterback threw the longest touchdown pass in 1987?"
SAID = "Refunds take 30 days [1]."


class Streamed(NamedTuple):
    status: int
    frames: list[dict[str, Any]]
    headers: Any

    @property
    def types(self) -> list[str]:
        return [frame["type"] for frame in self.frames]

    @property
    def text(self) -> str:
        return "".join(frame["data"] for frame in self.frames if frame["type"] == "token")

    @property
    def end(self) -> dict[str, Any]:
        data: dict[str, Any] = self.frames[-1]["data"]
        return data


async def ask(shelf: Library, query: Any = REFUNDS, *, who: str | None = None, **more: Any) -> Streamed:
    headers = {**shelf.key(who), **more.pop("headers", {})}
    url = f"{shelf.server.url}/rag/stream"
    async with shelf.server.session.post(url, json={"query": query, **more}, headers=headers) as response:
        raw = (await response.read()).decode()
        if response.status != 200:
            return Streamed(response.status, [json.loads(raw)], response.headers)
        assert response.content_type == "text/event-stream"
        blocks = [block for block in raw.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return Streamed(200, [json.loads(block.removeprefix("data: ")) for block in blocks], response.headers)


@asynccontextmanager
async def stocked(folder: Path, models_dir: Path, **settings: Any) -> AsyncIterator[Library]:
    async with library(folder, models_dir, **{"rate_limit": 0, **settings}) as opened:
        await opened.collection("shop", chunking_strategy="sentence", chunk_size=40, chunk_overlap=0)
        await opened.collection("garden")
        await opened.ingest("shop", text(HANDBOOK, title="Handbook", filename="handbook.md"))
        await opened.ingest("garden", text(GARDEN, title="Garden"))
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with stocked(tmp_path_factory.mktemp("data"), models_dir) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def writer() -> AsyncIterator[Space]:
    async with Space() as space:
        space.model("writer", reply=SAID)
        yield space


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def written(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, writer: Space) -> AsyncIterator[Library]:
    """The same shelf, with a model that writes."""
    model = {"model_url": writer.url, "model_name": "writer", "query_rewriting": False, "model_retries": 0}
    async with stocked(tmp_path_factory.mktemp("data"), models_dir, **model) as opened:
        yield opened


async def test_an_answer_comes_as_tokens_and_ends_in_done(shelf: Library) -> None:
    answer = await ask(shelf)
    assert answer.types[-1] == "done"
    assert set(answer.types[:-1]) == {"token"}
    assert answer.text == "Refunds for printed books take 30 days. [1]"
    done = answer.end
    assert done["prompt_version"]
    assert (done["guardrail"], done["guardrail_reason"], done["cached"]) == (None, None, False)
    assert done["sources_count"] == len(done["sources"]) <= 5
    assert done["sources"][0]["title"] == "Handbook"
    (citation,) = done["citations"]
    assert citation["quoted_text"] == "Refunds for printed books take 30 days."
    assert answer.headers["cache-control"] == "no-cache"


async def test_a_retrieval_that_takes_too_long_ends_in_a_retrieval_timeout_frame(
    tmp_path_factory: pytest.TempPathFactory, models_dir: Path
) -> None:
    """The response has begun by then, so the status is 200."""
    async with Space(everything=True) as space:
        slow = {"slow": Endpoint(slug=Failure.HANG.value, url=space.url, operator=True)}
        settings = {"sources": slow, "retrieval_timeout": 0.2}
        async with library(tmp_path_factory.mktemp("slow"), models_dir, **settings) as opened:
            answer = await ask(opened, sources=["slow"])
    assert (answer.status, answer.types) == (200, ["error"])
    assert answer.end["error_code"] == "retrieval_timeout"
    assert answer.end["message"] == "The search took too long. Please try again."


async def test_a_model_streams_word_by_word_and_its_tokens_are_counted(written: Library, writer: Space) -> None:
    answer = await ask(written)
    assert answer.text == SAID
    assert len(answer.frames) > 2
    done = answer.end
    assert done["total_tokens"] == done["usage"]["total_tokens"] > 0
    assert (done["model"], done["finish_reason"]) == ("writer", "stop")
    assert done["citations"][0]["citation_index"] == 1


async def test_a_repeated_rag_question_is_answered_from_the_cache(written: Library, writer: Space) -> None:
    question = "When do parcels to Iceland leave?"
    first = await ask(written, question)
    before = len(writer.requests)
    again = await ask(written, f"  {question} ")
    assert (first.end["cached"], again.end["cached"]) == (False, True)
    assert again.text == first.text
    assert again.end["citations"] == first.end["citations"]
    assert len(writer.requests) == before
    fresh = await ask(written, question, headers={"Cache-Control": "no-cache"})
    assert not fresh.end["cached"]


@pytest.mark.parametrize(("done_mark", "cached"), [(True, True), (False, False)], ids=["[DONE]", "just ends"])
async def test_a_stream_without_a_finish_reason_is_cached_if_it_says_that_it_is_done(
    shelf: Library, models_dir: Path, writer: Space, done_mark: bool, cached: bool
) -> None:
    writer.model("plain", reply=SAID, form="content", done_mark=done_mark)
    model = Endpoint(slug="plain", url=writer.url, operator=True)
    given = {"models": {"plain": model}, "model_streaming_enabled": True, "rate_limit": 0}
    async with library(shelf.folder, models_dir, **given) as opened:
        first, again = await ask(opened), await ask(opened)
    assert first.text == again.text == SAID
    assert (first.end["finish_reason"], again.end["cached"]) == ("stop" if done_mark else "incomplete", cached)


async def test_a_cached_answer_is_forgotten_when_the_documents_change(written: Library) -> None:
    question = "Are parcels insured?"
    await ask(written, question)
    assert (await ask(written, question)).end["cached"]
    await written.ingest("shop", text("Parcels to Norway are insured up to 900 euros.", title="Norway"))
    assert not (await ask(written, question)).end["cached"]


async def test_nobody_gets_an_answer_from_documents_that_they_may_not_see(written: Library) -> None:
    await written.collection("board", who="carol", default_permissions={"visibility": "private"})
    await written.ingest("board", text("Refunds for printed books will take 10 days.", title="Secret"), who="carol")
    question = "How many days will refunds for printed books take?"
    for who in ("carol", "bob", "alice", "carol", "bob"):
        answer = await ask(written, question, who=who)
        titles = {source["title"] for source in answer.end["sources"]}
        assert ("Secret" in titles) == (who == "carol")
    assert (await ask(written, question, who="alice")).end["cached"]


async def test_nothing_close_enough_is_a_done_that_names_the_guardrail(written: Library, writer: Space) -> None:
    before = len(writer.requests)
    answer = await ask(written, FOREIGN)
    assert (answer.end["guardrail"], answer.end["guardrail_reason"]) == ("no_context", "weak")
    assert answer.text == "What was found is not close enough to the question to answer from."
    assert answer.end["mean_similarity"] < 0.55
    assert len(writer.requests) == before
    assert not (await ask(written, FOREIGN)).end["cached"]
    assert (await ask(written, FOREIGN, threshold=0)).end["guardrail"] is None


async def test_no_documents_at_all_is_no_context_too(shelf: Library) -> None:
    answer = await ask(shelf, filters={"tags": ["nothing has this"]})
    assert (answer.end["guardrail"], answer.end["guardrail_reason"]) == ("no_context", "nothing_found")
    assert answer.end["sources"] == []


async def test_collections_narrow_the_search(shelf: Library) -> None:
    answer = await ask(shelf, "How long does compost need?", collections=["garden"])
    assert {source["collection"] for source in answer.end["sources"]} == {"garden"}
    missing = await ask(shelf, collections=["attic"])
    assert (missing.status, missing.end["error_code"]) == (404, "not_found")


async def test_top_k_is_how_many_are_found(shelf: Library) -> None:
    assert len((await ask(shelf, top_k=1)).end["sources"]) == 1
    assert len((await ask(shelf, top_k=3)).end["sources"]) == 3


async def test_top_k_8_is_accepted(shelf: Library) -> None:
    answer = await ask(shelf, top_k=8)
    assert (answer.status, answer.types[-1]) == (200, "done")


async def test_mmr_lambda_is_0_5_by_default(shelf: Library) -> None:
    """The copies with other numbers are not near-duplicates, but they are alike: diversity chooses others."""
    await shelf.collection("copies", chunking_strategy="sentence")
    said = "Refunds for printed books of the series number {} take a month at the most, as the handbook says."
    others = [
        "Printed books are bound in linen.",
        "A refund is paid in cash.",
        "Refunds are written in the ledger of the shop.",
        "Books are returned by mail.",
    ]
    await shelf.ingest("copies", *(text(said.format(number), title=str(number)) for number in range(5)))
    await shelf.ingest("copies", *(text(other, title=other) for other in others))

    async def chunks(**more: Any) -> list[str]:
        found = (await ask(shelf, collections=["copies"], threshold=0, **more)).end["sources"]
        return [source["chunk_id"] for source in found]

    usual = await chunks()
    assert usual == await chunks(mmr_lambda=0.5)
    assert usual != await chunks(mmr_lambda=1)


async def test_the_guardrail_threshold_is_0_55_by_default(written: Library) -> None:
    """Questions on both sides of it, and one request with the number itself for each."""
    sides = set()
    for question in (FOREIGN, "refunds", REFUNDS, "What do ships need in winter?", "Which books do you sell?"):
        usual, same = await ask(written, question), await ask(written, question, threshold=0.55)
        weak = usual.end["guardrail_similarity"] < 0.55
        assert (usual.end["guardrail_reason"] == "weak") == (same.end["guardrail_reason"] == "weak") == weak
        just_below = await ask(written, question, threshold=usual.end["guardrail_similarity"] - 0.001)
        assert just_below.end["guardrail_reason"] != "weak"
        just_above = await ask(written, question, threshold=usual.end["guardrail_similarity"] + 0.001)
        assert just_above.end["guardrail_reason"] == "weak"
        sides.add(weak)
    assert sides == {True, False}


@pytest.mark.parametrize("mmr_lambda", [0, 0.0, 0.5, 1, 1.0, None])
async def test_every_lambda_is_taken(shelf: Library, mmr_lambda: float | None) -> None:
    answer = await ask(shelf, mmr_lambda=mmr_lambda)
    assert answer.end["sources"][0]["title"] == "Handbook"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"query": ""}, "empty"),
        ({"query": "  \n"}, "empty"),
        ({"query": "x" * 10_001}, "10000"),
        ({"query": 5}, "query"),
        ({"query": None}, "query"),
        ({"top_k": 0}, "from 1 to 8"),
        ({"top_k": 9}, "from 1 to 8"),
        ({"top_k": "five"}, "top_k"),
        ({"threshold": 1.1}, "from 0 to 1"),
        ({"threshold": -0.1}, "from 0 to 1"),
        ({"mmr_lambda": 2}, "mmr_lambda"),
        ({"mmr_lambda": -1}, "mmr_lambda"),
        ({"language": "tlh"}, "en, de, es, fr, zh"),
        ({"collections": "shop"}, "collections"),
        ({"filters": {"date_range": {"start": "2024-02-01", "end": "2024-01-01"}}}, "date_range"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said_before_the_stream(
    shelf: Library, more: dict[str, Any], said: str
) -> None:
    answer = await ask(shelf, **{"query": REFUNDS, **more})
    assert answer.status == 400
    assert answer.frames[0]["type"] == "error"
    assert answer.end["error_code"] == "validation_error"
    assert said in answer.end["message"]
    assert answer.end["prompt_version"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
async def test_what_is_no_request_at_all_is_400(shelf: Library, body: bytes) -> None:
    async with shelf.server.session.post(f"{shelf.server.url}/rag/stream", data=body) as response:
        assert response.status == 400
        assert (await response.json())["data"]["error_code"] == "validation_error"


@pytest.mark.parametrize(
    ("headers", "more", "said"),
    [
        ({}, {}, "The question is empty."),
        ({"Accept-Language": "de-AT,en;q=0.5"}, {}, "Die Frage ist leer."),
        ({"Accept-Language": "de"}, {"language": "fr"}, "La question est vide."),
        ({"Accept-Language": "pt, es;q=0.8"}, {}, "La pregunta está vacía."),
        ({"Accept-Language": "zh-CN"}, {}, "问题不能为空。"),
        ({"Accept-Language": "tlh"}, {}, "The question is empty."),
    ],
)
async def test_messages_are_in_the_callers_language(
    shelf: Library, headers: dict[str, str], more: dict[str, str], said: str
) -> None:
    assert (await ask(shelf, "", headers=headers, **more)).end["message"] == said


async def test_a_refusal_is_in_the_callers_language_and_the_model_is_told_only_by_name(
    written: Library, writer: Space
) -> None:
    refused = await ask(written, FOREIGN, headers={"Accept-Language": "de"})
    assert refused.text
    assert refused.text != (await ask(written, FOREIGN)).text
    await ask(written, "Where do parcels go?", headers={"Accept-Language": "de"}, threshold=0)
    assert "German" not in writer.requests[-1].raw.decode()
    await ask(written, "Where do parcels go?", language="de", threshold=0)
    assert "Write the answer in German." in writer.requests[-1].raw.decode()


async def test_earlier_turns_go_to_the_model(written: Library, writer: Space) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    await ask(written, messages=turns)
    assert [turn["content"] for turn in writer.requests[-1].body["messages"][1:3]] == ["Hello", "Good day"]


async def test_a_wrong_key_is_401(shelf: Library) -> None:
    answer = await ask(shelf, headers={"Authorization": "Bearer nothing"})
    assert (answer.status, answer.end["error_code"]) == (401, "unauthorized")


async def test_a_model_that_fails_is_an_error_in_the_stream(written: Library, writer: Space) -> None:
    writer.fails("writer", Failure.STATUS_500)
    try:
        answer = await ask(written, "What about digital products?", language="es", threshold=0)
    finally:
        writer.model("writer", reply=SAID)
    assert answer.status == 200
    assert answer.types[-1] == "error"
    assert answer.end["error_code"] == "generation_failed"
    assert answer.end["message"].startswith("El modelo")
    assert not (await ask(written, "What about digital products?", language="es", threshold=0)).end["cached"]


async def test_who_asks_too_often_is_told_when_to_come_back(shelf: Library, models_dir: Path) -> None:
    async with library(shelf.folder, models_dir, rate_limit=3) as strict:
        good = [await ask(strict, who="alice") for _ in range(3)]
        assert [answer.headers["RateLimit-Remaining"] for answer in good] == ["2", "1", "0"]
        assert {answer.headers["RateLimit-Limit"] for answer in good} == {"3"}
        bad = await ask(strict, who="alice", headers={"Accept-Language": "fr"})
        assert (bad.status, bad.end["error_code"]) == (429, "rate_limited")
        assert 0 < int(bad.headers["Retry-After"]) <= 300
        assert bad.headers["RateLimit-Remaining"] == "0"
        assert bad.headers["Retry-After"] in bad.end["message"]
        assert (await ask(strict, who="bob")).status == 200
        assert [(await ask(strict, "", who="bob")).status for _ in range(5)] == [400] * 5  # not asked, not counted
        assert [(await ask(strict, who="bob")).status for _ in range(3)] == [200, 200, 429]
        assert [(await ask(strict)).status for _ in range(5)] == [200] * 5  # the operator on this machine
        assert [(await ask(strict, who="root")).status for _ in range(4)] == [200, 200, 200, 429]  # an operator's key
    async with library(shelf.folder, models_dir, rate_limit=3, auth="none") as strict:
        proxied = {"Via": "1.1 proxy"}  # nobody's name, but an address
        assert [(await ask(strict, headers=proxied)).status for _ in range(4)] == [200, 200, 200, 429]


async def test_a_client_that_leaves_closes_the_model_and_nothing_is_kept(written: Library, writer: Space) -> None:
    question = "What is in the handbook about parcels?"
    writer.model("writer", reply="one two three four five six seven eight nine ten [1]", chunk_delay_s=0.2)
    try:
        url = f"{written.server.url}/rag/stream"
        body = {"query": question, "threshold": 0}
        async with written.server.session.post(url, json=body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        asked = writer.requests[-1]
        async with asyncio.timeout(1):
            while not asked.disconnected:  # noqa: ASYNC110  the other side tells nobody
                await asyncio.sleep(0.01)
    finally:
        writer.model("writer", reply=SAID)
    assert not (await ask(written, question, threshold=0)).end["cached"]


async def test_a_page_of_another_site_gets_nothing(shelf: Library) -> None:
    answer = await ask(shelf, headers={"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"})
    assert answer.status == 401
    assert "access-control-allow-origin" not in answer.headers
