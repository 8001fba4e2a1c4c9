"""Segments are verified in the background, and what readers report is rebuilt."""

import asyncio
import shutil
from pathlib import Path

from anabranch.app.index_scrubber import IndexScrubber, scrubbing
from support.knowledge_fixtures import Workshop, workshop

LOOK_S = 0.01


async def indexed(shop: Workshop) -> str:
    await shop.collection()
    await shop.put("Herons eat fish.")
    name: str
    [name] = shop.writer.fold().segments
    return name


async def rebuilt(shop: Workshop, name: str) -> None:
    while name in (now := shop.generations.current()).segments or not now.segments:  # noqa: ASYNC110  a thread writes
        await asyncio.sleep(LOOK_S)


async def test_index_verify_interval_is_when_damage_is_found(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        name = await indexed(shop)
        scrubber = IndexScrubber(shop.writer, 0.05, None, look_s=LOOK_S)
        task = asyncio.create_task(scrubber.run())
        await asyncio.sleep(LOOK_S)
        with (shop.generations.path(name) / "codes.bin").open("r+b") as file:
            file.write(b"\x55")
        await rebuilt(shop, name)
        assert await shop.titles("fish") == ["Herons"]
        scrubber.stop()
        task.cancel()
        await asyncio.wait([task])


async def test_what_a_reader_reports_is_rebuilt_at_once(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        name = await indexed(shop)
        async with scrubbing(shop.writer, 86_400, None):
            await asyncio.sleep(0.1)
            shutil.rmtree(shop.generations.path(name))
            assert await shop.titles("fish") == []
            await rebuilt(shop, name)
            assert await shop.titles("fish") == ["Herons"]
