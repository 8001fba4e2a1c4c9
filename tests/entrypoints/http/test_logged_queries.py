"""Reading the query log and the feedback over HTTP."""

import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.domain.model import Message
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import NAME
from anabranch.testing import Space
from support.collection_server import Issuer, Library, library, text
from support.knowledge_fixtures import records_in
from support.metrics_scrape import scrape
from support.shared_log import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-2")]

FERRY = "The ferry to Texel leaves from Den Helder every 30 minutes."
BRIDGE = "The bridge to Marken is closed on the first Sunday of May."
RESTRICTED = {"visibility": "restricted", "allowed_users": ["bob"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    """Nobody but the test itself asks as the user that it makes a key for."""
    async with (
        Issuer() as hub,
        library(tmp_path_factory.mktemp("data"), models_dir, syfthub_url=hub.url, jwt_audience="library") as opened,
    ):
        opened.secrets["guest"] = hub.token(sub="guest", role="guest")
        await opened.collection("travel", who="alice")
        await opened.ingest("travel", text(FERRY, title="Ferries"), text(BRIDGE, title="Bridges"), who="alice")
        await opened.collection("empty", who="alice")
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with Space(everything=True) as opened:
        yield opened


def person(shelf: Library, name: str, **more: Any) -> str:
    """A user whose log is empty."""
    with closing(records_in(shelf.folder)) as database:
        shelf.secrets[name] = database.writing(lambda db: keys.create(db, user=name, **more))[1]
    return name


async def is_recorded(shelf: Library, query: str) -> bool:
    return (await shelf.call("GET", f"/v1/queries/{query}")).status == 200


async def rate(shelf: Library, answer: Any, rating: str, who: str, **more: Any) -> None:
    await shelf.good("POST", "/v1/feedback", {"query_id": answer["query_id"], "rating": rating, **more}, who=who)


async def listed(shelf: Library, who: str | None, parameters: str = "") -> list[Any]:
    return list((await shelf.good("GET", f"/v1/queries{parameters}", who=who))["queries"])


# --- who reads what


async def test_callers_list_their_own_questions_and_operators_all(shelf: Library) -> None:
    dan, eve = person(shelf, "dan"), person(shelf, "eve")
    questions = ("When does the ferry leave?", "When is the bridge closed?", "Why?", "Who is on this machine?")
    for who, question in zip((dan, eve, dan, None), questions, strict=True):
        asked = await shelf.ask(question, who=who)
        await eventually(partial(is_recorded, shelf, asked["query_id"]))
    own = await listed(shelf, dan)
    assert [one["query"] for one in own] == ["Why?", "When does the ferry leave?"]
    assert all("user" not in one for one in own)
    for operator in ("root", None):
        newest = [(one["user"], one["query"]) for one in (await listed(shelf, operator))[:4]]
        assert newest == [
            (None, "Who is on this machine?"),
            ("dan", "Why?"),
            ("eve", "When is the bridge closed?"),
            ("dan", "When does the ferry leave?"),
        ]


async def test_the_entry_of_another_user_does_not_exist(shelf: Library) -> None:
    answer = await shelf.ask("When does the ferry leave?", who=person(shelf, "fay"))
    path = f"/v1/queries/{answer['query_id']}"
    for who in ("fay", "root", None):
        assert (await shelf.good("GET", path, who=who))["query"] == "When does the ferry leave?"
    for who, asked in (("bob", path), ("guest", path), ("fay", "/v1/queries/unknown")):
        reply = await shelf.call("GET", asked, who=who)
        assert (reply.status, reply.code) == (404, "NOT_FOUND")
        assert "ferry" not in json.dumps(reply.body)


async def test_guests_read_nothing_not_even_their_own_question(shelf: Library) -> None:
    answer = await shelf.ask("When does the ferry leave?", who="guest")
    await rate(shelf, answer, "thumbs_up", "guest")
    for path, name in (("/v1/queries", "queries"), ("/v1/feedback", "feedback")):
        page = await shelf.good("GET", path, who="guest")
        assert (page[name], page["has_more"], page["next"]) == ([], False, None)
        assert "send an API key" in page["note"]
    # The log has one name for all guests; a user of that name is none of them.
    impostor = person(shelf, "(guest)")
    assert await listed(shelf, impostor) == []
    assert (await shelf.good("GET", "/v1/feedback", who=impostor))["feedback"] == []
    assert (await shelf.call("GET", f"/v1/queries/{answer['query_id']}", who=impostor)).status == 404


# --- an entry


async def test_an_entry_has_the_question_its_settings_and_its_outcome(shelf: Library) -> None:
    gus = person(shelf, "gus")
    answer = await shelf.ask(
        "When does the ferry leave?", who=gus, conversation_id="c1", filters={"tags": []}, settings={"rerank": False}
    )
    await rate(shelf, answer, "thumbs_down", gus, comment="Too short.")
    (entry,) = await listed(shelf, gus)
    assert (entry["id"], entry["surface"], entry["conversation_id"]) == (answer["query_id"], "query", "c1")
    assert (entry["outcome"], entry["refused"], entry["model"]) == ("answered", False, "extractive")
    assert (entry["rating"], entry["comment"]) == ("thumbs_down", "Too short.")
    assert (entry["rewritten_query"], entry["variants"]) == (None, [])
    assert (entry["input_tokens"], entry["output_tokens"]) == (0, 0)
    assert entry["created_at"].endswith("Z")
    used = entry["settings"]
    assert (used["top_k"], used["rerank"], used["profile"]) == (10, False, "query")


async def test_the_log_has_the_times_of_the_answer(shelf: Library) -> None:
    hal = person(shelf, "hal")
    answer = await shelf.ask("When does the ferry leave?", who=hal)
    (entry,) = await listed(shelf, hal)
    assert entry["latency_ms"] == answer["latency_ms"]
    assert 0 <= entry["retrieval_ms"] <= entry["latency_ms"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_whether_an_answer_was_streamed_is_recorded(shelf: Library, streaming: bool) -> None:
    ida = person(shelf, f"ida {streaming}")
    ask = shelf.stream if streaming else shelf.ask
    await ask("When does the ferry leave?", who=ida)
    (entry,) = await listed(shelf, ida)
    assert (entry["settings"]["streaming"], entry["settings"]["rerank"]) == (streaming, True)


async def test_streams_of_rag_and_chat_are_recorded_as_streamed(shelf: Library, space: Space) -> None:
    jim = person(shelf, "jim")
    chat = {"prompt": "Why?", "model": {"url": space.url, "slug": "scribe"}, "data_sources": []}
    await shelf.call("POST", "/rag/stream", {"query": "When does the ferry leave?"}, who=jim)
    await shelf.call("POST", "/api/v1/chat/stream", chat, who=jim)
    await shelf.call("POST", "/api/v1/chat", chat, who=jim)
    streamed = [(one["surface"], one["settings"]["streaming"]) for one in await listed(shelf, jim)]
    assert sorted(streamed) == [("chat", False), ("chat", True), ("rag_stream", True)]


async def test_one_entry_has_the_answer_its_citations_and_passages_with_four_scores(shelf: Library) -> None:
    kim = person(shelf, "kim")
    answer = await shelf.ask("When does the ferry to Texel leave?", who=kim)
    found = await shelf.good("GET", f"/v1/queries/{answer['query_id']}", who=kim)
    assert (found["answer"], found["answer_withheld"]) == (answer["answer"], False)
    shared = ("citation_index", "chunk_id", "document_id", "quoted_text", "start_char", "end_char")
    assert found["citations"] == [{name: one[name] for name in shared} for one in answer["citations"]]
    same = ("chunk_id", "document_id", "title", "content_snippet", "scores")
    assert [{name: one[name] for name in same} for one in found["passages"]] == [
        {name: one[name] for name in same} for one in answer["sources"]
    ]
    assert [one["rank"] for one in found["passages"]] == [1, 2]
    assert all(isinstance(score, float) for score in found["passages"][0]["scores"].values())
    assert (found["faithfulness"], 0 < found["relevance"] <= 1) == (1.0, True)


def writes(messages: Sequence[Message]) -> str:
    """A model that rephrases questions, and cites the first passage."""
    system = messages[0].content
    if system.startswith("Below is a conversation"):
        return "How often does the ferry to Texel leave?"
    if system.startswith("Write one short paragraph"):
        return "The ferry leaves every hour."
    if system.startswith("Put the question"):
        return "1. When does the ferry go?\n2. Ferry times?\n3. How often does the boat sail?"
    return "It leaves every 30 minutes [1]."


async def test_what_a_model_rewrote_and_the_tokens_it_used_are_recorded(
    tmp_path: Path, models_dir: Path, space: Space
) -> None:
    space.model("writer", reply=writes)
    given = {"model_url": space.url, "model_name": "writer", "query_rewriting": True}
    async with library(tmp_path, models_dir, **given) as there:
        await there.collection("travel")
        await there.ingest("travel", text(FERRY, title="Ferries"))
        first = await there.ask("Where does the ferry leave from?", who="alice")
        then = await there.ask("How often?", who="alice", conversation_id=first["conversation_id"])
        entry, before = await listed(there, "alice")
    assert (entry["query"], entry["rewritten_query"]) == ("How often?", "How often does the ferry to Texel leave?")
    assert entry["variants"] == ["When does the ferry go?", "Ferry times?", "How often does the boat sail?"]
    assert before["rewritten_query"] is None
    usage = then["usage"]
    assert (entry["input_tokens"], entry["output_tokens"]) == (usage["input_tokens"], usage["output_tokens"])
    assert entry["input_tokens"] > 0
    assert entry["model"] == usage["model"] == "writer"


# --- pages and filters


async def test_pages_of_questions_follow_each_other_with_a_cursor_that_hides_counts(shelf: Library) -> None:
    lea = person(shelf, "lea")
    ids = [(await shelf.ask(f"When does ferry {number} leave?", who=lea))["query_id"] for number in range(5)]
    found: list[str] = []
    after, cursors = "", set()
    while True:
        page = await shelf.good("GET", f"/v1/queries?limit=2{after}", who=lea)
        found += [one["id"] for one in page["queries"]]
        if not page["has_more"]:
            break
        assert len(page["next"]) == 32  # of one length, whatever is in it
        cursors.add(page["next"])
        after = f"&after={page['next']}"
    assert found == ids[::-1]
    assert page["next"] is None
    again = (await shelf.good("GET", "/v1/queries?limit=2", who=lea))["next"]
    assert again not in cursors, "a cursor is encrypted with a new nonce"


@pytest.mark.sqlite
async def test_lists_have_the_beginning_of_long_questions_and_pages_are_limited_in_bytes(shelf: Library) -> None:
    zoe = person(shelf, "zoe")
    question = "🚢" * 50_000 + " leaves?"
    asked = await shelf.good("POST", "/api/v1/chat", {"prompt": question, "retrieval_only": True}, who=zoe)
    assert asked
    (entry,) = await listed(shelf, zoe)
    assert entry["query"] == "🚢" * 10_000 + " …"
    assert (await shelf.good("GET", f"/v1/queries/{entry['id']}", who=zoe))["query"] == question
    with closing(sqlite3.connect(shelf.folder / NAME)) as db, db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(queries)") if row[1] != "id"]
        copied = f"SELECT ? || number, {', '.join(columns)} FROM queries, numbers WHERE id = ?"
        numbers = (
            "WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 120)"
        )
        db.execute(f"INSERT INTO queries {numbers} {copied}", ("copy", entry["id"]))
    sizes, after = [], ""
    while True:
        page = await shelf.call("GET", f"/v1/queries?limit=200{after}", who=zoe)
        assert len(json.dumps(page.body, ensure_ascii=False).encode()) < 4_100_000
        sizes.append(len(page.body["queries"]))
        if not page.body["has_more"]:
            break
        after = f"&after={page.body['next']}"
    assert len(sizes) == 2
    assert sum(sizes) == 121


async def test_collections_are_searched_for_the_beginning_of_a_long_question(shelf: Library) -> None:
    """The time of a search must not grow with documents that a client puts into its question."""
    uma = person(shelf, "uma")
    source = [{"slug": "collection:alice/travel", "url": ""}]
    beginning = "Which bridge is closed? " + "word " * 5_000
    for end in ("", "When does the ferry to Texel leave?" * 100):
        asked = {"prompt": beginning + end, "data_sources": source, "retrieval_only": True, "similarity_threshold": 0}
        await shelf.good("POST", "/api/v1/chat", asked, who=uma)
    with_end, without = [
        await shelf.good("GET", f"/v1/queries/{one['id']}", who=uma) for one in await listed(shelf, uma)
    ]
    assert len(without["passages"]) == 2
    assert with_end["passages"] == without["passages"]


async def test_questions_are_filtered(shelf: Library) -> None:
    mia = person(shelf, "mia")
    ferry = await shelf.ask("When does the ferry leave?", who=mia, conversation_id="sea", collections=["travel"])
    nothing = await shelf.ask("What do zebras eat for breakfast?", who=mia, collections=["empty"])
    await shelf.stream("When is the bridge closed?", who=mia, collections=["travel"])
    await shelf.call("POST", "/rag/stream", {"query": "Is it raining?"}, who=mia)
    await rate(shelf, ferry, "thumbs_up", mia)
    assert nothing["refused"]
    for filters, count in {
        "": 4,
        "collection=travel": 3,
        "collection=empty": 2,
        "conversation_id=sea": 1,
        "conversation_id=land": 0,
        "surface=rag_stream": 1,
        "surface=query&outcome=refused": 1,
        "outcome=generation_failed": 0,
        "rating=thumbs_up": 1,
        "rating=thumbs_down": 0,
        "since=2000-01-01&until=9998-12-31": 4,
        "until=2000-01-01T00:00:00Z": 0,
        "since=9000-01-01": 0,
    }.items():
        assert len(await listed(shelf, mia, f"?{filters}")) == count, filters


@pytest.mark.parametrize(
    ("parameters", "status", "says"),
    [
        ("limit=0", 400, "limit"),
        ("limit=201", 400, "limit"),
        ("limit=many", 400, "limit"),
        ("rating=meh", 400, "rating"),
        ("since=yesterday", 400, "since is 'yesterday'; it takes a day such as 2024-12-31"),
        ("until=2024-13-01", 400, "until"),
        ("until=9999-12-31", 400, "until"),
        ("after=AAAA", 400, "send `next` of the previous page"),
        ("after=" + "A" * 32, 400, "send `next` of the previous page"),
        ("collection=nowhere", 404, "There is no collection 'nowhere'."),
    ],
)
async def test_a_wrong_filter_is_refused_with_what_is_allowed(
    shelf: Library, parameters: str, status: int, says: str
) -> None:
    reply = await shelf.call("GET", f"/v1/queries?{parameters}", who="alice")
    assert reply.status == status
    assert says in reply.body["message"]


async def test_a_day_as_the_end_of_a_range_is_included(shelf: Library) -> None:
    nat = person(shelf, "nat")
    await shelf.ask("When does the ferry leave?", who=nat)
    day = (await listed(shelf, nat))[0]["created_at"][:10]
    assert len(await listed(shelf, nat, f"?since={day}&until={day}")) == 1
    for start_of_day in ("T00:00:00Z", "T00:00:00", "T02:00:00+02:00", "T02:00:00%2B02:00"):
        assert await listed(shelf, nat, f"?until={day}{start_of_day}") == []
        assert len(await listed(shelf, nat, f"?since={day}{start_of_day}")) == 1


async def test_a_failed_question_is_listed_with_its_error_code(shelf: Library, space: Space) -> None:
    oli = person(shelf, "oli")
    chat = {"prompt": "Why?", "model": {"url": space.url, "slug": "html"}, "data_sources": []}
    assert (await shelf.call("POST", "/api/v1/chat", chat, who=oli)).status >= 500
    (entry,) = await listed(shelf, oli, "?outcome=generation_failed")
    assert (entry["query"], entry["model"], entry["rating"]) == ("Why?", None, None)
    found = await shelf.good("GET", f"/v1/queries/{entry['id']}", who=oli)
    assert (found["answer"], found["answer_withheld"], found["passages"]) == (None, False, [])


async def test_a_chat_question_of_a_guest_is_listed_without_its_text(shelf: Library, space: Space) -> None:
    chat = {"prompt": "Do not keep this.", "model": {"url": space.url, "slug": "scribe"}, "data_sources": []}
    await shelf.good("POST", "/api/v1/chat", chat)
    entry = (await listed(shelf, "root"))[0]
    assert (entry["surface"], entry["user"], entry["query"]) == ("chat", "(guest)", None)


# --- documents that can no longer be seen


async def test_a_deleted_document_is_no_longer_quoted(shelf: Library) -> None:
    pat = person(shelf, "pat")
    await shelf.collection("short", who=pat)
    (kept,) = await shelf.ingest("short", text("Swans nest by the lock in April.", title="Swans"), who=pat)
    (gone,) = await shelf.ingest("short", text("Herons nest on the old mill in March.", title="Herons"), who=pat)
    answer = await shelf.ask("When do herons nest on the mill?", who=pat, collections=["short"])
    assert "March" in answer["answer"]
    await shelf.good("DELETE", f"/v1/documents/{gone['id']}", who=pat)
    for who in (pat, "root"):
        found = await shelf.good("GET", f"/v1/queries/{answer['query_id']}", who=who)
        assert (found["answer"], found["answer_withheld"], found["citations"]) == (None, True, [])
        assert [one["document_id"] for one in found["passages"]] == [kept["id"]]
        assert "March" not in json.dumps(found)


async def test_a_document_that_was_made_private_is_no_longer_quoted_to_others(shelf: Library) -> None:
    await shelf.collection("secrets", who="alice", default_permissions=RESTRICTED)
    (one,) = await shelf.ingest("secrets", text("The vault opens with 4711.", title="Vault"), who="alice")
    answer = await shelf.ask("What opens the vault?", who="bob", collections=["secrets"])
    path = f"/v1/queries/{answer['query_id']}"
    assert "4711" in (await shelf.good("GET", path, who="bob"))["answer"]
    private = {"permissions": {"visibility": "private"}}
    await shelf.good("PATCH", f"/v1/documents/{one['id']}", private, who="alice")
    found = await shelf.good("GET", path, who="bob")
    assert (found["answer_withheld"], found["passages"], found["citations"]) == (True, [], [])
    for hidden in ("4711", "Vault", one["id"]):
        assert hidden not in json.dumps(found)
    assert "4711" in (await shelf.good("GET", path, who="root"))["answer"]


@pytest.mark.parametrize("hidden", ["private", "deleted"])
async def test_a_conversation_does_not_bring_back_what_a_hidden_document_says(
    tmp_path: Path, models_dir: Path, space: Space, hidden: str
) -> None:
    space.model("writer", reply=writes)
    given = {"model_url": space.url, "model_name": "writer", "query_rewriting": True}
    async with library(tmp_path, models_dir, **given) as there:
        await there.collection("travel", who="alice")
        await there.ingest("travel", text(BRIDGE, title="Bridges"), who="alice")
        (ferry,) = await there.ingest("travel", text(FERRY, title="Ferries", permissions=RESTRICTED), who="alice")
        talk = {"who": "bob", "conversation_id": "talk"}
        first = await there.ask("Where does the ferry leave from?", **talk)
        # It finds no document itself, but is rewritten with the turn before it.
        second = await there.ask("When is the bridge to Marken closed?", filters={"tags": ["none"]}, **talk)
        if hidden == "private":
            private = {"permissions": {"visibility": "private"}}
            await there.good("PATCH", f"/v1/documents/{ferry['id']}", private, who="alice")
        else:
            await there.good("DELETE", f"/v1/documents/{ferry['id']}", who="alice")
        asked_before = len(space.requests)
        await there.ask("When is the bridge to Marken closed?", **talk)
        asked = "".join(request.raw.decode() for request in space.requests[asked_before:])
        entries = {one["id"]: one for one in await listed(there, "bob")}
        details = [await there.good("GET", f"/v1/queries/{one}", who="bob") for one in entries]
        operators = await listed(there, "root")
    assert "bridge" in asked
    assert "Where does the ferry" not in asked
    assert "every 30 minutes" not in asked
    # The last one was rewritten without the turns before it.
    for newest, *before in (list(entries.values()), details):
        assert newest["variants"]
        assert [(entry["rewritten_query"], entry["variants"]) for entry in before] == [(None, [])] * 2
    assert entries[first["query_id"]]["query"] == "Where does the ferry leave from?"
    read_by_operators = {one["id"]: bool(one["variants"]) for one in operators}
    assert read_by_operators[second["query_id"]] == (hidden == "private")


async def test_a_new_version_of_a_document_leaves_its_old_passages_without_text(shelf: Library) -> None:
    ray = person(shelf, "ray")
    await shelf.collection("versions", who=ray)
    await shelf.ingest("versions", text("Cranes rest in October.", id="cranes", title="Cranes"), who=ray)
    answer = await shelf.ask("When do cranes rest?", who=ray, collections=["versions"])
    await shelf.ingest("versions", text("Cranes rest in November.", id="cranes", title="Cranes"), who=ray)
    found = await shelf.good("GET", f"/v1/queries/{answer['query_id']}", who=ray)
    assert (found["answer"], found["answer_withheld"]) == (answer["answer"], False)
    assert [(one["title"], one["content_snippet"]) for one in found["passages"]] == [("Cranes", None)]


# --- feedback


async def test_feedback_is_listed_latest_rating_first(shelf: Library) -> None:
    sam, tom = person(shelf, "sam"), person(shelf, "tom")
    first, second = [await shelf.ask(f"When does ferry {n} leave?", who=sam) for n in "ab"]
    await rate(shelf, second, "thumbs_up", sam)
    await rate(shelf, first, "thumbs_down", sam, comment="Late.")
    await rate(shelf, await shelf.ask("When?", who=tom), "thumbs_up", tom)
    page = await shelf.good("GET", "/v1/feedback", who=sam)
    assert [(one["query_id"], one["rating"]) for one in page["feedback"]] == [
        (first["query_id"], "thumbs_down"),
        (second["query_id"], "thumbs_up"),
    ]
    assert {name: page["feedback"][0][name] for name in ("comment", "query", "surface")} == {
        "comment": "Late.",
        "query": "When does ferry a leave?",
        "surface": "query",
    }
    assert "user" not in page["feedback"][0]
    everyone = (await shelf.good("GET", "/v1/feedback?limit=3", who="root"))["feedback"]
    assert [one["user"] for one in everyone] == ["tom", "sam", "sam"]
    for filters, count in {
        "rating=thumbs_up": 1,
        "since=2000-01-01&until=9998-12-31": 2,
        "since=9000-01-01": 0,
        "until=2000-01-01": 0,
    }.items():
        assert len((await shelf.good("GET", f"/v1/feedback?{filters}", who=sam))["feedback"]) == count, filters
    one = await shelf.good("GET", "/v1/feedback?limit=1", who=sam)
    rest = await shelf.good("GET", f"/v1/feedback?limit=1&after={one['next']}", who=sam)
    assert [one["feedback"][0]["query_id"], rest["feedback"][0]["query_id"]] == [first["query_id"], second["query_id"]]
    assert (rest["has_more"], rest["next"]) == (False, None)
    await rate(shelf, second, "thumbs_down", sam)
    again = (await shelf.good("GET", "/v1/feedback", who=sam))["feedback"]
    assert [(one["query_id"], one["rating"]) for one in again] == [
        (second["query_id"], "thumbs_down"),
        (first["query_id"], "thumbs_down"),
    ]


async def test_the_first_rating_of_an_answer_is_counted_once(shelf: Library) -> None:
    uma = person(shelf, "uma")
    answer = await shelf.ask("When does the ferry leave?", who=uma)

    async def counted() -> dict[str, float]:
        scraped = await scrape(shelf.server.session, shelf.server.url)
        return {
            rating: scraped.value("anabranch_feedback_total", rating=rating, surface="query")
            for rating in ("thumbs_up", "thumbs_down")
        }

    before = await counted()
    for rating in ("thumbs_down", "thumbs_down", "thumbs_up"):
        await rate(shelf, answer, rating, uma)
    assert await counted() == {**before, "thumbs_down": before["thumbs_down"] + 1}


# --- retention


async def test_with_zero_days_the_lists_are_empty_and_say_why(tmp_path: Path, models_dir: Path) -> None:
    async with library(tmp_path, models_dir) as there:
        await there.collection("travel")
        await there.ingest("travel", text(FERRY))
        kept = (await there.ask("When does the ferry leave?", who="alice"))["query_id"]
    async with library(tmp_path, models_dir, query_log_days=0) as there:
        for path, name in (("/v1/queries", "queries"), ("/v1/feedback", "feedback")):
            for who in ("alice", "root"):
                page = await there.good("GET", path, who=who)
                assert page[name] == []
                assert "AGGREGATOR_QUERY_LOG_DAYS is 0" in page["note"]
        reply = await there.call("GET", f"/v1/queries/{kept}", who="alice")
        assert (reply.status, "AGGREGATOR_QUERY_LOG_DAYS" in reply.body["message"]) == (404, True)


@pytest.mark.sqlite
async def test_questions_are_counted_for_30_days_even_if_none_is_kept(tmp_path: Path, models_dir: Path) -> None:
    async def counted(there: Library, who: str) -> int:
        return int((await there.good("GET", "/v1/collections/travel/stats", who=who))["query_count_30d"])

    async with library(tmp_path, models_dir, query_log_days=0) as there:
        await there.collection("travel", who="alice")
        await there.ingest("travel", text(FERRY), who="alice")
        await there.ask("When does the ferry leave?", who="bob")
        await there.stream("When does the ferry leave?", who="bob", collections=["travel"])
        await there.ask("When does the ferry leave?", who="carol")
        assert [await counted(there, who) for who in ("alice", "root", "bob", "carol")] == [3, 3, 2, 1]
    with closing(sqlite3.connect(tmp_path / NAME)) as db:
        assert db.execute("SELECT count(*) FROM queries").fetchone() == (0,)
        assert {row[2:] for row in db.execute("SELECT * FROM query_counts")} == {("bob", 2), ("carol", 1)}
        for age, user in ((29, "bob"), (30, "bob"), (31, "carol")):
            db.execute(
                "INSERT INTO query_counts SELECT collection, day - ?, ?, 10 FROM query_counts LIMIT 1", (age, user)
            )
        db.commit()
    async with library(tmp_path, models_dir, query_log_days=7) as there:
        assert [await counted(there, who) for who in ("alice", "root", "bob", "carol")] == [13, 13, 12, 1]


async def test_without_a_data_folder_the_list_is_empty_and_none_is_made(tmp_path: Path, serve: Any) -> None:
    async with (
        serve(data_dir=str(tmp_path / "none")) as server,
        server.session.get(f"{server.url}/v1/queries") as response,
    ):
        page = await response.json()
    assert (page["queries"], page["note"]) == ([], "There is no data folder yet, and questions are kept in it.")
    assert not (tmp_path / "none").exists()


@pytest.mark.sqlite
async def test_slow_and_failed_questions_are_listed_page_by_page(shelf: Library) -> None:
    sam = person(shelf, "sam")
    ids = [(await shelf.ask(f"When does the ferry leave, {number}?", who=sam))["query_id"] for number in range(5)]
    await listed(shelf, sam)  # all are recorded
    changes = {ids[1]: ("timeout", 7_000), ids[3]: ("generation_failed", 9_000), ids[4]: ("answered", 8_000)}
    with closing(sqlite3.connect(shelf.folder / NAME)) as db, db:
        for query, (outcome, latency_ms) in changes.items():
            db.execute("UPDATE queries SET outcome = ?, latency_ms = ? WHERE id = ?", (outcome, latency_ms, query))
    assert [one["id"] for one in await listed(shelf, sam, "?outcome=failed")] == [ids[3], ids[1]]
    assert [one["id"] for one in await listed(shelf, sam, "?slower_than_ms=7000")] == [ids[4], ids[3]]
    assert [one["id"] for one in await listed(shelf, sam, "?outcome=failed&slower_than_ms=8000")] == [ids[3]]
    page = await shelf.good("GET", "/v1/queries?outcome=failed&limit=1", who=sam)
    assert ([one["id"] for one in page["queries"]], page["has_more"]) == ([ids[3]], True)
    rest = await shelf.good("GET", f"/v1/queries?outcome=failed&limit=1&after={page['next']}", who=sam)
    assert ([one["id"] for one in rest["queries"]], rest["has_more"]) == ([ids[1]], False)
    assert (await shelf.call("GET", "/v1/queries?slower_than_ms=soon", who=sam)).status == 400
