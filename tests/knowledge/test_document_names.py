"""Documents by file name and title, what a connector has sent, a changed title, and the bytes of a collection."""

import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from anabranch.domain.errors import Conflict, NotFound
from anabranch.domain.model import Filters
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.model import Caller, NewDocument, Permissions
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Session
from support.knowledge_fixtures import ALICE, BOB, GUEST, OPERATOR, Workshop, workshop

PRIVATE = Permissions(visibility="private")


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        yield opened


async def add(
    shop: Workshop, *names: tuple[str | None, str], caller: Caller = OPERATOR, to: str = "notes"
) -> list[str]:
    """Store documents with these file names and titles; their ids."""
    arrived = [
        NewDocument(source="text", data=f"{name} {title} {to}".encode(), filename=name, title=title, identity=None)
        for name, title in names
    ]
    job = await shop.room.ingest(caller, to, arrived)
    await shop.ingest_pending()
    return [item.document_id for item in (await shop.room.job(caller, job)).items]


async def found(shop: Workshop, name: str, caller: Caller = OPERATOR) -> str:
    return (await shop.room.document(caller, name)).id


async def test_a_document_is_found_by_id_then_file_name_then_title_then_ignoring_case(shop: Workshop) -> None:
    handbook, plan, other = await add(
        shop, ("hr/handbook.md", "Handbook"), ("plan.txt", "hr/handbook.md"), (None, "plan.txt")
    )
    assert await found(shop, handbook) == handbook
    assert await found(shop, "hr/handbook.md") == handbook
    assert await found(shop, "Handbook") == handbook
    assert await found(shop, "plan.txt") == plan
    assert await found(shop, "HANDBOOK") == handbook
    await shop.room.delete_document(OPERATOR, "plan.txt")
    assert await found(shop, "plan.txt") == other


async def test_a_name_of_several_documents_is_a_conflict_that_shows_id_file_and_collection(shop: Workshop) -> None:
    await shop.collection("more")
    ids = [*await add(shop, ("a.md", "Plan"), ("b.md", "Plan")), *await add(shop, ("a.md", "Plan"), to="more")]
    with pytest.raises(Conflict) as refused:
        await shop.room.document(OPERATOR, "Plan")
    shown = ("'a.md', 'Plan' in 'notes'", "'b.md', 'Plan' in 'notes'", "'a.md', 'Plan' in 'more'")
    assert all(f"{one} ({told})" in refused.value.message for one, told in zip(ids, shown, strict=True))
    for call in (shop.room.delete_document, shop.room.retry):
        with pytest.raises(Conflict):
            await call(OPERATOR, "a.md")
    assert await found(shop, "b.md") == ids[1]


async def test_a_conflict_shows_ten_of_many_documents(shop: Workshop) -> None:
    await add(shop, *((f"{n}.md", "Plan") for n in range(12)))
    with pytest.raises(Conflict, match="more than 10") as refused:
        await shop.room.document(OPERATOR, "plan")
    assert refused.value.message.count("'Plan' in 'notes')") == 10


async def test_names_are_resolved_among_what_the_caller_may_see(shop: Workshop) -> None:
    await shop.collection("hers", caller=ALICE, default_permissions=PRIVATE)
    (hers,) = await add(shop, ("plan.md", "Secret plan"), caller=ALICE, to="hers")
    (public,) = await add(shop, ("plan.md", "Open plan"))
    assert await found(shop, "plan.md", BOB) == public
    assert await found(shop, "Secret plan", ALICE) == hers
    for name in ("Secret plan", "secret plan", "Secret pla", hers):
        with pytest.raises(NotFound) as refused:
            await shop.room.document(BOB, name)
        assert "Secret plan'" not in refused.value.message.replace(repr(name), "")
    with pytest.raises(Conflict):
        await shop.room.document(ALICE, "plan.md")


@pytest.mark.parametrize("written", [str, str.upper])
async def test_an_id_never_stands_for_a_document_that_is_named_like_it(
    shop: Workshop, written: Callable[[str], str]
) -> None:
    (hers,) = await add(shop, ("plan.md", "Plan"), caller=ALICE, to=await shop.collection("hers", caller=ALICE))
    theirs = await shop.collection("theirs", caller=BOB)
    await add(shop, ("a.md", written(hers)), (written(hers), "b"), caller=BOB, to=theirs)
    await shop.room.ingest(BOB, theirs, [NewDocument(source="text", data=b"Waits.", title=written(hers))])
    await shop.room.delete_document(ALICE, hers)
    for name in (hers, written(hers)):
        for caller in (BOB, OPERATOR):
            for attempt in (shop.room.document, shop.room.delete_document, shop.room.retry):
                with pytest.raises(NotFound):
                    await attempt(caller, name)
    _, total = await shop.room.documents(BOB, "theirs", 0, 10)
    assert total == 2


