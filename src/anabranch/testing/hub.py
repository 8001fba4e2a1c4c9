"""A stub SyftHub: a list of public endpoints, tokens for whoever asks, and the keys with which they are signed."""

import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
from aiohttp import web

from anabranch.testing.failures import MIB, Failing, Failure
from anabranch.testing.http_server import HttpServer, bearer, json
from anabranch.testing.signer import Signer

_WHEN = "2026-01-01T00:00:00Z"
_EXPIRES_S = 60
_GUEST = {"sub": "guest", "role": "guest"}


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    tenant_name: str | None


class _Connection(msgspec.Struct, frozen=True, kw_only=True):
    config: _Config
    type: str = "http"
    enabled: bool = True


class _Published(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    slug: str
    type: str
    owner_username: str
    connect: tuple[_Connection, ...]
    description: str = ""
    created_at: str = _WHEN
    updated_at: str = _WHEN


class _Owners(msgspec.Struct, frozen=True, kw_only=True):
    owner_usernames: tuple[str, ...]


class Hub:
    """Its tokens are plain words, `satellite-OWNER` and `guest-OWNER`; with `signing` they are JWTs as a real hub signs
    them, which `/.well-known/jwks.json` lets others check. `key_requests` is how often that was asked for."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None, signing: bool = False
    ) -> None:
        self.key_requests = 0
        self._signer = Signer() if signing else None
        self._members: dict[str, Mapping[str, Any]] = {}
        self._failing: Failing | None = None
        self._published: list[_Published] = []
        self._listener = HttpServer(self._handle, host=host, port=port, tls=tls)

    async def __aenter__(self) -> Self:
        await self._listener.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._listener.stop()

    @property
    def url(self) -> str:
        return self._listener.url

    def publish(
        self,
        *,
        owner: str,
        slug: str,
        url: str,
        type: Literal["model", "data_source"],  # noqa: A002 (the Hub's word)
        tenant: str | None = None,
    ) -> None:
        connection = _Connection(config=_Config(url=url, tenant_name=tenant))
        self._published.append(_Published(name=slug, slug=slug, type=type, owner_username=owner, connect=(connection,)))

    def member(self, api_token: str, **claims: Any) -> None:
        """Whoever logs in with this API token gets satellite tokens with these claims (`sub` and whatever else)."""
        self._members[api_token] = claims

    def token(self, audience: str, *, expires_s: float = _EXPIRES_S, **claims: Any) -> str:
        """A signed satellite token for an owner; without a `sub`, a guest's."""
        return self._signing.token(audience, expires_s, claims if "sub" in claims else {**_GUEST, **claims})

    def sign(self, claims: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> str:
        """Exactly these claims, signed with the current key."""
        return self._signing.sign(claims, headers)

    def rotate(self, *, keep: bool = False) -> str:
        """Sign with a new key from now on, and publish the old ones no more, or with `keep` still; its id."""
        return self._signing.rotate(keep=keep)

    @property
    def keys(self) -> list[dict[str, Any]]:
        """The public keys, as they are published."""
        return self._signing.public_keys()

    def fails(self, failure: Failure | None) -> None:
        """From now on everything fails in this way; with None it works again."""
        if failure is None:
            self._failing = None
            return
        self._failing = Failing(
            failure=failure, form="summary", size_bytes=32 * MIB, location="/", retry_after_s=1, body=None
        )

    @property
    def _signing(self) -> Signer:
        if self._signer is None:
            raise RuntimeError("this hub does not sign: make it with Hub(signing=True)")
        return self._signer

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.key_requests += request.path == "/.well-known/jwks.json"
        if self._failing is not None:
            return await self._failing.answer(request, b"", "space")
        match request.method, request.path:
            case "GET", "/.well-known/jwks.json" if self._signer is not None:
                reply = json(msgspec.json.encode({"keys": self.keys}))
            case "GET", "/api/v1/endpoints/public":
                reply = json(msgspec.json.encode(self._page(request)))
            case "GET", "/api/v1/token":
                login = bearer(request)
                reply = self._token(request, login) if login else _refuse(401, "Not authenticated")
            case "GET", "/api/v1/token/guest":
                reply = self._token(request, None)
            case "POST", "/api/v1/accounting/transaction-tokens":
                reply = _transaction_tokens(await request.read())
            case _:
                reply = _refuse(404, "Not found")
        return reply

    def _page(self, request: web.BaseRequest) -> list[_Published]:
        skip = int(request.query.get("skip", 0))
        return self._published[skip : skip + int(request.query.get("limit", 20))]

    def _token(self, request: web.BaseRequest, login: str | None) -> web.Response:
        audience = request.query.get("aud")
        if not audience:
            return _refuse(422, "aud is required")
        if self._signer is None:
            token = f"guest-{audience}" if login is None else f"satellite-{audience}"
        else:
            token = self.token(audience, **(_GUEST if login is None else self._members.get(login, {"sub": login})))
        return json(msgspec.json.encode({"target_token": token, "expires_in": _EXPIRES_S}))


def _transaction_tokens(body: bytes) -> web.Response:
    try:
        owners = msgspec.json.decode(body, type=_Owners).owner_usernames
    except msgspec.DecodeError as error:
        return _refuse(422, str(error))
    return json(msgspec.json.encode({"tokens": {owner: f"tx-{owner}" for owner in owners}, "errors": {}}))


def _refuse(status: int, detail: str) -> web.Response:
    return json(msgspec.json.encode({"detail": detail}), status)
