"""Nodes that share the records in PostgreSQL: each has an index of its own, and one at a time processes a document."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.app.erasure import eraser_for
from anabranch.app.records import node_of
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import NotFound
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.ingest import Indexer, Ingestion
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import PRIVATE, JobItem, NewDocument, Parsed, Permissions
from anabranch.knowledge.parse import ParseLimits, parse
from anabranch.knowledge.records import collections, erasures, jobs, nodes
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.erasures import Erasure, ErasureTimes
from anabranch.knowledge.records.nodes import LEASE_S, Node
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.knowledge.search import Searcher
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, Workshop, text
from support.postgres_server import running_postgres, shared_postgres

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("postgres-nodes")]
soak = pytest.mark.soak

PATIENCE_S = 30.0
# Notes a figure in the report of pytest (-o junit_family=xunit1 --junitxml=FILE).
Record = Callable[[str, object], None]


class SlowToDrop(IndexWriter):
    """Drops what was erased when it is told to."""

    go_on: threading.Event | None = None

    def drop_deleted(self) -> int:
        assert self.go_on is None or self.go_on.wait(PATIENCE_S)
        return super().drop_deleted()


class NodeShop(Workshop):
    """A node: a data folder with an index and an id, and records that others have too. While it is `holding`, it reads
    documents with "slow" in them only when it is told to."""

    def __init__(self, folder: Path, url: str) -> None:
        settings = Settings(data_dir=str(folder), database_url=url)
        super().__init__(folder, database=PostgresDatabase.open(url))
        self.id = node_of(settings)
        self.generations = Generations(folder / "index", self.id)
        self.reader = type(self.reader)(self.generations)
        self.writer = self.slow_writer = SlowToDrop(self.database, self.generations, self.embedder.name)
        self.room = Knowledge(
            database=self.database,
            index=self.reader,
            searcher=Searcher(self.database, self.reader, self.embedder, None),
            embedder=self.embedder,
            default_visibility="public",
            erasure_times=ErasureTimes(after_s=0, settle_s=0),
        )
        now = time.time()
        self.node = Node(id=self.id, name=folder.name, version="1", started_at=now, seen_at=now, seq=0, erased_pass=0)
        self.indexer = Indexer(
            self.database,
            Ingestion(self.database, self.embedder, self._parse, self._fetch),
            self.writer,
            retention_days=30,
            erase=eraser_for(settings, self.database, self.writer).erase_due,
            node=self.node,
        )
        self.holding = False
        self.reading, self.go_on = asyncio.Event(), asyncio.Event()

    async def _parse(self, data: bytes, filename: str | None, media_type: str | None) -> Parsed:
        if self.holding and b"slow" in data:
            self.reading.set()
            await self.go_on.wait()
        return parse(data, filename, ParseLimits(), media_type)

    async def beat(self) -> None:
        """Say once that it is alive."""
        await self.indexer._beat(self.node)

    def claim(self, limit: int = 16) -> list[jobs.Claim]:
        return self.database.writing(partial(jobs.claim, limit=limit, node=self.id))

    def silent(self, seconds: float = LEASE_S) -> None:
        """It was last heard of so much earlier."""
        self.write("UPDATE nodes SET seen_at = seen_at - ? WHERE id = ?", seconds, self.id)

    def write(self, sql: str, *values: Any) -> None:
        self.database.writing(lambda db: db.execute(sql, values))

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.database.reading(lambda db: [tuple(row) for row in db.execute(sql, values)])

    def described(self) -> Node:
        """What the records say of it."""
        return next(one for one in self.database.reading(nodes.listed) if one.id == self.id)

    def end(self) -> None:
        self.go_on.set()
        self.database.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        """With its indexer."""
        task = asyncio.create_task(self.indexer.run())
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_what_another_node_must_finish_first_takes_no_lock(tmp_path: Path) -> None:
    url = shared_postgres().create_database()
    one, two = NodeShop(tmp_path / "one", url), NodeShop(tmp_path / "two", url)
    try:
        await one.collection()
        for content in ("Herons eat fish.", "Herons eat frogs."):  # the second one waits for the first one
            await one.room.ingest(OPERATOR, "notes", [text(content)])
        [claimed] = one.claim(limit=1)
        written: list[object] = []
        two.database.write = two.database.writing = written.append  # type: ignore[assignment, method-assign]
        assert await two.indexer._claim() == []
        assert written == []
        one.database.writing(partial(jobs.release, claims=[claimed]))
        assert one.database.reading(lambda db: jobs.is_claimable(db, (), claimed.lane, two.id))
    finally:
        one.end()
        two.end()


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def items(shop: Workshop, job: str) -> list[JobItem]:
    return list((await shop.room.job(OPERATOR, job)).items)


def stored(shop: NodeShop) -> dict[str, Any]:
    """Everything that storing a document leaves."""
    tables = ("documents", "contents", "chunks", "changes", "jobs", "items", "uploads", "audit", "reserved", "stored")
    return {table: sorted(map(repr, shop.rows(f"SELECT * FROM {table}"))) for table in tables}


@pytest.fixture
def url() -> Iterator[str]:
    made = shared_postgres().create_database()
    yield made
    shared_postgres().drop(made)


async def two_nodes(folder: Path, url: str) -> tuple[NodeShop, NodeShop]:
    """Both alive; the first one leads."""
    first, second = sorted((NodeShop(folder / name, url) for name in ("one", "two")), key=lambda shop: shop.id)
    await first.collection()
    await first.beat()
    await second.beat()
    return first, second


@pytest.fixture
async def pair(tmp_path: Path, url: str) -> AsyncIterator[tuple[NodeShop, NodeShop]]:
    made = await two_nodes(tmp_path, url)
    yield made
    for shop in made:
        shop.end()


# Questions


@pytest.mark.parametrize("indexed", [False, True])
async def test_what_one_node_ingests_the_other_finds_with_its_next_question(
    pair: tuple[NodeShop, NodeShop], indexed: bool
) -> None:
    one, other = pair
    for round_number, animal in enumerate(("Herons", "Otters", "Badgers", "Newts")):
        writer, reader = (one, other) if round_number % 2 else (other, one)
        assert animal not in await reader.titles(animal)
        await writer.put(f"{animal} live here.")
        if indexed:
            writer.writer.fold()
        assert [(await shop.titles(animal))[0] for shop in pair] == [animal, animal]
    for shop in pair:
        shop.writer.fold()
        assert sorted(await shop.titles("Herons Otters Badgers Newts live")) == ["Badgers", "Herons", "Newts", "Otters"]
    await one.put("Herons fly.")  # a new version
    assert [passage.text for passage in await other.find("Herons", limit=1)] == ["Herons fly."]


async def test_each_node_indexes_the_same_documents_in_its_own_folder(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    await one.put("Herons wade.", "Otters swim.")
    assert one.writer.fold().last_chunk == 2
    assert other.writer.unindexed()[0] == 2
    assert other.writer.fold().last_chunk == 2
    assert (one.writer.unindexed()[0], other.writer.unindexed()[0]) == (0, 0)
    assert one.folder != other.folder
    assert not one.writer.reported()
    assert not other.writer.reported()


@pytest.mark.parametrize("indexed", [False, True])
async def test_what_is_deleted_on_one_node_is_not_found_on_the_other(
    pair: tuple[NodeShop, NodeShop], indexed: bool
) -> None:
    one, other = pair
    await one.put("Herons wade.", "Otters swim.")
    if indexed:
        one.writer.fold()
        other.writer.fold()
    assert sorted(await other.titles("Herons Otters")) == ["Herons", "Otters"]
    await one.room.delete_document(OPERATOR, "Herons")
    assert await other.titles("Herons Otters") == ["Otters"]
    with pytest.raises(NotFound):
        await other.room.document(OPERATOR, "Herons")
    await other.room.delete_collection(OPERATOR, "notes")
    assert await one.titles("Herons Otters") == []
    assert await one.room.collections(OPERATOR) == []


@pytest.mark.parametrize("indexed", [False, True])
async def test_narrowed_permissions_hold_on_the_other_node_from_the_next_question_on(
    pair: tuple[NodeShop, NodeShop], indexed: bool
) -> None:
    one, other = pair
    await one.put("Herons wade.", "Otters swim.")
    if indexed:
        one.writer.fold()
        other.writer.fold()
    for caller in (ALICE, BOB):
        assert sorted(await other.titles("Herons Otters", caller)) == ["Herons", "Otters"]
    await one.room.describe(
        OPERATOR, "Herons", permissions=Permissions(visibility="restricted", allowed_groups=("staff",))
    )
    assert sorted(await other.titles("Herons Otters", ALICE)) == ["Herons", "Otters"]
    assert await other.titles("Herons Otters", BOB) == ["Otters"]
    await other.room.describe(OPERATOR, "Herons", permissions=PRIVATE)
    assert await one.titles("Herons Otters", ALICE) == ["Otters"]
    await one.room.describe_collection(OPERATOR, "notes", permissions=PRIVATE)
    assert await other.titles("Herons Otters", ALICE) == []
    assert sorted(await other.titles("Herons Otters")) == ["Herons", "Otters"]


async def test_a_node_that_has_slept_through_many_changes_finds_what_there_is(pair: tuple[NodeShop, NodeShop]) -> None:
    """It has an index from before, and the log of changes does not reach back to it."""
    one, other = pair
    await one.put("Herons wade.", "Otters swim.")
    other.writer.fold()
    assert len(await other.titles("Herons Otters")) == 2
    await one.room.delete_document(OPERATOR, "Herons")
    await one.put("Newts hide.", "Badgers dig.")
    one.write("DELETE FROM changes WHERE seq < (SELECT max(seq) FROM changes)")
    assert sorted(await other.titles("Herons Otters Newts Badgers")) == ["Badgers", "Newts", "Otters"]
    other.writer.fold()
    assert sorted(await other.titles("Herons Otters Newts Badgers")) == ["Badgers", "Newts", "Otters"]


# Claims


async def test_work_of_a_node_that_is_alive_stays_its_own(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    await one.room.ingest(OPERATOR, "notes", [text("Herons wade.")])
    [claim] = one.claim()
    one.silent(LEASE_S - 1)
    assert not other.database.reading(lambda db: jobs.abandoned(db, other.id))
    assert other.database.writing(partial(jobs.recover, node=other.id, restarted=False)) == 0
    assert other.claim() == []
    assert one.database.reading(partial(jobs.is_held, claim=claim))


async def test_work_of_a_node_that_was_silent_for_its_lease_is_taken_over(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    job = await one.room.ingest(OPERATOR, "notes", [text("Herons wade.")])
    [claim] = one.claim()
    one.silent()
    assert other.database.reading(lambda db: jobs.abandoned(db, other.id))
    assert other.database.writing(partial(jobs.recover, node=other.id, restarted=False)) == 1
    assert not other.database.reading(lambda db: jobs.abandoned(db, other.id))
    await other.ingest_pending()
    assert not one.database.reading(partial(jobs.is_held, claim=claim))
    assert [item.outcome for item in await items(one, job)] == ["added"]
    assert await one.titles("Herons") == ["Herons"]


async def test_work_of_a_node_that_has_stopped_is_taken_over_without_waiting(pair: tuple[NodeShop, NodeShop]) -> None:
    """Also what it could not release any more."""
    one, other = pair
    await one.room.ingest(OPERATOR, "notes", [text("Herons wade.")])
    one.claim()
    one.database.writing(partial(nodes.leave, node=one.id))
    assert other.database.reading(lambda db: jobs.abandoned(db, other.id))
    assert other.database.writing(partial(jobs.recover, node=other.id, restarted=False)) == 1
    assert len(other.claim()) == 1


async def test_a_node_that_starts_again_releases_what_it_had(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    first, second = [text("Herons wade."), text("Otters swim.")]
    await one.room.ingest(OPERATOR, "notes", [first])
    one.claim()
    await one.room.ingest(OPERATOR, "notes", [second])
    other.claim()
    await one.beat()
    assert one.database.writing(partial(jobs.recover, node=one.id)) == 1
    assert [node for (node,) in one.rows("SELECT node FROM items WHERE status = 'processing'")] == [other.id]


async def test_a_running_node_that_is_cancelled_gives_its_work_back_at_once(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    one.holding = True
    async with one.running():
        await one.room.ingest(OPERATOR, "notes", [text("Herons are slow.")])
        await one.reading.wait()
    assert one.rows("SELECT status, attempts FROM items") == [("pending", 0)]
    assert not one.described().is_alive
    await other.ingest_pending()
    assert await one.titles("Herons") == ["Herons"]


@asynccontextmanager
async def paused(one: NodeShop, other: NodeShop) -> AsyncIterator[str]:
    """The first node reads a document; meanwhile it was silent, and the other one may take over. The job's id. In the
    end the first one goes on, and has nothing more to do."""
    job = await one.room.ingest(OPERATOR, "notes", [text("Herons are slow.")])
    one.holding = True
    working = asyncio.create_task(one.ingest_pending())
    await one.reading.wait()
    one.silent()
    assert other.database.writing(partial(jobs.recover, node=other.id, restarted=False)) == 1
    yield job
    one.go_on.set()
    await asyncio.wait_for(working, PATIENCE_S)


async def test_a_paused_node_does_not_store_a_document_that_another_has_stored(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    async with paused(one, other) as job:
        await other.ingest_pending()
        before = stored(other)
        assert [item.outcome for item in await items(other, job)] == ["added"]
    assert stored(other) == before
    assert await one.titles("Herons") == await other.titles("Herons") == ["Herons"]


async def test_a_paused_node_does_not_overwrite_that_another_has_failed(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    async with paused(one, other) as job:
        [claim] = other.claim()
        other.database.writing(lambda db: jobs.finish(db, claim.key, "failed", keep_upload=True, error="It is broken."))
        before = stored(other)
    assert stored(other) == before
    assert [(item.status, item.error) for item in await items(one, job)] == [("failed", "It is broken.")]


async def test_a_paused_node_leaves_a_document_to_the_node_that_processes_it_now(
    pair: tuple[NodeShop, NodeShop],
) -> None:
    one, other = pair
    async with paused(one, other) as job:
        [claim] = other.claim()
        before = stored(other)
    assert stored(other) == before
    assert other.database.reading(partial(jobs.is_held, claim=claim))
    other.database.writing(partial(jobs.release, claims=[claim]))
    await other.ingest_pending()
    assert [item.outcome for item in await items(one, job)] == ["added"]
    assert len(await one.find("Herons")) == 1


async def test_a_paused_node_leaves_a_document_that_waits_again(pair: tuple[NodeShop, NodeShop]) -> None:
    """Nobody has claimed it yet; the paused node then claims it like any other."""
    one, other = pair
    async with paused(one, other) as job:
        assert one.rows("SELECT status FROM items") == [("pending",)]
    assert [item.outcome for item in await items(one, job)] == ["added"]
    assert one.rows("SELECT attempts, node FROM items") == [(2, one.id)]
    assert one.rows("SELECT count(*) FROM documents") == [(1,)]


async def test_a_paused_node_does_not_bring_back_what_was_deleted_meanwhile(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    async with paused(one, other):
        await other.ingest_pending()
        await other.room.delete_document(OPERATOR, "Herons")
    assert await one.titles("Herons") == []
    assert one.rows("SELECT count(*) FROM documents") == [(0,)]


async def test_a_paused_node_that_fails_does_not_release_what_another_processes(
    pair: tuple[NodeShop, NodeShop],
) -> None:
    one, other = pair
    await one.room.ingest(OPERATOR, "notes", [text("Herons wade.")])
    claims = one.claim()
    one.silent()
    other.database.writing(partial(jobs.recover, node=other.id, restarted=False))
    [claim] = other.claim()
    one.database.writing(partial(jobs.release, claims=claims))
    assert other.database.reading(partial(jobs.is_held, claim=claim))


async def test_two_nodes_that_claim_at_once_never_claim_the_same(pair: tuple[NodeShop, NodeShop]) -> None:
    """Nor two versions of a document, nor the same content twice; and versions are processed in their order."""
    sent = [
        NewDocument(source="text", data=f"Content {number % 17}.".encode(), title="T", identity=f"id {number % 20}")
        for number in range(80)
    ]
    await pair[0].room.ingest(OPERATOR, "notes", sent)
    finished: list[tuple[str, int]] = []
    ready = threading.Barrier(2)

    def claimed(db: Session, shop: NodeShop) -> list[jobs.Claim]:
        claims = jobs.claim(db, 4, node=shop.id)
        processing = db.execute("SELECT arrived, content_hash FROM items WHERE status = 'processing'").fetchall()
        for column in (0, 1):
            counts = Counter(row[column].partition('"identity":')[2] or row[column] for row in processing)
            assert set(counts.values()) <= {1}
        return claims

    def work(shop: NodeShop) -> list[int]:
        keys: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        ready.wait(PATIENCE_S)
        while shop.database.reading(jobs.waiting):
            assert time.monotonic() < deadline
            claims = shop.database.writing(partial(claimed, shop=shop))
            for claim in claims:
                keys.append(claim.key)
                finished.append((claim.arrived.identity or "", claim.key))
                shop.database.writing(partial(jobs.finish, item=claim.key, status="completed"))
        return keys

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(work, pair)
    assert sorted(one + other) == sorted(key for (key,) in pair[0].rows("SELECT key FROM items"))
    assert one
    assert other
    for identity in {identity for identity, _ in finished}:
        versions = [key for name, key in finished if name == identity]
        assert versions == sorted(versions)


async def test_two_running_nodes_ingest_everything_once(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    sent = [text(f"Animal{number % 40} number {number} lives here.") for number in range(120)]
    async with one.running(), other.running():
        made = [await shop.room.ingest(OPERATOR, "notes", sent[at::2]) for at, shop in enumerate(pair)]
        await until(lambda: not one.database.reading(jobs.waiting))
    found = [item for job in made for item in await items(one, job)]
    assert {item.status for item in found} == {"completed"}
    assert one.rows("SELECT max(attempts) FROM items") == [(1,)]
    assert one.rows("SELECT count(*), count(DISTINCT identity) FROM documents") == [(40, 40)]
    assert one.rows("SELECT count(*) FROM chunks") == one.rows("SELECT sum(chunk_count) FROM documents")


@soak
@pytest.mark.timeout(120)
async def test_a_node_takes_over_within_the_lease(pair: tuple[NodeShop, NodeShop], record_property: Record) -> None:
    one, other = pair
    async with other.running():
        one.database.writing(partial(_given_work, shop=one))
        await one.beat()
        began = time.monotonic()
        await until(lambda: not one.database.reading(jobs.waiting))
        taken_s = time.monotonic() - began
    assert one.rows("SELECT node, status, outcome FROM items ORDER BY key") == [
        (other.id, "completed", "added"),
        (other.id, "completed", "replaced"),
    ]
    record_property("takeover_s", taken_s)
    assert LEASE_S - 0.5 < taken_s < LEASE_S + 2 * nodes.BEAT_S + 1


# What must not make a node that is alive look dead


async def keep_their_work(pair: tuple[NodeShop, NodeShop], meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Both nodes run and process a document, of which another version waits, while something happens. Then each of them
    says twice that it is alive, and has what it had."""
    claimed = "SELECT key, node, attempts FROM items WHERE status = 'processing' ORDER BY key"
    one, other = pair
    async with one.running(), other.running():
        await both_beat(pair)
        for shop in pair:
            shop.database.writing(partial(_given_work, shop=shop))
        before = one.rows(claimed)
        assert {node for _, node, _ in before} == {one.id, other.id}
        await meanwhile()
        await both_beat(pair)
        assert one.rows(claimed) == before


