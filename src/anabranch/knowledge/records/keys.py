"""API keys with their user, groups and rights. Only hashes of the secrets are stored."""

import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from anabranch.domain.audit import GROUP, USER, AuditEntry
from anabranch.domain.model import Value
from anabranch.domain.rights import UNRESTRICTED, Grants, Rights, Scope
from anabranch.knowledge.model import Erased
from anabranch.knowledge.records import audit, collections
from anabranch.knowledge.records.database import ResultRow, Session, StoreFailed, as_json
from anabranch.knowledge.records.sqlite import read_only

PREFIX = "ab_"
# So much of the hash of a secret identifies it, in this process only.
CREDENTIAL_CHARACTERS = 16
VALID = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > :now)"


class ApiKey(Value):
    """`previous_until`: until then its previous secret is valid, too. `last_used_at` may be some seconds late."""

    id: str
    user: str
    groups: tuple[str, ...]
    operator: bool
    note: str
    created_at: float
    revoked_at: float | None
    rights: Rights
    expires_at: float | None
    last_used_at: float | None
    previous_until: float | None

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)


def create(
    db: Session,
    *,
    user: str,
    groups: tuple[str, ...] = (),
    operator: bool = False,
    note: str = "",
    rights: Rights = UNRESTRICTED,
    expires_at: float | None = None,
) -> tuple[ApiKey, str]:
    """Create a key; returns it with its secret, which is not stored."""
    identifier, secret = secrets.token_hex(4), _new_secret()
    db.execute(
        "INSERT INTO keys (id, hash, user, groups, operator, note, created_at, scopes, collections, grants, limits, "
        "expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            identifier,
            _hash(secret),
            user,
            as_json(groups),
            operator,
            note,
            time.time(),
            as_json(rights.scopes),
            None if rights.collections is None else as_json(rights.collections),
            None if rights.grants is None else as_json(rights.grants.names),
            as_json(rights.limits),
            expires_at,
        ),
    )
    created = by_id(db, identifier)
    _record(db, "created", created)
    return created, secret


def find(db: Session, secret: str, now: float | None = None) -> ApiKey | None:
    """The valid key that has this secret now."""
    found = db.execute(
        f"SELECT * FROM keys WHERE (hash = :hash OR (previous_hash = :hash AND previous_until > :now)) AND {VALID}",  # noqa: S608
        {"hash": _hash(secret), "now": _now(now)},
    )
    return next(map(_key, found), None)


def credential_of(secret: str) -> str:
    """What identifies a secret among those of `credentials`."""
    return _hash(secret)[:CREDENTIAL_CHARACTERS]


def by_id(db: Session, identifier: str) -> ApiKey:
    return _key(db.execute("SELECT * FROM keys WHERE id = ?", (identifier,)).fetchone())


def listed(db: Session) -> list[ApiKey]:
    return [_key(row) for row in db.execute("SELECT * FROM keys ORDER BY created_at, id")]


def credentials(db: Session, now: float | None = None) -> set[str]:
    """What identifies the secrets that are valid now."""
    found = db.execute(
        f"SELECT hash, CASE WHEN previous_until > :now THEN previous_hash END FROM keys WHERE {VALID}",  # noqa: S608
        {"now": _now(now)},
    )
    return {hashed[:CREDENTIAL_CHARACTERS] for row in found for hashed in row if hashed is not None}


def valid_again(db: Session, replaced: Path) -> int | None:
    """How many secrets are valid in restored records, but not in those that they replaced: the key was revoked, erased
    or rotated. None if those cannot be read."""
    try:
        with read_only(replaced) as before:
            return len(credentials(db) - credentials(before))
    except StoreFailed:
        return None


