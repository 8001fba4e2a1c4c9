"""Documents with equal owner and permissions share a class. A caller is looked up in those that permit it, so that the
classes of others cost it nothing."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.domain.audit import GROUP, OPERATOR, USER
from anabranch.domain.model import COLLECTION_ADDRESS
from anabranch.knowledge.model import Caller, Collection, Permissions

EVERYBODY = "everybody"
# More classes than this, and twice those that documents still have, are numbered again.
MIN_UNUSED = 1_024


# A list of more users and groups is one name in an index outside of the data folder: it is sent with each chunk.
LONG_LIST, LONG_NAME = 50, 200


class PermissionClass(NamedTuple):
    """`followed` is the key of the collection that decides, 0 if the document has permissions of its own."""

    owner: str
    permissions: Permissions
    followed: int


class PermissionClasses:
    """The classes by number, and those that permit each user, group, the readers of a collection, and everybody."""

    def __init__(self) -> None:
        self._numbers: dict[PermissionClass, int] = {}
        self._digests: list[bytes] = []
        self._long_lists: dict[int, str] = {}
        self._of: dict[str, list[int]] = {}
        self._limit = MIN_UNUSED

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, owner: str, permissions: Permissions, collection: int) -> int:
        """The number of the class of a document in a collection."""
        one = PermissionClass(owner, permissions, collection if permissions.visibility == "collection" else 0)
        found = self._numbers.get(one)
        if found is None:
            found = self._numbers[one] = len(self._numbers)
            self._digests.append(_digest(one))
            if len(permissions.granted) > LONG_LIST:
                self._long_lists[found] = _list_name(one)
            for reader in readers_of(owner, permissions, one.followed):
                self._of.setdefault(reader, []).append(found)
        return found

    def permitted(self, caller: Caller, followed: Iterable[int] = ()) -> NDArray[np.bool_]:
        """Which classes permit a caller whom these collections permit."""
        if caller.operator:  # faster than to look them up
            return np.ones(len(self), np.bool_)
        mask = np.zeros(len(self), np.bool_)
        for reader in names_of(caller, followed):
            mask[self._of.get(reader, [])] = True
        return mask

    def indexed_names(self, caller: Caller, followed: Iterable[int] = ()) -> list[str]:
        """What a caller is among readers in an index outside of the data folder."""
        if caller.operator:
            return [OPERATOR]
        allowed = self.permitted(caller, followed)
        lists = [name for number, name in self._long_lists.items() if allowed[number]]
        return [*map(_indexed, names_of(caller, followed)), *lists]

    def digest(self, numbers: Iterable[int], allowed: NDArray[np.bool_]) -> bytes:
        """A hash of those of these classes that are allowed, equal in every process."""
        return blake2b(b"".join(sorted(self._digests[one] for one in numbers if allowed[one])), digest_size=16).digest()

    def renumber(self, numbers: NDArray[np.int32], alive: NDArray[np.bool_]) -> bool:
        """Forget the classes that no document has any more, if they are many; `numbers` are those of all documents.
        Returns whether they are others now."""
        if len(self) <= self._limit:
            return False
        used, renumbered = np.unique(numbers[alive], return_inverse=True)
        kept = list(self._numbers)
        self._numbers, self._digests, self._long_lists, self._of = {}, [], {}, {}
        for number in used.tolist():
            one = kept[number]
            self.number(one.owner, one.permissions, one.followed)
        numbers[:] = 0
        numbers[alive] = renumbered
        self._limit = MIN_UNUSED + 2 * len(self)
        return True


class CollectionReaders:
    """The collections that permit each user, group, and everybody, by key."""

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}

    def add(self, one: Collection) -> None:
        for reader in readers_of(one.owner, one.settings.default_permissions):
            self._of.setdefault(reader, []).append(one.key)

    def remove(self, one: Collection) -> None:
        for reader in readers_of(one.owner, one.settings.default_permissions):
            keys = self._of[reader]
            keys.remove(one.key)
            if not keys:
                del self._of[reader]

    def permitting(self, caller: Caller) -> set[int]:
        return {key for reader in names_of(caller) for key in self._of.get(reader, ())}


def readers_of(owner: str, permissions: Permissions, collection: int = 0) -> set[str]:
    """Whom permissions permit, as `Permissions.permits` does; of what follows a collection, those of the collection."""
    readers = {OPERATOR, USER + owner}
    if permissions.visibility == "public":
        readers.add(EVERYBODY)
    elif permissions.visibility == "restricted":
        readers.update(permissions.granted)
    elif permissions.visibility == "collection" and collection:
        readers.add(f"{COLLECTION_ADDRESS}{collection}")
    return readers


def indexed_readers(owner: str, permissions: Permissions, collection: int) -> set[str]:
    """The same, as an index outside of the data folder has them."""
    if len(permissions.granted) <= LONG_LIST:
        return set(map(_indexed, readers_of(owner, permissions, collection)))
    one = PermissionClass(owner, permissions, collection if permissions.visibility == "collection" else 0)
    return {OPERATOR, _indexed(USER + owner), _list_name(one)}


def _indexed(name: str) -> str:
    """OpenSearch refuses very long names."""
    return name if len(name) <= LONG_NAME else f"long:{blake2b(name.encode(), digest_size=16).hexdigest()}"


def _list_name(one: PermissionClass) -> str:
    return f"list:{_digest(one).hex()}"


def _digest(one: PermissionClass) -> bytes:
    return blake2b(msgspec.json.encode(one), digest_size=16).digest()


def names_of(caller: Caller, followed: Iterable[int] = ()) -> Iterator[str]:
    """What a caller is among readers, if these collections permit it."""
    yield EVERYBODY
    if caller.operator:
        yield OPERATOR
    if caller.user is not None:
        yield USER + caller.user
    yield from (GROUP + group for group in caller.groups)
    yield from (f"{COLLECTION_ADDRESS}{key}" for key in followed)
