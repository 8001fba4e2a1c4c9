"""Ingestion: accepted items are parsed, chunked, embedded and stored; each succeeds or fails on its own. The indexer is
the only process that does this and that writes the index; it holds the lock of the data folder."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from anabranch.domain.audit import OPERATOR, USER, Actor, acting
from anabranch.domain.contracts import Embedder, RunInThread
from anabranch.domain.errors import AnabranchError, IndexFailed, QuotaReached
from anabranch.domain.model import Embedding
from anabranch.domain.shares import Claimant, Limit, claimant
from anabranch.knowledge.chunking import chunk
from anabranch.knowledge.index.contract import IndexUpdates
from anabranch.knowledge.model import (
    FOLLOWS_COLLECTION,
    Chunking,
    Collection,
    DocumentDraft,
    NewDocument,
    Outcome,
    Parsed,
    Permissions,
    Piece,
    StoredDocument,
    Unprocessable,
)
from anabranch.knowledge.records import collections, documents, erasures, jobs, nodes, queries
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.records.jobs import Claim, Hold, Lane
from anabranch.knowledge.records.nodes import Node
from anabranch.policies.shares import Share

# Raise it when the same bytes give other chunks than before, so that they are chunked again.
VERSION = 3
TOPIC_THRESHOLD = 0.35
MAX_TITLE = 200
POLL_S = 0.1
CLAIM_LIMIT = 16
# Batches of files that are processed at once: of one owner, so that one is parsed while the other is embedded, and of
# all. An owner's second batch starts while fewer than half of all run. URLs are processed one by one.
BATCHES_EACH = 2
BATCHES = 16
URLS_EACH = 8
URLS = 32
# More than all batches together: what is chunked, embedded and stored alone takes so many units.
ALONE = 64
INDEX_RETRY_S = 3.0
# Waiting chunks that are indexed at once.
FOLD_ROWS = 5_000
IDLE_S = 3.0
DELETE_EXPIRED_S = 3_600.0
ERASE_POLL_S = 0.5


class Fetched(NamedTuple):
    data: bytes
    media_type: str | None


Parse = Callable[[bytes, str | None, str | None], Awaitable[Parsed]]
Fetch = Callable[[str], Awaitable[Fetched]]


class Unchunked(NamedTuple):
    """A parsed document."""

    parsed: Parsed
    content_hash: str
    recipe: str
    size: int


class Chunked(NamedTuple):
    """A parsed and chunked document that needs its vectors."""

    draft: DocumentDraft
    pieces: tuple[Piece, ...]


class AlreadyStored(NamedTuple):
    """A document that is stored already; `changed` if its title, metadata or permissions are to be updated."""

    document: StoredDocument
    changed: bool


Prepared = Chunked | AlreadyStored | AnabranchError


class Ingestion:
    """Processes items; what runs in threads runs with `run`, for the owner of the items."""

    def __init__(
        self, database: Database, embedder: Embedder, parse: Parse, fetch: Fetch, run: RunInThread = asyncio.to_thread
    ) -> None:
        self._database = database
        self._embedder = embedder
        self._parse = parse
        self._fetch = fetch
        self._run = run
        self._working = Share(
            Limit(name="batches", description="batches at once", total=ALONE, waiting=math.inf, queued=math.inf)
        )

    async def warm(self) -> None:
        """Load the embedder before anything is claimed. If it cannot be loaded, each document fails on its own."""
        with suppress(AnabranchError):
            await asyncio.to_thread(self._embedder.tokens, "")

    async def process(self, claims: Sequence[Claim]) -> None:
        """Process some items of one lane and record the outcome of each."""
        before = claimant.set(Claimant(name=claims[0].owner))
        try:
            read = await asyncio.gather(*(self._read(claim) for claim in claims))
            retried = [claim.key for claim in claims if claim.attempts]
            async with self._working.turn(ALONE if retried else 1):
                for key in retried:
                    await self._database.write(partial(jobs.mark_alone, item=key))
                await self._store(claims, read)
        finally:
            claimant.reset(before)

    async def _store(self, claims: Sequence[Claim], read: Sequence[Unchunked | AlreadyStored | AnabranchError]) -> None:
        prepared: list[Prepared] = await asyncio.gather(*map(self._chunked, claims, read))
        chunked = [one for one in prepared if isinstance(one, Chunked)]
        texts = [one.draft.content[piece.start : piece.end] for one in chunked for piece in one.pieces]
        try:
            embedded = iter(await self._embedder.embed(texts) if texts else [])
        except AnabranchError as error:
            embedded = iter(())
            prepared = [error if isinstance(one, Chunked) else one for one in prepared]
        results = [
            (claim, one, [next(embedded) for _ in one.pieces] if isinstance(one, Chunked) else [])
            for claim, one in zip(claims, prepared, strict=True)
        ]

        def commit(db: Session) -> None:
            if first_vectors := next((vectors for _, _, vectors in results if vectors), None):
                documents.require_embedder(db, self._embedder.name, len(first_vectors[0].vector) // 4)
            for claim, one, vectors in results:
                if not jobs.is_held(db, claim):
                    continue
                with _acting_for(claim):
                    if (wanted := jobs.still_wanted(db, claim)) is None:
                        jobs.finish(db, claim.key, "cancelled")
                        continue
                    try:
                        _store(db, wanted, one, vectors)
                    except QuotaReached as error:  # before it has changed anything
                        jobs.finish(db, claim.key, "failed", keep_upload=True, error=error.message)
            if any(isinstance(one, AnabranchError) for one in prepared):
                jobs.bound_failed(db)

        await self._database.write(commit)

    async def _read(self, claim: Claim) -> Unchunked | AlreadyStored | AnabranchError:
        """The claim fetched and parsed, the document that is stored already, or the error that fails this document."""
        try:
            data, media_type = claim.arrived.data, claim.arrived.media_type
            if claim.arrived.source == "url":
                data, media_type = await self._fetch(claim.arrived.url or "")
            content_hash = sha256(data).hexdigest()
            recipe = recipe_of(claim.chunking, self._embedder)
            stored = await self._database.read(
                lambda db: find_stored(db, claim.collection, claim.owner, claim.arrived, content_hash, recipe)
            )
            if stored is not None:
                return stored
            return Unchunked(await self._parse(data, _filename(claim), media_type), content_hash, recipe, len(data))
        except AnabranchError as error:
            return error

    async def _chunked(self, claim: Claim, read: Unchunked | AlreadyStored | AnabranchError) -> Prepared:
        if not isinstance(read, Unchunked):
            return read
        try:
            pieces = await chunk(read.parsed, claim.chunking, self._embedder, self._run)
        except AnabranchError as error:
            return error
        return Chunked(_draft(claim, read), pieces) if pieces else Unprocessable("The document holds no text.")


def recipe_of(chunking: Chunking, embedder: Embedder) -> str:
    threshold = embedder.calibration.topic_threshold
    # Only another threshold is named: documents of earlier versions keep their recipe.
    topics = f"/topics {threshold:g}" if chunking.strategy == "semantic" and threshold != TOPIC_THRESHOLD else ""
    return f"{VERSION}/{chunking.strategy}/{chunking.size}/{chunking.overlap}/{embedder.name}{topics}"


def day_of(metadata: Mapping[str, Any], ingested: float | None = None) -> int:
    """The day number of the document's own date, else of its ingestion."""
    for name in ("created_date", "date"):
        try:
            return date.fromisoformat(str(metadata[name])[:10]).toordinal()
        except (KeyError, ValueError):
            continue
    now = datetime.now(UTC) if ingested is None else datetime.fromtimestamp(ingested, UTC)
    return now.date().toordinal()


