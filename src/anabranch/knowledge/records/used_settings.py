"""The settings that a server last started with, as salted hashes: what has changed since is in the audit log."""

import os
import sqlite3
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from anabranch.domain.audit import AuditEntry, on_this_machine
from anabranch.domain.model import Value
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import as_json
from anabranch.knowledge.records.facts import fact, set_fact

FACT = "settings"
ACTION = "configuration.changed"
HASH_BYTES = 16


class _Noted(Value):
    """The hashes of the settings by name, with their salt."""

    salt: str
    hashes: dict[str, str]


def note(db: sqlite3.Connection, values: Mapping[str, str]) -> None:
    """Note the settings of this start, and record which are others than at the start before. Settings that a version
    has added or removed have not been changed by anybody."""
    stored = fact(db, FACT)
    before = (
        _Noted(salt=os.urandom(HASH_BYTES).hex(), hashes={})
        if stored is None
        else msgspec.json.decode(stored, type=_Noted)
    )
    hashes = {name: _hashed(before.salt, value) for name, value in values.items()}
    if hashes == before.hashes:
        return
    set_fact(db, FACT, as_json(_Noted(salt=before.salt, hashes=hashes)))
    known = hashes.keys() & before.hashes.keys()
    if changed := sorted(name for name in known if hashes[name] != before.hashes[name]):
        audit.append(db, AuditEntry(action=ACTION, details={"settings": changed}), on_this_machine("start"))


def _hashed(salt: str, value: str) -> str:
    return blake2b(value.encode(errors="replace"), key=salt.encode(), digest_size=HASH_BYTES).hexdigest()
