"""What the erasure of a user takes from the records, and what stays."""

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.knowledge.model import Caller, NewDocument
from support.knowledge_fixtures import BOB, OPERATOR, Workshop, workshop

DANA = Caller(user="dana", operator=True)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection(caller=BOB)
        yield opened


async def test_a_document_that_another_owner_has_replaced_stays(shop: Workshop) -> None:
    await shop.put("Herons stand still.", "Otters swim.", caller=DANA)
    await shop.put("Herons fly.", caller=BOB)
    erasure = await shop.room.erase(user="dana")
    assert await shop.find("Herons") != []
    assert {passage.text for passage in await shop.find("Herons Otters")} == {"Herons fly."}
    assert len(erasure.subject.documents) == 1
    stored = await shop.room.document(BOB, "Herons")
    assert (stored.owner, stored.status) == ("bob", "completed")


async def test_an_upload_after_one_of_the_erased_user_stays(shop: Workshop) -> None:
    broken = NewDocument(source="file", data=b64encode(b"%PDF"), filename="scan.pdf", identity="scan")
    await shop.room.ingest(DANA, "notes", [broken])
    await shop.ingest_pending()
    erin = Caller(user="erin", operator=True)
    await shop.room.ingest(erin, "notes", [broken])
    await shop.ingest_pending()
    await shop.room.erase(user="dana")
    assert (await shop.room.document(erin, "scan.pdf")).status == "failed"
    await shop.room.retry(erin, "scan.pdf")


async def test_failed_uploads_of_an_erased_user_to_a_document_of_somebody_else_are_not_kept(shop: Workshop) -> None:
    await shop.put("Herons fly.", caller=BOB)
    broken = NewDocument(source="file", data=b"%PDF of Dana", filename="x.pdf", title="Dana's", identity="Herons")
    await shop.room.ingest(DANA, "notes", [broken])
    await shop.ingest_pending()
    assert (await shop.room.document(OPERATOR, "Herons")).status == "failed"
    await shop.room.erase(user="dana")
    assert (await shop.room.document(OPERATOR, "Herons")).status == "completed"
    kept = shop.database.reading(
        lambda db: [
            tuple(row)
            for table in ("jobs", "items", "uploads", "audit_names")
            for row in db.execute(f"SELECT * FROM {table}")  # noqa: S608
        ]
    )
    assert "dana" not in str(kept).casefold()
    assert await shop.find("Herons") != []


async def test_a_document_of_another_owner_in_a_collection_of_the_erased_user_goes(shop: Workshop) -> None:
    await shop.put("Herons fly.", caller=DANA)
    await shop.room.erase(user="bob")
    assert await shop.find("Herons") == []
    assert await shop.room.collections(OPERATOR) == []
