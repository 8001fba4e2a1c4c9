"""The audit log says which settings a server started with that are others than at the start before."""

from anabranch.domain.audit import AuditFilter
from anabranch.knowledge.records import used_settings
from support.knowledge_fixtures import Workshop


async def recorded(shop: Workshop) -> list[list[str]]:
    """The settings in each record, oldest first."""
    found = await shop.room.audit_records(AuditFilter(action=used_settings.ACTION), None, 50)
    return [record.details["settings"] for record in reversed(found)]
