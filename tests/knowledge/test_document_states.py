"""The states of documents: waiting, processed, stored, failed; and failed ones that are retried."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.domain.errors import Conflict, NotFound
from anabranch.knowledge.model import Caller, NewDocument, Parsed, Permissions, StoredDocument, Unprocessable
from anabranch.knowledge.parse import ParseLimits, parse
from anabranch.knowledge.records import jobs
from support.knowledge_fixtures import ALICE, BOB, GUEST, OPERATOR, Workshop, text

PRIVATE = Permissions(visibility="private")


class Moody(Workshop):
    """Documents with "broken" in them fail until they are mended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mended = False
        self.reading = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def _parse(self, data: bytes, filename: str | None, media_type: str | None) -> Parsed:
        self.reading.set()
        await self.go_on.wait()
        if b"broken" in data and not self.mended:
            raise Unprocessable("It is broken.")
        return parse(data, filename, ParseLimits(), media_type)

    async def listed(self, status: str | None, caller: Caller = OPERATOR) -> list[StoredDocument]:
        found, total = await self.room.documents(caller, None, 0, 100, status=status)  # type: ignore[arg-type]
        assert total == len(found)
        return found

    async def retry(self, name: str, caller: Caller = OPERATOR) -> str:
        job = await self.room.retry(caller, name)
        await self.ingest_pending()
        (item,) = (await self.room.job(caller, job)).items
        return item.outcome or item.status

    def uploads(self) -> int:
        return int(self.database.reading(lambda db: db.execute("SELECT count(*) FROM uploads").fetchone()[0]))


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Moody]:
    opened = Moody(tmp_path)
    await opened.collection()
    yield opened
    await opened.close()


async def test_a_failed_document_is_listed_with_its_error(shop: Moody) -> None:
    await shop.put("Otters eat fish.", "Herons are broken.", metadata={"level": 3})
    (failed,) = await shop.listed("failed")
    assert (failed.title, failed.status, failed.error) == ("Herons", "failed", "It is broken.")
    assert (failed.searchable, failed.chunk_count, failed.metadata) == (False, 0, {"level": 3})
    assert failed.processed_at is not None
    assert failed.processed_at >= failed.created_at
    assert [one.title for one in await shop.listed(None)] == ["Otters"]
    assert [(one.title, one.status) for one in await shop.listed("completed")] == [("Otters", "completed")]
    assert [one.title for one in await shop.listed("all")] == ["Otters", "Herons"]
    assert await shop.room.document(OPERATOR, failed.id) == failed
    assert await shop.titles("herons") == ["Otters"]


async def test_a_document_is_pending_then_processing_then_completed(shop: Moody) -> None:
    shop.go_on.clear()
    await shop.room.ingest(OPERATOR, "notes", [text("Otters eat fish.")])
    (pending,) = await shop.listed("pending")
    assert (pending.status, pending.processed_at, pending.searchable) == ("pending", None, False)
    work = asyncio.create_task(shop.ingest_pending())
    await shop.reading.wait()
    assert await shop.listed("pending") == []
    (processing,) = await shop.listed("processing")
    assert processing.id == pending.id
    shop.go_on.set()
    await work
    (stored,) = await shop.listed("completed")
    assert (stored.id, stored.searchable) == (pending.id, True)
    assert stored.processed_at is not None
    assert await shop.listed("processing") == []


async def test_the_stored_version_is_found_while_a_newer_one_waits_or_has_failed(shop: Moody) -> None:
    await shop.put("Herons eat fish.")
    await shop.room.ingest(OPERATOR, "notes", [text("Herons are broken.")])
    (waiting,) = await shop.listed("all")
    assert (waiting.status, waiting.searchable, waiting.chunk_count) == ("pending", True, 1)
    await shop.ingest_pending()
    (failed,) = await shop.listed("failed")
    assert (failed.id, failed.status, failed.error, failed.searchable) == (waiting.id, "failed", "It is broken.", True)
    assert await shop.listed("completed") == []
    assert [one.status for one in await shop.listed(None)] == ["failed"]
    assert [one.text for one in await shop.find("herons")] == ["Herons eat fish."]
    shop.mended = True
    assert await shop.retry(failed.id) == "replaced"
    assert [one.text for one in await shop.find("herons")] == ["Herons are broken."]
    assert [one.status for one in await shop.listed("all")] == ["completed"]


