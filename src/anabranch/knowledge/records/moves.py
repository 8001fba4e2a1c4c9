"""Whether records were moved elsewhere, or are not complete yet: what a server looks at before it uses them."""

from typing import Any

import msgspec

from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.facts import fact, forget_fact

# In the records that were moved: where to. In the others: how far the move is.
MOVED_TO, STATE = "moved_to", "migration"


def check_served(db: Session) -> None:
    """Raise ConfigurationError if a server must not use these records."""
    if (place := fact(db, MOVED_TO)) is not None:
        raise ConfigurationError(
            f"These records were moved to {place} (anabranch migrate): set AGGREGATOR_DATABASE_URL or "
            "AGGREGATOR_DATA_DIR to that. To use them here all the same, without what was changed there: "
            "anabranch migrate --stay"
        )
    stored = fact(db, STATE)
    state: dict[str, Any] = {} if stored is None else msgspec.json.decode(stored, type=dict)
    if state and state.get("completed_at") is None:
        raise ConfigurationError(
            "These records are a copy that is not complete yet: run the same anabranch migrate again, until it says "
            "that they are moved."
        )


def stay(db: Session) -> bool:
    """Use the records here again; False if they were not moved."""
    if fact(db, MOVED_TO) is None:
        return False
    forget_fact(db, MOVED_TO)
    audit.append(db, AuditEntry(action="records.used_again"))
    return True
