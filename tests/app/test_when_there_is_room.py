"""The indexer waits while the disk is full, and goes on when there is room again."""

import asyncio
import errno
from pathlib import Path

import pytest

from anabranch.app.indexer import when_there_is_room
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.knowledge.disk import LEAST_FREE
from anabranch.knowledge.records.database import DiskFull
from support.full_disk import small_disk
from support.knowledge_fixtures import OPERATOR, text, workshop
from support.log_lines import Lines

LOOK_S = 0.01
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def data_folder(folder: Path) -> Path:
    (folder / "records.sqlite").touch()
    return folder


@pytest.mark.parametrize("failure", [NO_SPACE, DiskFull("full"), ExceptionGroup("both", [NO_SPACE, DiskFull("full")])])
async def test_what_fails_on_a_full_disk_is_run_again(tmp_path: Path, failure: Exception) -> None:
    runs, lines = 0, Lines()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise failure

    await when_there_is_room(data_folder(tmp_path), work, lines.log, least_free=0, look_s=LOOK_S)
    assert (runs, lines.events) == (2, ["disk_full", "disk_has_room"])


async def test_another_failure_ends_the_indexer(tmp_path: Path) -> None:
    async def work() -> None:
        raise ExceptionGroup("both", [NO_SPACE, AnabranchError("something else")])

    with pytest.raises(ExceptionGroup):
        await when_there_is_room(data_folder(tmp_path), work, Lines().log, least_free=0, look_s=LOOK_S)


async def test_the_indexer_waits_for_room_and_indexes_then(tmp_path: Path) -> None:
    lines = Lines()
    with small_disk(tmp_path / "disk", 2 * LEAST_FREE >> 20) as disk:
        async with workshop(disk.folder / "data") as shop:
            await shop.collection()
            await shop.put("Herons eat fish.")
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                shop.writer.fold()
            indexing = asyncio.create_task(when_there_is_room(shop.folder, shop.indexer.run, lines.log, look_s=LOOK_S))
            while not lines.events:  # noqa: ASYNC110  the disk is full
                await asyncio.sleep(LOOK_S)
            disk.empty()
            job = await shop.room.ingest(OPERATOR, "notes", [text("Otters eat fish.")])
            while (await shop.room.job(OPERATOR, job)).completed_at is None:  # noqa: ASYNC110  a thread writes
                await asyncio.sleep(LOOK_S)
            indexing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await indexing
            shop.writer.fold()
            assert sorted(await shop.titles("fish")) == ["Herons", "Otters"]
    assert lines.events == ["disk_full", "disk_has_room"]


async def test_records_that_are_gone_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    lines = Lines()
    with pytest.raises(ConfigurationError, match=r"records\.sqlite\) are gone"):
        await when_there_is_room(tmp_path, asyncio.Event().wait, lines.log)  # type: ignore[arg-type]


async def test_erasing_goes_on_while_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        erased = asyncio.Event()

        async def erase() -> None:
            erased.set()
            raise DiskFull("full")

        lines, never = Lines(), asyncio.Event()

        async def work() -> None:
            await never.wait()

        waiting = asyncio.create_task(
            when_there_is_room(data_folder(disk.folder), work, lines.log, erase=erase, look_s=LOOK_S)
        )
        async with asyncio.timeout(5):
            await erased.wait()
        assert not waiting.done()
        waiting.cancel()
