"""API keys with their user, groups and rights. Only hashes of the secrets are stored."""

import secrets
import sqlite3
import time
from hashlib import sha256

import msgspec

from anabranch.domain.audit import GROUP, USER, AuditEntry
from anabranch.domain.model import Value
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import as_json

PREFIX = "ab_"


class ApiKey(Value):
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
) -> tuple[ApiKey, str]:
    """Create a key; returns it with its secret, which is not stored."""
    identifier, secret = secrets.token_hex(4), PREFIX + secrets.token_urlsafe(32)
    db.execute(
        "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, NULL)",
        (identifier, _hash(secret), user, as_json(groups), operator, note, time.time()),
    )
    created = next(key for key in listed(db) if key.id == identifier)
    _record(db, "created", created)
    return created, secret


def find(db: sqlite3.Connection, secret: str) -> ApiKey | None:
    found = db.execute("SELECT * FROM keys WHERE hash = ? AND revoked_at IS NULL", (_hash(secret),))
    return next(map(_key, found), None)


def listed(db: sqlite3.Connection) -> list[ApiKey]:
    return [_key(row) for row in db.execute("SELECT * FROM keys ORDER BY created_at, id")]


def valid(db: sqlite3.Connection) -> set[str]:
    """The ids of the keys that are not revoked."""
    return {row["id"] for row in db.execute("SELECT id FROM keys WHERE revoked_at IS NULL")}


def revoke(db: sqlite3.Connection, identifier: str) -> bool:
    query = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL RETURNING *"
    revoked = [_key(row) for row in db.execute(query, (time.time(), identifier)).fetchall()]
    for key in revoked:
        _record(db, "revoked", key)
    return bool(revoked)


def _record(db: sqlite3.Connection, what: str, key: ApiKey) -> None:
    audit.append(
        db,
        AuditEntry(
            action=f"key.{what}",
            object=f"key:{key.id}",
            name=f"{USER}{key.user}",
            granted=tuple(f"{GROUP}{name}" for name in key.groups),
            details={"operator": key.operator},
        ),
    )


def _hash(secret: str) -> str:
    return sha256(secret.encode(errors="replace")).hexdigest()


def _key(row: sqlite3.Row) -> ApiKey:
    return ApiKey(
        id=row["id"],
        user=row["user"],
        groups=tuple(msgspec.json.decode(row["groups"])),
        operator=bool(row["operator"]),
        note=row["note"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )
