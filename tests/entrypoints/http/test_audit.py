"""The audit log over HTTP: every operation that changes something leaves a record, and so do refusals."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.app.event_streams import Timing
from anabranch.app.refusals import BURST, MAX_COUNTED, Refusals
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import Actor, AuditFilter, AuditRecord
from anabranch.knowledge.records import audit
from conftest import running
from support.collection_server import Library, library, text
from support.environment import opened as anabranch
from support.knowledge_fixtures import records_in

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("sources")]

PATIENCE_S = 20
# What is asked leaves no record here: the query log has it. The rest changes nothing that is kept.
UNRECORDED = {
    "questions": {
        "chat",
        "chat_stream",
        "ask_endpoint",
        "ask_endpoint_of_owner",
        "query",
        "rag_stream",
        "openai_chat",
        "openai_response",
        "openai_embeddings",
        "mcp",
        "begin_step",
        "push_events",
        "push_progress",
        "decide_safety",
        "follow_step_socket",
        "cancel_step",
        "stop_answer",
    },
    "tests": {"test_source", "test_named_source"},
    "only the browser changes": {"sign_out"},
}
# Each operation that changes something, and the action that it is recorded as.
RECORDED = {
    "create_collection": "collection.created",
    "change_collection": "collection.permissions_changed",
    "publish": "collection.published",
    "withdraw": "collection.withdrawn",
    "ingest": "ingest.accepted",
    "cancel_job": "ingest.cancelled",
    "change_document": "document.permissions_changed",
    "retry_document": "ingest.retried",
    "delete_document": "document.deleted",
    "delete_collection": "collection.deleted",
    "share_query": "query.shared",
    "feedback": "query.rated",
    "create_key": "key.created",
    "rotate_key": "key.rotated",
    "revoke_key": "key.revoked",
    "erase": "erasure.requested",
    "sign_in": "session.started",
    "add_source": "source.added",
    "delete_source": "source.removed",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    timing = Timing(refusals_every_s=0.05)
    async with library(tmp_path_factory.mktemp("data"), models_dir, timing=timing) as started:
        yield started


async def records(opened: Library, **wanted: str) -> list[dict[str, Any]]:
    """What the operator reads, newest first."""
    query = "&".join(f"{name}={value}" for name, value in {"limit": "200", **wanted}.items())
    found = await opened.good("GET", f"/v1/audit?{query}")
    return list(found["records"])


async def changed(opened: Library, action: str, method: str, path: str, body: Any = None, **options: Any) -> Any:
    """What the operation answers, once its record is there."""
    before = len(await records(opened, action=action))
    reply = await opened.call(method, path, body, **{"who": "root", **options})
    assert reply.status in (200, 201, 202, 204), reply
    assert len(await records(opened, action=action)) == before + 1, action
    return reply.body


async def test_every_operation_that_changes_something_leaves_a_record(opened: Library) -> None:
    not_recorded = set.union(*UNRECORDED.values())
    changing = {one.name for one in opened.server.service.operations if one.method != "GET"}
    assert changing == RECORDED.keys() | not_recorded, "a new operation: is what it changes recorded?"
    seen: set[str] = set()

    async def leaves(name: str, *request: Any, **options: Any) -> Any:
        seen.add(name)
        return await changed(opened, RECORDED[name], *request, **options)

    collection = await leaves("create_collection", "POST", "/v1/collections", {"name": "plans"})
    place = f"/v1/collections/{collection['id']}"
    shared = {"default_permissions": {"visibility": "restricted", "allowed_groups": ["staff"]}}
    await leaves("change_collection", "PATCH", place, shared)
    await changed(opened, "collection.changed", "PATCH", place, {"description": "What is planned."})
    await leaves("publish", "PUT", f"{place}/endpoint", {"as": "root/plans"})
    await leaves("withdraw", "DELETE", f"{place}/endpoint?as=root/plans")
    (stored,) = await opened.ingest(collection["id"], text("A plan for rivers.", title="Rivers"), who="root")
    (failed,) = await opened.ingest(collection["id"], text("   ", title="Nothing"), who="root")
    assert failed["status"] == "failed"
    body = {"collection_id": collection["id"], "documents": [text("More.")]}
    job = await leaves("ingest", "POST", "/v1/ingest", body)
    await leaves("cancel_job", "DELETE", f"/v1/ingest/{job['job_id']}")
    document = f"/v1/documents/{stored['id']}"
    permissions = {"visibility": "restricted", "allowed_users": ["bob"]}
    await leaves("change_document", "PATCH", document, {"permissions": permissions})
    await leaves("retry_document", "POST", f"/v1/documents/{failed['id']}/retry")
    await leaves("delete_document", "DELETE", document)
    asked = await opened.ask("What is the plan?", who="root")
    rating = {"query_id": asked["query_id"], "rating": "thumbs_up"}
    await leaves("feedback", "POST", "/v1/feedback", rating)
    await leaves("share_query", "POST", f"/v1/queries/{asked['query_id']}/share", {"shared": True})
    key = await leaves("create_key", "POST", "/v1/keys", {"user": "erin", "groups": ["staff"]})
    await leaves("sign_in", "POST", "/v1/session", {"key": key["key"]}, who=None)
    await leaves("rotate_key", "POST", f"/v1/keys/{key['id']}/rotate", {})
    await leaves("revoke_key", "DELETE", f"/v1/keys/{key['id']}")
    await leaves("erase", "POST", "/v1/erasures", {"user": "erin"})
    source = {"kind": "space", "name": "wiki", "url": "http://127.0.0.1:9", "slug": "wiki"}
    await leaves("add_source", "POST", "/v1/sources", source)
    await leaves("delete_source", "DELETE", "/v1/sources/wiki")
    await leaves("delete_collection", "DELETE", place)
    assert seen == RECORDED.keys()


async def test_a_record_says_who_from_where_and_what(opened: Library) -> None:
    identifier = "6f1c2a4e-0b5d-4c39-9f57-2f1a5d1c9b10"
    headers = {"X-Correlation-ID": identifier}
    made = await opened.good("POST", "/v1/collections", {"name": "journal"}, who="alice", headers=headers)
    (newest, *_) = await records(opened, actor="alice", action="collection")
    assert newest["object"] == f"collection:{made['id']}"
    assert (newest["name"], newest["actor"], newest["address"]) == ("journal", "user:alice", "127.0.0.1")
    assert (newest["surface"], newest["request"], newest["outcome"]) == ("api", identifier, "done")
    assert newest["key"], "the id of her key"
    await opened.good("DELETE", "/v1/collections/journal", who="alice")
    assert (await records(opened, actor="alice"))[0]["action"] == "collection.deleted"


async def test_a_correlation_id_that_may_say_something_is_recorded_as_its_digest(opened: Library) -> None:
    said = "alice-lives-at-5-Elm-Street"
    await opened.good("POST", "/v1/collections", {"name": "diary"}, who="alice", headers={"X-Correlation-ID": said})
    (newest, *_) = await records(opened, actor="alice", action="collection")
    assert newest["request"] == sha256(said.encode()).hexdigest()[:32]
    await opened.good("DELETE", "/v1/collections/diary", who="alice")


async def test_the_log_is_read_in_pages_by_operators_only(opened: Library) -> None:
    for number in range(3):
        await opened.collection(f"page {number}")
    first = await opened.good("GET", "/v1/audit?limit=2&action=collection.created")
    assert first["has_more"]
    second = await opened.good("GET", f"/v1/audit?limit=2&action=collection.created&after={first['next']}")
    found = [one["seq"] for page in (first, second) for one in page["records"]]
    assert found == sorted(set(found), reverse=True)
    assert len(found) >= 3
    assert (await opened.call("GET", "/v1/audit", who="root")).status == 200
    assert (await opened.call("GET", "/v1/audit", who="alice")).status == 403
    for wrong in ("limit=0", "after=x", "since=yesterday", "limit=many"):
        assert (await opened.call("GET", f"/v1/audit?{wrong}")).status == 400


async def refused(opened: Library, count: int, **wanted: str) -> list[dict[str, Any]]:
    """Refusals, once so many of this kind are written."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await records(opened, action="access.refused", **wanted)
            if sum(one["details"]["count"] for one in found) >= count:
                return found
            await asyncio.sleep(0.01)


