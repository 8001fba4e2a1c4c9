"""The catalog: the filterable columns of every document in memory, as of one sequence number of the change log."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from datetime import date
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import Filters
from anabranch.knowledge.model import Caller, Collection, Permissions
from anabranch.knowledge.records import collections, documents
from anabranch.knowledge.records.database import Connection, Row
from anabranch.knowledge.records.documents import attribute, permissions_of

Mask = NDArray[np.bool_]

KEPT_FILTERS = 64


class Refresh(msgspec.Struct, frozen=True):
    """The documents that a refresh added, or `everything`; `snapshot` is the connection's newest change."""

    snapshot: int
    added: list[int] = []
    everything: bool = False


class Catalog:
    """Arrays indexed by document key, and the document of each chunk key. They only grow."""

    def __init__(self) -> None:
        self.seq = -1
        self.collections: dict[int, Collection] = {}
        self._table = np.zeros(0, _ROW)
        self._chunks = np.zeros(0, np.int32)
        self._classes: dict[tuple[str, Permissions], int] = {}
        self._attributes: OrderedDict[tuple[str, str], Mask] = OrderedDict()

    def refresh(self, db: Connection) -> Refresh:
        """Apply all changes up to the connection's snapshot."""
        oldest, head = documents.change_range(db)
        if head <= self.seq:
            return Refresh(head)
        self._attributes.clear()
        self.collections = {collection.key: collection for collection in collections.listed(db)}
        if self.seq < 0 or oldest > self.seq + 1:
            self._table = np.zeros(0, _ROW)
            self._store(documents.rows(db))
            self.seq = head
            return Refresh(head, everything=True)
        touched = documents.changed_since(db, self.seq)
        rows = list(documents.rows(db, touched))
        new = [row["key"] for row in rows if row["key"] >= len(self._table) or not self._table["alive"][row["key"]]]
        living = {row["key"] for row in rows}
        for key in touched:
            if key not in living and key < len(self._table):
                self._table["alive"][key] = False
        self._store(rows)
        self.seq = head
        return Refresh(head, new)

    def _store(self, rows: Iterable[Row]) -> None:
        for row in rows:
            key, first, count = row["key"], row["first_chunk"], row["chunk_count"]
            self._table = _grown(self._table, key)
            self._table[key] = (
                True,
                row["collection"],
                self._class_of(row),
                row["day"],
                count,
                row["tokens"],
                row["size"],
                row["updated_at"],
            )
            if count:
                self._chunks = _grown(self._chunks, first + count - 1)
                self._chunks[first : first + count] = key

    def _class_of(self, row: Row) -> int:
        """Documents with equal owner and permissions share a class, so a caller is checked once per class."""
        return self._classes.setdefault((row["owner"], permissions_of(row)), len(self._classes))

    def documents_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int32]:
        """The document key of each chunk; 0, which is never alive, for chunks the catalog does not know."""
        self._chunks = _grown(self._chunks, int(chunks[-1]) if len(chunks) else 0)
        return self._chunks[chunks]

    def permitted(self, caller: Caller) -> Mask:
        """A mask of the documents that exist and that the caller may see."""
        allowed = np.fromiter(
            (permissions.permits(caller, owner) for owner, permissions in self._classes), bool, len(self._classes)
        )
        alive = self._table["alive"].copy()
        return alive if allowed.all() else alive & allowed[self._table["permissions"]]

    def mask(self, db: Connection, filters: Filters, caller: Caller) -> Mask:
        """A mask of the documents that the caller may see and that match the filters."""
        mask = self.permitted(caller)
        if filters.collections is not None:
            mask &= np.isin(self._table["collection"], self.named(filters.collections, caller, mask))
        if filters.start is not None:
            mask &= self._table["day"] >= date.fromisoformat(filters.start).toordinal()
        if filters.end is not None:
            mask &= self._table["day"] <= date.fromisoformat(filters.end).toordinal()
        for name, value in filters.metadata.items():
            mask &= self._with_attribute(db, name, attribute(value))
        for tag in filters.tags:
            mask &= self._with_attribute(db, "tags", attribute(tag))
        return mask

    def named(self, names: tuple[str, ...], caller: Caller, permitted: Mask) -> list[int]:
        """The keys of visible collections with these ids or names; of two with one name, the caller's own."""
        found: list[int] = []
        seen = [one for one in self.visible(caller, permitted) if one.id in names or one.name in names]
        for name in names:
            matching = [one for one in seen if name in (one.id, one.name)]
            own = [one for one in matching if one.id == name or one.owner == caller.owner]
            found += [one.key for one in own or matching]
        return found

    def visible(self, caller: Caller, permitted: Mask | None = None) -> list[Collection]:
        """The collections that a caller can see: their own, those with permissive defaults, and those that hold a
        document they may see."""
        permitted = self.permitted(caller) if permitted is None else permitted
        holding = set(np.unique(self._table["collection"][permitted]).tolist())
        return [
            one
            for one in self.collections.values()
            if one.key in holding or one.settings.default_permissions.permits(caller, one.owner)
        ]

    def fingerprint(self, mask: Mask) -> str:
        """A hash of these documents in their current version: equal in every process and for every caller with the
        same mask."""
        keys = np.flatnonzero(mask)
        digest = hashlib.blake2b(keys.tobytes(), digest_size=16)
        digest.update(self._table["updated_at"][keys].tobytes())
        holding = np.unique(self._table["collection"][keys]).tolist()
        names = [(key, one.id, one.name) for key in holding if (one := self.collections.get(key)) is not None]
        digest.update(msgspec.json.encode(names))
        return digest.hexdigest()

    def totals(self, key: int, permitted: Mask) -> tuple[int, int, int, int]:
        """How many permitted documents, chunks, tokens and bytes a collection has."""
        rows = self._table[permitted & (self._table["collection"] == key)]
        return len(rows), int(rows["chunks"].sum()), int(rows["tokens"].sum()), int(rows["size"].sum())

    def keys(self, key: int | None, permitted: Mask) -> NDArray[np.int64]:
        """The keys of the permitted documents of a collection, or of all collections, in order."""
        chosen = permitted if key is None else permitted & (self._table["collection"] == key)
        return np.flatnonzero(chosen)

    def _with_attribute(self, db: Connection, name: str, value: str) -> Mask:
        pair = (name, value)
        if pair not in self._attributes:
            mask = np.zeros(len(self._table), bool)
            mask[documents.with_attribute(db, name, value)] = True
            self._attributes[pair] = mask
            if len(self._attributes) > KEPT_FILTERS:
                self._attributes.popitem(last=False)
        return self._attributes[pair]


_ROW = np.dtype(
    [
        ("alive", np.bool_),
        ("collection", np.int32),
        ("permissions", np.int32),
        ("day", np.int32),
        ("chunks", np.int32),
        ("tokens", np.int64),
        ("size", np.int64),
        ("updated_at", np.float64),
    ]
)


def _grown(array: NDArray[Any], index: int) -> NDArray[Any]:
    """The array, or a larger copy that has this index."""
    if index < len(array):
        return array
    larger = np.zeros(max(index + 1, len(array) * 3 // 2, 1024), array.dtype)
    larger[: len(array)] = array
    return larger
