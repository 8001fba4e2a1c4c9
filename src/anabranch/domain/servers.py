"""MCP servers as the operator configures them, and how they are doing."""

from collections.abc import Mapping
from typing import Any, Literal

from anabranch.domain.model import Value
from anabranch.domain.ranking import NEUTRAL, Weights

ServerState = Literal["disabled", "idle", "connecting", "ready", "failed"]


# Under which a call says how many aggregators it has come through; one that has come through more asks no further.
HOPS = "anabranch/hops"
MAX_HOPS = 3


class McpServer(Value):
    """An entry of `mcpServers:`: a command that is run, or a URL. `tool` is the one that is asked, `query_argument`
    where the question goes, `arguments` what else it is given each time, and `result_path` where in its reply the
    results stand; whatever is not given is found out. `description` says what it is for, in the operator's words."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    tool: str | None = None
    query_argument: str | None = None
    arguments: Mapping[str, Any] = {}
    result_path: str | None = None
    reputation: float = NEUTRAL
    enabled: bool = True
    description: str | None = None

    def __repr__(self) -> str:
        return f"McpServer({self.name!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("name", self.name)]


class ServerRule(Value):
    """Questions in which `pattern` is found go to these servers."""

    pattern: str
    servers: tuple[str, ...]


class Aggregation(Value):
    """The `aggregator:` block: spec 3's, and the half-life of freshness."""

    enabled: bool = True
    default_max_results: int = 30
    server_timeout_s: float = 3.0
    total_timeout_s: float = 5.0
    dedup_threshold: float = 0.8
    freshness_half_life_days: float = 90.0
    server_rules: tuple[ServerRule, ...] = ()
    ranking_weights: Weights = Weights()


class ServerHealth(Value):
    """How one server is doing. `chosen` says how its tool was found, `error` why it is not ready or what its last call
    failed of; `reconnects` counts how often its connection was made again."""

    name: str
    state: ServerState
    transport: Literal["stdio", "http"]
    protocol: str | None = None
    implementation: str | None = None
    tool: str | None = None
    query_argument: str | None = None
    chosen: str | None = None
    error: str | None = None
    calls: int = 0
    failures: int = 0
    latency_ms: int | None = None
    reconnects: int = 0
    breaker: str = "closed"
    description: str | None = None
