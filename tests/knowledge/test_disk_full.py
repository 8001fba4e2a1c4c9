"""On a full disk, deleting and cancelling work, and what adds fails with a reason and changes nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.knowledge.disk import LEAST_FREE, RESERVE, RESERVE_BYTES, is_nearly_full, keep_reserve, release_reserve
from anabranch.knowledge.records.database import Database, DiskFull
from support.full_disk import SmallDisk, add_until_full, small_disk
from support.knowledge_fixtures import OPERATOR, Workshop, text, workshop

PAGES = 600


@pytest.fixture
async def filled(tmp_path: Path) -> AsyncIterator[tuple[Workshop, SmallDisk]]:
    """Records of several megabytes, uploads that wait, the reserve, and not a free byte."""
    with small_disk(tmp_path / "disk", 2 * LEAST_FREE >> 20) as disk:
        async with workshop(disk.folder / "data") as shop:
            await shop.collection()
            words = " ".join(f"word{number}" for number in range(2_000))
            await shop.put(*(f"{number} {words}" for number in range(PAGES // 20)))
            await shop.put("Herons eat fish.")
            keep_reserve(shop.folder, shop.database.path.stat().st_size)
            assert (shop.folder / RESERVE).stat().st_size == RESERVE_BYTES
            disk.fill()
            yield shop, disk


async def test_a_collection_is_deleted_on_a_full_disk(filled: tuple[Workshop, SmallDisk]) -> None:
    shop, disk = filled
    with pytest.raises(DiskFull, match="full"):
        await add_until_full(shop)
    assert (shop.folder / RESERVE).exists()
    count, _ = await shop.room.delete_collection(OPERATOR, "notes")
    assert count == PAGES // 20 + 1
    assert not (shop.folder / RESERVE).exists()
    assert "notes" not in {one.collection.name for one in await shop.room.collections(OPERATOR)}
    disk.empty()
    await shop.collection("again")


async def test_a_document_is_deleted_and_a_job_cancelled_on_a_full_disk(filled: tuple[Workshop, SmallDisk]) -> None:
    shop, disk = filled
    disk.empty()
    job = await shop.room.ingest(OPERATOR, "notes", [text(f"{number} waits") for number in range(50)])
    disk.fill()
    with pytest.raises(DiskFull):
        await shop.room.ingest(OPERATOR, "notes", [text("Newts " + "eat " * 2_000_000)])
    cancelled = await shop.room.cancel(OPERATOR, job)
    assert {item.status for item in cancelled.items} == {"cancelled"}
    await shop.room.delete_document(OPERATOR, "Herons")
    assert "Herons" not in await shop.titles("herons fish")


async def test_records_are_opened_on_a_full_disk_to_delete(filled: tuple[Workshop, SmallDisk]) -> None:
    shop, disk = filled
    shop.database.close()  # deletes the files beside the records, whose space is then used up
    disk.fill()
    database = Database.open(shop.folder)
    database.writing(lambda db: db.execute("DELETE FROM collections"), deleting=True)
    database.close()


def test_the_reserve_is_kept_unless_the_disk_is_nearly_full(tmp_path: Path) -> None:
    for records, reserve in (
        (0, RESERVE_BYTES),
        (RESERVE_BYTES, RESERVE_BYTES),
        (RESERVE_BYTES * 24, RESERVE_BYTES * 2),
    ):
        keep_reserve(tmp_path, records)
        assert (tmp_path / RESERVE).stat().st_size == reserve
    assert release_reserve(tmp_path)
    assert not release_reserve(tmp_path)
    assert not is_nearly_full(tmp_path / "missing")
    with small_disk(tmp_path / "disk", 16) as disk:
        assert is_nearly_full(disk.folder)
        keep_reserve(disk.folder, 0)
        assert not (disk.folder / RESERVE).exists()
