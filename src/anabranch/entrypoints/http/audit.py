"""The audit log under /v1/audit, for operators."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from anabranch.app.anabranch import Anabranch
from anabranch.domain.audit import AuditFilter, AuditRecord
from anabranch.domain.model import Value
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.openapi import parameter
from anabranch.entrypoints.http.operations import Call, Operation
from anabranch.entrypoints.http.v1_operations import (
    PAGE,
    PERIOD,
    TEXT,
    LogParameters,
    Name,
    opened,
    operation,
    page_of,
    url_parameters,
)
from anabranch.entrypoints.logged_queries import seconds_of


class AuditPage(Value):
    """Records of the audit log, newest first; `next` is the `after` of the next page."""

    records: list[AuditRecord]
    has_more: bool
    next: str | None


class AuditParameters(LogParameters):
    actor: Name | None = None
    action: Name | None = None


@dataclass(frozen=True)
class AuditSurface:
    """Operators read who did what."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        return [
            operation(
                *("GET", "/v1/audit", "list_audit", "List records of the audit log", self._records, AuditPage),
                scope="admin",
                identify=partial(self.access.operator, "the audit log"),
                errors=(403,),
                parameters=(
                    *PAGE,
                    *PERIOD,
                    parameter("actor", TEXT, "A user, `operator`, `guest` or `server`"),
                    parameter("action", TEXT, "An action such as `document.deleted`, or all of `document`"),
                ),
            )
        ]

    async def _records(self, call: Call[None]) -> AuditPage:
        given = url_parameters(call, AuditParameters)
        since, until = seconds_of("since", given.since), seconds_of("until", given.until, end=True)
        if not self.anabranch.knowledge.exists:
            return AuditPage(records=[], has_more=False, next=None)
        knowledge = await self.anabranch.knowledge()
        cursors = await knowledge.cursors("audit")
        before = opened(given.after, cursors)
        wanted = AuditFilter(since=since, until=until, actor=given.actor, action=given.action)
        found = await knowledge.audit_records(wanted, before, given.limit + 1)
        page, following = page_of(found, given.limit, lambda one: one.seq, cursors)
        return AuditPage(records=page, has_more=following is not None, next=following)
