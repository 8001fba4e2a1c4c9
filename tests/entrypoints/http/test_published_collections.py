"""A published collection, asked as a SyftAI-Space data source is asked."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import pytest
import pytest_asyncio

from anabranch import Anabranch
from anabranch.domain.model import Context, Endpoint, Query, Question, SourceReply, Until
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import collections, keys
from anabranch.testing import Hub
from support.federation import OPENING, SHELF, Node, Seeded, logged, new_key, node, seeded
from support.knowledge_fixtures import records_in
from support.scripted_source import until

__all__ = ["seeded"]  # the fixture

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("endpoints")]

ELSEWHERE = {"X-Forwarded-For": "203.0.113.9"}
EVERYTHING = sorted(SHELF)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub() -> AsyncIterator[Hub]:
    async with Hub(signing=True) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there(seeded: Seeded, hub: Hub) -> AsyncIterator[Node]:
    async with node(seeded.settings(syfthub_url=hub.url), seeded.secrets) as started:
        yield started


# --- the reply


async def test_the_reply_has_the_form_that_aggregators_read(there: Node) -> None:
    reply = await there.ask("canteen", limit=1)
    assert reply.headers["Content-Type"] == "application/json"
    assert set(reply.body) == {"summary", "references"}
    assert reply.body["summary"] is None
    references = reply.body["references"]
    assert set(references) == {"documents", "provider_info", "cost"}
    assert references["provider_info"] == {"name": "anabranch", "endpoint": "alice/canteen"}
    (document,) = references["documents"]
    assert set(document) == {"document_id", "content", "similarity_score", "metadata"}
    assert document["content"] == "The canteen opens at noon."
    assert 0.5 < document["similarity_score"] <= 1
    metadata = document["metadata"]
    assert metadata["title"] == "Canteen"
    assert document["content"] == SHELF["Canteen"][0][metadata["start_char"] : metadata["end_char"]]


@pytest.mark.parametrize(
    "messages",
    [
        OPENING,
        [{"role": "user", "content": OPENING}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Which barrel is the oldest?"},
            {"role": "assistant", "content": "The first."},
            {"role": "user", "content": OPENING},
            {"role": "assistant", "content": "Let me see."},
        ],
    ],
)
async def test_a_text_and_a_conversation_ask_the_same(there: Node, messages: Any) -> None:
    assert (await there.ask("canteen", messages)).documents[0]["content"] == "The canteen opens at noon."


@pytest.mark.parametrize(("limit", "count"), [(None, 5), (1, 1), (7, 7), ("7", 7), (20, 20), (21, 20), (10**9, 20)])
async def test_a_limit_above_the_highest_is_the_highest(there: Node, limit: Any, count: int) -> None:
    assert len((await there.ask("attic", "Which barrel holds wine?", limit=limit)).documents) == count


async def test_the_threshold_is_honoured(there: Node) -> None:
    scores = [document["similarity_score"] for document in (await there.ask("attic", "Barrel 7", limit=20)).documents]
    assert scores == sorted(scores, reverse=True)
    threshold = (scores[4] + scores[-1]) / 2
    above = (await there.ask("attic", "Barrel 7", limit=20, similarity_threshold=threshold)).documents
    assert [document["similarity_score"] for document in above] == [score for score in scores if score >= threshold]
    assert (await there.ask("attic", "Barrel 7", similarity_threshold=1)).documents == []


async def test_published_references_without_metadata(there: Node) -> None:
    (document,) = (await there.ask("canteen", include_metadata=False, limit=1)).documents
    assert set(document) == {"document_id", "content", "similarity_score"}
    nulls = {"include_metadata": None, "stream": None, "limit": None, "similarity_threshold": None, "temperature": None}
    (document, *_) = (await there.ask("canteen", **nulls, transaction_token=None, of_another_kind=[1])).documents
    assert document["metadata"]["title"] == "Canteen"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'{"messages": ""}',
        b'{"messages": " \\n\\u2028"}',
        b'{"messages": null}',
        b'{"messages": 5}',
        b'{"messages": []}',
        b'{"messages": [{}]}',
        b'{"messages": ["?"]}',
        b'{"messages": [{"role": "user", "content": " "}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "system", "content": "?"}]}',
        b'{"messages": [{"role": "tool", "content": "?"}]}',
        b'{"messages": "?", "limit": 0}',
        b'{"messages": "?", "limit": -1}',
        b'{"messages": "?", "limit": 1e400}',
        b'{"messages": "?", "limit": "many"}',
        b'{"messages": "?", "similarity_threshold": 1.01}',
        b'{"messages": "?", "similarity_threshold": NaN}',
        b'{"messages": "?", "transaction_token": 7}',
        b'{"messages": "?", "transaction_token": "%s"}' % (b"x" * 8_193),
        b'{"messages": "%s"}' % (b"x" * 100_001),
        b'{"messages": [{"content": "%s"}]}' % (b"x" * 100_001),
        b'{"messages": "\xff"}',
        b'{"messages": "?", "x": %s}' % (b"[" * 100_000),
    ],
    ids=lambda body: repr(body[:60]),
)
async def test_what_cannot_be_understood_is_said_in_a_sentence(there: Node, body: bytes) -> None:
    reply = await there.ask("canteen", data=body)
    assert reply.status == 422
    assert set(reply.body) == {"detail"}
    assert reply.body["detail"]


async def test_published_endpoints_refuse_large_bodies_and_other_methods(seeded: Seeded, there: Node) -> None:
    reply = await there.ask("canteen", data=BytesIO(b" " * (4 * 1024 * 1024 + 1)))
    assert reply.status == 413
    assert "4,194,304 bytes" in reply.body["detail"]
    for path in ("canteen", "alice/canteen"):
        async with there.server.session.get(f"{there.url}/api/v1/endpoints/{path}/query") as response:
            assert response.status == 405


# --- who sees what


@pytest.mark.parametrize(
    ("who", "seen"),
    [
        ("bob", ["Canteen"]),
        ("carol", ["Canteen", "Staff canteen"]),
        ("erin", ["Canteen", "Staff canteen"]),
        ("root", EVERYTHING),
    ],
)
async def test_a_key_sees_what_its_user_may_see(there: Node, who: str, seen: list[str]) -> None:
    reply = await there.ask("canteen", token=there.secrets[who], headers=ELSEWHERE)
    assert reply.titles == seen
    for title in set(EVERYTHING) - set(seen):
        assert SHELF[title][0] not in str(reply.body)


@pytest.mark.parametrize(
    ("claims", "seen"),
    [
        ({}, ["Canteen"]),
        ({"sub": "17"}, ["Canteen"]),
        ({"sub": "carol"}, ["Canteen", "Staff canteen"]),
        ({"sub": "17", "username": "carol"}, ["Canteen", "Staff canteen"]),
        ({"sub": "carol", "username": "17"}, ["Canteen"]),
        ({"sub": "17", "groups": ["board", "staff"]}, ["Canteen", "Staff canteen"]),
        ({"sub": "17", "groups": "board"}, ["Canteen"]),
        ({"sub": "guest", "groups": ["board"]}, ["Canteen"]),
        ({"sub": "carol", "role": "guest", "groups": ["board"]}, ["Canteen"]),
        ({"sub": "17", "role": "admin", "operator": True}, ["Canteen"]),
    ],
)
async def test_a_token_of_the_hub_sees_what_its_bearer_may_see(
    there: Node, hub: Hub, claims: dict[str, Any], seen: list[str]
) -> None:
    assert (await there.ask("canteen", token=hub.token("alice", **claims), headers=ELSEWHERE)).titles == seen


async def test_at_this_machine_nobody_needs_a_key_and_is_a_guest(there: Node) -> None:
    """Not the operator: another program here may ask on behalf of somebody far away."""
    assert (await there.ask("canteen")).titles == ["Canteen"]


async def test_a_revoked_key_stops_at_once(seeded: Seeded, there: Node) -> None:
    identifier, secret = new_key(seeded.folder, user="bob")
    assert (await there.ask("canteen", token=secret)).status == 200
    database = records_in(seeded.folder)
    assert database.writing(lambda db: keys.revoke(db, identifier))
    database.close()
    reply = await there.ask("canteen", token=secret)
    assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "revoked" in reply.body["detail"]


# --- which endpoint is meant


@pytest.mark.parametrize(
    ("path", "tenant", "endpoint"),
    [
        ("canteen", None, "alice/canteen"),
        ("canteen", "", "alice/canteen"),
        ("canteen", "alice", "alice/canteen"),
        ("canteen", "bob", None),
        ("docs", "alice", "alice/docs"),
        ("docs", "bob", "bob/docs"),
        ("docs", "carol", None),
        ("alice/docs", None, "alice/docs"),
        ("bob/docs", None, "bob/docs"),
        ("bob/docs", "alice", "bob/docs"),
        ("alice%2Fdocs", None, "alice/docs"),
        ("bob/canteen", None, None),
        ("ALICE/docs", None, None),
        ("shelf", None, None),
        ("collections", None, None),
        ("alice/collections", None, None),
        ("%00", None, None),
        ("x" * 5_000, None, None),
    ],
)
async def test_path_and_tenant_tell_owners_apart(
    there: Node, path: str, tenant: str | None, endpoint: str | None
) -> None:
    headers = {} if tenant is None else {"X-Tenant-Name": tenant}
    reply = await there.ask(path, token=there.secrets["bob"], headers=headers)
    if endpoint is None:
        assert reply.status == 404
        assert reply.body["detail"].startswith("There is no endpoint")
    else:
        assert reply.body["references"]["provider_info"]["endpoint"] == endpoint


@pytest.mark.parametrize("data", [b"", b"{", b'{"limit": 0}', b'{"messages": []}'])
async def test_an_unknown_slug_is_404_whatever_the_body(there: Node, data: bytes) -> None:
    reply = await there.ask("nothing", token=there.secrets["bob"], data=data)
    assert (reply.status, reply.body["detail"]) == (404, "There is no endpoint 'nothing' here.")
    assert (await there.ask("canteen", token=there.secrets["bob"], data=data)).status == 422


async def test_two_owners_of_one_slug(there: Node, hub: Hub) -> None:
    for token in (None, there.secrets["bob"]):
        reply = await there.ask("docs", token=token)
        assert reply.status == 404
        assert "alice, bob" in reply.body["detail"]
        assert "/api/v1/endpoints/OWNER/docs/query" in reply.body["detail"]
    for owner in ("alice", "bob"):  # a token says who is meant
        reply = await there.ask("docs", token=hub.token(owner, sub="17"))
        assert reply.body["references"]["provider_info"]["endpoint"] == f"{owner}/docs"


async def test_a_token_for_one_owner_opens_nothing_of_anothers(there: Node, hub: Hub) -> None:
    token = hub.token("alice", sub="17")
    for path, tenant in (("bob/docs", None), ("docs", "bob"), ("attic", None), ("nothing", None)):
        reply = await there.ask(path, token=token, headers={"X-Tenant-Name": tenant} if tenant else {})
        assert reply.status == 404
        assert reply.body["detail"] == f"There is no endpoint {path.rpartition('/')[2]!r} here."
    both = hub.sign({"aud": ["bob", "alice", "zoe"], "exp": 2**33, "sub": "17"})
    assert (await there.ask("bob/docs", token=both)).status == 200
    assert (await there.ask("alice/docs", token=both)).status == 200
    assert (await there.ask("attic", token=both)).status == 404


async def test_the_hub_writes_audiences_in_small_letters(there: Node, hub: Hub) -> None:
    assert (await there.ask("attic", token=hub.token("dora", sub="17"))).status == 200
    assert (await there.ask("attic", token=hub.token("Dora", sub="17"))).status == 200
    assert (await there.ask("attic", token=hub.token("DORA", sub="17"))).status == 401


async def test_unauthorized_callers_cannot_tell_which_endpoints_exist(there: Node, hub: Hub) -> None:
    """Whatever they come with, the answer for a slug that there is is the answer for one that there is not."""
    async with Hub(signing=True) as other:
        tokens = [
            None,
            "",
            "ab_nobody",
            "a.b.c",
            "ä.ö.ü",
            "x" * 20_000,
            f"{'x' * 9_000}.y.z",
            hub.token("zoe", sub="17"),
            hub.token("alice", sub="17", expires_s=-60),
            other.token("alice", sub="17"),
        ]
        for token in tokens:
            replies = [
                await there.ask(path, token=token, headers={**ELSEWHERE, **tenant}, data=data)
                for path in ("canteen", "docs", "nothing", "alice/docs", "alice/nothing", "zoe/docs")
                for tenant in ({}, {"X-Tenant-Name": "alice"}, {"X-Tenant-Name": "zoe"})
                for data in (b'{"messages": "?"}', b"{")
            ]
            assert {(reply.status, str(reply.body)) for reply in replies} == {(401, str(replies[0].body))}
            assert replies[0].headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Authorization: Bearer KEY"], 200),
        (["authorization: bearer KEY"], 200),
        (["AUTHORIZATION:   BEARER   KEY  "], 200),
        (["Authorization: Bearer KEY", "Authorization: Bearer KEY"], 401),
        (["Authorization: Bearer KEY", "authorization: Bearer ab_other"], 401),
        (["Authorization: Bearer ab_other", "Authorization: Bearer KEY"], 401),
        (["Authorization: Bearer KEY, Bearer KEY"], 401),
        (["Authorization: Bearer KEY KEY"], 401),
        (["Authorization: BearerKEY"], 401),
        (["Authorization: Basic KEY"], 401),
        (["Authorization: KEY"], 401),
        (["Authorization: Bearer"], 401),
        (["Authorization:"], 401),
        (["X-Authorization: Bearer KEY", "X-Forwarded-For: 203.0.113.9"], 401),
    ],
)
async def test_a_key_comes_in_one_header(there: Node, lines: list[str], status: int) -> None:
    sent = [line.replace("KEY", there.secrets["bob"]) for line in lines]
    reply = await there.raw("/api/v1/endpoints/canteen/query", there.host, *sent, body='{"messages": "?"}')
    assert reply.status == status


# --- what is kept


async def test_the_transaction_token_is_recorded(seeded: Seeded, there: Node, hub: Hub) -> None:
    for name, token, user in (
        ("tx-1", None, "(guest)"),
        ("tx-2", hub.token("alice"), "(guest)"),
        ("tx-3", hub.token("alice", sub="17"), "17"),
        ("tx-4", there.secrets["carol"], "carol"),
        ("tx-5", there.secrets["root"], "root"),
    ):
        reply = await there.ask("canteen", token=token, transaction_token=name, limit=3)
        (row,) = seeded.queries(name)
        assert (row["endpoint"], row["user"], row["original"], row["top_k"]) == ("alice/canteen", user, OPENING, 3)
        found = logged_retrievals(seeded, row["id"])
        assert found == [document["document_id"] for document in reply.documents]


async def test_a_published_question_without_a_transaction_token_is_recorded(seeded: Seeded, there: Node) -> None:
    question = "When does the canteen open on Sundays?"
    await there.ask("canteen", question, transaction_token="")
    await until(lambda: logged(seeded.folder, "original", question))
    (row,) = logged(seeded.folder, "original", question)
    assert row["transaction_token"] is None


async def test_where_nothing_is_kept_only_the_payment_is(seeded: Seeded) -> None:
    shelf = Endpoint(slug="shelf", kind="collection", operator=True)
    question = Question(text="Does the canteen open at night?", sources=(shelf,), until=Until.MERGE)
    async with Anabranch.open(settings=seeded.settings(query_log_days=0)) as anabranch:  # and nobody sweeps up
        canteen = await anabranch.publishing.find(Caller(), "canteen", None, ["alice"])
        for transaction in (None, "tx-only"):
            answerer, entry = anabranch.publishing.answerer(canteen), canteen.log_entry(transaction)
            assert (await anabranch.start(question, anabranch.context(), answerer, entry).value()).passages
    assert logged(seeded.folder, "original", question.text) == []
    (row,) = seeded.queries("tx-only")
    assert (row["original"], row["answer"], row["endpoint"]) == ("", "", "alice/canteen")
    assert logged_retrievals(seeded, row["id"]) == []


async def test_no_token_is_in_the_logs(seeded: Seeded, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    token, wrong = hub.token("alice", sub="17"), hub.token("zoe", sub="17")
    async with node(seeded.settings(syfthub_url=hub.url, log_level="DEBUG")) as there:
        for one in (token, wrong, seeded.secrets["carol"], "ab_wrong-key"):
            await there.ask("canteen", token=one, transaction_token="tx-unlogged")
            await there.server.session.get(f"{there.server.url}/v1/documents/my-secret-title")
    log = capfd.readouterr().err
    assert "/v1/documents/{document}" in log
    assert "my-secret-title" not in log
    assert "chat_request_completed" in log
    assert "request_refused" in log
    for secret in (
        token,
        wrong,
        token.rpartition(".")[2],
        seeded.secrets["carol"],
        "ab_wrong-key",
        "tx-unlogged",
        OPENING,
    ):
        assert secret not in log


# --- when things go wrong


class Waiting:
    """A source that is never through."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def search(self, query: Query, context: Context) -> SourceReply:
        self.asked.set()
        try:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody resolves this future")
        finally:
            self.cancelled.set()


