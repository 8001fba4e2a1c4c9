"""The contract of the records' databases, identifiers that sort by time, and how storing fails."""

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from anabranch.domain.errors import AnabranchError

T = TypeVar("T")

# Other names never stand for something in the form of `new_id`, and new names do not have it.
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)


def is_id(name: str) -> bool:
    """Whether a name has the form of an id: then it is only looked up as one."""
    return ID.fullmatch(name) is not None


def made_at(identifier: str) -> float:
    """The creation time of an identifier in seconds since 1970; 0 if it is not a version 7 UUID."""
    try:
        made = uuid.UUID(identifier)
    except ValueError:
        return 0.0
    return (made.int >> 80) / 1000 if made.version == 7 else 0.0


def new_id() -> str:
    moment = time.time_ns() // 1_000_000
    chance = int.from_bytes(os.urandom(10), "big")
    number = (moment & ((1 << 48) - 1)) << 80 | 0x7 << 76 | (chance >> 68 & 0xFFF) << 64 | 0b10 << 62
    return str(uuid.UUID(int=number | chance & ((1 << 62) - 1)))


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class StoreFailed(AnabranchError):
    """The records cannot be read or written: the disk is full, another process holds the lock, or the database does
    not answer."""

    code = "service_unavailable"


class DiskFull(StoreFailed):
    """The records cannot be written because the disk is full."""


class StaleSnapshot(Exception):
    """The index or another reader is ahead of the snapshot that a function reads."""


class ResultRow(Protocol):
    """A row of a result, by the positions and the names of its columns."""

    def __getitem__(self, column: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def keys(self) -> Iterable[str]: ...


class Result(Protocol):
    """What a statement has found or changed."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Session(Protocol):
    """A connection within a transaction. The SQL is that of SQLite, as far as `records/dialect.py` translates it; truth
    values are 0 and 1."""

    kind: Literal["sqlite", "postgres"]

    def execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ..., /) -> Result: ...
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Result: ...

    def reserve(self, table: str, count: int) -> int:
        """The first of so many keys in a row of a table whose keys are never used again."""

    def now(self) -> float:
        """The time of the database, in seconds since 1970."""

    def size(self) -> int:
        """The bytes of the database on disk."""


class Database(Protocol):
    """Runs functions of a session as transactions. A write that has returned is on disk.

    Writes happen one after the other, also those of other processes, unless they are not `ordered`: those must change
    neither documents nor collections, and append nothing to the audit log. So changes are numbered in the order in
    which others see them. Whatever `read` and `reading` find is of one moment."""

    async def read(self, work: Callable[[Session], T]) -> T: ...

    def reading(self, work: Callable[[Session], T]) -> T:
        """Read in the calling thread; once more, of a later moment, if `work` raises StaleSnapshot."""

    async def write(self, work: Callable[[Session], T], *, deleting: bool = False, ordered: bool = True) -> T: ...

    def writing(self, work: Callable[[Session], T], *, deleting: bool = False, ordered: bool = True) -> T:
        """Write in the calling thread: all or nothing. If the disk is full, what deletes may use the reserve."""

    def check_writable(self) -> None:
        """Raise StoreFailed if the records cannot be written now."""

    def bytes_to_compact(self) -> int:
        """How much free space in the data folder `compact` needs."""

    def compact(self) -> int:
        """Let the database hold nothing of deleted rows, as far as it can; returns by how many bytes it has shrunk."""

    def close(self) -> None: ...
