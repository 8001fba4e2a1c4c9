"""`kill -9` at random moments of an ingestion: what was acknowledged is there afterwards, once, and is found."""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from support.crash_scenarios import (
    Site,
    Victim,
    Writer,
    all_found,
    all_taken_in,
    chunk_keys,
    client,
    ended,
    holds,
    indexers_of,
    is_folded,
    site,
    variables,
)
from support.server_process import serving

VICTIMS: tuple[Victim, ...] = ("everything", "indexer", "server")


def seeded() -> random.Random:
    """Another run every time; the seed is in the output of one that fails, and ANABRANCH_SEED repeats it."""
    seed = int(os.environ.get("ANABRANCH_SEED", random.randrange(1_000_000)))
    print(f"ANABRANCH_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
    return random.Random(seed)


async def killed_at_random(
    home: Path, models_dir: Path, victims: list[Victim], chance: random.Random, *, documents: int, longest_s: float
) -> None:
    async with client() as caller, site(home, models_dir, caller) as place:
        await place.start()
        await caller.create()
        writer = Writer(caller, chance)
        for victim in victims:
            writing = asyncio.create_task(writer.write(documents))
            # The moment itself is what is random; nothing is waited for.
            await asyncio.sleep(chance.uniform(0.0, longest_s))
            await place.kill(victim)
            if victim != "indexer":
                await place.start()
            await writing
        await all_taken_in(caller, writer)
        await all_found(caller, writer.kept, writer.stale)
        await holds(lambda: is_folded(place.folder))
        await all_found(caller, writer.kept, writer.stale)
        assert len(await caller.listed()) == len(writer.kept)
        await agree(place)


async def agree(place: Site) -> None:
    """The index and the records, with nobody at work on them."""
    await place.kill("everything")
    kept, reached = chunk_keys(place.folder)
    assert sorted(reached) == sorted(kept)


async def test_no_accepted_document_is_lost_by_three_kills(tmp_path: Path, models_dir: Path) -> None:
    victims = list(VICTIMS)
    chance = seeded()
    chance.shuffle(victims)
    await killed_at_random(tmp_path, models_dir, victims, chance, documents=8, longest_s=1.5)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_no_accepted_document_is_lost_by_twenty_kills(tmp_path: Path, models_dir: Path) -> None:
    chance = seeded()
    victims = chance.choices(VICTIMS, k=20)
    await killed_at_random(tmp_path, models_dir, victims, chance, documents=60, longest_s=6.0)


async def test_another_server_takes_over_the_indexer_lock(tmp_path: Path, models_dir: Path) -> None:
    """The indexer ends with the server whose child it is, and the other server on the folder starts one."""
    given: dict[str, Any] = {"home": tmp_path, "variables": variables(tmp_path / "data", models_dir)}
    async with client() as caller, serving(**given) as first:
        caller.url = first.url
        await caller.create()
        await first.logged("indexer_started")
        async with serving(**given) as second:
            caller.url = second.url
            [before] = await caller.finished(await caller.ingest(note("before", "Herons eat fish.")))
            assert before["status"] == "completed"
            assert indexers_of(second) == []
            orphans = first.family()
            first.send(signal.SIGKILL)
            job = await caller.ingest(note("after", "Otters eat fish too."))
            await ended(orphans)
            [after] = await caller.finished(job)
            assert after["status"] == "completed"
            await holds(lambda: len(indexers_of(second)) == 1)
            assert {one["title"] for one in await caller.holding("fish")} == {"before", "after"}


def note(name: str, content: str) -> dict[str, Any]:
    return {"id": name, "title": name, "source": {"type": "text", "content": content}}
