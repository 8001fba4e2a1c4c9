"""What is to be erased and what was, the tables that are erased from, and the backups that were made."""

import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from anabranch.domain.audit import USER, AuditEntry
from anabranch.domain.model import Value
from anabranch.knowledge.model import Erased
from anabranch.knowledge.records import audit, collections, documents, jobs, keys, nodes, queries
from anabranch.knowledge.records.database import ResultRow, Session, StoreFailed, as_json, new_id
from anabranch.knowledge.records.facts import fact, set_fact
from anabranch.knowledge.records.sqlite import NAME, connect, migrate, read_only

ErasureSubject = Literal["document", "collection", "user"]
# `due`: no pass has run. `settling`: everything is erased but what questions that ran then may have written since.
# `failed`: a store could not be erased; it is tried again.
ErasureState = Literal["due", "settling", "failed", "complete"]
# The stores in the records, each with the function that erases from it.
STORES: tuple[tuple[str, Callable[[Session, Erased], int]], ...] = (
    ("documents", documents.erase),
    ("collections", collections.erase),
    ("ingest jobs", jobs.erase),
    ("query log", queries.erase),
    ("API keys", keys.erase),
    ("audit names", audit.erase),
)
# Every table, by whether it can hold what is erased: the text of documents or questions, or the name of a user.
TABLES = {
    "collections": True,
    "documents": True,
    "contents": True,
    "attributes": True,
    "chunks": True,
    "embeddings": True,
    "jobs": True,
    "items": True,
    "uploads": True,
    "queries": True,
    "query_counts": True,
    "responses": True,
    "citations": True,
    "keys": True,
    "stored": True,  # a row goes with the last document of its owner
    "audit_names": True,
    "erasures": True,
    "endpoints": False,  # public addresses; a collection's are deleted with it
    "query_collections": False,
    "retrievals": False,
    "changes": False,
    "versions": False,
    "facts": False,
    "erased": False,
    "backups": False,
    "nodes": False,
    "reserved": False,  # keys; only in PostgreSQL
    "audit": False,  # ids and salted hashes
    "audit_chain": False,
}
# The rows that name a user.
NAMING = (
    "keys WHERE user = :user",
    "queries WHERE user = :user",
    "query_counts WHERE user = :user",
    "jobs WHERE owner = :user",
    "collections WHERE owner = :user",
    "documents WHERE owner = :user",
    "audit_names WHERE :prefix || :user IN (subject, name)",
    "collections, json_each(settings, '$.default_permissions.allowed_users') WHERE value = :user",
    "documents, json_each(allowed_users) WHERE value = :user",
    "items, json_each(arrived, '$.permissions.allowed_users') WHERE value = :user",
)
UNKNOWN_USER = "The records name no user {!r}, or no longer. Check how the name is written: anabranch keys list"
# The fact that names the stores outside of the data folder.
OUTSIDE = "stores_outside"
PARTIAL = ".partial"
# So long the other nodes have to drop what was erased from their indexes, until it is looked at again.
NODES_S = 3.0
GONE = "The index of a node that does not run may still hold it: {}. Start it, or: anabranch cluster remove NODE"
COPIES = f"{NAME}.before-restore-*"


class ErasureTimes(Value):
    """`after_s`: within which time a deletion is erased everywhere. `settle_s`: how long a question may run that has
    found a document just before it was deleted; what it writes is erased by a second pass."""

    after_s: float = 86_400.0
    settle_s: float = 190.0

    def due(self, now: float) -> float:
        """At most `after_s` later. Deletions of a quarter of that time are erased together: a pass rewrites files."""
        grid = self.after_s / 4
        return now if not grid else (now + self.after_s) // grid * grid


class Erasure(Value):
    """One erasure; `erased` counts what each store has removed, in the passes that this erasure was part of."""

    key: int
    id: str
    what: ErasureSubject
    subject: Erased
    requested_at: float
    due_at: float
    settled_at: float
    number: int
    completed_at: float | None
    error: str | None
    erased: tuple[tuple[str, int], ...]

    @property
    def complete_by(self) -> float:
        """When its last pass is due."""
        return max(self.due_at, self.settled_at)

    @property
    def state(self) -> ErasureState:
        if self.completed_at is not None:
            return "complete"
        if self.error is not None:
            return "failed"
        return "settling" if self.number else "due"


def request(db: Session, what: ErasureSubject, erased: Erased, times: ErasureTimes, *, now: bool = False) -> Erasure:
    """Record an erasure, which survives a crash. With `now` the rows go in this transaction, and the rest at once."""
    at = time.time()
    due_at = at if now else times.due(at)
    erased = _with_documents(db, erased)
    identifier = new_id()
    made = _insert(db, (identifier, what), erased, (at, due_at, at + times.settle_s, due_at))
    if now:
        what_for = {"what": what, "documents": len(erased.documents)}
        audit.append(db, AuditEntry(action="erasure.requested", object=f"erasure:{identifier}", details=what_for))
        _erase_rows(db, made)
    return made