def _filename(claim: Claim) -> str | None:
    """The file name by which the parser recognises the format."""
    if claim.arrived.source in ("text", "manual", "api"):
        return claim.arrived.filename or "text.txt"
    return claim.arrived.filename or (claim.arrived.url or "").partition("?")[0].rpartition("/")[2] or None


def find_stored(
    db: Session, collection: Collection, owner: str, arrived: NewDocument, content_hash: str, recipe: str
) -> AlreadyStored | None:
    """The stored document with the same identity and content, else one that equals it in all but its identity."""
    same = documents.by_identity(db, collection.key, arrived.identity or "")
    if same is not None:
        if (same.content_hash, same.recipe) != (content_hash, recipe):
            return None
        updated = (
            _given_title(arrived) or same.title,
            {**same.metadata, **arrived.metadata},
            permissions_for(collection, arrived, same),
            arrived.connector_id or same.connector_id,
        )
        return AlreadyStored(same, updated != (same.title, same.metadata, same.permissions, same.connector_id))
    wanted = (owner, permissions_for(collection, arrived, None), arrived.metadata)
    for other in documents.with_content(db, collection.key, content_hash, recipe):
        if (other.owner, other.permissions, {name: other.metadata.get(name) for name in arrived.metadata}) == wanted:
            return AlreadyStored(other, changed=False)
    return None


