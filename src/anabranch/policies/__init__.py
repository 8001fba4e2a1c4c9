"""Policies around upstream calls and questions: circuit breaker, retry, hedge, admission, rate limit, cache."""
