"""API keys: who may ask, as which user, in which groups. Only their hashes are kept."""

import secrets
import sqlite3
import time
from hashlib import sha256

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.model import Caller

PREFIX = "ab_"


class Key(Value):
    id: str
    user: str
    groups: tuple[str, ...]
    operator: bool
    note: str
    created_at: float
    revoked_at: float | None

    @property
    def caller(self) -> Caller:
        return Caller(user=self.user, groups=self.groups, operator=self.operator)


def create(
    db: sqlite3.Connection, *, user: str, groups: tuple[str, ...] = (), operator: bool = False, note: str = ""
) -> tuple[Key, str]:
    """A new key and its secret, which is shown once and kept nowhere."""
    identifier, secret = secrets.token_hex(4), PREFIX + secrets.token_urlsafe(32)
    db.execute(
        "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, NULL)",
        (identifier, _hash(secret), user, msgspec.json.encode(groups).decode(), operator, note, time.time()),
    )
    return next(key for key in listed(db) if key.id == identifier), secret


def find(db: sqlite3.Connection, secret: str) -> Key | None:
    row = db.execute("SELECT * FROM keys WHERE hash = ? AND revoked_at IS NULL", (_hash(secret),)).fetchone()
    return _key(row) if row else None


def listed(db: sqlite3.Connection) -> list[Key]:
    return [_key(row) for row in db.execute("SELECT * FROM keys ORDER BY created_at, id")]


def valid(db: sqlite3.Connection) -> set[str]:
    """The ids of those that are not revoked."""
    return {row["id"] for row in db.execute("SELECT id FROM keys WHERE revoked_at IS NULL")}


def revoke(db: sqlite3.Connection, identifier: str) -> bool:
    changed = db.execute(
        "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (time.time(), identifier)
    )
    return changed.rowcount == 1


def _hash(secret: str) -> str:
    return sha256(secret.encode(errors="replace")).hexdigest()


def _key(row: sqlite3.Row) -> Key:
    return Key(
        id=row["id"],
        user=row["user"],
        groups=tuple(msgspec.json.decode(row["groups"])),
        operator=bool(row["operator"]),
        note=row["note"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )
