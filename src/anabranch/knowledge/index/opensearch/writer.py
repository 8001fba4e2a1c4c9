"""Writes the index in OpenSearch. Of the nodes that share the records, the leading one writes; if two think that they
lead, they write the same: a chunk has the number of the change that it was read at as its version."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

import msgspec

from anabranch.domain.errors import IndexFailed
from anabranch.domain.model import Value
from anabranch.knowledge.index.opensearch import bodies
from anabranch.knowledge.index.opensearch.client import (
    NDJSON,
    BlockingClient,
    IndexMissing,
    IndexRefused,
    VersionConflict,
    check,
    check_whole,
)
from anabranch.knowledge.records import attributes, changes, documents, nodes
from anabranch.knowledge.records import index_position as position
from anabranch.knowledge.records.database import Database, ResultRow, Session
from anabranch.knowledge.records.index_position import LastChange, Position
from anabranch.telemetry.log import Log

T = TypeVar("T")

FOLD_S = 1.0
KEPT_CHANGES = 100_000
# Documents that are read at once, and bytes that are sent at once.
DOCUMENTS, BYTES = 200, 4 << 20
# While an index is built, how far it is, is noted this often; then it goes on from there.
NOTE_S = 5.0
CHECK_S = 10.0
BULK_S, MERGE_S = 60.0, 600.0
RETRIES, RETRY_S = 5, 1.0
# OpenSearch holds deleted chunks until its replicas have them, which it notes every 30 seconds.
DROP_S, DROP_POLL_S = 90.0, 2.0
UNFIT, CONFLICT, TOO_MANY = 400, 409, 429
PAGE = 10_000
MAX_NAMED = 20


class Sizes(Value):
    """How a new index is spread over the nodes of OpenSearch."""

    shards: int = 1
    replicas: int = 1


class Batch(NamedTuple):
    """Documents as one snapshot has them: its newest change, the rows of documents and chunks, and the attributes."""

    written: LastChange
    stored: Mapping[int, ResultRow]
    rows: Sequence[ResultRow]
    named: Mapping[int, Sequence[tuple[str, str]]]


class OpenSearchWriter:
    """The functions of IndexUpdates. `node` is the id of this node among those that share the records."""

    fold_s = FOLD_S

    def __init__(
        self,
        database: Database,
        client: BlockingClient,
        embedder: str,
        *,
        node: str = "",
        sizes: Sizes = Sizes(),  # noqa: B008  frozen
        log: Log | None = None,
    ) -> None:
        self._database = database
        self._client = client
        self._embedder = embedder
        self._node = node
        self._sizes = sizes
        self._log = log
        self._lock = threading.Lock()
        self._seq = 0
        self._suspected: dict[int, int] = {}
        self._checked_at = -CHECK_S
        # Up to which change this writer has let an index say that it is written.
        self._said: dict[str, int] = {}
        self._failure = ""

    @property
    def seq(self) -> int:
        return self._seq

    def unindexed(self) -> tuple[int, float]:
        """How many changes the index does not include, and the age of the oldest in seconds; none on other nodes than
        the leading one."""

        def read(db: Session) -> tuple[int, float | None, bool]:
            found = position.usable(db, self._embedder)
            self._seq = 0 if found is None else found.seq
            waiting = changes.state(db).newest - self._seq
            return waiting, changes.next_at(db, self._seq), nodes.leads(db, self._node)

        waiting, oldest, leads = self._database.reading(read)
        if not leads:
            return 0, 0.0
        if time.monotonic() - self._checked_at > CHECK_S:  # whether it is still there
            return max(1, waiting), FOLD_S
        return waiting, 0.0 if oldest is None else time.time() - oldest

    def fold(self) -> None:
        """Bring the index up to date; build it if there is none of these records."""
        with self._lock:
            if not self._database.reading(lambda db: nodes.leads(db, self._node)):
                return
            self._checked_at = time.monotonic()
            try:
                found = self._intact()
                if found is None:
                    self._build(lambda _done, _total: None)
                else:
                    self._apply(found)
            except IndexFailed as error:
                self._fail(error.message)
                raise
            self._fail("")

    def compact(self) -> None:
        """OpenSearch merges its segments itself."""

    def drop_deleted(self) -> int:
        """Apply what was deleted, and wait until no segment of OpenSearch holds it. On other nodes there is nothing."""
        self.fold()
        with self._lock:
            found = self._database.reading(position.current)
            if found is None or not self._database.reading(lambda db: nodes.leads(db, self._node)):
                return 0
            # What was interrupted, or sent by a writer that was paused, may hold it, too.
            self._drop_others(found)
            self._delete_documents(found.name, [key for key, count in self._compared(found).items() if not count])
            self._refresh(found.name)
            dropped, until = self._held_deleted(found.name), time.monotonic() + DROP_S
            while self._held_deleted(found.name):
                if time.monotonic() > until:
                    raise IndexRefused("OpenSearch still holds chunks of deleted documents; it is asked again.")
                self._client.call("POST", f"{found.name}/_flush?force=true", timeout_s=MERGE_S)
                merge = f"{found.name}/_forcemerge?only_expunge_deletes=true"
                check_whole(self._client.call("POST", merge, timeout_s=MERGE_S))
                self._refresh(found.name)
                if self._held_deleted(found.name):
                    time.sleep(DROP_POLL_S)
            return dropped

    def reported(self) -> bool:
        return bool(self._suspected)

    def verify(self, paced: Callable[[int], None]) -> tuple[str, ...]:
        """Compare how many chunks of each document the index and the records have."""
        return self.differences(paced) if self._database.reading(lambda db: nodes.leads(db, self._node)) else ()

    def differences(self, paced: Callable[[int], None]) -> tuple[str, ...]:
        """The same on every node."""
        with self._lock:
            found = self._intact()
            if found is None:
                _, chunks = self._database.reading(documents.counts)
                return ("the whole index: it is missing, or not of these records",) if chunks else ()
            self._suspected = self._compared(found, paced)
        return tuple(f"document {key}" for key in sorted(self._suspected)[:MAX_NAMED])

    def repair(self) -> tuple[str, ...]:
        """Index again what differs from the records: as if it had changed, so that searches do not read it from the
        index meanwhile, and nothing older replaces it."""
        with self._lock:
            suspected, self._suspected = self._suspected, {}
            found = self._database.reading(lambda db: position.usable(db, self._embedder))
            if not suspected or found is None:
                return ()
            self._delete_documents(found.name, list(suspected))

            def touch(db: Session) -> None:
                for key in (key for key, count in suspected.items() if count):
                    changes.record(db, "update", key)

            self._database.writing(touch)
        self.fold()
        return ()

    def _compared(self, found: Position, paced: Callable[[int], None] = lambda _: None) -> dict[int, int]:
        """The documents of which the index has more or fewer chunks than the records, each with how many these have."""
        held = dict(self._held(found.name, paced))

        def read(db: Session) -> tuple[dict[int, int], set[int]]:
            return documents.chunk_counts(db), set(changes.documents_since(db, found.seq))

        stored, changed = self._database.reading(read)
        differ = {key for key in held.keys() | stored.keys() if held.get(key, 0) != stored.get(key, 0)} - changed
        return {key: stored.get(key, 0) for key in differ}

    def rebuild(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        """Build another index; searches read the old one until it is complete."""
        with self._lock:
            self._build(progress)

    def _intact(self) -> Position | None:
        """The index that is of these records and holds what it says; None if it must be built."""
        found = self._database.reading(lambda db: position.usable(db, self._embedder))
        if found is None:
            return None
        written = self._written(found.name)
        if written is None:
            self._note("index_lost", name=found.name, hint="it is built again from the records")
            return None
        # It may be further than its note in the records, never behind it.
        if written.seq < found.seq or not self._database.reading(partial(position.agrees, written=written)):
            self._note("index_of_other_records", name=found.name, hint="it is built again from the records")
            return None
        if not self._database.reading(lambda db: self._may_go_on(db, found)):
            self._note("index_too_old", name=found.name, hint="it is built again from the records")
            return None
        return found

    def _written(self, name: str) -> LastChange | None:
        """What an index says of itself; None if it is gone, or does not say it."""
        try:
            said = self._client.call("GET", f"{name}/_doc/{bodies.POSITION}?stored_fields={','.join(bodies.WRITTEN)}")
        except IndexMissing:
            return None
        return None if said is None else bodies.written_of(said)

    def _apply(self, found: Position) -> None:
        """Index what has changed since."""

        def read(db: Session) -> tuple[changes.LogState, list[int]]:
            head = changes.state(db).newest
            return changes.state(db, head), changes.documents_since(db, found.seq)

        log, changed = self._database.reading(read)
        if log.newest == found.seq:
            return
        self._index(found.name, changed)
        self._publish(msgspec.structs.replace(found, seq=log.newest, seq_at=log.made_at), position.advance)
        self._database.writing(lambda db: changes.trim(db, position.needed_changes(db) - KEPT_CHANGES))

    def _publish(self, written: Position, note: Callable[[Session, Position], T]) -> T:
        """Make everything findable, and then say so in the records."""
        self._say(written.name, LastChange(written.seq, written.seq_at))
        self._refresh(written.name)
        self._seq = written.seq
        return self._database.writing(lambda db: note(db, written), ordered=False)

    def _refresh(self, name: str) -> None:
        """Let searches find what was sent: in all of the index, or it is not done."""
        check_whole(self._client.call("POST", f"{name}/_refresh", timeout_s=BULK_S))

    def _say(self, name: str, written: LastChange) -> None:
        """Let the index say up to which change it may be written, before it is: whatever happens to the writer then, it
        shows whether the index is of records that have had this change."""
        if self._said.get(name, 0) >= written.seq > 0:
            return
        said = msgspec.json.encode({"seq": written.seq, "at": written.at or 0.0})
        version = f"version={max(1, written.seq)}&version_type=external_gte"
        try:
            path = f"{bodies.alias_of(name)}/_doc/{bodies.POSITION}?require_alias=true&{version}"
            self._client.call("PUT", path, said)
        except VersionConflict:  # another writer is further
            return
        self._said = {name: written.seq}

    def _build(self, progress: Callable[[int, int], None]) -> None:
        """Build an index from the records, or go on with one that is being built, and let searches read it."""
        known = self._database.reading(documents.embedder)
        if known is None:
            return  # nothing is stored yet
        if known[0] != self._embedder:
            raise IndexRefused(documents.mismatch(known[0], self._embedder))
        started = self._started() or self._new(known[1])
        _, total = self._database.reading(documents.counts)
        done, noted_at = 0, time.monotonic()
        while waiting := self._database.reading(
            partial(documents.after_chunk, chunk=started.last_chunk, limit=DOCUMENTS)
        ):
            rows = self._index(started.name, waiting, removing=False)
            # Documents that were deleted meanwhile are among the changes.
            last = self._database.reading(partial(documents.last_chunk, keys=waiting))
            started = msgspec.structs.replace(started, last_chunk=max(started.last_chunk + 1, last))
            done += rows
            progress(done, total)
            if time.monotonic() - noted_at > NOTE_S:
                noted_at = time.monotonic()
                self._database.writing(partial(position.note_building, position=started), ordered=False)
                self._note("index_building", name=started.name, chunks=done, of=total)
        self._publish(started, position.publish)
        self._drop_others(started)
        self._apply(started)

    def _started(self) -> Position | None:
        """The index that is being built, if it can be gone on with."""
        found = self._database.reading(position.building)
        if found is None:
            return None
        if self._exists(found.name) and self._database.reading(lambda db: self._may_go_on(db, found)):
            return found
        self._delete(found.name)
        return None

    def _may_go_on(self, db: Session, found: Position) -> bool:
        """Whether an index can be brought up to date: it is of these records, and they still know what has changed."""
        return not position.is_foreign(db, found, self._embedder) and changes.state(db).oldest <= found.seq + 1

    def _exists(self, name: str) -> bool:
        try:
            self._client.call("GET", name)
        except IndexMissing:
            return False
        return True

    def _new(self, dimensions: int) -> Position:
        """A new, empty index, and a note that it is being built."""

        def read(db: Session) -> changes.LogState:
            return changes.state(db, changes.state(db).newest)

        log = self._database.reading(read)
        name = f"{self._client.name}-{token_hex(4)}"
        body = {"settings": bodies.settings(self._sizes.shards, self._sizes.replicas)}
        body["mappings"] = bodies.mapping(dimensions)
        body["aliases"] = {bodies.alias_of(name): {}}
        made = Position(name=name, seq=log.newest, seq_at=log.made_at, embedder=self._embedder, dimensions=dimensions)
        # First the note: an index that nobody knows would stay.
        self._database.writing(partial(position.note_building, position=made), ordered=False)
        self._client.call("PUT", name, msgspec.json.encode(body), timeout_s=BULK_S)
        self._note("index_building", name=name)
        return made

    def _drop_others(self, kept: Position) -> None:
        """Delete all other indices that were made of these records, also one that is being built; name those that are
        left."""
        found = self._client.call("GET", f"{self._client.name}-*/_settings")
        building = self._database.reading(position.building)
        self._database.writing(position.forget_building, ordered=False)
        left = []
        for name in sorted(found.keys() - {kept.name}):
            written = self._written(name)
            is_ours = written is not None and self._database.reading(partial(position.agrees, written=written))
            if is_ours or (building is not None and name == building.name):
                self._delete(name)
            else:
                left.append(name)
        if left:
            hint = "they were not made of these records: delete them if no others use them"
            self._note("indices_not_used", names=left, hint=hint)

    def _delete(self, name: str) -> None:
        try:
            self._client.call("DELETE", name, timeout_s=BULK_S)
        except IndexMissing:
            pass
        except IndexRefused as error:
            self._note("index_not_deleted", name=name, reason=error.message)

    def _index(self, name: str, keys: Iterable[int], *, removing: bool = True) -> int:
        """Index these documents as they are now, and delete those that are gone; returns how many chunks."""
        sent = 0
        left = iter(keys)
        while some := list(islice(left, DOCUMENTS)):
            batch = self._database.reading(partial(_batch, keys=some))
            self._say(name, batch.written)
            gone = [key for key in some if key not in batch.stored]
            if gone and removing:
                self._delete_documents(name, gone)
            for part in _parts(bodies.chunks(name, max(1, batch.written.seq), batch.rows, batch.stored, batch.named)):
                self._send(part)
            sent += len(batch.rows)
        return sent

    def _delete_documents(self, name: str, keys: Sequence[int]) -> None:
        """Delete the chunks of documents, also those that no search finds yet."""
        left = iter(keys)
        while some := list(islice(left, DOCUMENTS)):
            self._refresh(name)
            asked = msgspec.json.encode({"query": {"terms": {"document": some}}})
            path = f"{name}/_delete_by_query?conflicts=proceed"
            reply = self._client.call("POST", path, asked, timeout_s=BULK_S)
            check_whole(reply)
            if reply.get("version_conflicts"):
                raise IndexRefused("Another writer has changed what was being deleted; it is deleted again.")

    def _send(self, body: bytes) -> None:
        """Send a bulk request; what OpenSearch has no room for now is sent again with the rest."""
        for attempt in range(RETRIES):
            reply = self._client.call("POST", "_bulk", body, timeout_s=BULK_S, kind=NDJSON)
            if not reply["errors"]:
                return
            failed = [item["index"] for item in reply["items"] if item["index"]["status"] >= 300]
            again = [one for one in failed if one["status"] == TOO_MANY]
            if unfit := [one for one in failed if one["status"] == UNFIT]:
                # Others must not wait for it; `verify` names its document.
                self._note(
                    "chunks_not_indexed", chunks=[one["_id"] for one in unfit], reason=str(unfit[0]["error"])[:500]
                )
            for one in failed:
                if one["status"] not in (CONFLICT, TOO_MANY, UNFIT):  # a newer version is there already
                    check(one)
            if not again:
                return
            time.sleep(RETRY_S * 2**attempt)
        raise IndexRefused("OpenSearch has no room for more requests; indexing goes on later.")

    def _held(self, name: str, paced: Callable[[int], None]) -> Iterator[tuple[int, int]]:
        """The documents in the index, each with its number of chunks."""
        after: Mapping[str, Any] = {}
        while True:
            pages = {"composite": {"size": PAGE, "sources": [{"key": {"terms": {"field": "document"}}}], **after}}
            body = msgspec.json.encode({"size": 0, "aggs": {"documents": pages}})
            reply = self._client.call("POST", f"{name}/_search", body, timeout_s=BULK_S)
            check_whole(reply)
            found = reply["aggregations"]["documents"]
            yield from ((one["key"]["key"], one["doc_count"]) for one in found["buckets"])
            if "after_key" not in found:
                return
            paced(len(found["buckets"]) * 64)
            after = {"after": found["after_key"]}

    def _held_deleted(self, name: str) -> int:
        stats = self._client.call("GET", f"{name}/_stats/docs")
        check_whole(stats)
        return int(stats["_all"]["total"]["docs"]["deleted"])

    def _fail(self, reason: str) -> None:
        """Log why the index cannot be written, or that it can again, once."""
        if reason and reason != self._failure:
            self._note("index_not_written", reason=reason, hint="what has changed is indexed when it can be")
        elif self._failure and not reason:
            self._note("index_written_again")
        self._failure = reason

    def _note(self, event: str, **more: Any) -> None:
        if self._log is not None:
            self._log.warning(event, **more)


def _newest(db: Session) -> LastChange:
    log = changes.state(db, changes.state(db).newest)
    return LastChange(log.newest, log.made_at)


def _batch(db: Session, keys: Sequence[int]) -> Batch:
    return Batch(
        written=_newest(db),
        stored={row["key"]: row for row in documents.rows(db, keys)},
        rows=documents.indexable_chunks(db, keys),
        named=attributes.of_documents(db, keys),
    )


def _parts(lines: Iterator[Mapping[str, Any]]) -> Iterator[bytes]:
    """The lines of a bulk request in bodies of limited size; two lines belong together."""
    body = bytearray()
    while pair := tuple(islice(lines, 2)):
        for line in pair:
            body += msgspec.json.encode(line) + b"\n"
        if len(body) >= BYTES:
            yield bytes(body)
            body.clear()
    if body:
        yield bytes(body)
