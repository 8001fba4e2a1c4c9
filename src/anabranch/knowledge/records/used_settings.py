"""The settings that a server last started with, as salted hashes: what has changed since is in the audit log."""

import os
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from anabranch.domain.audit import AuditEntry, on_this_machine
from anabranch.domain.model import Value
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Session, as_json
from anabranch.knowledge.records.facts import fact, set_fact

FACT = "settings"
ACTION = "configuration.changed"
HASH_BYTES = 16


class _Noted(Value):
    """The hashes of the settings by name, with their salt."""

    salt: str
    hashes: dict[str, str]


def note(db: Session, values: Mapping[str, str], node: str = "") -> None:
    """Note the settings of this start of a node, and record which are others than at its start before. Settings that a
    version has added or removed have not been changed by anybody."""
    name = f"{FACT}:{node}" if node else FACT
    stored = fact(db, name)
    before = (
        _Noted(salt=os.urandom(HASH_BYTES).hex(), hashes={})
        if stored is None
        else msgspec.json.decode(stored, type=_Noted)
    )
    hashes = {name: _hashed(before.salt, value) for name, value in values.items()}
    if hashes == before.hashes:
        return
    set_fact(db, name, as_json(_Noted(salt=before.salt, hashes=hashes)))
    known = hashes.keys() & before.hashes.keys()
    if changed := sorted(name for name in known if hashes[name] != before.hashes[name]):
        audit.append(db, AuditEntry(action=ACTION, details={"settings": changed}), on_this_machine("start"))


def _hashed(salt: str, value: str) -> str:
    return blake2b(value.encode(errors="replace"), key=salt.encode(), digest_size=HASH_BYTES).hexdigest()
