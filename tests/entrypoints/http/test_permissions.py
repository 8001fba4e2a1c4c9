"""Who sees what: a caller without the right learns nothing, not even that there is something to learn."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.collection_server import Issuer, Library, form, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-2")]

EVERYBODY = ("alice", "bob", "carol", "root")
SECRET = "Project Nightingale will be announced on the 9th of November in Lisbon."
QUESTION = "When will Project Nightingale be announced?"
PUBLIC = {"visibility": "public", "allowed_users": [], "allowed_groups": []}
RESTRICTED = {"visibility": "restricted", "allowed_users": ["bob"], "allowed_groups": []}
PRIVATE = {"visibility": "private", "allowed_users": [], "allowed_groups": []}
FOLLOWS = {"visibility": "collection", "allowed_users": [], "allowed_groups": []}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with (
        Issuer() as hub,
        library(tmp_path_factory.mktemp("data"), models_dir, syfthub_url=hub.url, jwt_audience="library") as opened,
    ):
        opened.secrets["guest"] = hub.token(sub="guest", role="guest")
        opened.secrets["dora"] = hub.token(sub="17", username="dora", groups=["board"])
        opened.secrets["stranger"] = "ab_nobody"
        await opened.collection("mixed", who="alice")
        await opened.ingest(
            "mixed",
            text("The canteen opens at noon.", title="public"),
            text("Alice keeps her diary in the attic.", title="private", permissions={"visibility": "private"}),
            text(
                "The roof garden is for staff and for Bob.",
                title="restricted",
                permissions={"visibility": "restricted", "allowed_users": ["bob"], "allowed_groups": ["board"]},
            ),
            who="alice",
        )
        yield opened


async def titles(shelf: Library, who: str | None) -> list[str]:
    page = await shelf.good("GET", "/v1/documents?collection=mixed", who=who)
    assert page["total"] == len(page["documents"])
    return sorted(one["title"] for one in page["documents"])


@pytest.mark.parametrize(
    ("who", "seen"),
    [
        ("alice", ["private", "public", "restricted"]),
        ("bob", ["public", "restricted"]),
        ("carol", ["public", "restricted"]),
        ("dora", ["public", "restricted"]),
        ("guest", ["public"]),
        ("root", ["private", "public", "restricted"]),
        (None, ["private", "public", "restricted"]),
    ],
)
async def test_each_caller_sees_the_documents_they_may_read(shelf: Library, who: str | None, seen: list[str]) -> None:
    assert await titles(shelf, who) == seen
    answer = await shelf.ask("What is there?", who=who, collections=["mixed"])
    assert sorted(one["title"] for one in answer["sources"]) == seen
    collection = await shelf.good("GET", "/v1/collections/mixed", who=who)
    stats = await shelf.good("GET", "/v1/collections/mixed/stats", who=who)
    listed = next(
        one for one in (await shelf.good("GET", "/v1/collections", who=who))["collections"] if one["name"] == "mixed"
    )
    assert collection["document_count"] == stats["document_count"] == listed["document_count"] == len(seen)
    assert collection["chunk_count"] == stats["chunk_count"] == listed["chunk_count"] == len(seen)


async def test_the_right_to_see_is_not_the_right_to_know_who_else_does(shelf: Library) -> None:
    for who, shown in (("alice", True), ("bob", False), ("root", True), ("guest", False)):
        for one in (await shelf.good("GET", "/v1/documents?collection=mixed", who=who))["documents"]:
            assert (one["permissions"] is not None) == shown
        collection = await shelf.good("GET", "/v1/collections/mixed", who=who)
        assert (collection["settings"]["default_permissions"] is not None) == shown


async def test_a_hidden_collection_is_one_that_is_not_there(shelf: Library) -> None:
    hidden = await shelf.collection("hidden", who="alice", default_permissions={"visibility": "private"})
    (item,) = await shelf.ingest("hidden", text(SECRET, title="Nightingale"), who="alice")
    paths = [
        ("GET", "/v1/collections/{}", None),
        ("GET", "/v1/collections/{}/stats", None),
        ("DELETE", "/v1/collections/{}", None),
        ("GET", "/v1/documents?collection={}", None),
        ("POST", "/v1/ingest", {"collection_id": "{}", "documents": [text("x")]}),
        ("POST", "/v1/query", {"query": QUESTION, "collections": ["{}"]}),
    ]
    for who in ("bob", "guest", "dora"):
        for name, other in (("hidden", "hiddem"), (hidden, hidden[:-4] + "0000")):
            for method, path, body in paths:
                reply = await shelf.call(method, path.format(name), _filled(body, name), who=who)
                twin = await shelf.call(method, path.format(other), _filled(body, other), who=who)
                assert (reply.status, reply.code) == (404, "NOT_FOUND")
                assert str(reply.body).replace(name, "") == str(twin.body).replace(other, "")
        listed = await shelf.good("GET", "/v1/collections", who=who)
        assert "hidden" not in [one["name"] for one in listed["collections"]]
        await _knows_nothing(shelf, who, item["id"])
    assert "9th of November" in (await shelf.ask(QUESTION, who="alice"))["answer"]


def _filled(body: Any, name: str) -> Any:
    if body is None:
        return None
    if "collections" in body:
        return {**body, "collections": [name]}
    return {**body, "collection_id": name}


async def _knows_nothing(shelf: Library, who: str, document: str) -> None:
    answer = await shelf.ask(QUESTION, who=who, settings={"top_k": 20})
    assert answer["refused"]
    assert "Nightingale" not in str(answer)
    everything = await shelf.good("GET", "/v1/documents?limit=1000", who=who)
    assert document not in [one["id"] for one in everything["documents"]]
    unknown = "01900000-0000-7000-8000-000000000000"
    for method, body in (("GET", None), ("PATCH", {"title": "Mine"}), ("DELETE", None)):
        reply = await shelf.call(method, f"/v1/documents/{document}", body, who=who)
        twin = await shelf.call(method, f"/v1/documents/{unknown}", body, who=who)
        assert (reply.status, reply.code) == (404, "NOT_FOUND")
        assert str(reply.body).replace(document, "") == str(twin.body).replace(unknown, "")


async def test_who_sees_but_does_not_own_may_not_change(shelf: Library) -> None:
    page = await shelf.good("GET", "/v1/documents?collection=mixed", who="bob")
    public = next(one["id"] for one in page["documents"] if one["title"] == "public")
    for method, path, body in (
        ("POST", "/v1/ingest", {"collection_id": "mixed", "documents": [text("x")]}),
        ("DELETE", "/v1/collections/mixed", None),
        ("PATCH", f"/v1/documents/{public}", {"title": "Mine"}),
        ("DELETE", f"/v1/documents/{public}", None),
    ):
        for who in ("bob", "guest", "dora"):
            reply = await shelf.call(method, path, body, who=who)
            assert (reply.status, reply.code, reply.body["error"]) == (403, "FORBIDDEN", "forbidden")


async def test_a_change_of_permissions_holds_at_once(shelf: Library) -> None:
    await shelf.collection("shifting", who="alice")
    (item,) = await shelf.ingest("shifting", text(SECRET.replace("Nightingale", "Kingfisher")), who="alice")
    question = "When will Project Kingfisher be announced?"
    path = f"/v1/documents/{item['id']}"
    for permissions, sees in (
        ({"visibility": "private"}, set()),
        ({"visibility": "restricted", "allowed_users": ["bob"]}, {"bob"}),
        ({"visibility": "restricted", "allowed_groups": ["board"]}, {"carol", "dora"}),
        ({"visibility": "private", "allowed_users": ["bob"]}, set()),
        ({"visibility": "public"}, {"bob", "carol", "dora", "guest"}),
    ):
        changed = await shelf.good("PATCH", path, {"permissions": permissions}, who="alice")
        assert changed["permissions"] == {"allowed_users": [], "allowed_groups": [], **permissions}
        for who in ("bob", "carol", "dora", "guest"):
            found = await shelf.ask(question, who=who)
            assert (item["id"] in [one["document_id"] for one in found["sources"]]) == (who in sees)
            assert (await shelf.call("GET", path, who=who)).status == (200 if who in sees else 404)


@pytest.mark.parametrize("as_form", [False, True], ids=["json", "form"])
async def test_ingesting_again_without_permissions_keeps_them(shelf: Library, as_form: bool) -> None:
    collection = f"again-{as_form}"
    await shelf.collection(collection, who="alice")

    async def ingest(content: str, **more: Any) -> Any:
        if not as_form:
            (item,) = await shelf.ingest(collection, text(content, filename="plan.txt", **more), who="alice")
            return item
        fields = {name: json.dumps(value) for name, value in more.items() if value is not None}
        data = form(("plan.txt", content.encode()), collection_id=collection, **fields)
        accepted = await shelf.good("POST", "/v1/ingest", data=data, who="alice")
        return (await shelf.job(accepted["job_id"], who="alice"))["documents"][0]

    item = await ingest("The first plan.", permissions=RESTRICTED)
    for content, more, outcome, expected in (
        ("The first plan.", {}, "unchanged", RESTRICTED),
        ("The first plan.", {"metadata": {"state": "old"}}, "updated", RESTRICTED),
        ("The first plan.", {"metadata": {"state": "older"}, "permissions": None}, "updated", RESTRICTED),
        ("The second plan.", {}, "replaced", RESTRICTED),
        ("The second plan.", {"permissions": {}}, "updated", PRIVATE),
        ("The third plan.", {"permissions": RESTRICTED}, "replaced", RESTRICTED),
        ("The fourth plan.", {"permissions": PUBLIC}, "replaced", PUBLIC),
    ):
        assert (await ingest(content, **more))["outcome"] == outcome
        kept = await shelf.good("GET", f"/v1/documents/{item['id']}", who="alice")
        assert kept["permissions"] == expected
        seen = await shelf.call("GET", f"/v1/documents/{item['id']}", who="carol")
        assert seen.status == (200 if expected == PUBLIC else 404)


async def test_a_document_without_permissions_follows_its_collection(shelf: Library) -> None:
    made = await shelf.collection("defaults", who="alice", default_permissions=RESTRICTED)
    (item,) = await shelf.ingest("defaults", text("The budget."), who="alice")
    path = f"/v1/documents/{item['id']}"
    assert (await shelf.good("GET", path, who="alice"))["permissions"] == FOLLOWS
    assert [(await shelf.call("GET", path, who=who)).status for who in ("bob", "carol")] == [200, 404]
    changed = await shelf.good("PATCH", f"/v1/collections/{made}", {"default_permissions": PRIVATE}, who="alice")
    assert changed["settings"]["default_permissions"] == PRIVATE
    assert (await shelf.call("GET", path, who="bob")).status == 404
    await shelf.good("PATCH", path, {"permissions": RESTRICTED}, who="alice")
    assert (await shelf.call("GET", path, who="bob")).status == 200
    await shelf.good("PATCH", path, {"permissions": {"visibility": "collection"}}, who="alice")
    assert (await shelf.call("GET", path, who="bob")).status == 404


async def test_only_its_owner_changes_a_collection_and_it_follows_none(shelf: Library) -> None:
    made = await shelf.collection("board", who="alice", default_permissions=RESTRICTED)
    for who, status in (("bob", 403), ("carol", 404)):
        reply = await shelf.call("PATCH", f"/v1/collections/{made}", {"default_permissions": PUBLIC}, who=who)
        assert reply.status == status
    body = {"default_permissions": {"visibility": "collection"}}
    assert (await shelf.call("PATCH", f"/v1/collections/{made}", body, who="alice")).code == "VALIDATION_ERROR"
    named = await shelf.good("PATCH", f"/v1/collections/{made}", {"description": "Minutes"}, who="alice")
    assert (named["description"], named["settings"]["default_permissions"]) == ("Minutes", RESTRICTED)


async def test_a_name_of_several_collections_is_refused_with_the_choices_that_the_caller_may_see(
    shelf: Library,
) -> None:
    for owner, permissions in (("alice", PUBLIC), ("bob", PUBLIC), ("root", PRIVATE)):
        await shelf.collection("twins", who=owner, default_permissions=permissions)
        await shelf.ingest("twins", text(f"Twins of {owner}.", title=f"Twins of {owner}"), who=owner)
    body = {"query": "Whose twins?", "collections": ["twins"]}
    for path in ("/v1/query", "/rag/stream"):
        refused = await shelf.call("POST", path, body, who="carol")
        assert refused.status == 409
        assert "use collection:alice/twins or collection:bob/twins" in str(refused.body)
        assert "root" not in str(refused.body)
    asked = await shelf.ask("Whose twins?", who="carol", collections=["collection:bob/twins"])
    assert [(one["title"], one["owner"]) for one in asked["sources"]] == [("Twins of bob", "bob")]
    own = await shelf.ask("Whose twins?", who="alice", collections=["twins"])
    assert [one["owner"] for one in own["sources"]] == ["alice"]
    message = {"role": "user", "content": "Whose twins?"}
    for model, status in (("twins", 409), ("collection:twins", 409), ("collection:bob/twins", 200)):
        completion = {"model": model, "messages": [message]}
        assert (await shelf.call("POST", "/v1/chat/completions", completion, who="carol")).status == status
    chat = {"prompt": "Whose twins?", "data_sources": [{"slug": "collection:bob/twins"}]}
    answer = await shelf.good("POST", "/api/v1/chat", chat, who="carol")
    assert [one["owner"] for one in answer["sources"].values()] == ["bob"]


async def test_a_collection_of_hidden_documents_shows_to_whom_one_is_shown(shelf: Library) -> None:
    await shelf.collection("closed", who="alice", default_permissions={"visibility": "private"})
    permissions = {"visibility": "restricted", "allowed_users": ["bob"]}
    await shelf.ingest("closed", text("For Alice."), text("For Bob too.", permissions=permissions), who="alice")
    assert (await shelf.good("GET", "/v1/collections/closed", who="bob"))["document_count"] == 1
    assert (await shelf.call("GET", "/v1/collections/closed", who="carol")).status == 404


async def test_jobs_feedback_and_counts_are_ones_own(shelf: Library) -> None:
    await shelf.collection("asked", who="alice")
    body = {"collection_id": "asked", "documents": [text("The tower clock is 3 minutes slow.")]}
    job = (await shelf.good("POST", "/v1/ingest", body, who="alice"))["job_id"]
    await shelf.job(job, who="alice")
    await shelf.job(job, who="root")
    for who in ("bob", "guest"):
        for method in ("GET", "DELETE"):
            assert (await shelf.call(method, f"/v1/ingest/{job}", who=who)).status == 404
    asked = {who: await shelf.ask("How slow is the clock?", who=who, collections=["asked"]) for who in EVERYBODY}
    asked["guest"] = await shelf.ask("How slow is the clock?", who="guest", collections=["asked"])
    asked["machine"] = await shelf.ask("How slow is the clock?", collections=["asked"])
    counts = {
        who: (await shelf.good("GET", "/v1/collections/asked/stats", who=who))["query_count_30d"]
        for who in (*EVERYBODY, "guest", "dora")
    }
    assert counts == {"alice": 6, "root": 6, "bob": 1, "carol": 1, "guest": 0, "dora": 0}
    for who in ("alice", "bob", "guest"):
        for whose, answer in asked.items():
            reply = await shelf.call(
                "POST", "/v1/feedback", {"query_id": answer["query_id"], "rating": "thumbs_up"}, who=who
            )
            assert reply.status == (200 if who == whose else 404), (who, whose)


async def test_a_guest_asks_and_keeps_nothing(shelf: Library) -> None:
    reply = await shelf.call("POST", "/v1/collections", {"name": "guests"}, who="guest")
    assert (reply.status, reply.code) == (403, "FORBIDDEN")
    assert "canteen" in (await shelf.ask("When does the canteen open?", who="guest"))["answer"]


async def test_two_collections_of_one_name_are_told_apart(shelf: Library) -> None:
    for who in ("alice", "bob"):
        await shelf.collection("diary", who=who)
        await shelf.ingest("diary", text(f"{who.title()} went to the lake."), who=who)
    for who in ("alice", "bob"):
        answer = await shelf.ask("Who went to the lake?", who=who, collections=["diary"])
        assert answer["answer"].startswith(f"{who.title()} went")
        assert len(answer["sources"]) == 1


async def test_an_unknown_key_is_401_on_every_route(shelf: Library) -> None:
    for method, path in (
        *(("GET", "/v1/collections"), ("POST", "/v1/collections"), ("GET", "/v1/collections/mixed")),
        *(("DELETE", "/v1/collections/mixed"), ("GET", "/v1/collections/mixed/stats"), ("POST", "/v1/ingest")),
        *(("GET", "/v1/ingest/x"), ("DELETE", "/v1/ingest/x"), ("GET", "/v1/documents"), ("POST", "/v1/query")),
        *(("GET", "/v1/documents/x"), ("PATCH", "/v1/documents/x"), ("DELETE", "/v1/documents/x")),
        *(("POST", "/v1/feedback"), ("GET", "/v1/feedback"), ("GET", "/v1/queries"), ("GET", "/v1/queries/x")),
    ):
        reply = await shelf.call(method, path, who="stranger")
        assert (reply.status, reply.code, reply.body["error"]) == (401, "UNAUTHORIZED", "unauthorized")
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        # A foreign web page, or somebody behind a proxy, is not the operator.
        for headers in ({"Origin": "https://evil.example"}, {"X-Forwarded-For": "203.0.113.9"}):
            reply = await shelf.call(method, path, headers=headers)
            assert (reply.status, reply.code) == (401, "UNAUTHORIZED")
