"""Who is calling, and from where."""

import re
from collections.abc import Collection, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import Scope

from anabranch.app import Anabranch
from anabranch.domain.errors import AnabranchError, Unauthorized
from anabranch.domain.model import Context
from anabranch.entrypoints.http.following import trace
from anabranch.knowledge.model import Caller

Address = IPv4Address | IPv6Address

# What proxies add. One that adds nothing looks like a caller on this machine (unless it speaks HTTP/1.0, as older
# proxies do to us): it must be told to add X-Forwarded-For, or be named in AGGREGATOR_TRUSTED_PROXIES.
FORWARDING = frozenset(
    b"forwarded via x-real-ip x-client-ip x-cluster-client-ip true-client-ip cdn-loop cf-connecting-ip cf-ray "
    b"fastly-client-ip fly-client-ip x-amzn-trace-id x-azure-clientip".split()
)
FORWARDING_PREFIXES = (b"x-forwarded", b"x-original-", b"x-envoy-", b"x-appengine-")
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?", re.ASCII)
HOP = re.compile(r"\[([^\]]+)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")
OWN_SITES = frozenset({"same-origin", "none"})
NEEDS_A_KEY = "This needs an API key: send Authorization: Bearer KEY (anabranch keys create)."


class Access:
    """What the settings say about callers. Forwarding headers count only from a trusted proxy."""

    def __init__(self, anabranch: Anabranch) -> None:
        settings = anabranch.settings
        self._anabranch = anabranch
        self._auth = settings.auth
        self._audience = settings.jwt_audience
        self._proxies = settings.proxy_networks
        self._private_is_restricted = bool(settings.endpoint_allowlist) and not settings.endpoint_allowlist_public
        self._origins = frozenset(settings.cors_origins) - {"*"}

    async def caller(self, scope: Scope) -> Caller:
        """Who asks a surface that holds data. A token is always looked at, and a wrong one is refused even where none
        is needed; without one, it is the operator."""
        token = self._token(scope)
        return Caller(operator=True) if token is None else await self._identified(token)

    async def _identified(self, token: str) -> Caller:
        audiences = await self._audiences() if _is_the_hubs(token) else ()
        if _is_the_hubs(token) and not audiences:
            raise Unauthorized("Tokens of the hub are not taken here: AGGREGATOR_JWT_AUDIENCE is not set.")
        return await self._anabranch.identify(token, audiences)

    async def _audiences(self) -> Collection[str]:
        """Whom a token must be meant for: as it is set, or, where nothing else is taken, whoever publishes here."""
        if self._audience is not None:
            return (self._audience,)
        return _spelled(await self._anabranch.publishing.owners()) if self._auth == "jwt" else ()

    async def visitor(self, scope: Scope, owners: Collection[str]) -> tuple[Caller, Collection[str]]:
        """Who asks what is published here, and which of these owners they may ask: a token of the hub is meant for one.
        Whoever needs no token is a guest: what is published is asked on others' behalf, and a question that another
        Anabranch on this machine passes on must not come with the operator's eyes."""
        token = self._token(scope)
        if token is None:
            return Caller(), owners
        audiences = {*_spelled(owners), *((self._audience,) if self._audience else ())}
        caller = await self._anabranch.identify(token, audiences)
        meant = caller.audiences
        if self._audience in meant:
            return caller, owners
        return caller, [owner for owner in owners if owner in meant or owner.lower() in meant]

    def identity(self, caller: Caller) -> str:
        """Under what name streams are kept for a caller, and given to nobody else."""
        if caller.user is not None:
            return f"user:{caller.user}"
        if caller.operator:
            return "operator"
        raise Unauthorized("Guests keep no streams: send a token that names its user.")

    async def admit(self, scope: Scope) -> Caller | None:
        """Who asks the chat surface, which is open unless the settings close every surface. Where it is open, a token
        counts if it is known here, and one that is not is for somebody else: None, as without a token."""
        if self._auth in ("api_key", "jwt"):
            return await self.caller(scope)
        try:
            token = bearer(scope)
            return None if token is None else await self._identified(token)
        except AnabranchError:
            return None

    def address(self, scope: Scope) -> str | None:
        """The caller's address: the last one on the way here that no trusted proxy answers for."""
        client = scope.get("client")
        if client is None:
            return None
        found = str(client[0])
        for hop in _hops(scope, found):
            address = _address(hop)
            if address is None:
                break
            found = str(address)
            if not self._is_proxy(address):
                break
        return found

    def context(
        self,
        scope: Scope,
        caller: Caller | None,
        surface: str,
        *,
        tokens: Mapping[str, str] | None = None,
        transactions: Mapping[str, str] | None = None,
    ) -> Context:
        """What a question of this caller goes with."""
        traceparent, tracestate = trace(scope)
        return self._anabranch.context(
            correlation_id=scope["correlation_id"],
            surface=surface,
            address=self.address(scope),
            user_id=caller.user if caller else None,
            groups=caller.groups if caller else (),
            operator=caller is not None and caller.operator,
            key=caller.key if caller else None,
            tokens=tokens,
            transactions=transactions,
            bearer=" ".join(_values(scope, b"authorization")).partition(" ")[2] or None,
            traceparent=traceparent,
            tracestate=tracestate,
        )

    def vouched(self, scope: Scope, caller: Caller | None = None) -> bool:
        """Whether the caller may name what the operator has configured and pays for; every surface asks here. With
        `auto` that is the operator alone, at this machine or by key; otherwise also who comes with a key or a token,
        but no guest."""
        if caller is None:
            return self._is_operator(scope)
        return caller.operator or (caller.user is not None and self._auth != "auto")

    def public_only(self, scope: Scope, caller: Caller | None = None) -> bool:
        """Whether the addresses that a request names must be public: the private ones on the allow-list are for the
        operator and for those with a key or a token, but for no guest, unless the settings open them to everybody."""
        if not self._private_is_restricted:
            return False
        if caller is None:
            return not self._is_operator(scope)
        return caller.user is None and not caller.operator

    def _is_operator(self, scope: Scope) -> bool:
        """Whether a request without a token is the operator's. With `none` every one is; with `auto`, one from this
        very machine, and from nobody behind a proxy. A web page of another site never is the operator."""
        if self._auth != "auto":
            return self._auth == "none" and not self._is_foreign(scope)
        peer = _address(scope["client"][0]) if scope.get("client") else None
        return (
            peer is not None
            and peer.is_loopback
            and not self._is_proxy(peer)
            and scope["http_version"] != "1.0"
            and not any(key in FORWARDING or key.startswith(FORWARDING_PREFIXES) for key, _ in scope["headers"])
            and _is_of_this_site(scope)
        )

    def _is_foreign(self, scope: Scope) -> bool:
        """Whether a web page of another site sent this; those that CORS_ORIGINS names are ours. Browsers send
        `Sec-Fetch-Site` over HTTPS and to this machine only, so there no name can have been made to point here."""
        origins = _values(scope, b"origin")
        if origins and self._origins.issuperset(origins):
            return False
        if sites := _values(scope, b"sec-fetch-site"):
            return not OWN_SITES.issuperset(sites)
        hosts = _values(scope, b"host")
        return not all([origin.partition("://")[2]] == hosts and _is_proven(origin) for origin in origins)

    def _token(self, scope: Scope) -> str | None:
        """The token, if it is of the kind that the settings ask for; None for those who need none."""
        token = bearer(scope)
        if token is None:
            if self._is_operator(scope):
                return None
            raise Unauthorized(NEEDS_A_KEY)
        if self._auth == "jwt" and not _is_the_hubs(token):
            raise Unauthorized("This takes a token of the hub, not an API key.")
        if self._auth == "api_key" and _is_the_hubs(token) and self._audience is None:
            raise Unauthorized("This takes an API key, not a token of the hub.")
        return token

    def _is_proxy(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._proxies)