async def test_a_failed_document_is_retried_with_what_was_uploaded(shop: Moody) -> None:
    await shop.put("Herons are broken.", metadata={"tags": ["birds"]})
    (failed,) = await shop.listed("failed")
    assert await shop.retry(failed.id) == "failed"
    shop.mended = True
    assert await shop.retry(failed.id) == "added"
    stored = await shop.room.document(OPERATOR, failed.id)
    assert (stored.status, stored.error, stored.title) == ("completed", None, "Herons")
    assert len(await shop.find("herons", tags=("birds",))) == 1
    assert shop.uploads() == 0
    with pytest.raises(Conflict, match="'Herons' is completed"):
        await shop.room.retry(OPERATOR, failed.id)
    with pytest.raises(NotFound):
        await shop.room.retry(OPERATOR, "nothing")


async def test_the_same_document_sent_again_keeps_its_id_and_replaces_the_failed_one(shop: Moody) -> None:
    await shop.put("Herons are broken.")
    (failed,) = await shop.listed("failed")
    await shop.put("Herons eat fish.")
    assert await shop.listed("failed") == []
    assert [one.id for one in await shop.listed("all")] == [failed.id]
    assert shop.uploads() == 0
    with pytest.raises(Conflict):
        await shop.room.retry(OPERATOR, failed.id)


async def test_of_two_versions_that_fail_only_the_newer_is_kept(shop: Moody) -> None:
    await shop.put("Herons are broken.", "Herons are broken again.")
    (failed,) = await shop.listed("failed")
    assert shop.uploads() == 1
    shop.mended = True
    await shop.retry(failed.id)
    assert [one.text for one in await shop.find("herons")] == ["Herons are broken again."]


async def test_a_deleted_document_is_not_retried_and_not_processed(shop: Moody) -> None:
    await shop.put("Herons are broken.")
    deleted, _ = await shop.room.delete_document(OPERATOR, "Herons")
    assert (deleted.status, deleted.chunk_count, shop.uploads()) == ("failed", 0, 0)
    with pytest.raises(NotFound):
        await shop.room.document(OPERATOR, deleted.id)
    await shop.put("Otters eat fish.")
    job = await shop.room.ingest(OPERATOR, "notes", [text("Otters eat crabs.")])
    await shop.room.delete_document(OPERATOR, "Otters")
    await shop.ingest_pending()
    assert (await shop.room.job(OPERATOR, job)).status == "cancelled"
    assert await shop.listed("all") == []


async def test_uploads_of_failed_documents_go_with_their_collection(shop: Moody) -> None:
    await shop.put("Herons are broken.")
    await shop.room.delete_collection(OPERATOR, "notes")
    assert shop.uploads() == 0
    assert await shop.listed("all") == []


async def test_failed_documents_are_kept_for_a_while(shop: Moody) -> None:
    await shop.put("Herons are broken.")
    await shop.database.write(jobs.forget_failed)
    assert len(await shop.listed("failed")) == 1
    await shop.database.write(lambda db: jobs.forget_failed(db, days=0))
    assert (await shop.listed("failed"), shop.uploads()) == ([], 0)


async def test_the_bytes_of_failed_documents_are_limited(shop: Moody) -> None:
    await shop.put("Herons are broken.", "Otters are broken.", "Storks are broken.")
    await shop.database.write(lambda db: jobs.bound_failed(db, most=2, most_bytes=20))
    assert [one.title for one in await shop.listed("failed")] == ["Otters", "Storks"]
    with pytest.raises(Conflict, match=r"'Otters' is no longer kept.*Send the document again"):
        await shop.room.retry(OPERATOR, "Otters")
    shop.mended = True
    assert await shop.retry("Storks") == "added"


async def test_failed_uploads_of_one_user_do_not_push_out_those_of_another(shop: Moody) -> None:
    await shop.collection("hers", caller=ALICE)
    await shop.collection("his", caller=BOB)
    await shop.put("Herons are broken.", collection="hers", caller=ALICE)
    await shop.put(*(f"Otters-{n} are broken." + "x" * 40 for n in range(7)), collection="his", caller=BOB)
    await shop.database.write(lambda db: jobs.bound_failed(db, most=5, most_bytes=150))
    assert [one.title for one in await shop.listed("failed", ALICE)] == ["Herons"]
    assert [one.title for one in await shop.listed("failed", BOB)] == [f"Otters-{n}" for n in range(3, 7)]
    for name in ("Otters-3", "Otters-4"):
        with pytest.raises(Conflict, match="no longer kept"):
            await shop.room.retry(BOB, name)
    shop.mended = True
    assert await shop.retry("Herons", ALICE) == "added"
    assert await shop.retry("Otters-5", BOB) == "added"


