"""API keys as HTTP and the command line show them, without their secrets."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from anabranch.domain.model import Value
from anabranch.domain.rights import Scope
from anabranch.knowledge.model import Collection
from anabranch.knowledge.records.keys import ApiKey

KeyState = Literal["valid", "expired", "revoked"]


class KeyCollection(Value):
    id: str
    name: str


class KeyFields(Value):
    """`collections` are those to which the key is restricted, if it is; of `grants` null means that the setting
    AGGREGATOR_AUTH says which configured endpoints it may use. Until `previous_until` the secret before the last
    rotation is valid, too. `last_used_at` may be some seconds late."""

    id: str
    user: str
    groups: tuple[str, ...]
    operator: bool
    note: str
    scopes: tuple[Scope, ...]
    collections: tuple[KeyCollection, ...] | None
    grants: tuple[str, ...] | None
    limits: Mapping[str, float]
    state: KeyState
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    previous_until: datetime | None
    revoked_at: datetime | None


def key_fields(key: ApiKey, collections: Sequence[Collection]) -> dict[str, Any]:
    """The values of KeyFields; `collections` are all that there are."""
    within, now = key.rights.collections, time.time()
    return {
        "id": key.id,
        "user": key.user,
        "groups": key.groups,
        "operator": key.operator,
        "note": key.note,
        "scopes": key.rights.scopes,
        "collections": None
        if within is None
        else tuple(KeyCollection(id=one.id, name=one.name) for one in collections if one.key in within),
        "grants": None if key.rights.grants is None else key.rights.grants.names,
        "limits": key.rights.limits,
        "state": "revoked" if key.revoked_at is not None else "valid" if key.is_valid(now) else "expired",
        "created_at": _moment(key.created_at),
        "expires_at": _moment(key.expires_at),
        "last_used_at": _moment(key.last_used_at),
        "previous_until": _moment(key.previous_until if (key.previous_until or 0) > now else None),
        "revoked_at": _moment(key.revoked_at),
    }


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(round(seconds), UTC)
