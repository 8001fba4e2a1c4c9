"""Before a server starts: what cannot work is a sentence now, and not a server that fails later."""

from anabranch.app import knowledge
from anabranch.runtime.lines import Log
from anabranch.runtime.settings import Settings

NO_STREAMS = (
    "Several workers without a Redis can keep neither planner steps nor resumable answers: set AGGREGATOR_REDIS_URL "
    "or serve with one worker."
)

TO_EVERYBODY = (
    "Everybody who can reach the chat surface, also web pages of other origins, may have these addresses asked "
    "(AGGREGATOR_ENDPOINT_ALLOWLIST_PUBLIC)."
)


def check(settings: Settings, log: Log) -> None:
    knowledge.check(settings)
    if settings.redis_url is not None:
        from anabranch.runtime.redis import Connections  # noqa: PLC0415  most have no Redis

        Connections(settings.redis_url)
    if settings.otlp_headers is not None:
        from anabranch.runtime.traces import headers  # noqa: PLC0415  most have no collector

        headers(settings.otlp_headers)
    if not settings.streams_kept:
        log.warning("streams_refused", workers=settings.workers, hint=NO_STREAMS)
    if settings.workers > 1 and settings.redis_url is None and settings.rate_limit:
        log.warning("limits_not_shared", workers=settings.workers, hint="AGGREGATOR_REDIS_URL is not set")


def announce(settings: Settings, log: Log) -> None:
    """Once the server has started: who may have private addresses asked."""
    if settings.endpoint_allowlist_public and settings.endpoint_allowlist:
        log.warning(
            "private_addresses_allowed", addresses=settings.endpoint_allowlist, to="everybody", hint=TO_EVERYBODY
        )
    elif settings.endpoint_allowlist:
        log.info("private_addresses_allowed", addresses=settings.endpoint_allowlist, to="the operator, keys and tokens")