def permissions_for(collection: Collection, arrived: NewDocument, stored: StoredDocument | None) -> Permissions:
    """The permissions given with a document, else those of the stored document; without either it follows its
    collection. If they were overruled, they permit nobody whom the stored document does not permit now."""
    if stored is None:
        return arrived.permissions or FOLLOWS_COLLECTION
    if arrived.permissions is None or not arrived.overruled:
        return arrived.permissions or stored.permissions
    now = stored.permissions.of_document(collection)
    both = arrived.permissions.of_document(collection).narrowed(now)
    return stored.permissions if both == now else both


def _draft(claim: Claim, read: Unchunked) -> DocumentDraft:
    arrived, parsed = claim.arrived, read.parsed
    found = {"author": parsed.author, "created_date": parsed.created_date, "tags": list(parsed.tags) or None}
    metadata = {name: value for name, value in found.items() if value is not None} | dict(arrived.metadata)
    title = _given_title(arrived) or parsed.title or arrived.filename or arrived.url
    return DocumentDraft(
        id=claim.document_id,
        collection=claim.collection.key,
        owner=claim.owner,
        source=arrived.source,
        identity=arrived.identity or "",
        filename=arrived.filename,
        url=arrived.url,
        connector_id=arrived.connector_id,
        title=str(title or _first_words(parsed.text))[:MAX_TITLE],
        content=parsed.text,
        content_hash=read.content_hash,
        recipe=read.recipe,
        metadata=metadata,
        permissions=permissions_for(claim.collection, arrived, None),
        day=day_of(metadata),
        pages=parsed.pages,
        page_starts=_page_starts(parsed),
        size=read.size,
    )


def _page_starts(parsed: Parsed) -> tuple[int, ...]:
    """Where each page begins in the text; one without text begins where the next one does."""
    first: dict[int, int] = {}
    for block in parsed.blocks:
        if block.page is not None:
            first.setdefault(block.page, block.start)
    starts, following = [], len(parsed.text)
    for page in range(parsed.pages or 0, 0, -1):
        following = first.get(page, following)
        starts.append(following)
    return tuple(reversed(starts))


def _given_title(arrived: NewDocument) -> str | None:
    return str(arrived.title or arrived.metadata.get("title") or "")[:MAX_TITLE] or None


def _first_words(text: str) -> str:
    line = next((line.strip(" #*\t") for line in text.splitlines() if line.strip(" #*\t")), "Untitled")
    return line if len(line) <= 80 else line[:79].rpartition(" ")[0] + "…"


def _store(db: Session, claim: Claim, prepared: Prepared, vectors: Sequence[Embedding]) -> None:
    """Store a document and the outcome of its item."""
    match prepared:
        case Chunked(draft=draft, pieces=pieces):
            old = documents.by_identity(db, draft.collection, draft.identity)
            collection = _current(db, claim)
            draft = msgspec.structs.replace(draft, permissions=permissions_for(collection, claim.arrived, old))
            stored = documents.insert(db, draft, pieces, vectors)
            _complete(db, claim, "replaced" if old else "added", stored)
        case AlreadyStored(document=document, changed=changed):
            # Its permissions may have changed since it was read, and what was not given must not undo that.
            if changed and (now := documents.by_id(db, document.id)) is not None:
                metadata = {**now.metadata, **claim.arrived.metadata}
                documents.describe(
                    db,
                    now,
                    title=_given_title(claim.arrived) or now.title,
                    metadata=metadata,
                    permissions=permissions_for(_current(db, claim), claim.arrived, now),
                    day=day_of(metadata, now.created_at),
                    connector_id=claim.arrived.connector_id,
                )
            _complete(db, claim, "updated" if changed else "unchanged", document)
        case AnabranchError():
            jobs.finish(db, claim.key, "failed", keep_upload=True, error=prepared.message)


