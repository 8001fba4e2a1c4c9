"""The three sizes find the same: embedded, replicated, and in a cluster. The embedded one is the reference."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.model import Passage
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.examples import FACTOR
from support.knowledge_fixtures import Workshop, workshop
from support.opensearch_server import new_index, why_missing
from support.postgres_server import shared_postgres
from support.random_library import RandomLibrary

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))]

# Together 2,000 cases.
LIBRARIES, MOMENTS, QUESTIONS = round(25 * FACTOR), 4, 20


def described(passages: Sequence[Passage]) -> list[tuple[float, str, str, str]]:
    """What was found, best first; ids differ between sizes, and equal scores have no order."""
    found = [
        (-round(one.score, 4), one.title, one.text, one.place.collection if one.place is not None else "")
        for one in passages
    ]
    return sorted(found)


async def answered(library: RandomLibrary, shop: Workshop) -> tuple[object, list[tuple[float, str, str, str]]]:
    """The next question, and what it finds."""
    asked = library.asked()
    hits = await shop.room.find(asked.query, await library.restricted(asked.caller))
    assert not hits.partial
    return asked, described(hits.passages)


async def compare(shops: Sequence[Workshop], seed: int) -> None:
    libraries = [RandomLibrary(shop, seed) for shop in shops]
    for library in libraries:
        await library.fill()
    for _ in range(MOMENTS):
        for _ in range(QUESTIONS):
            found = [await answered(*pair) for pair in zip(libraries, shops, strict=True)]
            assert found[1:] == found[:1] * (len(found) - 1)
        for library in libraries:
            await library.change()
    for library in libraries:
        await library.clear()


def test_permissions_and_filters_find_the_same_in_all_sizes(tmp_path: Path) -> None:
    @settings(max_examples=LIBRARIES, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        runner.run(compare(shops, seed))

    async def opened() -> list[Workshop]:
        server = shared_postgres()
        kinds: tuple[dict[str, Any], ...] = (
            {"database": SqliteDatabase.open(tmp_path / "embedded")},
            {"database": PostgresDatabase.open(server.create_database())},
            {"database": PostgresDatabase.open(server.create_database()), "index": new_index()},
        )
        folders = ("embedded", "replicated", "cluster")
        pairs = zip(folders, kinds, strict=True)
        return [await leaving.enter_async_context(workshop(tmp_path / name, **more)) for name, more in pairs]

    with asyncio.Runner() as runner:
        leaving = AsyncExitStack()
        shops = runner.run(opened())
        try:
            check()
        finally:
            runner.run(leaving.aclose())
