"""A data folder that version 0.1.0 wrote: records of schema version 1, an index, and a document not yet in it."""

import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.knowledge.records.schema import MIGRATIONS
from anabranch.knowledge.records.sqlite import NAME, connect
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, Workshop, workshop

ARCHIVE = Path(__file__).parent / "data" / "data_folder_0.1.0.zip"
SECRET = "ab_NWpb5fyrrwLqQs13qmTPeZuW2Lubg5-GFXQ0BSynHAg"


@pytest.fixture
async def released(tmp_path: Path) -> AsyncIterator[Workshop]:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    async with workshop(tmp_path) as opened:
        yield opened


async def test_collections_documents_keys_and_endpoints_of_version_0_1_0_are_read(released: Workshop) -> None:
    counts = {one.collection.name: (one.documents, one.chunks) for one in await released.room.collections(OPERATOR)}
    assert counts == {"handbook": (2, 2), "diary": (1, 1)}
    stored, total = await released.room.documents(OPERATOR, "handbook", 0, 10)
    assert ([one.title for one in stored], total) == (["Boilers", "Lift"], 2)
    boilers = await released.room.document(OPERATOR, stored[0].id, content=True)
    assert (boilers.filename, boilers.metadata["tags"]) == ("boilers.md", ["heating"])
    assert "The warranty of the boiler ends in 2031." in (boilers.content or "")
    key = await released.room.api_key(SECRET)
    assert key is not None
    assert (key.user, key.groups, key.note) == ("alice", ("staff",), "laptop")
    published = [(one.path, one.collection_name) for one in await released.room.published()]
    assert published == [("kay/handbook", "handbook")]
    assert connect(released.folder / NAME).execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)


async def test_a_data_folder_of_version_0_1_0_is_searched_with_its_index(released: Workshop) -> None:
    found = await released.find("When does the warranty end?")
    assert released.reader.manifest.segments == ("segment-1-79d5be",)
    assert [one.title for one in found] == ["Boilers", "Spare key", "Lift"]
    scores = [0.9010335729627034, 0.4483641085632522, 0.23265537736773959]
    assert [one.score for one in found] == pytest.approx(scores, abs=1e-6)
    assert (await released.titles("spare key", ALICE))[0] == "Spare key"
    assert sorted(await released.titles("spare key", BOB)) == ["Boilers", "Lift"]
    assert await released.titles("boiler", tags=("heating",)) == ["Boilers"]


async def test_chunk_types_of_a_data_folder_of_version_0_1_0_can_be_filtered(released: Workshop) -> None:
    everything = await released.find("When does the warranty end?")
    types = {one.place.chunk_type for one in everything if one.place is not None}
    assert types == {"paragraph"}
    assert await released.find("When does the warranty end?", chunk_types=("paragraph",)) == everything
    assert await released.find("When does the warranty end?", chunk_types=("table", "code")) == []
    await released.put("Table-of-floors | floor | lift |", collection="handbook")
    assert len(await released.find("warranty", chunk_types=("paragraph",))) == len(everything) + 1
    assert released.reader.manifest.segments == ("segment-1-79d5be",)


async def test_documents_are_added_to_a_data_folder_of_version_0_1_0(released: Workshop) -> None:
    await released.put("Gutters are cleaned in November.", collection="handbook")
    released.writer.fold()
    assert (await released.titles("Who cleans the gutters?"))[0] == "Gutters"
    assert (await released.titles("warranty of the boiler"))[0] == "Boilers"


async def test_documents_of_version_0_1_0_have_a_state_a_size_and_a_name(released: Workshop) -> None:
    stored = await released.room.document(OPERATOR, "boilers.md")
    assert (stored.title, stored.status, stored.searchable) == ("Boilers", "completed", True)
    assert (stored.processed_at, stored.connector_id) == (stored.updated_at, None)
    handbook = await released.room.collection(OPERATOR, "handbook")
    assert handbook.storage_bytes > handbook.stored_bytes > handbook.size
    assert await released.room.documents(OPERATOR, None, 0, 10, status="failed") == ([], 0)
    await released.room.describe(OPERATOR, "Lift", title="Elevator")
    assert (await released.titles("elevator"))[0] == "Elevator"