async def test_refusals_are_counted_by_caller_and_reason(opened: Library) -> None:
    secret = await opened.collection("secret", who="bob")
    for _ in range(5):
        assert (await opened.call("GET", "/v1/keys", who="carol")).status == 403
    assert (await opened.call("DELETE", "/v1/collections/nowhere", who="carol")).status == 404
    opened.secrets["nobody"] = "ab_nothing"
    assert (await opened.call("GET", f"/v1/collections/{secret}", who="nobody")).status == 401
    found = await refused(opened, 6, actor="carol")
    counts = {(one["object"], one["details"]["code"]): 0 for one in found}
    for one in found:
        assert one["outcome"] == "refused"
        counts[one["object"], one["details"]["code"]] += one["details"]["count"]
    assert counts == {("operation:list_keys", "forbidden"): 5, ("operation:delete_collection", "not_found"): 1}
    (stranger, *_) = await refused(opened, 1, actor="guest")
    assert (stranger["actor"], stranger["address"]) == ("guest", "127.0.0.1")
    assert stranger["details"]["code"] == "unauthorized"


async def test_refusals_of_mcp_tools_are_counted_like_those_of_requests(opened: Library) -> None:
    await opened.collection("closed", who="bob", default_permissions={"visibility": "private"})
    opened.secrets["frank"] = (await opened.good("POST", "/v1/keys", {"user": "frank"}, who="root"))["key"]

    async def call(tool: str, **arguments: Any) -> None:
        headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
        assert (await opened.call("POST", "/mcp", message, who="frank", headers=headers)).status == 200

    await call("search", query="plans", collections=["closed"])
    await call("ask", question="plans?", sources=["closed"])
    await call("aggregate", query_text="plans")
    found = await refused(opened, 3, actor="frank")
    assert {(one["object"], one["details"]["code"], one["actor"], one["surface"]) for one in found} == {
        ("operation:mcp_search", "not_found", "user:frank", "mcp"),
        ("operation:mcp_ask", "not_found", "user:frank", "mcp"),
        ("operation:mcp_aggregate", "forbidden", "user:frank", "mcp"),
    }


