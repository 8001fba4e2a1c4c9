"""Owners take turns at ingestion: whatever one of them sends, another one's document is soon searchable."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from anabranch.domain.model import Embedding
from anabranch.domain.shares import Claimant, claimant
from anabranch.knowledge.ingest import BATCHES_EACH, CLAIM_LIMIT, URLS, URLS_EACH, Fetched
from anabranch.knowledge.model import Caller, JobItem, NewDocument, Parsed, Unprocessable
from anabranch.knowledge.parse import ParseLimits, Parsers
from anabranch.knowledge.records import jobs, keys
from anabranch.knowledge.records.jobs import Lane
from anabranch.knowledge.records.schema import LANES, MIGRATIONS
from anabranch.knowledge.records.sqlite import SqliteDatabase, connect, migrate
from anabranch.testing import FakeEmbedder
from support.embedding_server import model_server
from support.environment import served
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, Workshop, text, workshop
from support.settings_collections import embedding
from support.slow_documents import dripping, slow_pdf

# Less than a slow document takes, and more than ours does on a busy machine.
SOON_S = 15.0
Documents = Callable[[str], list[dict[str, Any]]]


def urls(address: str) -> list[dict[str, Any]]:
    return [{"source": {"type": "url", "content": f"{address}/{number}"}} for number in range(1_000)]


def pdfs(_: str) -> list[dict[str, Any]]:
    return [
        {"filename": f"{number}.pdf", "source": {"type": "file", "content": base64.b64encode(data).decode()}}
        for number, data in enumerate(slow_pdf(f"page {number}") for number in range(40))
    ]


@pytest.mark.usefixtures("isolated_home")
@pytest.mark.parametrize("documents", [urls, pdfs], ids=["1,000 URLs that drip", "40 PDFs that are slow to parse"])
async def test_a_document_is_searchable_while_another_key_has_sent_slow_ones(
    tmp_path: Path, documents: Documents
) -> None:
    database = SqliteDatabase.open(tmp_path / "data")
    mallory, alice = database.writing(lambda db: [keys.create(db, user=user)[1] for user in ("mallory", "alice")])
    database.close()
    async with (
        model_server() as model,
        dripping() as address,
        served(DATA_DIR=str(tmp_path / "data"), AUTH="api_key", **embedding(model)) as server,
    ):

        async def call(key: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {key}"}
            async with server.session.request(method, server.url + path, json=body, headers=headers) as response:
                assert response.status in (200, 201), await response.text()
                return dict(await response.json())

        async def ingest(key: str, name: str, sent: list[dict[str, Any]]) -> str:
            await call(key, "POST", "/v1/collections", {"name": name})
            return str((await call(key, "POST", "/v1/ingest", {"collection_id": name, "documents": sent}))["job_id"])

        async def state(key: str, job: str) -> dict[str, Any]:
            return await call(key, "GET", f"/v1/ingest/{job}")

        slow = await ingest(mallory, "slow", documents(address))
        while "processing" not in {one["status"] for one in (await state(mallory, slow))["documents"]}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        heron = {"title": "herons", "source": {"type": "text", "content": "Herons eat fish."}}
        job = await ingest(alice, "hers", [heron])
        async with asyncio.timeout(SOON_S):
            while (await state(alice, job))["status"] != "completed":  # noqa: ASYNC110  no event comes from a server
                await asyncio.sleep(0.05)
        found = await call(alice, "POST", "/v1/query", {"query": "herons", "collections": ["hers"]})
        assert [source["title"] for source in found["sources"]] == ["herons"]
        assert (await state(mallory, slow))["status"] == "processing"


async def test_an_owner_with_slow_files_occupies_one_parser() -> None:
    parsers = Parsers(ParseLimits())
    slow = [asyncio.create_task(_parse_for("mallory", parsers, slow_pdf(str(number)), "a.pdf")) for number in range(8)]
    try:
        parsed = [await _parse_for(owner, parsers, b"Herons.", "a.txt") for owner in ("alice", "bob", "alice")]
        assert [one.text for one in parsed] == ["Herons."] * 3
        assert len(parsers.pids) == 2
    finally:
        await parsers.close()
        await asyncio.gather(*slow, return_exceptions=True)


async def _parse_for(owner: str, parsers: Parsers, data: bytes, filename: str) -> Parsed:
    before = claimant.set(Claimant(name=owner))
    try:
        return await parsers.parse(data, filename)
    finally:
        claimant.reset(before)


class Held(Workshop):
    """Parses files and fetches pages with "slow" in them when it is told to, and notes what is in progress."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, embedder=NotingEmbedder())
        self.go_on = asyncio.Event()
        self.in_progress: list[str] = []

    @property
    def slow(self) -> int:
        return sum("slow" in one for one in self.in_progress)

    async def _parse(self, data: bytes, filename: str | None, media_type: str | None) -> Parsed:
        await self._wait(data.decode())
        return await super()._parse(data, filename, media_type)

    async def _fetch(self, url: str) -> Fetched:
        await self._wait(url)
        return Fetched(f"A page at {len(url)}, {sha256(url.encode()).hexdigest()}.".encode(), "text/plain")

    async def _wait(self, what: str) -> None:
        self.in_progress.append(what)
        if "slow" in what:
            await self.go_on.wait()


