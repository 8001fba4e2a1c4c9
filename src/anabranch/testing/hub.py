"""A stub SyftHub: a list of public endpoints, and tokens for whoever asks."""

import ssl
from types import TracebackType
from typing import Literal, Self

import msgspec
from aiohttp import web

from anabranch.testing.listener import Listener, bearer, json

_WHEN = "2026-01-01T00:00:00Z"


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
    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._published: list[_Published] = []
        self._listener = Listener(self._handle, host=host, port=port, tls=tls)

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

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.method, request.path:
            case "GET", "/api/v1/endpoints/public":
                reply = json(msgspec.json.encode(self._page(request)))
            case "GET", "/api/v1/token":
                reply = _token(request, "satellite") if bearer(request) else _refuse(401, "Not authenticated")
            case "GET", "/api/v1/token/guest":
                reply = _token(request, "guest")
            case "POST", "/api/v1/accounting/transaction-tokens":
                reply = _transaction_tokens(await request.read())
            case _:
                reply = _refuse(404, "Not found")
        return reply

    def _page(self, request: web.BaseRequest) -> list[_Published]:
        skip = int(request.query.get("skip", 0))
        return self._published[skip : skip + int(request.query.get("limit", 20))]


def _token(request: web.BaseRequest, kind: str) -> web.Response:
    audience = request.query.get("aud")
    if not audience:
        return _refuse(422, "aud is required")
    return json(msgspec.json.encode({"target_token": f"{kind}-{audience}", "expires_in": 60}))


def _transaction_tokens(body: bytes) -> web.Response:
    try:
        owners = msgspec.json.decode(body, type=_Owners).owner_usernames
    except msgspec.DecodeError as error:
        return _refuse(422, str(error))
    return json(msgspec.json.encode({"tokens": {owner: f"tx-{owner}" for owner in owners}, "errors": {}}))


def _refuse(status: int, detail: str) -> web.Response:
    return json(msgspec.json.encode({"detail": detail}), status)
