"""A damaged segment of the index is found, left out, and rebuilt from the records."""

import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from anabranch.domain.model import Query
from anabranch.knowledge.index.manifest import (
    CURRENT,
    IndexManifest,
    SegmentDamaged,
    checksum_of_files,
    decoded,
    encoded,
)
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.index.segment import MIN_BINARY_ROWS, BinaryVectors, Postings, Segment
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import StoreFailed
from anabranch.knowledge.search import Searcher
from support.knowledge_fixtures import OPERATOR, Workshop, flip, workshop
from support.log_lines import Lines

pytestmark = pytest.mark.segments

ANIMALS = ("Herons", "Otters", "Beavers")
QUESTION = Query(text="fish", limit=10, similarity_threshold=0.0)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    """Three segments of one document each."""
    async with workshop(tmp_path / "data") as opened:
        await opened.collection()
        for animal in ANIMALS:
            await opened.put(f"{animal} eat fish.")
            opened.writer.fold()
        assert len(opened.generations.current().segments) == 3
        yield opened


def another_process(shop: Workshop, damaged: Callable[[str], None] = lambda _: None) -> Knowledge:
    reader = IndexReader(shop.generations, damaged)
    return Knowledge(
        database=shop.database,
        index=reader,
        searcher=Searcher(shop.database, reader, shop.embedder, None),
        embedder=shop.embedder,
    )


async def found(room: Knowledge) -> tuple[set[str], bool]:
    hits = await room.find(QUESTION, OPERATOR)
    return {passage.title for passage in hits.passages}, hits.partial


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: flip(folder / "vectors.bin", 7),
    "a file that is gone": lambda folder: (folder / "keys.bin").unlink(),
    "a shorter file": lambda folder: (folder / "terms.bin").write_bytes(b"\0" * 3),
    "a folder that is gone": shutil.rmtree,
    "a file too many": lambda folder: (folder / "reach").write_bytes(b"1 1"),
}


@pytest.mark.parametrize("how", DAMAGE)
async def test_what_is_damaged_when_it_is_opened_is_left_out_and_rebuilt(shop: Workshop, how: str) -> None:
    name = shop.generations.current().segments[1]
    DAMAGE[how](shop.generations.path(name))
    room = another_process(shop)
    assert await found(room) == ({"Herons", "Beavers"}, True)
    assert shop.writer.reported()
    assert shop.writer.repair() == (name,)
    assert await found(room) == (set(ANIMALS), False)
    manifest = shop.generations.current()
    assert (manifest.damaged, set(manifest.checksums)) == ((), set(manifest.segments))
    assert not shop.writer.reported()


async def test_a_segment_damaged_while_it_is_open_is_left_out_once_it_is_verified(shop: Workshop) -> None:
    room = another_process(shop)
    assert await found(room) == (set(ANIMALS), False)
    name = shop.generations.current().segments[0]
    with (shop.generations.path(name) / "vectors.bin").open("r+b") as file:  # in the pages that readers have mapped
        file.write(b"\xff\xff")
    read: list[int] = []
    assert shop.writer.verify(read.append) == (name,)
    assert sum(read) > 0
    assert await found(room) == ({"Otters", "Beavers"}, True)
    assert await room.is_index_damaged()
    shop.writer.repair()
    assert not await room.is_index_damaged()
    assert await found(room) == (set(ANIMALS), False)


async def test_partial_results_are_not_cached(shop: Workshop) -> None:
    shutil.rmtree(shop.generations.path(shop.generations.current().segments[2]))
    assert (await shop.room.find(QUESTION, OPERATOR)).seen == ""


async def test_adjacent_damaged_segments_and_the_last_one_are_rebuilt(shop: Workshop) -> None:
    for name in shop.generations.current().segments[1:]:
        flip(shop.generations.path(name) / "codes.bin", 0)
    await shop.put("Newts eat worms.")
    fresh = IndexWriter(shop.database, shop.generations, shop.embedder.name)
    fresh.fold()
    assert await found(another_process(shop)) == ({*ANIMALS, "Newts"}, False)


async def test_deleted_documents_do_not_come_back(shop: Workshop) -> None:
    await shop.room.delete_document(OPERATOR, "Otters")
    flip(shop.generations.path(shop.generations.current().segments[1]) / "rows.bin", 0)
    IndexWriter(shop.database, shop.generations, shop.embedder.name).fold()
    assert await found(another_process(shop)) == ({"Herons", "Beavers"}, False)
    assert len(shop.generations.current().segments) == 2


async def test_damage_does_not_get_a_new_checksum_when_segments_are_merged(shop: Workshop) -> None:
    flip(shop.generations.path(shop.generations.current().segments[0]) / "counts.bin", 0)  # after the writer opened it
    shop.writer.compact()
    assert len(shop.generations.current().segments) == 1
    [name] = shop.generations.current().segments
    merged = Segment.map(shop.generations.path(name), shop.generations.current().dimensions)
    assert set(merged.words.counts.tolist()) == {1}


async def test_segments_of_earlier_versions_are_served_and_get_a_checksum(shop: Workshop) -> None:
    manifest = shop.generations.current()
    old: dict[str, object] = {"number": manifest.number, "seq": manifest.seq, "last_chunk": manifest.last_chunk}
    old |= {"embedder": manifest.embedder, "dimensions": manifest.dimensions, "segments": manifest.segments}
    (shop.generations.folder / CURRENT).write_bytes(msgspec.json.encode(old))
    room = another_process(shop)
    assert await found(room) == (set(ANIMALS), False)
    fresh = IndexWriter(shop.database, shop.generations, shop.embedder.name)
    assert fresh.repair() == ()
    rebuilt = shop.generations.current()
    assert set(rebuilt.checksums) == set(rebuilt.segments)
    assert not set(rebuilt.segments) & set(manifest.segments)
    assert await found(room) == (set(ANIMALS), False)