async def both_beat(pair: tuple[NodeShop, NodeShop]) -> None:
    """Until each has said twice more that it is alive: between the two it looks who else is."""
    for _ in range(2):
        seen = {shop.id: shop.described().seen_at for shop in pair}
        await until(partial(_heard_of, pair, seen))


def _heard_of(pair: tuple[NodeShop, NodeShop], since: dict[str, float]) -> bool:
    return all(shop.described().seen_at > since[shop.id] for shop in pair)


def _given_work(db: Session, shop: NodeShop) -> None:
    """Two versions of a document, of which the node has claimed the first."""
    [collection] = collections.listed(db)
    for version in ("first", "second"):
        jobs.create(
            db, collection, OPERATOR, [text(f"{shop.id} has a {version} version.")], collection.settings.chunking
        )
        if version == "first":
            assert len(jobs.claim(db, 1, node=shop.id)) == 1


def passing(seconds: float) -> None:
    """Time, which is what this is about."""
    threading.Event().wait(seconds)


@soak
@pytest.mark.timeout(120)
async def test_a_long_write_does_not_make_nodes_take_each_others_work(
    pair: tuple[NodeShop, NodeShop], url: str
) -> None:
    """A collection is deleted, or all vectors are replaced: ordered writes of the others wait for that."""
    third = PostgresDatabase.open(url)
    try:
        await keep_their_work(pair, lambda: asyncio.to_thread(third.writing, lambda db: passing(LEASE_S + 2)))
    finally:
        third.close()


