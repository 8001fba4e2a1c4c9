"""Identifies callers, and finds the address that a request comes from."""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

from starlette.types import Scope

from anabranch.app.anabranch import UNKNOWN_KEY, Anabranch
from anabranch.domain.audit import GUEST, OPERATOR, USER, Actor, acting
from anabranch.domain.errors import AnabranchError, Forbidden, Unauthorized
from anabranch.domain.model import Context
from anabranch.domain.rights import EVERY_GRANT, NO_GRANT, Grants
from anabranch.domain.shares import LOCAL, Claimant
from anabranch.entrypoints.http.operations import Call, header
from anabranch.knowledge.model import Caller, Identified
from anabranch.policies.rate_limits import address_block

Address = IPv4Address | IPv6Address

# What is noted in the scope of a request.
ADDRESS_FOUND, IS_LOCAL = "anabranch.address", "anabranch.is_local"
# Headers that proxies add. A proxy that adds none looks like a caller on this machine (unless it uses HTTP/1.0, as old
# ones do): configure it to add X-Forwarded-For, or name it in AGGREGATOR_TRUSTED_PROXIES.
FORWARDING = frozenset(
    b"forwarded via x-real-ip x-client-ip x-cluster-client-ip true-client-ip cdn-loop cf-connecting-ip cf-ray "
    b"fastly-client-ip fly-client-ip x-amzn-trace-id x-azure-clientip".split()
)
FORWARDING_PREFIXES = (b"x-forwarded", b"x-original-", b"x-envoy-", b"x-appengine-")
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?", re.ASCII)
HOP = re.compile(r"\[([^\]]+)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-?)[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{12}")
MAX_ADDRESS = 100
MAX_HOST = 300
OWN_SITES = frozenset({"same-origin", "none"})
MAX_TRACESTATE = 512
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# Where a browser keeps the key that its user has signed in with.
COOKIE = "anabranch_key"
COOKIE_VALUE = re.compile(r"[A-Za-z0-9_.~-]{1,4000}", re.ASCII)
SAFE_METHODS = frozenset({"GET", "HEAD"})
CSRF_HEADER = b"x-anabranch-csrf"
# A caller that was not asked for a token.
ANYONE = Caller()
MAKE_KEY = "anabranch keys create --user NAME --operator"


class Hop(NamedTuple):
    """An address that a request came by."""

    address: str
    is_proxy: bool
    is_loopback: bool


