"""The nodes that share the records: which of them are alive, and how far each has come."""

from collections.abc import Sequence
from typing import Literal

from anabranch.domain.model import Value
from anabranch.knowledge.records import changes, index_position
from anabranch.knowledge.records.database import ResultRow, Session

# A node says this often that it is alive; one that has not for the time of the lease gives its work back.
BEAT_S = 1.0
LEASE_S = 5.0
# One that was not heard of for so long is forgotten, unless something is to be erased from its index.
FORGOTTEN_S = 86_400.0


class Node(Value):
    """A node as it last said. `seq` is the change up to which it has an index, `erased_pass` the last erasure of which
    its index holds nothing; `age_s` is how long ago that was."""

    id: str
    name: str
    version: str
    started_at: float
    seen_at: float
    seq: int
    erased_pass: int
    age_s: float = 0.0

    @property
    def is_alive(self) -> bool:
        return self.age_s < LEASE_S


class Cluster(Value):
    """The nodes in the order of their ids, with what they share, at one moment: the database and its version, the
    newest change, the last pass of erasures, and how many documents wait to be ingested."""

    kind: Literal["sqlite", "postgres"]
    server_version: str
    nodes: tuple[Node, ...]
    head: int
    last_pass: int
    waiting: int
    # The last change that an index outside of the data folders includes.
    index_seq: int

    @property
    def leader(self) -> str | None:
        return _leader(self.nodes)


def cluster(db: Session) -> Cluster:
    version = "SHOW server_version" if db.kind == "postgres" else "SELECT sqlite_version()"
    waiting = "SELECT count(*) FROM items WHERE status IN ('pending', 'processing')"
    return Cluster(
        kind=db.kind,
        server_version=str(db.execute(version).fetchone()[0]).partition(" ")[0],
        nodes=tuple(listed(db)),
        head=changes.state(db).newest,
        last_pass=int(db.execute("SELECT coalesce(max(pass), 0) FROM erasures").fetchone()[0]),
        waiting=int(db.execute(waiting).fetchone()[0]),
        index_seq=0 if (index := index_position.current(db)) is None else index.seq,
    )


def beat(db: Session, node: Node) -> None:
    """Record that a node is alive. The time is the database's, because the clocks of nodes differ."""
    values = (node.id, node.name, node.version, node.started_at, db.now(), node.seq, node.erased_pass)
    db.execute(
        "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET name = excluded.name, "
        "version = excluded.version, started_at = excluded.started_at, seen_at = excluded.seen_at, "
        "seq = excluded.seq, erased_pass = excluded.erased_pass",
        values,
    )


def listed(db: Session) -> list[Node]:
    """All nodes, in the order of their ids."""
    now = db.now()
    return [_node(row, now) for row in db.execute("SELECT * FROM nodes ORDER BY id")]


def leads(db: Session, node: str) -> bool:
    """Whether a node does what one of them does for all: it is the first that is alive. Two may think so for a moment,
    so what they do must be right also if it is done twice."""
    return _leader(listed(db)) in (None, node)


def _leader(nodes: Sequence[Node]) -> str | None:
    return next((one.id for one in nodes if one.is_alive), None)


def leave(db: Session, node: str) -> None:
    """Record that a node has stopped: others need not wait for its lease to end."""
    db.execute("UPDATE nodes SET seen_at = 0 WHERE id = ?", (node,))


def remove(db: Session, node: str) -> bool:
    """Forget a node that will not come back; False if there is none of this id."""
    return db.execute("DELETE FROM nodes WHERE id = ?", (node,)).rowcount == 1


def forget_gone(db: Session) -> None:
    """Forget nodes that were not heard of for long and have nothing to erase."""
    db.execute(
        "DELETE FROM nodes WHERE seen_at < ? AND erased_pass >= (SELECT coalesce(max(pass), 0) FROM erasures)",
        (db.now() - FORGOTTEN_S,),
    )


def not_erased(db: Session, node: str, number: int) -> Sequence[Node]:
    """The other nodes whose index may still hold what was erased in a pass."""
    return [one for one in listed(db) if one.id != node and one.erased_pass < number]


def unfinished_erasures(db: Session, node: Node) -> int:
    """How many erasures wait for a node: its index may still hold what they erase."""
    query = "SELECT count(*) FROM erasures WHERE completed_at IS NULL AND pass > ?"
    return int(db.execute(query, (node.erased_pass,)).fetchone()[0])


def _node(row: ResultRow, now: float) -> Node:
    return Node(
        id=row["id"],
        name=row["name"],
        version=row["version"],
        started_at=row["started_at"],
        seen_at=row["seen_at"],
        seq=row["seq"],
        erased_pass=row["erased_pass"],
        age_s=max(0.0, now - row["seen_at"]),
    )
