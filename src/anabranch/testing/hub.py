"""A stub SyftHub: it lists public endpoints, issues tokens, and publishes the keys that sign them."""

import ssl
import time
from collections.abc import Mapping
from typing import Any, Literal

import jwt
import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa

from anabranch.testing.failures import MIB, Failing, Failure
from anabranch.testing.http_server import HttpServer, bearer, json

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


class Signer:
    """RSA keys named key-1, key-2, …. The last one signs."""

    def __init__(self) -> None:
        self._keys: dict[str, rsa.RSAPrivateKey] = {}
        self._made = 0

    @property
    def key_id(self) -> str:
        if not self._keys:
            self.rotate()
        return next(reversed(self._keys))

    def rotate(self, *, keep: bool = False) -> str:
        """Adds a key, which signs from now on. The old ones stay published only with `keep`."""
        if not keep:
            self._keys.clear()
        self._made += 1
        name = f"key-{self._made}"
        self._keys[name] = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        return name

    def public_keys(self) -> list[dict[str, Any]]:
        """In the form of a JWKS."""
        _ = self.key_id
        make = jwt.algorithms.RSAAlgorithm.to_jwk
        return [
            {**make(key.public_key(), as_dict=True), "kid": name, "alg": "RS256", "use": "sig"}
            for name, key in self._keys.items()
        ]

    def sign(self, claims: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> str:
        """A token with exactly these claims."""
        key = self._keys[self.key_id]
        return jwt.encode(dict(claims), key, algorithm="RS256", headers={"kid": self.key_id, **(headers or {})})

    def token(self, audience: str, expires_s: float, claims: Mapping[str, Any]) -> str:
        now = int(time.time())
        return self.sign({"aud": audience, "iat": now, "exp": now + expires_s, **claims})


class Hub(HttpServer):
    """Its tokens are plain strings, `satellite-OWNER` and `guest-OWNER`. With `signing` they are JWTs like those of a
    real hub, to be verified with `/.well-known/jwks.json`. `key_requests` counts the requests for that document."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None, signing: bool = False
    ) -> None:
        super().__init__(self._respond, host=host, port=port, tls=tls)
        self.key_requests = 0
        self._signer = Signer() if signing else None
        self._members: dict[str, Mapping[str, Any]] = {}
        self._failing: Failing | None = None
        self._published: list[_Published] = []

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
        """A caller with this API token gets satellite tokens with these claims (`sub` and any others)."""
        self._members[api_token] = claims

    def token(self, audience: str, *, expires_s: float = _EXPIRES_S, **claims: Any) -> str:
        """A signed satellite token for an owner; a guest's if there is no `sub`."""
        return self._signing.token(audience, expires_s, claims if "sub" in claims else {**_GUEST, **claims})

    def sign(self, claims: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> str:
        """Exactly these claims, signed with the current key."""
        return self._signing.sign(claims, headers)

    def rotate(self, *, keep: bool = False) -> str:
        """Signs with a new key from now on, and returns its id. The old keys stay published only with `keep`."""
        return self._signing.rotate(keep=keep)

    @property
    def keys(self) -> list[dict[str, Any]]:
        """The published public keys."""
        return self._signing.public_keys()

    def fails(self, failure: Failure | None) -> None:
        """Makes every request fail in this way; None ends that."""
        self._failing = (
            None
            if failure is None
            else Failing(failure=failure, form="summary", size_bytes=32 * MIB, location="/", retry_after_s=1, body=None)
        )

    @property
    def _signing(self) -> Signer:
        if self._signer is None:
            raise RuntimeError("this hub does not sign: make it with Hub(signing=True)")
        return self._signer

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
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