async def test_only_the_owner_sees_and_retries_what_is_not_stored(shop: Moody) -> None:
    await shop.collection("hers", caller=ALICE)
    await shop.put("Otters eat fish.", collection="hers", caller=ALICE)
    await shop.put("Otters are broken.", "Herons are broken.", collection="hers", caller=ALICE)
    assert [one.title for one in await shop.listed("failed", ALICE)] == ["Otters", "Herons"]
    (hidden,) = [one for one in await shop.listed("failed", ALICE) if one.title == "Herons"]
    for caller in (BOB, GUEST):
        assert await shop.listed("failed", caller) == []
        (seen,) = await shop.listed("all", caller)
        assert (seen.title, seen.status, seen.error) == ("Otters", "completed", None)
        for name in (hidden.id, "Herons", "herons"):
            for call in (shop.room.document, shop.room.retry, shop.room.delete_document):
                with pytest.raises(NotFound) as refused:
                    await call(caller, name)
                assert "Did you mean" not in refused.value.message
        with pytest.raises(Conflict, match="'Otters' is completed"):
            await shop.room.retry(caller, "Otters")
    shop.mended = True
    assert await shop.retry(hidden.id, OPERATOR) == "added"
    assert (await shop.room.document(ALICE, hidden.id)).owner == "alice"


@pytest.mark.parametrize(
    ("uploaded", "now", "expected"),
    [
        (Permissions(visibility="public"), PRIVATE, PRIVATE),
        (PRIVATE, Permissions(visibility="public"), PRIVATE),
        (None, PRIVATE, PRIVATE),
        (
            Permissions(visibility="restricted", allowed_users=("bob", "carol")),
            Permissions(visibility="restricted", allowed_users=("bob",), allowed_groups=("staff",)),
            Permissions(visibility="restricted", allowed_users=("bob",)),
        ),
    ],
    ids=["made private meanwhile", "uploaded as private", "uploaded without permissions", "fewer users"],
)
async def test_a_retry_permits_nobody_whom_the_stored_version_does_not_permit(
    shop: Moody, uploaded: Permissions | None, now: Permissions, expected: Permissions
) -> None:
    await shop.put("Herons eat fish.")
    await shop.put("Herons are broken.", permissions=uploaded)
    (failed,) = await shop.listed("failed")
    shop.mended = True
    job = await shop.room.retry(OPERATOR, failed.id)
    await shop.room.describe(OPERATOR, failed.id, permissions=now)
    await shop.ingest_pending()
    assert [one.outcome for one in (await shop.room.job(OPERATOR, job)).items] == ["replaced"]
    assert (await shop.room.document(OPERATOR, failed.id)).permissions == expected


async def test_a_document_that_is_not_stored_cannot_be_described(shop: Moody) -> None:
    await shop.put("Herons are broken.")
    with pytest.raises(Conflict, match="'Herons' is failed, not stored"):
        await shop.room.describe(OPERATOR, "Herons", title="Birds")


async def test_pages_go_through_stored_and_failed_documents_once(shop: Moody) -> None:
    await shop.put(*(f"Otter{n} eats fish." for n in range(3)), *(f"Heron{n} is broken." for n in range(4)))
    titles: list[str] = []
    after = 0
    while True:
        page, total = await shop.room.documents(OPERATOR, "notes", after, 2, status="all")
        assert total == 7
        if not page:
            break
        titles += [one.title for one in page]
        after = page[-1].key
    assert titles == [*(f"Otter{n}" for n in range(3)), *(f"Heron{n}" for n in range(4))]


async def test_a_url_that_fails_is_fetched_again(tmp_path: Path) -> None:
    pages: dict[str, bytes] = {"http://a/": b"\x00\x01"}
    shop = Workshop(tmp_path, pages=pages)
    await shop.collection()
    await shop.room.ingest(OPERATOR, "notes", [NewDocument(source="url", url="http://a/", connector_id="wiki")])
    await shop.ingest_pending()
    (failed,), _ = await shop.room.documents(OPERATOR, "notes", 0, 9, status="failed", connector_id="wiki")
    assert (failed.url, failed.content_hash) == ("http://a/", "")
    pages["http://a/"] = b"Herons eat fish."
    await shop.room.retry(OPERATOR, failed.id)
    await shop.ingest_pending()
    assert (await shop.room.document(OPERATOR, failed.id)).status == "completed"
    await shop.close()
