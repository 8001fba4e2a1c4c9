"""The audit log under /v1/audit, for operators."""

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta
from starlette.types import Scope

from anabranch.app.anabranch import Anabranch
from anabranch.domain.audit import AuditFilter, AuditRecord
from anabranch.domain.errors import Forbidden, InvalidQuestion
from anabranch.domain.model import Value
from anabranch.entrypoints.http.access import MAKE_KEY, Access
from anabranch.entrypoints.http.errors import KNOWLEDGE
from anabranch.entrypoints.http.openapi import integer, parameter
from anabranch.entrypoints.http.operations import Call, Operation
from anabranch.entrypoints.http.query_log import MAX_PAGE, TEXT, TIME, Name, url_parameters
from anabranch.entrypoints.logged_queries import seconds_of
from anabranch.knowledge.model import Caller


class AuditPage(Value):
    """Records of the audit log, newest first; `next` is the `after` of the next page."""

    records: list[AuditRecord]
    has_more: bool
    next: str | None


class AuditParameters(Value):
    """The parameters of a list of records, as they stand in the URL."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: Name | None = None
    since: Name | None = None
    until: Name | None = None
    actor: Name | None = None
    action: Name | None = None


@dataclass(frozen=True)
class AuditSurface:
    """Operators read who did what."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                *("GET", "/v1/audit", "list_audit", "List records of the audit log", self._records, KNOWLEDGE),
                scope="admin",
                response_types=(AuditPage,),
                identify=self._operator,
                errors=(403,),
                parameters=(
                    parameter("limit", integer(1, MAX_PAGE, default=50), "Page size"),
                    parameter("after", TEXT, "`next` of the previous page"),
                    parameter("since", TIME, "From this day (UTC) or time on"),
                    parameter("until", TIME, "Up to and including this day (UTC), or before this time"),
                    parameter("actor", TEXT, "A user, `operator`, `guest` or `server`"),
                    parameter("action", TEXT, "An action such as `document.deleted`, or all of `document`"),
                ),
            )
        ]

    async def _operator(self, scope: Scope) -> Caller:
        caller = await self.access.caller(scope)
        if not caller.operator:
            raise Forbidden(f"Only the operator may read the audit log. {MAKE_KEY}")
        return caller

    async def _records(self, call: Call[None]) -> AuditPage:
        given = url_parameters(call, AuditParameters)
        since, until = seconds_of("since", given.since), seconds_of("until", given.until, end=True)
        if not self.anabranch.knowledge.exists:
            return AuditPage(records=[], has_more=False, next=None)
        knowledge = await self.anabranch.knowledge()
        cursors = await knowledge.cursors()
        before = None if given.after is None else cursors.opened(given.after)
        if given.after is not None and before is None:
            raise InvalidQuestion("after is not a cursor of this server; send `next` of the previous page.")
        wanted = AuditFilter(since=since, until=until, actor=given.actor, action=given.action)
        found = await knowledge.audit_records(wanted, before, given.limit + 1)
        page = found[: given.limit]
        more = len(found) > len(page)
        return AuditPage(
            records=page,
            has_more=more,
            next=cursors.sealed(page[-1].seq) if more else None,
        )