async def test_an_unknown_name_suggests_similar_ones(shop: Workshop) -> None:
    await add(shop, ("handbook.md", "The handbook"))
    with pytest.raises(NotFound, match=r"There is no document 'handbok\.md'\. Did you mean 'handbook\.md'\?"):
        await shop.room.document(OPERATOR, "handbok.md")
    with pytest.raises(NotFound, match=r"There is no document 'x'\.$"):
        await shop.room.document(OPERATOR, "x")
    with pytest.raises(NotFound) as refused:
        await shop.room.document(OPERATOR, "handbook.md" * 5_000)
    assert len(refused.value.message) < 300


async def test_an_unknown_name_costs_no_memory_for_the_metadata_of_failed_documents(shop: Workshop) -> None:
    metadata = {f"field {n}": "x" * 20 for n in range(1_500)}
    documents_sent = [
        NewDocument(source="text", data=b"\xff\xfe\x00", filename=f"{n}.pdf", metadata=metadata) for n in range(100)
    ]
    await shop.room.ingest(ALICE, await shop.collection("hers", caller=ALICE), documents_sent)
    await shop.ingest_pending()
    _, failed = await shop.room.documents(ALICE, None, 0, 1, status="failed")
    assert failed == len(documents_sent)
    tracemalloc.start()
    for call in (shop.room.document, shop.room.retry):
        with pytest.raises(NotFound):
            await call(ALICE, "nonexistent")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert (await shop.room.document(ALICE, "7.PDF")).filename == "7.pdf"


async def test_a_name_is_looked_up_without_reading_what_others_have_stored(shop: Workshop) -> None:
    await shop.collection("hers", caller=ALICE, default_permissions=PRIVATE)
    await add(shop, *((f"{n}.md", "Plan") for n in range(20)), caller=ALICE, to="hers")
    await shop.database.write(lambda db: db.execute("UPDATE documents SET metadata = 'unreadable'"))
    for name in ("Plan", "plan", "3.md", "pla"):
        with pytest.raises(NotFound, match=r"There is no document '[\w.]+'\.$"):
            await shop.room.document(BOB, name)


async def test_hostile_titles_do_not_make_an_unknown_name_expensive(shop: Workshop) -> None:
    await add(shop, *((f"{n:03}" + "bacd" * 24, "bacd" * 24 + f"{n:03}") for n in range(300)))
    begin = time.process_time()
    with pytest.raises(NotFound, match="Did you mean"):
        await shop.room.document(OPERATOR, "abcd" * 25)
    assert time.process_time() - begin < 0.3


@pytest.mark.parametrize("caller", [OPERATOR, ALICE, BOB, GUEST, Caller(user="carol", groups=("other", "staff"))])
async def test_names_follow_the_permissions_of_documents(shop: Workshop, caller: Caller) -> None:
    given = {
        "public": Permissions(visibility="public"),
        "private": PRIVATE,
        "to bob": Permissions(visibility="restricted", allowed_users=("bob", "dave")),
        "to staff": Permissions(visibility="restricted", allowed_users=("eve",), allowed_groups=("staff",)),
        "to nobody": Permissions(visibility="restricted"),
        "private, not to bob": Permissions(visibility="private", allowed_users=("bob",), allowed_groups=("staff",)),
    }
    await shop.collection("hers", caller=ALICE)
    arrived = [
        NewDocument(source="text", data=name.encode(), title=name, permissions=one) for name, one in given.items()
    ]
    await shop.room.ingest(ALICE, "hers", arrived)
    await shop.ingest_pending()
    for name, permissions in given.items():
        seen = shop.database.reading(partial(documents.named, caller=caller, column="title", name=name, limit=5))
        assert bool(seen) == permissions.permits(caller, "alice")
        with pytest.raises(NotFound) as unknown:
            await shop.room.document(caller, f"{name}!")
        assert (repr(name) in unknown.value.message) == permissions.permits(caller, "alice")


async def test_documents_that_are_hidden_do_not_change_which_names_are_suggested(shop: Workshop) -> None:
    await add(shop, ("figures.md", "Quarterly figures"), to=await shop.collection("his", caller=BOB), caller=BOB)
    hidden = await shop.collection("hers", caller=ALICE, default_permissions=PRIVATE)
    for part in range(3):
        sent = [f"{part}-{number}" for number in range(700)]
        await shop.put(*sent, collection=hidden, caller=ALICE)
    with pytest.raises(NotFound, match=r"\. Did you mean 'Quarterly figures'\?$"):
        await shop.room.document(BOB, "Quarterly figurez")


