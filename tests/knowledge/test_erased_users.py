"""What the erasure of a user takes from the records, and what stays."""

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.domain.audit import Actor, AuditEntry
from anabranch.knowledge.key_requests import KeyRequest
from anabranch.knowledge.model import Caller, NewDocument, Permissions
from support.knowledge_fixtures import BOB, OPERATOR, Workshop, query_record, text, workshop

DANA = Caller(user="dana", operator=True)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    async with workshop(tmp_path) as opened:
        await opened.collection(caller=BOB)
        yield opened


async def test_a_document_that_another_owner_has_replaced_stays(shop: Workshop) -> None:
    await shop.put("Herons stand still.", "Otters swim.", caller=DANA)
    await shop.put("Herons fly.", caller=BOB)
    erasure, warning = await shop.room.erase(user="dana")
    assert await shop.find("Herons") != []
    assert {passage.text for passage in await shop.find("Herons Otters")} == {"Herons fly."}
    assert (len(erasure.subject.documents), warning) == (1, None)
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
            for row in db.execute(f"SELECT * FROM {table}")
        ]
    )
    assert "dana" not in str(kept).casefold()
    assert await shop.find("Herons") != []


async def test_a_document_of_another_owner_in_a_collection_of_the_erased_user_goes(shop: Workshop) -> None:
    await shop.put("Herons fly.", caller=DANA)
    await shop.room.erase(user="bob")
    assert await shop.find("Herons") == []
    assert await shop.room.collections(OPERATOR) == []


ZOE = "Zoe\u0308"  # as some keyboards and file names write it


@pytest.mark.parametrize("written", ["Zo\u00eb", ZOE, f" {ZOE}\u00a0"])
async def test_a_user_is_erased_however_the_name_is_written(shop: Workshop, written: str) -> None:
    made, _ = await shop.room.create_api_key(KeyRequest(user=ZOE), ())
    assert made.user == "Zo\u00eb"
    _, warning = await shop.room.erase(user=written)
    assert (warning, await shop.room.api_keys()) == (
        None,
        ([], [(await shop.room.collection(BOB, "notes")).collection]),
    )


async def test_a_name_that_is_known_as_it_is_written_stands_for_that_user(shop: Workshop) -> None:
    composed, hub = Caller(user="Zo\u00eb"), Caller(user=f"{ZOE} ")  # a hub's names are its own
    for caller in (composed, hub):
        await shop.room.create_collection(caller, "diary")
    assert (await shop.room.erase(user=f"{ZOE} "))[1] is None
    left = await shop.room.collections(OPERATOR)
    assert {one.collection.owner for one in left} == {"bob", "Zo\u00eb"}


async def test_the_erasure_of_a_user_of_whom_nothing_is_known_warns(shop: Workshop) -> None:
    erasure, warning = await shop.room.erase(user="BOB")
    assert (erasure.what, erasure.subject.users) == ("user", ("BOB",))
    assert "no user 'BOB'" in (warning or "")
    for again in (False, True):
        _, warning = await shop.room.erase(user="bob")
        assert (warning is not None) == again


@pytest.mark.parametrize("named", ["question", "count", "document", "default", "upload", "audit"])
async def test_a_user_is_known_from_every_table_that_can_name_one(shop: Workshop, named: str) -> None:
    allowed = Permissions(visibility="restricted", allowed_users=("eve",))
    match named:
        case "question":
            await shop.room.record(query_record("1", "eve"))
        case "count":
            shop.database.writing(lambda db: db.execute("INSERT INTO query_counts VALUES (1, 1, 'eve', 1)"))
        case "document":
            await shop.put("Herons fly.", caller=BOB, permissions=allowed)
            shop.database.writing(lambda db: [db.execute(f"DELETE FROM {one}") for one in ("items", "audit_names")])
        case "default":
            await shop.room.describe_collection(BOB, "notes", permissions=allowed)
            shop.database.writing(lambda db: db.execute("DELETE FROM audit_names"))
        case "upload":
            await shop.room.ingest(BOB, "notes", [text("Herons fly.", allowed)])
        case "audit":
            await shop.room.audit(
                [(AuditEntry(action="session.started"), Actor(name="user:eve", address="", surface="page"))]
            )
    assert (await shop.room.erase(user="eve"))[1] is None
