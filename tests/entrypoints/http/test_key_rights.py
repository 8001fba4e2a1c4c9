"""Keys that may do only what they must: scopes, restrictions to collections and grants, limits."""

import json
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.configuration.settings import Settings
from anabranch.domain.model import Endpoint
from anabranch.domain.rights import Grants, Rights
from anabranch.entrypoints.http.access import Access
from anabranch.knowledge.model import Identified
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.database import new_id
from anabranch.testing import Space
from conftest import running
from support.collection_server import Library, library, text
from support.knowledge_fixtures import records_in
from support.planner_fixtures import envelope

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("key-rights")]

SECRET = "Nightingale"
QUESTION = "When will Project Nightingale be announced?"
OPEN, CLOSED = "handbook", "nightingale plans"
# What needs no key at all: it holds no data of a caller.
WITHOUT_SCOPE = {"page", "page_file", "list_limits", "session", "sign_in", "sign_out", "health", "ready", "openapi"}
ACCEPT = {"Accept": "application/json, text/event-stream"}


async def make(shelf: Library, name: str, user: str = "alice", **given: Any) -> dict[str, Any]:
    """A key under a name of this test's."""
    made = await shelf.good("POST", "/v1/keys", {"user": user, **given}, who="root")
    shelf.secrets[name] = made["key"]
    return dict(made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with Space(everything=True) as space:
        published = {"alice/writer": "writer"}
        sources = {name: Endpoint(slug=name, name=name, url=space.url, operator=True) for name in ("notes", "wiki")}
        models = {"writer": Endpoint(slug="gpt", url=space.url, operator=True)}
        folder = tmp_path_factory.mktemp("data")
        given = {"auth": "api_key", "sources": sources, "models": models, "published_models": published}
        async with library(folder, models_dir, **given) as opened:
            await opened.collection(OPEN, who="alice")
            await opened.collection(CLOSED, who="alice")
            await opened.ingest(OPEN, text("The canteen opens at noon.", title="hours"), who="alice")
            secret = text(f"Project {SECRET} will be announced in Lisbon.", title="announcement")
            await opened.ingest(CLOSED, secret, who="alice")
            await make(opened, "narrow", collections=[OPEN])
            yield opened


async def mcp(shelf: Library, who: str, tool: str, **arguments: Any) -> Any:
    params = {"name": tool, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    sent = str(await shelf.good("POST", "/mcp", body, who=who, headers=ACCEPT))
    return json.loads(sent.partition("data: ")[2])["result"]


# --- scopes


async def test_every_operation_names_the_scope_that_it_needs(shelf: Library) -> None:
    table = shelf.server.service.operations
    without = {one.name for one in table if one.scope is None}
    assert {name for name in without if not name.endswith("_js")} == WITHOUT_SCOPE
    # Every key may see its own limits.
    assert [one.name for one in table if (one.scope is None) != (one.identify is None)] == ["list_limits"]
    described = (await shelf.good("GET", "/openapi.json"))["paths"]
    assert described["/v1/ingest"]["post"]["security"] == [{}, {"bearer": ["ingest"]}]


@pytest.mark.parametrize(
    ("scope", "method", "path", "body"),
    [
        ("ask", "POST", "/v1/query", {"query": QUESTION}),
        ("ask", "POST", "/api/v1/chat", {"prompt": QUESTION}),
        ("ask", "POST", "/rag/stream", {"query": QUESTION}),
        ("ask", "POST", "/v1/chat/completions", {"model": "all", "messages": []}),
        ("ask", "POST", "/api/v1/endpoints/alice/writer/query", {"messages": "Why?"}),
        ("ask", "POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
        ("ask", "POST", "/planner/sessions/s/steps", {}),
        ("ask", "GET", "/v1/streams/0123456789abcdef", None),
        ("read", "GET", "/v1/collections", None),
        ("read", "GET", "/v1/documents", None),
        ("read", "GET", "/v1/queries", None),
        ("read", "GET", "/metrics", None),
        ("ingest", "POST", "/v1/collections", {"name": "x"}),
        ("ingest", "DELETE", f"/v1/collections/{OPEN}", None),
        ("admin", "GET", "/v1/keys", None),
        ("admin", "POST", "/v1/sources", {}),
    ],
)
async def test_a_key_without_the_scope_is_told_which_it_lacks(
    shelf: Library, scope: str, method: str, path: str, body: Any
) -> None:
    others = [one for one in ("ask", "read", "ingest", "admin") if one != scope]
    key = await make(shelf, f"not {scope}", "root", operator=True, scopes=others)
    refused = await shelf.call(method, path, body, who=f"not {scope}", headers=ACCEPT)
    assert refused.status == 403, refused
    assert f"lacks the scope {scope}" in str(refused.body)
    assert key["scopes"] == others


async def test_a_web_socket_needs_the_scope_and_the_grant(shelf: Library) -> None:
    await make(shelf, "reader", scopes=["read"], grants=["planner"])
    await make(shelf, "asker", scopes=["ask"])
    path = "/planner/sessions/s/steps/p/ws"
    for who, lacks in (("reader", "the scope ask"), ("asker", "not granted the planner")):
        headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        headers["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
        refused = await shelf.call("GET", path, who=who, headers=headers)
        assert (refused.status, lacks in str(refused.body)) == (403, True)


async def test_a_new_key_asks_reads_and_ingests_and_uses_nothing_that_the_operator_configured(shelf: Library) -> None:
    made = await make(shelf, "plain")
    assert (made["scopes"], made["grants"], made["collections"]) == (["ask", "read", "ingest"], [], None)
    assert (await shelf.ask("When does the canteen open?", who="plain"))["citations"]
    chief = await make(shelf, "chief", "chief", operator=True)
    assert (chief["scopes"], chief["grants"]) == (["ask", "read", "ingest", "admin"], None)


@pytest.mark.parametrize(
    "refused",
    [
        {"scopes": ["admin"]},
        {"scopes": []},
        {"operator": True, "scopes": ["admin"], "collections": [OPEN]},
        {"operator": True, "scopes": ["admin"], "grants": ["planner"]},
        {"collections": ["nothing of that name"]},
        {"collections": []},
        {"grants": ["everything"]},
        {"grants": ["source:"]},
        {"grants": ["source:a\nb"]},
        {"limits": {"nothing": 1}},
        {"limits": {"requests": 0}},
        {"limits": {"questions": -1}},
        {"expires_at": "2020-01-01T00:00:00Z"},
        {"expires_at": "2999-01-01T00:00:00"},
        {"user": "a\u200bb"},
    ],
)
async def test_what_makes_no_sense_makes_no_key(shelf: Library, refused: dict[str, Any]) -> None:
    before = await shelf.good("GET", "/v1/keys", who="root")
    reply = await shelf.call("POST", "/v1/keys", {"user": "alice", **refused}, who="root")
    assert reply.status in (400, 404), reply
    assert len((await shelf.good("GET", "/v1/keys", who="root"))["keys"]) == len(before["keys"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"user": "\u0430lice"}, "mixes several scripts"),
        ({"user": "\u0430\u0441\u0435"}, "Cyrillic letters that all look like Latin ones"),
        ({"user": "alice\uff20example.com"}, "write '@'"),
        ({"user": "alice\ufe0f"}, "cannot be seen"),
        ({"user": "al  ice"}, "several spaces"),
        ({"groups": ["st\u0430ff"]}, "mixes several scripts"),
    ],
)
async def test_no_new_user_or_group_can_be_taken_for_another_one(
    shelf: Library, names: dict[str, Any], said: str
) -> None:
    reply = await shelf.call("POST", "/v1/keys", {"user": "alice", **names}, who="root")
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")
    assert "The name of a user or a group" in reply.body["message"]
    assert said in reply.body["message"]


async def test_names_of_users_and_groups_that_are_in_use_get_new_keys(shelf: Library) -> None:
    old: dict[str, Any] = {"user": "\u0430\u0441\u0435", "groups": ("st\u0430ff", "jose\u0301")}
    with closing(records_in(shelf.folder)) as database:
        shelf.secrets["ace"] = database.writing(lambda db: keys.create(db, **old))[1]
    assert (await make(shelf, "again", **old))["groups"] == list(old["groups"])
    made = await make(shelf, "jose", user="Jose\u0301")
    assert made["user"] == "Jos\u00e9"
    assert (await shelf.call("GET", "/v1/collections", who="ace")).status == 200


# --- restricted to some collections


async def test_a_restricted_key_finds_no_trace_of_other_collections(shelf: Library) -> None:
    closed = await shelf.good("GET", f"/v1/collections/{CLOSED}", who="alice")
    document = (await shelf.good("GET", f"/v1/documents?collection={CLOSED}", who="alice"))["documents"][0]
    accepted = await shelf.good(
        "POST", "/v1/ingest", {"collection_id": CLOSED, "documents": [text("More.", title="more")]}, who="alice"
    )
    await shelf.job(accepted["job_id"], who="alice")
    for path in (
        "/v1/collections",
        "/v1/documents",
        "/v1/documents?status=all",
        "/v1/models",
        "/v1/sources",
        "/v1/queries",
        "/v1/feedback",
    ):
        listed = str(await shelf.good("GET", path, who="narrow"))
        assert CLOSED not in listed
        assert closed["id"] not in listed
        assert "announcement" not in listed
    name, there = document["id"], "/v1/documents"
    for method, path, body in (
        ("GET", f"/v1/collections/{CLOSED}", None),
        ("GET", f"/v1/collections/{closed['id']}", None),
        ("GET", f"/v1/collections/{CLOSED}/stats", None),
        ("DELETE", f"/v1/collections/{CLOSED}", None),
        ("GET", f"{there}?collection={CLOSED}", None),
        ("GET", f"{there}/{name}", None),
        ("GET", f"{there}/announcement", None),
        ("GET", f"{there}/{name}/chunks", None),
        ("PATCH", f"{there}/{name}", {"title": "mine"}),
        ("DELETE", f"{there}/{name}", None),
        ("POST", f"{there}/{name}/retry", None),
        ("POST", "/v1/ingest", {"collection_id": CLOSED, "documents": [text("x")]}),
        ("GET", f"/v1/ingest/{accepted['job_id']}", None),
        ("DELETE", f"/v1/ingest/{accepted['job_id']}", None),
        ("GET", f"/v1/models/collection:{CLOSED}", None),
        ("POST", "/v1/query", {"query": QUESTION, "collections": [CLOSED]}),
        ("GET", f"/v1/queries?collection={CLOSED}", None),
    ):
        missing = await shelf.call(method, path, body, who="narrow")
        assert missing.status == 404, (method, path, missing)
        assert SECRET not in missing.body
    hint = await shelf.call("GET", f"{there}/announcemen", who="narrow")
    assert "Did you mean" not in str(hint.body)
    limits = {one["name"] for one in (await shelf.good("GET", "/v1/limits", who="narrow"))["limits"]}
    assert "questions" in limits
    assert not limits & {"collections", "documents", "stored_bytes", "pending_documents"}


async def test_a_restricted_key_gets_no_answer_from_other_collections(shelf: Library) -> None:
    assert SECRET in str((await shelf.ask(QUESTION, who="alice"))["citations"])
    for asked in ({}, {"sources": "all"}, {"sources": ["collections"]}):
        answer = await shelf.ask(QUESTION, who="narrow", **asked)
        assert "Lisbon" not in str(answer)
    found = await mcp(shelf, "narrow", "search", query=QUESTION)
    assert "Lisbon" not in str(found)
    assert "hours" in str(await mcp(shelf, "narrow", "search", query="canteen"))
    named = await mcp(shelf, "narrow", "search", query=QUESTION, collections=[CLOSED])
    assert named["isError"]
    assert CLOSED not in str(named["structuredContent"]["message"]).partition("; there are: ")[2]


async def test_a_restricted_key_makes_no_collection(shelf: Library) -> None:
    for name in ("another", CLOSED):
        refused = await shelf.call("POST", "/v1/collections", {"name": name}, who="narrow")
        assert (refused.status, "for some collections only" in refused.body["message"]) == (403, True)


async def test_what_another_key_of_the_user_has_asked_does_not_exist_for_a_restricted_one(shelf: Library) -> None:
    answer = await shelf.ask(QUESTION, who="alice", conversation_id="talk")
    identifier = answer["query_id"]
    assert (await shelf.good("GET", f"/v1/queries/{identifier}", who="alice"))["answer"]
    rating = {"query_id": identifier, "rating": "thumbs_up"}
    for method, path, body in (
        ("GET", f"/v1/queries/{identifier}", None),
        ("POST", f"/v1/queries/{identifier}/share", {"shared": True}),
    ):
        assert (await shelf.call(method, path, body, who="narrow")).status == 404
    assert (await shelf.call("POST", "/v1/feedback", rating, who="narrow")).status == 404
    assert identifier not in str(await shelf.good("GET", "/v1/queries", who="narrow"))
    own = await shelf.ask("When does the canteen open?", who="narrow")
    for who in ("narrow", "alice"):
        assert (await shelf.good("GET", f"/v1/queries/{own['query_id']}", who=who))["answer"]


async def test_kept_streams_of_other_keys_of_the_user_do_not_exist_for_a_restricted_one(shelf: Library) -> None:
    headers = {**shelf.key("alice"), "Accept": "text/event-stream", "Prefer": "resumable"}
    async with shelf.server.session.post(
        f"{shelf.server.url}/v1/query", json={"query": QUESTION}, headers=headers
    ) as response:
        stream = response.headers["Stream-Id"]
        assert "Lisbon" in await response.text()
    path = f"/v1/streams/{stream}"
    assert (await shelf.call("GET", path, who="narrow")).status == 404
    assert (await shelf.call("DELETE", path, who="narrow")).status == 404
    assert (await shelf.call("GET", path, who="alice")).status == 200


# The rights of a key, and of keys of the same user that may and may not read its answers again.
STRONGER = [
    pytest.param({"operator": True}, [{"operator": True}], [{}, {"groups": ["staff"]}], id="operator"),
    pytest.param(
        {"groups": ["staff", "press corps"]},
        [{"groups": ["press corps", "staff", "board"]}, {"operator": True}],
        [{}, {"groups": ["staff"]}, {"groups": ["staff,press corps"]}],
        id="groups",
    ),
    pytest.param({}, [{"groups": ["staff"]}, {"operator": True}], [{"collections": [OPEN]}], id="a plain key"),
    pytest.param({"collections": [OPEN]}, [{}, {"collections": [OPEN, CLOSED]}], [], id="a restricted key"),
]


@pytest.mark.parametrize(("made_with", "may", "may_not"), STRONGER)
async def test_kept_streams_and_steps_are_for_keys_of_the_user_with_at_least_the_rights_of_theirs(
    shelf: Library, made_with: Any, may: list[Any], may_not: list[Any]
) -> None:
    async def key(rights: Any) -> str:
        name = new_id()
        await make(shelf, name, grants=["planner"], **rights)
        return name

    who = await key(made_with)
    headers = {**shelf.key(who), "Accept": "text/event-stream", "Prefer": "resumable"}
    url = f"{shelf.server.url}/v1/query"
    async with shelf.server.session.post(url, json={"query": QUESTION}, headers=headers) as response:
        stream = f"/v1/streams/{response.headers['Stream-Id']}"
        await response.read()
    steps = f"/planner/sessions/{new_id()}/steps"
    assert (await shelf.call("POST", steps, envelope("p", "lookup"), who=who)).status == 201
    for rights, status in ((made_with, 200), *((one, 200) for one in may), *((one, 404) for one in may_not)):
        reader = await key(rights)
        for path in (stream, f"{steps}/p/events"):
            assert (await shelf.call("GET", path, who=reader)).status == status, (rights, path)


@pytest.mark.parametrize(("made_with", "may", "may_not"), STRONGER)
async def test_logged_questions_are_for_keys_of_the_user_with_at_least_the_rights_of_theirs(
    shelf: Library, made_with: Any, may: list[Any], may_not: list[Any]
) -> None:
    """The questions of other keys of the user do not exist, neither does what they have searched."""
    await make(shelf, "asker", **made_with)
    query = (await shelf.ask(QUESTION, who="asker", collections=[OPEN]))["query_id"]
    rating = {"query_id": query, "rating": "thumbs_up"}
    for rights, found in ((made_with, True), *((one, True) for one in may), *((one, False) for one in may_not)):
        await make(shelf, "reader", **rights)
        listed = await shelf.good("GET", "/v1/queries", who="reader")
        assert (query in {one["id"] for one in listed["queries"]}) == found, rights
        for method, path, body in (
            ("GET", f"/v1/queries/{query}", None),
            ("POST", f"/v1/queries/{query}/share", {"shared": False}),
            ("POST", "/v1/feedback", rating),
        ):
            status = (await shelf.call(method, path, body, who="reader")).status
            assert (status < 300) == found, (rights, path, status)
            assert found or status == 404
        rated = await shelf.good("GET", "/v1/feedback", who="reader")
        assert (query in str(rated)) == found, rights


async def test_a_shared_question_is_read_with_other_keys_of_its_user_as_by_others(shelf: Library) -> None:
    await make(shelf, "asker", groups=["staff"])
    await make(shelf, "reader")
    query = (await shelf.ask("When does the canteen open?", who="asker", conversation_id="talk"))["query_id"]
    await shelf.good("POST", f"/v1/queries/{query}/share", {"shared": True}, who="asker")
    entry = await shelf.good("GET", f"/v1/queries/{query}", who="reader")
    assert "noon" in entry["answer"]
    assert (entry["conversation_id"], entry["may_share"]) == (None, False)


async def test_a_published_collection_is_for_keys_that_see_it(shelf: Library) -> None:
    for name, path in ((OPEN, "alice/open"), (CLOSED, "alice/closed")):
        await shelf.good("PUT", f"/v1/collections/{name}/endpoint", {"as": path}, who="alice")
    body = {"messages": QUESTION}
    assert (await shelf.call("POST", "/api/v1/endpoints/alice/open/query", body, who="narrow")).status == 200
    assert (await shelf.call("POST", "/api/v1/endpoints/alice/closed/query", body, who="narrow")).status == 404


async def test_a_restricted_key_does_not_learn_which_paths_are_taken(shelf: Library) -> None:
    await shelf.good("PUT", f"/v1/collections/{CLOSED}/endpoint", {"as": "alice/closed"}, who="alice")
    said = {
        (reply.status, reply.body["message"])
        for path in ("alice/closed", "alice/writer", "alice/free")
        for name in (OPEN, CLOSED)
        for reply in [await shelf.call("PUT", f"/v1/collections/{name}/endpoint", {"as": path}, who="narrow")]
    }
    assert said == {(403, "This API key is for some collections only, so it cannot publish them.")}
    withdrawn = await shelf.call("DELETE", f"/v1/collections/{OPEN}/endpoint?as=alice/closed", who="narrow")
    assert withdrawn.status == 404


async def test_an_operators_key_can_be_for_one_collection_only(shelf: Library) -> None:
    await make(shelf, "auditor", "auditor", operator=True, collections=[OPEN])
    listed = await shelf.good("GET", "/v1/collections", who="auditor")
    assert [one["name"] for one in listed["collections"]] == [OPEN]
    assert (await shelf.call("GET", "/v1/documents/announcement", who="auditor")).status == 404
    assert (await shelf.call("GET", "/v1/keys", who="auditor")).status == 403


# --- grants


async def test_configured_endpoints_exist_only_for_keys_that_were_granted_them(shelf: Library) -> None:
    await make(shelf, "none")
    await make(shelf, "one", grants=["source:notes", "model:writer"])
    one = await shelf.good("GET", "/v1/sources", who="one")
    assert {"notes", "writer"} <= {found["name"] for found in one["sources"]}
    for who, unknown in (("none", "notes"), ("one", "wiki")):
        for path in ("/v1/sources", "/v1/models"):
            assert unknown not in str(await shelf.good("GET", path, who=who))
        refused = await shelf.call("POST", "/v1/query", {"query": "Why?", "sources": [unknown]}, who=who)
        assert (refused.status, f"no source '{unknown}'" in refused.body["message"]) == (400, True)
        chat = {"prompt": "Why?", "data_sources": [{"slug": unknown}], "retrieval_only": True}
        assert (await shelf.call("POST", "/api/v1/chat", chat, who=who)).status != 200 or unknown not in str(
            (await shelf.good("POST", "/api/v1/chat", chat, who=who))["sources"]
        )
        assert (await mcp(shelf, who, "ask", question="Why?", sources=[unknown]))["isError"]
    asked = await shelf.good("POST", "/v1/query", {"query": "Why?", "sources": "all"}, who="one")
    assert {status["source"] for status in asked["source_status"]} == {"collections", "notes"}
    for who, status in (("none", 400), ("one", 200)):
        assert (await shelf.call("POST", "/v1/query", {"query": "Why?", "model": "writer"}, who=who)).status == status
    body = {"messages": "Why?"}
    for who, is_there in (("none", False), ("one", True)):
        reply = await shelf.call("POST", "/api/v1/endpoints/alice/writer/query", body, who=who)
        assert (reply.status != 404) is is_there


async def test_a_grant_counts_also_where_only_the_operator_may_name_sources(tmp_path: Path, space: Space) -> None:
    source = Endpoint(slug="notes", name="notes", url=space.url, operator=True)
    async with running(Settings(data_dir=str(tmp_path), sources={"notes": source}, log_level="ERROR")) as server:
        access = Access(server.service._anabranch)  # type: ignore[arg-type]
        granted = Rights(grants=Grants(names=("source:notes",)))
        old = Identified(user="alice")
        assert not access.grants({}, old).permits("source:notes")
        assert access.grants({}, Identified(user="alice", rights=granted)).permits("source:notes")
        assert not access.grants({}, Identified(user="alice", rights=granted)).permits("source:wiki")


async def test_the_planner_is_for_keys_that_were_granted_it_and_keeps_restricted_keys_apart(shelf: Library) -> None:
    await make(shelf, "planner", grants=["planner"])
    await make(shelf, "narrow planner", grants=["planner"], collections=[OPEN])
    steps, step = "/planner/sessions/apart/steps", envelope("p", "lookup")
    refused = await shelf.call("POST", steps, step, who="narrow")
    assert (refused.status, "not granted the planner" in refused.body["message"]) == (403, True)
    assert (await shelf.call("POST", steps, step, who="planner")).status == 201
    assert (await shelf.call("GET", f"{steps}/p/events", who="planner")).status == 200
    assert (await shelf.call("GET", f"{steps}/p/events", who="narrow planner")).status == 404
    assert (await shelf.call("DELETE", f"{steps}/p", who="narrow planner")).status == 404


# --- limits and use


async def test_a_key_has_limits_of_its_own(shelf: Library) -> None:
    await make(shelf, "slow", limits={"requests": 2, "questions": 1})
    replies = [await shelf.call("GET", "/v1/collections", who="slow") for _ in range(3)]
    assert [one.status for one in replies] == [200, 200, 429]
    assert [one.headers["RateLimit-Remaining"] for one in replies] == ["1", "0", "0"]
    assert int(replies[2].headers["Retry-After"]) > 0
    assert (await shelf.call("GET", "/v1/collections", who="alice")).status == 200
    assert shelf.server.service._anabranch is not None
    caller = await shelf.server.service._anabranch.identify(shelf.secrets["slow"], ())
    claimant = Access(shelf.server.service._anabranch).claimant({}, caller)
    assert (claimant.name, claimant.limits["questions"]) == (f"key:{caller.key}", 1)
