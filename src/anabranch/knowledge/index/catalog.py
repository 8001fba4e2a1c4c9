"""The catalog: which documents and collections there are, and who may see them, in memory."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import Filters
from anabranch.knowledge.collection_names import only
from anabranch.knowledge.index.permission_classes import CollectionReaders, PermissionClasses
from anabranch.knowledge.index.segment import Mask
from anabranch.knowledge.model import Caller, Collection
from anabranch.knowledge.records import attributes, changes, collections, documents
from anabranch.knowledge.records.database import ResultRow, Session

MAX_CACHED_FILTERS = 64
MAX_CACHED_DIGESTS = 1_000
ROW = np.dtype(
    [
        ("alive", np.bool_),
        ("collection", np.int32),
        ("permissions", np.int32),
        ("day", np.int32),
        ("chunks", np.int32),
        ("tokens", np.int64),
        ("size", np.int64),
        ("stored_bytes", np.int64),
    ]
)


class Totals(NamedTuple):
    """How many documents, chunks and tokens, the bytes that were uploaded, and those in the records."""

    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    size: int = 0
    stored_bytes: int = 0


class HeldTotals:
    """The totals of each collection by permission class, so that what a caller sees of a collection is counted without
    looking at its documents."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, Totals]] = {}

    def count(self, row: tuple[Any, ...], sign: int) -> None:
        """Add or take away a row of the catalog."""
        _, collection, permissions, _, *amounts = row
        held = self._of.setdefault(collection, {})
        before = held.get(permissions, Totals())
        after = Totals(*(old + sign * amount for old, amount in zip(before, (1, *amounts), strict=True)))
        if after.documents:
            held[permissions] = after
        else:
            held.pop(permissions, None)
            if not held:
                del self._of[collection]

    def items(self) -> Iterable[tuple[int, Mapping[int, Totals]]]:
        return self._of.items()

    def of(self, collection: int) -> Mapping[int, Totals]:
        return self._of.get(collection, {})