def _insert(
    db: Session, named: tuple[str, ErasureSubject], erased: Erased, times: tuple[float, float, float, float]
) -> Erasure:
    """Insert an erasure with its id, and when it was requested, is due, has settled, and is run next."""
    db.execute(
        "INSERT INTO erasures (id, what, documents, user, requested_at, due_at, settled_at, next_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*named, as_json(erased.documents), next(iter(erased.users), None), *times),
    )
    made = by_id(db, named[0])
    assert made is not None, "it was inserted"
    return made


def _erase_rows(db: Session, one: Erasure) -> None:
    for name, erase in STORES:
        count(db, [one], name, erase(db, one.subject))


class Repeated(NamedTuple):
    """The erasures that restored records were lacking: how many they were, and of how many of them the name of the user
    is forgotten, so that only the documents of that time could be erased again."""

    erasures: int
    nameless: int


def repeat(db: Session, replaced: Path) -> Repeated | None:
    """Erase from restored records what was erased from the replaced ones after the backup, and leave the rest to the
    next pass; what was only deleted comes back. None if the replaced records cannot be read."""
    try:
        with read_only(replaced) as before:
            # Only `request` with `now` is due at once.
            requested = _found(before, "due_at <= requested_at ORDER BY key")
            backups = [tuple(row) for row in before.execute("SELECT path, made_at FROM backups")]
    except StoreFailed:
        return None
    db.executemany("INSERT INTO backups VALUES (?, ?) ON CONFLICT DO NOTHING", backups)
    lacking = [one for one in requested if by_id(db, one.id) is None]
    for one in lacking:
        erased = _with_documents(db, one.subject)
        times = (one.requested_at, one.due_at, one.settled_at, time.time())
        _erase_rows(db, _insert(db, (one.id, one.what), erased, times))
    return Repeated(len(lacking), sum(one.what == "user" and not one.subject.users for one in lacking))


def _with_documents(db: Session, erased: Erased) -> Erased:
    """With the documents of the users."""
    theirs = (
        identifier
        for user in erased.users
        for identifier in (*documents.ids_of(db, user), *jobs.documents_of(db, user))
    )
    return Erased(documents=tuple(dict.fromkeys((*erased.documents, *theirs))), users=erased.users)


def erase_copies(folder: Path, erased: Erased) -> tuple[int, list[Path]]:
    """Erase from the copies of earlier records that a restore has kept in the folder; returns how many there are, and
    those that are too damaged for it."""
    done, damaged = 0, []
    for path in sorted(folder.glob(COPIES)):
        if path.name.endswith(("-wal", "-shm")):
            continue
        if path.samefile(folder / NAME):  # a restore was killed that had kept nothing else yet
            path.unlink()
            continue
        try:
            _erase_copy(path, erased)
            done += 1
        except (sqlite3.Error, msgspec.MsgspecError, audit.AuditDamaged):
            damaged.append(path)
    return done, damaged


def _erase_copy(path: Path, erased: Erased) -> None:
    with closing(connect(path)) as copy:
        migrate(copy)
        copy.execute("BEGIN IMMEDIATE")
        there = _with_documents(copy, erased)
        for _, erase in STORES:
            erase(copy, there)
        copy.execute("COMMIT")
        copy.execute("VACUUM")
        copy.execute("PRAGMA journal_mode = DELETE")


def due(db: Session, now: float) -> list[Erasure]:
    """The erasures of which a pass is due."""
    return _found(db, "next_at <= ? ORDER BY key", now)


def by_id(db: Session, identifier: str) -> Erasure | None:
    return next(iter(_found(db, "id = ?", identifier)), None)


def knows(db: Session, document: str) -> bool:
    """Whether anything is left that names a document: an upload, a question for which it was found, an erasure."""
    named = (
        "SELECT 1 FROM items WHERE document_id = ?",
        "SELECT 1 FROM retrievals WHERE document = ?",
        "SELECT 1 FROM erasures, json_each(documents) WHERE value = ?",
    )
    return any(db.execute(f"{query} LIMIT 1", (document,)).fetchone() for query in named)


def knows_user(db: Session, user: str) -> bool:
    """Whether the records name a user, other than as one to be erased."""
    values = {"user": user, "prefix": USER}
    return any(db.execute(f"SELECT 1 FROM {one} LIMIT 1", values).fetchone() for one in NAMING)  # noqa: S608  ours


def erased_since(db: Session, documents: Iterable[str], moment: float) -> bool:
    """Whether the erasure of one of these documents, or of a user, was requested after a time."""
    found = db.execute(
        "SELECT 1 FROM erasures WHERE requested_at >= ? AND (what = 'user' OR EXISTS ("
        "SELECT 1 FROM json_each(documents) WHERE value IN (SELECT value FROM json_each(?)))) LIMIT 1",
        (moment, as_json(sorted(documents))),
    )
    return found.fetchone() is not None


def listed(db: Session, limit: int) -> list[Erasure]:
    """The latest erasures, newest first."""
    return _found(db, "TRUE ORDER BY key DESC LIMIT ?", limit)


def last_pass(db: Session) -> int:
    return int(db.execute("SELECT coalesce(max(pass), 0) FROM erasures").fetchone()[0])


