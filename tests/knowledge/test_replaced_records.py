"""Records that are restored, or whose last changes a failover has lost, while a node runs: its index is of others."""

import asyncio
from pathlib import Path

import pytest

from anabranch.knowledge.index.reader import is_foreign
from anabranch.knowledge.records.database import Session
from support.knowledge_fixtures import Workshop, workshop

pytestmark = pytest.mark.segments

TABLES = {"documents": "key", "chunks": "key", "embeddings": "chunk", "contents": "document", "attributes": "document"}
RESERVED = {
    "sqlite": "UPDATE sqlite_sequence SET seq = ? WHERE name = ?",
    "postgres": "UPDATE reserved SET last = ? WHERE name = ?",
}


def newest(db: Session) -> tuple[int, int, int]:
    """The last keys of documents and chunks, and the last change."""
    names = ("documents", "chunks")
    keys = [db.execute(f"SELECT coalesce(max(key), 0) FROM {name}").fetchone()[0] for name in names]
    return keys[0], keys[1], db.execute("SELECT max(seq) FROM changes").fetchone()[0]


def lose(db: Session, document: int, chunk: int, seq: int) -> None:
    """As if what came later had never happened: the same keys are given again."""
    for table, column in TABLES.items():
        last = document if column == "document" or table == "documents" else chunk
        db.execute(f"DELETE FROM {table} WHERE {column} > ?", (last,))
    db.execute("DELETE FROM changes WHERE seq > ?", (seq,))
    for name, last in (("documents", document), ("chunks", chunk)):
        db.execute(RESERVED[db.kind], (last, name))
    if db.kind == "sqlite":
        db.execute(RESERVED[db.kind], (seq, "changes"))
    else:
        db.execute("SELECT setval(pg_get_serial_sequence('changes', 'seq'), ?)", (seq,))


async def found(shop: Workshop, question: str) -> list[str]:
    return [passage.text for passage in await shop.find(question, limit=3)]


async def test_what_a_failover_has_lost_is_not_found_any_more(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        before = shop.database.reading(newest)
        await shop.put("Lost1 words of otters.", "Lost2 words of storks.")
        assert "Lost1 words of otters." in await found(shop, "otters")
        shop.database.writing(lambda db: lose(db, *before))
        await shop.put("Swans sing.", "Cranes dance.", "Gulls cry.")
        texts = await found(shop, "otters storks swans")
        assert not any(text.startswith("Lost") for text in texts)
        assert "Swans sing." in texts


async def test_lost_changes_are_noticed_before_there_are_new_ones(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        before = shop.database.reading(newest)
        await shop.put("Lost1 words of otters.")
        assert "Lost1 words of otters." in await found(shop, "otters")
        shop.database.writing(lambda db: lose(db, *before))
        assert await found(shop, "otters") == ["Herons eat fish."]


async def test_an_index_of_lost_changes_is_built_again(tmp_path: Path) -> None:
    async with workshop(tmp_path / "node") as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        before = shop.database.reading(newest)
        await shop.put("Lost1 words of otters.", "Lost2 words of storks.")
        await asyncio.to_thread(shop.writer.fold)
        shop.database.writing(lambda db: lose(db, *before))
        await shop.put("Swans sing.", "Cranes dance.", "Gulls cry.")
        assert shop.database.reading(lambda db: is_foreign(db, shop.generations.current()))
        assert not any(text.startswith("Lost") for text in await found(shop, "otters storks"))
        await asyncio.to_thread(shop.writer.fold)
        assert not shop.database.reading(lambda db: is_foreign(db, shop.generations.current()))
        assert set(await found(shop, "swans cranes gulls")) == {"Swans sing.", "Cranes dance.", "Gulls cry."}
        assert shop.writer.seq == shop.database.reading(newest)[2]


async def test_an_index_ahead_of_the_records_is_built_again(tmp_path: Path) -> None:
    async with workshop(tmp_path / "node") as shop:
        await shop.collection()
        await shop.put("Herons eat fish.")
        before = shop.database.reading(newest)
        await shop.put("Lost1 words of otters.", "Lost2 words of storks.")
        await asyncio.to_thread(shop.writer.fold)
        shop.database.writing(lambda db: lose(db, *before))
        assert await found(shop, "otters storks") == ["Herons eat fish."]
        assert shop.writer.unindexed()[0] == 1
        await asyncio.to_thread(shop.writer.fold)
        assert shop.writer.unindexed()[0] == 0
        assert await found(shop, "otters storks") == ["Herons eat fish."]
