"""MCP servers: configuration and health; spec 3's query, response and errors."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Status, Value
from anabranch.domain.ranking import NEUTRAL, Breakdown, Weights

ServerState = Literal["disabled", "idle", "connecting", "ready", "failed"]


# The request metadata key for the number of aggregators that a call has passed; beyond MAX_HOPS it is not forwarded.
HOPS = "anabranch/hops"
MAX_HOPS = 3


# In texts of `arguments`: {query} is the question, {{name}} a literal {name}. A ${name} is left alone.
QUERY = "query"
PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w{0,63})\}\}|(?<![${])\{([A-Za-z_]\w{0,63})\}")


def placeholders(value: object) -> Iterator[str]:
    """The names of the placeholders in the texts of a JSON value."""
    match value:
        case str():
            yield from (found[2] for found in PLACEHOLDER.finditer(value) if found[2])
        case Mapping():
            for one in value.values():
                yield from placeholders(one)
        case list() | tuple():
            for one in value:
                yield from placeholders(one)


def filled(value: Any, query: str) -> Any:
    """A JSON value with the question in place of {query}."""

    def fill(found: re.Match[str]) -> str:
        return f"{{{found[1]}}}" if found[1] else query if found[2] == QUERY else found[0]

    match value:
        case str():
            return PLACEHOLDER.sub(fill, value)
        case Mapping():
            return {name: filled(one, query) for name, one in value.items()}
        case list() | tuple():
            return [filled(one, query) for one in value]
        case _:
            return value


class McpServer(Value):
    """An entry of `mcpServers:`: a command to run, or a URL. `tool` is called with `arguments`, and with the question
    in `query_argument` or in place of {query} in the arguments; `result_path` locates the results in its reply. What is
    not configured is detected. `description` is shown to clients."""

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
    """Routes questions that match `pattern` to these servers."""

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
    """The health of one server. `chosen` says how its tool was selected, `error` why it is not ready or why its last
    call failed."""

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


FEWEST, MOST = 10, 100


class AggregatorQuery(Value):
    """`max_results` None is the configured default. `servers` None applies the routing rules; an empty list is all."""

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
    """One result of a server; `timestamp` is when the server replied, after `response_time_ms`."""

    server_name: str
    content: ResultContent
    response_time_ms: int
    timestamp: str
    error: str | None = None


class RankedResult(Value):
    """`score_breakdown` has each part from 0 to 1; `weighted_parts` sum to the score."""

    rank: int
    relevance_score: float
    score_breakdown: Breakdown
    weighted_parts: Breakdown
    server_result: ServerResult


class ServerReport(Value):
    """The outcome of one queried server."""

    server_name: str
    status: Status
    response_time_ms: int
    results: int
    error: str | None = None


class AggregationMetadata(Value):
    """`dedup_complete` is false if there were too many or too long results to compare all pairs; then duplicates may
    remain in the count."""

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
    """The base of spec 3's four errors; `fields` are their data."""

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
