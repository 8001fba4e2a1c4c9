"""What an owner stores is counted with each document, and limited."""

from pathlib import Path

import pytest

from anabranch.domain.errors import LimitReached, QuotaReached
from anabranch.domain.shares import Limit
from anabranch.knowledge.model import Caller, JobItem, Permissions
from anabranch.knowledge.records.schema import MIGRATIONS, STORED
from anabranch.knowledge.records.sqlite import connect, migrate
from support.knowledge_fixtures import ALICE, BOB, Workshop, text, workshop


def counted(shop: Workshop) -> dict[str, tuple[int, int]]:
    """The count of each owner, which must be what the documents say."""
    summed = "SELECT owner, count(*), sum(stored_bytes + length(metadata)) FROM documents GROUP BY owner ORDER BY owner"
    kept, real = (
        shop.database.reading(lambda db, query=query: db.execute(query).fetchall())  # type: ignore[misc]
        for query in ("SELECT owner, documents, bytes FROM stored ORDER BY owner", summed)
    )
    assert [tuple(row) for row in kept] == [tuple(row) for row in real]
    return {row[0]: (row[1], row[2]) for row in kept}


async def test_what_is_stored_is_counted_with_each_document(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection("hers", ALICE)
        await shop.collection("his", BOB)
        await shop.put("Herons eat fish.", "Otters eat fish.", "Wombats dig.", collection="hers", caller=ALICE)
        await shop.put("Otters eat fish.", collection="his", caller=BOB)
        before = counted(shop)
        assert before["alice"][0] == 3
        await shop.put("Wombats dig, and they dig deep.", collection="hers", caller=ALICE)
        after = counted(shop)
        assert after["alice"][0] == 3
        assert after["alice"][1] > before["alice"][1]
        await shop.room.delete_document(ALICE, "Wombats")
        assert counted(shop)["alice"][0] == 2
        await shop.room.delete_collection(ALICE, "hers")
        assert list(counted(shop)) == ["bob"]


async def test_at_the_limit_a_stored_document_can_have_a_new_version(tmp_path: Path) -> None:
    # Without a request, the limit of the operator counts: four times as many.
    limits = {"documents": Limit(name="documents", description="stored documents", each=0.5)}
    async with workshop(tmp_path, limits=limits) as shop:
        await shop.collection("hers", ALICE)
        await shop.put("Herons eat fish.", "Otters eat fish.", collection="hers", caller=ALICE)
        await shop.put("Otters eat no fish.", collection="hers", caller=ALICE)
        with pytest.raises(QuotaReached, match="your limit of 2 stored documents"):
            await shop.room.ingest(ALICE, "hers", [text("Wombats dig.")])
        await shop.room.delete_document(ALICE, "Herons")
        await shop.put("Wombats dig.", collection="hers", caller=ALICE)
        assert counted(shop)["alice"][0] == 2


async def test_what_the_permissions_of_an_owner_name_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.knowledge.records.documents.MAX_NAMES", 20)
    ten, others, short = (
        Permissions(visibility="restricted", allowed_users=tuple(f"{kind}{number}" for number in range(count)))
        for kind, count in (("a", 10), ("b", 11), ("c", 4))
    )
    async with workshop(tmp_path) as shop:
        await shop.collection("hers", ALICE)
        await shop.collection("his", BOB)

        async def sent(name: str, permissions: Permissions, where: str = "hers", caller: Caller = ALICE) -> JobItem:
            job = await shop.room.ingest(caller, where, [text(f"{name} eat fish.", permissions)])
            await shop.ingest_pending()
            return (await shop.room.job(caller, job)).items[0]

        assert (await sent("Herons", ten)).status == "completed"
        assert (await sent("Otters", ten)).status == "completed", "equal lists count once"
        failed = await sent("Storks", others)
        assert (failed.status, "name 10 users and groups, and may name 20" in (failed.error or "")) == ("failed", True)
        assert (await sent("Storks", short)).status == "completed"
        with pytest.raises(QuotaReached, match="may name 20"):
            await shop.room.describe(ALICE, "Storks", permissions=others)
        assert (await sent("Storks", others, "his", BOB)).status == "completed"
        assert (await sent("Storks", others, "his", BOB)).status == "completed"
        for name in ("Herons", "Otters"):
            await shop.room.delete_document(ALICE, name)
        await shop.room.describe(ALICE, "Storks", permissions=others)


async def test_a_request_of_more_documents_than_may_wait_is_refused(tmp_path: Path) -> None:
    limits = {"pending_documents": Limit(name="pending_documents", description="waiting documents", each=0.5)}
    async with workshop(tmp_path, limits=limits) as shop:
        await shop.collection("hers", ALICE)
        with pytest.raises(LimitReached):
            await shop.room.ingest(ALICE, "hers", [text(f"{number} herons.") for number in range(3)])
        await shop.room.ingest(ALICE, "hers", [text(f"{number} herons.") for number in range(2)])


async def test_a_page_ends_early_where_documents_have_much_metadata(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection("hers", ALICE)
        metadata = {"note": "x" * 60_000}
        await shop.put(
            *(f"{number} herons." for number in range(40)), collection="hers", caller=ALICE, metadata=metadata
        )
        assert counted(shop)["alice"][1] > 40 * 60_000
        first, total = await shop.room.documents(ALICE, "hers", 0, 1_000)
        assert 30 <= len(first) < total == 40
        rest, _ = await shop.room.documents(ALICE, "hers", first[-1].key, 1_000)
        assert len(first) + len(rest) == total


def test_records_of_before_are_counted(tmp_path: Path) -> None:
    connection = connect(tmp_path / "records.sqlite")
    migrate(connection, MIGRATIONS[: MIGRATIONS.index(STORED)])
    connection.execute("PRAGMA foreign_keys = OFF")
    columns = "id, collection, owner, source, identity, title, content_hash, recipe, metadata, visibility"
    more = "allowed_users, allowed_groups, day, first_chunk, chunk_count, tokens, size, created_at, updated_at"
    for number, owner in enumerate(("alice", "alice", "bob")):
        values = (str(number), 1, owner, "text", str(number), "", "", "", "{}", "public", "[]", "[]", *(0,) * 7, 10)
        places = ", ".join("?" * len(values))
        sql = f"INSERT INTO documents ({columns}, {more}, stored_bytes) VALUES ({places})"
        connection.execute(sql, values)
    migrate(connection)
    assert [tuple(row) for row in connection.execute("SELECT * FROM stored")] == [("alice", 2, 24), ("bob", 1, 12)]
    connection.close()