def _spelled(owners: Collection[str]) -> set[str]:
    """As they are, and in the small letters in which the hub writes audiences."""
    return {*owners, *(owner.lower() for owner in owners)}


def bearer(scope: Scope) -> str | None:
    """The token that a request carries; two of them are none that can be trusted."""
    sent = _values(scope, b"authorization")
    if not sent:
        return None
    scheme, _, token = sent[0].partition(" ")
    if len(sent) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("Send one header, Authorization: Bearer KEY.")
    return token.strip()


def _is_the_hubs(token: str) -> bool:
    """A key of ours has no dots; a token of the hub has two."""
    return token.count(".") == 2


def _is_of_this_site(scope: Scope) -> bool:
    """Not sent by a web page of another site: not under a name that was made to point here, not across origins, and not
    as an image or a form, for which a browser need not name the origin."""
    hosts = _values(scope, b"host")
    return (
        len(hosts) == 1
        and is_local_name(hosts[0])
        and all(origin.partition("://")[2] == hosts[0] for origin in _values(scope, b"origin"))
        and OWN_SITES.issuperset(_values(scope, b"sec-fetch-site"))
    )


def _is_proven(origin: str) -> bool:
    """Whether an origin that equals the Host header must be this server's: a certificate says so, or it is an address.
    A name without a certificate may have been made to point here (DNS rebinding)."""
    scheme, _, host = origin.partition("://")
    found = HOST.fullmatch(host)
    return (
        scheme == "https" or is_local_name(host) or (found is not None and _address(found[1] or found[2]) is not None)
    )


def is_local_name(host: str) -> bool:
    """Whether a Host header names this machine to itself."""
    found = HOST.fullmatch(host)
    if found is None:
        return False
    name = (found[1] or found[2]).lower()
    address = _address(name)
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def _hops(scope: Scope, peer: str) -> Iterator[str]:
    yield peer
    forwarded = ",".join(_values(scope, b"x-forwarded-for"))
    yield from (hop.strip() for hop in reversed(forwarded.split(",")) if hop.strip())


def _address(text: str) -> Address | None:
    """An address as a proxy or a socket gives it, with or without a port, one of IPv4 in its own form."""
    found = HOP.fullmatch(text)
    try:
        address = ip_address((found[1] or found[2]) if found else text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
