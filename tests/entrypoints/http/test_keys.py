"""/v1/keys: an operator creates, lists and revokes API keys."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.collection_server import Library, library

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("sources")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir) as started:
        yield started


async def test_a_key_is_created_used_and_revoked(opened: Library) -> None:
    created = await opened.call("POST", "/v1/keys", {"user": " dora ", "groups": ["board"], "note": "page"}, who="root")
    assert created.status == 201
    key = created.body
    assert (key["user"], key["groups"], key["operator"], key["note"]) == ("dora", ["board"], False, "page")
    assert (key["revoked_at"], key["current"]) == (None, False)
    opened.secrets["dora"] = key["key"]
    assert (await opened.call("GET", "/v1/collections", who="dora")).status == 200
    listed = await opened.call("GET", "/v1/keys", who="root")
    found = {one["user"]: one for one in listed.body["keys"]}
    assert found["dora"]["id"] == key["id"]
    assert found["root"]["current"]
    assert not any("key" in one or "hash" in one for one in listed.body["keys"])
    assert key["key"] not in str(listed.body)
    for reply in (created, listed):
        assert reply.headers["Cache-Control"] == "no-store"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
    revoked = await opened.good("DELETE", f"/v1/keys/{key['id']}", who="root")
    assert revoked == {"id": key["id"], "revoked": True}
    assert (await opened.call("GET", "/v1/collections", who="dora")).status == 401
    assert (await opened.call("DELETE", f"/v1/keys/{key['id']}", who="root")).status == 404
    again = await opened.good("GET", "/v1/keys", who="root")
    assert next(one for one in again["keys"] if one["id"] == key["id"])["revoked_at"] is not None


async def test_an_operators_key_made_here_may_make_keys(opened: Library) -> None:
    opened.secrets["chief"] = (await opened.good("POST", "/v1/keys", {"user": "chief", "operator": True}, who="root"))[
        "key"
    ]
    assert (await opened.call("POST", "/v1/keys", {"user": "fred"}, who="chief")).status == 201
    for user in ("  ", "al\nice", "a\u200bb", "\0", "(guest)"):
        assert (await opened.call("POST", "/v1/keys", {"user": user}, who="chief")).status == 400
