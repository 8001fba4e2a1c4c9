"""Records in PostgreSQL that come from a backup made with pg_dump, while the index in OpenSearch is further."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.domain.model import Query
from anabranch.knowledge.model import Permissions
from anabranch.knowledge.records import index_position
from anabranch.knowledge.records.index_position import Position
from anabranch.knowledge.records.postgres import PostgresDatabase
from support.knowledge_fixtures import BOB, OPERATOR, Workshop, text, workshop
from support.opensearch_server import new_index, why_missing
from support.postgres_server import _binaries, _environment, shared_postgres

PROGRAMS = ("pg_dump", "pg_restore")
MISSING = why_missing() or next((f"needs {name}" for name in PROGRAMS if not (_binaries() / name).is_file()), None)
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.timeout(180),
]
STORED = ("Herons eat fish.", "Otters eat fish.", "Storks eat fish.", "Rats eat fish.")
PRIVATE = Permissions(visibility="private")


class Place:
    """The address of the records and of the index, and where a backup is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = new_index()
        self.records = shared_postgres().create_database()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Workshop]:
        database = await asyncio.to_thread(PostgresDatabase.open, self.records)
        async with workshop(self.folder / "node", database=database, index=self.index) as shop:
            yield shop

    def back_up(self) -> None:
        self._run("pg_dump", "--format=custom", f"--file={self.folder}/records.dump", self.records)

    def restore(self) -> None:
        """Into a new database, as docs/deploy-cluster.md says."""
        self.records = shared_postgres().create_database()
        self._run(
            "pg_restore", "--exit-on-error", "--no-owner", f"--dbname={self.records}", f"{self.folder}/records.dump"
        )

    def _run(self, name: str, *arguments: str) -> None:
        command = [str(_binaries() / name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
async def place(tmp_path: Path) -> Place:
    """With a backup of the records, and an index that has them."""
    made = await asyncio.to_thread(Place, tmp_path)
    async with made.opened() as shop:
        await shop.collection()
        await shop.put(*STORED)
    await asyncio.to_thread(made.back_up)
    return made


async def fold(shop: Workshop) -> None:
    await asyncio.to_thread(shop.writer.fold)


async def found(shop: Workshop, question: str = "fish", **more: Any) -> set[str]:
    return {passage.text for passage in await shop.find(question, **more)}


async def key_of(shop: Workshop, title: str) -> tuple[str, int]:
    listed, _ = await shop.room.documents(OPERATOR, None, 0, 100)
    [one] = [one for one in listed if one.title == title]
    return one.id, one.key


async def change_everything(shop: Workshop) -> None:
    """Add, delete, replace and hide documents, and write all that to the index."""
    await shop.put("Newts eat fish.", "Eels eat fish.")
    await shop.room.delete_document(OPERATOR, (await key_of(shop, "Otters"))[0])
    await shop.put("Storks drink water.")
    await shop.room.describe(OPERATOR, (await key_of(shop, "Rats"))[0], permissions=PRIVATE)
    await fold(shop)


def position(shop: Workshop) -> Position:
    now = shop.database.reading(index_position.current)
    assert now is not None
    return now


async def indices(shop: Workshop) -> set[str]:
    """The names of all indices in OpenSearch that belong to this address."""
    counted = await asyncio.to_thread(shop.writer._client.call, "GET", f"{shop.writer._client.name}-*/_settings")
    return set(counted)


async def held(shop: Workshop) -> int:
    """How many chunks the index has."""
    await asyncio.to_thread(shop.writer._client.call, "POST", f"{position(shop).name}/_refresh")
    asked = msgspec.json.encode({"query": {"exists": {"field": "document"}}})
    counted = await asyncio.to_thread(shop.writer._client.call, "POST", f"{position(shop).name}/_count", asked)
    return int(counted["count"])


async def test_a_restore_builds_the_index_of_the_restored_records(place: Place) -> None:
    async with place.opened() as shop:
        await change_everything(shop)
        assert await found(shop) == {
            "Herons eat fish.",
            "Newts eat fish.",
            "Eels eat fish.",
            "Rats eat fish.",
            "Storks drink water.",
        }
        assert "Rats eat fish." not in await found(shop, caller=BOB)
        before = position(shop)
    await asyncio.to_thread(place.restore)
    async with place.opened() as shop:
        assert position(shop).seq < before.seq
        # Nothing of what came later, also before the index is built again.
        assert await found(shop) <= set(STORED)
        assert await found(shop, "newts eels drink water") <= set(STORED)
        assert shop.writer.unindexed()[0] > 0
        await fold(shop)
        assert position(shop).name != before.name
        assert await found(shop) == set(STORED)
        assert await found(shop, caller=BOB) == set(STORED)
        assert await found(shop, "newts eels drink water") == set(STORED)
        assert await held(shop) == len(STORED)
        assert await indices(shop) == {position(shop).name, before.name}
        assert shop.writer.verify(lambda _: None) == ()
        assert shop.writer.unindexed()[0] == 0


async def test_keys_and_numbers_that_a_restore_gives_again_are_of_the_new_documents(place: Place) -> None:
    async with place.opened() as shop:
        await change_everything(shop)
        lost = (await key_of(shop, "Newts"))[1]
    await asyncio.to_thread(place.restore)
    async with place.opened() as shop:
        # As many changes as were lost, and more, before the index is written for the first time.
        added = {f"Bird{number} eats fish." for number in range(8)}
        for one in sorted(added):
            await shop.room.ingest(OPERATOR, "notes", [text(one)])
        while await shop.indexer._step():
            pass
        assert lost in {(await key_of(shop, one.split()[0]))[1] for one in added}
        assert await found(shop, limit=20) <= added | set(STORED)
        await fold(shop)
        assert await found(shop, limit=20) == added | set(STORED)
        assert await held(shop) == len(added) + len(STORED)
        assert shop.writer.verify(lambda _: None) == ()


async def test_what_is_added_after_a_restore_is_indexed(place: Place) -> None:
    async with place.opened() as shop:
        await change_everything(shop)
    await asyncio.to_thread(place.restore)
    async with place.opened() as shop:
        await fold(shop)
        name = position(shop).name
        await shop.put("Gulls eat fish.")
        await shop.room.delete_document(OPERATOR, (await key_of(shop, "Herons"))[0])
        await fold(shop)
        assert position(shop).name == name
        assert await found(shop) == {*STORED, "Gulls eat fish."} - {"Herons eat fish."}


async def test_without_the_indices_the_restored_records_are_searched_in_memory(place: Place) -> None:
    async with place.opened() as shop:
        await change_everything(shop)
        await asyncio.to_thread(shop.writer.rebuild)
        for name in await indices(shop):
            await asyncio.to_thread(shop.writer._client.call, "DELETE", name)
    await asyncio.to_thread(place.restore)
    async with place.opened() as shop:
        hits = await shop.room.find(Query(text="fish", limit=10, similarity_threshold=0.0), OPERATOR)
        assert ({one.text for one in hits.passages}, hits.partial) == (set(STORED), False)
        await fold(shop)
        hits = await shop.room.find(Query(text="fish", limit=10, similarity_threshold=0.0), OPERATOR)
        assert ({one.text for one in hits.passages}, hits.partial) == (set(STORED), False)
        assert await indices(shop) == {position(shop).name}


async def test_until_the_index_is_built_again_answers_say_that_they_are_partial(place: Place) -> None:
    async with place.opened() as shop:
        await change_everything(shop)
    await asyncio.to_thread(place.restore)
    async with place.opened() as shop:
        hits = await shop.room.find(Query(text="fish", limit=10, similarity_threshold=0.0), OPERATOR)
        assert {one.text for one in hits.passages} == set(STORED) or (hits.partial, hits.seen) == (True, "")


async def test_an_index_that_other_records_may_use_is_named_not_deleted(place: Place) -> None:
    async with place.opened() as shop:
        await change_everything(shop)
        await asyncio.to_thread(shop.writer.rebuild)
        theirs = position(shop).name
    await asyncio.to_thread(place.restore)
    async with place.opened() as shop:
        noted: list[tuple[str, Any]] = []
        shop.writer._note = lambda event, **more: noted.append((event, more.get("names")))
        await fold(shop)
        assert await found(shop) == set(STORED)
        assert await indices(shop) == {position(shop).name, theirs}
        assert ("indices_not_used", [theirs]) in noted


async def test_an_index_into_which_a_killed_writer_has_written_lost_changes_is_built_again(place: Place) -> None:
    async with place.opened() as shop:
        identifier, key = await key_of(shop, "Otters")
        await shop.room.delete_document(OPERATOR, identifier)
        await asyncio.to_thread(shop.writer._index, position(shop).name, [key])  # and killed before it noted it
    await asyncio.to_thread(place.restore)
    async with place.opened() as shop:
        await fold(shop)
        assert await held(shop) == len(STORED)
        assert await found(shop) == set(STORED)
