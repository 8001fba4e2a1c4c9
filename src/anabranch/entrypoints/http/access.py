"""Who is calling, and from where."""

from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from anabranch.entrypoints.http.exchange import header
from anabranch.runtime.addresses import Network
from anabranch.runtime.settings import Settings

# What proxies add. One that adds nothing looks like a caller on this machine (unless it speaks HTTP/1.0, as older
# proxies do to us): it must be told to add X-Forwarded-For, or be named in AGGREGATOR_TRUSTED_PROXIES.
FORWARDING = (b"forwarded", b"via", b"x-real-ip", b"cf-connecting-ip", b"true-client-ip")


class Access:
    """What the settings say about callers. Forwarding headers count only from a trusted proxy."""

    def __init__(self, settings: Settings) -> None:
        self._auth = settings.auth
        self._proxies = settings.proxy_networks

    def address(self, scope: Scope) -> str | None:
        """The caller's address: the last one on the way here that no trusted proxy answers for."""
        client = scope.get("client")
        if client is None:
            return None
        for hop in _hops(scope, client[0]):
            if not _within(hop, self._proxies):
                return hop
        return str(client[0])

    def vouched(self, scope: Scope) -> bool:
        """Whether the caller may use what the operator has configured and pays for: always with `none`; with `auto`,
        somebody at this very machine: nobody behind a proxy, and no web page that a browser on it happens to show."""
        if self._auth == "none":
            return True
        peer = scope["client"][0] if scope.get("client") else ""
        host, origin = header(scope, b"host") or "", header(scope, b"origin")
        return (
            scope["http_version"] != "1.0"
            and _is_loopback(peer)
            and not _within(peer, self._proxies)
            and not any(key in FORWARDING or key.startswith(b"x-forwarded-") for key, _ in scope["headers"])
            and _is_local_name(host)
            and (origin is None or origin.partition("://")[2] == host)
        )


def _hops(scope: Scope, peer: str) -> Iterator[str]:
    yield peer
    forwarded = b",".join(value for key, value in scope["headers"] if key == b"x-forwarded-for").decode("latin-1")
    yield from (hop.strip() for hop in reversed(forwarded.split(",")) if hop.strip())


def _within(text: str, networks: tuple[Network, ...]) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return any(address.version == network.version and address in network for network in networks)


def _is_loopback(text: str) -> bool:
    try:
        return ip_address(text).is_loopback
    except ValueError:
        return False


def _is_local_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)