class NotingEmbedder(FakeEmbedder):
    """Notes for whom it embeds: threads take their turns by that name."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[str] = []

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        self.owners.append(claimant.get().name)
        return await super().embed(texts)


@asynccontextmanager
async def indexing(folder: Path) -> AsyncIterator[Held]:
    shop = Held(folder)
    await shop.collection()
    await shop.collection("hers", ALICE)
    await shop.collection("his", BOB)
    work = asyncio.create_task(shop.indexer.run())
    try:
        yield shop
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await shop.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def finished(shop: Workshop, job: str) -> list[JobItem]:
    async with asyncio.timeout(10):
        while (found := await shop.room.job(OPERATOR, job)).completed_at is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return list(found.items)


def page(url: str, identity: str | None = None) -> NewDocument:
    return NewDocument(source="url", url=url, identity=identity)


async def test_slow_urls_of_an_owner_do_not_delay_its_files(tmp_path: Path) -> None:
    async with indexing(tmp_path) as shop:
        slow = await shop.room.ingest(ALICE, "hers", [page(f"http://slow/{number}") for number in range(URLS_EACH * 3)])
        file = await shop.room.ingest(ALICE, "hers", [text("Herons eat fish.")])
        assert [item.outcome for item in await finished(shop, file)] == ["added"]
        await until(lambda: shop.slow == URLS_EACH)
        shop.go_on.set()
        assert {item.outcome for item in await finished(shop, slow)} == {"added"}


async def test_an_owner_has_at_most_two_batches_of_files_in_progress(tmp_path: Path) -> None:
    async with indexing(tmp_path) as shop:
        slow = await shop.room.ingest(ALICE, "hers", [text(f"Number{n} is slow.") for n in range(100)])
        other = await shop.room.ingest(BOB, "his", [text("Herons eat fish.")])
        assert [item.outcome for item in await finished(shop, other)] == ["added"]
        await until(lambda: shop.slow == BATCHES_EACH * CLAIM_LIMIT)
        shop.go_on.set()
        assert len(await finished(shop, slow)) == 100


async def test_a_version_waits_for_an_earlier_one_in_another_lane(tmp_path: Path) -> None:
    async with indexing(tmp_path) as shop:
        older = await shop.room.ingest(ALICE, "hers", [page("http://slow/", "herons")])
        await until(lambda: shop.slow == 1)
        newer = await shop.room.ingest(
            ALICE, "hers", [NewDocument(source="text", data=b"Herons are quick.", identity="herons")]
        )
        other = await shop.room.ingest(ALICE, "hers", [text("Otters are quick.")])
        assert [item.outcome for item in await finished(shop, other)] == ["added"]
        shop.go_on.set()
        assert [item.outcome for item in await finished(shop, older)] == ["added"]
        assert [item.outcome for item in await finished(shop, newer)] == ["replaced"]


async def test_a_url_that_must_wait_does_not_delay_the_next_one(tmp_path: Path) -> None:
    async with indexing(tmp_path) as shop:
        await shop.room.ingest(ALICE, "hers", [page("http://slow/"), page("http://slow/")])
        other = await shop.room.ingest(ALICE, "hers", [page("http://quick/")])
        assert [item.outcome for item in await finished(shop, other)] == ["added"]
        assert shop.slow == 1


async def test_threads_and_embedders_know_the_owner(tmp_path: Path) -> None:
    async with indexing(tmp_path) as shop:
        await finished(shop, await shop.room.ingest(ALICE, "hers", [text("Herons eat fish.")]))
        await finished(shop, await shop.room.ingest(BOB, "his", [text("Otters eat fish.")]))
        assert isinstance(shop.embedder, NotingEmbedder)
        assert shop.embedder.owners == ["alice", "bob"]


async def test_all_owners_together_have_a_limit_and_there_is_room_for_another(tmp_path: Path) -> None:
    async with indexing(tmp_path) as shop:
        callers = [Caller(user=f"user{number}") for number in range(URLS // URLS_EACH + 1)]
        for caller in callers:
            await shop.collection(str(caller.user), caller)
            many = [page(f"http://slow/{caller.user}/{number}") for number in range(URLS_EACH * 2)]
            await shop.room.ingest(caller, str(caller.user), many)
        await until(lambda: shop.slow >= URLS // 2)
        await shop.room.ingest(ALICE, "hers", [page("http://slow/alice")])
        await until(lambda: "http://slow/alice" in shop.in_progress)
        assert shop.slow <= URLS // 2 + len(callers) + 1
        shop.go_on.set()


# --- after a crash


async def test_a_slow_retried_document_does_not_delay_others(tmp_path: Path) -> None:
    async with workshop(tmp_path) as before:
        await before.collection()
        slow = await before.room.ingest(OPERATOR, "notes", [text("Number1 is slow."), text("Number2 is slow.")])
        await before.database.write(lambda db: jobs.claim(db, 16))
    shop = Held(tmp_path)
    await shop.collection("hers", ALICE)
    work = asyncio.create_task(shop.indexer.run())
    other = await shop.room.ingest(ALICE, "hers", [text("Herons eat fish.")])
    assert [item.outcome for item in await finished(shop, other)] == ["added"]
    shop.go_on.set()
    assert [item.outcome for item in await finished(shop, slow)] == ["added", "added"]
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await shop.close()


async def test_a_crash_while_one_document_is_stored_alone_counts_for_it_only(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.room.ingest(OPERATOR, "notes", [text("Herons eat fish."), text("Otters eat fish.")])
        [herons] = await shop.database.write(lambda db: jobs.claim(db, 1))
        await shop.database.write(lambda db: jobs.claim(db, 1))
        await shop.database.write(lambda db: jobs.mark_alone(db, herons.key))
        await shop.database.write(jobs.recover)
        [alone] = await shop.database.write(lambda db: jobs.claim(db, 16))
        [other] = await shop.database.write(lambda db: jobs.claim(db, 16))
        assert {claim.arrived.identity: claim.attempts for claim in (alone, other)} == {"Herons": 1, "Otters": 0}


async def test_two_retried_documents_are_not_stored_at_once(tmp_path: Path) -> None:
    shop = Held(tmp_path)
    await shop.collection()
    job = await shop.room.ingest(OPERATOR, "notes", [text(f"Number{number} is slow.") for number in range(3)])
    await shop.database.write(lambda db: jobs.claim(db, 16))
    await shop.database.write(jobs.recover)
    together: list[int] = []
    embed = shop.embedder.embed

    async def watched(texts: Sequence[str]) -> Sequence[Embedding]:
        found = shop.database.reading(lambda db: db.execute("SELECT count(*) FROM items WHERE alone = 1").fetchone()[0])
        together.append(found)
        return await embed(texts)

    shop.embedder.embed = watched  # type: ignore[method-assign]
    shop.go_on.set()
    work = asyncio.create_task(shop.indexer.run())
    await finished(shop, job)
    assert together == [1, 1, 1]
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await shop.close()


async def test_lanes_are_the_owners_that_wait(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.collection("hers", ALICE)
        assert shop.database.reading(jobs.lanes) == []
        await shop.room.ingest(ALICE, "hers", [page("http://a/"), text("Herons eat fish."), text("Otters eat fish.")])
        await shop.room.ingest(OPERATOR, "notes", [text("Herons eat fish.")])
        assert shop.database.reading(jobs.lanes) == [Lane("", False), Lane("alice", False), Lane("alice", True)]
        held = await shop.room.held("alice")
        assert (held["pending_documents"], held["pending_bytes"]) == (3, 32)
        await shop.database.write(lambda db: jobs.claim(db, 16, lane=Lane("alice", False)))
        assert shop.database.reading(jobs.lanes) == [Lane("", False), Lane("alice", True)]
        assert await shop.room.held("alice") == held


def test_what_waits_in_records_of_before_has_a_lane(tmp_path: Path) -> None:
    connection = connect(tmp_path / "records.sqlite")
    migrate(connection, MIGRATIONS[: MIGRATIONS.index(LANES)])
    connection.execute(
        "INSERT INTO jobs (key, id, collection, collection_id, owner, chunking, created_at) "
        "VALUES (1, 'job', 1, 'collection', 'alice', '{}', 0)"
    )
    for key, source, status in ((1, "url", "pending"), (2, "file", "processing"), (3, "file", "completed")):
        connection.execute(
            "INSERT INTO items (key, job, ordinal, document_id, status, arrived, content_hash) "
            "VALUES (?, 1, ?, 'document', ?, ?, '')",
            (key, key, status, f'{{"source": "{source}"}}'),
        )
        connection.execute("INSERT INTO uploads VALUES (?, x'010203')", (key,))
    migrate(connection)
    assert jobs.lanes(connection) == [Lane("alice", True)]
    assert jobs.backlog(connection, "alice") == (2, 6)
    connection.close()


@pytest.mark.sqlite
async def test_finding_the_lanes_does_not_read_all_that_waits(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.room.ingest(OPERATOR, "notes", [text(f"Number{n} eats fish.") for n in range(1_000)])
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        def read(db: Any) -> list[Lane]:
            db.set_progress_handler(count, 100)
            try:
                return jobs.lanes(db)
            finally:
                db.set_progress_handler(None, 100)

        assert shop.database.reading(read) == [Lane("", False)]
        assert steps < 20


async def test_a_parser_that_is_refused_a_file_is_used_again() -> None:
    parsers = Parsers(ParseLimits())
    with pytest.raises(Unprocessable):
        await parsers.parse(b"%PDF-1.7", "a.pdf")
    [first] = parsers.pids
    assert (await parsers.parse(b"Herons.", "a.txt")).text == "Herons."
    assert parsers.pids == [first]
    await parsers.close()
