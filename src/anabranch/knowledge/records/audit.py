"""The audit log: who did what, appended in the transaction of the change.

Each record has a hash of all its columns and of the hash before it. Names are not in it: a record has salted digests of
them, and a table of their own has the names with their salts. Forgetting a name deletes its row there."""

import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import blake2b, sha256
from typing import Any

import msgspec

from anabranch.domain.audit import USER, Actor, AuditEntry, AuditFilter, AuditRecord, acting
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Value
from anabranch.knowledge.model import Erased
from anabranch.knowledge.records import audit_schema
from anabranch.knowledge.records.consistency import streamed, unhurried
from anabranch.knowledge.records.database import ResultRow, Session, as_json
from anabranch.knowledge.records.facts import fact, set_fact
from anabranch.knowledge.records.schema import AUDIT, MIGRATIONS

EPOCH = datetime.fromtimestamp(0, UTC)
# A name has another salt every day: who did what on different days cannot be compared once it is forgotten.
DAY_US = 86_400_000_000
DIGEST_BYTES = SALT_BYTES = 16
MAX_NAME = 500
# So many of those that may see something are named; a thousand names would make a record of 200 KB.
MAX_GRANTED = 20
FORGOTTEN_PER_RECORD = 500
EXPIRED_AT_ONCE = 10_000
MAX_FINDINGS = 100
DIGESTS = "SELECT digest FROM audit_names WHERE subject IN (SELECT value FROM json_each(?))"
FORGET, EXPIRE = "audit.names_forgotten", "audit.expired"
NO_NAME = b""
# The facts with this prefix say up to which record the log was passed on, and to whom.
PASSED_ON = "audit_"
# The columns that the hash covers, with SQLite's type of each.
COLUMNS = {
    "seq": "integer",
    "at_us": "integer",
    "action": "text",
    "outcome": "text",
    "actor": "blob",
    "address": "blob",
    "surface": "text",
    "api_key": "text",
    "request": "text",
    "object": "text",
    "name": "blob",
    "details": "text",
}
INSERT = f"INSERT INTO audit ({', '.join(COLUMNS)}, hash) VALUES ({', '.join('?' * len(COLUMNS))}, ?)"  # noqa: S608
DIGITS = re.compile("[0-9]+")


class AuditFinding(Value):
    """What is wrong with the log; `seq` is the record, 0 for the log as a whole."""

    seq: int
    problem: str


class AuditDamaged(AnabranchError):
    """The audit log was changed by something else."""

    def __init__(self) -> None:
        super().__init__("The audit log is damaged. Find out where with: anabranch audit verify")


class AuditHead(Value):
    """The newest record. Whoever has noted it elsewhere can find out later whether the log was replaced."""

    seq: int
    hash: str


def append(db: Session, entry: AuditEntry, by: Actor | None = None) -> None:
    """Record what this transaction does, and who does it: `by`, else whoever acts now."""
    by = by or acting.get()()
    at_us = time.time_ns() // 1_000
    day = at_us // DAY_US
    last = db.execute("SELECT head_seq, head_hash FROM audit_chain").fetchone()
    if last is None:
        raise AuditDamaged
    details = dict(entry.details)
    if entry.granted:
        details["granted"] = [_digest(db, day, name, name).hex() for name in entry.granted[:MAX_GRANTED]]
    if len(entry.granted) > MAX_GRANTED:
        details["granted_count"] = len(entry.granted)
    row = (
        last[0] + 1,
        at_us,
        entry.action,
        entry.outcome,
        _digest(db, day, by.name, by.name),
        # With a user's name, the addresses of that user are forgotten.
        _digest(db, day, by.name if by.name.startswith(USER) else f"address:{by.address}", by.address),
        by.surface,
        by.key,
        by.request,
        entry.object,
        _digest(db, day, entry.object, entry.name),
        as_json(details),
    )
    row = _storable(db, row)
    chained = _chained(last[1], row)
    added = db.execute(INSERT, (*row, chained)).rowcount
    noted = db.execute("UPDATE audit_chain SET head_seq = ?, head_hash = ?", (row[0], chained)).rowcount
    if not (added and noted):  # a trigger that is not ours ignored it
        raise AuditDamaged


