"""What a caller may still ask, and when it may ask again, as headers."""

import math

from anabranch.app.policies import RateLimitExceeded
from anabranch.domain.errors import AnabranchError, StreamUnavailable
from anabranch.domain.model import Allowance
from anabranch.entrypoints.http.asgi import Headers

EXPOSED = [
    "Retry-After",
    "RateLimit-Limit",
    "RateLimit-Remaining",
    "RateLimit-Reset",
    "Stream-Id",
    "Preference-Applied",
]
RETRY_AFTER_S = 5
# The log is there again as soon as Redis is, or as another worker has taken over.
STREAM_RETRY_AFTER_S = 1


def left(allowance: Allowance | None) -> Headers:
    if allowance is None:
        return ()
    numbers = (allowance.limit, allowance.remaining, math.ceil(allowance.reset_s))
    return [
        (b"ratelimit-%b" % name, str(number).encode())
        for name, number in zip((b"limit", b"remaining", b"reset"), numbers, strict=True)
    ]


def refused(error: AnabranchError, status: int) -> Headers:
    """When to come back, for those who were turned away."""
    if status not in (429, 503):
        return ()
    usual = STREAM_RETRY_AFTER_S if isinstance(error, StreamUnavailable) else RETRY_AFTER_S
    again = (b"retry-after", str(error.details.get("retry_after_s", usual)).encode())
    return [again, *left(error.allowance if isinstance(error, RateLimitExceeded) else None)]