@pytest.mark.sqlite
async def test_a_flood_of_refusals_is_a_bounded_number_of_records(tmp_path: Path) -> None:
    records_in(tmp_path).close()
    now = 0.0
    async with anabranch(DATA_DIR=str(tmp_path), EVIDENCE="off") as running:
        refusals = Refusals(running.knowledge, 3_600, lambda: now)
        for number in range(3 * MAX_COUNTED):
            refusals.add(Actor(name="guest", address=f"192.0.2.{number}", surface="api"), "ask", "unauthorized")
        refusals.add(Actor(name="user:alice", address="192.0.2.1", surface="api", key="k"), "keys", "forbidden")
        await refusals.close()
        assert len(refused_in(tmp_path)) == BURST + 1, "and alice's"
        assert sum(one.details["count"] for one in refused_in(tmp_path)) == 3 * MAX_COUNTED + 1
        assert [one.address for one in refused_in(tmp_path, actor="alice")] == ["192.0.2.1"]
        now += 180
        for number in range(100):
            refusals.add(Actor(name="guest", address=f"192.0.2.{number}", surface="api"), "ask", "unauthorized")
            refusals.add(Actor(name="user:bob", address="", surface="api", key="k"), f"operation-{number}", "forbidden")
        await refusals.close()
        later = refused_in(tmp_path)[: -BURST - 1]
        assert len(later) == 10 + 1 + 100, "200 an hour, one for the rest, and bob's"
        assert sum(one.details["count"] for one in later) == 200
        assert len(refused_in(tmp_path, actor="bob")) == 100


def refused_in(folder: Path, **wanted: Any) -> list[AuditRecord]:
    database = records_in(folder)
    try:
        chosen = AuditFilter(action="access.refused", **wanted)
        assert database.reading(audit.verify) == []
        return database.reading(lambda db: audit.listed(db, chosen, None, 10_000))
    finally:
        database.close()


async def test_without_records_refusals_create_none(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "data"), log_level="ERROR", auth="api_key")
    async with running(settings) as server, server.session.get(f"{server.url}/v1/keys") as reply:
        assert reply.status == 401
    assert not (tmp_path / "data").exists()