def _digest(db: Session, day: int, subject: str, name: str) -> bytes:
    """The digest of a name, which is stored with its salt under what it is a name of."""
    if not name:
        return NO_NAME
    name = name[:MAX_NAME].encode(errors="replace").decode()
    key = _storable(db, (day, subject.encode(errors="replace").decode(), name))
    found = db.execute("SELECT digest FROM audit_names WHERE day = ? AND subject = ? AND name = ?", key).fetchone()
    if found is not None:
        return bytes(found[0])
    salt = os.urandom(SALT_BYTES)
    digest = _hidden(salt, *key)
    db.execute(
        "INSERT INTO audit_names (digest, salt, day, subject, name) VALUES (?, ?, ?, ?, ?)", (digest, salt, *key)
    )
    return digest


def _storable(db: Session, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values as the database gives them back: PostgreSQL's texts have no NUL."""
    if db.kind == "sqlite":
        return row
    return tuple(one.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(one, str) else one for one in row)


def _hidden(salt: bytes, day: int, subject: str | bytes, name: str | bytes) -> bytes:
    return blake2b(_encoded((day, subject, name)), key=salt, digest_size=DIGEST_BYTES).digest()


def _chained(before: bytes, row: Sequence[Any]) -> bytes:
    return sha256(_encoded((before, *row))).digest()


def _encoded(values: Sequence[Any]) -> bytes:
    return msgspec.msgpack.encode([one.encode() if isinstance(one, str) else one for one in values])


def forget(db: Session, *subjects: str) -> int:
    """Forget the names of some subjects; returns how many. A subject is the `object` of a record, such as
    `document:ID`, or a person or group: `user:NAME` (with the addresses, the keys and the published paths of that
    user, and the titles of documents that the user has sent), `group:NAME`."""
    users = [one.removeprefix(USER) for one in subjects if one.startswith(USER)]
    found = db.execute(
        "SELECT digest FROM audit_names WHERE subject IN (SELECT value FROM json_each(:subjects)) "
        "OR name IN (SELECT :prefix || value FROM json_each(:users)) OR subject LIKE 'collection:%' AND "
        "EXISTS (SELECT 1 FROM json_each(:users) WHERE substr(name, 1, length(value) + 1) = value || '/')",
        {"subjects": as_json(subjects), "users": as_json(users), "prefix": USER},
    )
    digests = list(dict.fromkeys([*(bytes(row[0]) for row in found), *(_titles_sent_by(db, users) if users else ())]))
    db.executemany("DELETE FROM audit_names WHERE digest = ?", ((one,) for one in digests))
    for start in range(0, len(digests), FORGOTTEN_PER_RECORD):
        names = [one.hex() for one in digests[start : start + FORGOTTEN_PER_RECORD]]
        append(db, AuditEntry(action=FORGET, details={"names": names}))
    return len(digests)


def created_by(db: Session, kind: str, users: Iterable[str]) -> list[str]:
    """What these users have created of a kind, such as `collection`, also if it was deleted since. This must be asked
    before the names of the users are forgotten."""
    found = db.execute(
        f"SELECT object FROM audit WHERE action = ? AND actor IN ({DIGESTS})",  # noqa: S608  our own names
        (f"{kind}.created", as_json([f"{USER}{user}" for user in users])),
    )
    return [row[0] for row in found]


def _titles_sent_by(db: Session, users: Iterable[str]) -> list[bytes]:
    """The digests of the titles with which users have sent documents, also of those that are somebody else's now."""
    found = db.execute(
        "SELECT DISTINCT name FROM audit WHERE action IN ('document.added', 'document.replaced', 'document.failed') "  # noqa: S608
        f"AND actor IN ({DIGESTS}) AND name IN (SELECT digest FROM audit_names)",
        (as_json([f"{USER}{user}" for user in users]),),
    )
    return [bytes(row[0]) for row in found]


def erase(db: Session, erased: Erased) -> int:
    """Forget the names of what is erased."""
    return forget(db, *(f"document:{one}" for one in erased.documents), *(f"user:{one}" for one in erased.users))


def expire(db: Session, days: float) -> int:
    """Delete the oldest records, if they are older than some days; returns how many. A new record says up to which one,
    so that a verification can begin there. Deletes a part at a time: others wait to write."""
    limit_us = time.time_ns() // 1_000 - round(days * DAY_US)
    anchor, head = db.execute("SELECT anchor_seq, head_seq FROM audit_chain").fetchone()
    kept = db.execute("SELECT seq FROM audit WHERE at_us >= ? ORDER BY seq LIMIT 1", (limit_us,)).fetchone()
    last = min(head if kept is None else kept[0] - 1, anchor + EXPIRED_AT_ONCE)
    # A log to which nothing else was added would otherwise record for ever that its last such record was deleted.
    if not db.execute("SELECT 1 FROM audit WHERE seq <= ? AND action != ? LIMIT 1", (last, EXPIRE)).fetchone():
        return 0
    new_anchor = db.execute("SELECT hash FROM audit WHERE seq = ?", (last,)).fetchone()[0]
    deleted = db.execute("DELETE FROM audit WHERE seq <= ?", (last,)).rowcount
    db.execute("UPDATE audit_chain SET anchor_seq = ?, anchor_hash = ?", (last, new_anchor))
    append(db, AuditEntry(action=EXPIRE, details={"through": last, "hash": new_anchor.hex(), "count": deleted}))
    db.execute(f"DELETE FROM audit_names WHERE day < (SELECT min(at_us) / {DAY_US} FROM audit)")  # noqa: S608
    return deleted


def head(db: Session) -> AuditHead:
    row = db.execute("SELECT head_seq, head_hash FROM audit_chain").fetchone()
    if row is None or not isinstance(row[1], bytes):
        raise AuditDamaged
    return AuditHead(seq=row[0], hash=row[1].hex())


def is_kept(db: Session) -> bool:
    """Whether the records have an audit log; those of earlier versions do not."""
    if db.kind == "postgres":
        return True
    try:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error:  # damaged: `verify` says how
        return True
    return version > MIGRATIONS.index(AUDIT)


def verify(db: Session, noted: AuditHead | None = None) -> list[AuditFinding]:
    """What is wrong with the log: a record or name that was changed, deleted, inserted or moved. With `noted`, also
    whether the log still has that record."""
    try:
        return _Verification(db, noted).findings()
    except (sqlite3.Error, AttributeError, TypeError, ValueError) as error:
        return [AuditFinding(seq=0, problem=f"The audit log cannot be read ({error}).")]


class _Verification:
    """One reading of the whole log."""

    def __init__(self, db: Session, noted: AuditHead | None) -> None:
        self._db = db
        self._noted = noted
        self._found: list[AuditFinding] = []
        # The record in which each digest without a name was met first.
        self._nameless: dict[bytes, int] = {}
        self._forgotten: set[bytes] = set()
        # The last record that was deleted, as the newest record about that says.
        self._expired: tuple[Any, Any] = (0, None)

    def findings(self) -> list[AuditFinding]:
        unhurried(self._db)
        for difference in audit_schema.differences(self._db):
            self._add(0, difference)
        if not audit_schema.is_readable(self._db):
            return self._found[:MAX_FINDINGS]
        names = self._valid_names()
        self._chain(names)
        for digest, seq in self._nameless.items():
            if digest not in self._forgotten:
                self._add(seq, "A name is missing, and no record says that it was forgotten.")
        self._passed_on()
        return self._found[:MAX_FINDINGS]

    def _add(self, seq: int, problem: str) -> None:
        if len(self._found) < MAX_FINDINGS:
            self._found.append(AuditFinding(seq=seq, problem=problem))

    def _rows(self, table: str, columns: Mapping[str, str], order: str) -> Iterator[tuple[bool, list[Any]]]:
        """The rows of a table with their texts as bytes, and whether each value has the type of its column."""
        if self._db.kind == "postgres":
            for row in streamed(self._db, f"SELECT {', '.join(columns)} FROM {table} {order}"):  # noqa: S608  our own names
                yield True, [one.encode() if isinstance(one, str) else one for one in row]
            return
        kinds = "||' '||".join(f"typeof({name})" for name in columns)
        query = f"SELECT {kinds}, {raw(columns)} FROM {table} {order}"  # noqa: S608
        for found, *row in self._db.execute(query):
            yield found == " ".join(columns.values()), row

    def _valid_names(self) -> set[bytes]:
        valid = set()
        columns = {"digest": "blob", "salt": "blob", "day": "integer", "subject": "text", "name": "text"}
        for is_typed, (digest, salt, *key) in self._rows("audit_names", columns, ""):
            if is_typed and 0 < len(salt) <= 64 and digest == _hidden(salt, *key):
                valid.add(digest)
            else:
                self._add(0, "A name was changed.")
        return valid

    def _chain(self, names: set[bytes]) -> None:
        rows = self._db.execute("SELECT anchor_seq, anchor_hash, head_seq, head_hash FROM audit_chain").fetchall()
        if len(rows) != 1:
            self._add(0, f"The log should have one newest record; {len(rows)} are noted (audit_chain).")
        if not rows:
            return
        anchor, before, head, head_hash = rows[0]
        self._expired = (0, before.hex())
        seq, last = anchor, before
        for is_typed, (stored, *row) in self._rows("audit", {"hash": "blob", **COLUMNS}, "ORDER BY seq"):
            if not is_typed:
                self._add(seq + 1, "The record was changed: a value has another type.")
                seq, last = seq + 1, stored
                continue
            if row[0] != seq + 1:
                self._add(row[0], _gap(seq, row[0]))
            elif stored != _chained(last, row):
                self._add(row[0], "The record was changed, or the one before it.")
            self._remember(row, names)
            seq, last = row[0], stored
            if self._noted is not None and self._noted.seq == seq and self._noted.hash != stored.hex():
                self._add(seq, "The record has another hash than the one that was noted.")
        if (seq, last) != (head, head_hash):
            self._add(head, f"The newest record should be {head}, with another hash than that of {seq}.")
        if self._noted is not None and not anchor < self._noted.seq <= seq:
            self._add(self._noted.seq, "The log does not have the record that was noted.")
        if self._expired != (anchor, before.hex()):
            self._add(anchor, f"Records up to {anchor} were deleted, and no record says so.")

    def _passed_on(self) -> None:
        """What was passed on is in the log: nothing is passed on again before the log reaches that record."""
        found = self._db.execute(
            "SELECT name, value, head_seq FROM facts, audit_chain WHERE substr(name, 1, length(?)) = ?",
            (PASSED_ON, PASSED_ON),
        )
        for name, noted, head in found:
            if not DIGITS.fullmatch(noted) or int(noted) > head:
                self._add(0, f"Records up to {noted} are noted as passed on ({name}), and the newest one is {head}.")

    def _remember(self, row: Sequence[Any], names: set[bytes]) -> None:
        """Which names the record has, and which names and records it says were deleted."""
        values = dict(zip(COLUMNS, row, strict=True))
        details: dict[str, Any] = {}
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):  # it was changed, which the hash has shown
            details = msgspec.json.decode(values["details"], type=dict)
        with suppress(ValueError, TypeError, KeyError):
            if values["action"] == FORGET.encode():
                self._forgotten.update(map(bytes.fromhex, details["names"]))
            if values["action"] == EXPIRE.encode():
                self._expired = (details["through"], details["hash"])
        granted = _granted(details)
        for digest in (values["actor"], values["address"], values["name"], *granted):
            if digest not in names and digest != NO_NAME:
                self._nameless.setdefault(digest, values["seq"])


