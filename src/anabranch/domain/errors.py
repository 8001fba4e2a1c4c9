"""The tree of errors, each with a stable code; each dialect renders them.

AnabranchError
├── ConfigurationError      a setting or the configuration file is wrong; the start stops
├── InvalidQuestion         the request cannot be understood or is over a limit
├── Unauthorized            no key, or one that is not known
├── Forbidden               the caller sees it but may not change it
├── NotFound                it does not exist, or not for this caller
├── Conflict                something of that name exists already
├── RateLimited             the caller has asked too often; `details` say when it may ask again
│   └── LimitReached        the caller holds all that it may of something; `details` say of what
├── QuotaReached            the caller stores all that it may of something; `details` say of what
├── Overloaded              more questions are running and waiting than the bounds allow
├── ShuttingDown            no new question is accepted, or a running one was ended by the shutdown
├── Cancelled               all listeners have disconnected
├── HubFailed               the hub cannot be reached, so a name cannot be resolved
├── DeadlineExceeded        the question's total time ran out
├── RetrievalTimedOut       none of the sources answered in time, where that is an error
├── GenerationFailed        the model refused, failed, or sent an unusable reply
│   ├── GenerationTimedOut  the model took too long
│   ├── ModelNotCalled      its circuit breaker is open
│   └── EmptyReply          its reply has no text
├── IndexFailed             OpenSearch cannot be reached, or refuses a request
├── EmbeddingFailed         the embedding server refused, failed, or sent an unusable reply
├── RerankFailed            the same for a reranker; a search continues without it
├── StreamUnavailable       the shared event log is unreachable, so no stream can be read or started
├── StreamFull              a stream has reached its size limit
│   └── StreamsFull         this process has reached its limit of streams; a retry can help
├── LeaseLost               another worker owns this stream, or has ended it
├── RecordingError          a run cannot be recorded, or a recording cannot be read
├── NotRecorded             a replay needs what the recording does not have
├── InternalError           a bug in Anabranch
└── UpstreamError           a call to another machine failed; sources and models convert it
    └── UpstreamTimedOut    it did not answer in time

GenerationFailed and UpstreamError also have a `FailureKind` and the `Retry-After` of the upstream, for retries and
circuit breakers; clients do not see them.
"""

from enum import Enum
from typing import Literal

OUT_OF_TIME = "The question's total time ran out before the answer was complete (AGGREGATOR_TOTAL_TIMEOUT)."


class AnabranchError(Exception):
    code = "internal_error"

    def __init__(self, message: str, **details: str | int) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class FailureKind(Enum):
    """The kind of a failed upstream call: whose failure it was, and whether a retry can help."""

    REQUEST = "the request was refused or could not be sent; a retry cannot help"
    BUSY = "the upstream is busy; a retry can help"
    UNUSABLE = "the upstream sent an unusable reply; a retry cannot help"
    DOWN = "the upstream failed; a retry can help"

    @property
    def fault(self) -> bool:
        """The upstream failed, not the request."""
        return self is FailureKind.UNUSABLE or self is FailureKind.DOWN

    @property
    def temporary(self) -> bool:
        return self is FailureKind.BUSY or self is FailureKind.DOWN


class UpstreamFailure(AnabranchError):
    """The base of GenerationFailed and UpstreamError. By default the failure is not the upstream's fault."""

    def __init__(
        self,
        message: str,
        failure_kind: FailureKind = FailureKind.REQUEST,
        wait_s: float | None = None,
        /,
        **details: str | int,
    ) -> None:
        super().__init__(message, **details)
        self.failure_kind = failure_kind
        self.wait_s = wait_s


class ConfigurationError(AnabranchError):
    code = "configuration_error"


class InvalidQuestion(AnabranchError):
    code = "invalid_request"


class Unauthorized(AnabranchError):
    code = "unauthorized"


class Forbidden(AnabranchError):
    code = "forbidden"


class QuotaReached(Forbidden):
    pass


class NotFound(AnabranchError):
    code = "not_found"


class Conflict(AnabranchError):
    code = "conflict"


class RateLimited(AnabranchError):
    code = "rate_limited"


class LimitReached(RateLimited):
    pass


class Overloaded(AnabranchError):
    code = "overloaded"


class ShuttingDown(AnabranchError):
    code = "shutting_down"


class Cancelled(AnabranchError):
    code = "cancelled"


class HubFailed(AnabranchError):
    code = "hub_failed"


class DeadlineExceeded(AnabranchError):
    code = "deadline_exceeded"


class RetrievalTimedOut(AnabranchError):
    code = "retrieval_timeout"


# Why a model did not answer: a stable code for clients and metrics.
GenerationReason = Literal["timeout", "circuit_open", "empty", "refused", "busy", "unusable", "unavailable"]
REASONS: dict[FailureKind, GenerationReason] = {
    FailureKind.REQUEST: "refused",
    FailureKind.BUSY: "busy",
    FailureKind.UNUSABLE: "unusable",
    FailureKind.DOWN: "unavailable",
}


class GenerationFailed(UpstreamFailure):
    """`started`: the failure came after the first part of the answer. `known_reason` is the reason, if the kind of the
    failure does not tell it."""

    code = "generation_failed"
    started = False
    known_reason: GenerationReason | None = None

    @property
    def reason(self) -> GenerationReason:
        return self.known_reason or REASONS[self.failure_kind]


class GenerationTimedOut(GenerationFailed):
    known_reason = "timeout"


class ModelNotCalled(GenerationFailed):
    known_reason = "circuit_open"


class EmptyReply(GenerationFailed):
    known_reason = "empty"


class EmbeddingFailed(AnabranchError):
    code = "embedding_failed"


class RerankFailed(AnabranchError):
    code = "rerank_failed"


class StreamUnavailable(AnabranchError):
    code = "stream_unavailable"


class StreamFull(AnabranchError):
    code = "stream_full"


class StreamsFull(StreamFull):
    code = "streams_full"


class LeaseLost(AnabranchError):
    code = "worker_lost"


class RecordingError(AnabranchError):
    code = "recording_error"


class NotRecorded(AnabranchError):
    code = "not_recorded"


class InternalError(AnabranchError):
    code = "internal_error"


class IndexFailed(AnabranchError):
    """An index outside of the data folder cannot be reached, or refuses a request."""

    code = "service_unavailable"


class UpstreamError(UpstreamFailure):
    """`address` is the host and the port that failed. The message does not have it: who may not know what the operator
    configured gets the message alone."""

    code = "upstream_error"

    def __init__(
        self,
        message: str,
        failure_kind: FailureKind = FailureKind.REQUEST,
        wait_s: float | None = None,
        /,
        address: str = "",
        **details: str | int,
    ) -> None:
        super().__init__(message, failure_kind, wait_s, **details)
        self.address = address

    def described(self, *, with_address: bool) -> str:
        """The message; for those who may know it with the address, after a colon, where logs cut messages off."""
        return f"{self.message.removesuffix('.')}: {self.address}." if with_address and self.address else self.message


class UpstreamTimedOut(UpstreamError):
    pass
