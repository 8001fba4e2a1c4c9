"""Publishing collections over HTTP: who may, under which name, and what others write to ask them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch import Anabranch
from anabranch.configuration.settings import Settings, load
from anabranch.domain.model import Endpoint
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("publishing")]

BEES = "A healthy hive needs about 18 kg of honey to survive the winter."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    models = {"smol": Endpoint(slug="smol", url="http://127.0.0.1:9", operator=True)}
    given: Any = {"models": models, "published_models": {"alice/smol": "smol"}}
    async with library(tmp_path_factory.mktemp("data"), models_dir, **given) as opened:
        for who in ("alice", "bob"):
            await opened.collection(f"bees of {who}", who=who)
            await opened.ingest(f"bees of {who}", text(BEES, title="Bees"), who=who)
        yield opened


def at(name: str) -> str:
    return f"/v1/collections/bees of {name}/endpoint"


async def test_a_published_collection_is_asked_as_the_response_says(shelf: Library, tmp_path: Path) -> None:
    made = await shelf.good("PUT", at("alice"), {"as": "alice/bees"}, who="alice")
    url = shelf.server.url
    assert made == {
        "owner": "alice",
        "slug": "bees",
        "path": "alice/bees",
        "url_path": "/api/v1/endpoints/alice/bees/query",
        "source": f"alice@{url}/bees",
        "yaml": made["yaml"],
        "public_documents": 1,
    }
    reply = await shelf.good("POST", made["url_path"], {"messages": "How much honey does a hive need?"})
    assert reply["references"]["documents"][0]["content"] == BEES
    (tmp_path / "anabranch.yaml").write_text(made["yaml"])
    there = load({"HOME": str(tmp_path)}, tmp_path / "anabranch.yaml")
    named = there.sources["bees"]
    assert (named.url, named.path, named.token) == (url, "alice/bees", None)
    async with Anabranch.open(settings=Settings(data_dir=str(tmp_path / "none"))) as other:
        asked = await other.ask("How much honey does a hive need?", sources=[made["source"]], model="extractive")
    assert "18 kg" in asked.text
    assert await shelf.good("GET", at("alice"), who="alice") == {"endpoints": [made]}
    assert await shelf.good("PUT", at("alice"), {"as": "alice/bees"}, who="alice") == made, "again is the same"


async def test_only_the_owner_sees_where_a_collection_is_published(shelf: Library) -> None:
    await shelf.good("PUT", at("bob"), {"as": "bob/bees"}, who="bob")
    await shelf.good("PUT", at("bob"), {"as": "shop/bees-2"}, who="root")
    for who in ("bob", "root", None):
        assert (await shelf.good("GET", "/v1/collections/bees of bob", who=who))["published"] == [
            "bob/bees",
            "shop/bees-2",
        ]
    listed = await shelf.good("GET", "/v1/collections", who="alice")
    assert [one["name"] for one in listed["collections"] if "published" in one] == ["bees of alice"]
    assert (await shelf.call("GET", at("bob"), who="alice")).status == 403


@pytest.mark.parametrize(
    ("name", "path", "who", "status"),
    [
        ("alice", "bob/bees-3", "alice", 403),
        ("alice", "Alice/bees-3", "alice", 403),
        ("bob", "alice/bees-3", "alice", 403),
        ("alice", "alice/smol", "alice", 409),
        ("alice", "alice/Bees", "alice", 400),
        ("alice", "alice", "alice", 400),
        ("alice", "alice/bees\n", "alice", 400),
        ("alice", "", "alice", 400),
        ("alice", "a" * 201, "alice", 400),
        ("nobody", "alice/bees-3", "alice", 404),
    ],
)
async def test_a_user_publishes_own_collections_under_the_own_name(
    shelf: Library, name: str, path: str, who: str, status: int
) -> None:
    assert (await shelf.call("PUT", at(name), {"as": path}, who=who)).status == status


async def test_a_path_belongs_to_one_collection_until_it_is_withdrawn(shelf: Library) -> None:
    await shelf.good("PUT", at("alice"), {"as": "shop/taken"}, who="root")
    assert (await shelf.call("PUT", at("bob"), {"as": "shop/taken"}, who="root")).status == 409
    assert (await shelf.call("DELETE", f"{at('bob')}?as=shop/taken", who="root")).status == 404
    assert (await shelf.call("DELETE", f"{at('alice')}?as=shop/taken", who="bob")).status == 403
    assert (await shelf.call("DELETE", at("alice"), who="alice")).status == 400
    gone = await shelf.good("DELETE", f"{at('alice')}?as=shop/taken", who="alice")
    assert gone == {"path": "shop/taken", "withdrawn": True}
    assert (await shelf.call("DELETE", f"{at('alice')}?as=shop/taken", who="alice")).status == 404


async def test_a_slug_is_free_unless_its_owner_has_it_and_a_taken_one_does_not_say_what_has_it(shelf: Library) -> None:
    for name, owner in (("secrets", "bob"), ("plans", "alice")):
        await shelf.collection(name, who=owner, default_permissions={"visibility": "private"})
        await shelf.good("PUT", f"/v1/collections/{name}/endpoint", {"as": f"{owner}/mine"}, who=owner)
    # The operator may publish it under the name of somebody who cannot see it.
    await shelf.good("PUT", "/v1/collections/secrets/endpoint", {"as": "alice/hers"}, who="root")
    replies = [await shelf.call("PUT", at("alice"), {"as": f"alice/{slug}"}, who="alice") for slug in ("hers", "smol")]
    assert [one.status for one in replies] == [409, 409]
    told = {one.body["message"].replace(slug, "SLUG") for one, slug in zip(replies, ("hers", "smol"), strict=True)}
    assert len(told) == 1
    # Everybody who may ask finds out that an address exists, and nothing of what is behind it.
    asked = await shelf.good("POST", "/api/v1/endpoints/alice/hers/query", {"messages": "What?"}, who="alice")
    assert asked["references"]["documents"] == []


@pytest.mark.parametrize("host", ["evil.example/x", 'a"b', "a b", "", "[::1"])
async def test_an_odd_host_is_not_repeated(shelf: Library, host: str) -> None:
    made = await shelf.call("PUT", at("bob"), {"as": "bob/bees"}, who="bob", headers={"Host": host})
    assert made.status == 400 or made.body["source"] == "bob@URL/bees"