async def test_a_damaged_manifest_is_found_and_the_index_rebuilt(shop: Workshop) -> None:
    current = shop.generations.folder / CURRENT
    whole = current.read_bytes()
    for at in range(len(whole)):
        with pytest.raises(SegmentDamaged):
            decoded(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    flip(current, len(whole) // 2)
    room = another_process(shop)
    assert await room.is_index_damaged()
    assert await found(room) == (set(ANIMALS), False)  # from the records
    shop.writer.fold()
    assert not await room.is_index_damaged()
    assert await found(room) == (set(ANIMALS), False)


LOSSES: dict[str, Callable[[Path], object]] = {
    "a damaged manifest": lambda index: flip(index / CURRENT, 20),
    "an empty manifest": lambda index: (index / CURRENT).write_bytes(b""),
    "a manifest that is gone": lambda index: (index / CURRENT).unlink(),
    "an index that is gone": shutil.rmtree,
}


@pytest.mark.parametrize("how", LOSSES)
async def test_without_a_manifest_answers_are_complete_and_the_index_is_rebuilt(shop: Workshop, how: str) -> None:
    noticed: list[str] = []
    open_before, opened_later = another_process(shop, noticed.append), another_process(shop)
    assert await found(open_before) == (set(ANIMALS), False)
    assert not await open_before.is_index_damaged()
    index = open_before._index
    assert isinstance(index, IndexReader)
    segments = index.manifest.segments
    LOSSES[how](shop.generations.folder)
    assert await found(open_before) == (set(ANIMALS), False)
    assert index.manifest.segments == segments  # which it still has
    assert noticed == [CURRENT]
    await shop.put("Newts eat fish.")
    for room in (open_before, opened_later):
        assert await found(room) == ({*ANIMALS, "Newts"}, False)
        assert await room.is_index_damaged()
    lines = Lines()
    fresh = IndexWriter(shop.database, shop.generations, shop.embedder.name, lines.log)
    assert fresh.reported()
    fresh.repair()
    assert lines.events == ["index_damaged"]
    assert len(shop.generations.current().segments) == 1
    for room in (open_before, opened_later):
        assert await found(room) == ({*ANIMALS, "Newts"}, False)
        assert not await room.is_index_damaged()
    assert not fresh.reported()


async def test_chunks_that_were_never_indexed_are_no_damage(tmp_path: Path) -> None:
    async with workshop(tmp_path / "data") as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        assert not await shop.room.is_index_damaged()
        assert not shop.writer.reported()
        assert await found(shop.room) == ({"Herons"}, False)


async def test_an_index_of_an_earlier_version_is_missed_once_it_was_opened(shop: Workshop) -> None:
    shop.database.writing(documents.forget_indexed)
    shop.writer.repair()
    (shop.generations.folder / CURRENT).unlink()
    assert await shop.room.is_index_damaged()


async def test_an_index_of_other_records_is_dropped(shop: Workshop, tmp_path: Path) -> None:
    async with workshop(tmp_path / "other") as other:
        await other.collection()
        await other.put("Newts eat fish.")
        shutil.copytree(shop.generations.folder, other.generations.folder)
        assert await found(other.room) == ({"Newts"}, False)
        assert await other.room.is_index_damaged()
        lines = Lines()
        fresh = IndexWriter(other.database, other.generations, other.embedder.name, lines.log)
        fresh.repair()
        assert lines.events == ["index_of_other_records"]
        assert await found(other.room) == ({"Newts"}, False)
        fresh.fold()
        assert await found(other.room) == ({"Newts"}, False)
        assert not await other.room.is_index_damaged()


async def test_a_disk_that_damages_everything_is_an_error(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise SegmentDamaged

    monkeypatch.setattr(shop.generations, "check", damaged)
    fresh = IndexWriter(shop.database, shop.generations, shop.embedder.name)
    with pytest.raises(StoreFailed, match="Check the disk"):
        fresh.compact()


def test_every_flip_changes_the_checksum_of_a_segment(tmp_path: Path) -> None:
    seeded = random.Random(1)
    numbers = np.random.default_rng(1)
    vectors = numbers.standard_normal((40, 64)).astype(np.float32)
    words = Postings.build([[seeded.randrange(100) for _ in range(9)] for _ in range(40)])
    # A segment of this size has no binary vectors; here they are as small as the others.
    assert len(vectors) < MIN_BINARY_ROWS
    binary = BinaryVectors(np.zeros((1, 40), np.uint64), np.zeros(64, np.float32), 3, 5)
    written = Segment(np.arange(40), vectors, words, binary=binary).write(tmp_path / "segment")
    assert checksum_of_files(tmp_path / "segment") == written
    for file in sorted((tmp_path / "segment").iterdir()):
        for _ in range(10):
            at, mask = seeded.randrange(file.stat().st_size), 1 << seeded.randrange(8)
            flip(file, at, mask)
            assert checksum_of_files(tmp_path / "segment") != written, (file.name, at)
            flip(file, at, mask)


def test_a_manifest_survives_its_encoding() -> None:
    manifest = IndexManifest(number=3, segments=("a",), checksums={"a": "00000000"}, damaged=("a",))
    assert decoded(encoded(manifest)) == manifest
