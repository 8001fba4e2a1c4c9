"""The nodes that share the records, as operators see them; where the records are in a data folder, the one node."""

import socket
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Literal

from msgspec import Meta

from anabranch.app.records import folder_of, node_of
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import Conflict, NotFound
from anabranch.domain.model import Value
from anabranch.knowledge.records import audit, nodes
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.nodes import LEASE_S, Cluster, Node

# The id of the node whose records are in its own data folder.
ONLY_NODE = "local"


class ClusterNode(Value):
    """A node: a data folder with its index, and the servers on it. It is alive if its indexer was heard of in the last
    five seconds, and the first one that is alive leads: it does what one does for all."""

    id: str
    name: Annotated[str, Meta(description="The name of its machine")]
    version: str
    started_at: Annotated[datetime | None, Meta(description="When its indexer began; null if that is not known")]
    seen_at: Annotated[datetime | None, Meta(description="When it was heard of last; null if it has stopped")]
    age_s: Annotated[float | None, Meta(description="How long ago that was")]
    is_alive: bool
    leads: bool
    is_this: Annotated[bool, Meta(description="Whether it is the node that answers")]
    behind: Annotated[int, Meta(description="How many changes of the records its index does not have yet")]
    erased_pass: Annotated[int, Meta(description="The last pass of erasures of which its index holds nothing")]


class ClusterRecords(Value):
    """Where the records are. While the database cannot be reached, nothing else is known."""

    kind: Literal["sqlite", "postgres"]
    is_reachable: bool
    server_version: str | None = None


class ClusterState(Value):
    """The nodes in the order of their ids, and what they share."""

    records: ClusterRecords
    nodes: tuple[ClusterNode, ...] = ()
    leader: Annotated[str | None, Meta(description="The id of the node that leads")] = None
    head: Annotated[int | None, Meta(description="The number of the newest change of the records")] = None
    last_pass: Annotated[int | None, Meta(description="The last pass of erasures")] = None
    waiting_documents: Annotated[int | None, Meta(description="Documents that are accepted and not ingested yet")] = (
        None
    )


class RemovedNode(Value):
    """A node that was removed, and how many erasures no longer wait for its index."""

    id: str
    name: str
    erasures: int


EMPTY_CLUSTER = Cluster(kind="sqlite", server_version="", nodes=(), head=0, last_pass=0, waiting=0, index_seq=0)
UNREACHABLE_CLUSTER = ClusterState(records=ClusterRecords(kind="postgres", is_reachable=False))


def state_of(settings: Settings, found: Cluster, started_at: float | None, *, is_running: bool) -> ClusterState:
    """The state of all nodes. `started_at` and `is_running` are of this one; where nodes share the records, those say
    more."""
    is_shared = found.kind == "postgres"
    # One index of all nodes, or that of this one.
    shared = None if settings.index_url is None else found.index_seq
    indexed = _indexed(settings) if shared is None else shared
    this = node_of(settings, create=False) if is_shared else ONLY_NODE
    known = found.nodes if is_shared else (_only_node(found, started_at, is_running),)
    leader = found.leader if is_shared else ONLY_NODE if is_running else None
    return ClusterState(
        records=ClusterRecords(kind=found.kind, is_reachable=True, server_version=found.server_version or None),
        nodes=tuple(
            ClusterNode(
                id=one.id,
                name=one.name,
                version=one.version,
                started_at=_moment(one.started_at),
                seen_at=_moment(one.seen_at),
                age_s=round(one.age_s, 1) if one.seen_at else None,
                is_alive=one.is_alive,
                leads=one.id == leader,
                is_this=one.id == this,
                # The node said so before a command of this folder has indexed more.
                behind=max(0, found.head - (indexed if shared is not None or one.id == this else one.seq)),
                erased_pass=one.erased_pass,
            )
            for one in known
        ),
        leader=leader,
        head=found.head,
        last_pass=found.last_pass,
        waiting_documents=found.waiting,
    )


def _indexed(settings: Settings) -> int:
    """The last change that the index in the data folder includes."""
    from anabranch.knowledge.index.manifest import Generations  # noqa: PLC0415  a server without collections needs none

    return Generations(folder_of(settings) / "index").current().seq


def _only_node(found: Cluster, started_at: float | None, is_running: bool) -> Node:
    return Node(
        id=ONLY_NODE,
        name=socket.gethostname(),
        version=version("anabranch"),
        started_at=started_at or 0.0,
        seen_at=time.time() if is_running else 0.0,
        seq=0,
        erased_pass=found.last_pass,
        age_s=0.0 if is_running else LEASE_S,
    )


def remove_node(db: Session, name: str) -> RemovedNode:
    """Forget a node that will not come back, by its id or name: nothing waits for it any more. Conflict if it is alive,
    or if several have the name."""
    known = nodes.listed(db)
    found = [one for one in known if one.id == name] or [one for one in known if one.name == name]
    if not found:
        raise NotFound(f"There is no node {name!r}; list them with: anabranch cluster")
    if len(found) > 1:
        raise Conflict(f"Several nodes are named {name!r}: {', '.join(one.id for one in found)}. Name one by its id.")
    (node,) = found
    if node.is_alive:
        raise Conflict(f"The node {node.name} ({node.id}) is alive. Stop its server first.")
    erasures = nodes.unfinished_erasures(db, node)
    nodes.remove(db, node.id)
    entry = AuditEntry(action="node.removed", object=f"node:{node.id}", name=node.name, details={"erasures": erasures})
    audit.append(db, entry)
    return RemovedNode(id=node.id, name=node.name, erasures=erasures)


def _moment(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(round(seconds), UTC) if seconds else None