def passed_since(db: Session, number: int, settled_after: float) -> list[Erasure]:
    """The erasures that were part of a later pass, and had questions that ended after a time."""
    return _found(db, "pass > ? AND settled_at >= ?", number, settled_after)


def whole(db: Session, one: Erasure) -> Erased:
    """What an erasure erases, with the documents that its user has stored since; they are recorded."""
    found = _with_documents(db, one.subject)
    if found != one.subject:
        db.execute("UPDATE erasures SET documents = ? WHERE key = ?", (as_json(found.documents), one.key))
    return found


def count(db: Session, erasures: Iterable[Erasure], store: str, removed: int) -> None:
    db.executemany(
        "INSERT INTO erased VALUES (?, ?, ?) "
        "ON CONFLICT (erasure, store) DO UPDATE SET removed = erased.removed + excluded.removed",
        ((one.key, store, removed) for one in erasures),
    )


def forget_users(db: Session, erasures: Sequence[Erasure], now: float) -> None:
    """The last pass needs the name no more."""
    db.executemany("UPDATE erasures SET user = NULL WHERE key = ?", ((one.key,) for one in _settled(erasures, now)))


def passed(db: Session, erasures: Sequence[Erasure], now: float, node: str = "") -> None:
    """Record a pass of a node. An erasure is complete with the first one after the questions of its time have ended,
    and after all other nodes have dropped from their indexes what was deleted in an earlier one."""
    number = last_pass(db) + 1
    db.executemany(
        "UPDATE erasures SET pass = ?, next_at = settled_at, error = NULL WHERE key = ?",
        ((number, one.key) for one in erasures),
    )
    for one in _settled(erasures, now):
        lacking = nodes.not_erased(db, node, one.number or number)
        if lacking:
            gone = ", ".join(f"{other.name} ({other.id})" for other in lacking if not other.is_alive)
            reason = GONE.format(gone) if gone else None
            db.execute("UPDATE erasures SET next_at = ?, error = ? WHERE key = ?", (now + NODES_S, reason, one.key))
        else:
            db.execute("UPDATE erasures SET next_at = NULL, completed_at = ? WHERE key = ?", (now, one.key))


def failed(db: Session, erasures: Iterable[Erasure], reason: str, retry_at: float) -> None:
    db.executemany(
        "UPDATE erasures SET error = ?, next_at = ? WHERE key = ?", ((reason, retry_at, one.key) for one in erasures)
    )


def note_stores(db: Session, stores: Iterable[str]) -> None:
    """Note what the server uses besides the data folder; a pass must erase from all of it."""
    if stores_noted(db) != (names := set(stores)):
        set_fact(db, OUTSIDE, as_json(sorted(names)))


def stores_noted(db: Session) -> set[str]:
    return set(msgspec.json.decode(fact(db, OUTSIDE) or "[]"))


def note_backup(db: Session, path: Path, made_at: float, *, complete: bool = False) -> None:
    """Note a backup that is about to be made, or is complete. Until then the file may be an earlier one."""
    conflict = "(path) DO UPDATE SET made_at = excluded.made_at" if complete else "DO NOTHING"
    insert = f"INSERT INTO backups VALUES (?, ?) ON CONFLICT {conflict}"  # noqa: S608  constants
    db.execute(insert, (str(path.resolve()), made_at))


def partial_name(backup: Path) -> str:
    """The name of the file into which a backup is written. It is noted, too: a killed backup leaves it."""
    return f".{backup.name}{PARTIAL}"


def noted_backups(db: Session) -> list[Path]:
    """All complete backups that are still there; none if the records are of a version that does not note them."""
    with suppress(sqlite3.Error):
        return [path for path in backups_before(db, math.inf) if path.suffix != PARTIAL]
    return []


def backups_before(db: Session, moment: float) -> list[Path]:
    """The backups that were made before a time and are still there."""
    rows = db.execute("SELECT path FROM backups WHERE made_at <= ? ORDER BY made_at", (moment,))
    return [path for path in (Path(row["path"]) for row in rows) if path.exists()]


def _settled(erasures: Iterable[Erasure], now: float) -> list[Erasure]:
    return [one for one in erasures if now >= one.settled_at]


def _found(db: Session, where: str, *values: str | float) -> list[Erasure]:
    rows = db.execute(f"SELECT * FROM erasures WHERE {where}", values).fetchall()  # noqa: S608  our own names
    return [_erasure(db, row) for row in rows]


def _erasure(db: Session, row: ResultRow) -> Erasure:
    counts = db.execute("SELECT store, removed FROM erased WHERE erasure = ? ORDER BY store", (row["key"],))
    return Erasure(
        key=row["key"],
        id=row["id"],
        what=row["what"],
        subject=Erased(
            documents=tuple(msgspec.json.decode(row["documents"])),
            users=() if row["user"] is None else (row["user"],),
        ),
        requested_at=row["requested_at"],
        due_at=row["due_at"],
        settled_at=row["settled_at"],
        number=row["pass"],
        completed_at=row["completed_at"],
        error=row["error"],
        erased=tuple((one["store"], one["removed"]) for one in counts),
    )
