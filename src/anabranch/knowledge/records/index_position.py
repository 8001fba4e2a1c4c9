"""Up to which change an index outside of the data folder is written. It is in the records, so whoever reads it there
finds in the index what it says."""

from typing import NamedTuple

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.records import changes, embeddings
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.facts import fact, forget_fact, set_fact

CURRENT, BUILDING = "search_index", "search_index_building"


class Position(Value):
    """The name of an index, the last change that it includes and when that was made, and the vectors that it holds. Of
    one that is being built, `last_chunk` is the last chunk that it has, and it includes changes up to when it began."""

    name: str
    seq: int
    seq_at: float | None
    embedder: str
    dimensions: int
    last_chunk: int = 0


class LastChange(NamedTuple):
    """What an index says of itself: the last change that may be in it, and when that was made."""

    seq: int
    at: float | None


def current(db: Session) -> Position | None:
    return _read(db, CURRENT)


def building(db: Session) -> Position | None:
    return _read(db, BUILDING)


def usable(db: Session, embedder: str) -> Position | None:
    """The index that searches read; None if there is none of these records and of this embedder."""
    position = current(db)
    return None if position is None or is_foreign(db, position, embedder) else position


def is_foreign(db: Session, position: Position, embedder: str) -> bool:
    """Whether an index was made of other records than those of a snapshot that began after the position was read, or
    has the vectors of another embedder."""
    return (
        position.embedder != embedder
        or not agrees(db, LastChange(position.seq, position.seq_at))
        or position.seq < embeddings.replaced_at(db)
    )


def agrees(db: Session, written: LastChange) -> bool:
    """Whether these records have had the last change of an index. Those that were restored, or that a failover has
    shortened, have not, or another one of its number."""
    log = changes.state(db, written.seq)
    return written.seq <= log.newest and (written.at is None or log.made_at in (None, written.at))


def note_building(db: Session, position: Position) -> None:
    set_fact(db, BUILDING, msgspec.json.encode(position).decode())


def publish(db: Session, position: Position) -> None:
    """Let searches read a new index."""
    set_fact(db, CURRENT, msgspec.json.encode(position).decode())
    forget_fact(db, BUILDING)


def forget_building(db: Session) -> None:
    forget_fact(db, BUILDING)


def needed_changes(db: Session) -> int:
    """The last change that an index includes which is written: later ones must be kept."""
    return min((one.seq for one in (current(db), building(db)) if one is not None), default=0)


def advance(db: Session, position: Position) -> bool:
    """Note that an index includes more changes; False if it is no longer the current one. Of two writers, the one that
    is further wins."""
    before = current(db)
    if before is None or before.name != position.name:
        return False
    if position.seq > before.seq:
        set_fact(db, CURRENT, msgspec.json.encode(position).decode())
    return True


def _read(db: Session, name: str) -> Position | None:
    text = fact(db, name)
    try:
        return None if text is None else msgspec.json.decode(text, type=Position)
    except msgspec.MsgspecError:
        return None