@contextmanager
def _acting_for(claim: Claim) -> Iterator[None]:
    """What is stored is recorded as done by the owner of the job."""
    name = f"{USER}{claim.owner}" if claim.owner else OPERATOR
    before = acting.set(lambda: Actor(name=name, address="", surface="indexer", request=claim.job))
    try:
        yield
    finally:
        acting.reset(before)


def _current(db: Session, claim: Claim) -> Collection:
    """The claim's collection as it is now: its permissions may have changed since."""
    return collections.by_key(db, claim.collection.key) or claim.collection


def _complete(db: Session, claim: Claim, outcome: Outcome, stored: StoredDocument) -> None:
    jobs.finish(db, claim.key, "completed", document_id=stored.id, outcome=outcome, chunk_count=stored.chunk_count)


class Indexer:
    """Ingests documents, lane by lane in turn; updates the index; and calls `erase`."""

    def __init__(
        self,
        database: Database,
        ingestion: Ingestion,
        writer: IndexUpdates,
        *,
        retention_days: int,
        erase: Callable[[], Awaitable[None]] | None = None,
        node: Node | None = None,
    ) -> None:
        self._database = database
        self._ingestion = ingestion
        self._writer = writer
        self._retention_days = retention_days
        self._erase = erase
        # Where others share the records.
        self._node = node
        # The last erasure of which the index of this node holds nothing.
        self._erased_pass = 0 if node is None else node.erased_pass
        self._held: set[Hold] = set()
        # How many batches of each lane are processed; the lanes that had a turn, the latest one last.
        self._running: Counter[Lane] = Counter()
        self._served: dict[Lane, None] = {}
        self._finished = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled; claimed items are then released."""
        if self._node is not None:
            await self._beat(self._node)
        await self._database.write(partial(jobs.recover, node=self._name))
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._node is not None:
                    tasks.create_task(self._keep_alive(self._node))
                    tasks.create_task(self._drop_erased())
                tasks.create_task(self._ingest(tasks))
                tasks.create_task(self._update_index())
                tasks.create_task(self._delete_expired())
                tasks.create_task(self._erase_deleted())
        except ExceptionGroup as group:
            # An error of ours says more than the group of tasks that it cancelled.
            raise next((error for error in group.exceptions if isinstance(error, AnabranchError)), group) from group
        finally:
            if self._node is not None:
                with suppress(AnabranchError):
                    await self._database.write(lambda db: nodes.leave(db, self._name), ordered=False)

    @property
    def _name(self) -> str:
        return "" if self._node is None else self._node.id

    async def _keep_alive(self, node: Node) -> None:
        """Say that this node is alive, and take over from those that are not. Who is not, a node knows only when it
        could itself say so for a whole lease: after an outage of the database, nobody was heard of."""
        said = since = time.monotonic()
        while True:
            await self._beat(node)
            before, said = said, time.monotonic()
            if said - before > nodes.LEASE_S / 2:
                since = said
            if said - since > nodes.LEASE_S and await self._database.read(lambda db: jobs.abandoned(db, node.id)):
                await self._database.write(partial(jobs.recover, node=node.id, restarted=False))
            await asyncio.sleep(nodes.BEAT_S)

    async def _drop_erased(self) -> None:
        """Drop from the index of this node what was erased."""
        while True:
            passed = await self._database.read(erasures.last_pass)
            if passed > self._erased_pass:
                with suppress(IndexFailed):
                    await asyncio.to_thread(self._writer.drop_deleted)
                    self._erased_pass = passed
            await asyncio.sleep(nodes.BEAT_S)

    async def _beat(self, node: Node) -> None:
        now = msgspec.structs.replace(node, seq=self._writer.seq, erased_pass=self._erased_pass)
        # Not in the thread of the writer: there it would wait for ordered writes, and those for other nodes.
        await asyncio.to_thread(self._database.writing, lambda db: nodes.beat(db, now), ordered=False)

    async def drain(self) -> None:
        """Ingest everything that waits, update the index, and return."""
        await self._database.write(partial(jobs.recover, node=self._name))
        while await self._step():
            pass
        await asyncio.to_thread(self._writer.fold)

    async def _ingest(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._finished.clear()
            for claims in (claimed := await self._claim()):
                tasks.create_task(self._process(claims))
            if not claimed:
                with suppress(TimeoutError):  # wait_for of Python 3.11 can lose a cancellation
                    async with asyncio.timeout(POLL_S):
                        await self._finished.wait()

    async def _step(self) -> bool:
        """Ingest the next documents of every lane; False if none wait."""
        claimed = await self._claim()
        await asyncio.gather(*map(self._process, claimed))
        return bool(claimed) or await self._database.read(jobs.is_pending)

    async def _claim(self) -> list[list[Claim]]:
        """The next batch of each lane that has room, beginning with those that process least and waited longest."""
        waiting = await self._database.read(jobs.lanes)
        if not waiting:
            return []
        await self._ingestion.warm()
        turns = {lane: number for number, lane in enumerate(self._served)}
        claimed = []
        for lane in sorted(waiting, key=lambda lane: (self._running[lane], turns.get(lane, -1))):
            if not self._has_room(lane):
                continue
            if self._node is not None and not await self._database.read(
                partial(jobs.is_claimable, held=self._held, lane=lane, node=self._name)
            ):
                continue  # nodes look often, and a claim holds up the writes of all of them
            limit = 1 if lane.is_url else CLAIM_LIMIT
            claim = partial(jobs.claim, limit=limit, held=self._held, lane=lane, node=self._name)
            claims = await self._database.write(claim)
            if claims:
                claimed.append(claims)
                self._held.update(*(claim.holds for claim in claims))
                self._running[lane] += 1
                self._served.pop(lane, None)
                self._served[lane] = None
        self._served = {lane: None for lane in self._served if lane in waiting}
        return claimed

    def _has_room(self, lane: Lane) -> bool:
        each, most = (URLS_EACH, URLS) if lane.is_url else (BATCHES_EACH, BATCHES)
        running = sum(count for other, count in self._running.items() if other.is_url == lane.is_url)
        return running < most if not self._running[lane] else self._running[lane] < each and running < most // 2

    async def _process(self, claims: Sequence[Claim]) -> None:
        try:
            await self._ingestion.process(claims)
        except BaseException:
            await self._database.write(partial(jobs.release, claims=claims))
            raise
        finally:
            self._held.difference_update(*(claim.holds for claim in claims))
            self._running.subtract([claims[0].lane])
            self._running += Counter()  # drops lanes that process nothing
            self._finished.set()

    async def _update_index(self) -> None:
        """Update the index when enough chunks wait, the oldest is old enough, or when idle; then compact it."""
        idle_s, compacted = 0.0, False
        while True:
            rows, age_s = await asyncio.to_thread(self._writer.unindexed)
            idle_s = 0.0 if self._running else idle_s + POLL_S
            if rows and (rows >= FOLD_ROWS or age_s >= self._writer.fold_s or idle_s >= IDLE_S):
                try:
                    await asyncio.to_thread(self._writer.fold)
                except IndexFailed:  # which the writer has logged
                    await asyncio.sleep(INDEX_RETRY_S)
                compacted = False
            elif idle_s >= 2 * IDLE_S and not compacted:
                await asyncio.to_thread(self._writer.compact)
                compacted = True
            await asyncio.sleep(POLL_S)

    async def _delete_expired(self) -> None:
        """Delete old questions, and what is kept of failed documents."""
        while True:
            if await self._database.read(lambda db: nodes.leads(db, self._name)):
                await self._database.write(lambda db: queries.forget(db, self._retention_days))
                await self._database.write(jobs.forget_failed)
                await self._database.write(nodes.forget_gone)
            await asyncio.sleep(DELETE_EXPIRED_S)

    async def _erase_deleted(self) -> None:
        """Erase what was deleted, when it is due."""
        while True:
            await self.erase_due()
            await asyncio.sleep(ERASE_POLL_S)

    async def erase_due(self) -> None:
        if self._erase is not None:
            await self._erase()
