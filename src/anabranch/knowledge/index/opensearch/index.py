"""Searches in OpenSearch. It returns keys; texts and vectors come from the records, and the scores are computed from
them as for segments. What has changed since the index was written is searched in memory."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import Filters
from anabranch.knowledge.index.catalog import Catalog
from anabranch.knowledge.index.contract import SnapshotReader, Wanted
from anabranch.knowledge.index.opensearch import bodies
from anabranch.knowledge.index.opensearch.client import NDJSON, PATIENCE_S, IndexMissing, OpenSearchClient, check, lines
from anabranch.knowledge.index.reader import built
from anabranch.knowledge.index.segment import Mask, Segment
from anabranch.knowledge.index.view import Elsewhere, View
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import changes, documents
from anabranch.knowledge.records.database import ResultRow, Session, StaleSnapshot
from anabranch.knowledge.records.index_position import LastChange, Position, agrees, usable

T = TypeVar("T")

# More that has changed since the index was written is not searched until it is indexed.
MAX_CHANGES, MAX_CHUNKS = 20_000, 50_000
MAX_PARTS = 8
# An index that was not there is looked for again after this time.
LOST_S = 30.0


class Part(NamedTuple):
    """Chunks in memory, with the document key and the type of each."""

    segment: Segment
    documents: NDArray[np.int64]
    kinds: NDArray[np.str_]

    @classmethod
    def of(cls, rows: Sequence[ResultRow]) -> "Part":
        found = [row["document"] for row in rows]
        return cls(built(rows), np.array(found, np.int64), np.array([row["kind"] for row in rows], np.str_))

    def kept(self, keep: Mask) -> "Part":
        return Part(Segment.merge([self.segment], [keep]), self.documents[keep], self.kinds[keep])

    def mask(
        self, db: Session, catalog: Catalog, filters: Filters, caller: Caller, without: NDArray[np.int64]
    ) -> Mask | None:
        """The chunks that the caller may find, but for those of some documents; None for all."""
        keys, at = np.unique(self.documents, return_inverse=True)
        mask = catalog.mask_of(db, filters, caller, keys)[at]
        if len(without):
            mask = mask & ~np.isin(self.documents, without)
        if filters.chunk_types:
            mask = mask & np.isin(self.kinds, filters.chunk_types)
        return None if mask.all() else mask


class Pending(NamedTuple):
    """The documents that changed after a position of the index, up to a change, with the chunks that they have now.
    They are left out of what the index finds. `complete` is False if they are too many."""

    position: Position | None
    seq: int
    changed: Mapping[int, int] = {}
    parts: tuple[Part, ...] = ()
    complete: bool = True


class Plan(NamedTuple):
    """What a search asks the index, and what has changed since that was written, up to a change."""

    search: bodies.Search | None
    pending: Pending


class Found(NamedTuple):
    """The keys that the index has found, and what it has counted; None if it was not asked."""

    keys: Sequence[int] | None
    elsewhere: Elsewhere | None = None
    written: LastChange | None = None
    partial: bool = False


class OpenSearchIndex:
    """Shared by all threads of a process."""

    def __init__(
        self, client: OpenSearchClient, embedder: str, damaged: Callable[[str], None] = lambda _: None
    ) -> None:
        self._client = client
        self._embedder = embedder
        self._damaged = damaged
        self._lock = threading.Lock()
        self._pending = Pending(None, -1)
        # The name of an index that was not there, and when that was.
        self._lost = "", 0.0
        self.catalog = Catalog(with_chunks=False)

    async def find(self, reading: SnapshotReader, wanted: Wanted, work: Callable[[Session, View], T]) -> T:
        plan = await reading(lambda db: self._planned(db, wanted))
        try:
            found = await self._found(plan)
        except IndexMissing:  # it may have been replaced meanwhile
            plan = await reading(lambda db: self._planned(db, wanted))
            try:
                found = await self._found(plan)
            except IndexMissing:  # it is lost: what fits is searched in memory until there is another one
                plan = await reading(lambda db: self._planned(db, wanted, without_index=True))
                found = Found(None)
        return await reading(lambda db: work(db, self._checked(db, plan, wanted, found)))

    def with_catalog(self, db: Session, work: Callable[[Session, Catalog], T]) -> T:
        with self._lock:
            self._refresh(db)
            return work(db, self.catalog)

    @property
    def is_partial(self) -> bool:
        """What waits to be indexed is no damage, and an index that is lost is reported."""
        return False

    def is_reported_damaged(self, db: Session) -> bool:
        """Whether more is stored than can be searched without an index, and there is none."""
        position = usable(db, self._embedder)
        is_there = position is not None and position.name != self._lost[0]
        return not is_there and documents.counts(db)[1] > MAX_CHUNKS

    async def check_reachable(self) -> None:
        position = self._pending.position
        path = "" if position is None else f"{position.name}/_doc/{bodies.POSITION}"
        with suppress(IndexMissing):  # that is damage
            await self._client.call("GET", path, timeout_s=PATIENCE_S)

    async def _found(self, plan: Plan) -> Found:
        if (search := plan.search) is None:
            return Found(None)
        near = await self._asked(search.near())
        counts = search.counted(near)
        by_words = await self._asked(search.by_words(counts))
        keys = sorted(bodies.keys_in((*near[: len(search.vectors)], *by_words)))
        return Found(keys, counts.findable, counts.last_change, partial=bodies.is_partial((*near, *by_words)))

    async def _asked(self, parts: bodies.Lines) -> list[dict[str, Any]]:
        """The replies to the parts of a request."""
        if not (body := lines(parts)):
            return []
        replies: list[dict[str, Any]] = (await self._client.call("POST", "_msearch", body, kind=NDJSON))["responses"]
        for one in replies:
            check(one)
        return replies

    def _planned(self, db: Session, wanted: Wanted, *, without_index: bool = False) -> Plan:
        filters, caller = wanted.filters, wanted.caller
        with self._lock:
            self._refresh(db)
            if without_index and (lost := usable(db, self._embedder)) is not None:
                if self._lost[0] != lost.name:
                    self._damaged(lost.name)
                self._lost = lost.name, time.monotonic()
            pending, catalog = self._extended(db), self.catalog
            collections = None
            if filters.collections is not None:
                collections = [one.key for one in catalog.chosen(filters, caller)]
            elif caller.rights.collections is not None:
                collections = list(caller.rights.collections)
            readers = catalog.readers(caller)
        if pending.position is None:
            return Plan(None, pending)
        permitted = bodies.permitted(filters, readers, collections, sorted(pending.changed))
        vectors = [np.frombuffer(one.vector, np.float32) for one in wanted.vectors]
        texts = [bodies.words_of(text) for text in wanted.texts]
        search = bodies.Search(pending.position.name, permitted, vectors, texts, wanted.limit)
        return Plan(search, pending)

    def _checked(self, db: Session, plan: Plan, wanted: Wanted, found: Found) -> View:
        """A view of what the caller may find in this snapshot: of what the index has found, of what had changed since
        that was written, and of what has changed while it was asked."""
        filters, caller, pending = wanted.filters, wanted.caller, plan.pending
        # An index that is ahead of the records has lost what they have again.
        is_theirs = found.keys is None or (found.written is not None and agrees(db, found.written))
        parts = (*([] if found.keys is None else [Part.of(documents.indexable_by_key(db, found.keys))]), *pending.parts)
        with self._lock:
            self._refresh(db)
            changed = changes.documents_since(db, pending.seq) if self.catalog.seq > pending.seq else []
            complete = pending.complete and is_theirs and not found.partial and self._is_few(changed)
            newer = Part.of(documents.indexable_chunks(db, changed if complete else []))
            without = np.array(changed if complete else [], np.int64)
            masked = [(part.segment, part.mask(db, self.catalog, filters, caller, without)) for part in parts]
            if len(newer.segment):
                masked.append((newer.segment, newer.mask(db, self.catalog, filters, caller, without[:0])))
            # What is missing now is found later, so a partial answer has no digest.
            seen = self.catalog.seen(filters, caller) if complete else ""
        return View.of(tuple(masked), seen=seen, partial=not complete, elsewhere=found.elsewhere)

    def _is_few(self, changed: Sequence[int]) -> bool:
        return len(changed) <= MAX_CHANGES and self.catalog.chunk_count(changed) <= MAX_CHUNKS

    def _refresh(self, db: Session) -> None:
        snapshot, everything = self.catalog.refresh(db)
        if self.catalog.seq > snapshot:
            raise StaleSnapshot
        if everything:  # perhaps other records
            self._pending = Pending(None, -1)

    def _extended(self, db: Session) -> Pending:
        """What has changed up to the catalog's change since the index was written."""
        known, position, head = self._pending, usable(db, self._embedder), self.catalog.seq
        if position is not None and position.name == self._lost[0] and time.monotonic() - self._lost[1] < LOST_S:
            position = None
        if position == known.position and known.seq == head:
            return known
        since = -1 if position is None else position.seq
        is_same = position is not None and known.position is not None and position.name == known.position.name
        if not (is_same and known.complete and known.seq >= since):
            known = Pending(position, since)
        self._pending = self._read(db, position, known, head)
        return self._pending

    def _read(self, db: Session, position: Position | None, known: Pending, head: int) -> Pending:
        since = -1 if position is None else position.seq
        too_many = Pending(position, head, complete=False)
        if position is None and documents.counts(db)[1] > MAX_CHUNKS:
            return too_many
        if position is not None and (head - since > MAX_CHANGES or changes.state(db).oldest > known.seq + 1):
            return too_many
        new = set(documents.after_chunk(db, 0) if known.seq < 0 else changes.documents_since(db, known.seq))
        stays = {key: seq for key, seq in known.changed.items() if seq > since and key not in new}
        changed = stays | dict.fromkeys(new, head)
        if not self._is_few(list(changed)):
            return too_many
        # Of an earlier part remains what the index has not, and what has not changed again.
        unchanged = np.array(list(stays), np.int64)
        parts = [part.kept(np.isin(part.documents, unchanged)) for part in known.parts]
        if len(parts) < MAX_PARTS:
            parts.append(Part.of(documents.indexable_chunks(db, list(new))))
        else:
            parts = [Part.of(documents.indexable_chunks(db, list(changed)))]
        return Pending(position, head, changed, tuple(part for part in parts if len(part.segment)))
