"""Collections and documents as a caller sees them: taken in, found, replaced, changed, removed."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.domain.errors import Conflict, Forbidden, InvalidQuestion, NotFound
from anabranch.domain.model import Embedding, Filters, Query
from anabranch.knowledge.model import Caller, NewDocument, Permissions
from anabranch.knowledge.records import attributes, collections, jobs
from anabranch.testing import FakeEmbedder
from support.knowledge_fixtures import ALICE, BOB, GUEST, OPERATOR, Workshop, text, workshop

PRIVATE = Permissions(visibility="private")
STAFF = Permissions(visibility="restricted", allowed_groups=("staff",))


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        yield opened


async def test_documents_are_found_before_and_after_they_are_indexed(shop: Workshop) -> None:
    await shop.put("Herons eat fish in shallow water.", "Bakers knead dough at night.")
    assert (await shop.titles("fish"))[0] == "Herons"
    shop.writer.fold()
    assert (await shop.titles("fish"))[0] == "Herons"
    await shop.put("Otters eat fish too.")
    assert set((await shop.titles("fish"))[:2]) == {"Herons", "Otters"}
    assert len(await shop.find("fish")) == 3


async def test_a_passage_is_a_piece_of_its_document_with_all_its_scores(shop: Workshop) -> None:
    await shop.put("Herons eat fish in shallow water.", metadata={"author": "Ann", "tags": ["birds"]})
    [found] = await shop.find("What do herons eat?")
    assert found.place is not None
    assert found.document_id is not None
    document = await shop.room.document(OPERATOR, found.document_id, content=True)
    assert document.content is not None
    assert document.content[found.place.start : found.place.end] == found.text
    scores = found.place.scores
    assert None not in (scores.dense, scores.sparse, scores.fused, scores.rerank)
    assert found.place.metadata == {"author": "Ann", "tags": ["birds"]}
    assert found.source == "notes"
    assert 0 <= found.score <= 1


async def test_ingesting_the_same_document_again_changes_nothing(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    job = await shop.put("Herons eat fish.")
    assert [item.outcome for item in (await shop.room.job(OPERATOR, job)).items] == ["unchanged"]
    assert len(await shop.find("herons")) == 1
    twin = NewDocument(source="text", data=b"Herons eat fish.", identity="another name")
    job = await shop.room.ingest(OPERATOR, "notes", [twin])
    await shop.ingest_pending()
    assert [item.outcome for item in (await shop.room.job(OPERATOR, job)).items] == ["unchanged"]
    assert len(await shop.find("herons")) == 1


async def test_the_same_text_with_other_permissions_is_another_document(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    other = NewDocument(source="text", data=b"Herons eat fish.", identity="secret", permissions=PRIVATE)
    await shop.room.ingest(OPERATOR, "notes", [other])
    await shop.ingest_pending()
    assert len(await shop.find("herons", OPERATOR)) == 2
    assert len(await shop.find("herons", BOB)) == 1


async def test_a_changed_document_replaces_the_old_one_under_the_same_id(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    [before] = await shop.find("herons")
    job = await shop.put("Herons eat frogs.")
    [after] = await shop.find("herons")
    assert [item.outcome for item in (await shop.room.job(OPERATOR, job)).items] == ["replaced"]
    assert before.document_id == after.document_id
    assert after.text == "Herons eat frogs."
    assert await shop.find("fish", metadata={"none": "none"}) == []


@pytest.mark.parametrize("waits", [False, True], ids=["stored", "waiting"])
async def test_the_id_of_a_hidden_document_in_ones_own_collection_says_and_changes_nothing_of_it(
    tmp_path: Path, waits: bool
) -> None:
    async with workshop(tmp_path) as shop:
        collection = await shop.collection(caller=ALICE)
        hidden = text("Salary of the boss: secret.", PRIVATE, metadata={"author": "carol"})
        job = await shop.room.ingest(OPERATOR, collection, [hidden])
        if not waits:
            await shop.ingest_pending()
        (theirs,) = (await shop.room.job(OPERATOR, job)).items
        sent = [text("Salary of the boss: secret."), text("Salary is other words.")]
        outcomes, ids = [], set()
        for one in (*sent, sent[1]):
            job = await shop.room.ingest(ALICE, "notes", [one])
            await shop.ingest_pending()
            (item,) = (await shop.room.job(ALICE, job)).items
            outcomes.append(item.outcome)
            ids.add(item.document_id)
        assert outcomes == ["added", "replaced", "unchanged"]
        assert len(ids) == 1
        assert theirs.document_id not in ids
        found = await shop.room.document(OPERATOR, theirs.document_id, content=True)
        assert (found.content, found.permissions, found.owner) == ("Salary of the boss: secret.", PRIVATE, "")
        with pytest.raises(NotFound):
            await shop.room.document(ALICE, theirs.document_id)
        await shop.room.delete_document(OPERATOR, theirs.document_id)
        await shop.put("Salary once more.", caller=ALICE)
        (mine,), total = await shop.room.documents(ALICE, "notes", 0, 10)
        assert (mine.id in ids, total) == (True, 1), "her document keeps its id once the other one is gone"


async def test_who_may_see_a_document_of_the_operator_in_ones_own_collection_replaces_it_by_id(shop: Workshop) -> None:
    collection = await shop.collection("shared", caller=ALICE)
    await shop.put("Herons fly.", collection=collection)
    (first,), _ = await shop.room.documents(ALICE, "shared", 0, 10)
    for caller, content in ((ALICE, "Herons swim."), (OPERATOR, "Herons wade.")):
        await shop.put(content, collection=collection, caller=caller)
        (stored,), _ = await shop.room.documents(ALICE, "shared", 0, 10)
        assert stored.id == first.id
        assert (await shop.room.document(ALICE, stored.id, content=True)).content == content


async def test_a_query_sees_the_old_or_the_new_never_both_or_neither(shop: Workshop) -> None:
    await shop.put("Herons count 0.")

    async def ask() -> None:
        while not done.is_set():
            found = [passage.text for passage in await shop.find("herons count")]
            assert len(found) == 1, found

    done = asyncio.Event()
    asking = [asyncio.create_task(ask()) for _ in range(3)]
    for number in range(1, 40):
        await shop.put(f"Herons count {number}.")
        if number % 13 == 0:
            await asyncio.to_thread(shop.writer.fold)
    done.set()
    await asyncio.gather(*asking)


async def test_new_metadata_updates_a_document_without_chunking_it_again(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    job = await shop.put("Herons eat fish.", metadata={"tags": ["birds"]})
    assert [item.outcome for item in (await shop.room.job(OPERATOR, job)).items] == ["updated"]
    assert len(await shop.find("herons", tags=("birds",))) == 1


async def test_a_deleted_document_is_not_found_any_more(shop: Workshop) -> None:
    await shop.put("Herons eat fish.", "Otters eat fish.")
    shop.writer.fold()
    found = await shop.find("fish")
    assert found[0].document_id is not None
    assert (await shop.room.delete_document(OPERATOR, found[0].document_id))[0].chunk_count == 1
    left = await shop.titles("fish")
    assert left == [found[1].title]
    with pytest.raises(NotFound):
        await shop.room.document(OPERATOR, found[0].document_id)
    for _ in range(5):  # past the share of the dead, the segment is written anew
        shop.writer.fold()
    assert await shop.titles("fish") == left


async def test_deleting_a_collection_does_not_say_how_many_hidden_documents_it_had(shop: Workshop) -> None:
    collection = await shop.collection("hers", caller=ALICE)
    await shop.put("Herons fly.", collection=collection, caller=ALICE)
    await shop.put("Otters swim.", collection=collection, permissions=PRIVATE)
    removed, _ = await shop.room.delete_collection(ALICE, "hers")
    assert removed == 1
    assert (await shop.room.documents(OPERATOR, None, 0, 10))[1] == 0


async def test_deleting_a_collection_deletes_everything_in_it(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    await shop.room.ingest(OPERATOR, "notes", [text("Otters wait in the queue.")])
    assert (await shop.room.delete_collection(OPERATOR, "notes"))[0] == 1
    assert await shop.find("fish") == []
    assert shop.database.reading(jobs.waiting) == 0
    with pytest.raises(NotFound):
        await shop.room.collection(OPERATOR, "notes")
    assert await shop.collection("notes")  # the name is free again


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"collections": ("birds",)}, {"Herons"}),
        ({"collections": ("birds", "notes")}, {"Herons", "Otters", "Pikes"}),
        ({"collections": ("none",)}, set()),
        ({"tags": ("wet",)}, {"Otters", "Pikes"}),
        ({"tags": ("wet", "furry")}, {"Otters"}),
        ({"metadata": {"depth": 3}}, {"Pikes"}),
        ({"metadata": {"depth": "3"}}, {"Pikes"}),
        ({"metadata": {"site.name": "Loch"}}, {"Otters"}),
        ({"start": "2020-01-01", "end": "2020-12-31"}, {"Otters"}),
        ({"start": "2020-06-15", "end": "2020-06-15"}, {"Otters"}),
        ({"end": "2019-12-31"}, set()),
    ],
)
async def test_filters_are_applied_before_ranking(shop: Workshop, filters: dict[str, Any], expected: set[str]) -> None:
    await shop.collection("birds")
    await shop.put("Herons eat fish.", collection="birds")
    otter = {"tags": ["wet", "furry"], "created_date": "2020-06-15", "site": {"name": "Loch"}}
    await shop.put("Otters eat fish.", metadata=otter)
    shop.writer.fold()
    await shop.put("Pikes eat fish.", metadata={"tags": ["wet"], "depth": 3})
    assert set(await shop.titles("fish", limit=1 if len(expected) == 1 else 10, **filters)) == expected


async def test_permissions_limit_what_a_caller_finds(shop: Workshop) -> None:
    await shop.collection("hers", ALICE)
    await shop.put("Open eats fish.", collection="hers", caller=ALICE)
    await shop.put("Staff eats fish.", collection="hers", caller=ALICE, permissions=STAFF)
    await shop.put("Private eats fish.", collection="hers", caller=ALICE, permissions=PRIVATE)
    named = Permissions(visibility="restricted", allowed_users=("bob",))
    await shop.put("Bobs eats fish.", collection="hers", caller=ALICE, permissions=named)
    shop.writer.fold()
    colleague = Caller(user="carol", groups=("staff",))
    views = (
        (ALICE, {"Open", "Staff", "Private", "Bobs"}),
        (OPERATOR, {"Open", "Staff", "Private", "Bobs"}),
        (BOB, {"Open", "Bobs"}),
        (colleague, {"Open", "Staff"}),
        (GUEST, {"Open"}),
    )
    for caller, expected in views:
        assert set(await shop.titles("eats fish", caller)) == expected
        assert (await shop.room.collection(caller, "hers")).documents == len(expected)
        listed, total = await shop.room.documents(caller, "hers", 0, 100)
        assert {document.title for document in listed} == expected
        assert total == len(expected)


async def test_permissions_that_change_while_a_document_is_ingested_again_stay_changed(tmp_path: Path) -> None:
    """One document comes with new content, the other with new metadata; neither with permissions."""

    class Embedder(FakeEmbedder):
        """The owner makes both private while the new content is being embedded."""

        async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
            for one in (await opened.room.documents(OPERATOR, None, 0, 2))[0]:
                await opened.room.describe(OPERATOR, one.id, permissions=PRIVATE)
            return await super().embed(texts)

    async with workshop(tmp_path, embedder=Embedder()) as opened:
        await opened.collection()
        await opened.put("Herons eat fish.", "Otters eat fish.")
        again = [text("Herons eat frogs."), text("Otters eat fish.", metadata={"tags": ["river"]})]
        job = await opened.room.ingest(OPERATOR, "notes", again)
        await opened.ingest_pending()
        assert [item.outcome for item in (await opened.room.job(OPERATOR, job)).items] == ["replaced", "updated"]
        kept, _ = await opened.room.documents(OPERATOR, None, 0, 3)
        assert [one.permissions for one in kept] == [PRIVATE, PRIVATE]


async def test_changed_permissions_apply_to_the_next_search(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    shop.writer.fold()
    [seen] = await shop.find("herons", BOB)
    assert seen.document_id is not None
    await shop.room.describe(OPERATOR, seen.document_id, permissions=PRIVATE)
    assert await shop.find("herons", BOB) == []
    with pytest.raises(NotFound):
        await shop.room.document(BOB, seen.document_id)
    await shop.room.describe(OPERATOR, seen.document_id, permissions=Permissions(visibility="public"))
    assert len(await shop.find("herons", BOB)) == 1


async def test_a_private_collection_is_not_found_by_others(shop: Workshop) -> None:
    await shop.collection("closed", ALICE, default_permissions=PRIVATE)
    await shop.put("Herons eat fish.", collection="closed", caller=ALICE)
    assert "closed" not in {one.collection.name for one in await shop.room.collections(BOB)}
    for attempt in (shop.room.collection(BOB, "closed"), shop.room.delete_collection(BOB, "closed")):
        with pytest.raises(NotFound):
            await attempt
    with pytest.raises(NotFound):
        await shop.room.ingest(BOB, "closed", [text("Mine now.")])
    assert await shop.find("herons", BOB, collections=("closed",)) == []


async def test_only_the_owner_can_change_a_document(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    [seen] = await shop.find("herons", BOB)
    assert seen.document_id is not None
    for attempt in (
        shop.room.describe(BOB, seen.document_id, title="Mine"),
        shop.room.delete_document(BOB, seen.document_id),
        shop.room.delete_collection(BOB, "notes"),
        shop.room.ingest(BOB, "notes", [text("Mine now.")]),
    ):
        with pytest.raises(Forbidden):
            await attempt


async def test_two_owners_may_have_collections_of_one_name(shop: Workshop) -> None:
    await shop.collection("mine", ALICE)
    await shop.collection("mine", BOB)
    await shop.put("Alices fish.", collection="mine", caller=ALICE)
    await shop.put("Bobs fish.", collection="mine", caller=BOB)
    assert await shop.titles("fish", ALICE, collections=("mine",)) == ["Alices"]
    assert await shop.titles("fish", BOB, collections=("mine",)) == ["Bobs"]
    with pytest.raises(Conflict):
        await shop.collection("mine", ALICE)


@pytest.mark.parametrize("name", ["", "   ", "a" * 101, "tab\there", "new\nline"])
async def test_invalid_collection_names_are_refused(shop: Workshop, name: str) -> None:
    with pytest.raises(InvalidQuestion):
        await shop.collection(name)


@pytest.mark.parametrize("name", ["\u0441\u043e\u0440\u0443", "\u2ca3\u2c9f\u2ca3", "hand\u00adbook"])
async def test_a_collection_keeps_a_name_that_no_new_one_may_have(shop: Workshop, name: str) -> None:
    settings = (await shop.room.collection(OPERATOR, "notes")).collection.settings
    made: dict[str, Any] = {"owner": "", "name": name, "description": "", "settings": settings}
    await shop.database.write(lambda db: collections.create(db, **made))
    await shop.put("Herons eat fish.", collection=name)
    assert await shop.titles("fish", collections=(name,)) == ["Herons"]
    assert (await shop.room.describe_collection(OPERATOR, name, description="Birds")).description == "Birds"
    assert (await shop.room.publish(OPERATOR, name, "shop", "birds")).name == name
    assert (await shop.room.delete_collection(OPERATOR, name))[0] == 1


async def test_another_embedding_model_is_refused(shop: Workshop) -> None:
    with pytest.raises(InvalidQuestion, match="embedding_model"):
        await shop.collection("other", embedding_model="text-embedding-3-small")


async def test_one_bad_document_does_not_fail_the_job(shop: Workshop) -> None:
    bad = NewDocument(source="file", data=b"%PDF-1.7 nothing of a PDF", filename="bad.pdf")
    job = await shop.room.ingest(OPERATOR, "notes", [text("Herons eat fish."), bad, text("Otters eat fish.")])
    await shop.ingest_pending()
    seen = await shop.room.job(OPERATOR, job)
    assert [item.status for item in seen.items] == ["completed", "failed", "completed"]
    assert (seen.status, seen.processed, seen.failed) == ("completed", 3, 1)
    assert seen.items[1].error
    assert len(await shop.find("fish")) == 2


async def test_a_cancelled_job_keeps_stored_documents_and_drops_pending_ones(shop: Workshop) -> None:
    many = [text(f"Number{n} eats fish.") for n in range(40)]
    job = await shop.room.ingest(OPERATOR, "notes", many)
    await shop.indexer._step()
    seen = await shop.room.cancel(OPERATOR, job)
    assert seen.status == "cancelled"
    kept = sum(item.status == "completed" for item in seen.items)
    assert 0 < kept < 40
    await shop.ingest_pending()
    assert (await shop.room.collection(OPERATOR, "notes")).documents == kept
    assert shop.database.reading(lambda db: db.execute("SELECT count(*) FROM uploads").fetchone()[0]) == 0


async def test_claims_of_a_dead_indexer_are_released(shop: Workshop) -> None:
    await shop.room.ingest(OPERATOR, "notes", [text("Herons eat fish.")])
    await shop.database.write(lambda db: jobs.claim(db, 10))
    await shop.ingest_pending()
    assert await shop.find("herons") == []
    await shop.database.write(jobs.recover)
    await shop.ingest_pending()
    assert len(await shop.find("herons")) == 1


async def test_a_document_that_keeps_crashing_the_indexer_fails(shop: Workshop) -> None:
    job = await shop.room.ingest(OPERATOR, "notes", [text("Herons eat fish."), text("Otters eat fish.")])
    for _ in range(jobs.ATTEMPTS):
        await shop.database.write(lambda db: jobs.claim(db, 1))
        await shop.database.write(jobs.recover)
    await shop.ingest_pending()
    assert [item.status for item in (await shop.room.job(OPERATOR, job)).items] == ["failed", "completed"]


async def test_jobs_are_visible_to_their_owner_only(shop: Workshop) -> None:
    await shop.collection("hers", ALICE)
    job = await shop.put("Herons eat fish.", collection="hers", caller=ALICE)
    with pytest.raises(NotFound):
        await shop.room.job(BOB, job)
    with pytest.raises(NotFound):
        await shop.room.cancel(BOB, job)


async def test_pages_of_documents_are_complete_and_in_order(shop: Workshop) -> None:
    await shop.put(*[f"Number{n} eats fish." for n in range(23)])
    seen: list[str] = []
    after = 0
    while True:
        page, total = await shop.room.documents(OPERATOR, "notes", after, 5)
        assert total == 23
        if not page:
            break
        seen += [document.title for document in page]
        after = page[-1].key
    assert seen == [f"Number{n}" for n in range(23)]


async def test_query_variants_and_hypothetical_answer_extend_the_search(shop: Workshop) -> None:
    await shop.put("Herons eat fish.", "Bakers knead dough.", "Masons lay bricks.")
    plain = Query(text="herons", limit=1, similarity_threshold=0, filters=Filters())
    wide = Query(text="herons", limit=3, similarity_threshold=0, variants=("dough",), hypothetical="Masons lay bricks.")
    assert [p.title for p in await shop.room.search(plain, OPERATOR)] == ["Herons"]
    assert {p.title for p in await shop.room.search(wide, OPERATOR)} == {"Herons", "Bakers", "Masons"}


async def test_search_agrees_with_the_records_after_random_changes(tmp_path: Path) -> None:
    """Whatever is done in whatever order, a search finds exactly what the records hold."""
    chance = random.Random(4)
    kept: set[str] = set()
    async with workshop(tmp_path) as shop:
        await shop.collection()
        for step in range(120):
            match chance.randrange(6):
                case 0 | 1 | 2:
                    await shop.put(f"Number{chance.randrange(30)} is of step {step} and eats fish.")
                case 3:
                    listed, _ = await shop.room.documents(OPERATOR, None, 0, 100)
                    if listed:
                        await shop.room.delete_document(OPERATOR, chance.choice(listed).id)
                case 4:
                    shop.writer.fold()
                case _:
                    shop.writer.compact() if chance.random() < 0.5 else shop.writer.rebuild()
            found = {p.text for p in await shop.find("eats fish", limit=100)}
            kept = shop.database.reading(lambda db: {row[0] for row in db.execute("SELECT content FROM contents")})
            assert found == kept, step
        async with workshop(tmp_path) as fresh:  # another process that starts now sees the same
            assert {p.text for p in await fresh.find("eats fish", limit=100)} == kept


async def test_number_of_metadata_attributes_is_limited(shop: Workshop) -> None:
    assert len(attributes.of({f"k{n}": n for n in range(1_000)})) <= attributes.MAX_ATTRIBUTES
    with pytest.raises(InvalidQuestion, match="larger"):
        await shop.put("Herons eat fish.", metadata={"blob": "x" * 100_000})