@pytest.mark.segments
async def test_a_changed_title_is_searched_at_once_by_every_process(shop: Workshop) -> None:
    (identifier, _) = await add(shop, ("a.md", "Herons"), ("b.md", "Otters"))
    shop.writer.fold()
    other = IndexReader(shop.generations)
    [chunk] = [one for one in await shop.find("herons") if one.document_id == identifier]
    for title, fold in (("Zeppelins", False), ("Submarines", True), ("Balloons", False)):
        changed = await shop.room.describe(OPERATOR, identifier, title=title)
        assert changed.id == identifier
        for index in (shop.reader, other):
            assert with_word(shop, index, title) == [identifier]
        if fold:
            shop.writer.fold()
    assert with_word(shop, other, "Zeppelins") == []
    [again] = [one for one in await shop.find("balloons") if one.document_id == identifier]
    assert again.place is not None
    assert chunk.place is not None
    assert (again.place.chunk_id, again.text, again.title) == (chunk.place.chunk_id, chunk.text, "Balloons")
    assert shop.database.reading(documents.counts) == (2, 2)
    (third,) = await add(shop, ("c.md", "Storks"))
    assert await shop.titles("storks", limit=1) == ["Storks"]
    assert await found(shop, "c.md") == third


def with_word(shop: Workshop, index: IndexReader, word: str) -> list[str]:
    """The ids of the documents that contain a word, by the word index alone."""

    def read(db: Session) -> list[str]:
        keys, _ = index.view(db, Filters(), OPERATOR).lexical(word).best(10)
        return [row["id"] for row in documents.chunks_by_key(db, OPERATOR, keys.tolist()).values()]

    return shop.database.reading(read)


@pytest.mark.segments
async def test_a_title_that_comes_with_the_same_content_is_searched_at_once(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    shop.writer.fold()
    renamed = NewDocument(source="text", data=b"Herons eat fish.", identity="Herons", title="Zeppelins")
    job = await shop.room.ingest(OPERATOR, "notes", [renamed])
    await shop.ingest_pending()
    assert [one.outcome for one in (await shop.room.job(OPERATOR, job)).items] == ["updated"]
    assert len(with_word(shop, shop.reader, "zeppelins")) == 1


async def test_what_a_connector_has_sent_is_listed_and_found(shop: Workshop) -> None:
    sent = [
        NewDocument(source="api", data=b"Herons eat fish.", title="Herons", connector_id="wiki"),
        NewDocument(source="manual", data=b"Otters eat fish.", title="Otters", connector_id="desk"),
        NewDocument(source="text", data=b"Storks eat fish.", title="Storks", metadata={"connector_id": "wiki"}),
    ]
    await shop.room.ingest(OPERATOR, "notes", sent)
    await shop.ingest_pending()
    listed, total = await shop.room.documents(OPERATOR, "notes", 0, 10, connector_id="wiki")
    assert ([(one.title, one.source, one.connector_id) for one in listed], total) == ([("Herons", "api", "wiki")], 1)
    assert await shop.titles("fish", metadata={"source.connector_id": "desk"}) == ["Otters"]
    await shop.room.describe(OPERATOR, "Otters", title="Sea otters", metadata={"level": 3})
    assert await shop.titles("fish", metadata={"source.connector_id": "desk", "level": 3}) == ["Sea otters"]
    again = NewDocument(source="api", data=b"Herons eat fish.", connector_id="crawler")
    job = await shop.room.ingest(OPERATOR, "notes", [again])
    await shop.ingest_pending()
    assert [one.outcome for one in (await shop.room.job(OPERATOR, job)).items] == ["updated"]
    assert (await shop.room.document(OPERATOR, "Herons")).connector_id == "crawler"


@pytest.mark.segments
async def test_storage_counts_text_vectors_and_index(shop: Workshop) -> None:
    texts = [f"Number{n} describes the animal number {n}, which eats fish and lives in the river." for n in range(40)]
    await shop.put(*texts)
    before = (await shop.room.collection(OPERATOR, "notes")).storage_bytes
    shop.writer.fold()
    counts = await shop.room.collection(OPERATOR, "notes")
    stored = shop.database.reading(
        lambda db: db.execute(
            "SELECT (SELECT sum(length(content)) FROM contents) + (SELECT sum(length(text)) FROM chunks) "
            "+ (SELECT sum(length(vector) + length(tokens)) FROM embeddings)"
        ).fetchone()[0]
    )
    index = sum(path.stat().st_size for path in shop.generations.folder.rglob("*.bin"))
    assert counts.stored_bytes == stored
    assert counts.storage_bytes == before > counts.size
    assert counts.storage_bytes - stored == pytest.approx(index, rel=0.3)


async def test_storage_counts_only_what_the_caller_may_see(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    before = (await shop.room.collection(BOB, "notes")).storage_bytes
    await shop.put("Otters eat crabs.", permissions=PRIVATE)
    shop.writer.fold()
    assert (await shop.room.collection(BOB, "notes")).storage_bytes == before
    assert (await shop.room.collection(OPERATOR, "notes")).storage_bytes > before
