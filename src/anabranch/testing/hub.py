"""A stub SyftHub: it lists public endpoints, issues tokens, and publishes the keys that sign them."""

import itertools
import ssl
import time
from collections.abc import Mapping
from typing import Any, Literal

import jwt
import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from anabranch.testing.failures import Failing, Failure
from anabranch.testing.http_server import HttpServer, bearer, json

_EXPIRES_S = 60
_GUEST = {"sub": "guest", "role": "guest"}


class _Owners(msgspec.Struct, frozen=True, kw_only=True):
    owner_usernames: tuple[str, ...]


class Hub(HttpServer):
    """Its tokens are plain strings, `satellite-OWNER` and `guest-OWNER`. With `signing` they are JWTs like those of a
    real hub, to be verified with `/.well-known/jwks.json`. `key_requests` counts the requests for that document."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None, signing: bool = False
    ) -> None:
        super().__init__(self._respond, host=host, port=port, tls=tls)
        self.key_requests = 0
        self._signing = signing
        self._keys: dict[str, rsa.RSAPrivateKey] = {}
        self._key_numbers = itertools.count(1)
        self._members: dict[str, Mapping[str, Any]] = {}
        self._failing: Failing | None = None
        self._published: list[dict[str, Any]] = []

    def publish(
        self,
        *,
        owner: str,
        slug: str,
        url: str,
        type: Literal["model", "data_source"],  # noqa: A002 (the Hub's word)
        tenant: str | None = None,
    ) -> None:
        self._published.append(
            {
                "name": slug,
                "slug": slug,
                "type": type,
                "owner_username": owner,
                "description": "",
                "created_at": "2026-01-01T00:00:00Z",
                "updated_at": "2026-01-01T00:00:00Z",
                "connect": [{"config": {"url": url, "tenant_name": tenant}, "type": "http", "enabled": True}],
            }
        )

    def member(self, api_token: str, **claims: Any) -> None:
        """A caller with this API token gets satellite tokens with these claims (`sub` and any others)."""
        self._members[api_token] = claims

    def token(self, audience: str, *, expires_s: float = _EXPIRES_S, **claims: Any) -> str:
        """A signed satellite token for an owner; a guest's if there is no `sub`."""
        now = int(time.time())
        who = claims if "sub" in claims else {**_GUEST, **claims}
        return self.sign({"aud": audience, "iat": now, "exp": now + expires_s, **who})

    def sign(self, claims: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> str:
        """Exactly these claims, signed with the last key."""
        name, key = self._private_keys()[-1]
        return jwt.encode(dict(claims), key, algorithm="RS256", headers={"kid": name, **(headers or {})})

    def rotate(self, *, keep: bool = False) -> str:
        """Signs with a new key from now on, and returns its id: key-1, key-2, …. The old keys stay published only with
        `keep`."""
        if not keep:
            self._keys.clear()
        name = f"key-{next(self._key_numbers)}"
        self._keys[name] = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        return name

    @property
    def keys(self) -> list[dict[str, Any]]:
        """The published public keys, in the form of a JWKS."""
        return [
            {**RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": name, "alg": "RS256", "use": "sig"}
            for name, key in self._private_keys()
        ]

    def _private_keys(self) -> list[tuple[str, rsa.RSAPrivateKey]]:
        if not self._signing:
            raise RuntimeError("this hub does not sign: make it with Hub(signing=True)")
        if not self._keys:
            self.rotate()
        return list(self._keys.items())

    def fails(self, failure: Failure | None) -> None:
        """Makes every request fail in this way; None ends that."""
        self._failing = None if failure is None else Failing(failure=failure)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        self.key_requests += request.path == "/.well-known/jwks.json"
        if self._failing is not None:
            return await self._failing.answer(request, b"", "space")
        match request.method, request.path:
            case "GET", "/.well-known/jwks.json" if self._signing:
                reply = json({"keys": self.keys})
            case "GET", "/api/v1/endpoints/public":
                skip = int(request.query.get("skip", 0))
                reply = json(self._published[skip : skip + int(request.query.get("limit", 20))])
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

    def _token(self, request: web.BaseRequest, login: str | None) -> web.Response:
        audience = request.query.get("aud")
        if not audience:
            return _refuse(422, "aud is required")
        if not self._signing:
            token = f"guest-{audience}" if login is None else f"satellite-{audience}"
        else:
            token = self.token(audience, **(_GUEST if login is None else self._members.get(login, {"sub": login})))
        return json({"target_token": token, "expires_in": _EXPIRES_S})


def _transaction_tokens(body: bytes) -> web.Response:
    try:
        owners = msgspec.json.decode(body, type=_Owners).owner_usernames
    except msgspec.DecodeError as error:
        return _refuse(422, str(error))
    return json({"tokens": {owner: f"tx-{owner}" for owner in owners}, "errors": {}})


def _refuse(status: int, detail: str) -> web.Response:
    return json({"detail": detail}, status)