@soak
@pytest.mark.timeout(120)
async def test_an_outage_of_the_database_does_not_make_nodes_take_each_others_work(tmp_path: Path) -> None:
    """None of them could say that it was alive."""
    with running_postgres(tmp_path / "server") as server:

        async def outage() -> None:
            server.pause()
            try:
                await asyncio.to_thread(passing, LEASE_S + 2)
            finally:
                server.resume()

        pair = await two_nodes(tmp_path, server.create_database())
        try:
            await keep_their_work(pair, outage)
        finally:
            for shop in pair:
                shop.end()


@soak
@pytest.mark.timeout(120)
async def test_a_node_that_drops_what_was_erased_for_long_keeps_its_work(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    await one.put("Herons wade.")
    other.slow_writer.go_on = threading.Event()

    async def erased() -> None:
        await one.room.erase(document="Herons")
        await until(lambda: one.database.reading(erasures.last_pass))
        await asyncio.to_thread(passing, LEASE_S + 2)
        assert other.described().is_alive
        assert other.described().erased_pass == 0

    try:
        await keep_their_work(pair, erased)
    finally:
        other.slow_writer.go_on.set()


# Which node does what one does for all


async def test_the_first_node_that_is_alive_leads(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair

    def leading() -> list[bool]:
        return [shop.database.reading(partial(nodes.leads, node=shop.id)) for shop in pair]

    assert leading() == [True, False]
    one.silent()
    assert leading() == [False, True]
    await one.beat()
    assert leading() == [True, False]
    one.database.writing(partial(nodes.leave, node=one.id))
    assert leading() == [False, True]
    other.silent()
    assert leading() == [True, True]  # nobody is known to be alive


async def test_a_node_that_was_not_heard_of_for_a_day_is_forgotten(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    other.silent(nodes.FORGOTTEN_S + 60)
    one.silent(nodes.FORGOTTEN_S - 60)
    one.database.writing(nodes.forget_gone)
    assert [node.id for node in one.database.reading(nodes.listed)] == [one.id]
    assert one.database.writing(partial(nodes.remove, node=one.id))
    assert not one.database.writing(partial(nodes.remove, node=one.id))


async def test_a_node_that_has_something_to_erase_is_not_forgotten(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    await one.put("Herons wade.")
    await one.room.erase(document="Herons")
    await one.indexer.erase_due()
    other.silent(nodes.FORGOTTEN_S + 60)
    one.database.writing(nodes.forget_gone)
    assert len(one.database.reading(nodes.listed)) == 2


# Erasure


def due_now(shop: NodeShop) -> None:
    shop.write("UPDATE erasures SET next_at = 0 WHERE next_at IS NOT NULL")


async def erasure(shop: NodeShop, made: Erasure) -> Erasure:
    found = await shop.database.read(lambda db: erasures.by_id(db, made.id))
    assert found is not None
    return found


def in_index(shop: NodeShop, vector: bytes) -> bool:
    return any(vector in file.read_bytes() for file in (shop.folder / "index").rglob("*") if file.is_file())


@asynccontextmanager
async def erasing(one: NodeShop, other: NodeShop) -> AsyncIterator[tuple[Erasure, bytes]]:
    """Both have a document in their indexes; it is erased, and one of them has run the first pass. Also its vector."""
    await one.put("Herons wade.", "Otters swim.")
    vector = bytes(one.rows("SELECT vector FROM embeddings ORDER BY chunk")[0][0])
    for shop in (one, other):
        shop.writer.fold()
        assert in_index(shop, vector)
    made, _ = await one.room.erase(document="Herons")
    await other.indexer.erase_due()  # the other one leads
    assert (await erasure(one, made)).state == "due"
    await one.indexer.erase_due()
    assert not in_index(one, vector)
    yield made, vector


async def test_an_erasure_is_complete_when_every_node_has_dropped_it_from_its_index(
    pair: tuple[NodeShop, NodeShop],
) -> None:
    one, other = pair
    async with erasing(one, other) as (made, vector):
        due_now(one)
        await one.indexer.erase_due()
        waiting = await erasure(one, made)
        assert (waiting.state, waiting.error) == ("settling", None)  # the other one is alive, and will
        assert in_index(other, vector)
        async with other.running():
            await until(lambda: other.described().erased_pass > 0)
            assert not in_index(other, vector)
        due_now(one)
        await one.beat()
        await one.indexer.erase_due()
        assert (await erasure(one, made)).state == "complete"
        assert await one.titles("Herons Otters") == await other.titles("Herons Otters") == ["Otters"]


async def test_an_erasure_names_the_node_that_is_gone_and_waits_for_it(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    async with erasing(one, other) as (made, vector):
        other.silent()
        due_now(one)
        await one.indexer.erase_due()
        waiting = await erasure(one, made)
        assert waiting.state == "failed"
        assert f"{other.node.name} ({other.id})" in (waiting.error or "")
        assert one.id not in (waiting.error or "")
        async with other.running():  # it comes back
            await until(lambda: other.described().erased_pass > 0)
            assert not in_index(other, vector)
        due_now(one)
        await one.beat()
        await one.indexer.erase_due()
        complete = await erasure(one, made)
        assert (complete.state, complete.error) == ("complete", None)


async def test_an_erasure_is_complete_without_a_node_that_was_removed(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    async with erasing(one, other) as (made, _):
        assert one.database.writing(partial(nodes.remove, node=other.id))
        due_now(one)
        await one.indexer.erase_due()
        assert (await erasure(one, made)).state == "complete"


async def test_another_node_completes_the_erasure_of_one_that_is_gone(pair: tuple[NodeShop, NodeShop]) -> None:
    """The first pass was run by the one that leads; its own index holds nothing any more, but nobody could know."""
    one, other = pair
    async with erasing(one, other) as (made, vector):
        one.database.writing(partial(nodes.leave, node=one.id))
        due_now(other)
        await other.indexer.erase_due()
        assert not in_index(other, vector)
        waiting = await erasure(other, made)
        assert one.id in (waiting.error or "")
        async with one.running():
            await until(lambda: one.described().erased_pass > 0)
        due_now(other)
        await other.beat()
        one.silent()
        await other.indexer.erase_due()
        assert (await erasure(other, made)).state == "complete"


@soak
async def test_erasures_complete_by_themselves_while_all_nodes_run(pair: tuple[NodeShop, NodeShop]) -> None:
    one, other = pair
    await one.put("Herons wade.")
    vector = bytes(one.rows("SELECT vector FROM embeddings")[0][0])
    for shop in pair:
        shop.writer.fold()
    async with one.running(), other.running():
        made, _ = await other.room.erase(document="Herons")
        await until(lambda: one.rows("SELECT 1 FROM erasures WHERE completed_at IS NOT NULL"))
    assert (await erasure(one, made)).error is None
    assert not in_index(one, vector)
    assert not in_index(other, vector)
