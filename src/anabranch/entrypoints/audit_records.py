"""Records of the audit log as they are sent and printed."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from anabranch.domain.audit import AuditOutcome, AuditRecord
from anabranch.domain.model import Value


class AuditView(Value):
    """Who did what, when, from where, and with what outcome. A name that was forgotten is null. `actor` is `user:NAME`,
    `operator`, `guest`, `server` or `several`; `key` the id of the API key; `request` the correlation id, or the ingest
    job. `hash` covers this record and all before it."""

    seq: int
    at: datetime
    action: str
    outcome: AuditOutcome
    actor: str | None
    address: str | None
    surface: str
    key: str
    request: str
    object: str
    name: str | None
    granted: tuple[str | None, ...]
    details: Mapping[str, Any]
    hash: str


def audit_view(record: AuditRecord) -> AuditView:
    fields = {name: getattr(record, name) for name in AuditView.__struct_fields__}
    return AuditView(**{**fields, "at": datetime.fromtimestamp(record.at, UTC)})
