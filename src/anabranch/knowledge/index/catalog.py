"""The catalog: what filters must know of every document, in memory, as of one place in the sequence of changes."""

import hashlib
import sqlite3
from collections import OrderedDict
from datetime import date
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import Filters
from anabranch.knowledge.model import Caller, Collection, Permissions
from anabranch.knowledge.records import collections
from anabranch.knowledge.records.documents import attribute, permissions_of

Mask = NDArray[np.bool_]

KEPT_FILTERS = 64


class Refresh(msgspec.Struct, frozen=True):
    """What a refresh has changed: the new documents, or everything; `snapshot` is how far the connection saw."""

    snapshot: int
    added: list[int] = []
    everything: bool = False


class Catalog:
    """Arrays by document key. They only grow, and `document_of` says to which document each chunk key belongs."""

    def __init__(self) -> None:
        self.seq = -1
        self.collections: dict[int, Collection] = {}
        self._table = np.zeros(0, _ROW)
        self._chunks = np.zeros(0, np.int32)
        self._classes: dict[tuple[str, Permissions], int] = {}
        self._attributes: OrderedDict[tuple[str, str], Mask] = OrderedDict()

    def refresh(self, db: sqlite3.Connection) -> Refresh:
        """Come up to the snapshot that the connection sees."""
        head = int(db.execute("SELECT coalesce(max(seq), 0) FROM changes").fetchone()[0])
        if head <= self.seq:
            return Refresh(head)
        oldest = db.execute("SELECT coalesce(min(seq), 0) FROM changes").fetchone()[0]
        self._attributes.clear()
        self.collections = {collection.key: collection for collection in collections.listed(db)}
        if self.seq < 0 or oldest > self.seq + 1:
            self._table = np.zeros(0, _ROW)
            self._take(db.execute("SELECT * FROM documents"))
            self.seq = head
            return Refresh(head, everything=True)
        touched = dict(
            db.execute("SELECT document, op FROM changes WHERE seq > ? AND document > 0", (self.seq,)).fetchall()
        )
        chosen = msgspec.json.encode(list(touched)).decode()
        rows = db.execute("SELECT * FROM documents WHERE key IN (SELECT value FROM json_each(?))", (chosen,)).fetchall()
        new = [row["key"] for row in rows if row["key"] >= len(self._table) or not self._table["alive"][row["key"]]]
        living = {row["key"] for row in rows}
        for key in touched:
            if key not in living and key < len(self._table):
                self._table["alive"][key] = False
        self._take(rows)
        self.seq = head
        return Refresh(head, new)

    def _take(self, rows: Any) -> None:
        for row in rows:
            key, first, count = row["key"], row["first_chunk"], row["chunk_count"]
            self._table = _roomy(self._table, key)
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
                self._chunks = _roomy(self._chunks, first + count - 1)
                self._chunks[first : first + count] = key

    def _class_of(self, row: sqlite3.Row) -> int:
        """Documents with the same owner and the same permissions are one class: a caller is checked once for each."""
        return self._classes.setdefault((row["owner"], permissions_of(row)), len(self._classes))

    def documents_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Documents by chunk key; a chunk that is not of our time has document 0, which is never alive."""
        self._chunks = _roomy(self._chunks, int(chunks[-1]) if len(chunks) else 0)
        return self._chunks[chunks]

    def permitted(self, caller: Caller) -> Mask:
        """The living documents that a caller may see, by key."""
        allowed = np.fromiter(
            (permissions.permits(caller, owner) for owner, permissions in self._classes), bool, len(self._classes)
        )
        alive = self._table["alive"].copy()
        return alive if allowed.all() else alive & allowed[self._table["permissions"]]

    def mask(self, db: sqlite3.Connection, filters: Filters, caller: Caller) -> Mask:
        """The documents that may be found at all, by key."""
        mask = self.permitted(caller)
        if filters.collections is not None:
            mask &= np.isin(self._table["collection"], self.named(filters.collections, caller, mask))
        if filters.start is not None:
            mask &= self._table["day"] >= date.fromisoformat(filters.start).toordinal()
        if filters.end is not None:
            mask &= self._table["day"] <= date.fromisoformat(filters.end).toordinal()
        for name, value in filters.metadata.items():
            mask &= self._having(db, name, attribute(value))
        for tag in filters.tags:
            mask &= self._having(db, "tags", attribute(tag))
        return mask

    def named(self, names: tuple[str, ...], caller: Caller, permitted: Mask) -> list[int]:
        """The collections with these ids or names that the caller can see; of two with one name, the caller's own."""
        found: list[int] = []
        seen = [one for one in self.visible(caller, permitted) if one.id in names or one.name in names]
        for name in names:
            meant = [one for one in seen if name in (one.id, one.name)]
            own = [one for one in meant if one.id == name or one.owner == caller.owner]
            found += [one.key for one in own or meant]
        return found

    def visible(self, caller: Caller, permitted: Mask | None = None) -> list[Collection]:
        """The collections that a caller can know of: their own, those that are open to them, and those in which there
        is a document for them."""
        permitted = self.permitted(caller) if permitted is None else permitted
        holding = set(np.unique(self._table["collection"][permitted]).tolist())
        return [
            one
            for one in self.collections.values()
            if one.key in holding or one.settings.default_permissions.permits(caller, one.owner)
        ]

    def fingerprint(self, mask: Mask) -> str:
        """What stands for these documents, as they are now: the same in every process, and for every caller who may
        find exactly these."""
        keys = np.flatnonzero(mask)
        digest = hashlib.blake2b(keys.tobytes(), digest_size=16)
        digest.update(self._table["updated_at"][keys].tobytes())
        holding = np.unique(self._table["collection"][keys]).tolist()
        names = [(key, one.id, one.name) for key in holding if (one := self.collections.get(key)) is not None]
        digest.update(msgspec.json.encode(names))
        return digest.hexdigest()

    def totals(self, key: int, permitted: Mask) -> tuple[int, int, int, int]:
        """A collection's documents, chunks, tokens and bytes, as far as they are permitted."""
        rows = self._table[permitted & (self._table["collection"] == key)]
        return len(rows), int(rows["chunks"].sum()), int(rows["tokens"].sum()), int(rows["size"].sum())

    def keys(self, key: int | None, permitted: Mask) -> NDArray[np.int64]:
        """The permitted documents of a collection (or of all), in the order of their keys."""
        chosen = permitted if key is None else permitted & (self._table["collection"] == key)
        return np.flatnonzero(chosen)

    def _having(self, db: sqlite3.Connection, name: str, value: str) -> Mask:
        pair = (name, value)
        if pair not in self._attributes:
            keys = [row[0] for row in db.execute("SELECT document FROM attributes WHERE name = ? AND value = ?", pair)]
            mask = np.zeros(len(self._table), bool)
            mask[keys] = True
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


def _roomy(array: NDArray[Any], index: int) -> NDArray[Any]:
    """The array, or a larger one in which `index` has a place."""
    if index < len(array):
        return array
    larger = np.zeros(max(index + 1, len(array) * 3 // 2, 1024), array.dtype)
    larger[: len(array)] = array
    return larger
