"""Two worker processes on one data folder: what one took in both find, soon, whole, and only for those who may."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.crash_scenarios import COLLECTION, Client, client, variables
from support.server_process import serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("workers")]

SOON_S = 2.0


class Pair(NamedTuple):
    """A client, the addresses of two servers, and the key of somebody who owns nothing."""

    client: Client
    urls: tuple[str, str]
    stranger: str

    async def titles(self, url: str, question: str, key: str | None = None) -> list[str]:
        body = {"query": question, "collections": [COLLECTION]}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        found = await self.client.call("POST", "/v1/query", body, url=url, headers=headers)
        return [source["title"] for source in found["sources"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Pair]:
    """For all tests, so each has an animal of its own."""
    home = tmp_path_factory.mktemp("pair")
    folder = home / "data"
    database = SqliteDatabase.open(folder)
    stranger = database.writing(lambda db: keys.create(db, user="stranger"))[1]
    database.close()
    given: Any = {"home": home, "variables": variables(folder, models_dir)}
    async with client() as caller, AsyncExitStack() as stack:
        programs = [await stack.enter_async_context(serving(**given)) for _ in range(2)]
        caller.url = programs[0].url
        await caller.create()
        opened = Pair(caller, (programs[0].url, programs[1].url), stranger)
        # What a server does at its first question only, it has done.
        await caller.finished(await caller.ingest(note("first", "Bakers knead dough.")))
        for url in opened.urls:
            assert await opened.titles(url, "dough") == ["first"]
        yield opened


def note(name: str, content: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "title": name, "source": {"type": "text", "content": content}, **more}


async def test_a_new_document_is_found_by_both_workers_within_two_seconds(pair: Pair) -> None:
    for number, url in enumerate(pair.urls * 3):
        name = f"heron-{number}"
        await pair.client.ingest(note(name, f"Heron number {number} eats fish at zq{number}."), url=url)
        acknowledged = time.monotonic()
        for asked in pair.urls:
            while name not in await pair.titles(asked, f"zq{number}"):
                assert time.monotonic() - acknowledged < SOON_S
                await asyncio.sleep(0.01)
    job = await pair.client.ingest(note("otter", "Otters eat fish."), url=pair.urls[0])
    await pair.client.finished(job, url=pair.urls[1])
    for url in pair.urls:  # once its job is completed, the next question finds it
        assert "otter" in await pair.titles(url, "otters")


async def test_both_workers_see_a_new_version_atomically(pair: Pair) -> None:
    """Whoever asks sees the old text or the new, never both or neither, and never the old after the new."""
    await pair.client.finished(await pair.client.ingest(note("stork", _version(0))))
    last = 6
    done = asyncio.Event()

    async def watch(url: str) -> list[int]:
        seen: list[int] = []
        while not (done.is_set() and seen and seen[-1] == last):
            found = await pair.client.holding("Storks", url=url)
            versions = {int(source["content_snippet"].split("version ")[1].split()[0]) for source in found}
            assert len(versions) == 1, found
            seen.append(versions.pop())
        return seen

    watching = [asyncio.create_task(watch(url)) for url in pair.urls]
    for number in range(1, last + 1):
        job = await pair.client.ingest(note("stork", _version(number)), url=pair.urls[number % 2])
        await pair.client.finished(job)
    done.set()
    async with asyncio.timeout(SOON_S):
        for seen in await asyncio.gather(*watching):
            assert seen == sorted(seen)


async def test_changed_permissions_apply_in_both_workers_at_once(pair: Pair) -> None:
    await pair.client.finished(await pair.client.ingest(note("badger", "Badgers dig setts.")))
    [badger] = [one for one in await pair.client.listed() if one["title"] == "badger"]
    for number, visibility in enumerate(["private", "public"] * 3):
        body = {"permissions": {"visibility": visibility}}
        await pair.client.call("PATCH", f"/v1/documents/{badger['id']}", body, url=pair.urls[number % 2])
        for url in pair.urls:
            seen = "badger" in await pair.titles(url, "badgers", pair.stranger)
            assert seen == (visibility == "public")
            assert "badger" in await pair.titles(url, "badgers")


async def test_new_documents_are_found_by_all_workers_of_a_server(tmp_path: Path, models_dir: Path) -> None:
    """Each call is a connection of its own, and goes to either worker."""
    given: Any = {"home": tmp_path, "workers": 2, "variables": variables(tmp_path / "data", models_dir)}
    async with client() as caller, serving(**given) as program:
        caller.url = program.url
        await caller.create()
        await caller.finished(await caller.ingest(note("first", "Bakers knead dough.")))
        for number in range(3):
            await caller.finished(await caller.ingest(note(f"heron-{number}", f"Herons eat fish at zq{number}.")))
            for _ in range(10):
                assert [one["title"] for one in await caller.holding(f"zq{number}")] == [f"heron-{number}"]


def _version(number: int) -> str:
    """Long enough for two chunks."""
    return f"Storks of version {number} eat fish. " + "In the evening they stand in shallow water and wait. " * 40
