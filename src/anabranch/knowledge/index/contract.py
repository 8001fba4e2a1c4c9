"""What search needs of an index, and what keeps an index up to date: segments in the data folder, or OpenSearch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from anabranch.domain.model import Embedding, Filters
from anabranch.knowledge.index.catalog import Catalog
from anabranch.knowledge.index.view import View
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records.database import Database, Session

T = TypeVar("T")


class Wanted(NamedTuple):
    """What is searched for: chunks that the caller may find and that match the filters, near to one of the vectors or
    with words of one of the texts; of each list so many."""

    filters: Filters
    caller: Caller
    texts: Sequence[str]
    vectors: Sequence[Embedding]
    limit: int


class SnapshotReader(Protocol):
    """Does something with one snapshot of the records, in a thread."""

    def __call__(self, work: Callable[[Session], T], /) -> Awaitable[T]: ...


def in_thread(database: Database) -> SnapshotReader:
    """Reading in the threads of the event loop."""
    return lambda work: asyncio.to_thread(database.reading, work)


class Index(Protocol):
    """Finds chunks. Whatever it finds is checked against the records before anybody gets it."""

    async def find(self, reading: SnapshotReader, wanted: Wanted, work: Callable[[Session, View], T]) -> T:
        """Do something with a view that has at least what is wanted, and the snapshot that it is checked against."""
        ...

    def with_catalog(self, db: Session, work: Callable[[Session, Catalog], T]) -> T:
        """Do something with the catalog as of the connection's snapshot; meanwhile nobody changes it."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether a part of the index is damaged, as of the last refresh."""
        ...

    def is_reported_damaged(self, db: Session) -> bool:
        """Whether the index is damaged, lost, or of other records."""
        ...

    async def check_reachable(self) -> None:
        """Raise IndexFailed if it cannot be searched now."""
        ...


class IndexUpdates(Protocol):
    """Brings an index up to date with the records. Its functions take long; run them in a thread."""

    # The age at which a change is indexed, in seconds, also if few wait.
    fold_s: float

    @property
    def seq(self) -> int:
        """The last change that the index includes, as far as this process knows."""
        ...

    def unindexed(self) -> tuple[int, float]:
        """How much is not in the index yet, and the age in seconds of the oldest."""
        ...

    def fold(self) -> object:
        """Bring the index up to date."""
        ...

    def compact(self) -> object:
        """Make searches faster; called when there is nothing else to do."""
        ...

    def drop_deleted(self) -> int:
        """Remove everything from the index that the records no longer have."""
        ...

    def reported(self) -> bool:
        """Whether something is damaged and must be repaired now."""
        ...

    def repair(self) -> tuple[str, ...]:
        """Repair what is damaged, from the records; returns what that was."""
        ...

    def verify(self, paced: Callable[[int], None]) -> tuple[str, ...]:
        """Compare the index with what was written, or with the records; returns what is damaged. `paced` is called with
        the number of bytes that were read."""
        ...

    def rebuild(self, progress: Callable[[int, int], None]) -> object:
        """Build the index from the records. `progress` is told how many chunks it has, and of how many."""
        ...
