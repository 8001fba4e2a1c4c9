"""The state of the cluster under /v1/cluster, for operators."""

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anabranch.app.anabranch import Anabranch
from anabranch.app.cluster import EMPTY_CLUSTER, UNREACHABLE_CLUSTER, ClusterState, state_of
from anabranch.app.records import is_unreachable
from anabranch.domain.errors import AnabranchError
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.operations import Call, Operation
from anabranch.entrypoints.http.v1_operations import operation

# A database that does not answer in this time cannot be reached.
PATIENCE_S = 3.0


@dataclass(frozen=True)
class ClusterSurface:
    """Operators read which nodes share the records, and how far each has come."""

    anabranch: Anabranch
    access: Access
    started_at: float = field(default_factory=time.time)

    def operations(self) -> list[Operation[Any]]:
        return [
            operation(
                *(
                    "GET",
                    "/v1/cluster",
                    "get_cluster",
                    "Get the nodes that share the records",
                    self._state,
                    ClusterState,
                ),
                scope="admin",
                identify=partial(self.access.operator, "the cluster"),
                errors=(403,),
            )
        ]

    async def _state(self, _call: Call[None]) -> ClusterState:
        settings, knowledge = self.anabranch.settings, self.anabranch.knowledge
        found = EMPTY_CLUSTER
        try:
            if knowledge.exists:
                async with asyncio.timeout(PATIENCE_S if knowledge.is_remote else None):
                    found = await (await knowledge()).cluster()
        except TimeoutError:
            return UNREACHABLE_CLUSTER
        except AnabranchError as error:
            if not is_unreachable(error):
                raise
            return UNREACHABLE_CLUSTER
        return state_of(settings, found, self.started_at, is_running=True)
