"""Documents on their way in: in order, each on its own, and none blamed for another."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.knowledge.model import FOLLOWS_COLLECTION, PRIVATE, JobItem, NewDocument, Parsed, Permissions
from anabranch.knowledge.parse import ParseLimits, parse
from anabranch.knowledge.records import jobs
from support.knowledge_fixtures import BOB, OPERATOR, Workshop, text, workshop


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection()
        yield opened


class Slow(Workshop):
    """Reads a document with "slow" in it only when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reading = asyncio.Event()
        self.go_on = asyncio.Event()

    async def _parse(self, data: bytes, filename: str | None, media_type: str | None) -> Parsed:
        if b"slow" in data:
            self.reading.set()
            await self.go_on.wait()
        return parse(data, filename, ParseLimits(), media_type)


async def items(shop: Workshop, job: str) -> list[JobItem]:
    return list((await shop.room.job(OPERATOR, job)).items)


async def finished(shop: Workshop, job: str) -> list[JobItem]:
    async with asyncio.timeout(10):
        while (await shop.room.job(OPERATOR, job)).completed_at is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return await items(shop, job)


async def test_the_newest_version_wins_even_if_an_older_one_takes_longer(tmp_path: Path) -> None:
    shop = Slow(tmp_path)
    await shop.collection()
    work = asyncio.create_task(shop.indexer.run())
    older = await shop.room.ingest(OPERATOR, "notes", [text("Herons are slow.")])
    await shop.reading.wait()
    newer = await shop.room.ingest(OPERATOR, "notes", [text("Herons are quick.")])
    other = await shop.room.ingest(OPERATOR, "notes", [text("Otters are quick.")])
    assert [item.outcome for item in await finished(shop, other)] == ["added"]  # nobody waits but who must
    shop.go_on.set()
    assert [item.outcome for item in await finished(shop, older)] == ["added"]
    assert [item.outcome for item in await finished(shop, newer)] == ["replaced"]
    assert [passage.text for passage in await shop.find("Herons", limit=1)] == ["Herons are quick."]
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await shop.close()


async def test_two_versions_of_a_document_in_one_job_are_applied_in_order(shop: Workshop) -> None:
    await shop.put("Herons eat fish.")
    job = await shop.put("Herons eat frogs.", "Herons eat fish.")
    assert [item.outcome for item in await items(shop, job)] == ["replaced", "replaced"]
    assert [passage.text for passage in await shop.find("herons")] == ["Herons eat fish."]


async def test_the_same_content_twice_in_one_job_is_one_document(shop: Workshop) -> None:
    twins = [NewDocument(source="text", data=b"Herons eat fish.", identity=name) for name in ("one", "another")]
    job = await shop.room.ingest(OPERATOR, "notes", twins)
    await shop.ingest_pending()
    assert [item.outcome for item in await items(shop, job)] == ["added", "unchanged"]
    assert len(await shop.find("herons")) == 1


async def test_a_document_that_crashes_the_indexer_fails_alone(shop: Workshop) -> None:
    """Twenty documents, one of which ends the process whenever it is in hand."""
    many = [text("Poison eats all." if n == 7 else f"Number{n} eats fish.") for n in range(20)]
    job = await shop.room.ingest(OPERATOR, "notes", many)
    while shop.database.reading(jobs.waiting):
        claims = await shop.database.write(lambda db: jobs.claim(db, 16))
        if any(claim.arrived.identity == "Poison" for claim in claims):
            await shop.database.write(jobs.recover)
        elif claims:
            await shop.indexer._process(claims)
    outcomes = [(item.status, item.name) for item in await items(shop, job)]
    assert [name for status, name in outcomes if status == "failed"] == ["Poison"]
    assert sum(status == "completed" for status, _ in outcomes) == 19


async def test_a_retried_document_is_claimed_alone(shop: Workshop) -> None:
    await shop.room.ingest(OPERATOR, "notes", [text("Herons eat fish."), text("Otters eat fish.")])
    await shop.database.write(lambda db: jobs.claim(db, 1))
    await shop.database.write(jobs.recover)
    alone = await shop.database.write(lambda db: jobs.claim(db, 16))
    assert [claim.arrived.identity for claim in alone] == ["Herons"]


PUBLIC = Permissions(visibility="public")


@pytest.mark.parametrize(
    ("content", "begun"),
    [("Herons are slow.", False), ("Herons are slow, too.", False), ("Herons are slow, too.", True)],
    ids=["same text", "waiting", "being read"],
)
async def test_a_version_that_was_sent_before_its_document_was_made_private_leaves_it_private(
    tmp_path: Path, content: str, begun: bool
) -> None:
    shop = Slow(tmp_path)
    await shop.collection()
    shop.go_on.set()
    await shop.put("Herons are slow.")
    shop.go_on.clear()
    shop.reading.clear()
    sent = await shop.room.ingest(OPERATOR, "notes", [text(content, PUBLIC)])
    work = asyncio.create_task(shop.indexer.run()) if begun else None
    if work is not None:
        await shop.reading.wait()
    await shop.room.describe(OPERATOR, "Herons", permissions=PRIVATE)
    shop.go_on.set()
    work = work or asyncio.create_task(shop.indexer.run())
    await finished(shop, sent)
    assert (await shop.room.document(OPERATOR, "Herons")).permissions == PRIVATE
    assert await shop.find("Herons", BOB) == []
    assert [one.text for one in await shop.find("Herons", limit=1)] == [content]
    later = await shop.room.ingest(OPERATOR, "notes", [text(content, PUBLIC)])
    await finished(shop, later)
    assert await shop.find("Herons", BOB) != [], "who sends it again decides again"
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await shop.close()


async def test_a_version_that_was_sent_before_permissions_were_given_keeps_to_its_own(shop: Workshop) -> None:
    await shop.put("Herons stand.", permissions=PRIVATE)
    await shop.room.ingest(OPERATOR, "notes", [text("Herons fly.", PRIVATE)])
    await shop.room.describe(OPERATOR, "Herons", permissions=PUBLIC)
    await shop.ingest_pending()
    assert (await shop.room.document(OPERATOR, "Herons")).permissions == PRIVATE


async def test_a_version_that_was_sent_before_its_document_followed_the_collection_follows_it(shop: Workshop) -> None:
    await shop.put("Herons stand.")
    await shop.room.ingest(OPERATOR, "notes", [text("Herons fly.", PUBLIC)])
    await shop.room.describe(OPERATOR, "Herons", permissions=FOLLOWS_COLLECTION)
    await shop.ingest_pending()
    assert (await shop.room.document(OPERATOR, "Herons")).permissions == FOLLOWS_COLLECTION
