"""API keys under /v1/keys, for operators who send one themselves."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from anabranch.app.anabranch import Anabranch
from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import KNOWLEDGE
from anabranch.entrypoints.http.operations import Call, Handler, Operation
from anabranch.knowledge.records.keys import ApiKey

User = Annotated[str, Meta(min_length=1, max_length=200, extra_json_schema={"pattern": r"\S"})]


class NewKey(Value, forbid_unknown_fields=True):
    """The user that requests with the key act as, and the groups of that user. An `operator` may see and change
    everything."""

    user: User
    groups: Annotated[tuple[User, ...], Meta(max_length=100)] = ()
    operator: bool = False
    note: Annotated[str, Meta(max_length=500)] = ""


class KeyView(Value):
    """An API key, without its secret. `current`: the key of this request."""

    id: str
    user: str
    groups: tuple[str, ...]
    operator: bool
    note: str
    created_at: datetime
    revoked_at: datetime | None
    current: bool


class CreatedKey(KeyView, kw_only=True):
    """A new key; `key` is its secret, which is shown only here."""

    key: str


class KeyList(Value):
    keys: list[KeyView]


class KeyRevoked(Value):
    id: str
    revoked: bool


@dataclass(frozen=True)
class KeysSurface:
    """Lists, creates and revokes API keys. The streams of a revoked key end within seconds."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        at, path = self._operation, "/v1/keys"
        return [
            at("GET", path, "list_keys", "List API keys", self._keys, KeyList),
            at(
                *("POST", path, "create_key", "Create an API key", self._create, CreatedKey),
                request_type=NewKey,
                statuses={201: "The key, with its secret."},
            ),
            at("DELETE", f"{path}/{{key}}", "revoke_key", "Revoke an API key", self._revoke, KeyRevoked),
        ]

    def _operation(
        self, method: str, path: str, name: str, summary: str, handler: Handler[Any], response_type: type, **more: Any
    ) -> Operation[Any]:
        return Operation(
            *(method, path, name, summary, handler, KNOWLEDGE),
            response_types=(response_type,),
            identify=self.access.signed_in_operator,
            errors=(403,),
            **more,
        )

    async def _keys(self, call: Call[None]) -> KeyList:
        found = await (await self.anabranch.knowledge()).api_keys()
        return KeyList(keys=[_view(key, call.caller.key) for key in found])

    async def _create(self, call: Call[NewKey]) -> CreatedKey:
        request = call.request
        user, groups = request.user.strip(), tuple(group.strip() for group in request.groups)
        if not user or not all(groups):
            raise InvalidQuestion("A user and a group need a name that is not blank.")
        knowledge = await self.anabranch.knowledge()
        key, secret = await knowledge.create_api_key(
            user=user, groups=groups, operator=request.operator, note=request.note.strip()
        )
        return CreatedKey(key=secret, **msgspec.structs.asdict(_view(key, call.caller.key)))

    async def _revoke(self, call: Call[None]) -> KeyRevoked:
        identifier = call.params["key"]
        await (await self.anabranch.knowledge()).revoke_api_key(identifier)
        return KeyRevoked(id=identifier, revoked=True)


def _view(key: ApiKey, current: str | None) -> KeyView:
    return KeyView(
        id=key.id,
        user=key.user,
        groups=key.groups,
        operator=key.operator,
        note=key.note,
        created_at=datetime.fromtimestamp(round(key.created_at), UTC),
        revoked_at=None if key.revoked_at is None else datetime.fromtimestamp(round(key.revoked_at), UTC),
        current=key.id == current,
    )