class Catalog:
    """Arrays indexed by document key and, `with_chunks`, the document of each chunk key. They only grow."""

    def __init__(self, *, with_chunks: bool = True) -> None:
        self._with_chunks = with_chunks
        self.seq = -1
        # When the last change was made: records that were restored, or whose last changes a failover has lost, have
        # another one of its number.
        self.at: float | None = None
        # The last change that is known, by the thread whose snapshot did not have it.
        self._missed: dict[int, int] = {}
        self.collections: dict[int, Collection] = {}
        self._versions: dict[int, int] = {}
        self._table = np.zeros(0, ROW)
        self._chunks = np.zeros(0, np.int32)
        self._held = HeldTotals()
        self._classes = PermissionClasses()
        self._readers = CollectionReaders()
        self._attributes: OrderedDict[tuple[str, str], Mask] = OrderedDict()
        # Until something changes: the same callers ask again and again.
        self._seen: dict[bytes, str] = {}

    def refresh(self, db: Session) -> tuple[int, bool]:
        """Apply all changes up to the connection's snapshot; returns its newest change, and whether everything was read
        again because older changes are deleted."""
        log = changes.state(db, self.seq)
        head, others = log.newest, self._are_others(log)
        if head <= self.seq and not others:
            return head, False
        everything = others or self.seq < 0 or log.oldest > self.seq + 1
        self._refresh_collections(db, [0] if everything else changes.collections_since(db, self.seq))
        if everything:
            self._table, self._chunks, self._held = np.zeros(0, ROW), np.zeros(0, np.int32), HeldTotals()
            self._store(documents.rows(db))
            self._versions = collections.versions(db)
        else:
            self._apply(db, changes.documents_since(db, self.seq))
        if self._classes.renumber(self._table["permissions"], self._table["alive"]):
            self._held = HeldTotals()
            for row in self._table[self._table["alive"]].tolist():
                self._held.count(row, 1)
        self._attributes.clear()
        self._seen.clear()
        self.seq, self.at = head, changes.state(db, head).made_at
        return head, everything

    def _apply(self, db: Session, changed: Sequence[int]) -> None:
        """Read the documents that have changed."""
        rows = list(documents.rows(db, changed))
        touched = {row["collection"] for row in rows}
        for key in set(changed) - {row["key"] for row in rows}:
            if key < len(self._table) and self._table[key]["alive"]:
                touched.add(int(self._table[key]["collection"]))
                self._held.count(self._table[key].tolist(), -1)
                self._table[key]["alive"] = False
        self._store(rows)
        self._versions.update(collections.versions(db, sorted(touched)))

    def _are_others(self, log: changes.LogState) -> bool:
        """Whether the records are not those that were read before."""
        if (head := log.newest) >= self.seq:
            self._missed.pop(threading.get_ident(), None)
            return self.at is not None and log.made_at not in (None, self.at)
        # A snapshot can be older than what another thread has read. The next one of this thread is not.
        missed, self._missed[threading.get_ident()] = self._missed.get(threading.get_ident(), -1), self.seq
        return head < missed

    def _refresh_collections(self, db: Session, keys: Sequence[int]) -> None:
        """Read those that have changed: others may have long lists of users. 0 stands for all."""
        if 0 in keys:
            self.collections, self._readers = {}, CollectionReaders()
        for key in keys:
            if key in self.collections:
                self._readers.remove(self.collections.pop(key))
        for one in collections.listed(db) if 0 in keys else collections.by_keys(db, keys):
            self.collections[one.key] = one
            self._readers.add(one)

    def _store(self, rows: Iterable[ResultRow]) -> None:
        for row in rows:
            key, first, count = row["key"], row["first_chunk"], row["chunk_count"]
            self._table = grown(self._table, key)
            if self._table[key]["alive"]:
                self._held.count(self._table[key].tolist(), -1)
            stored = (
                True,
                row["collection"],
                self._classes.number(row["owner"], documents.permissions_of(row), row["collection"]),
                row["day"],
                count,
                row["tokens"],
                row["size"],
                row["stored_bytes"],
            )
            self._table[key] = stored
            self._held.count(stored, 1)
            if count and self._with_chunks:
                self._chunks = grown(self._chunks, first + count - 1)
                self._chunks[first : first + count] = key

    def documents_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int32]:
        """The document key of each chunk; 0, which is never alive, for chunks the catalog does not know."""
        self._chunks = grown(self._chunks, int(chunks[-1]) if len(chunks) else 0)
        return self._chunks[chunks]

    def permitted(self, caller: Caller) -> Mask:
        """A mask of the documents that exist and that the caller may see."""
        return self._matching(self._table, Filters(), caller)

    def permitted_classes(self, caller: Caller) -> Mask:
        return self._classes.permitted(caller, self._readers.permitting(caller))

    def mask(self, db: Session, filters: Filters, caller: Caller) -> Mask:
        """A mask of the documents that the caller may see and that match the filters."""
        mask = self._matching(self._table, filters, caller)
        for name, value in attributes_of(filters):
            mask &= self.with_attribute(db, name, value)
        return mask

    def mask_of(self, db: Session, filters: Filters, caller: Caller, keys: NDArray[np.int64]) -> Mask:
        """The same of these documents, without a look at the others."""
        known = keys < len(self._table)
        if not known.any():
            return known
        mask = self._matching(self._table[np.where(known, keys, 0)], filters, caller) & known
        for name, value in attributes_of(filters) if mask.any() else ():
            mask &= np.isin(keys, attributes.documents_with(db, name, value, keys[mask].tolist()))
        return mask

    def _matching(self, table: NDArray[Any], filters: Filters, caller: Caller) -> Mask:
        """A mask of the rows that the caller may see and that match the filters, but for their attributes."""
        mask = np.array(table["alive"], np.bool_)
        allowed = self.permitted_classes(caller)
        if not allowed.all():
            mask &= allowed[table["permissions"]]
        if caller.rights.collections is not None:
            mask &= np.isin(table["collection"], caller.rights.collections)
        if filters.collections is not None:
            mask &= np.isin(table["collection"], [one.key for one in self.chosen(filters, caller)])
        if filters.start is not None:
            mask &= table["day"] >= date.fromisoformat(filters.start).toordinal()
        if filters.end is not None:
            mask &= table["day"] <= date.fromisoformat(filters.end).toordinal()
        return mask

    def chosen(self, filters: Filters, caller: Caller) -> list[Collection]:
        """The visible collections that filters name, or all."""
        return self.visible(caller) if filters.collections is None else self.named(filters.collections, caller)

    def named(self, names: Sequence[str], caller: Caller) -> list[Collection]:
        """The visible collections with these ids, addresses or names; Conflict if a name is ambiguous."""
        visible = self.visible(caller)
        return [found for name in names if (found := only(name, visible, caller)) is not None]

    def visible(self, caller: Caller) -> list[Collection]:
        """The collections that a caller can see: those whose permissions permit it, and those that hold a document that
        it may see."""
        allowed = self.permitted_classes(caller)
        seen = self._readers.permitting(caller)
        seen.update(key for key, held in self._held.items() if key not in seen and any(allowed[one] for one in held))
        return [one for key, one in sorted(self.collections.items()) if key in seen and caller.sees(key)]

    def seen(self, filters: Filters, caller: Caller) -> str:
        """A hash of what the caller may find, equal in every process and for every caller who may find the same: the
        collections with their versions, which every change of a document replaces, and the permissions among their
        documents that permit the caller."""
        asked = msgspec.json.encode((filters, caller))
        if (known := self._seen.get(asked)) is not None:
            return known
        if len(self._seen) >= MAX_CACHED_DIGESTS:
            self._seen.clear()
        allowed = self.permitted_classes(caller)
        chosen = {one.key: one for one in self.chosen(filters, caller)}
        held = [
            (key, one.id, one.name, self._versions.get(key, 0), self._classes.digest(self._held.of(key), allowed))
            for key, one in sorted(chosen.items())
        ]
        digest = hashlib.blake2b(msgspec.json.encode((filters, held)), digest_size=16).hexdigest()
        self._seen[asked] = digest
        return digest

    def readers(self, caller: Caller) -> Sequence[str]:
        """What the caller is among the readers of documents."""
        return self._classes.indexed_names(caller, self._readers.permitting(caller))

    def chunk_count(self, keys: Sequence[int]) -> int:
        """How many chunks these documents have."""
        rows = self._table[[key for key in keys if key < len(self._table)]]
        return int(rows["chunks"][rows["alive"]].sum())

    def totals(self, key: int, caller: Caller) -> Totals:
        """How much of a collection the caller may see."""
        allowed = self.permitted_classes(caller)
        held = [totals for one, totals in self._held.of(key).items() if allowed[one]] if caller.sees(key) else []
        return Totals(*map(sum, zip(*held, strict=True)))

    def keys(self, key: int | None, permitted: Mask) -> NDArray[np.int64]:
        """The keys of the permitted documents of a collection, or of all collections, in order."""
        return np.flatnonzero(permitted if key is None else permitted & (self._table["collection"] == key))

    def with_attribute(self, db: Session, name: str, value: str) -> Mask:
        """A mask of the documents with an attribute of this value."""
        mask = self._attributes.get((name, value))
        if mask is None:
            mask = self._attributes[name, value] = np.zeros(len(self._table), bool)
            mask[attributes.documents_with(db, name, value)] = True
            if len(self._attributes) > MAX_CACHED_FILTERS:
                self._attributes.popitem(last=False)
        return mask


def attributes_of(filters: Filters) -> list[tuple[str, str]]:
    """What filters want of the attributes of documents: names and values."""
    wanted = (*filters.metadata.items(), *(("tags", tag) for tag in filters.tags))
    return [(name, attributes.comparable(value)) for name, value in wanted]


def grown(array: NDArray[Any], index: int) -> NDArray[Any]:
    """The array, or a larger copy that has this index."""
    if index < len(array):
        return array
    larger = np.zeros(max(index + 1, len(array) * 3 // 2, 1024), array.dtype)
    larger[: len(array)] = array
    return larger
