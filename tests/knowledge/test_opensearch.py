"""The index in OpenSearch, on a real server: what it holds, what it is told late, and what happens when it is gone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.domain.errors import IndexFailed
from anabranch.domain.model import COLLECTION_ADDRESS, Filters, Query
from anabranch.knowledge.index.contract import Wanted, in_thread
from anabranch.knowledge.index.opensearch import index as opensearch_index
from anabranch.knowledge.index.opensearch.client import IndexAddress, IndexRefused, IndexUnreachable
from anabranch.knowledge.index.opensearch.index import OpenSearchIndex
from anabranch.knowledge.index.opensearch.writer import OpenSearchWriter
from anabranch.knowledge.index.view import View
from anabranch.knowledge.model import Caller, Permissions
from anabranch.knowledge.records import changes, documents, index_position
from anabranch.knowledge.records.database import Session
from anabranch.testing import FakeEmbedder
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, Workshop, workshop
from support.opensearch_client import client_of, outbound
from support.opensearch_server import new_index, running_opensearch, why_missing

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_missing() is not None, reason=str(why_missing())),
    pytest.mark.timeout(180),
]
FISH = ("Herons eat fish.", "Otters eat fish.", "Storks eat frogs.")
PRIVATE = Permissions(visibility="private")


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path, index=new_index()) as opened:
        await opened.collection()
        await opened.put(*FISH)
        yield opened


async def call(shop: Workshop, method: str, path: str, body: Any = None) -> Any:
    encoded = None if body is None else msgspec.json.encode(body)
    return await asyncio.to_thread(shop.writer._client.call, method, path, encoded)


async def fold(shop: Workshop) -> None:
    await asyncio.to_thread(shop.writer.fold)


def position(shop: Workshop) -> index_position.Position:
    found = shop.database.reading(index_position.current)
    assert found is not None
    return found


async def held(shop: Workshop) -> int:
    """How many chunks the index has."""
    await call(shop, "POST", f"{position(shop).name}/_refresh")
    query = {"query": {"exists": {"field": "document"}}}
    return int((await call(shop, "POST", f"{position(shop).name}/_count", query))["count"])


async def test_what_the_index_finds_comes_from_the_index(shop: Workshop) -> None:
    assert set(await shop.titles("fish")) == {"Herons", "Otters", "Storks"}
    assert shop.reader._pending.parts == ()
    assert await held(shop) == 3
    await call(shop, "POST", f"{position(shop).name}/_delete_by_query?refresh=true", {"query": {"match_all": {}}})
    assert await shop.titles("fish") == []


async def test_a_change_holds_from_the_next_question_on(shop: Workshop) -> None:
    listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)
    await shop.room.describe(OPERATOR, listed[0].id, permissions=PRIVATE)
    assert set(await shop.titles("fish", BOB)) == {"Otters", "Storks"}
    await shop.room.describe(OPERATOR, listed[0].id, permissions=Permissions(visibility="public"))
    assert set(await shop.titles("fish", BOB)) == {"Herons", "Otters", "Storks"}
    await shop.room.delete_document(OPERATOR, listed[1].id)
    assert set(await shop.titles("fish", BOB)) == {"Herons", "Storks"}
    await shop.room.describe(OPERATOR, listed[2].id, title="Zeppelins", metadata={"colour": "red"})
    assert (await shop.titles("zeppelins", limit=1)) == ["Zeppelins"]
    assert await shop.titles("fish", metadata={"colour": "red"}) == ["Zeppelins"]
    await shop.room.describe_collection(OPERATOR, "notes", permissions=PRIVATE)
    assert await shop.titles("fish", BOB) == ["Herons"]  # which has permissions of its own
    await fold(shop)
    assert await shop.titles("fish", BOB) == ["Herons"]
    assert set(await shop.titles("fish", OPERATOR)) == {"Herons", "Zeppelins"}
    assert await held(shop) == 2


async def test_what_a_slow_writer_sends_late_changes_nothing(shop: Workshop) -> None:
    name, sent = position(shop).name, []
    original = shop.writer._send

    def late(body: bytes) -> None:
        sent.append(body)

    listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)
    await shop.room.describe(OPERATOR, listed[0].id, metadata={"colour": "red"})
    shop.writer._send = late
    shop.writer._index(name, [listed[0].key])
    shop.writer._send = original
    await shop.room.describe(OPERATOR, listed[0].id, permissions=PRIVATE)
    await fold(shop)
    for body in sent:
        original(body)
    assert set(await shop.titles("fish", BOB)) == {"Otters", "Storks"}
    following = f"{COLLECTION_ADDRESS}{listed[0].collection}"
    found = await call(shop, "POST", f"{name}/_search", {"query": {"term": {"readers": following}}})
    assert found["hits"]["total"]["value"] == 2


async def test_a_writer_that_has_noted_less_than_it_wrote_goes_on(shop: Workshop) -> None:
    before = position(shop)
    await shop.put("Newts eat flies.")
    shop.database.writing(lambda db: index_position.publish(db, before))  # killed before it noted it
    assert set(await shop.titles("fish")) == {"Herons", "Otters", "Storks", "Newts"}
    await fold(shop)
    assert position(shop).name == before.name
    assert position(shop).seq > before.seq
    assert await held(shop) == 4


async def test_an_index_that_is_lost_is_searched_in_memory_and_built_again(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = position(shop).name
    assert set(await shop.titles("fish")) == {"Herons", "Otters", "Storks"}
    await call(shop, "DELETE", name)
    damaged: list[str] = []
    shop.reader._damaged = damaged.append
    for _ in range(2):
        assert set(await shop.titles("fish")) == {"Herons", "Otters", "Storks"}
    assert damaged == [name]
    monkeypatch.setattr(opensearch_index, "MAX_CHUNKS", 2)
    await shop.put("Newts eat fish.")  # it is built now
    assert position(shop).name != name
    hits = await shop.room.find(Query(text="fish", limit=5, similarity_threshold=0.0), OPERATOR)
    assert ({one.title for one in hits.passages}, hits.partial) == ({"Herons", "Otters", "Storks", "Newts"}, False)
    await call(shop, "DELETE", position(shop).name)
    hits = await shop.room.find(Query(text="fish", limit=5, similarity_threshold=0.0), OPERATOR)
    assert (hits.passages, hits.partial, hits.seen) == ([], True, "")
    assert await shop.room.is_index_damaged()


async def test_what_is_sent_late_does_not_make_a_deleted_index_again(shop: Workshop) -> None:
    name = position(shop).name
    listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)
    await call(shop, "DELETE", name)
    with pytest.raises(IndexFailed, match="has no index"):
        shop.writer._index(name, [listed[0].key])
    found = await call(shop, "GET", f"{shop.writer._client.name}-*/_settings")
    assert found == {}


async def test_an_interrupted_build_does_not_go_on_with_changes_that_are_forgotten(shop: Workshop) -> None:
    shop.writer._new(128)
    half = shop.database.reading(index_position.building)
    assert half is not None
    listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)
    await shop.room.describe(OPERATOR, listed[0].id, permissions=PRIVATE)
    shop.database.writing(lambda db: changes.trim(db, half.seq + 2))
    await asyncio.to_thread(shop.writer.rebuild)
    assert position(shop).name != half.name
    assert set(await shop.titles("fish", BOB)) == {"Otters", "Storks"}


async def test_an_erasure_leaves_nothing_that_was_sent_and_not_noted(shop: Workshop) -> None:
    name = position(shop).name
    async with workshop(shop.folder) as other:  # which has no index to write
        await other.put("Newts eat fish.")
    [newt] = [one for one in (await shop.room.documents(OPERATOR, None, 0, 10))[0] if one.title == "Newts"]
    shop.writer._index(name, [newt.key])  # and killed before it was refreshed
    shop.writer._new(128)  # another one, in the middle of a rebuild
    await shop.room.delete_document(OPERATOR, newt.id)
    await asyncio.to_thread(shop.writer.drop_deleted)
    assert await held(shop) == 3
    assert shop.database.reading(index_position.building) is None
    found = await call(shop, "GET", f"{shop.writer._client.name}-*/_settings")
    assert set(found) == {name}


async def test_a_chunk_that_opensearch_refuses_holds_up_no_other(shop: Workshop) -> None:
    noted: list[tuple[str, Any]] = []
    shop.writer._note = lambda event, **more: noted.append((event, more.get("chunks")))
    original = shop.writer._send
    shop.writer._send = lambda body: original(body.replace(b'"kind":"paragraph"', b'"kind":{"no":"word"}', 1))
    await shop.put("Newts eat fish.", "Toads eat flies.")
    assert [event for event, _ in noted] == ["chunks_not_indexed"]
    assert set(await shop.titles("fish")) >= {"Herons", "Toads"}


async def test_long_lists_of_readers_are_one_name(shop: Workshop) -> None:
    users = ("bob", *(f"user {number} {'x' * 200}" for number in range(300)))
    await shop.put("Ravens eat all.", permissions=Permissions(visibility="restricted", allowed_users=users))
    await shop.put("Swans eat all.", permissions=Permissions(visibility="restricted", allowed_users=users[-1:]))
    found = await call(shop, "POST", f"{position(shop).name}/_search", {"query": {"term": {"readers": users[5]}}})
    assert found["hits"]["total"]["value"] == 0
    assert "Ravens" in await shop.titles("ravens", BOB)
    assert "Ravens" not in await shop.titles("ravens", ALICE)
    assert {"Ravens", "Swans"} <= set(await shop.titles("ravens swans", Caller(user=users[-1])))
    assert {"Ravens", "Swans"} <= set(await shop.titles("ravens swans", OPERATOR))
    many = Caller(user="carol", groups=tuple(f"group {number}" for number in range(70_000)))
    assert "Ravens" not in await shop.titles("ravens", many)


async def test_two_embedders_do_not_replace_each_others_index(shop: Workshop) -> None:
    other = OpenSearchWriter(shop.database, shop.writer._client, "other")
    name = position(shop).name
    with pytest.raises(IndexFailed, match="'other'"):
        other.fold()
    assert position(shop).name == name


async def test_a_part_that_does_not_answer_is_asked_again(shop: Workshop) -> None:
    before, original = position(shop), shop.writer._client.call

    def failing(method: str, path: str, *rest: Any, **more: Any) -> Any:
        reply = original(method, path, *rest, **more)
        return {**reply, "_shards": {"total": 2, "failed": 1}} if path.endswith("/_refresh") else reply

    shop.writer._client.call = failing
    with pytest.raises(IndexFailed, match="did not answer"):
        await shop.put("Newts eat fish.")
    assert position(shop) == before
    shop.writer._client.call = original
    await fold(shop)
    assert position(shop).seq > before.seq


async def test_an_index_with_less_or_more_than_the_records_is_repaired(shop: Workshop) -> None:
    name, original = position(shop).name, shop.writer._send
    assert shop.writer.verify(lambda _: None) == ()
    shop.writer._send = lambda _: None  # lost
    await shop.put("Newts eat fish.")
    shop.writer._send = original
    [lost] = [one.key for one in (await shop.room.documents(OPERATOR, None, 0, 10))[0] if one.title == "Newts"]
    other = {"document": 999, "collection": 1, "readers": ["everybody"], "length": 3, "terms": "a b c"}
    await call(shop, "PUT", f"{name}/_doc/999?refresh=true", other)
    assert set(await shop.titles("fish")) == {"Herons", "Otters", "Storks"}
    assert shop.writer.verify(lambda _: None) == (f"document {lost}", "document 999")
    assert shop.writer.reported()
    shop.writer.repair()
    assert not shop.writer.reported()
    assert await held(shop) == 4
    assert set(await shop.titles("fish")) == {"Herons", "Otters", "Storks", "Newts"}


async def test_records_that_were_restored_have_the_index_built_again(shop: Workshop) -> None:
    name = position(shop).name
    await shop.put("Newts eat flies.")
    newest = position(shop).seq
    with_less = lambda db: db.execute("UPDATE changes SET at = at + 1 WHERE seq = ?", (newest,))  # noqa: E731
    shop.database.writing(with_less)
    assert len(await shop.titles("fish")) == 4
    await fold(shop)
    assert position(shop).name != name
    assert len(await shop.titles("fish")) == 4
    assert await held(shop) == 4


async def test_a_rebuild_is_used_when_it_is_complete(shop: Workshop) -> None:
    before = position(shop).name
    building = asyncio.create_task(asyncio.to_thread(shop.writer.rebuild))
    while not building.done():
        assert set(await shop.titles("fish")) == {"Herons", "Otters", "Storks"}
    await building
    assert position(shop).name != before
    assert shop.database.reading(index_position.building) is None
    listed = await call(shop, "GET", f"{shop.writer._client.name}-*/_count")
    assert listed["_shards"]["total"] == 1  # the old one is deleted


async def test_a_build_that_was_interrupted_goes_on(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.knowledge.index.opensearch.writer.DOCUMENTS", 1)
    monkeypatch.setattr("anabranch.knowledge.index.opensearch.writer.NOTE_S", 0.0)
    original, sent = shop.writer._send, 0

    def failing(body: bytes) -> None:
        nonlocal sent
        sent += 1
        if sent == 3:
            raise IndexUnreachable("gone")
        original(body)

    shop.writer._send = failing
    with pytest.raises(IndexUnreachable):
        shop.writer.rebuild()
    half = shop.database.reading(index_position.building)
    assert half is not None
    assert half.last_chunk == 2
    shop.writer.rebuild()
    assert sent == 4  # the third one again, and no other
    assert position(shop).name == half.name
    assert await held(shop) == 3


async def test_an_index_of_another_embedder_is_not_searched(shop: Workshop) -> None:
    other = FakeEmbedder(dimensions=128)
    other.name = "other"
    async with workshop(shop.folder, index=shop.writer._client.name, embedder=other) as later:
        assert later.database.reading(lambda db: index_position.usable(db, "other")) is None


async def test_more_changes_than_fit_into_memory_are_searched_once_they_are_indexed(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opensearch_index, "MAX_CHUNKS", 2)
    listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)
    for one in listed:
        await shop.room.describe(OPERATOR, one.id, metadata={"n": 1})
    await shop.room.describe(OPERATOR, listed[0].id, permissions=PRIVATE)
    hits = await shop.room.find(Query(text="fish", limit=5, similarity_threshold=0.0), BOB)
    assert {one.title for one in hits.passages} == {"Otters", "Storks"}
    assert (hits.partial, hits.seen) == (True, "")
    assert not await shop.room.is_index_damaged()  # it is only behind
    await fold(shop)
    hits = await shop.room.find(Query(text="fish", limit=5, similarity_threshold=0.0), BOB)
    assert not hits.partial


async def test_erased_chunks_are_in_no_segment(shop: Workshop) -> None:
    listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)
    await shop.room.delete_document(OPERATOR, listed[0].id)
    assert await asyncio.to_thread(shop.writer.drop_deleted) >= 1
    stats = await call(shop, "GET", f"{position(shop).name}/_stats/docs")
    assert stats["_all"]["total"]["docs"]["deleted"] == 0


async def test_long_questions_and_hostile_words_are_searched(shop: Workshop) -> None:
    for question in (" ".join(f"word{n}" for n in range(3_000)) + " fish", '"} {"*": [fish', "fish\n\n{}", "*", "?"):
        assert len(await shop.titles(question)) == 3
    evil = Permissions(visibility="restricted", allowed_users=('bob"]}}', "everybody", "*"))
    await shop.put("Ravens eat all.", permissions=evil)
    assert "Ravens" not in await shop.titles("ravens", ALICE)
    assert "Ravens" not in await shop.titles("ravens", BOB)


async def test_an_unreachable_index_is_told_apart_and_used_again(tmp_path: Path) -> None:
    with running_opensearch() as cluster:
        async with workshop(tmp_path, index=cluster.url("lost")) as shop:
            await shop.collection()
            await shop.put(*FISH)
            assert len(await shop.titles("fish")) == 3
            await asyncio.to_thread(cluster.nodes[0].kill)
            with pytest.raises(IndexUnreachable) as raised:
                await shop.titles("fish")
            assert raised.value.details == {"reason": "index_unreachable"}
            with pytest.raises(IndexFailed):
                await shop.room.check_index()
            listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)  # needs no index
            await shop.room.delete_document(OPERATOR, listed[0].id)
            cluster.nodes[0].start()
            await asyncio.to_thread(cluster.wait_for, 1)
            assert set(await shop.titles("fish")) == {"Otters", "Storks"}
            await fold(shop)
            assert await held(shop) == 2


async def test_a_node_that_is_down_is_passed_over(shop: Workshop) -> None:
    up = shop.writer._client._client._nodes[0]
    given = outbound()
    url = f"http://127.0.0.1:9,{up.removeprefix('http://')}/{shop.writer._client.name}"
    try:
        index = OpenSearchIndex(client_of(url, given), shop.embedder.name)
        await index.check_reachable()
        assert index._client._nodes == [up, "http://127.0.0.1:9"]
    finally:
        await given.close()


@pytest.mark.parametrize(
    ("url", "key", "nodes", "name", "authorization"),
    [
        ("http://a:9200", None, ("http://a:9200",), "anabranch", ""),
        ("https://u:p%40w@a,b:1/docs/", None, ("https://a", "https://b:1"), "docs", "Basic dTpwQHc="),
        ("https://a/docs", "secret", ("https://a",), "docs", "ApiKey secret"),
    ],
)
def test_addresses(url: str, key: str | None, nodes: tuple[str, ...], name: str, authorization: str) -> None:
    assert IndexAddress.of(url, key) == IndexAddress(nodes=nodes, name=name, authorization=authorization)


async def test_a_refused_request_says_why(shop: Workshop) -> None:
    with pytest.raises(IndexRefused, match=r"HTTP 400, parsing_exception: unknown query \[nonsense\]"):
        await call(shop, "POST", f"{position(shop).name}/_search", {"query": {"nonsense": {}}})


async def test_hidden_documents_do_not_choose_what_is_listed(shop: Workshop) -> None:
    """More chunks match than are listed, and others' documents make the rarer word frequent."""
    rare = [f"rare{number} alpha note {number}." for number in range(70)]
    frequent = [f"frequent{number} beta note {number}." for number in range(90)]
    await shop.put(*rare, *frequent)
    embedded = await shop.embedder.embed(["alpha beta"])

    def listed(db: Session, view: View) -> int:
        """How many of the best chunks have the rarer word."""
        keys, _ = view.lexical("alpha beta").best(50)
        found = documents.chunks_by_key(db, BOB, keys.tolist())
        return sum(row["title"].startswith("rare") for row in found.values())

    wanted = Wanted(Filters(), BOB, ["alpha beta"], embedded, 50)
    assert await shop.reader.find(in_thread(shop.database), wanted, listed) == 50
    await shop.put(*(f"hidden{number} alpha secret {number}." for number in range(150)), permissions=PRIVATE)
    assert await shop.reader.find(in_thread(shop.database), wanted, listed) == 50
