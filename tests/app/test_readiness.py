"""What makes a process not ready, and that it becomes ready again by itself."""

import asyncio
import shutil
import sqlite3
import threading
import time
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
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.records.sqlite import BUSY_S, NAME, SqliteDatabase
from support.full_disk import add_until_full, small_disk
from support.knowledge_fixtures import Workshop, workshop
from support.postgres_server import running_postgres, shared_postgres


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

    opener = SimpleNamespace(exists=(shop.folder / NAME).exists(), is_open=True, is_remote=False)
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


async def of_postgres(room: Any, folder: Path) -> str | None:
    async def opened() -> Any:
        return room

    known = {"exists": True, "is_open": True, "is_remote": True, "__call__": lambda _: opened()}
    return await Readiness(cast("KnowledgeOpener", type("Opener", (), known)()), folder).reason()


@pytest.mark.xdist_group("postgres")
async def test_a_database_that_can_only_be_read(tmp_path: Path) -> None:
    url = shared_postgres().create_database()
    async with workshop(tmp_path / "data", database=PostgresDatabase.open(url)) as shop:
        assert await of_postgres(shop.room, shop.folder.parent) is None
    read_only = PostgresDatabase.open(f"{url}?options=-c%20default_transaction_read_only%3Don")
    async with workshop(tmp_path / "data", database=read_only) as shop:
        assert await of_postgres(shop.room, shop.folder.parent) == "records_not_writable"
    shared_postgres().drop(url)


@pytest.mark.xdist_group("postgres")
@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_a_database_that_cannot_be_reached(tmp_path: Path, how: str) -> None:
    with running_postgres(tmp_path / "postgres", durable=True) as server:
        database = PostgresDatabase.open(server.create_database())
        async with workshop(tmp_path / "data", database=database) as shop:
            assert await of_postgres(shop.room, shop.folder.parent) is None
            getattr(server, how)()
            began = time.monotonic()
            assert await of_postgres(shop.room, shop.folder.parent) == "records_unreachable"
            assert time.monotonic() - began < 2 * readiness.PATIENCE_S
            (server.restart if how == "kill" else server.resume)()
            async with asyncio.timeout(30):
                while await of_postgres(shop.room, shop.folder.parent):  # noqa: ASYNC110  a server that starts
                    await asyncio.sleep(0.05)


async def test_the_state_is_checked_once_a_second(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Path] = []
    monkeypatch.setattr(readiness, "is_nearly_full", lambda folder, _: checks.append(folder))

    async def opened() -> Any:
        return shop.room

    opener = cast(
        "Any",
        type("Opener", (), {"exists": True, "is_open": False, "is_remote": False, "__call__": lambda _: opened()})(),
    )
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
