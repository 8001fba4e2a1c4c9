"""Signing in from a browser: a cookie keeps the API key, and everybody can ask who they are."""

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Scope

from anabranch.app.anabranch import Anabranch
from anabranch.domain.audit import AuditEntry, acting
from anabranch.domain.errors import Forbidden
from anabranch.domain.model import Value
from anabranch.domain.shares import claimant
from anabranch.entrypoints.http.access import Access, cookie_name
from anabranch.entrypoints.http.errors import Headers
from anabranch.entrypoints.http.operations import JSON, Call, Operation, Reply, header
from anabranch.entrypoints.http.v1_operations import operation
from anabranch.knowledge.model import Caller, Identified

MAX_AGE_S = 30 * 24 * 3600
# What is in the response depends on the caller, and is for nobody else.
UNCACHED: Headers = ((b"cache-control", b"no-store"), (b"vary", b"Cookie, Authorization"))


class SignIn(Value):
    key: Annotated[str, Meta(min_length=1, max_length=4_000, description="An API key")]


class SessionView(Value):
    """The caller. `signed_in`: by a valid key or token, in the cookie or in the header. `needs_key`: without one, this
    caller can read nothing. `local`: the operator on this machine, without a key. `may_use_configured`: may name
    configured sources and models. `query_log`: questions are kept; `streams`: answers can be resumed. `auth` is the
    setting AGGREGATOR_AUTH."""

    user: str | None
    groups: tuple[str, ...]
    operator: bool
    signed_in: bool
    needs_key: bool
    local: bool
    may_use_configured: bool
    version: str
    query_log: bool
    streams: bool
    auth: str


@dataclass(frozen=True)
class SessionSurface:
    """Signs browsers in and out. The key in the cookie is never forwarded, and no script can read it."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        at, path = partial(operation, response_type=SessionView, scope=None), "/v1/session"
        return [
            at("GET", path, "session", "Who the caller is", self._show),
            at(
                *("POST", path, "sign_in", "Sign in with an API key, which a cookie keeps", self._sign_in),
                request_type=SignIn,
                errors=(403,),
            ),
            at("DELETE", path, "sign_out", "Sign out: clears the cookie", self._sign_out, errors=(403,)),
        ]

    async def _show(self, call: Call[None]) -> Reply:
        caller = await self.access.present(call.scope)
        # A cookie that is not valid any more would be refused with every request.
        counts = header(call.scope, b"authorization") is None and self.access.session_key(call.scope) is not None
        lost = counts and not isinstance(caller, Identified)
        return self._reply(call.scope, caller, self._cookie(call.scope, "", 0) if lost else None)

    async def _sign_in(self, call: Call[SignIn]) -> Reply:
        self._check_origin(call.scope)
        key = call.request.key
        caller = await self.access.sign_in(key)
        acting.set(lambda: self.access.actor(call.scope, caller, "page"))
        claimant.set(self.access.claimant(call.scope, caller))
        await self.anabranch.runs.admit_change()
        await self.anabranch.record(AuditEntry(action="session.started", object=f"key:{caller.key or ''}"))
        return self._reply(call.scope, caller, self._cookie(call.scope, key, MAX_AGE_S))

    async def _sign_out(self, call: Call[None]) -> Reply:
        self._check_origin(call.scope)
        without = {**call.scope, "headers": [one for one in call.scope["headers"] if one[0] != b"cookie"]}
        caller = await self.access.present(without)
        return self._reply(without, caller, self._cookie(call.scope, "", 0))

    def _check_origin(self, scope: Scope) -> None:
        """A page of another site must not sign its visitor in or out."""
        if not self.access.is_same_origin(scope):
            raise Forbidden("Only a page of this server can sign in and out.")

    def _cookie(self, scope: Scope, value: str, max_age_s: int) -> bytes:
        secure = "; Secure" if self.access.is_https(scope) else ""
        return f"{cookie_name(scope)}={value}; HttpOnly; SameSite=Strict; Path=/; Max-Age={max_age_s}{secure}".encode()

    def _reply(self, scope: Scope, caller: Caller, set_cookie: bytes | None) -> Reply:
        view = SessionView(
            user=caller.user,
            groups=caller.groups,
            operator=caller.operator,
            signed_in=isinstance(caller, Identified),
            needs_key=self.access.needs_key(scope),
            local=self.access.is_local_operator(scope, caller),
            may_use_configured=bool(self.access.grants(scope, caller).names),
            version=version("anabranch"),
            query_log=self.anabranch.settings.query_log_days != 0,
            streams=self.anabranch.recordings is not None,
            auth=self.anabranch.settings.auth,
        )
        headers = [JSON, *UNCACHED, *([(b"set-cookie", set_cookie)] if set_cookie is not None else [])]
        return Reply(msgspec.json.encode(view), headers=headers)
