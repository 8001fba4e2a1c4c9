"""The hub's directory of published endpoints, and guest tokens for them."""

from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import HubFailed, InvalidQuestion, UpstreamError
from anabranch.domain.model import Endpoint, Value

T = TypeVar("T")

PAGE = 100
MAX_PAGES = 50
# Errors name it: its default is a hub on this machine, which few have.
SETTING = "AGGREGATOR_SYFTHUB_URL"


class HubConnection(Value):
    enabled: bool = True
    config: dict[str, Any] = {}


class HubEndpoint(Value):
    slug: str
    owner_username: str
    name: str = ""
    connect: list[HubConnection] = []


class GuestToken(Value):
    target_token: str


class HubClient:
    def __init__(self, url: str, outbound: Outbound) -> None:
        self._url = url.rstrip("/")
        self._outbound = outbound

    async def find(self, path: str) -> Endpoint:
        """The endpoint that is published as `owner/slug`."""
        owner, _, slug = path.partition("/")
        for page in range(MAX_PAGES):
            published = await self._get(f"endpoints/public?skip={page * PAGE}&limit={PAGE}", list[HubEndpoint])
            for entry in published:
                if entry.owner_username == owner and entry.slug == slug:
                    return _endpoint(entry)
            if len(published) < PAGE:
                break
        raise InvalidQuestion(f"The hub at {self._url} ({SETTING}) knows no endpoint {path!r}.")

    async def guest_token(self, owner: str) -> str | None:
        """A guest token for this owner's endpoints, if the hub issues one."""
        try:
            return (await self._get(f"token/guest?aud={quote(owner, safe='')}", GuestToken)).target_token
        except HubFailed:
            return None

    async def _get(self, what: str, kind: type[T]) -> T:
        try:
            async with self._outbound.request("GET", f"{self._url}/api/v1/{what}", headers={}, operator=True) as reply:
                if reply.status != 200:
                    raise UpstreamError(f"It answered with {reply.status}.")
                return msgspec.json.decode(await reply.read(), type=kind)
        except UpstreamError as error:
            raise HubFailed(f"The hub at {self._url} ({SETTING}) cannot be asked. {error.message}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HubFailed(f"The hub at {self._url} ({SETTING}) answered in a form that is not understood.") from error


def _endpoint(entry: HubEndpoint) -> Endpoint:
    for connection in entry.connect:
        url = connection.config.get("url")
        if connection.enabled and isinstance(url, str) and url:
            tenant = connection.config.get("tenant_name")
            return Endpoint(
                slug=entry.slug,
                url=url,
                name=entry.name,
                owner=entry.owner_username,
                tenant=tenant if isinstance(tenant, str) else None,
            )
    raise InvalidQuestion(f"The endpoint {entry.owner_username}/{entry.slug} has no address on the hub.")
