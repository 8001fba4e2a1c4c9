"""What makes a process not ready, and that it becomes ready again by itself."""

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.app import readiness
from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.readiness import Readiness
from anabranch.knowledge.disk import LEAST_FREE
from anabranch.knowledge.records.database import DiskFull
from anabranch.knowledge.records.sqlite import BUSY_S, NAME, SqliteDatabase
from support.full_disk import add_until_full, small_disk
from support.knowledge_fixtures import Workshop, workshop


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path / "data") as opened:
        await opened.collection()
        await opened.put("Herons eat fish.")
        opened.writer.fold()
        yield opened


async def reason(shop: Workshop, **given: Any) -> str | None:
    async def opened() -> Any:
        return shop.room

    opener = SimpleNamespace(exists=(shop.folder / NAME).exists(), is_open=True)
    opener = cast("Any", type("Opener", (), {**vars(opener), "__call__": lambda _: opened()})())
    return await Readiness(cast("KnowledgeOpener", opener), shop.folder, **given).reason()


async def test_an_undamaged_folder_is_ready(shop: Workshop) -> None:
    assert await reason(shop) is None


async def test_a_nearly_full_disk(shop: Workshop) -> None:
    assert await reason(shop, least_free=1 << 62) == "disk_full"


async def test_a_quota_that_is_used_up(shop: Workshop, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 * LEAST_FREE >> 20) as disk:
        async with workshop(disk.folder / "data") as other:
            disk.fill()
            with pytest.raises(DiskFull):
                await add_until_full(other)
            assert await reason(other, least_free=0) == "disk_full"  # the file system has room, says the quota
            disk.empty()
            assert await reason(other, least_free=0) is None


async def test_a_damaged_segment(shop: Workshop) -> None:
    shutil.rmtree(shop.generations.path(shop.generations.current().segments[0]))
    assert await reason(shop) is None  # nobody has opened it
    await shop.find("fish")
    assert await reason(shop) == "index_damaged"
    shop.writer.repair()
    assert await reason(shop) is None


async def test_records_that_cannot_be_read(shop: Workshop) -> None:
    shop.database.compact()  # nothing is left in the log
    (shop.folder / NAME).write_bytes(b"no database" * 1_000)
    assert await reason(shop) == "records_not_writable"


async def test_records_that_are_locked_for_long(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect((shop.folder / NAME), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await reason(shop) is None
        assert isinstance(shop.database, SqliteDatabase)
        shop.database._locked_since -= BUSY_S
        assert await reason(shop) == "records_not_writable"
        other.execute("ROLLBACK")
    assert await reason(shop) is None


async def test_the_state_is_checked_once_a_second(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Path] = []
    monkeypatch.setattr(readiness, "is_nearly_full", lambda folder, _: checks.append(folder))

    async def opened() -> Any:
        return shop.room

    opener = cast("Any", type("Opener", (), {"exists": True, "is_open": False, "__call__": lambda _: opened()})())
    ready = Readiness(opener, shop.folder)
    for _ in range(20):
        assert await ready.reason() is None
    assert len(checks) == 1


async def test_a_process_whose_other_threads_are_all_in_use_is_ready(shop: Workshop) -> None:
    loop, free = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
    busy = asyncio.create_task(asyncio.to_thread(free.wait))
    try:
        assert await asyncio.wait_for(reason(shop), 30) is None
    finally:
        free.set()
        await busy
