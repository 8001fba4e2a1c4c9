"""API keys under /v1/keys, for operators who send one themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from anabranch.app.anabranch import Anabranch
from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.domain.rights import Scope
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.operations import Call, Operation
from anabranch.entrypoints.http.v1_operations import operation
from anabranch.entrypoints.key_views import KeyFields, key_fields
from anabranch.knowledge.key_requests import MAX_LISTED, MAX_NAME, MAX_NOTE, MAX_OVERLAP_S, KeyRequest
from anabranch.policies.limits import limits_of

User = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, extra_json_schema={"pattern": r"\S"})]
Names = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=MAX_NAME)], ...], Meta(max_length=MAX_LISTED)]


class NewKey(Value, forbid_unknown_fields=True):
    """The user that requests with the key act as, and the groups of that user. An `operator` may see and change
    everything. `scopes` are all but `admin` (operators: all) if they are left out. With `collections` (ids or names)
    the key is for these only. `grants` are the configured endpoints that it may use: `source:NAME`, `mcp:NAME`,
    `model:NAME`, `planner` or `all`; left out: none, for operators all. `limits` are numbers by the name of a limit, of
    which `requests` counts all requests in the window of AGGREGATOR_RATE_LIMIT_WINDOW."""

    user: User
    groups: Annotated[tuple[User, ...], Meta(max_length=MAX_LISTED)] = ()
    operator: bool = False
    note: Annotated[str, Meta(max_length=MAX_NOTE)] = ""
    expires_at: datetime | None = None
    scopes: tuple[Scope, ...] | None = None
    collections: Names | None = None
    grants: Names | None = None
    limits: Mapping[str, float] = {}


class KeyRotation(Value, forbid_unknown_fields=True):
    """For so many seconds the secret of before is valid, too. `expires_at` replaces the key's expiry."""

    overlap_s: Annotated[int, Meta(ge=0, le=MAX_OVERLAP_S)] = 0
    expires_at: datetime | None = None


class KeyView(KeyFields, kw_only=True):
    """An API key, without its secret. `current`: the key of this request."""

    current: bool


class CreatedKey(KeyView, kw_only=True):
    """A key with a new secret, `key`, which is shown only here."""

    key: str


class KeyList(Value):
    keys: list[KeyView]


class KeyRevoked(Value):
    id: str
    revoked: bool


@dataclass(frozen=True)
class KeysSurface:
    """Lists, creates, rotates and revokes API keys. The streams of a revoked or expired key end within seconds."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        identify, path = self.access.signed_in_operator, "/v1/keys"
        at = partial(operation, scope="admin", identify=identify, errors=(403,))
        return [
            at("GET", path, "list_keys", "List API keys", self._keys, KeyList),
            at(
                *("POST", path, "create_key", "Create an API key", self._create, CreatedKey),
                request_type=NewKey,
                statuses={201: "The key, with its secret."},
                errors=(403, 409),
            ),
            at(
                *("POST", f"{path}/{{key}}/rotate", "rotate_key", "Give an API key a new secret"),
                *(self._rotate, CreatedKey),
                request_type=KeyRotation,
                errors=(403, 409),
            ),
            at(
                *("DELETE", f"{path}/{{key}}", "revoke_key", "Revoke an API key", self._revoke, KeyRevoked),
                errors=(403, 409),
            ),
        ]

    async def _keys(self, call: Call[None]) -> KeyList:
        found, collections = await (await self.anabranch.knowledge()).api_keys()
        fields = (key_fields(key, collections) for key in found)
        return KeyList(keys=[KeyView(**one, current=one["id"] == call.caller.key) for one in fields])

    async def _create(self, call: Call[NewKey]) -> CreatedKey:
        given = msgspec.structs.asdict(call.request)
        request = KeyRequest(**{**given, "expires_at": _seconds(call.request.expires_at)})
        knowledge = await self.anabranch.knowledge()
        key, secret = await knowledge.create_api_key(request, limits_of(self.anabranch.settings))
        return await self._created(call, key, secret)

    async def _rotate(self, call: Call[KeyRotation]) -> CreatedKey:
        request, knowledge = call.request, await self.anabranch.knowledge()
        key, secret = await knowledge.rotate_api_key(
            call.params["key"], request.overlap_s, _seconds(request.expires_at)
        )
        return await self._created(call, key, secret)

    async def _created(self, call: Call[Any], key: Any, secret: str) -> CreatedKey:
        _, collections = await (await self.anabranch.knowledge()).api_keys()
        return CreatedKey(**key_fields(key, collections), current=key.id == call.caller.key, key=secret)

    async def _revoke(self, call: Call[None]) -> KeyRevoked:
        revoked = await (await self.anabranch.knowledge()).revoke_api_key(call.params["key"])
        return KeyRevoked(id=revoked.id, revoked=True)


def _seconds(moment: datetime | None) -> float | None:
    if moment is not None and moment.tzinfo is None:
        raise InvalidQuestion("expires_at needs a time zone, as in 2027-01-31T09:00:00Z.")
    return None if moment is None else moment.timestamp()
