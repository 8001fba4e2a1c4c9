"""On a full disk, deleting and cancelling work, and what adds fails with a reason and changes nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.app.erasure import eraser_for
from anabranch.configuration.settings import Settings
from anabranch.knowledge.disk import LEAST_FREE, RESERVE, RESERVE_BYTES, is_nearly_full, keep_reserve, release_reserve
from anabranch.knowledge.records import erasures
from anabranch.knowledge.records.database import DiskFull
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase
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
            keep_reserve(shop.folder, (shop.folder / NAME).stat().st_size)
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
    assert 0 < (shop.folder / RESERVE).stat().st_size <= RESERVE_BYTES
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


async def test_documents_are_deleted_one_by_one_although_others_fill_the_disk(
    filled: tuple[Workshop, SmallDisk],
) -> None:
    shop, disk = filled
    with pytest.raises(DiskFull):
        await add_until_full(shop)
    for number in range(6):
        await shop.room.delete_document(OPERATOR, str(number))
        disk.fill()
    assert (shop.folder / RESERVE).stat().st_size > RESERVE_BYTES // 2


@pytest.mark.parametrize("fits", [True, False])
async def test_an_erasure_runs_on_a_full_disk_or_says_what_it_waits_for(
    filled: tuple[Workshop, SmallDisk], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, disk = filled
    settings = Settings(data_dir=str(shop.folder))
    eraser = eraser_for(settings, shop.database, shop.writer)
    needed = shop.database.bytes_to_compact() if fits else RESERVE_BYTES * 2
    monkeypatch.setattr(shop.database, "bytes_to_compact", lambda: needed)
    assert needed < RESERVE_BYTES or not fits
    erasure, _ = await shop.room.erase(document="Herons")
    await eraser.erase_due()
    (first,) = shop.database.reading(lambda db: erasures.listed(db, 1))
    waits = "It waits until 17 MB are free on the disk of the data folder: the records are rewritten."
    assert (first.id, first.state, first.error) == (
        erasure.id,
        *(("settling", None) if fits else ("failed", waits)),
    )
    assert (shop.folder / RESERVE).exists()
    disk.empty()
    await eraser.erase_due()
    (then,) = shop.database.reading(lambda db: erasures.listed(db, 1))
    assert (then.state, then.error) == ("settling", None)


async def test_records_are_opened_on_a_full_disk_to_delete(filled: tuple[Workshop, SmallDisk]) -> None:
    shop, disk = filled
    shop.database.close()  # deletes the files beside the records, whose space is then used up
    disk.fill()
    database = SqliteDatabase.open(shop.folder)
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
