"""Verifies the tokens that a hub has signed, with the keys that it publishes. It loads a cryptography library."""

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Any

import jwt
import msgspec

from anabranch.domain.contracts import Clock, Outbound
from anabranch.domain.errors import Unauthorized, UpstreamError
from anabranch.domain.model import Value

ALGORITHM = "RS256"
LEEWAY_S = 30
# An unknown key may be new, so the JWKS is fetched again, but not more often than this.
REFRESHES = 5
REFRESH_WINDOW_S = 60.0
# The pause after a fetch that failed.
RETRY_S = 10.0
MAX_TOKEN = 8_192
# What the library raises for malformed tokens and keys.
UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)
NOT_THE_HUBS = "The token is not one that the hub has signed."
TOKEN_ERRORS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "The token has expired.",
    jwt.ImmatureSignatureError: "The token is not valid yet: the hub's clock and ours differ.",
    jwt.InvalidAudienceError: "The token is for another audience.",
}


class Bearer(Value):
    """The verified claims of a token; `user` None is a guest."""

    audiences: tuple[str, ...]
    user: str | None
    groups: tuple[str, ...] = ()


class KeySet(Value):
    keys: list[dict[str, Any]]


class HubTokens:
    def __init__(self, url: str, outbound: Outbound, clock: Clock, ttl_s: float, fetch_timeout_s: float = 3.0) -> None:
        self._address = f"{url.rstrip('/')}/.well-known/jwks.json"
        self._outbound = outbound
        self._clock = clock
        self._ttl_s = ttl_s
        self._fetch_timeout_s = fetch_timeout_s
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched: float | None = None
        self._failed: float | None = None
        self._refreshes: deque[float] = deque(maxlen=REFRESHES)
        self._fetching = asyncio.Lock()

    async def verify(self, token: str, audiences: Collection[str]) -> Bearer:
        """The bearer of a valid token for one of the audiences. Raises Unauthorized otherwise."""
        key = await self._key(_signer(token))
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                audience=list(audiences),
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud"]},
            )
        except UNREADABLE as error:
            raise Unauthorized(TOKEN_ERRORS.get(type(error), NOT_THE_HUBS)) from None
        return _bearer(claims, audiences)

    async def _key(self, identifier: str) -> jwt.PyJWK:
        if self._is_stale() or self._known(identifier) is None:
            async with self._fetching:
                if self._may_fetch(identifier):
                    await self._fetch()
        if (key := self._known(identifier)) is not None:
            return key
        if self._failed is not None:
            raise Unauthorized("The hub's keys cannot be fetched now, so the token cannot be checked.")
        raise Unauthorized("The token is signed with a key that the hub does not publish.")

    def _known(self, identifier: str) -> jwt.PyJWK | None:
        """A token need not name its key while there is only one."""
        if not identifier and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(identifier)

    def _is_stale(self) -> bool:
        return self._fetched is None or self._clock.monotonic() - self._fetched > self._ttl_s

    def _may_fetch(self, identifier: str) -> bool:
        now = self._clock.monotonic()
        is_paused = self._failed is not None and now - self._failed < RETRY_S
        if is_paused or self._is_stale():
            return not is_paused
        is_limited = len(self._refreshes) == REFRESHES and now - self._refreshes[0] < REFRESH_WINDOW_S
        if is_limited or self._known(identifier) is not None:
            return False
        self._refreshes.append(now)
        return True

    async def _fetch(self) -> None:
        """Fetch the JWKS. If the hub is unreachable, the old keys stay valid."""
        try:
            async with (
                asyncio.timeout(self._fetch_timeout_s),
                self._outbound.request("GET", self._address, headers={}, operator=True) as reply,
            ):
                if reply.status != 200:
                    raise UpstreamError(f"It answered with {reply.status}.")
                published = msgspec.json.decode(await reply.read(), type=KeySet).keys
        except (UpstreamError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._failed = self._clock.monotonic()
            return
        self._keys = {str(key.get("kid") or ""): usable for key in published if (usable := _parsed_key(key))}
        self._fetched, self._failed = self._clock.monotonic(), None


def _signer(token: str) -> str:
    """The key id of a token. A token that cannot be the hub's is refused before any fetch."""
    if len(token) > MAX_TOKEN:
        raise Unauthorized("The token is too long.")
    try:
        header = jwt.get_unverified_header(token)
    except UNREADABLE:
        raise Unauthorized(NOT_THE_HUBS) from None
    if header.get("alg") != ALGORITHM:
        raise Unauthorized(NOT_THE_HUBS)
    return header.get("kid") or ""


def _parsed_key(key: dict[str, Any]) -> jwt.PyJWK | None:
    if key.get("kty") != "RSA" or key.get("alg", ALGORITHM) != ALGORITHM or key.get("use", "sig") != "sig":
        return None
    try:
        return jwt.PyJWK(key, algorithm=ALGORITHM)
    except UNREADABLE:
        return None


def _bearer(claims: dict[str, Any], audiences: Collection[str]) -> Bearer:
    audience = claims["aud"]
    accepted = tuple(one for one in ([audience] if isinstance(audience, str) else audience) if one in audiences)
    if claims.get("role") == "guest" or claims.get("sub") in (None, "", "guest"):
        return Bearer(audiences=accepted, user=None)
    names = (claims.get(name) for name in ("username", "preferred_username", "sub"))
    groups = claims.get("groups")
    return Bearer(
        audiences=accepted,
        user=next(str(name) for name in names if name),
        groups=tuple(str(group) for group in groups) if isinstance(groups, list) else (),
    )
