"""What the `aggregate` tool is asked, and what it answers: spec 3's query and response, times in milliseconds."""

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Status, Value
from anabranch.domain.ranking import Breakdown, Weights

MAX_QUERY = 10_000
FEWEST, MOST = 10, 100


class AggregatorQuery(Value):
    """`max_results` None is as configured. `servers` None are those that the rules choose, an empty list is all."""

    query_text: str
    max_results: int | None = None
    servers: tuple[str, ...] | None = None
    request_id: str | None = None


class Content(Value):
    title: str
    text: str
    url: str | None = None
    date: str | None = None


class ServerResult(Value):
    """One result of a server; `timestamp` is when it was there, `response_time_ms` how long the server took."""

    server_name: str
    content: Content
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
