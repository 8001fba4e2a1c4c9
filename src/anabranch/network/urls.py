"""Parsing of the URLs that endpoints and settings name."""

from functools import lru_cache

from yarl import URL

from anabranch.domain.errors import UpstreamError

MAX_URL = 4096


def parse(url: str) -> tuple[URL, str]:
    """The URL and its origin. Raises UpstreamError if no request can be sent to it."""
    if len(url) > MAX_URL:
        raise UpstreamError("The endpoint's URL is not usable: it is too long.")
    return _parsed(url)


@lru_cache(maxsize=1024)
def _parsed(url: str) -> tuple[URL, str]:
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
