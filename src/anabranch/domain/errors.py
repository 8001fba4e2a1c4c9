"""One tree of errors, each with a stable code; how a dialect renders them is its own affair.

AnabranchError
├── ConfigurationError      a setting or the configuration file is wrong; the start stops
├── InvalidQuestion         the request cannot be understood or is over a limit
├── Unauthorized            no key, or one that is not known
├── Forbidden               the caller sees it but may not change it
├── NotFound                it is not there, or not for this caller
├── Conflict                something of that name is there already
├── RateLimited             the caller has asked too often; `details` say when it may ask again
├── Overloaded              more questions are running and waiting than the bounds allow
├── ShuttingDown            no new question is taken, or a running one was ended by the shutdown
├── Cancelled               everybody who listened has gone
├── HubFailed               the hub cannot be asked, so a name stays unknown
├── DeadlineExceeded        the question's total time ran out
├── RetrievalTimedOut       none of the sources answered in time, where that is an error
├── GenerationFailed        the model refused, failed, or said something unusable
│   └── GenerationTimedOut  the model took too long
├── EmbeddingFailed         the embedding model's server refused, failed, or said something unusable
├── RerankFailed            the same of a reranker; a search goes on without it
├── StreamUnavailable       the log that the workers share is out of reach, so a stream can be neither read nor begun
├── StreamFull              a stream holds all that it may
│   └── StreamsFull         this process holds all the streams that it may; that passes
├── LeaseLost               another worker holds this stream, or has ended it
├── InternalError           our own fault
└── UpstreamError           a call to another machine failed; sources and models turn it into their own words
    └── UpstreamTimedOut    it did not answer in time

GenerationFailed and UpstreamError also say what kind of `Trouble` it was, and how long the other side asks to be left
alone: that is for those who decide whether to ask again, not for clients.
"""

from enum import Enum


class AnabranchError(Exception):
    code = "internal_error"

    def __init__(self, message: str, **details: str | int) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class Trouble(Enum):
    """What a failed call to another machine says: whose failure it was, and whether asking again can help."""

    REQUEST = "the request was refused or could not be sent; it would be again"
    BUSY = "nobody is at fault, and it may pass"
    UNUSABLE = "the upstream replied with what cannot be used, and would again"
    DOWN = "the upstream failed, and that may pass"

    @property
    def fault(self) -> bool:
        """The upstream failed, not the request."""
        return self is Trouble.UNUSABLE or self is Trouble.DOWN

    @property
    def may_pass(self) -> bool:
        return self is Trouble.BUSY or self is Trouble.DOWN


class Elsewhere(AnabranchError):
    """What GenerationFailed and UpstreamError share. What nobody has marked is not blamed on the other machine."""

    def __init__(
        self, message: str, trouble: Trouble = Trouble.REQUEST, wait_s: float | None = None, /, **details: str | int
    ) -> None:
        super().__init__(message, **details)
        self.trouble = trouble
        self.wait_s = wait_s


class ConfigurationError(AnabranchError):
    code = "configuration_error"


class InvalidQuestion(AnabranchError):
    code = "invalid_request"


class Unauthorized(AnabranchError):
    code = "unauthorized"


class Forbidden(AnabranchError):
    code = "forbidden"


class NotFound(AnabranchError):
    code = "not_found"


class Conflict(AnabranchError):
    code = "conflict"


class RateLimited(AnabranchError):
    code = "rate_limited"


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


class GenerationFailed(Elsewhere):
    code = "generation_failed"


class GenerationTimedOut(GenerationFailed):
    pass


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


class InternalError(AnabranchError):
    code = "internal_error"


class UpstreamError(Elsewhere):
    code = "upstream_error"


class UpstreamTimedOut(UpstreamError):
    pass
