"""Erasures under /v1/erasures, for operators who send a key themselves."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from anabranch.app.anabranch import Anabranch
from anabranch.domain.model import Value
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.operations import Call, Operation
from anabranch.entrypoints.http.v1_operations import operation, utc
from anabranch.knowledge.records.erasures import Erasure

MAX_LISTED = 100
Name = Annotated[str, Meta(min_length=1, max_length=500, extra_json_schema={"pattern": r"\S"})]


class NewErasure(Value, forbid_unknown_fields=True):
    """What to erase: a document, by its id, file name or title (a deleted one by its id), or a user, with all that the
    user has stored and asked."""

    document: Name | None = None
    user: Name | None = None


class ErasedFrom(Value):
    """How much a store has removed in the passes that an erasure was part of."""

    store: str
    removed: int


class ErasureView(Value):
    """An erasure. `due`: no pass has run. `settling`: one has, and a second one at `complete_by` erases what questions
    that ran then may have written. `failed`: `error` says which store could not be erased; it is tried again. `backups`
    were made before and are still there: delete them, or make them again. `warning`, only when it is requested: the
    records know no user of that name."""

    id: str
    what: Literal["document", "collection", "user"]
    documents: int
    state: Literal["due", "settling", "failed", "complete"]
    requested_at: datetime
    due_at: datetime
    complete_by: datetime
    completed_at: datetime | None
    error: str | None
    erased: list[ErasedFrom]
    backups: list[str]
    warning: str | None = None


class ErasureList(Value):
    erasures: list[ErasureView]


@dataclass(frozen=True)
class ErasuresSurface:
    """Requests, lists and shows erasures. Deleting a document requests one as well, for later."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        identify, path = self.access.signed_in_operator, "/v1/erasures"
        at = partial(operation, scope="admin", identify=identify, errors=(403,))
        return [
            at("GET", path, "list_erasures", "List the latest erasures", self._erasures, ErasureList),
            at(
                *("POST", path, "erase", "Erase a document or a user everywhere", self._erase, ErasureView),
                request_type=NewErasure,
                statuses={202: "The erasure; its first pass begins within seconds."},
            ),
            at("GET", f"{path}/{{erasure}}", "get_erasure", "Get an erasure", self._erasure, ErasureView),
        ]

    async def _erasures(self, call: Call[None]) -> ErasureList:  # noqa: ARG002
        found = await (await self.anabranch.knowledge()).erasures(MAX_LISTED)
        return ErasureList(erasures=[await self._view(one) for one in found])

    async def _erase(self, call: Call[NewErasure]) -> ErasureView:
        request = call.request
        knowledge = await self.anabranch.knowledge()
        requested, warning = await knowledge.erase(document=request.document, user=request.user)
        return msgspec.structs.replace(await self._view(requested), warning=warning)

    async def _erasure(self, call: Call[None]) -> ErasureView:
        return await self._view(await (await self.anabranch.knowledge()).erasure(call.params["erasure"]))

    async def _view(self, one: Erasure) -> ErasureView:
        backups = await (await self.anabranch.knowledge()).backups_before(one.requested_at)
        return ErasureView(
            id=one.id,
            what=one.what,
            documents=len(one.subject.documents),
            state=one.state,
            requested_at=utc(one.requested_at),
            due_at=utc(one.due_at),
            complete_by=utc(one.complete_by),
            completed_at=None if one.completed_at is None else utc(one.completed_at),
            error=one.error,
            erased=[ErasedFrom(store=store, removed=removed) for store, removed in one.erased],
            backups=[str(path) for path in backups],
        )