def raw(columns: Mapping[str, str]) -> str:
    """The columns, with the bytes of texts, which may be no UTF-8 any more."""
    return ", ".join(f"CAST({name} AS BLOB)" if kind == "text" else name for name, kind in columns.items())


def _gap(before: int, seq: int) -> str:
    if seq <= before:
        return "The record is out of order."
    missing = f"Record {before + 1} is" if seq == before + 2 else f"Records {before + 1} to {seq - 1} are"
    return f"{missing} missing."


def _granted(details: dict[str, Any]) -> list[bytes]:
    with suppress(ValueError, TypeError):
        return [bytes.fromhex(one) for one in details.get("granted", ())]
    return []


READ = (
    f"SELECT {', '.join(f'audit.{name} AS {name}' for name in (*COLUMNS, 'hash'))}, actors.name AS actor_name, "  # noqa: S608
    "addresses.name AS address_name, names.name AS object_name FROM audit "
    "LEFT JOIN audit_names AS actors ON actors.digest = actor "
    "LEFT JOIN audit_names AS addresses ON addresses.digest = address "
    "LEFT JOIN audit_names AS names ON names.digest = audit.name WHERE "
)
CONDITIONS = {
    "since": "at_us >= ? * 1000000",
    "until": "at_us < ? * 1000000",
    "action": "substr(action || '.', 1, length(?) + 1) = ? || '.'",
    "actor": "actor IN (SELECT digest FROM audit_names WHERE subject IN (?, 'user:' || ?))",
}