async def test_a_client_that_goes_away_ends_the_search(seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Waiting()
    monkeypatch.setattr("anabranch.app.endpoint_resolver.CollectionSource", lambda *_: source)
    async with node(seeded.settings()) as there:
        asking = asyncio.create_task(there.ask("canteen", transaction_token="tx-gone"))
        await source.asked.wait()
        asking.cancel()
        async with asyncio.timeout(5):
            await source.cancelled.wait()
    assert seeded.queries("tx-gone") == []


async def test_a_search_that_takes_too_long(seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.app.endpoint_resolver.CollectionSource", lambda *_: Waiting())
    async with node(seeded.settings(retrieval_timeout=0.05)) as there:
        reply = await there.ask("canteen", transaction_token="tx-late")
    assert (reply.status, reply.body) == (504, {"detail": "The search took too long."})
    assert seeded.queries("tx-late") == []  # nobody pays for nothing


async def test_a_published_collection_without_the_embedding_model_is_503(seeded: Seeded, tmp_path: Any) -> None:
    async with node(seeded.settings(models_dir=str(tmp_path))) as there:
        reply = await there.ask("canteen", transaction_token="tx-broken")
    assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
    assert reply.body == {"detail": "The collection cannot be searched at the moment."}  # and not where it is kept
    assert seeded.queries("tx-broken") == []


async def test_a_server_that_shuts_down_says_so(seeded: Seeded) -> None:
    async with node(seeded.settings()) as there:
        assert there.server.service._anabranch is not None
        await there.server.service._anabranch.drain(0)
        reply = await there.ask("canteen")
    assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
    assert "shutting down" in reply.body["detail"]


async def test_what_is_withdrawn_is_gone_at_once(seeded: Seeded, there: Node) -> None:
    database = records_in(seeded.folder)
    (shelf,) = {one.collection for one in database.reading(lambda db: collections.published(db, "canteen"))}
    assert database.writing(lambda db: collections.publish(db, "finn", "brief", shelf, by_operator=True))
    assert (await there.ask("brief")).status == 200
    assert database.writing(lambda db: collections.withdraw(db, "finn", "brief"))
    assert (await there.ask("brief")).status == 404
    database.close()


def logged_retrievals(seeded: Seeded, query: str) -> list[str]:
    database = records_in(seeded.folder)
    try:
        wanted = "SELECT document FROM retrievals WHERE query = ? ORDER BY rank"
        return database.reading(lambda db: [row[0] for row in db.execute(wanted, (query,))])
    finally:
        database.close()
