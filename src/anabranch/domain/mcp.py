"""MCP servers as the operator configures them, and how they are doing."""

from collections.abc import Mapping
from typing import Any, Literal

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Status, Value
from anabranch.domain.ranking import NEUTRAL, Breakdown, Weights

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


MAX_QUERY = 10_000
FEWEST, MOST = 10, 100


class AggregatorQuery(Value):
    """`max_results` None is as configured. `servers` None are those that the rules choose, an empty list is all."""

    query_text: str
    max_results: int | None = None
    servers: tuple[str, ...] | None = None
    request_id: str | None = None


class ResultContent(Value):
    title: str
    text: str
    url: str | None = None
    date: str | None = None


class ServerResult(Value):
    """One result of a server; `timestamp` is when it was there, `response_time_ms` how long the server took."""

    server_name: str
    content: ResultContent
    response_time_ms: int
    timestamp: str
    error: str | None = None


class RankedResult(Value):
    """`score_breakdown` has each part from 0 to 1; `weighted_parts`, times the weights, sum to the score."""

    rank: int
    relevance_score: float
    score_breakdown: Breakdown
    weighted_parts: Breakdown
    server_result: ServerResult


class ServerReport(Value):
    """What became of one server that was asked."""

    server_name: str
    status: Status
    response_time_ms: int
    results: int
    error: str | None = None


class AggregationMetadata(Value):
    """`dedup_complete` is false where so much and so long came back that not all could be compared with all: then the
    count is too high, if anything."""

    request_id: str
    timestamp: str
    servers_queried: int
    servers_succeeded: int
    total_results_raw: int
    total_results_dedup: int
    dedup_complete: bool
    results_returned: int
    processing_time_ms: int
    server_diversity: float
    ranking_weights: Weights
    servers: tuple[ServerReport, ...]


class AggregatedResponse(Value):
    results: tuple[RankedResult, ...]
    metadata: AggregationMetadata


class AggregatorError(AnabranchError):
    """Spec 3's four; `fields` are what each of them carries."""

    name = "AggregatorError"

    def __init__(self, message: str, **fields: str | int | list[str]) -> None:
        super().__init__(message)
        self.fields = fields


class AllServersFailed(AggregatorError):
    """`attempted` servers and, in the same order, their `errors`."""

    code, name = "all_servers_failed", "AllServersFailed"


class InvalidQuery(AggregatorError):
    """The `query` and the `reason`."""

    code, name = "invalid_query", "InvalidQuery"


class TimedOut(AggregatorError):
    """`elapsed_ms` and `limit_ms`: none of the servers answered in time."""

    code, name = "timeout", "Timeout"


class ConfigError(AggregatorError):
    """The `field` and the `reason`."""

    code, name = "config_error", "ConfigError"