def rotate(
    db: Session, identifier: str, overlap_s: float, expires_at: float | None = None
) -> tuple[ApiKey, str] | None:
    """Give a valid key a new secret. The secret before it stays valid for the overlap, older ones do not. `expires_at`
    replaces the expiry, if it is given. None if there is no such key."""
    secret, now = _new_secret(), time.time()
    changed = db.execute(
        "UPDATE keys SET previous_hash = CASE WHEN :overlap > 0 THEN hash END, "  # noqa: S608  our own names
        "previous_until = CASE WHEN :overlap > 0 THEN :now + :overlap END, hash = :hash, "
        f"expires_at = coalesce(:expires, expires_at) WHERE id = :id AND {VALID}",
        {"overlap": overlap_s, "now": now, "hash": _hash(secret), "expires": expires_at, "id": identifier},
    )
    if changed.rowcount != 1:
        return None
    rotated = by_id(db, identifier)
    _record(db, "rotated", rotated)
    return rotated, secret


def used(db: Session, moments: Mapping[str, float]) -> None:
    """Record when keys were used last, by id."""
    db.executemany(
        "UPDATE keys SET last_used_at = ? WHERE id = ? AND coalesce(last_used_at, 0) < ?",
        [(moment, identifier, moment) for identifier, moment in moments.items()],
    )


def revoke(db: Session, identifier: str) -> bool:
    query = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL RETURNING *"
    revoked = [_key(row) for row in db.execute(query, (time.time(), identifier)).fetchall()]
    for key in revoked:
        _record(db, "revoked", key)
    return bool(revoked)


def _record(db: Session, what: str, key: ApiKey) -> None:
    audit.append(
        db,
        AuditEntry(
            action=f"key.{what}",
            object=f"key:{key.id}",
            name=f"{USER}{key.user}",
            granted=tuple(f"{GROUP}{name}" for name in key.groups),
            details={"operator": key.operator, **_restrictions(db, key)},
        ),
    )


def _restrictions(db: Session, key: ApiKey) -> dict[str, Any]:
    """What a key may do, and until when; left out if it is not restricted."""
    rights, details = key.rights, dict[str, Any](scopes=key.rights.scopes)
    if rights.collections is not None:
        details["collections"] = [one.id for one in collections.by_keys(db, rights.collections)]
    if rights.grants is not None:
        details["grants"] = rights.grants.names
    if rights.limits:
        details["limits"] = rights.limits
    for name in ("expires_at", "previous_until"):
        if (moment := getattr(key, name)) is not None:
            details[name] = f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return details


def erase(db: Session, erased: Erased) -> int:
    """Delete the keys of users, which revokes them; returns how many there were."""
    theirs = "user IN (SELECT value FROM json_each(?))"
    users = (as_json(erased.users),)
    for row in db.execute(f"SELECT id FROM keys WHERE {theirs}", users).fetchall():  # noqa: S608  our own names
        revoke(db, row["id"])
    return db.execute(f"DELETE FROM keys WHERE {theirs}", users).rowcount  # noqa: S608


def _new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _hash(secret: str) -> str:
    return sha256(secret.encode(errors="replace")).hexdigest()


def _now(now: float | None) -> float:
    return time.time() if now is None else now


def _key(row: ResultRow) -> ApiKey:
    return ApiKey(
        id=row["id"],
        user=row["user"],
        groups=tuple(msgspec.json.decode(row["groups"])),
        operator=bool(row["operator"]),
        note=row["note"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
        rights=_rights(row),
        expires_at=row["expires_at"],
        last_used_at=row["last_used_at"],
        previous_until=row["previous_until"],
    )


def _rights(row: ResultRow) -> Rights:
    within, grants = row["collections"], row["grants"]
    return Rights(
        scopes=msgspec.json.decode(row["scopes"], type=tuple[Scope, ...]),
        collections=None if within is None else msgspec.json.decode(within, type=tuple[int, ...]),
        grants=None if grants is None else Grants(names=msgspec.json.decode(grants, type=tuple[str, ...])),
        limits=msgspec.json.decode(row["limits"]),
    )
