"""A reader that is overtaken by the writer while it opens a generation."""

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from anabranch.domain.model import Filters
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.index.reader import IndexReader
from support.knowledge_fixtures import OPERATOR, Workshop, workshop

pytestmark = pytest.mark.segments


class Overtaken(Generations):
    """Reads which generation is current, and before anything is done with it there is another."""

    def __init__(self, shop: Workshop) -> None:
        super().__init__(shop.folder / "index")
        self._shop = shop
        self.often = 1

    def intact(self) -> IndexManifest | None:
        seen = super().intact()
        if self.often:
            self.often -= 1
            writing = threading.Thread(target=self._shop.writer.rebuild)  # its own thread has its own snapshot
            writing.start()
            writing.join()
        return seen


async def test_a_reader_retries_when_a_newer_generation_replaced_its_segments(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        shop.writer.fold()
        overtaken = Overtaken(shop)
        reader = IndexReader(overtaken)
        view = shop.database.reading(lambda db: reader.view(db, Filters(), OPERATOR))
        assert (overtaken.often, view.rows) == (0, 1)


async def test_a_missing_segment_is_left_out_until_it_is_rebuilt(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        [name] = shop.writer.fold().segments
        shop.generations.path(name).rename(tmp_path / "elsewhere")
        await shop.put("Otters eat fish.")
        assert await shop.titles("fish") == ["Otters"]
        shop.writer.repair()
        assert sorted(await shop.titles("fish")) == ["Herons", "Otters"]


async def test_a_deleted_index_is_rebuilt_while_readers_use_it(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        shop.writer.fold()
        elsewhere = IndexReader(shop.generations)  # in another process, where nobody asks for a while
        assert shop.database.reading(lambda db: elsewhere.view(db, Filters(), OPERATOR)).rows == 1
        shutil.rmtree(shop.folder / "index")
        await shop.put("Otters eat fish.")
        shop.writer.fold()
        assert shop.database.reading(lambda db: elsewhere.view(db, Filters(), OPERATOR)).rows == 2


class MissingSegment(Generations):
    """The first manifest that is read names a segment that a newer generation has replaced."""

    reads = 0

    def intact(self) -> IndexManifest | None:
        manifest = super().intact()
        self.reads += 1
        if self.reads == 1 and manifest is not None:
            self.publish(manifest)
            return msgspec.structs.replace(manifest, segments=("replaced",))
        return manifest


async def test_a_document_added_while_a_segment_is_replaced_is_found(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        generations = MissingSegment(tmp_path / "index")
        reader = IndexReader(generations)
        assert shop.database.reading(lambda db: reader.view(db, Filters(), OPERATOR)).rows == 1
        generations.reads = 0
        await shop.put("Otters eat fish.")
        shop.generations.publish(shop.generations.current())
        assert shop.database.reading(lambda db: reader.view(db, Filters(), OPERATOR)).rows == 2
