"""URLs, and which addresses may be called."""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from yarl import URL

from anabranch.domain.errors import UpstreamError

MAX_URL = 4096


# It does not cache exceptions, so it keeps no URL that is too long.
@lru_cache(maxsize=1024)
def parse(url: str) -> tuple[URL, str]:
    """The URL and its origin. Raises UpstreamError if no request can be sent to it."""
    if len(url) > MAX_URL:
        raise UpstreamError("The endpoint's URL is not usable: it is too long.")
    if url.startswith("tunneling:"):
        raise UpstreamError("Endpoints behind a tunnel (tunneling:) are not supported.")
    try:
        parsed = URL(url)
        host, port = parsed.host, parsed.port
    except ValueError:
        raise UpstreamError("The endpoint's URL cannot be parsed.") from None
    if parsed.scheme not in ("http", "https") or not host or port is None:
        raise UpstreamError("The endpoint's URL is not usable: it must begin with http:// or https:// and name a host.")
    if parsed.user is not None or parsed.password is not None:
        raise UpstreamError("The endpoint's URL is not usable: it must not contain a user name or password.")
    return parsed, str(parsed.origin())


LOOPBACK = IPv4Address("127.0.0.1")

Network = IPv4Network | IPv6Network

# Global by the registries, but not the public internet: relays, cloud control planes, translation prefixes.
NEVER_PUBLIC: tuple[Network, ...] = tuple(
    ip_network(block)
    for block in (
        "168.63.129.16/32",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "::/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2002::/16",
        "fec0::/10",
    )
)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is on the public internet; IPv4-mapped ones are unwrapped."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return not any(address.version == block.version and address in block for block in NEVER_PUBLIC)


class AddressGuard:
    """Permits public addresses and the private blocks on the operator's allow-list. 127.0.0.1 on it permits ::1, too:
    `localhost` has both."""

    def __init__(self, allowed: Iterable[Network] = ()) -> None:
        self._allowed = tuple(allowed)
        if any(block.version == 4 and LOOPBACK in block for block in self._allowed):
            self._allowed += (ip_network("::1"),)

    def permits(self, text: str) -> bool:
        try:
            address = ip_address(text)
        except ValueError:
            return False
        forms = (address, getattr(address, "ipv4_mapped", None) or address)
        return is_public(address) or any(
            form.version == block.version and form in block for form in forms for block in self._allowed
        )
