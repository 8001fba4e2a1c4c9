"""What one owner may store, and may have sent that is not processed yet."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from anabranch.domain.errors import QuotaReached
from anabranch.domain.shares import Limit, claimant
from anabranch.knowledge.model import Caller, Collection, NewDocument
from anabranch.knowledge.records import collections, documents, jobs
from anabranch.knowledge.records.database import Session
from anabranch.policies.shares import limit_reached, reached


class OwnerLimits:
    """The limits of the settings on what an owner has in the records, checked in the transaction that adds to it."""

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        self._limits = limits

    def held(self, db: Session, owner: str) -> dict[str, float]:
        """What an owner has in the records, by the names of the limits."""
        stored, waiting = documents.stored_by(db, owner), jobs.backlog(db, owner)
        return {**stored._asdict(), **waiting._asdict(), "collections": collections.count_of(db, owner)}

    def check_collection(self, db: Session, owner: str) -> None:
        self._check_stored("collections", collections.count_of(db, owner) + 1)

    def check_documents(self, db: Session, collection: Collection, caller: Caller, sent: Sequence[NewDocument]) -> None:
        owner = caller.owner
        size = sum(len(one.data) for one in sent)
        stored, waiting = documents.stored_by(db, owner), jobs.backlog(db, owner)
        self.check_waiting(db, owner, len(sent), size)
        self._check_stored("stored_bytes", stored.stored_bytes + waiting.pending_bytes + size)
        most = stored.documents + waiting.pending_documents + len(sent)
        if most > self._allowed("documents"):
            self._check_stored("documents", most - jobs.count_versions(db, collection, caller, sent))

    def check_waiting(self, db: Session, owner: str, sent: int, size: int) -> None:
        """LimitReached if that is more than may wait. What is larger than the limit on bytes is accepted when nothing
        waits."""
        waiting = jobs.backlog(db, owner)
        if waiting.pending_documents + sent > self._allowed("pending_documents"):
            raise limit_reached(self._limits["pending_documents"], self._allowed("pending_documents"))
        if waiting.pending_documents and waiting.pending_bytes + size > self._allowed("pending_bytes"):
            raise limit_reached(self._limits["pending_bytes"], self._allowed("pending_bytes"))

    def _check_stored(self, name: str, held: float) -> None:
        if held > self._allowed(name):
            self._refuse(self._limits[name], self._allowed(name))

    def _refuse(self, limit: Limit, allowed: float) -> NoReturn:
        message = f"{reached(limit, allowed)}. Delete some of them first."
        raise QuotaReached(message, limit=limit.name, allowed=round(allowed))

    def _allowed(self, name: str) -> float:
        """What the caller may have; without such a limit anything."""
        limit = self._limits.get(name)
        return float("inf") if limit is None else limit.of(claimant.get())