class Access:
    """Applies the settings about callers. Forwarding headers count only from a trusted proxy."""

    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = settings = anabranch.settings
        self._proxies = settings.proxy_networks
        self._known_hop = lru_cache(maxsize=1024)(self._find_hop)
        self._private_is_restricted = bool(settings.endpoint_allowlist) and not settings.endpoint_allowlist_public
        self._origins = frozenset(settings.cors_origins) - {"*"}
        self._limited = frozenset(settings.rate_limit_surfaces if settings.rate_limit else ())

    async def caller(self, scope: Scope) -> Caller:
        """The caller of a surface that holds data. A token is always checked, and a wrong one is refused even where
        none is needed; without one, it is the operator."""
        token = self._token(scope)
        found = Caller(operator=True) if token is None else await self._identified(token)
        # What needs more than this caller has is refused to it, not to somebody unknown.
        acting.set(partial(self.actor, scope, found))
        return found

    async def operator(self, what: str, scope: Scope) -> Caller:
        """The caller, which must be the operator to read it."""
        caller = await self.caller(scope)
        if not caller.operator:
            raise Forbidden(f"Only the operator may read {what}; make a key with: {MAKE_KEY}")
        return caller

    async def signed_in_operator(self, scope: Scope) -> Caller:
        """The operator, with an API key: also on this machine, where other operations need none. A page that any local
        program can reach must not change where questions and secrets go."""
        if bearer(scope) is None and self.session_key(scope) is None:
            raise Unauthorized(f"This needs an operator's API key, on this machine too. Make one with: {MAKE_KEY}")
        caller = await self.caller(scope)
        if not is_signed_in_operator(caller):
            raise Forbidden(f"This needs the API key of an operator. Make one with: {MAKE_KEY}")
        return caller

    async def sign_in(self, key: str) -> Caller:
        """The caller of a key that a browser is to keep."""
        self._check_kind(key)
        if COOKIE_VALUE.fullmatch(key) is None:
            raise Unauthorized(UNKNOWN_KEY)
        return await self._identified(key)

    async def present(self, scope: Scope) -> Caller:
        """The caller of a request, refused or not: one without a valid token is the operator or a guest."""
        with suppress(Unauthorized, Forbidden):
            if (token := bearer(scope) or self.session_key(scope)) is not None:
                self._check_kind(token)
                return await self._identified(token)
        return Caller(operator=self._is_operator(scope))

    def needs_key(self, scope: Scope) -> bool:
        """Whether this caller could read nothing without a key or token."""
        return not self._is_operator(scope)

    def session_key(self, scope: Scope) -> str | None:
        """The key in the cookie of a browser that has signed in, which counts if a page of this server sent the
        request. One of another site never acts for the user; and a page of ours says with a header, which no form can
        send, that it means to change something."""
        token = cookie(scope)
        if token is None or not self.is_same_origin(scope):
            return None
        unsafe = scope["type"] == "http" and scope["method"] not in SAFE_METHODS
        if unsafe and _values(scope, CSRF_HEADER) != ["1"]:
            raise Forbidden("A request with the cookie of a signed-in browser needs the header X-Anabranch-CSRF: 1.")
        return token

    def is_same_origin(self, scope: Scope) -> bool:
        """Whether a page of this server sent the request, or no browser. WebSockets of every origin are sent with
        cookies, so one must name its origin."""
        origins = _values(scope, b"origin")
        if scope["type"] == "websocket" and not origins:
            return False
        if (sites := _values(scope, b"sec-fetch-site")) and scope["type"] == "http":
            return sites == ["same-origin"]
        hosts = _values(scope, b"host")
        schemes = ("https",) if self.is_https(scope) else ("http", "https")
        return all(len(hosts) == 1 and origin in [f"{one}://{hosts[0]}" for one in schemes] for origin in origins)

    def is_local_operator(self, scope: Scope, caller: Caller) -> bool:
        """Whether the operator asks on this machine, without a key or token. With `none` the operator may be anywhere,
        and a guest of a published endpoint is never the operator."""
        without_token = caller is ANYONE or (caller.operator and not isinstance(caller, Identified))
        return without_token and self._is_local(scope)

    async def _identified(self, token: str) -> Caller:
        audiences = await self._audiences() if _is_hub_token(token) else ()
        if _is_hub_token(token) and not audiences:
            raise Unauthorized("Tokens of the hub are not taken here: AGGREGATOR_JWT_AUDIENCE is not set.")
        return await self._anabranch.identify(token, audiences)

    async def _audiences(self) -> Collection[str]:
        """The audiences of a hub token: as configured, or with `jwt` the owners for whom the operator has published.
        Whoever publishes under his own name must not become one: tokens that were sent to him would be taken here."""
        if self._settings.jwt_audience is not None:
            return (self._settings.jwt_audience,)
        if self._settings.auth != "jwt":
            return ()
        return _both_cases(await self._anabranch.publishing.owners(by_operator=True))

    async def visitor(self, scope: Scope) -> Caller:
        """The caller of a published endpoint. A caller without a token is a guest, even on this machine: published
        endpoints are asked on behalf of others, and a question that another Anabranch forwards must not be answered
        with the operator's permissions."""
        token = self._token(scope)
        if token is None:
            return Caller()
        owners = _both_cases(await self._anabranch.publishing.owners())
        return await self._anabranch.identify(
            token, {*owners, *((self._settings.jwt_audience,) if self._settings.jwt_audience else ())}
        )

    def owners(self, caller: Caller, owners: Collection[str]) -> Collection[str]:
        """Which of these owners a visitor may ask: a token of the hub is issued for one."""
        if not isinstance(caller, Identified) or self._settings.jwt_audience in caller.audiences:
            return owners
        return [owner for owner in owners if owner in caller.audiences or owner.lower() in caller.audiences]

    async def admit(self, scope: Scope) -> Caller:
        """The caller of the chat surface, which is open unless the settings close every surface. Where it is open, a
        known token identifies its caller, and an unknown one is ignored: it may be meant for an endpoint."""
        if self._settings.auth in ("api_key", "jwt"):
            return await self.caller(scope)
        try:
            token = bearer(scope) or self.session_key(scope)
            return ANYONE if token is None else await self._identified(token)
        except AnabranchError:
            return ANYONE

    def address(self, scope: Scope) -> str | None:
        """The caller's address: the last hop that is not a trusted proxy. Found once for a request."""
        if ADDRESS_FOUND not in scope:
            scope[ADDRESS_FOUND] = self._find_address(scope)
        found: str | None = scope[ADDRESS_FOUND]
        return found

    def _find_address(self, scope: Scope) -> str | None:
        client = scope.get("client")
        if client is None:
            return None
        found = str(client[0])
        forwarded = ",".join(_values(scope, b"x-forwarded-for")).split(",")
        for given in (found, *(given.strip() for given in reversed(forwarded) if given.strip())):
            hop = self._hop(given)
            if hop is None:
                break
            found = hop.address
            if not hop.is_proxy:
                break
        return found

    def is_shared(self, address: str) -> bool:
        """Whether many callers may come from this address: it is that of a proxy, or of this machine, where one may
        be."""
        hop = self._hop(address)
        return hop is None or hop.is_proxy or hop.is_loopback

    def claimant(self, scope: Scope, caller: Caller) -> Claimant:
        """The caller as the limits on shared resources know it. A key with limits of its own has a share of its own."""
        if limits := caller.rights.limits:
            return Claimant(name=f"key:{caller.key}", operator=caller.operator, limits=limits)
        if caller.user is not None:
            return Claimant(name=f"user:{caller.user}", operator=caller.operator)
        if self._is_local(scope):
            return LOCAL
        return Claimant(name=f"address:{address_block(self.address(scope) or '')}", known=caller.operator)

    def actor(self, scope: Scope, caller: Caller, surface: str = "") -> Actor:
        """The caller as the audit log records it."""
        name = f"{USER}{caller.user}" if caller.user is not None else OPERATOR if caller.operator else GUEST
        by_cookie = header(scope, b"authorization") is None and cookie(scope) is not None
        return Actor(
            name=name,
            address=self.address(scope) or "",
            surface=surface or ("page" if by_cookie else "api"),
            key=caller.key or "",
            request=_audited(scope["correlation_id"]),
        )

    def is_https(self, scope: Scope) -> bool:
        """Whether the request came over HTTPS, to this server or to a trusted proxy before it."""
        if scope.get("scheme") in ("https", "wss"):
            return True
        peer = self._peer(scope)
        if peer is None or not peer.is_proxy:
            return False
        return ",".join(_values(scope, b"x-forwarded-proto")).rpartition(",")[2].strip().lower() == "https"

    def origin(self, scope: Scope) -> str:
        """The address of this server as the caller knows it; empty if its Host header is none."""
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or HOST.fullmatch(hosts[0]) is None:
            return ""
        return f"{'https' if self.is_https(scope) else 'http'}://{hosts[0]}"

    def context(
        self,
        call: Call[Any],
        *,
        tokens: Mapping[str, str] | None = None,
        transactions: Mapping[str, str] | None = None,
        streaming: bool = False,
        names_configured: bool = False,
    ) -> Context:
        """The Context of a question of this caller. `names_configured`: it names what the operator configured, or a
        collection. Whether it is the operator without a key is found out only for that, and where there is a rate
        limit."""
        scope, caller = call.scope, call.caller
        traceparent, tracestate = trace(scope)
        matters = names_configured or call.surface in self._limited
        return self._anabranch.context(
            correlation_id=scope["correlation_id"],
            surface=call.surface,
            address=self.address(scope),
            user_id=caller.user,
            groups=caller.groups,
            operator=caller.operator or (names_configured and caller is ANYONE and self._is_operator(scope)),
            collections=caller.rights.collections,
            credential=caller.credential,
            tokens=tokens,
            transactions=transactions,
            bearer=" ".join(_values(scope, b"authorization")).partition(" ")[2] or None,
            traceparent=traceparent,
            tracestate=tracestate,
            streaming=streaming,
            local_operator=matters and self.is_local_operator(scope, caller),
        )

    def grants(self, scope: Scope, caller: Caller) -> Grants:
        """What the caller may name of what the operator has configured and pays for, on every surface: what its key was
        granted. Without such a list, with `auto` only the operator may name it, on this machine or by key; otherwise
        also a caller with a key or token, but no guest."""
        if caller.rights.grants is not None:
            return caller.rights.grants
        if caller is ANYONE:
            may_use = self._is_operator(scope)
        else:
            may_use = caller.operator or (caller.user is not None and self._settings.auth != "auto")
        return EVERY_GRANT if may_use else NO_GRANT

    def public_only(self, scope: Scope, caller: Caller) -> bool:
        """Whether the addresses that a request names must be public. The private ones on the allow-list are for the
        operator and for callers with a key or token, but not for guests, unless the settings open them to everybody."""
        if not self._private_is_restricted:
            return False
        if caller is ANYONE:
            return not self._is_operator(scope)
        return caller.user is None and not caller.operator

    def _is_operator(self, scope: Scope) -> bool:
        """Whether a request without a token is the operator's. With `none` every one is; with `auto`, one from this
        machine that came through no proxy. A web page of another site never is the operator."""
        if self._settings.auth != "auto":
            return self._settings.auth == "none" and not self._is_foreign(scope)
        return self._is_local(scope)

    def _is_local(self, scope: Scope) -> bool:
        """Whether a request comes from this machine, through no proxy, and not from a web page of another site. Found
        once for a request."""
        if IS_LOCAL not in scope:
            scope[IS_LOCAL] = self._find_local(scope)
        return bool(scope[IS_LOCAL])

    def _find_local(self, scope: Scope) -> bool:
        peer = self._peer(scope)
        return (
            peer is not None
            and peer.is_loopback
            and not peer.is_proxy
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
        """The token, if it is of the kind that the settings require; None for callers that need none."""
        token = bearer(scope) or self.session_key(scope)
        if token is None:
            if self._is_operator(scope):
                return None
            raise Unauthorized(
                "This needs an API key: send Authorization: Bearer KEY. The operator of this server creates keys "
                "(anabranch keys create)."
            )
        self._check_kind(token)
        return token

    def _check_kind(self, token: str) -> None:
        if self._settings.auth == "jwt" and not _is_hub_token(token):
            raise Unauthorized("This takes a token of the hub, not an API key.")
        if self._settings.auth == "api_key" and _is_hub_token(token) and self._settings.jwt_audience is None:
            raise Unauthorized("This takes an API key, not a token of the hub.")

    def _peer(self, scope: Scope) -> Hop | None:
        return self._hop(scope["client"][0]) if scope.get("client") else None

    def _hop(self, text: str) -> Hop | None:
        return self._known_hop(text) if len(text) <= MAX_ADDRESS else None

    def _find_hop(self, text: str) -> Hop | None:
        address = _address(text)
        if address is None:
            return None
        is_proxy = any(address in network for network in self._proxies)
        return Hop(str(address), is_proxy, address.is_loopback)


def is_signed_in_operator(caller: Caller) -> bool:
    """Whether the caller has presented an operator's API key."""
    return caller.operator and caller.key is not None


def may_name(caller: Caller, grants: Grants) -> bool:
    """Whether the caller may name any source: what is configured, or with a key that was granted nothing, at least
    `collections`."""
    return bool(grants.names) or caller.rights.grants is not None


def _both_cases(owners: Collection[str]) -> set[str]:
    """The names as they are, and in lower case, as the hub writes audiences."""
    return {*owners, *(owner.lower() for owner in owners)}


def bearer(scope: Scope) -> str | None:
    """The token of a request; two Authorization headers are refused."""
    sent = _values(scope, b"authorization")
    if not sent:
        return None
    scheme, _, token = sent[0].partition(" ")
    if len(sent) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("Send one header, Authorization: Bearer KEY.")
    return token.strip()


def cookie_name(scope: Scope) -> str:
    """The name of the cookie with the key. Browsers send the cookies of a host to all of its ports, so each port has a
    name of its own: two servers on one machine do not sign each other's users out."""
    port = re.search(r":([0-9]{1,5})$", "".join(_values(scope, b"host")))
    return f"{COOKIE}_{port[1]}" if port else COOKIE


def cookie(scope: Scope) -> str | None:
    """The key that a browser has signed in with; two cookies of that name are none."""
    sent = ";".join(_values(scope, b"cookie"))
    if COOKIE not in sent:
        return None
    own = cookie_name(scope)
    pairs = (pair.strip().partition("=") for pair in sent.split(";"))
    found = [value for name, _, value in pairs if name == own]
    return found[0] if len(found) == 1 and COOKIE_VALUE.fullmatch(found[0]) is not None else None


def _is_hub_token(token: str) -> bool:
    """A key of ours has no dots; a token of the hub has two."""
    return token.count(".") == 2


def _is_of_this_site(scope: Scope) -> bool:
    """Whether no web page of another site sent this: not by DNS rebinding, not across origins, and not as an image or a
    form, for which a browser need not send the origin."""
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
    return len(host) <= MAX_HOST and _is_local_name(host)


@lru_cache(maxsize=1024)
def _is_local_name(host: str) -> bool:
    found = HOST.fullmatch(host)
    if found is None:
        return False
    name = (found[1] or found[2]).lower()
    address = _address(name)
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def _address(text: str) -> Address | None:
    """An address as a proxy or a socket gives it, with or without a port; a mapped IPv4 address as IPv4."""
    if len(text) > MAX_ADDRESS:
        return None
    found = HOP.fullmatch(text)
    try:
        address = ip_address((found[1] or found[2]) if found else text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def trace(scope: Scope) -> tuple[str | None, str | None]:
    """`traceparent` and `tracestate` of a request, if they are valid."""
    return valid_trace(header(scope, b"traceparent") or "", header(scope, b"tracestate") or "")


def valid_trace(traceparent: str, tracestate: str) -> tuple[str | None, str | None]:
    if TRACEPARENT.fullmatch(traceparent) is None:
        return None, None
    return traceparent, tracestate if tracestate.isprintable() and len(tracestate) <= MAX_TRACESTATE else None


def _audited(correlation_id: str) -> str:
    """A correlation id as the audit log, which forgets only names, may keep it: another text of the caller's choice may
    say anything, so of it a digest."""
    is_random = RANDOM_ID.fullmatch(correlation_id) is not None
    return correlation_id if is_random else sha256(correlation_id.encode()).hexdigest()[:32]