def listed(db: Session, wanted: AuditFilter, before: int | None, limit: int) -> list[AuditRecord]:
    """Records, newest first, before one of them; AuditDamaged if they cannot be read."""
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
    conditions = [_condition(name) for name in given] or ["TRUE"]
    if before is not None:
        conditions.append("seq < :before")
    query = f"{READ}{' AND '.join(conditions)} ORDER BY seq DESC LIMIT :limit"
    return _records(db, query, {**given, "before": before, "limit": limit})


def after(db: Session, seq: int, limit: int) -> list[AuditRecord]:
    """Records after one of them, oldest first."""
    return _records(db, f"{READ} seq > ? ORDER BY seq LIMIT ?", (seq, limit))


def _records(db: Session, query: str, values: Mapping[str, Any] | Sequence[Any]) -> list[AuditRecord]:
    try:
        return [_record(db, row) for row in db.execute(query, values)]
    except (msgspec.MsgspecError, AttributeError, OverflowError, TypeError, ValueError):
        raise AuditDamaged from None
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):  # a text is not UTF-8
            raise
        raise AuditDamaged from None


def _condition(name: str) -> str:
    return CONDITIONS[name].replace("?", f":{name}")


def _record(db: Session, row: ResultRow) -> AuditRecord:
    details = msgspec.json.decode(row["details"], type=dict)
    granted = _granted(details)
    details.pop("granted", None)
    return AuditRecord(
        seq=row["seq"],
        at=EPOCH + timedelta(microseconds=row["at_us"]),
        action=row["action"],
        outcome=row["outcome"],
        actor=_shown(row["actor"], row["actor_name"]),
        address=_shown(row["address"], row["address_name"]),
        surface=row["surface"],
        key=row["api_key"],
        request=row["request"],
        object=row["object"],
        name=_shown(row["name"], row["object_name"]),
        granted=tuple(_names_of(db, granted)),
        details=details,
        hash=row["hash"].hex(),
    )


def _shown(digest: bytes, name: str | None) -> str | None:
    return "" if digest == NO_NAME else name


def _names_of(db: Session, digests: Sequence[bytes]) -> Iterator[str | None]:
    for digest in digests:
        row = db.execute("SELECT name FROM audit_names WHERE digest = ?", (digest,)).fetchone()
        yield None if row is None else row[0]


def passed_on(db: Session, reader: str) -> int:
    """Up to which record the log was passed on to a reader outside, such as a collector."""
    return int(fact(db, f"{PASSED_ON}{reader}") or 0)


def set_passed_on(db: Session, reader: str, seq: int) -> None:
    set_fact(db, f"{PASSED_ON}{reader}", str(seq))
